"""metrics.jsonl, the console and the wandb mirror, without processes."""

import errno
import json
import os
import re
import socket
import sys
import time
import types

import pytest
import torch

from conf.compose import compose
from conf.schema import Dtype
from training.goodput import measured
from training.metrics import DATA_SHEETS, MetricsLog, line, memory_bytes, peak_flops
from training.metrics_files import cut, recorded, rows, unmirrored
from training.signals import Stopped

KEYS = (
    "step tokens loss learning_rate gradient_norm step_seconds tokens_per_second mfu_causal mfu_noncausal "
    "exchange_wait_seconds data_wait_seconds memory_bytes"
).split()


def row(step, **changes):
    values = dict.fromkeys(KEYS, 0.5) | {"step": step, "tokens": 100 * step, "memory_bytes": 1 << 20}
    return values | changes


def config_of(folder, *overrides):
    return compose([f"run.dir={folder}", "run.name=r", "train.steps=10", *overrides])


def printed(folder):
    """The lines of log.txt that were on the console, too: without those that have a date."""
    lines = (folder / "log.txt").read_text().splitlines()
    return [text for text in lines if not re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", text)]


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
    assert "  skipped: loss nan  grad inf  " in line(
        values | {"skipped": True, "loss": float("nan"), "gradient_norm": float("inf")}, 100, 130
    )


def test_numbers_survive_bit_for_bit_and_not_finite_becomes_null(tmp_path):
    third = 1 / 3
    with MetricsLog(config_of(tmp_path), 0, 0) as metrics:
        metrics.log(row(1, loss=third))
        metrics.log(row(2, loss=float("nan"), gradient_norm=float("inf"), validation_loss=2.5))
    first, second = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    assert list(json.loads(first)) == [*KEYS, "time"]
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
    assert [text.split()[0] for text in printed(folder)] == ["step", "step"]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 1, "loss": 0.', '{"step": 2}'])
def test_a_line_torn_by_a_kill_does_not_stay(tmp_path, torn):
    whole = '{"step": 1, "loss": 0.5}\n'
    (tmp_path / "metrics.jsonl").write_text(whole + torn)
    cut(tmp_path, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == whole
    assert (tmp_path / "metrics.before-step-1.jsonl").read_text() == torn + "\n"


def test_cut_returns_what_was_recorded_beyond_the_step_by_any_start(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert cut(tmp_path, 1) == []
    path.write_text("".join(json.dumps(row(step)) + "\n" for step in (1, 2, 3)) + '{"step": 4, "lo')
    assert [each["step"] for each in cut(tmp_path, 1)] == [2, 3]
    with open(path, "a") as file:
        file.write(json.dumps(row(2, loss=0.75)) + "\n")
    assert [(each["step"], each["loss"]) for each in cut(tmp_path, 1)] == [(2, 0.5), (3, 0.5), (2, 0.75)]
    assert len(cut(tmp_path, 1)) == 3 and steps_in(path) == [1]  # killed before it made a step of its own


def test_a_cut_that_a_kill_interrupted_moves_nothing_twice(tmp_path):
    """The kill came when the lines moved were on the disk, and metrics.jsonl was as before."""
    path, moved = tmp_path / "metrics.jsonl", tmp_path / "metrics.before-step-5.jsonl"
    whole = "".join(json.dumps(row(step)) + "\n" for step in range(1, 10)) + '{"step": 10, "lo'
    path.write_text(whole)
    cut(tmp_path, 5)
    path.write_text(whole)
    assert [each["step"] for each in cut(tmp_path, 5)] == [6, 7, 8, 9] and steps_in(path) == [1, 2, 3, 4, 5]
    assert moved.read_text().count("\n") == 5


def full(handle):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_named_and_leaves_files_as_they_were(tmp_path, monkeypatch):
    config, folder = config_of(tmp_path), tmp_path / "r"
    with MetricsLog(config, 0, 0) as metrics:
        metrics.log(row(1))
        metrics.log(row(2))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for step, name in ((1, "metrics.before-step-1.jsonl"), (2, "config.yaml")):
            with pytest.raises(OSError, match=rf"No space left on device: '{folder / name}'"):
                MetricsLog(config, 0, step)
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(OSError, match="metrics.jsonl"), MetricsLog(config, 0, 2) as metrics:
        monkeypatch.setattr(os, "fsync", full)
        metrics.flush()
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"), MetricsLog(config, 0, 2) as metrics:
        metrics.rows.close()
        metrics.rows = open("/dev/full", "w")
        metrics.log(row(3))


def test_log_says_when_and_where_a_start_was_and_why_it_ended(tmp_path, capsys):
    config, folder = config_of(tmp_path), tmp_path / "r"
    for error in (ValueError("a=1: use 2\nand more"), Stopped("stopped by SIGTERM after step 1, saved"), KeyError()):
        with pytest.raises(type(error)), MetricsLog(config, 0, 0) as metrics:
            if isinstance(error, Stopped):
                metrics.end("SIGTERM")
            raise error
    lines = [text.partition("  ")[2] for text in (folder / "log.txt").read_text().splitlines()]
    start = f"start after step 0, on {socket.gethostname()}, process {os.getpid()}"
    ends = ["ValueError: a=1: use 2", "stopped by SIGTERM after step 1, saved", "KeyError"]
    assert lines == [text for end in ends for text in (start, end)]
    assert capsys.readouterr() == ("", "")  # that is said elsewhere
    found = [each.get("error") for each in rows(folder / "starts.jsonl") if each["event"] == "end"]
    assert found == ["ValueError: a=1: use 2", None, "KeyError"]


def test_changed_options_are_said_and_explain_the_losses(tmp_path, capsys):
    config, warning = config_of(tmp_path), "train.steps=10, was 5 in the checkpoint: rates differ"
    with MetricsLog(config, 0, 0) as metrics:
        metrics.log(row(1))
        metrics.log(row(2))
    with MetricsLog(config, 0, 1, [warning]) as metrics:
        metrics.log(row(2, loss=0.75))
    out = capsys.readouterr().out
    assert out.count(f"warning: {warning}") == 1 and f"warning: {warning}" in printed(tmp_path / "r")
    assert "(50 % apart), as train.steps was changed" in out


@pytest.mark.parametrize(
    ("steps", "step", "started", "gaps"),
    [
        ([1, 2, 3], 3, 0, ""),
        ([1, 2, 5, 6, 8], 9, 0, "3-4, 7, 9"),
        ([], 2, 0, "1-2"),
        ([41, 42], 42, 40, ""),  # began at another run's checkpoint
        ([7, 8], 8, None, ""),  # the log of an earlier version: from its first row on
        (range(2, 40, 2), 39, 0, "1, 3, 5, 7, 9, 11, 13, 15, 17, 19, and in 10 more places"),
    ],
)
def test_steps_that_the_log_lacks_are_named(tmp_path, steps, step, started, gaps):
    """C098: nothing is lost in silence."""
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row(step)) + "\n" for step in steps))
    if started is not None:
        (tmp_path / "starts.jsonl").write_text(json.dumps({"event": "start", "time": 1.0, "step": started}) + "\n")
        with open(tmp_path / "starts.jsonl", "a") as file:
            file.write('{"event": "start", "time": 2.0}\n')  # of some other version
    history, found = recorded(tmp_path, step)
    assert found == gaps and [each["step"] for each in history] == list(steps)


