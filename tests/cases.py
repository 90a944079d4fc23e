"""What the tests of the ring go through: layouts, routes, masks, and inputs of a prime length with their truth."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from model.kernels import sdpa
from model.mask import Mask
from parallel.deal import deal
from parallel.layout import LAYOUTS, Chunk, Layout, assemble, padded_length
from parallel.route import Route
from tests import oracle
from tests.threads import ring_attention

PRIME, HEADS, HEAD_DIM, BATCH = 67, 8, 8, 2
GROUPS = (8, 4, 2, 1)
ALL_LAYOUTS = (*LAYOUTS, "random owners", "empty rank")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}  # of the largest value: rounding of a few hundred terms
GARBAGE = 1e6  # in what no document holds: one such number in a sum would show

Documents = tuple[tuple[int, ...], ...]

# name -> documents of two sequences and window, for n tokens per rank; a sum below the length is padding
MASKS: dict[str, Callable[[int], tuple[Documents, int | None]]] = {
    "causal": lambda n: (((PRIME,), (PRIME,)), None),
    "documents": lambda n: (((20, 9, 1, 22, PRIME - 52), (5, 9, PRIME - 14)), None),
    "ones": lambda n: (((1,) * PRIME, (1, 1, 30, 1, 1, 1, PRIME - 35)), None),
    "borders": lambda n: (((n,) * (PRIME // n) + ((PRIME % n,) if PRIME % n else ()), (PRIME,)), None),
    "padding": lambda n: (((30, 11), ()), None),
    "window 1": lambda n: (((PRIME,), (PRIME - 3,)), 1),
    "window < n": lambda n: (((PRIME,), (PRIME,)), max(2, n - 3)),
    "window = n": lambda n: (((PRIME,), (40, PRIME - 40)), n),
    "window > n": lambda n: (((PRIME,), (PRIME - 2,)), n + 7),
    "window and documents": lambda n: (((20, 9, 1, 22, PRIME - 52), (2, 50, PRIME - 52)), 6),
}

# name -> the route, given the ranks of a node and the key/value heads
ROUTES: dict[str, Callable[[int, int], Route]] = {
    "relay": lambda nodes, groups: Route(),
    "relay via": lambda nodes, groups: Route(node_ranks=nodes),
    "direct": lambda nodes, groups: Route("direct"),
    "direct, depth 3": lambda nodes, groups: Route("direct", depth=3),
    "direct, 3 blocks a hop": lambda nodes, groups: Route("direct", depth=2, blocks_per_hop=3),
    "direct via": lambda nodes, groups: Route("direct", node_ranks=nodes),
    "direct via, deep": lambda nodes, groups: Route("direct", depth=2, node_ranks=nodes, blocks_per_hop=2),
    "gather": lambda nodes, groups: Route("gather"),
    "gather, each head": lambda nodes, groups: Route("gather", head_groups=groups),
}


EACH_ROUTE = [  # once, for rings that are cut into nodes of two
    Route(),
    Route(node_ranks=2),
    Route("direct", depth=3),
    Route("direct", depth=2, node_ranks=2, blocks_per_hop=2),
    Route("gather"),
    Route("gather", head_groups=2),
]


class Case(NamedTuple):
    """One comparison with the truth. `nodes` is 0 where the route knows none."""

    layout: str
    ranks: int
    route: str
    mask: str
    nodes: int
    groups: int
    dtype: torch.dtype
    kernel: str

    @property
    def how(self) -> Route:
        return ROUTES[self.route](self.nodes, self.groups)


def dealt(name: str, ranks: int, mask: str) -> tuple[Layout, Documents, int | None]:
    """(layout, documents, window) of a named layout and mask."""
    kind = name if name in LAYOUTS else "contiguous"
    length = padded_length(kind, PRIME, ranks)
    if name == "empty rank" and ranks > 1:
        length = ranks * -(-PRIME // (ranks - 1))
    documents, window = MASKS[mask](length // ranks)
    if name == "random owners":
        return random_owners(length, ranks), documents, window
    if name == "empty rank":
        return empty_rank(length, ranks), documents, window
    return deal(name, documents, length, ranks, Mask(window)), documents, window


def random_owners(length: int, ranks: int, batch: int = BATCH, seed: int = 0) -> Layout:
    """Runs of random length in random order, to ranks in random order; each sequence otherwise."""
    rng = np.random.default_rng((seed, length, ranks))
    held = []
    for _ in range(batch):
        cuts = np.unique(np.r_[0, rng.integers(0, length, 3 * ranks), length])
        runs = [(int(a), int(b - a)) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        rng.shuffle(runs)
        by_rank: list[list[Chunk]] = [[] for _ in range(ranks)]
        for rank in rng.permutation(ranks):
            room = length // ranks
            while room:
                start, count = runs.pop()
                by_rank[rank].append(Chunk(start, min(room, count)))
                if count > room:
                    runs.append((start + room, count - room))
                room -= by_rank[rank][-1].count
        held.append(by_rank)
    return assemble(held, length)


def empty_rank(length: int, ranks: int, batch: int = BATCH) -> Layout:
    """Contiguous, but a rank in the middle of the ring holds the end, which is padding."""
    local = length // ranks
    order = [*range(ranks // 2), ranks - 1, *range(ranks // 2, ranks - 1)]
    return assemble([[[Chunk(piece * local, local)] for piece in order]] * batch, length)


def routes_of(ranks: int) -> list[tuple[str, int]]:
    """(route, ranks of a node) for all routes of a ring, `via` in each way to cut it into several nodes."""
    widths = [width for width in range(2, ranks) if ranks % width == 0]
    return [(name, width) for name in ROUTES for width in (widths if "via" in name else [0])]


@cache
def global_inputs(groups: int, heads: int = HEADS) -> list[Tensor]:
    """q, k, v, dout of PRIME tokens: numbers that float32 holds exactly, as float64."""
    generator = torch.Generator().manual_seed(groups)
    shapes = [(BATCH, PRIME, h, HEAD_DIM) for h in (heads, groups, groups, heads)]
    return [torch.randn(shape, generator=generator).double() for shape in shapes]


def padded_inputs(groups: int, dtype: torch.dtype, documents: Documents, length: int) -> list[Tensor]:
    """The same up to `length`, with garbage wherever there is no document."""
    padded = []
    for x in global_inputs(groups):
        full = torch.full((BATCH, length, *x.shape[2:]), GARBAGE, dtype=dtype)
        for row, lengths in enumerate(documents):
            full[row, : sum(lengths)] = x[row, : sum(lengths)]
        padded.append(full)
    return padded


@cache
def visible(documents: Documents, window: int | None, length: int = PRIME) -> Tensor:
    return oracle.visible(documents, length, window)


@cache
def truth(documents: Documents, window: int | None, groups: int) -> oracle.Attention:
    """Computed once for all layouts, routes, ranks and dtypes."""
    return oracle.dense(*global_inputs(groups), visible(documents, window))


def assert_true(
    got: Sequence[Tensor], documents: Documents, window: int | None, groups: int, dtype: torch.dtype, context: str
) -> None:
    """out, dq, dk, dv of padded inputs: each the truth, and exactly zero where there is no document."""
    want = truth(documents, window, groups)
    for x in got:
        assert all(x[row, sum(lengths) :].eq(0).all() for row, lengths in enumerate(documents)), context
    oracle.assert_close(oracle.Attention(*(x[:, :PRIME] for x in got)), want, TOLERANCE[dtype], context)


def pairwise(factors: Sequence[Sequence[Any]], legal: Callable[[tuple], bool], seed: int = 0) -> list[tuple]:
    """Few combinations of the factors' values in which any two of them meet that may. The same each time."""
    rng = random.Random(seed)
    draw = lambda: tuple(rng.choice(values) for values in factors)  # noqa: E731
    open_pairs = {
        ((a, x), (b, y)): None for a, b in combinations(range(len(factors)), 2) for x in factors[a] for y in factors[b]
    }
    chosen = []
    while open_pairs:
        (a, x), (b, y) = next(iter(open_pairs))
        found = []
        for _ in range(400):
            values = list(draw())
            values[a], values[b] = x, y
            if legal(tuple(values)):
                found.append(tuple(values))
            if len(found) == 40:
                break
        if not found:
            del open_pairs[(a, x), (b, y)]
            continue
        covers = lambda values: [pair for pair in combinations(enumerate(values), 2) if pair in open_pairs]  # noqa: E731
        best = max(found, key=lambda values: len(covers(values)))
        for pair in covers(best):
            del open_pairs[pair]
        chosen.append(best)
    return chosen


def random_inputs(length, groups=2, dtype=torch.float64, seed=0, heads=4, batch=2):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, h, HEAD_DIM) for h in (heads, groups, groups, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def relative_errors(ranks, route, returned=None, layout="zigzag", kernel=sdpa, length=1024, **more):
    """L2 errors of out, dq, dk, dv against float64 on the same bfloat16 inputs, once cast to the dtype `returned`."""
    inputs = random_inputs(length, 2, torch.bfloat16, batch=1)
    got = ring_attention(inputs, layout, [(length,)], None, ranks, kernel, route=route, **more)
    return [
        ((a.to(returned or a.dtype) - b).norm() / b.norm()).item() for a, b in zip(got, long_truth(length), strict=True)
    ]


@cache
def long_truth(length):
    inputs = random_inputs(length, 2, torch.bfloat16, batch=1)
    return oracle.dense(*inputs, torch.ones(1, length, length, dtype=torch.bool).tril())
