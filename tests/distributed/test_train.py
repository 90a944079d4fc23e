"""`python train.py` as a user starts it: runs, interruptions, other layouts, and bad input."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.checkpoints import same_bits, tensors
from tests.shards import write_documents

ROOT = Path(__file__).parents[2]
VOCAB = 64
TINY = [
    "model.model_dim=32",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "model.ffn_dim=48",
    "data.name=tiny",
    f"data.vocab_size={VOCAB}",
    "data.sequence_length=96",
    "train.steps=8",
    "train.global_batch_tokens=384",
    "optimizer.learning_rate=3e-3",
    "optimizer.warmup_steps=2",
    "checkpoint.every=4",
    "checkpoint.keep=0",
    "validation.every=4",
    "logging.peak_flops=1e12",
]


# Lengths of the documents.
CORPORA = {
    "tiny": {"train": [700, 3, 45, 1200, 96, 31], "validation": [150, 80]},
    "short": {"train": [20, 70, 5, 90, 33, 60, 11, 40, 2, 55, 150], "validation": [30, 60]},
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with prepared data under corpora/tiny, in which runs are started."""
    folder = tmp_path_factory.mktemp("workplace")
    generator = torch.Generator().manual_seed(1)
    for name, sides in CORPORA.items():
        corpus = folder / "corpora" / name
        corpus.mkdir(parents=True)
        for part, lengths in sides.items():
            documents = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]
            write_documents(corpus, documents, VOCAB).rename(corpus / part)
    return folder


def command(*overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *TINY, *overrides]


def start(folder: Path, *overrides: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(*overrides), cwd=folder, capture_output=True, text=True, timeout=240)