def test_a_start_says_which_steps_are_missing_and_how_it_goes_on(tmp_path, capsys):
    config, folder = config_of(tmp_path), tmp_path / "r"
    with MetricsLog(config, 0, 0) as metrics:
        for step in (1, 2, 4, 5, 6):
            metrics.log(row(step))
    capsys.readouterr()
    with MetricsLog(config, 0, 4) as metrics:
        for step, loss in ((5, 0.5), (6, 0.625), (7, 0.5)):
            metrics.log(row(step, loss=loss))
    out = capsys.readouterr().out
    assert "warning: metrics.jsonl lacks steps 3, which the checkpoint of step 4 has behind it" in out
    assert out.count("loss of step 6 is 0.625, before the resume it was 0.5 (25 % apart)") == 1
    assert "continues" not in out and "loss of step 6 is 0.625" in (folder / "log.txt").read_text()
    with MetricsLog(config, 0, 5) as metrics:
        metrics.log(row(6, loss=0.625))
        metrics.log(row(7))
    assert "continues as recorded (2 steps compared, largest difference 0 %)" in capsys.readouterr().out


def events(folder):
    return [(each["event"], each["step"], each.get("reason")) for each in rows(folder / "starts.jsonl")]


def test_starts_and_ends_are_recorded(tmp_path):
    """Of three starts: one to its end, one stopped by a signal after a save, one killed before its first step."""
    config, folder, begin = config_of(tmp_path), tmp_path / "r", time.time()
    with MetricsLog(config, 0, 0) as metrics:
        metrics.log(row(1))
        metrics.log(row(2))
    with pytest.raises(KeyError), MetricsLog(config, 0, 2) as metrics:
        metrics.log(row(3))
        metrics.end("SIGTERM", save_seconds=1.5)
        raise KeyError
    with open(folder / "starts.jsonl", "a") as file:
        file.write('{"event": "sta')
    killed = MetricsLog(config, 0, 3)
    assert events(folder) == [
        ("start", 0, None),
        ("ready", 1, None),
        ("end", 2, "done"),
        ("start", 2, None),
        ("ready", 3, None),
        ("end", 3, "SIGTERM"),
        ("start", 3, None),
    ]
    found = list(rows(folder / "starts.jsonl"))
    times = [each["time"] for each in found]
    assert times == sorted(times) and times[-1] <= time.time() and found[5]["save_seconds"] == 1.5
    if os.path.exists("/proc/self/stat"):
        assert times[0] < begin  # when this process began: it took some time to get here
        assert times[0] > begin - 3600
    assert [(life.step, life.last_step, life.reason) for life in measured(folder).lives] == [
        (0, 2, "done"),
        (2, 3, "SIGTERM"),
        (3, 3, ""),
    ]
    killed.end("x")
    killed.__exit__(None)


