"""Plans against dense visibility, followed from rank to rank, and against closed forms to the unit."""

import time
import tracemalloc
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.mask import Mask, is_full
from parallel.deal import deal
from parallel.layout import LAYOUTS, padded_length
from parallel.route import Route
from parallel.schedule import (
    AGREEMENT,
    HOP,
    K_START,
    K_STOP,
    LOWER,
    NUM_HOPS,
    Q_START,
    Q_STOP,
    UPPER,
    hop_starts,
    lay_out,
    meetings,
    needed,
    needed_rows,
    pairs,
    plan,
    tile_rows,
)
from tests import cases, oracle
from tests.cases import ALL_LAYOUTS, MASKS, ROUTES, random_owners
from tests.simulation import follow

SIMPLE = ("contiguous", "zigzag", "striped")  # the same for all documents


def plans_of(layout, window, documents, route, length=None):
    sizes = (length or layout.padded_length, layout.padded_length, layout.ranks)
    return [plan(layout, Mask(window), documents, *sizes, rank, route) for rank in range(layout.ranks)]


def assert_exact(layout, window, documents, route, seen):
    """Each visible pair is shown once and no other, wherever its keys travelled, and their gradients come home."""
    plans = plans_of(layout, window, documents, route)
    weight = np.random.default_rng(0).integers(1, 1 << 20, seen.shape[:2])
    shown, gradient = follow(plans, layout, weight)
    assert np.array_equal(shown, seen)
    assert np.array_equal(gradient, np.einsum("bqk,bq->bk", seen, weight))
    assert sum(int(pairs(tile_rows(table)).sum()) for table in plans) == seen.sum()
    return plans


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_plans_show_exactly_the_visible_pairs_once(layout, ranks):
    """Every route with three masks, others for each number of ranks."""
    for n, (name, nodes) in enumerate(cases.routes_of(ranks)):
        for mask in [*MASKS][(n + 3 * ranks) % len(MASKS) :][:3]:
            held, documents, window = cases.dealt(layout, ranks, mask)
            seen = cases.visible(documents, window, held.padded_length).numpy()
            assert_exact(held, window, documents, ROUTES[name](nodes, 2), seen)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_documents_on_any_route(data):
    draw = data.draw
    name, ranks = draw(st.sampled_from([*LAYOUTS, "random owners"])), draw(st.integers(1, 8))
    window = draw(st.one_of(st.none(), st.integers(1, 60)))
    documents = draw(st.lists(st.lists(st.integers(1, 15), max_size=6).map(tuple), min_size=1, max_size=2))
    length = max(1, max(map(sum, documents)) + draw(st.integers(0, 9)))
    padded = padded_length(name if name in LAYOUTS else "contiguous", length, ranks)
    nodes = draw(st.sampled_from([0, *(w for w in range(2, ranks) if ranks % w == 0)]))
    depth, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    routes = [Route(node_ranks=nodes), Route("direct", depth, blocks, nodes), Route("gather", head_groups=depth)]
    if name in LAYOUTS:
        held = deal(name, documents, padded, ranks, Mask(window))
    else:
        held = random_owners(padded, ranks, len(documents), seed=length)
    seen = oracle.visible(documents, padded, window).numpy()
    assert_exact(held, window, documents, draw(st.sampled_from(routes)), seen)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_hops_are_those_that_some_rank_needs(layout, ranks):
    """A relay ends with the last of them; direct leaves out what nobody needs, and takes several blocks at a time."""
    for mask in MASKS:
        held, documents, window = cases.dealt(layout, ranks, mask)
        seen = cases.visible(documents, window, held.padded_length).numpy()
        index = [held.index(rank) for rank in range(ranks)]
        shifts = [
            shift
            for shift in range(1, ranks)
            if any(
                seen[b][np.ix_(index[rank][b], index[rank - shift][b])].any()
                for rank in range(ranks)
                for b in range(len(documents))
            )
        ]
        for route, hops in (
            (Route(), max(shifts, default=0)),
            (Route("direct"), len(shifts)),
            (Route("direct", depth=2, blocks_per_hop=3), -(-len(shifts) // 3)),
        ):
            made = plans_of(held, window, documents, route)
            assert {int(table[0, NUM_HOPS]) for table in made} == {1 + hops}, (mask, route)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_ranks_need_the_hull_of_what_they_see(layout, ranks):
    """Of each chunk; where chunks have steps, all of it or nothing. A node needs the hull of its ranks' hulls."""
    for mask in MASKS:
        held, documents, window = cases.dealt(layout, ranks, mask)
        seen = cases.visible(documents, window, held.padded_length).numpy()
        laid = lay_out(documents, held.padded_length)
        needs = needed(held, laid, meetings(held, laid), Mask(window))
        for c, b in enumerate(held.sequence):
            keys = held.start[c] + held.step * np.arange(held.count[c])
            for rank in range(ranks):
                rows = np.flatnonzero(seen[b][np.ix_(held.index(rank)[b], keys)].any(axis=0))
                hull = (0, 0) if rank == held.rank[c] or not len(rows) else (rows[0], rows[-1] + 1)
                if held.step > 1 and len(rows) and rank != held.rank[c]:
                    hull = (0, held.count[c])
                assert (needs.low[c, rank], needs.high[c, rank]) == hull, (mask, c, rank)
        for width in [w for w in range(1, ranks + 1) if ranks % w == 0]:
            by_rank, by_node = needed_rows(held, needs, width)
            spread = needs.high - needs.low
            for block, rank in product(range(ranks), range(ranks)):
                assert by_rank[rank, block] == spread[held.rank == block, rank].sum()
            for block, node in product(range(ranks), range(ranks // width)):
                total = 0
                for c in np.flatnonzero(held.rank == block):
                    some = [r for r in range(node * width, (node + 1) * width) if needs.high[c, r]]
                    total += max(needs.high[c, some], default=0) - min(needs.low[c, some], default=0)
                assert by_node[node, block] == total


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [2, 16, 512])
def test_causal_work_per_hop_has_closed_forms(ranks, count):
    """Pairs per rank and hop of one causal document: contiguous, zigzag, balanced and striped, exactly."""
    c, length = count, count * ranks
    for rank, route in product(range(ranks), (Route(), Route("direct", depth=2))):
        work = {}
        for layout in (*SIMPLE, "balanced"):
            tiles = tile_rows(plan(layout, Mask(), [(length,)], length, length, ranks, rank, route))
            work[layout] = np.bincount(tiles[:, HOP], pairs(tiles), ranks).astype(int).tolist()
        assert work["contiguous"] == [c * (c + 1) // 2] + [c * c if rank >= hop else 0 for hop in range(1, ranks)]
        assert work["zigzag"] == [c * (c + 1) // 2] + [c * c // 2] * (ranks - 1)
        assert work["balanced"] == work["zigzag"]
        assert work["striped"] == [c * (c + 1 if rank >= hop else c - 1) // 2 for hop in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_makespan_and_speed_up(ranks):
    """Sum over hops of the slowest rank, and zigzag's speed-up over contiguous, to the unit."""
    c, length = 64, 64 * ranks
    makespan = {}
    for layout in SIMPLE:
        tables = [tile_rows(plan(layout, Mask(), [(length,)], length, length, ranks, rank)) for rank in range(ranks)]
        work = np.stack([np.bincount(tiles[:, HOP], pairs(tiles), ranks) for tiles in tables])
        makespan[layout] = int(work.max(axis=0).sum())
    assert makespan["contiguous"] == c * (c + 1) // 2 + (ranks - 1) * c * c
    assert makespan["zigzag"] == (length * c + c) // 2
    assert makespan["striped"] == ranks * c * (c + 1) // 2
    assert makespan["contiguous"] * (length + 1) == makespan["zigzag"] * (c + 1 + 2 * (ranks - 1) * c)


def test_pairs_per_rank():
    """C030: who does how much of a causal sequence of 16 over 4 ranks, whatever the route."""
    for route in (Route(), Route("direct", node_ranks=2), Route("gather")):
        want = {"contiguous": [10, 26, 42, 58], "zigzag": [34] * 4, "striped": [28, 32, 36, 40], "balanced": [34] * 4}
        for layout, work in want.items():
            made = [plan(layout, Mask(), [(16,)], 16, 16, 4, rank, route) for rank in range(4)]
            assert [pairs(tile_rows(table)).sum() for table in made] == work, layout


def test_windows_end_the_ring_early():
    """Contiguous chunks of n tokens need ceil((w - 1) / n) blocks before their own; striped w hops."""
    windows = (1, 2, 8, 9, 10, 17, 18, 64)
    hops = {
        (layout, window, route.name): plan(layout, Mask(window), [(64,)], 64, 64, 8, 3, route)[0, NUM_HOPS]
        for layout, window, route in product(("contiguous", "striped"), windows, (Route(), Route("direct")))
    }
    for route in ("relay", "direct"):
        assert [hops["contiguous", w, route] for w in windows] == [1, 2, 2, 2, 3, 3, 4, 8]
        assert [hops["striped", w, route] for w in windows] == [1, 2, 8, 8, 8, 8, 8, 8]


def test_neighbouring_full_tiles_merge():
    """Zigzag of 3: rank 0's last piece sees both pieces of rank 1, which lie side by side there: one tile."""
    table = plan("zigzag", Mask(), [(12,)], 12, 12, 3, 0)
    starts = hop_starts(table)
    assert table[starts[2] : starts[3]].tolist() == [[2, 2, 4, 8, 12, -1, 3, 0]]  # in the second buffer of four rows
    columns = plan("zigzag", Mask(), [(12,)], 12, 12, 3, 2)  # and all of rank 2 sees rank 0's first piece: one tile
    starts = hop_starts(columns)
    assert columns[starts[2] : starts[3]].tolist() == [[2, 0, 4, 8, 10, -3, 1, 0]]
    tiles = tile_rows(table)
    rows, width = tiles[:, Q_STOP] - tiles[:, Q_START], tiles[:, K_STOP] - tiles[:, K_START]
    assert is_full(rows, width, tiles[:, LOWER], tiles[:, UPPER]).sum() == len(tiles) - 2  # but two diagonals


def test_agreement_tells_all_that_ranks_must_have_in_common():
    """The same on every rank; another one where the layout, mask, documents, lengths or route differ."""
    common = dict(
        layout="zigzag", mask=Mask(), documents=((60, 4), (64,)), sequence_length=64, padded_length=64, ranks=4
    )
    numbers = {plan(**common, rank=rank)[1, AGREEMENT] for rank in range(4)}
    assert len(numbers) == 1 and min(numbers) >= 0
    for other in (
        dict(layout="contiguous"),
        dict(layout=random_owners(64, 4)),
        dict(mask=Mask(63)),
        dict(documents=((60, 4), (63,))),
        dict(documents=((64,), (60, 4))),
        dict(documents=((60, 4), (64,), (64,))),
        dict(padded_length=72),
        dict(ranks=2),
        dict(route=Route("direct")),
        dict(route=Route(node_ranks=2)),
    ):
        numbers.add(plan(**common | other, rank=0)[1, AGREEMENT])
        assert len(numbers) > 1, other
    assert len(numbers) == 11


WORST = (Route(), Route("direct", depth=2, node_ranks=8), Route("direct", depth=4), Route("gather", head_groups=8))


@pytest.mark.parametrize("route", WORST)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_million_tokens_of_ten_thousand_documents_plan_fast(layout, route):
    """Processor seconds, of the fastest of three ranks: another process may take its share of the clock."""
    length, ranks = 1 << 20, 32
    cuts = np.sort(np.random.default_rng(0).choice(np.arange(1, length), 9999, replace=False))
    documents = [tuple(np.diff([0, *cuts, length]).tolist())]
    seconds = []
    for rank in (0, 17, 31):
        begun = time.process_time()
        plan(layout, Mask(), documents, length, length, ranks, rank, route)
        seconds.append(time.process_time() - begun)
    tracemalloc.start()
    plan(layout, Mask(), documents, length, length, ranks, 31, route)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(seconds) < 0.3 and peak < 50e6, (seconds, peak)


@pytest.mark.parametrize(
    ("documents", "length", "message"),
    [
        ([(3, 0)], 8, "sequence 0 has a document of 0 tokens"),
        ([(8,), (5, 4)], 8, "documents of sequence 1 hold 9 tokens"),
        ([], 8, "at least one sequence"),
        ([(8,)], 9, "padded_length=8 is less than sequence_length=9"),
    ],
)
def test_bad_documents_are_named(documents, length, message):
    with pytest.raises(ValueError, match=message):
        plan("contiguous", Mask(), documents, length, 8, 2, 0)


def test_a_layout_of_something_else_is_named():
    with pytest.raises(
        ValueError, match="is for 1 sequences of 16 tokens on 2 ranks, not 2 sequences of 16 on 2: deal"
    ):
        plan(deal("zigzag", [(16,)], 16, 2), Mask(), [(16,), (16,)], 16, 16, 2, 0)
