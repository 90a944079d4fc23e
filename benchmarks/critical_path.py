"""The critical path of a ring of more ranks than there are cores: the sum over hops of what the slowest rank computes.

All ranks have their turn one after another in this thread, each with its true plan and PyTorch's kernel, and what
counts is the processor time of the kernel calls (`time.thread_time`): other work on the machine hardly shows in it.
What is received is noise of the right shape, since the work does not depend on it.

In theory the contiguous layout takes 2 - 1/R times as long as zigzag.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from model.kernels import sdpa
from model.mask import Mask
from parallel import ring, schedule

LOCAL_LENGTH, HEADS, HEAD_DIM = 2048, 1, 64
RINGS = (4, 8)
BALANCED = ("contiguous", "zigzag")
DEVIATION_BOUND = 0.07


class Noise:
    """An exchange with nobody behind it."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def start(self, sends, receives) -> "Noise":
        for _, tensor in receives:
            tensor.normal_()
        return self

    def wait(self) -> None:
        pass


def measure(repetitions: int) -> tuple[list[dict[str, Any]], list[report.Criterion]]:
    """Rows and criteria. The fastest of `repetitions` counts for each rank and hop. Leaves torch with one thread."""
    torch.set_num_threads(1)  # kernels then compute in this thread, whose time is taken
    rows, criteria = [], []
    for ranks in RINGS:
        seconds: dict[tuple, float] = defaultdict(lambda: torch.inf)
        for repetition in range(repetitions + 1):
            for layout in BALANCED:
                for rank in range(ranks):
                    for (passes, hop), spent in _turn(layout, ranks, rank).items():
                        if repetition:  # the first warms up
                            where = layout, passes, hop, rank
                            seconds[where] = min(seconds[where], spent)
        path = {layout: _path(seconds, layout) for layout in BALANCED}
        ratio, theory = path["contiguous"] / path["zigzag"], 2 - 1 / ranks
        rows.append({"ranks": ranks, **path, "ratio": ratio, "theory": theory})
        name = f"critical path of {ranks} ranks: contiguous over zigzag, off {theory:.4g} by"
        criteria.append(report.at_most(name, abs(ratio / theory - 1), DEVIATION_BOUND))
    return rows, criteria


def _path(seconds: dict[tuple, float], layout: str) -> float:
    slowest: dict[tuple, float] = defaultdict(float)
    for (of, *slot, _), spent in seconds.items():
        if of == layout:
            slowest[tuple(slot)] = max(slowest[tuple(slot)], spent)
    return sum(slowest.values())


def _turn(layout: str, ranks: int, rank: int) -> dict[tuple[str, int], float]:
    """Seconds of the kernel by (pass, hop): one rank, forward and backward."""
    spent: dict[tuple[str, int], float] = defaultdict(float)

    def timed(passes: str) -> Callable[..., Any]:
        def call(*given: Tensor, into: Any) -> Any:
            begun = time.thread_time()
            result = getattr(sdpa, passes)(*given, into=into)
            tiles = given[-1]
            spent[passes, int(tiles[0, schedule.HOP])] += time.thread_time() - begun
            return result

        return call

    kernel = SimpleNamespace(forward=timed("forward"), backward=timed("backward"))
    length = ranks * LOCAL_LENGTH
    plan = torch.from_numpy(schedule.plan(layout, Mask(), [(length,)], length, length, ranks, rank))
    q, k, v, dout = torch.randn(4, 1, LOCAL_LENGTH, HEADS, HEAD_DIM).unbind()
    exchange = Noise(rank, ranks)
    out, lse = ring.forward(q, k, v, plan, exchange, kernel)
    ring.backward(dout, q, k, v, out, lse, plan, exchange, kernel)
    return spent
