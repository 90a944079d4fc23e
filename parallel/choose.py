"""Which layout and which route a micro-batch takes. No torch here.

Every rank chooses for itself, and all must choose the same: nothing is measured (see `parallel.cost`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from model.mask import Mask
from parallel.cost import Estimate, Rates, Ring, Shape
from parallel.layout import LAYOUTS, Layout
from parallel.route import ROUTES, Route
from parallel.wire import Network

DEPTHS = (1, 2, 4, 8)
TIE = 1.01  # seconds may differ by so much between candidates that are equally good
GRANULARITY = 128  # queries × keys that a kernel computes in full or leaves out
USEFUL = {  # layouts that are tried on each route
    "relay": ("zigzag", "striped"),  # it passes whole blocks by everybody: where all have something to do with them
    "direct": ("contiguous", "zigzag", "grouped", "balanced", "striped"),
    "gather": ("zigzag", "balanced"),
}
CALM = 0.5  # of its time a network card may be busy before that speaks against a candidate


@dataclass(frozen=True)
class Choice:
    """Seconds are those of one layer's attention, forward and backward.

    Attributes:
        ideal_seconds: of the same kernels, were documents whole, ranks equally busy and nothing sent.
        buffer_rows: of the rank that needs most.
        why: one line for the log.
    """

    layout: Layout
    layout_name: str
    route: Route
    seconds: float
    ideal_seconds: float
    busiest_nic_seconds: float
    buffer_rows: int
    why: str


def choose(
    documents: Sequence[Sequence[int]],
    sequence_length: int,
    padded_length: int,
    ranks: int,
    mask: Mask,
    shape: Shape,
    rates: Rates,
    network: Network,
    max_blocks: float,
    layout: str = "auto",
    route: str = "auto",
    depth: int = 0,
    narrow: bool = False,
    dealt: Layout | None = None,
    granularity: int = GRANULARITY,
    background_seconds: float = 0.0,
) -> Choice:
    """The layout and route with which attention over these documents is done first.

    Of those that are equally fast the simplest, in the order of `candidates`; if possible one that keeps no network
    card busy for more than half of the time. Buffers may have max_blocks times the rows of a rank.

    padded_length is one that all layouts divide: `padded_length("auto", …)`. layout, route, depth (exchanges ahead)
    and narrow (gradients in the dtype of keys) leave fewer candidates; `dealt` are the tokens where they are dealt
    already, by the layout of that name. granularity: see `parallel.work`. background_seconds: for which other traffic
    uses each network card in a forward pass, and again in a backward pass.

    Every rank gets the same from the same arguments. Raises ValueError for unknown names, documents that do not fit,
    and where nothing stays within max_blocks.
    """
    for key, value, known in (("layout", layout, LAYOUTS), ("route", route, ROUTES)):
        if value not in ("auto", *known):
            raise ValueError(f"{key}={value} is unknown: use one of auto, {', '.join(known)}")
    ring = Ring(documents, sequence_length, padded_length, ranks, mask, shape, rates, network, granularity)
    if dealt is not None:
        ring.take(layout, dealt)
    tried: list[_Candidate] = []
    for name, way in candidates(ring, layout, route, depth, narrow):
        candidate = _Candidate(ring, name, way, background_seconds, max_blocks)
        bound = ring.bound(name)
        if _cannot_win(bound, tried):
            continue
        for other in tried:
            if other.least_seconds <= TIE * bound:  # its seconds decide
                other.estimate()
        if _cannot_win(bound, tried):
            continue
        if not _cannot_win(candidate.least_seconds, tried):
            candidate.estimate()
        tried.append(candidate)
    best = _best(tried)
    if best is None:
        least = min((estimate for candidate in tried for estimate in candidate.large), key=lambda one: one.buffer_rows)
        raise ValueError(
            f"{max_blocks=} is too little for any layout and route that is left: "
            f"{least.name} needs {-(-least.buffer_rows // ring.local_rows)}"
        )
    first = [*tried[0].large, tried[0].good][0]
    dealt, _ = ring.deal(best.layout)
    why = _why(best, first, ring.ideal_seconds)
    return Choice(
        dealt, best.layout, best.route, best.seconds, ring.ideal_seconds, best.nic_seconds, best.buffer_rows, why
    )


def candidates(ring: Ring, layout: str, route: str, depth: int, narrow: bool) -> Iterator[tuple[str, Route]]:
    """Layouts and routes to try, the simplest first: from relay to gather, each on `balanced` last."""
    ranks = ring.ranks
    if ranks == 1:
        yield ("contiguous" if layout == "auto" else layout), Route()
        return
    width = ring.network.ranks_per_node
    nodes = (0, width) if 1 < width < ranks and ranks % width == 0 and not narrow else (0,)
    routes = [] if depth or narrow else [Route(node_ranks=node) for node in nodes]
    routes += [Route("direct", n, 1, node, narrow=narrow) for n in ([depth] if depth else DEPTHS) for node in nodes]
    if not depth and not narrow:
        routes.append(Route("gather", head_groups=ring.shape.num_kv_heads))
    for way in routes:
        for name in USEFUL[way.name] if layout == "auto" else (layout,):
            divides = ring.padded_length % (ranks * (2 if name in ("zigzag", "balanced") else 1)) == 0
            if route in ("auto", way.name) and (divides or layout != "auto"):
                yield name, way


class _Candidate:
    """A layout and a route, whose seconds are found only where the least that they can be does not decide."""

    def __init__(self, ring: Ring, name: str, way: Route, background_seconds: float, max_blocks: float):
        self.ring, self.name, self.way, self.given = ring, name, way, (background_seconds, max_blocks)
        self.good: Estimate | None = None
        self.large: list[Estimate] = []  # with buffers of more than max_blocks
        self.open = True

    @cached_property
    def blocks(self) -> list[int]:
        return self.ring.blocks_per_hop(self.name, self.way, self.given[1])

    @cached_property
    def least_seconds(self) -> float:
        return self.ring.least_seconds(self.name, self.way, self.blocks[0])

    def estimate(self) -> None:
        """With as many blocks a hop as there is room for."""
        blocks, self.open = self.blocks if self.open else [], False
        for number in blocks:
            estimate = self.ring.estimate(self.name, replace(self.way, blocks_per_hop=number), *self.given)
            if estimate.buffer_rows <= self.given[1] * self.ring.local_rows:
                self.good = estimate
                break
            self.large.append(estimate)


def _best(tried: Sequence[_Candidate]) -> Estimate | None:
    """Of those that are equally fast the first calm one, else the first; None where none has room.

    Candidates are left without an estimate as long as none that they could have changes the answer.
    """
    while True:
        good = [candidate for candidate in tried if candidate.good]
        fastest = min((candidate.good.seconds for candidate in good), default=np.inf)
        waiting = [one for one in tried if one.open and one.least_seconds <= TIE * fastest]
        equal = [one for one in good if one.good.seconds <= TIE * fastest]
        best = next((one for one in equal if _calm(one.good)), equal[0] if equal else None)
        least = min(waiting, key=lambda one: one.least_seconds, default=None)
        if least is None:
            return best and best.good
        stays = _calm(best.good) and best.good.seconds <= TIE * least.least_seconds
        if stays and tried.index(best) < min(map(tried.index, waiting)):
            return best.good
        least.estimate()


def _cannot_win(least_seconds: float, tried: Sequence[_Candidate]) -> bool:
    """Whether one before it is faster than a candidate of at least so many seconds, or as fast and simpler."""
    good = (candidate.good for candidate in tried if candidate.good)
    return any(
        least_seconds > TIE * other.seconds or (_calm(other) and TIE * least_seconds >= other.seconds) for other in good
    )


def _calm(estimate: Estimate) -> bool:
    return estimate.nic_seconds <= CALM * estimate.seconds


def _why(best: Estimate, first: Estimate, ideal_seconds: float) -> str:
    """The line for the log: `best` against the simplest that was tried."""
    if not ideal_seconds:
        return f"{best.name}, nothing to compute"
    line = f"{best.name}, {best.seconds / ideal_seconds:.2f} x ideal"
    if first[:2] == best[:2]:
        return line
    if first.seconds == np.inf:
        return f"{line}; {first.name} needs larger buffers"
    return f"{line}; {first.name} would take {first.seconds / ideal_seconds:.2f} x"
