"""Starts the ranks of one machine as processes of our own and ends them together. Knows no torch, no run."""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from training.signals import REQUEUE, STOPPING, is_second, name

PEER = 69  # a peer died or stalled: a consequence, so any other failure is the run's exit code
SPOKEN = (0, 1, 3, PEER, 70, 74, REQUEUE)  # a rank that exits with one of these has said why
LEAVE_SECONDS = 30.0  # ranks pass a last barrier together: who has not left this long after another never will
STOPPED_SECONDS = 5.0  # the same after one that was stopped: whoever ends us will not wait
PDEATHSIG = 1  # of Linux' prctl

Exit = tuple[int, int]  # rank, exit code; minus the signal's number where a signal ended it


def start_ranks(target: Callable[[int], None], size: int, preload: list[str], grace_seconds: float) -> int:
    """Calls `target(rank)` in `size` processes; kills all at the first failure, and at Ctrl-C.

    SIGTERM and SIGUSR1 are passed on to the ranks, which have `grace_seconds` to leave by themselves, and a few more
    until they are killed; a second signal kills them at once.

    The processes are forked from a server that has imported `preload` once, so starting many costs little.
    `target` must be picklable. A rank never outlives this process. Returns the exit code of the run.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    ranks = [context.Process(target=functools.partial(_follow, target), args=(rank,)) for rank in range(size)]
    with _listening() as heard:
        _start_server()
        try:
            for process in ranks:
                process.start()
            left, first, second = _wait(ranks, heard, grace_seconds)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            ended = _end(ranks)
    if second:
        return 128 + second
    stalled = ended and not any(code for _, code in left)
    code = PEER if stalled else first_cause([code for _, code in left + ended])
    for rank, own in left:
        if own not in SPOKEN:
            say("killed by " + name(-own) if own < 0 else f"ended with exit code {own}", rank)
        elif own == 0 and code == PEER:
            say("left before the others, with exit code 0", rank)
    own_codes = [own for _, own in left]
    if ended and not any(set(own_codes) - {0, REQUEUE}) and (first or REQUEUE in own_codes):
        others = ", ".join(str(rank) for rank, _ in ended)
        say(f"the run was asked to stop, and did not leave together: killed ranks {others}")
    return code


def first_cause(codes: Sequence[int]) -> int:
    """The exit code of a run whose ranks left with `codes`: the first not 0 or 69, else 69, else 0.

    A signal counts as in a shell: 128 + its number.
    """
    failures = [code for code in codes if code]
    cause = next((code for code in failures if code != PEER), PEER if failures else 0)
    return cause if cause >= 0 else 128 - cause


def say(message: str, rank: int | None = None, error: bool = True) -> None:
    """One line on stderr, tagged with the rank it is about."""
    tag = "" if rank is None else f"[rank {rank}] "
    print(f"{Path(sys.argv[0]).name}: {'error: ' if error else ''}{tag}{message}", file=sys.stderr, flush=True)


def _follow(target: Callable[[int], None], rank: int) -> None:
    launcher, server = multiprocessing.parent_process(), os.getppid()
    assert launcher is not None

    def leave_with_launcher() -> None:
        connection.wait([launcher.sentinel])
        if os.getppid() == server:
            os.kill(server, signal.SIGKILL)
        os._exit(PEER)

    # A stopped rank runs no thread, and keeps the server alive: Linux ends it with that, which any other rank ends.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=leave_with_launcher, daemon=True).start()
    target(rank)


@contextlib.contextmanager
def _listening() -> Iterator[int]:
    """The read end of a pipe that gets the number of each signal. SIGTERM and SIGUSR1 do nothing else."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    outer = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda number, frame: None) for number in STOPPING}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # whoever started us may have held them back until now
    try:
        yield read_end
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(outer)
        os.close(write_end)
        os.close(read_end)


def _start_server() -> None:
    """Starts the processes that multiprocessing needs, which outlive every signal: who ends this process ends them.

    What is ignored or blocked here is so in them, and in the ranks. A terminal's Ctrl-C stays for this process only. A
    rank takes SIGTERM and SIGUSR1 up again in its session (signals.py), so none is lost while it gets there.
    """
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    outer = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        resource_tracker.ensure_running()  # unblocks SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, outer)
        signal.signal(signal.SIGINT, interrupt)


def _wait(ranks: Sequence[BaseProcess], heard: int, grace_seconds: float) -> tuple[list[Exit], int, int]:
    """Exits in their order, until all have left, one has failed, or some do not follow the others or a signal.

    Also the first signal, and the second, which ends the wait; 0 where there was none.
    """
    running = {process.sentinel: (rank, process) for rank, process in enumerate(ranks)}
    left: list[Exit] = []
    first, heard_at, deadline = 0, 0.0, None
    while running and all(code in (0, REQUEUE) for _, code in left):
        ready = connection.wait([*running, heard], deadline and max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for sentinel in set(ready) - {heard}:
            rank, process = running.pop(sentinel)
            process.join()
            left.append((rank, process.exitcode))
            deadline = time.monotonic() + (STOPPED_SECONDS if process.exitcode == REQUEUE else LEAVE_SECONDS)
        numbers = os.read(heard, 512) if heard in ready else b""
        for number in filter(STOPPING.__contains__, numbers):
            now = time.monotonic()
            if first and is_second(first, number, now - heard_at):
                return left, first, number
            if not first:
                first, heard_at, deadline = number, now, now + grace_seconds + STOPPED_SECONDS
                for _, process in running.values():
                    with contextlib.suppress(ProcessLookupError):  # it has just left: the server reaps it, not we
                        os.kill(process.pid, number)
    return left, first, 0


def _end(ranks: Sequence[BaseProcess]) -> list[Exit]:
    """Kills the ranks that still run, also those that a signal has stopped; their exits, 0 where it was we."""
    running = [(rank, process) for rank, process in enumerate(ranks) if process.pid and process.exitcode is None]
    for _, process in running:
        process.kill()
    for _, process in running:
        process.join()
    return [(rank, max(0, process.exitcode)) for rank, process in running]
