"""One life of a run: its processes from start to end, what they are doing meanwhile, and a blow at a chosen moment.

Linux only: processes are known by their session, in /proc, and reads of a checkpoint by inotify. What a run is doing is
seen from outside, in its folder: rows of metrics.jsonl, phases of heartbeat/, checkpoints that are being written.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.003  # a save of a tiny model takes tens of milliseconds
ORPHAN_SECONDS = 20.0  # ranks notice at once that their launcher has gone; how long they take to end is measured
LAST_LINES = 25

IN_OPEN, IN_NONBLOCK = 0x20, 0o4000  # from linux/inotify.h


@dataclass(frozen=True)
class Seen:
    """What a run is doing: `moment` is start, load, train, save or validate; `step` of its last row, 0 = none yet.

    `rows`: how many this life has written.
    """

    moment: str
    rows: int
    step: int


class Life:
    """A run of `command`, started now in `folder`, in a session of its own.

    `run` is the run's folder; the output goes into a file beside `runs/`. Used as a context: whatever happens, none of
    its processes is left at the end.
    """

    def __init__(self, command: Sequence[str], folder: Path, run: Path) -> None:
        self.run, self.log = run, folder / f"{run.name}.log"
        self._opened = Opened(sorted((run / "checkpoints").glob("step_*")))
        self._loading = False
        self._rows: tuple[tuple[int, int], list[dict[str, Any]]] = (0, 0), []
        self._old = {path.name for path in (run / "checkpoints").glob("step_*.tmp")}
        self.first_row_seconds: float | None = None  # from the start to the first step that this life has done
        self.clock, self.begun = time.time(), time.monotonic()
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Life":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.wait()
        self._opened.close()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def said(self) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LAST_LINES:])

    def members(self) -> dict[int, int]:
        """Its processes that have not ended: the parent of each."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended while we looked
                # The name in parentheses may hold blanks; after it: state, parent, group, session.
                state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.process.pid and state != "Z":
                    found[int(entry.name)] = int(parent)
        return found

    def ranks(self) -> list[int]:
        """Process ids of the ranks that run, in their order: they are the launcher's grandchildren, born one by one."""
        members = self.members()
        return sorted(pid for pid, parent in members.items() if members.get(parent) == self.process.pid)

    def send(self, number: int, pids: Sequence[int]) -> None:
        """Sends the signal; processes that have just ended are passed over."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> list[str]:
        """Ends what is left of it at once; command lines of what that was."""
        left = list(self.members())
        described = [_described(pid) for pid in left]
        self.send(signal.SIGKILL, left)
        return described

    def end(self, seconds: float) -> tuple[int | None, list[str]]:
        """Waits for its end: the exit code as a shell has it, None where it did not come, and processes left over."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        code = self.process.poll()
        if code is None:
            return None, self.kill()
        until = time.monotonic() + ORPHAN_SECONDS
        while self.members() and time.monotonic() < until:
            time.sleep(0.02)
        return (code if code >= 0 else 128 - code), self.kill()

    def wait_for(self, moment: str, nth: int, limit_seconds: float) -> bool:
        """Waits until it does `moment` for the `nth` time, for train until it has done that many steps.

        False where it ends before, or does not come to it within that time.
        """
        before, times = "", 0
        while self.process.poll() is None and self.seconds < limit_seconds:
            seen = self.see()
            times += seen.moment == moment != before
            before = seen.moment
            if (seen.rows if moment == "train" else times) >= nth:
                return True
            time.sleep(POLL_SECONDS)
        return False

    def pause(self, seconds: float) -> None:
        """Watches it for that long, or until it ends."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process.poll() is None:
            self.see()
            time.sleep(min(POLL_SECONDS, seconds))

    def see(self) -> Seen:
        """What it is doing now."""
        rows = [row for row in self.rows() if row["time"] > self.clock]
        if rows and self.first_row_seconds is None:
            self.first_row_seconds = self.seconds
        partial = {path.name for path in (self.run / "checkpoints").glob("step_*.tmp")} - self._old
        self._loading = self._loading or self._opened.any()
        phases = self.phases()
        if partial or "save" in phases:
            moment = "save"
        elif "validate" in phases:
            moment = "validate"
        elif rows or phases & {"first_step", "step", "data"}:
            moment = "train"
        else:
            moment = "load" if self._loading else "start"
        return Seen(moment, len(rows), rows[-1]["step"] if rows else 0)

    def rows(self) -> list[dict[str, Any]]:
        """What metrics.jsonl holds, a line that is being written left out."""
        path = self.run / "metrics.jsonl"
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            stamp = status.st_size, status.st_mtime_ns
            if stamp != self._rows[0]:
                lines = path.read_text().rpartition("\n")[0].splitlines()
                self._rows = stamp, [json.loads(line) for line in lines]
        return self._rows[1]

    def phases(self) -> set[str]:
        """Phases that its ranks were in when their hearts last beat."""
        found = set()
        for path in (self.run / "heartbeat").glob("rank_*.json"):
            with contextlib.suppress(OSError, ValueError):  # it is being written
                if path.stat().st_mtime > self.clock:
                    found.add(json.loads(path.read_text())["phase"])
        return found


def _described(pid: int) -> str:
    with contextlib.suppress(OSError):
        line, wait = Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/wchan").read_text()
        return f"{line.replace(bytes(1), b' ').decode(errors='replace')[:200]} (pid {pid}, in {wait})"
    return f"pid {pid}"


class Opened:
    """Tells whether any process has opened a file in one of `folders` since."""

    def __init__(self, folders: Sequence[Path]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(IN_NONBLOCK)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1 failed")
        for folder in folders:
            libc.inotify_add_watch(self._descriptor, os.fsencode(folder), IN_OPEN)

    def any(self) -> bool:
        try:
            return bool(os.read(self._descriptor, 1 << 16))
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self._descriptor)