def succeed(folder: Path, *overrides: str) -> str:
    done = start(folder, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def metrics(folder: Path, run: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]


def column(folder: Path, run: str, key: str) -> list:
    return [row[key] for row in metrics(folder, run) if key in row]


def checkpoint(folder: Path, run: str, step: int) -> Path:
    return folder / "runs" / run / "checkpoints" / f"step_{step:08d}"


@pytest.fixture(scope="module")
def whole(workplace) -> Path:
    """Eight steps without interruption, on a ring of two."""
    succeed(workplace, "run.name=whole", "parallel.sequence=2")
    return workplace


def test_a_run_writes_what_it_promises(whole):
    rows = metrics(whole, "whole")
    assert [row["step"] for row in rows] == list(range(1, 9))
    keys = "step tokens loss learning_rate gradient_norm step_seconds tokens_per_second mfu_causal mfu_noncausal"
    keys += " exchange_wait_seconds data_wait_seconds memory_bytes"
    assert all(set(keys.split()) <= row.keys() for row in rows)
    assert [row["tokens"] for row in rows] == [384 * step for step in range(1, 9)]
    assert len(column(whole, "whole", "validation_loss")) == 2
    assert (whole / "runs/whole/config.yaml").exists() and (whole / "runs/whole/log.txt").exists()
    manifest = json.loads((checkpoint(whole, "whole", 8) / "manifest.json").read_text())
    assert manifest["state"]["cursor"]["tokens"] == 8 * 384


def test_killed_run_resumes_bit_for_bit(whole):
    """Killed after step 5 at the earliest: what follows the checkpoint of step 4 is done again, equally."""
    process = subprocess.Popen(
        command("run.name=killed", "parallel.sequence=2"), cwd=whole, start_new_session=True, stderr=subprocess.DEVNULL
    )
    log, deadline = whole / "runs/killed/metrics.jsonl", time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") >= 5):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(checkpoint(whole, "killed", 8), ignore_errors=True)  # where the kill came late
    succeed(whole, "run.name=killed", "parallel.sequence=2")
    assert column(whole, "killed", "step") == list(range(1, 9))
    for key in ("loss", "gradient_norm", "learning_rate", "validation_loss"):
        assert column(whole, "killed", key) == column(whole, "whole", key), key
    assert (whole / "runs/killed/metrics.before-step-4.jsonl").exists()
    assert same_bits(tensors(checkpoint(whole, "killed", 8)), tensors(checkpoint(whole, "whole", 8)))


@pytest.mark.parametrize(
    "layout", ["parallel.sequence=4", "parallel.tensor=2", "parallel.data=2", "parallel.sequence=1"]
)
def test_resumes_on_another_layout(whole, layout):
    """C083, C084: the same tokens in the same order, and losses within rounding, four steps after the load."""
    name = layout.replace("=", "_")
    target = checkpoint(whole, name, 4)
    shutil.copytree(checkpoint(whole, "whole", 4), target)
    succeed(whole, f"run.name={name}", layout)
    rows, truth = metrics(whole, name), metrics(whole, "whole")[4:]
    assert [row["step"] for row in rows] == [5, 6, 7, 8]
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in truth]
    for key in ("loss", "gradient_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in truth], rel=1e-5), key


STAGED = [
    "data.mixture='tiny:0.75,short:0.25'",
    "data.long=windows",
    "data.short=fit",
    "context=[{tokens:1536,sequence_length:96},{sequence_length:192,rope_theta:2e4}]",
    "checkpoint.every=2",
]


@pytest.fixture(scope="module")
def staged(workplace) -> Path:
    """Eight steps on two corpora, the last four of them on sequences twice as long."""
    said = succeed(workplace, "run.name=staged", *STAGED)
    assert (
        "; 75 % tiny, 2,075 in 6 documents" in said
        and "25 % short" in said
        and "stage 1: 4 of 384 tokens, in sequences of 192" in said
    )
    return workplace


def test_stages_and_mixture(staged):
    rows = metrics(staged, "staged")
    assert [row["sequence_length"] for row in rows] == [96] * 4 + [192] * 4
    assert [row["tokens"] for row in rows] == [384 * step for step in range(1, 9)]
    for row in rows[3::4]:
        parts = row["validation_loss/tiny"], row["validation_loss/short"]
        assert row["validation_loss"] == pytest.approx(0.75 * parts[0] + 0.25 * parts[1], rel=1e-12)
    # The rope of the second stage is another: with a third, what is trained would be.
    shutil.copytree(checkpoint(staged, "staged", 4), checkpoint(staged, "other_rope", 4))
    other = ["context=[{tokens:1536,sequence_length:96},{sequence_length:192,rope_theta:100}]"]
    succeed(staged, "run.name=other_rope", *STAGED, *other)
    assert column(staged, "other_rope", "gradient_norm") != column(staged, "staged", "gradient_norm")[4:]


@pytest.mark.parametrize(
    ("step", "layout"), [(2, "parallel.sequence=2"), (4, "parallel.data=2"), (6, "parallel.tensor=2")]
)
def test_resumes_in_any_stage_on_another_layout(staged, step, layout):
    """C084: before the change of length, at it, and after it: the same tokens, and losses within rounding."""
    name = f"{layout.replace('=', '_')}_{step}"
    shutil.copytree(checkpoint(staged, "staged", step), checkpoint(staged, name, step))
    succeed(staged, f"run.name={name}", layout, *STAGED)
    rows, truth = metrics(staged, name), metrics(staged, "staged")[step:]
    for key in ("step", "tokens", "sequence_length"):
        assert [row[key] for row in rows] == [row[key] for row in truth], key
    for key in ("loss", "gradient_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in truth], rel=1e-5), key


def test_other_data_is_refused_at_resume(staged):
    for override, words in {
        "data.mixture='tiny:0.5,short:0.5'": "data.mixture",
        "data.short=pack": "data.short=fit",
        "train.seed=1": "train.seed=0",
        "context=[{tokens:768,sequence_length:96},{sequence_length:192}]": "'context=[{tokens:1536,sequence_length:96,",
    }.items():
        done = start(staged, "run.name=staged", *STAGED, override, "train.steps=12")
        assert done.returncode == 3 and words in done.stderr, (override, done.stderr)


def test_a_complete_run_says_so_and_goes_on_when_asked(whole):
    output = succeed(whole, "run.name=whole", "parallel.sequence=2")
    assert "complete" in output and "train.steps=" in output
    assert len(metrics(whole, "whole")) == 8
    shutil.copytree(whole / "runs/whole", whole / "runs/longer")
    succeed(whole, "run.name=longer", "parallel.sequence=2", "train.steps=10")
    assert column(whole, "longer", "step") == list(range(1, 11))


def test_data_ranks_and_micro_batches_change_nothing(whole):
    """C036, C037, C057: the same four sequences a step, as one rank's micro-batches, or over two ranks."""
    for name, overrides in {"two": ["parallel.data=2"], "pairs": ["train.micro_batch_size=2"]}.items():
        succeed(whole, f"run.name={name}", *overrides)
        assert column(whole, name, "loss") == pytest.approx(column(whole, "whole", "loss"), rel=1e-5)
        assert column(whole, name, "validation_loss") == pytest.approx(
            column(whole, "whole", "validation_loss"), rel=1e-5
        )


def test_validation_leaves_training_alone(whole):
    """C092: with and without, the losses are the same bits."""
    succeed(whole, "run.name=unwatched", "parallel.sequence=2", "validation.every=0")
    assert column(whole, "unwatched", "loss") == column(whole, "whole", "loss")


def test_started_from_another_runs_checkpoint(whole):
    """The first start takes the given checkpoint; submitted again, the run goes on from its own."""
    given = f"run.resume={checkpoint(whole, 'whole', 4)}"
    succeed(whole, "run.name=branch", given, "train.steps=6", "checkpoint.every=1")
    assert column(whole, "branch", "step") == [5, 6]
    succeed(whole, "run.name=branch", given, "train.steps=7", "checkpoint.every=1")
    assert column(whole, "branch", "step") == [5, 6, 7]
    for wish, words in {
        checkpoint(whole, "branch", 5): "run.resume=auto",
        "atuo": "use auto, never, or the path",
    }.items():
        done = start(whole, "run.name=branch", f"run.resume={wish}", "train.steps=8")
        assert done.returncode == 3 and words in done.stderr


BAD = {
    "mistyped": (["trian.steps=3"], 3, "train.steps"),
    "mistyped_with_plus": (["+model.nope=1"], 3, "model.nope"),
    "unknown_option": (["--steps=5"], 3, "unrecognized arguments: --steps=5"),
    "layout": (["parallel.layout=zigzga"], 3, "zigzag"),
    "heads": (["parallel.tensor=3"], 3, "model.num_heads=4"),
    "batch": (["train.global_batch_tokens=100"], 3, "train.global_batch_tokens=100"),
    "vocabulary": (["model.vocab_size=50"], 3, "model.vocab_size=64"),
    "no_data": (["data.name=absent"], 74, "data.prepare"),
    "many_ranks": (["parallel.sequence=2", "parallel.data=3", "parallel.shard=4"], 3, "parallel.shard=4"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error(workplace, case):
    """C048: one line that names key, value and a legal choice; the right code; nothing made."""
    overrides, code, words = BAD[case]
    began = time.monotonic()
    done = start(workplace, f"run.name=bad_{case}", *overrides)
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 or case == "unknown_option", done.stderr  # argparse shows its usage first
    assert words in lines[-1], done.stderr
    assert not (workplace / "runs" / f"bad_{case}").exists()
    assert time.monotonic() - began < 30


def test_ranks_with_other_command_lines_are_refused(workplace):
    """Not left to wait for each other in groups that differ: the first option that differs is named."""
    store = f"127.0.0.1:{free_port()}".split(":")
    ranks = []
    for rank, axis in enumerate(("parallel.sequence=2", "parallel.tensor=2")):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": store[0], "MASTER_PORT": store[1]}
        env = os.environ | {name: str(value) for name, value in places.items()}
        ranks.append(
            subprocess.Popen(
                command("run.name=bad_ranks", axis), cwd=workplace, env=env, stderr=subprocess.PIPE, text=True
            )
        )
    messages = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [3, 3]
    assert "parallel.sequence=1 on rank 1 but 2 on rank 0" in messages[0] and not messages[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_truncated_shard_is_refused_on_a_ring(workplace):
    """C053: found before the first step, and said once, although every rank meets it."""
    broken = workplace / "corpora" / "broken"
    shutil.copytree(workplace / "corpora" / "tiny", broken)
    tokens = broken / "train" / "tokens.bin"
    os.truncate(tokens, tokens.stat().st_size - 2)
    done = start(workplace, "run.name=bad_shard", "data.name=broken", "parallel.sequence=2")
    assert done.returncode == 74
    assert done.stderr.count("tokens.bin") == 1 and "Traceback" not in done.stderr


def test_another_models_run_folder_is_left_alone(whole):
    """But for signs of life."""

    def times():
        paths = [path for path in (whole / "runs/whole").rglob("*") if path.parent.name != "heartbeat"]
        return {path: path.stat().st_mtime_ns for path in paths}

    before = times()
    done = start(whole, "run.name=whole", "parallel.sequence=2", "model.ffn_dim=64", "train.steps=20")
    assert done.returncode == 3
    assert "model.ffn_dim" in done.stderr and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
    assert times() == before


def test_starting_over_does_not_write_over(whole):
    done = start(whole, "run.name=whole", "parallel.sequence=2", "run.resume=never")
    assert done.returncode == 3 and "run.resume=auto" in done.stderr
