"""Plans against dense visibility, and against closed forms to the unit."""

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.mask import Mask, is_full
from parallel.layout import LAYOUTS, chunks, global_index, padded_length
from parallel.schedule import (
    HOP,
    K_START,
    K_STOP,
    LOWER,
    NUM_HOPS,
    Q_START,
    Q_STOP,
    SEQUENCE,
    UPPER,
    hop_starts,
    pairs,
    plan,
)  # fmt: skip
from tests import oracle

WINDOWS = (None, 1, 5, 16, 40)
PRIME = 67
PACKED = [
    (PRIME,),
    (20, 1, 1, 30, 15),
    (9, 13, 40),
    (),
]  # the last two end in padding, the last is nothing else


def dense_by_hop(layout, window, documents, padded, ranks, rank):
    """What the plan must say: visibility between the rank's tokens and each hop's visiting block."""
    seen = oracle.visible(documents, padded, window).numpy()
    index = [global_index(chunks(layout, padded, ranks, r)) for r in range(ranks)]
    return [seen[:, index[rank]][:, :, index[(rank - hop) % ranks]] for hop in range(ranks)]


def painted(table, batch, local, ranks):
    """Tiles painted into dense matrices, counting how often each pair is shown."""
    shown = np.zeros((ranks, batch, local, local), int)
    for tile in table[1:]:
        rows, columns = slice(tile[Q_START], tile[Q_STOP]), slice(tile[K_START], tile[K_STOP])
        i, j = np.ogrid[: tile[Q_STOP] - tile[Q_START], : tile[K_STOP] - tile[K_START]]
        seen = (j >= i + tile[LOWER]) & (j <= i + tile[UPPER])
        assert seen.any(axis=1).all() and seen.any(axis=0).all(), f"tile {tile} is not trimmed"
        shown[tile[HOP], tile[SEQUENCE], rows, columns] += seen
    return shown


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("window", WINDOWS)
def test_tiles_show_exactly_the_visible_pairs_once(layout, ranks, window):
    padded = padded_length(layout, PRIME, ranks)
    last = 0
    tables = []
    for rank in range(ranks):
        table = plan(layout, Mask(window), PACKED, PRIME, padded, ranks, rank)
        want = np.stack(dense_by_hop(layout, window, PACKED, padded, ranks, rank))
        assert np.array_equal(painted(table, len(PACKED), padded // ranks, ranks), want)
        assert pairs(table[1:]).sum() == want.sum()
        last = max([last, *np.flatnonzero(want.any(axis=(1, 2, 3)))])
        tables.append(table)
    # hops end with the last that any rank needs, and all ranks agree
    assert {int(table[0, NUM_HOPS]) for table in tables} == {last + 1}


@given(
    st.sampled_from(LAYOUTS),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 60)),
    st.lists(st.lists(st.integers(1, 15), max_size=6), min_size=1, max_size=2),
    st.integers(0, 9),
)
def test_any_documents(layout, ranks, window, documents, tail):
    length = max(1, max(map(sum, documents)) + tail)
    padded = padded_length(layout, length, ranks)
    last = 0
    for rank in range(ranks):
        table = plan(layout, Mask(window), documents, length, padded, ranks, rank)
        want = np.stack(dense_by_hop(layout, window, documents, padded, ranks, rank))
        assert np.array_equal(painted(table, len(documents), padded // ranks, ranks), want)
        last = max([last, *np.flatnonzero(want.any(axis=(1, 2, 3)))])
    assert table[0, NUM_HOPS] == last + 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [2, 16, 512])
def test_causal_work_per_hop_has_closed_forms(ranks, count):
    """Pairs per rank and hop of one causal document: contiguous, zigzag and striped, exactly."""
    c, length = count, count * ranks
    for rank in range(ranks):
        work = {}
        for layout in LAYOUTS:
            table = plan(layout, Mask(), [(length,)], length, length, ranks, rank)
            work[layout] = np.bincount(table[1:, HOP], pairs(table[1:]), ranks).astype(int).tolist()
        assert work["contiguous"] == [c * (c + 1) // 2] + [c * c if rank >= hop else 0 for hop in range(1, ranks)]
        assert work["zigzag"] == [c * (c + 1) // 2] + [c * c // 2] * (ranks - 1)
        assert work["striped"] == [c * (c + 1 if rank >= hop else c - 1) // 2 for hop in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_makespan_and_speed_up(ranks):
    """Sum over hops of the slowest rank, and zigzag's speed-up over contiguous, to the unit."""
    c, length = 64, 64 * ranks
    makespan = {}
    for layout in LAYOUTS:
        tables = [plan(layout, Mask(), [(length,)], length, length, ranks, rank) for rank in range(ranks)]
        work = np.stack([np.bincount(table[1:, HOP], pairs(table[1:]), ranks) for table in tables])
        makespan[layout] = int(work.max(axis=0).sum())
    assert makespan["contiguous"] == c * (c + 1) // 2 + (ranks - 1) * c * c
    assert makespan["zigzag"] == (length * c + c) // 2
    assert makespan["striped"] == ranks * c * (c + 1) // 2
    assert makespan["contiguous"] * (length + 1) == makespan["zigzag"] * (c + 1 + 2 * (ranks - 1) * c)


def test_pairs_per_rank():
    """C030: who does how much of a causal sequence of 16 over 4 ranks."""
    total = {
        layout: [int(pairs(plan(layout, Mask(), [(16,)], 16, 16, 4, rank)[1:]).sum()) for rank in range(4)]
        for layout in LAYOUTS
    }
    assert total == {"contiguous": [10, 26, 42, 58], "zigzag": [34] * 4, "striped": [28, 32, 36, 40]}


def test_windows_end_the_ring_early():
    """Contiguous chunks of n tokens need ceil((w - 1) / n) blocks before their own; striped w hops."""
    hops = {
        (layout, window): plan(layout, Mask(window), [(64,)], 64, 64, 8, 3)[0, NUM_HOPS]
        for layout in ("contiguous", "striped")
        for window in (1, 2, 8, 9, 10, 17, 18, 64)
    }
    assert [hops["contiguous", w] for w in (1, 2, 8, 9, 10, 17, 18, 64)] == [1, 2, 2, 2, 3, 3, 4, 8]
    assert [hops["striped", w] for w in (1, 2, 8, 9, 10, 17, 18, 64)] == [1, 2, 8, 8, 8, 8, 8, 8]


def test_neighbouring_full_tiles_merge():
    """Zigzag of 3: rank 0's last piece sees both pieces of rank 1, which lie side by side there: one tile."""
    table = plan("zigzag", Mask(), [(12,)], 12, 12, 3, 0)
    starts = hop_starts(table)
    assert table[starts[2] : starts[3]].tolist() == [[2, 0, 2, 4, 0, 4, -1, 3]]
    columns = plan("zigzag", Mask(), [(12,)], 12, 12, 3, 2)  # and all of rank 2 sees rank 0's first piece: one tile
    starts = hop_starts(columns)
    assert columns[starts[2] : starts[3]].tolist() == [[2, 0, 0, 4, 0, 2, -3, 1]]
    rows, width = table[1:, Q_STOP] - table[1:, Q_START], table[1:, K_STOP] - table[1:, K_START]
    assert is_full(rows, width, table[1:, LOWER], table[1:, UPPER]).sum() == len(table) - 1 - 2  # but two diagonals


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_million_tokens_of_ten_thousand_documents_plan_fast(layout):
    length, ranks = 1 << 20, 32
    cuts = np.sort(np.random.default_rng(0).choice(np.arange(1, length), 9999, replace=False))
    documents = [tuple(np.diff([0, *cuts, length]).tolist())]
    seconds = []
    for rank in (0, 17, 31):
        begun = time.perf_counter()
        plan(layout, Mask(), documents, length, length, ranks, rank)
        seconds.append(time.perf_counter() - begun)
    tracemalloc.start()
    plan(layout, Mask(), documents, length, length, ranks, 31)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(seconds) < 0.3 and peak < 50e6


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
