"""How a run is asked to stop: by SIGTERM or SIGUSR1, heard even while the main thread waits in a collective.

Knows no torch.
"""

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Self

STOPPING = (signal.SIGTERM, signal.SIGUSR1)
REQUEUE = 75  # the exit code of a run that was stopped and can go on
REPEAT_SECONDS = 5.0  # Slurm sends SIGTERM twice within a moment; a launcher and srun may both pass one on
OTHER_SECONDS = 1.0  # the same for two different signals, which nobody repeats
SAY_SECONDS = 1.0  # to print a last line: a terminal that is held, or a pipe nobody reads, takes none


class Stopped(Exception):
    """The run ends because it was asked to, and can go on from its last checkpoint. To be raised on all ranks.

    The message is a sentence such as "stopped by SIGTERM at step 40, saved".
    """

    exit_code = REQUEUE
    agreed = True  # rank 0 alone says it


class StopSignals:
    """The signals that ask this process to stop, while it is entered; from the main thread only.

    Once the main thread looks at `requested` at every micro-batch, it sets `armed`, and has `grace_seconds` from the
    first signal to save and to leave: then the process ends itself, whatever the main thread is doing. Before that
    there is nothing to save, and the first signal ends the process at once. In both cases `say` gets the reason, and
    the exit code is 75. A second signal ends the process at once, with 128 + its number; so does Ctrl-C, as ever.

    Python runs a handler only between two instructions of the main thread, never while that waits in a collective. So
    the handlers do nothing; a thread reads the numbers that the interpreter's own handler writes into a pipe.
    """

    def __init__(self, grace_seconds: float = math.inf, say: Callable[[str], None] = print):
        self.armed = False
        self.requested = 0  # the number of the first signal
        self._grace_seconds, self._say = grace_seconds, say
        self._heard_at = self._deadline = math.inf
        self._write_end = -1

    def __enter__(self) -> Self:
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._outer_descriptor = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._outer_handlers = {number: signal.signal(number, _nothing) for number in STOPPING}
        for number in STOPPING:
            signal.siginterrupt(number, False)  # no system call of a library needs to know
        self._thread = threading.Thread(target=self._listen, args=(read_end,), name="signals", daemon=True)
        self._thread.start()
        self._outer_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # what came before, comes now
        return self

    def __exit__(self, *error: object) -> None:
        """Restores the handlers; once this rank or a peer was signalled, ignores them: the process is leaving."""
        for number, handler in self._outer_handlers.items():
            signal.signal(number, signal.SIG_IGN if self.requested or self._deadline < math.inf else handler)
        signal.set_wakeup_fd(self._outer_descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._outer_mask)
        write_end, self._write_end = self._write_end, -1
        os.close(write_end)
        self._thread.join()

    def begin(self) -> None:
        """A peer was signalled: the time runs for this rank, too, if it does not already."""
        self._deadline = min(self._deadline, time.monotonic() + self._grace_seconds)
        if self._write_end >= 0:
            os.write(self._write_end, b"\0")  # the thread waits anew, now with a deadline

    def seconds_left(self) -> float:
        """Until the process ends itself; infinite where nobody asked for it."""
        return max(0.0, self._deadline - time.monotonic())

    def _listen(self, read_end: int) -> None:
        poll = select.poll()
        poll.register(read_end)
        while True:
            if poll.poll(1000 * min(self.seconds_left(), 3600.0)):
                numbers = os.read(read_end, 512)
                if not numbers:
                    return os.close(read_end)
                for number in filter(STOPPING.__contains__, numbers):
                    self._hear(number)
            elif not self.seconds_left():
                after = name(self.requested) if self.requested else "another rank was asked to stop"
                limit = f"run.grace_seconds={self._grace_seconds:g}"
                self._end(f"no time left after {after} ({limit}): the last whole checkpoint counts")

    def _hear(self, number: int) -> None:
        now = time.monotonic()
        if self.requested:
            if is_second(self.requested, number, now - self._heard_at):
                os._exit(128 + number)
            return
        self.requested, self._heard_at = number, now
        self._deadline = min(self._deadline, now + self._grace_seconds)
        if not self.armed:
            self._end(f"{name(number)} before the first step: nothing to save")

    def _end(self, reason: str) -> None:
        try:
            within(SAY_SECONDS, lambda: self._say(reason))
        finally:
            os._exit(REQUEUE)


def within(seconds: float, function: Callable[[], object]) -> bool:
    """Calls `function` in another thread; returns when that is through, or after `seconds`: whether it is through.

    For what may block forever in a process that is about to end: printing, or a file server that is away.
    """
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def is_second(first: int, number: int, seconds: float) -> bool:
    """Whether signal `number` is a wish of its own, `seconds` after signal `first`, and not its repetition."""
    return seconds >= (REPEAT_SECONDS if number == first else OTHER_SECONDS)


def name(number: int) -> str:
    """Such as SIGTERM."""
    return signal.Signals(number).name


def _nothing(number: int, frame: object) -> None:
    """A handler: without one the interpreter does not write the number into the pipe."""
