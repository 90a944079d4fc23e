"""Work in other processes: results in order, a bounded number of jobs under way.

The processes leave Ctrl-C to the one that started them, and end at once when it does, however it ends.
"""

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

GIVE_BACK_JOBS = 16  # after so many a process gives back memory
LOOK_SECONDS = 1.0  # between looks whether all processes are alive
FEW_JOBS = 4  # fewer are done here, sooner than processes would have started
Info, Job, Result = TypeVar("Info"), TypeVar("Job"), TypeVar("Result")


def num_cpus() -> int:
    """CPUs that this process may use, which on a shared node are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(
    work: Callable[[Job], Result], jobs: Iterable[tuple[Info, Job]], workers: int, few: int = FEW_JOBS
) -> Iterator[tuple[Info, Result]]:
    """`work(job)` for each of `jobs`, with what came beside it, in their order.

    Args:
        work: pickled once for each process, at its start. What it raises is raised here.
        jobs: asked for as room is, from this thread: at most two a process are under way.
        workers: processes; with 1, work is done here.
        few: so many jobs are worth processes; fewer are done here.

    Raises:
        OSError: where a process dies.
    """
    jobs = iter(jobs)
    first = list(itertools.islice(jobs, few if workers > 1 else 0))
    if workers > 1 and len(first) == few:
        yield from _elsewhere(work, itertools.chain(first, jobs), workers)
    else:
        for info, job in itertools.chain(first, jobs):
            yield info, work(job)


def apart(work: Callable[[Job], Result], job: Job) -> Result:
    """`work(job)` in a process of its own, whose memory goes with it."""
    [(_, result)] = _elsewhere(work, [(None, job)], 1)
    return result


def _elsewhere(
    work: Callable[[Job], Result], jobs: Iterable[tuple[Info, Job]], workers: int
) -> Iterator[tuple[Info, Result]]:
    context = multiprocessing.get_context("spawn")  # a fork would take along threads and memory of this process
    stopped, stop = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(work, stopped))
    pending: deque[tuple[Info, Future[Result]]] = deque()

    def first() -> tuple[Info, Result]:
        info, future = pending.popleft()
        while not future.done():
            died = any(not process.is_alive() for process in list((pool._processes or {}).values()))
            futures.wait([future], LOOK_SECONDS)
            if died and not future.done():
                _break(pool)
        return info, future.result()

    try:
        for info, job in jobs:
            with _without_interrupts():  # processes start here
                pending.append((info, pool.submit(_do, job)))
            if len(pending) == 2 * workers:
                yield first()
        while pending:
            yield first()
    except BrokenProcessPool:
        raise OSError(
            f"one of {workers} processes died, perhaps for want of memory: a smaller data.workers takes less"
        ) from None
    except BaseException:
        stop.close()
        _break(pool)
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        stop.close()
        stopped.close()


def _break(pool: ProcessPoolExecutor) -> None:
    """Ends a pool's processes, and its threads, which do not always see that by themselves.

    A process that ends while it sends a result, or holds the lock of the queue of jobs, leaves the pool's threads
    waiting for the rest of it: in pipes whose other ends lie in this process, too, and therefore never break.
    """
    for process in list((pool._processes or {}).values()):
        process.kill()
    for end in (pool._result_queue._writer, pool._call_queue._reader):
        if not end.closed:
            end.close()


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C waits; a process that starts meanwhile never hears it, not even before it could say that it ignores it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_work: Callable[[Any], Any]  # of a process that was started here
_num_done = itertools.count(1)


def _begin(work: Callable[[Any], Any], stopped: Connection) -> None:
    global _work
    parent = multiprocessing.parent_process()
    assert parent is not None, "_begin is for processes that _elsewhere starts"
    threading.Thread(target=_end_with, args=(parent.sentinel, stopped), daemon=True).start()
    _work = work


def _end_with(parent: int, stopped: Connection) -> None:
    wait([parent, stopped])
    os._exit(1)


def _do(job: Any) -> Any:
    result = _work(job)
    if next(_num_done) % GIVE_BACK_JOBS == 0:
        give_back()
    return result


def give_back() -> None:
    """Returns freed memory to the system. Large buffers come and go with every job, and left alone glibc keeps more
    and more room for them between small ones; giving each back at once would take a fifth of the time.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
