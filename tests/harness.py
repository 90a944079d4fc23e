"""Run a function on several gloo ranks, as processes of this machine.

Ranks start by forkserver with torch already imported and meet through a file, never a port. The first rank
that fails ends all: its exception is raised again here, with its rank and traceback as a note.
"""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

# torch._dynamo: the first call of any custom op imports it, hundreds of modules, in every rank
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "numpy"]


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Call `fn(*args)` on every rank, inside an initialised gloo process group, with one thread; return each
    rank's value.

    `fn` is a function of a module's top level; arguments and results are pickled. Raises what the first rank
    to fail raised, RuntimeError where a rank dies without a word, TimeoutError after `timeout` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = []
        try:
            for rank in range(world_size):
                here, there = context.Pipe(duplex=False)
                work = (there, fn, args, rank, world_size, f"file://{folder}/rendezvous", timeout)
                process = context.Process(target=_rank, args=work, daemon=True)
                process.start()
                there.close()
                ranks.append((process, here))
            return _collect([connection for _, connection in ranks], fn, timeout)
        finally:
            for process, connection in ranks:
                connection.close()
                process.join(timeout=0.5 if process.exitcode is None else 0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(connections: list[Connection], fn: Callable[..., Any], timeout: float) -> list[Any]:
    """Each rank's value, or the exception of the rank that failed first."""
    deadline = time.monotonic() + timeout
    values: dict[int, Any] = {}
    while len(values) < len(connections):
        open_ranks = [rank for rank in range(len(connections)) if rank not in values]
        ready = wait([connections[rank] for rank in open_ranks], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(
                f"{fn.__name__}: ranks {open_ranks} of {len(connections)} did not end within {timeout} s"
            )
        failures = []
        for connection in ready:
            rank = connections.index(connection)
            try:
                failed_at, value = connection.recv()
            except EOFError:
                failed_at, value = time.monotonic(), RuntimeError(f"rank {rank} died without a word")
            if failed_at is None:
                values[rank] = value
            else:
                failures.append((failed_at, rank, value))
        if failures:
            raise min(failures, key=lambda failure: failure[:2])[2]
    return [values[rank] for rank in range(len(connections))]


def _rank(
    connection: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    rendezvous: str,
    timeout: float,
) -> None:
    """What a rank's process does; sends (None, value) or (time of failure, exception)."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=limit)
        value = fn(*args)
        dist.barrier()
        dist.destroy_process_group()
        connection.send((None, value))
    except BaseException as error:
        failed_at = time.monotonic()
        note = f"on rank {rank} of {world_size}:\n{traceback.format_exc()}"
        error.add_note(note)
        connection.send((failed_at, _picklable(error, note)))


def _picklable(error: BaseException, note: str) -> BaseException:
    """The exception itself if it survives a pickle, else a RuntimeError that says the same."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        copy.add_note  # noqa: B018 - exceptions with odd constructors fail here or above
        return error
    except Exception:
        replacement = RuntimeError(f"{type(error).__name__}: {error}")
        replacement.add_note(note)
        return replacement
