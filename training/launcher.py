"""Starts the ranks of one machine as processes of our own and ends them together. Knows no torch, no run."""

import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

PEER = 69  # a peer died or stalled: a consequence, so any other failure is the run's exit code
SPOKEN = (0, 1, 3, PEER, 70, 74, 75)  # a rank that exits with one of these has said why
LEAVE_SECONDS = 30.0  # ranks pass a last barrier together: who has not left this long after another never will
TERMINATE_SECONDS = 5.0  # between SIGTERM and SIGKILL

Exit = tuple[int, int]  # rank, exit code; minus the signal's number where a signal ended it


def start_ranks(target: Callable[[int], None], size: int, preload: list[str]) -> int:
    """Calls `target(rank)` in `size` processes; ends all at the first failure, Ctrl-C or SIGTERM.

    The processes are forked from a server that has imported `preload` once, so starting many costs little.
    `target` must be picklable. A rank never outlives this process. Returns the exit code of the run.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    # Ignored signals are inherited: a terminal's Ctrl-C is for this process only, which then ends the ranks.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, interrupt)
    terminate = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    ranks = [context.Process(target=functools.partial(_follow, target), args=(rank,)) for rank in range(size)]
    try:
        for process in ranks:
            process.start()
        left = _wait(ranks)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        ended = _end(ranks)
        signal.signal(signal.SIGTERM, terminate)
    stalled = ended and not any(code for _, code in left)
    code = PEER if stalled else first_cause([code for _, code in left + ended])
    for rank, own in left:
        if own not in SPOKEN:
            say("killed by " + signal.Signals(-own).name if own < 0 else f"ended with exit code {own}", rank)
        elif own == 0 and code == PEER:
            say("left before the others, with exit code 0", rank)
    return code


def first_cause(codes: Sequence[int]) -> int:
    """The exit code of a run whose ranks left with `codes`: the first not 0 or 69, else 69, else 0.

    A signal counts as in a shell: 128 + its number.
    """
    failures = [code for code in codes if code]
    cause = next((code for code in failures if code != PEER), PEER if failures else 0)
    return cause if cause >= 0 else 128 - cause


def say(message: str, rank: int | None = None) -> None:
    """One line on stderr, tagged with the rank it is about."""
    tag = "" if rank is None else f"[rank {rank}] "
    print(f"{Path(sys.argv[0]).name}: error: {tag}{message}", file=sys.stderr, flush=True)


def _follow(target: Callable[[int], None], rank: int) -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def leave_with_launcher() -> None:
        connection.wait([launcher.sentinel])
        os._exit(PEER)

    threading.Thread(target=leave_with_launcher, daemon=True).start()
    target(rank)


def _wait(ranks: Sequence[BaseProcess]) -> list[Exit]:
    """Exits in their order, until all have left, one has failed, or some do not follow the others."""
    running = {process.sentinel: (rank, process) for rank, process in enumerate(ranks)}
    left: list[Exit] = []
    while running and not any(code for _, code in left):
        ready = connection.wait(list(running), timeout=LEAVE_SECONDS if left else None)
        if not ready:
            break
        for sentinel in ready:
            rank, process = running.pop(sentinel)
            process.join()
            left.append((rank, process.exitcode))
    return left


def _end(ranks: Sequence[BaseProcess]) -> list[Exit]:
    """Ends the ranks that still run, by SIGTERM, then SIGKILL; their exits, 0 where it was our signal."""
    running = [(rank, process) for rank, process in enumerate(ranks) if process.pid and process.exitcode is None]
    waiting = {process.sentinel: process for _, process in running}
    deadline = time.monotonic() + TERMINATE_SECONDS
    try:
        for process in waiting.values():
            process.terminate()
        while waiting and time.monotonic() < deadline:
            for sentinel in connection.wait(list(waiting), timeout=deadline - time.monotonic()):
                del waiting[sentinel]
    finally:  # also where a second Ctrl-C cuts the wait short
        for process in waiting.values():
            process.kill()
    for _, process in running:
        process.join()
    return [(rank, max(0, process.exitcode)) for rank, process in running]