def test_flush_brings_rows_to_the_disk(tmp_path, monkeypatch):
    synced = []
    with MetricsLog(config_of(tmp_path), 0, 0) as metrics:
        metrics.log(row(1))
        monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
        metrics.flush()
    assert synced[0] == (tmp_path / "r" / "metrics.jsonl").stat().st_ino
    MetricsLog(config_of(tmp_path), 1, 0).flush()  # on the others nothing happens


def test_a_skipped_step_is_said_whatever_the_interval(tmp_path, capsys):
    with MetricsLog(config_of(tmp_path, "train.log_every=10"), 0, 0) as metrics:
        metrics.log(row(1))
        metrics.log(row(2, loss=float("nan"), skipped=True, skipped_steps=3))
    (text,) = capsys.readouterr().out.splitlines()
    assert text.startswith("step 2/10  skipped (3 so far): loss nan  ")
    written = list(rows(tmp_path / "r" / "metrics.jsonl"))[1]
    assert written["skipped"] is True and written["loss"] is None


def test_time_is_when_the_step_ended(tmp_path):
    with MetricsLog(config_of(tmp_path), 0, 0) as metrics:
        metrics.log(row(1, time=123.5))
        metrics.log(row(2))
    first, second = rows(tmp_path / "r" / "metrics.jsonl")
    assert first["time"] == 123.5 and abs(second["time"] - time.time()) < 60
    with MetricsLog(config_of(tmp_path), 0, 2) as metrics:
        metrics.log(row(3, time=123.5, validation_seconds=1.0))  # of a start that was stopped while it validated
    *_, third = rows(tmp_path / "r" / "metrics.jsonl")
    assert third["time"] == 123.5 and abs(third["validated"] - time.time()) < 60


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
    assert printed(tmp_path / "r") == out.splitlines()


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
        metrics.ready()
        metrics.end("done")
    assert not list(tmp_path.iterdir()) and capsys.readouterr() == ("", "")


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


def test_wandb_is_given_again_what_a_kill_may_have_lost(tmp_path, monkeypatch):
    """It writes late: of a short life that is killed it has no step."""
    config, killed, after, last = config_of(tmp_path, "logging.wandb=offline"), *(FakeWandb() for _ in range(3))
    run_with(FakeWandb(), tmp_path, monkeypatch)  # steps 1 to 3, and its end
    kept = []
    for fake, first in ((killed, 3), (after, 5)):  # the second is killed, too, before or after it was given them again
        monkeypatch.setitem(sys.modules, "wandb", fake)
        kept.append(MetricsLog(config, 0, first))
        for step in range(first + 1, first + 4):
            kept[-1].log(row(step))
    assert [values["step"] for values in killed.rows] == [4, 5, 6]
    assert [values["step"] for values in after.rows] == [4, 5, 6, 7, 8]
    run_with(last, tmp_path, monkeypatch, first=7)
    assert [values["step"] for values in last.rows] == [4, 5, 6, 7, 8, 9, 10]
    run_with(done := FakeWandb(), tmp_path, monkeypatch, first=10)
    assert [values["step"] for values in done.rows] == [11, 12, 13]
    assert len(unmirrored(tmp_path / "r", 2)) == 0
    for metrics in kept:
        metrics.__exit__(KeyError)


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
