"""What `benchmarks/overlap.py` predicts of what it measures: step times, and from which block size on they hide.

Two ranks have two hops. The first is computed while keys and values are on their way, the second has nothing to hide;
in backward the gradients of the peer's keys and values then go home:

    forward            max(a0, t1) + a1
    forward+backward   max(a0, t1) + a1 + max(b0, t2) + b1 + t3

a0, a1, b0, b1: seconds of the hops in forward and backward, without a transfer; t1, t2, t3: of the messages, without
computing. This is (N-1) max(a, t) + a for N = 2, and likewise in backward, where the first hop has no gradients to
pass on yet. A cell holds where its step takes at most 1.10 x the maxima plus the other terms, which no ring can hide.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

OVER_BOUND = 1.10
VISIBLE = 1 / 2  # of the pairs of a causal hop, on a balanced layout


@dataclass(frozen=True)
class Case:
    """The attention of one cell, on each of two ranks."""

    block: int  # tokens
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int

    @property
    def ratio(self) -> float:
        return self.kv_heads / self.heads

    @property
    def ratio_text(self) -> str:
        return "1" if self.kv_heads == self.heads else f"1/{self.heads // self.kv_heads}"


@dataclass(frozen=True)
class Step:
    """One pass of a cell: seconds measured, and its prediction in two parts."""

    passes: str
    seconds: float
    compute: float
    transfer: float
    overlapped: float  # the sum of maxima
    rest: float  # what nothing hides

    @property
    def predicted(self) -> float:
        return self.overlapped + self.rest

    @property
    def over(self) -> float:
        """What the overlapped part took, over what it should take."""
        return (self.seconds - self.rest) / self.overlapped


@dataclass(frozen=True)
class Cell:
    """Seconds measured of a case on one link."""

    case: Case
    gigabits: float
    hops: tuple[float, float, float, float]  # a0, a1, b0, b1
    transfers: tuple[float, float, float, float]  # t1, t2, t3, and one more message at the steady rate of the link
    seconds: tuple[float, float]  # of the step: forward, forward+backward

    def steps(self) -> tuple[Step, Step]:
        (a0, a1, b0, b1), (t1, t2, t3, _) = self.hops, self.transfers
        forward = Step("forward", self.seconds[0], a0 + a1, t1, max(a0, t1), a1)
        both = Step(
            "forward+backward",
            self.seconds[1],
            a0 + a1 + b0 + b1,
            t1 + t2 + t3,
            max(a0, t1) + max(b0, t2),
            a1 + b1 + t3,
        )
        return forward, both


@dataclass(frozen=True)
class Knee:
    """The block size from which, in a long ring, computing a hop covers its transfer."""

    passes: str
    gigabits: float
    ratio: str  # of key/value to query heads
    formula: float
    measured: float


def knees(cells: Sequence[Cell], passes: str) -> Iterator[Knee]:
    """The knees of a forward or backward pass that lie between two block sizes of the sweep.

    Measured: where the excess of transfer over compute changes sign, interpolated between logarithms. Compute is the
    second hop, which has no diagonal, like all but the first of a long ring; transfer is one message at the steady
    rate, in backward two, since gradients travel along. By the formula:

        forward    c* = (e / 2k) r F/B            backward   c* = (2e / 5k) r F/B

    with e bytes an element, k of the pairs visible, r the ratio of heads, F FLOP/s and B bytes/s. F is that of the
    largest block, one figure for all knees of a pass.
    """
    flops_a_pair, messages, hop = (4, 1, 1) if passes == "forward" else (10, 2, 3)  # per element of the width
    full = max(cells, key=lambda cell: (cell.case.ratio, cell.case.block))
    width = full.case.heads * full.case.head_dim
    flops = flops_a_pair * VISIBLE * full.case.block**2 * width / full.hops[hop]
    for ratio, gigabits in dict.fromkeys((cell.case.ratio, cell.gigabits) for cell in cells):
        swept = [cell for cell in cells if (cell.case.ratio, cell.gigabits) == (ratio, gigabits)]
        bytes_a_second = gigabits * 1e9 / 8
        bytes_a_token = 2 * messages * full.case.element_bytes * ratio * width
        formula = bytes_a_token / (flops_a_pair * VISIBLE * width) * flops / bytes_a_second
        measured = None
        for small, large in pairwise(sorted(swept, key=lambda cell: cell.case.block)):
            over, under = (math.log(messages * cell.transfers[3] / cell.hops[hop]) for cell in (small, large))
            if over > 0 >= under:
                measured = small.case.block * (large.case.block / small.case.block) ** (over / (over - under))
        if measured is not None:
            yield Knee(passes, gigabits, swept[0].case.ratio_text, formula, measured)


def slope(knees: Sequence[Knee]) -> float | None:
    """Of the measured knees over the formula's, between logarithms; None for fewer than three."""
    if len(knees) < 3:
        return None
    formula, measured = np.log([(knee.formula, knee.measured) for knee in knees]).T
    return float(np.polyfit(formula, measured, 1)[0])


def exponents(knees: Sequence[Knee]) -> tuple[float, float]:
    """With which powers of 1 / link and of the ratio of heads measured knees grow; the formula says 1 and 1."""
    causes = [[-math.log(x.gigabits), math.log(Fraction(x.ratio)), x.passes == "forward", 1] for x in knees]
    link, ratio, *_ = np.linalg.lstsq(np.array(causes, float), np.log([x.measured for x in knees]), rcond=None)[0]
    return float(link), float(ratio)
