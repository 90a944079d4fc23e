"""`plan.py`: what it prints and writes, and how it ends."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import plan
from training import timeline

ROOT = Path(__file__).parents[2]
MILLION = ["model=8b", "data.sequence_length=1M", "parallel.sequence=32", "cluster=h100_ib400", "train.dtype=bfloat16"]
SMALL = ["model=debug", "parallel.sequence=4", "data.sequence_length=8K"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    try:
        code = plan.main(arguments)
    except SystemExit as leaving:
        code = leaving.code
    said = capsys.readouterr()
    return code, said.out, said.err


def test_answers_without_torch_within_a_second():
    """CPU seconds of a whole process, the better of two: others may use the machine meanwhile."""
    code = f"import sys, plan; code = plan.main({MILLION}); sys.exit(code or 'torch' in sys.modules)"
    seconds = []
    for _ in range(2):
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) < 1


def test_the_page_says_what_one_needs_to_know(capsys):
    code, out, _ = run(capsys, *MILLION)
    assert code == 0
    for words in (
        "8,030,261,248 parameters",
        "32 on 4 nodes of h100_ib400",
        "memory of a rank at its peak",
        "ring buffers",
        "of 76.4 GB",
        "attention backward",
        "tokens/s",
        "% causal",
        "% non-causal",
        "these kernels alone would reach",
        "inside nodes, forward",
        "between nodes, backward",
        "hidden",
        "checkpoint   96.4 GB, written by 4 nodes",
        "FITS",
    ):
        assert words in out, words
    assert "once more" not in out
    assert max(map(len, out.splitlines())) < 160


def test_of_several_stages_the_longest_that_is_reached(capsys):
    code, out, _ = run(capsys, "experiment=8b_stages")
    assert code == 0 and "stage 2: 880 steps, sequences of 1,048,576" in out and "sequences of 1,048,576 a step" in out
    line = next(line for line in out.splitlines() if line.startswith("planned is"))
    overrides = [word.strip("'") for word in line.split() if "=" in word]
    assert overrides[0] == "context=[]" and len(overrides) == 3
    assert run(capsys, "experiment=8b_stages", *overrides)[1] in out  # what it says to write gives the same plan
    code, out, _ = run(capsys, "experiment=8b_stages", "parallel.sequence=4", "parallel.data=8", "train.steps=4096")
    assert code == 0 and "stage 1" not in out and "sequences of 32,768 a step" in out


def test_full_says_that_a_forward_ring_more_is_sent(capsys):
    _, out, _ = run(capsys, *SMALL, "train.recompute=full")
    assert "recompute full sends each layer's forward ring once more" in out
    assert "attention recomputed" in out


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=laptop"],
        ["experiment=7b_256k"],
        ["experiment=8b_1m"],
        ["parallel.sequence=1"],
        ["model=70b", "data.sequence_length=128K", "parallel.sequence=8", "parallel.tensor=8", *MILLION[3:]],
        ["model=8b", "data.sequence_length=256K", "parallel.sequence=8", "parallel.ulysses=4", *MILLION[3:]],
        ["model=debug", "model.attention_pattern='full,window'", "model.attention_window=128", "parallel.sequence=4"],
        ["model=debug", "parallel.sequence=4", "parallel.data=2", "train.global_batch_tokens=64K", "parallel.shard=2"],
    ],
)
def test_all_kinds_of_runs_can_be_planned(capsys, overrides):
    code, out, err = run(capsys, *overrides)
    assert code == 0 and "FITS" in out and not err, out + err


def test_json_has_stable_keys_with_units(capsys, tmp_path):
    path = tmp_path / "new" / "plan.json"
    code, out, _ = run(capsys, *SMALL, "--json", str(path), "--search", "--max-context")
    found = json.loads(path.read_text())
    assert code == 0 and found["fits"] is True and found["refusals"] == []
    assert found["ranks"] == found["data"] * found["sequence"] * found["tensor"] == 4
    assert sum(found["memory"]["causes_bytes"].values()) == pytest.approx(found["memory"]["peak_bytes"])
    exposed = sum(cause["exposed_seconds"] for cause in found["time"]["causes"].values())
    assert found["time"]["step_seconds"] == pytest.approx(exposed)
    assert {"forward", "backward"} == {one["direction"] for one in found["blocks"]}
    assert found["search"]["rows"] and found["search"]["rows"][0]["tokens_per_second"] > 0
    assert found["max_context"]["tokens"] > 8192
    assert "configs fit" in out and "longest sequence" in out
    alone_code, alone, _ = run(capsys, *SMALL, "--json", "-")
    assert alone_code == 0 and json.loads(alone)["memory"] == found["memory"]


def test_a_plan_that_does_not_fit_names_the_nearest_that_does(capsys, tmp_path):
    path = tmp_path / "plan.json"
    given = [*SMALL, "model.num_layers=8", "cluster.block_bytes=1M", "train.recompute=none", "parallel.layout=zigzag"]
    peak = json.loads(run(capsys, *given, "--json", "-")[1])["memory"]["peak_bytes"]
    given.append(f"cluster.memory_bytes={0.95 * peak}")
    code, out, _ = run(capsys, *given, "--json", str(path))
    assert code == 3
    assert "DOES NOT FIT  a rank needs" in out and "nearest that fits" in out
    near = json.loads(path.read_text())["nearest"]
    again, out, _ = run(capsys, *given, *near["arguments"].split())
    assert again == 0 and "FITS" in out


def test_without_any_config_that_fits_it_says_so(capsys):
    code, out, _ = run(capsys, *SMALL, "cluster.memory_bytes=1e3")
    assert code == 3 and "no config fits" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cluster=h101"], "Available options in 'cluster': a100_ib200"),
        (["model=9b"], "Available options in 'model'"),
        (["model.num_layer=2"], "Did you mean model.num_layers?"),
        (["parallel.sequence=4", "--ranks", "6"], "does not make 6 ranks"),
        (["--ranks", "0"], "0 is not a number of ranks: use 1 or more"),
        (["--documents", "64Kx16"], "write it like 16x64K"),
        (["--documents", "64x16K"], "more than data.sequence_length"),
        (["--documents", "1Kx4"], "write it like 4x1K"),
        (["--documents", "9999999999x1"], "are 9999999999 tokens, more than data.sequence_length=8192"),
        (["--documents", "4K", "--max-context"], "leave out --documents"),
        (["--nope"], "--help"),
        (["--ranks", "many"], "--help"),
        (["--documents", "8K,8K"], "more than data.sequence_length=8192"),
        (["--documents", "8Q"], "not a positive number"),
        (["cluster.block_bytes=1K"], "cluster.block_bytes=1024"),
        (["cluster=h100_ib400", "train.dtype=float32"], ""),
    ],
)
def test_bad_input_ends_with_3_and_says_what_to_do(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 3
    assert words in err and "Traceback" not in err
    if not words:
        assert "nearest that fits" in out and "train.dtype=bfloat16 " in out and "% causal" not in out
        assert "REFUSED" in out and "use train.dtype=bfloat16" in out


def test_errors_reach_machines_too(capsys, tmp_path):
    path = tmp_path / "plan.json"
    assert run(capsys, "cluster=h101", "--json", str(path))[0] == 3
    found = json.loads(path.read_text())
    assert found["fits"] is False and "h101" in found["refusals"][0]


def test_a_good_plan_stays_one_where_a_picture_fails(capsys, tmp_path):
    """No ring to draw, a format there is none of, and a folder that cannot be made."""
    file = tmp_path / "file"
    file.write_text("")
    for given, path, ends in (
        (["parallel.sequence=1"], tmp_path / "ring.png", 3),
        (SMALL, tmp_path / "ring.nope", 3),
        (SMALL, file / "ring.png", 74 if find_spec("matplotlib") else 3),
    ):
        code, out, err = run(capsys, *given, "--json", "-", "--max-context", "--plot", str(path))
        found = json.loads(out)
        assert code == ends and "Traceback" not in err
        assert found["fits"] is True and found["refusals"] == [] and found["error"] and found["max_context"]


def test_buffers_beyond_their_budget_lead_to_the_nearest(capsys):
    code, _, err = run(capsys, *SMALL, "parallel.layout=zigzag", "parallel.route=relay", "parallel.buffer_blocks=1")
    assert code == 3 and "parallel.buffer_blocks=1" in err and "nearest that fits: " in err


def test_documents_make_less_work(capsys):
    whole = json.loads(run(capsys, *SMALL, "--json", "-")[1])["time"]
    parts = json.loads(run(capsys, *SMALL, "--json", "-", "--documents", "4K,4x1K")[1])["time"]
    pairs = lambda n: n * (n + 1) / 2  # noqa: E731
    work = lambda lengths: sum(map(pairs, lengths))  # noqa: E731
    saved = work([8192]) - work([4096, 1024, 1024, 1024, 1024])
    assert whole["flops_causal"] - parts["flops_causal"] == pytest.approx(12 * 2 * 128 * saved)
    assert parts["step_seconds"] < whole["step_seconds"]


def test_a_file_that_cannot_be_written_is_input_output():
    started = time.monotonic()
    command = [sys.executable, "plan.py", *SMALL, "--json", "/proc/nowhere/plan.json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 74 and "error:" in ended.stderr and "Traceback" not in ended.stderr
    assert time.monotonic() - started < 60


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="without matplotlib there is no picture")
def test_plot_is_a_picture(capsys, tmp_path):
    path = tmp_path / "ring.png"
    assert run(capsys, *SMALL, "--plot", str(path))[0] == 0
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_plot_without_matplotlib_or_a_ring_says_so(capsys, tmp_path, monkeypatch):
    code, _, err = run(capsys, "parallel.sequence=1", "--plot", str(tmp_path / "ring.png"))
    assert code == 3 and "a ring of one rank" in err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, *SMALL, "--plot", str(tmp_path / "ring.png"))
    assert code == 3 and "pip install matplotlib" in err


def test_ranks_that_are_drawn_stand_at_borders():
    assert timeline.shown(32, 8) == [0, 7, 8, 31]
    assert timeline.shown(2, 2) == [0, 1]
    assert timeline.shown(4, 1) == [0, 1, 3]
    assert timeline.shown(64, 64) == [0, 1, 32, 63]
