"""One run at a time in a folder: two that write the same checkpoints and logs would ruin both."""

import contextlib
import errno
import fcntl
import functools
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from training import launcher

LEAVING_SECONDS = 150.0  # that a run before may take to be gone: 90 s is the usual lease of NFSv4 after a node's death
_SAY = functools.partial(launcher.say, error=False)
TELLING_SECONDS = 3.0  # of waiting, before it is said for whom
UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # file systems that know no locks, or none between nodes


@contextlib.contextmanager
def locked(
    path: Path,
    key: str,
    patience: float = LEAVING_SECONDS,
    say: Callable[[str], None] = _SAY,
) -> Iterator[bool]:
    """Holds the lock of the file `path`, which the system lets go when this process ends, however that is.

    Yields whether there is one: some file systems have no locks. Local: for rank 0, in the name of all.

    Args:
        key: what to change to run beside the other, such as "run.name".
        patience: seconds for which to wait for another process that holds it.
        say: is told, once, for whom this waits.

    Raises:
        ValueError: where another process still holds it after `patience` seconds, saying which.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        held = _take(file.fileno(), path, key, patience, say)
        if held:
            file.truncate(0)
            file.write(f"{socket.gethostname()}, process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
            file.flush()
        yield held


def _take(descriptor: int, path: Path, key: str, patience: float, say: Callable[[str], None]) -> bool:
    began, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waited = time.monotonic() - began
            if waited >= patience:
                raise ValueError(f"{_in_use(path)}: wait for it, or use another {key}") from None
            if waited >= TELLING_SECONDS and not told:
                told = True
                say(f"{_in_use(path)}: waiting for it to leave, {patience:g} s at most")
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            return False


def _in_use(path: Path) -> str:
    return f"{path.parent.parent} is in use by another run ({path.read_text().strip() or 'just starting'})"
