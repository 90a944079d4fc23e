"""A command that is watched while it runs: what memory its ranks held at most, and what processor time they have taken.

Linux only: read from /proc. The command gets a session of its own, by which its processes are known.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

POLL_SECONDS = 0.5
LAST_LINES = 20
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Watched:
    """Of the ranks of a command: the launcher's grandchildren, or where it starts none, the command itself.

    Attributes:
        peak_bytes: of each rank by process id, the most that it held (VmHWM).
        cpu_seconds: of all ranks together, so far.
        seconds: since the command was started.
    """

    peak_bytes: dict[int, int] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    seconds: float = 0.0


def run(command: Sequence[str], log: Path, environment: Mapping[str, str], tell: Callable[[Watched], None]) -> Watched:
    """Runs `command` to its end, with its output in `log`; `tell` is called every POLL_SECONDS.

    Raises:
        RuntimeError: with the last lines of the output, where it fails. On any error its processes are ended.
    """
    begun, seen = time.monotonic(), Watched()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,
        )
    ended = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # then its processes are ended
    try:
        while process.poll() is None:
            _look(process.pid, seen)
            seen.seconds = time.monotonic() - begun
            tell(seen)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, ended)
    if process.returncode:
        said = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
        raise RuntimeError(f"{' '.join(command)} left with exit code {process.returncode}:\n{said}")
    return seen


def _look(session: int, seen: Watched) -> None:
    """Takes down what the ranks that run now have used; those that have left keep what was seen last."""
    parents, times = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it left meanwhile
            # The name in parentheses may hold blanks; after it: state, parent, group, session, …, utime, stime.
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(words[3]) == session:
                parents[int(folder.name)] = int(words[1])
                times[int(folder.name)] = (int(words[11]) + int(words[12])) / TICKS
    ranks = [pid for pid, parent in parents.items() if parents.get(parent) == session] or [session]
    if len(ranks) > 1:
        seen.peak_bytes.pop(session, None)  # the launcher, before it had started them
    for pid in ranks:
        with contextlib.suppress(OSError, StopIteration):
            lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
            peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
            seen.peak_bytes[pid] = max(peak, seen.peak_bytes.get(pid, 0))
    seen.cpu_seconds = max(seen.cpu_seconds, sum(times[pid] for pid in ranks if pid in times))
