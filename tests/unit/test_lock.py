"""One run at a time in a folder."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training import lock as lock_module
from training.lock import locked

ROOT = Path(__file__).parents[2]
HOLDER = """
import sys, time
from pathlib import Path
from training.lock import locked
with locked(Path(sys.argv[1]), "run.name"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def lock(tmp_path):
    return tmp_path / "run" / "heartbeat" / "lock"


@pytest.fixture
def holder(lock):
    command = [sys.executable, "-c", HOLDER, str(lock)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_and_harms_nothing(lock, holder):
    told = lock.read_text()
    with pytest.raises(
        ValueError, match=rf"run is in use by another run \(.*process {holder.pid}.*use another run.name"
    ):
        with locked(lock, "run.name", patience=0.2):
            pass
    assert lock.read_text() == told and f"process {holder.pid}, since" in told


def test_whom_it_waits_for_is_said_once(lock, holder, monkeypatch):
    monkeypatch.setattr(lock_module, "TELLING_SECONDS", 0.1)
    said = []
    with pytest.raises(ValueError), locked(lock, "run.name", patience=0.5, say=said.append):
        pass
    (line,) = said
    assert f"process {holder.pid}" in line and line.endswith(": waiting for it to leave, 0.5 s at most")


def test_a_killed_run_lets_go(lock, holder):
    """The next one waits until it is gone."""
    os.kill(holder.pid, signal.SIGKILL)
    begin = time.monotonic()
    with locked(lock, "run.name") as held:
        assert held and f"process {os.getpid()}," in lock.read_text()
    assert time.monotonic() - begin < 10
    with locked(lock, "run.name", patience=0.0) as held:  # let go at the end, too
        assert held


def test_a_file_system_without_locks(lock, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(lock, "run.name") as held:
        assert not held
