"""Signs of life as files, the seconds of each phase, and what the command makes of a folder."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.compose import compose
from training import watch
from training.watch import Watch, main, read_beats

ROOT = Path(__file__).parents[2]
CONFIG = compose([])


def rank(number: int = 0, size: int = 2) -> SimpleNamespace:
    return SimpleNamespace(rank=number, size=size, flight_record=lambda: b"")


def test_a_sign_covers_the_last_one(tmp_path: Path) -> None:
    folder = tmp_path / "heartbeat"
    with Watch(folder, rank(1), CONFIG) as seen:
        first = (folder / "rank_00001.json").read_bytes()
        seen.enter("validate", 12_345, 7)
        assert seen.where() == "step 12345, micro-batch 7, in validate"
        (beat,) = read_beats(folder, time.time())
        assert (beat.rank, beat.step, beat.phase) == (1, 0, "start")
    assert (folder / "rank_00001.json").stat().st_size == len(first) == watch.SIGN_BYTES
    (beat,) = read_beats(folder, time.time())
    assert (beat.step, beat.phase, beat.late_seconds) == (12_345, "end", 30)


def test_seconds_of_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(watch.time, "monotonic", lambda: now)
    seen = Watch(tmp_path, rank(), CONFIG)
    for phase, seconds in (("start", 5), ("data", 1), ("first_step", 7), ("data", 1), ("step", 2), ("step", 2)):
        seen.enter(phase, 3)
        now += seconds
    with seen.phase("save"):
        now += 4
        assert seen.seconds["save"] == 4  # so far
    now += 1
    assert seen.seconds == {
        "start": 5, "data": 2, "first_step": 7, "step": 5, "save": 4, "validate": 0, "end": 0,
    }  # fmt: skip


def test_what_is_no_sign_of_life(tmp_path: Path) -> None:
    """Torn, foreign, or of another start, which had more ranks."""
    Watch(tmp_path, rank(3, size=4), CONFIG, "before")
    os.utime(tmp_path / "rank_00003.json", (0, time.time() - 3600))
    Watch(tmp_path, rank(1), CONFIG, "now")
    (tmp_path / "rank_00000.json").write_text('{"rank": 0, "si')
    (tmp_path / "rank_00002.json").write_text("[]")
    (tmp_path / "rank_00001.stacks").write_text("{}")
    now = time.time()
    assert [beat.rank for beat in read_beats(tmp_path, now)] == [1]
    assert [beat.rank for beat in read_beats(tmp_path, now, "now")] == [1]
    (before,) = read_beats(tmp_path, now, "before")
    assert (before.rank, round(before.age_seconds, -2)) == (3, 3600)


STUCK = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from conf.compose import compose
from training import watch
config = compose(["timeouts.step_seconds=1"])
rank = SimpleNamespace(rank=0, size=1, flight_record=lambda: b"[]")
with watch.Watch(Path(sys.argv[1]), rank, config, "now") as seen:
    seen.enter("start")
    time.sleep(1.5)
    seen.enter("step", 4)
    HINDRANCE
    time.sleep(60)
"""


def stuck(folder: Path, hindrance: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STUCK.replace("HINDRANCE", hindrance), str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_a_phase_that_takes_too_long(tmp_path: Path) -> None:
    """Not one with a longer timeout, and not for seconds in which the process was stopped."""
    with stuck(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)") as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 69
    assert "stalled: all 1 ranks are at step 4, in step" in err
    assert "timeouts.step_seconds=1, passed on rank 0 in step" in err
    assert (tmp_path / "stalled-now.txt").read_text().strip() in err
    (beat,) = read_beats(tmp_path, time.time())
    assert 1 <= beat.since_seconds < 4
    assert 'File "<string>", line 14' in (tmp_path / "rank_00000.stacks").read_text()
    assert (tmp_path / "rank_00000.nccl").read_text() == "[]"


def test_a_file_server_that_hangs(tmp_path: Path) -> None:
    """No sign is ever written, nor read: opening a pipe waits for its other end."""
    hindrance = (
        f"watch.LAST_SECONDS = 1; os.remove({(path := str(tmp_path / 'rank_00000.json'))!r}); os.mkfifo({path!r})"
    )
    with stuck(tmp_path, hindrance) as process:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 69
    assert err == f"-c: error: [rank 0] stalled at step 4, micro-batch 0, in step: {tmp_path} does not answer\n"


def test_an_interpreter_that_hangs(tmp_path: Path) -> None:
    """Its lock is held by what NCCL's recorder waits for: only the kernel can end the process."""
    hindrance = "watch.KILL_SECONDS = 1; rank.flight_record = lambda: ctypes.PyDLL(None).sleep(60)"
    with stuck(tmp_path, f"import ctypes; {hindrance}") as process:
        _, err = process.communicate(timeout=40)
        assert process.returncode == -signal.SIGALRM
    assert "stalled: all 1 ranks are at step 4, in step" in err


def test_leaving_does_not_wait_for_a_file_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LAST_SECONDS", 0.2)
    path = tmp_path / "rank_00000.json"
    with Watch(tmp_path, rank(), CONFIG) as seen:
        path.unlink()
        os.mkfifo(path)
        leaving = time.monotonic()
    assert seen._signer.is_alive() and time.monotonic() - leaving < 5
    with open(path):  # lets it go
        seen._signer.join(20)
    assert not seen._signer.is_alive()


def test_a_report_of_another_start(tmp_path: Path) -> None:
    """A rank on a node that was cut off finds out late, while the run goes on without it."""
    before = Watch(tmp_path, rank(1), CONFIG, "before")
    seen = Watch(tmp_path, rank(0), CONFIG, "now")
    before._report()
    assert (tmp_path / "stalled-before.txt").read_text().startswith("stalled: rank 0 has given no sign of life")
    assert before._is_reported() and not seen._is_reported()
    Watch(tmp_path, rank(0), CONFIG, "next")
    assert not before._is_reported()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "heartbeat"
    ranks = [Watch(folder, rank(number, 3), CONFIG, "now") for number in range(3)]
    for number, seen in enumerate(ranks):
        seen.enter("step", 7 if number else 5)
        seen._sign()
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["rank", "0", "1", "2"]
    assert lines[4].startswith("rank 0 on ") and "is two steps behind, in step for" in lines[4]
    ranks[0].enter("step", 7)
    ranks[0]._sign()
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[4] == "all 3 ranks are heard, at step 7"
    (folder / "stalled-before.txt").write_text("stalled: rank 1\n")
    (folder / "stalled-now.txt").write_text("stalled: rank 2\n")
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[4] == "stalled: rank 2"
    for number in range(3):
        path = folder / f"rank_{number:05}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"phase": "end"}))
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[4] == "all ranks have ended"


@pytest.mark.parametrize("name", ["nowhere", ""])
def test_the_command_without_a_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / name)]) == 3
    assert str(tmp_path) in capsys.readouterr().err
