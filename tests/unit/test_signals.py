"""Which signals ask a run to stop, how they are heard, and which of them is a second one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from training.runtime import exit_codes
from training.signals import STOPPING, Stopped, StopSignals, is_second

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("first", "number", "seconds", "second"),
    [
        (signal.SIGTERM, signal.SIGTERM, 0.03, False),  # Slurm's own repetition
        (signal.SIGTERM, signal.SIGTERM, 1.5, False),
        (signal.SIGTERM, signal.SIGTERM, 5.0, True),
        (signal.SIGUSR1, signal.SIGTERM, 0.5, False),
        (signal.SIGUSR1, signal.SIGTERM, 1.0, True),
    ],
)
def test_what_a_second_signal_is(first: int, number: int, seconds: float, second: bool) -> None:
    """C105."""
    assert is_second(first, number, seconds) is second


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_is_a_wish(number: int) -> None:
    """C105: and its repetition the same one; afterwards the leaving process ignores it."""
    with StopSignals(grace_seconds=60) as stop:
        stop.armed = True
        assert (stop.requested, stop.seconds_left()) == (0, float("inf"))
        os.kill(os.getpid(), number)
        wait(lambda: stop.requested)
        os.kill(os.getpid(), number)
        assert stop.requested == number
        assert 30 < stop.seconds_left() <= 60
    assert signal.getsignal(number) == signal.SIG_IGN


def test_nothing_is_left_behind() -> None:
    before = [signal.getsignal(number) for number in STOPPING]
    descriptors = len(os.listdir("/proc/self/fd"))
    with StopSignals(grace_seconds=60):
        pass
    assert [signal.getsignal(number) for number in STOPPING] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_time_runs_from_a_peers_signal_too() -> None:
    with StopSignals(grace_seconds=60) as stop:
        stop.begin()
        left = stop.seconds_left()
        assert 30 < left <= 60
        stop.begin()
        assert stop.seconds_left() <= left
        assert stop.requested == 0
    assert [signal.getsignal(number) for number in STOPPING] == [signal.SIG_IGN] * 2  # its own may still come


HEAD = "import ctypes, os, signal, time\nfrom training.signals import StopSignals\n"


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("with StopSignals(60): os.kill(os.getpid(), 15); time.sleep(20)", 75, "SIGTERM before the first step"),
        (  # a rank is started with both blocked, and may get one before its session
            "signal.pthread_sigmask(0, [10, 15]); os.kill(os.getpid(), 15)\nwith StopSignals(60): time.sleep(20)",
            75,
            "SIGTERM before the first step",
        ),
        (
            "with StopSignals(0.3) as stop: stop.armed = True; os.kill(os.getpid(), 10); ctypes.CDLL(None).sleep(20)",
            75,
            "no time left after SIGUSR1 (run.grace_seconds=0.3)",
        ),
        (
            "with StopSignals(0.3) as stop: stop.armed = True; stop.begin(); ctypes.CDLL(None).sleep(20)",
            75,
            "no time left after another rank was asked to stop",
        ),
        (  # what it says finds nobody who reads
            "def say(reason): time.sleep(60)\n"
            "with StopSignals(0.3, say) as stop: stop.armed = True; stop.begin(); time.sleep(20)",
            75,
            "",
        ),
        (
            "with StopSignals(60) as stop: stop.armed = True; os.kill(os.getpid(), 10); time.sleep(1.1)\n"
            "    os.kill(os.getpid(), 15); ctypes.CDLL(None).sleep(20)",
            143,
            "",
        ),
    ],
)
def test_how_the_process_ends(body: str, code: int, words: str) -> None:
    """C105: also while the main thread is somewhere in C, where no handler runs. (20 s: then it would exit with 0.)"""
    setup, _, block = body.rpartition("with ")
    body = setup + "with " + block.replace(": ", ":\n    ", 1).replace("; ", "\n    ")
    ended = subprocess.run([sys.executable, "-c", HEAD + body], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (code, "")
    assert words in ended.stdout


def test_stopped_is_said_once_and_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        with pytest.raises(SystemExit) as leaving, exit_codes(rank):
            raise Stopped("stopped by SIGTERM at step 40, saved")
        assert leaving.value.code == 75
    assert capsys.readouterr().err.endswith(": stopped by SIGTERM at step 40, saved\n")
