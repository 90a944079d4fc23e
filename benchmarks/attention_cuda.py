"""One rank of a ring on one GPU, with its true schedule, against one kernel over the same pairs.

    python benchmarks/attention.py --device cuda [--quick] [--json PATH]

One causal sequence, zigzag, bfloat16, 32 query heads and 8 key/value heads of 128. Blocks of the other ranks come by
copies on a stream of their own, which then holds the stream for as long as the block would take over a link of
LINK_BYTES_PER_SECOND: what is exposed shows, and so do launches, merges and accumulation. The whole kernel gets the
same queries and all keys at once, by the very tiles of a gather. What the kernels compute is held to float64 by
tests/gpu.
"""

from argparse import Namespace
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import report
from model.kernels import capability
from model.mask import Mask
from parallel import schedule
from parallel.collectives import Message
from parallel.layout import padded_length
from parallel.ring import KERNELS, backward, forward
from parallel.route import Route
from parallel.traffic import Buffers, Program

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LINK_BYTES_PER_SECOND = 45e9
CASES = [  # tokens of a rank, ranks, route, least share of one kernel's throughput
    (8192, 8, Route(), 0.93),
    (32768, 32, Route(), 0.96),
    (4096, 256, Route("direct", depth=2, blocks_per_hop=8), 0.90),
]


class Throttled:
    """An exchange whose messages come from nowhere, at the speed of a link, on a stream of their own."""

    def __init__(self, rank: int, size: int, cycles_per_second: float):
        self.rank, self.size, self.cycles_per_second = rank, size, cycles_per_second
        self.stream = torch.cuda.Stream()

    def start(self, sends: list[Message], receives: list[Message]) -> "_Arrival":
        self.stream.wait_stream(torch.cuda.current_stream())
        num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in receives)
        with torch.cuda.stream(self.stream):
            for _, tensor in receives:
                tensor.fill_(0.01)
            torch.cuda._sleep(int(num_bytes / LINK_BYTES_PER_SECOND * self.cycles_per_second))
        done = torch.cuda.Event()
        done.record(self.stream)
        return _Arrival(done)


class _Arrival:
    def __init__(self, done: torch.cuda.Event):
        self.done = done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


def main(arguments: Namespace) -> int:
    machine = report.machine() | {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none"}
    criteria, rows = [], []
    for local, ranks, route, bound in CASES:
        name = f"{local} tokens a rank, R={ranks}, {route.name}: throughput over one kernel"
        if not torch.cuda.is_available():
            criteria.append(report.not_judged(name, bound, "no CUDA device here"))
            continue
        kernel = capability.choose("auto", "cuda", "bfloat16", head_dim=HEAD_DIM)
        ours, whole = _measure(local, ranks, route, kernel, 3 if arguments.quick else 7)
        rows.append({"kernel": kernel, "tokens": local, "ranks": ranks, "ring ms": ours, "kernel ms": whole})
        criteria.append(report.at_least(name, whole / ours, bound))
    return report.finish(machine, rows, criteria, arguments.json)


def _measure(local: int, ranks: int, route: Route, name: str, repetitions: int) -> tuple[float, float]:
    """Milliseconds, forward and backward, of a rank in the middle of the ring, and of one kernel; interleaved."""
    kernel, length, rank = KERNELS[name], local * ranks, ranks // 2
    assert padded_length("zigzag", length, ranks) == length
    make = lambda way: torch.from_numpy(  # noqa: E731
        schedule.plan("zigzag", Mask(), [(length,)], length, length, ranks, rank, way)
    )
    plan, tiles = make(route), Program(make(Route("gather"))).hops[1]
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(tokens: int, heads: int) -> Tensor:
        return torch.randn(1, tokens, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, dout, k, v = draw(local, HEADS), draw(local, HEADS), draw(local, KV_HEADS), draw(local, KV_HEADS)
    keys, values = draw(length, KV_HEADS)[0], draw(length, KV_HEADS)[0]
    exchange, buffers = Throttled(rank, ranks, _cycles_per_second()), Buffers()

    def ring() -> None:
        out, lse = forward(q, k, v, plan, exchange, kernel, buffers)
        backward(dout, q, k, v, out.bfloat16(), lse, plan, exchange, kernel, buffers)

    def whole() -> None:
        out, lse = kernel.forward(q[0], keys, values, tiles)
        kernel.backward(dout[0], q[0], keys, values, out.bfloat16(), lse, tiles)

    times: dict[Callable[[], None], list[float]] = {ring: [], whole: []}
    for repetition in range(repetitions + 2):
        for work, measured in times.items():
            seconds = _timed(work)
            if repetition > 1:  # the first two warm up
                measured.append(seconds)
    return min(times[ring]), min(times[whole])


def _timed(work: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _cycles_per_second() -> float:
    """Of what `torch.cuda._sleep` counts in."""
    cycles = 50_000_000
    torch.cuda._sleep(cycles)
    return cycles / (_timed(lambda: torch.cuda._sleep(cycles)) / 1e3)
