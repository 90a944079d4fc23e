"""metrics.jsonl, the console and the wandb mirror, without processes."""

import json
import re
import sys
import types

import pytest
import torch

from conf.compose import compose
from conf.schema import Dtype
from training.metrics import DATA_SHEETS, MetricsLog, cut, duration, line, memory_bytes, peak_flops

KEYS = (
    "step tokens loss learning_rate gradient_norm step_seconds tokens_per_second mfu_causal mfu_noncausal "
    "exchange_wait_seconds data_wait_seconds memory_bytes"
).split()


def row(step, **changes):
    values = dict.fromkeys(KEYS, 0.5) | {"step": step, "tokens": 100 * step, "memory_bytes": 1 << 20}
    return values | changes


def config_of(folder, *overrides):
    return compose([f"run.dir={folder}", "run.name=r", "train.steps=10", *overrides])


def steps_in(path):
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


def test_line_for_people():
    values = row(
        40,
        loss=5.8123,
        gradient_norm=0.712,
        learning_rate=2.9e-4,
        tokens_per_second=3412.4,
        mfu_causal=0.31,
        mfu_noncausal=0.44,
        step_seconds=2.0,
        exchange_wait_seconds=0.04,
        data_wait_seconds=0.002,
    )
    assert line(values, 100, 130) == (
        "step 40/100  loss 5.812  grad 0.71  lr 2.9e-04  3,412 tok/s  MFU 31 % causal / 44 %  "
        "waits: exchange 2 % data 0.1 %  ETA 2m10s"
    )
    assert "  held-out loss 6.100  " in line(values | {"validation_loss": 6.1}, 100, 130)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0s"),
        (59.4, "59s"),
        (60, "1m00s"),
        (3599.6, "1h00m"),
        (3 * 3600 + 65, "3h01m"),
        (2 * 86_400 + 3 * 3600, "2d03h"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_numbers_survive_bit_for_bit_and_not_finite_becomes_null(tmp_path):
    third = 1 / 3
    with MetricsLog(config_of(tmp_path), 0, 0) as metrics:
        metrics.log(row(1, loss=third))
        metrics.log(row(2, loss=float("nan"), gradient_norm=float("inf"), validation_loss=2.5))
    first, second = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    assert list(json.loads(first)) == KEYS
    assert json.loads(first)["loss"] == third
    assert json.loads(second, parse_constant=pytest.fail)["loss"] is None
    assert json.loads(second)["validation_loss"] == 2.5


def test_resume_leaves_one_line_per_step_and_loses_none(tmp_path):
    """C098: steps 7 to 9, logged before the resume at 6 and after it, stand once; the old ones are kept."""
    config, folder = config_of(tmp_path), tmp_path / "r"
    with MetricsLog(config, 0, 0) as metrics:
        for step in range(1, 10):
            metrics.log(row(step))
    with MetricsLog(config, 0, 6) as metrics:
        for step in range(7, 11):
            metrics.log(row(step, loss=0.25))
    assert steps_in(folder / "metrics.jsonl") == list(range(1, 11))
    assert steps_in(folder / "metrics.before-step-6.jsonl") == [7, 8, 9]
    losses = [json.loads(text)["loss"] for text in (folder / "metrics.jsonl").read_text().splitlines()]
    assert losses == [0.5] * 6 + [0.25] * 4
    assert sorted(path.name for path in folder.glob("metrics*")) == [
        "metrics.before-step-6.jsonl",
        "metrics.jsonl",
    ]


def test_resume_at_the_last_line_moves_nothing(tmp_path):
    """C108: the log is appended to."""
    config, folder = config_of(tmp_path), tmp_path / "r"
    for first in (0, 1):
        with MetricsLog(config, 0, first) as metrics:
            metrics.log(row(first + 1))
    assert [path.name for path in folder.glob("metrics*")] == ["metrics.jsonl"]
    assert steps_in(folder / "metrics.jsonl") == [1, 2]
    assert len((folder / "log.txt").read_text().splitlines()) == 2


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 1, "loss": 0.', '{"step": 2}'])
def test_a_line_torn_by_a_kill_does_not_stay(tmp_path, torn):
    whole = '{"step": 1, "loss": 0.5}\n'
    (tmp_path / "metrics.jsonl").write_text(whole + torn)
    cut(tmp_path, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == whole
    assert (tmp_path / "metrics.before-step-1.jsonl").read_text() == torn + "\n"


def test_plain_lines_where_there_is_no_terminal(tmp_path, capsys):
    """C100: no carriage return, each step once, at most one line per log interval."""
    with MetricsLog(config_of(tmp_path, "train.log_every=4"), 0, 0) as metrics:
        metrics.say("hello")
        for step in range(1, 11):
            metrics.log(row(step))
    out, err = capsys.readouterr()
    assert err == "" and "\r" not in out
    assert re.findall(r"^step (\d+)/10 ", out, re.MULTILINE) == ["4", "8", "10"]
    assert "tok/s" in out and "ETA" in out
    assert (tmp_path / "r" / "log.txt").read_text() == out


def test_one_bar_on_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with MetricsLog(config_of(tmp_path), 0, 5) as metrics:
        metrics.log(row(6))
        metrics.say("a message")
    out, err = capsys.readouterr()
    assert out == "" and "\r" in err and "a message" in err
    assert "step 6/10" in (tmp_path / "r" / "log.txt").read_text()


def test_other_ranks_write_nothing(tmp_path, capsys):
    with MetricsLog(config_of(tmp_path, "logging.wandb=offline"), 1, 0) as metrics:
        metrics.log(row(1))
        metrics.say("hello")
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")


class FakeWandb(types.ModuleType):
    """Records calls; `refuse` lists the modes whose start fails."""

    def __init__(self, refuse=(), break_at=None):
        super().__init__("wandb")
        self.holds_id = False
        self.refuse, self.break_at, self.starts, self.rows, self.defined, self.finished = (
            refuse,
            break_at,
            [],
            [],
            [],
            0,
        )

    def Settings(self, **options):
        assert 0 < options["init_timeout"] <= 60 and 0 < options["finish_timeout"] <= 60
        return options

    def init(self, **options):
        assert not self.holds_id
        self.starts.append((options["mode"], options["id"]))
        self.holds_id = True
        if options["mode"] in self.refuse:
            raise ConnectionError("no route\nto host")
        return self

    def define_metric(self, name, step_metric=None):
        self.defined.append((name, step_metric))

    def log(self, values):
        if values["step"] == self.break_at:
            raise BrokenPipeError("service died")
        self.rows.append(values)

    def teardown(self):
        self.holds_id = False

    def finish(self, exit_code):
        self.finished += 1


def run_with(fake, folder, monkeypatch, mode="online", first=0):
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with MetricsLog(config_of(folder, f"logging.wandb={mode}"), 0, first) as metrics:
        for step in range(first + 1, first + 4):
            metrics.log(row(step))


def test_wandb_continues_the_same_run_by_its_own_step(tmp_path, monkeypatch):
    """C098: own step metric; the run id survives a resume."""
    first, second = FakeWandb(), FakeWandb()
    run_with(first, tmp_path, monkeypatch)
    run_with(second, tmp_path, monkeypatch, first=2)
    assert first.starts == second.starts and first.starts[0][0] == "online"
    assert ("*", "step") in first.defined
    assert [values["step"] for values in second.rows] == [3, 4, 5]
    assert first.finished == 1


def test_wandb_falls_back_to_offline_and_then_to_nothing(tmp_path, monkeypatch, capsys):
    """C099"""
    fake = FakeWandb(refuse=("online",))
    run_with(fake, tmp_path, monkeypatch)
    assert [mode for mode, _ in fake.starts] == ["online", "offline"] and len(fake.rows) == 3
    assert "wandb does not start online (no route): mirroring offline" in capsys.readouterr().out
    fake = FakeWandb(refuse=("online", "offline"))
    run_with(fake, tmp_path, monkeypatch)
    assert fake.rows == [] and "not at all" in capsys.readouterr().out


def test_wandb_dying_midway_or_missing_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    """C099"""
    fake = FakeWandb(break_at=2)
    run_with(fake, tmp_path, monkeypatch)
    assert [values["step"] for values in fake.rows] == [1] and fake.finished == 0
    assert capsys.readouterr().out.count("wandb stopped") == 1
    run_with(None, tmp_path, monkeypatch, first=3)  # None makes the import fail
    assert "no wandb" in capsys.readouterr().out
    assert steps_in(tmp_path / "r" / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]


def test_memory_and_peak_are_plausible():
    device = torch.device("cpu")
    assert 10 << 20 < memory_bytes(device) < 1 << 40
    assert 1e8 < peak_flops(device, Dtype.float32) < 1e14


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", Dtype.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", Dtype.bfloat16, 756e12),
        ("NVIDIA A100-SXM4-80GB", Dtype.bfloat16, 312e12),
        ("NVIDIA H200", Dtype.float32, 67e12),
        ("NVIDIA GB200", Dtype.bfloat16, 2500e12),
    ],
)
def test_peak_of_known_cards(name, dtype, peak, monkeypatch):
    """Data sheets by the names that the driver reports."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), dtype) == peak


@pytest.mark.parametrize(("cluster", "card"), [("a100_ib200", "A100"), ("b200_ib400", "B200"), ("h100_ib400", "H100")])
def test_planner_and_run_take_mfu_of_the_same_peak(cluster, card):
    assert compose([f"cluster={cluster}"]).cluster.peak_flops == DATA_SHEETS[card][0]
    assert compose(["cluster=h200_ib400"]).cluster.peak_flops == DATA_SHEETS["H200"][0]
