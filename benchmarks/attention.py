"""Ring attention over two processes of one thread, against PyTorch's attention on two threads.

    python benchmarks/attention.py [--quick] [--json PATH]

One causal sequence of 8,192 tokens, 8 heads of 64, float32: both sides use both cores, so the ratio of their
throughputs is what distributing costs. Runs are interleaved (PyTorch, then each layout, again and again) and
the fastest of each counts: a machine that is busy for a moment then disturbs both sides alike. Each ring
process is pinned to a core where the system can do that.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from model.mask import Mask  # noqa: E402
from parallel import layout as layouts  # noqa: E402
from parallel import ring, schedule  # noqa: E402
from parallel.collectives import exchange_clock  # noqa: E402

LENGTH, HEADS, HEAD_DIM, RANKS = 8192, 8, 64, 2
RATIO_BOUND = 0.90  # of PyTorch's throughput, forward and backward, with zigzag
PASSES = ("forward", "forward+backward")


def main() -> int:
    arguments = report.arguments(__doc__.splitlines()[0]).parse_args()
    machine = report.machine()
    repetitions, budget_seconds = (3, 80) if arguments.quick else (7, 600)
    begun = time.monotonic()
    torch.set_num_threads(RANKS)
    dense = [x.transpose(1, 2).contiguous() for x in _inputs(torch.Generator().manual_seed(0))]
    seconds: dict[tuple[str, str], list[float]] = {}
    waits: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = _start_ranks(folder)
        for repetition in range(repetitions + 1):  # the first warms up and does not count
            if repetition > 1 and time.monotonic() - begun > budget_seconds:
                break  # on a machine that others keep busy: fewer figures rather than late ones
            for passes in PASSES:
                measured = {"torch sdpa": (_time(lambda p=passes: _sdpa(dense, p)), 0.0)}
                measured |= {layout: _time_ring(ranks, layout, passes) for layout in layouts.LAYOUTS}
                for name, (spent, waited) in measured.items():
                    if repetition:
                        seconds.setdefault((name, passes), []).append(spent)
                        waits.setdefault((name, passes), []).append(waited)
        for _, connection in ranks:
            connection.send(None)
        for process, _ in ranks:
            process.join()
    rows = [
        {
            "attention": name if name.startswith("torch") else f"ring, {name}",
            "passes": passes,
            "seconds": min(times),
            "median": sorted(times)[len(times) // 2],
            "ratio": min(seconds["torch sdpa", passes]) / min(times),
            "waited": waits[name, passes][times.index(min(times))],
        }
        for (name, passes), times in seconds.items()
    ]
    ratio = next(row["ratio"] for row in rows if row["attention"] == "ring, zigzag" and row["passes"] == PASSES[1])
    name = f"zigzag ring throughput over torch sdpa, {PASSES[1]}"
    return report.finish(machine, rows, [report.at_least(name, ratio, RATIO_BOUND)], arguments.json)


def _inputs(generator: torch.Generator) -> list[Tensor]:
    """q, k, v, dout [1, S, H, D], the same in every process."""
    return [torch.randn(1, LENGTH, HEADS, HEAD_DIM, generator=generator) for _ in range(4)]


def _time(run: Callable[[], None]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _sdpa(inputs: list[Tensor], passes: str) -> None:
    """PyTorch's attention on q, k, v, dout [1, H, S, D], the order in which it is fastest."""
    backward = passes == PASSES[1]
    q, k, v = (x.detach().requires_grad_(backward) for x in inputs[:3])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if backward:
        out.backward(inputs[3])


def _start_ranks(folder: str) -> list[tuple[multiprocessing.Process, Connection]]:
    """Processes that wait for work on a pipe, so that PyTorch's turn has the machine to itself."""
    context = multiprocessing.get_context("spawn")
    ranks = []
    for rank in range(RANKS):
        here, there = context.Pipe()
        process = context.Process(target=_rank, args=(rank, there, f"file://{folder}/rendezvous"), daemon=True)
        process.start()
        ranks.append((process, here))
    return ranks


def _time_ring(
    ranks: list[tuple[multiprocessing.Process, Connection]], layout: str, passes: str
) -> tuple[float, float]:
    """(seconds of the slowest rank, seconds the ranks waited for exchanges on average)."""
    for _, connection in ranks:
        connection.send((layout, passes))
    spent, waited = zip(*(connection.recv() for _, connection in ranks), strict=True)
    return max(spent), sum(waited) / len(waited)


def _rank(rank: int, connection: Connection, rendezvous: str) -> None:
    """A rank: for each (layout, passes) from the pipe, (seconds, seconds waited) back, until None comes."""
    cores = report.cores()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    inputs = _inputs(torch.Generator().manual_seed(0))
    group_name = dist.group.WORLD.group_name
    local = {}
    for layout in layouts.LAYOUTS:
        index = torch.from_numpy(layouts.global_index(layouts.chunks(layout, LENGTH, RANKS, rank)))
        plan = torch.from_numpy(schedule.plan(layout, Mask(), [(LENGTH,)], LENGTH, LENGTH, RANKS, rank))
        local[layout] = (plan, [x[:, index] for x in inputs])
    while (request := connection.recv()) is not None:
        layout, passes = request
        plan, (q, k, v, dout) = local[layout]
        backward = passes == PASSES[1]
        q, k, v = (x.detach().requires_grad_(backward) for x in (q, k, v))
        dist.barrier()
        exchange_clock.read_and_reset()
        begun = time.perf_counter()
        out, _ = ring.attend(q, k, v, plan, group_name, "sdpa")
        if backward:
            out.backward(dout)
        connection.send((time.perf_counter() - begun, exchange_clock.read_and_reset()))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
