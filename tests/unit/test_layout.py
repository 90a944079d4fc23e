"""Laws of layouts, for any length, number of ranks and documents, and the worked examples."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.mask import Mask
from parallel import layout as module
from parallel.deal import deal
from parallel.layout import (
    LAYOUTS,
    Chunk,
    assemble,
    chunks,
    chunks_per_rank,
    global_index,
    padded_length,
    restore,
    split,
)  # fmt: skip
from tests import oracle
from tests.cases import empty_rank, random_owners

any_layout, any_length, any_ranks = st.sampled_from(LAYOUTS), st.integers(1, 200), st.integers(1, 9)
batches = st.lists(st.lists(st.integers(1, 25), max_size=9).map(tuple), min_size=1, max_size=3)
windows = st.one_of(st.none(), st.integers(1, 60))


@pytest.fixture(autouse=True, scope="module")
def short_chunks():
    """Balanced chunks so short that small sequences have up to sixteen a rank."""
    with mock.patch.object(module, "CHUNK_TOKENS", 4):
        yield


def dealt(name, documents, ranks, window=None):
    """(layout, tokens of the longest sequence)."""
    length = int(max(1, *map(sum, documents)))
    return deal(name, documents, padded_length(name, length, ranks), ranks, Mask(window)), length


def indices(layout, length, ranks):
    return [global_index(chunks(layout, length, ranks, rank)).tolist() for rank in range(ranks)]


@settings(deadline=None)
@given(any_layout, any_length, any_ranks, st.integers(1, 4))
def test_padded_length_is_the_smallest_that_fits(layout, length, ranks, multiple):
    pieces = {"zigzag": 2, "balanced": chunks_per_rank(-(-length // ranks))}.get(layout, 1) if ranks > 1 else 1

    def fits(candidate):
        local, rest = divmod(candidate, ranks)
        return not rest and not local % multiple and not local % pieces

    padded = padded_length(layout, length, ranks, multiple)
    assert padded == next(n for n in range(length, 9000) if fits(n))
    assert deal(layout, [(length,)], padded, ranks).local_length == padded // ranks
    every = padded_length("auto", length, ranks, multiple)
    assert every >= padded and all(deal(name, [(length,)], every, ranks).padded_length == every for name in LAYOUTS)


@settings(deadline=None)
@given(any_layout, batches, any_ranks, windows)
def test_every_token_lives_on_exactly_one_rank(layout, documents, ranks, window):
    """Bijection, equal counts of each sequence, rows in order, only the tail padded (C025)."""
    held, length = dealt(layout, documents, ranks, window)
    index = np.stack([held.index(rank) for rank in range(ranks)])
    assert index.shape == (ranks, len(documents), held.local_length)
    for sequence in range(len(documents)):
        assert sorted(index[:, sequence].flat) == list(range(held.padded_length))
    assert (index < length).sum() == length * len(documents)
    for rank in range(ranks):
        (mine,) = np.nonzero(held.rank == rank)
        assert (np.diff(mine) == 1).all() and (np.diff(held.sequence[mine]) >= 0).all()
        assert (held.row[mine] == np.cumsum(held.count[mine]) - held.count[mine]).all()
        assert held.count[mine].sum() == held.local_rows
    if layout not in ("balanced", "grouped"):
        assert held.chunks(0) == [chunks(layout, held.padded_length, ranks, 0)] * len(documents)


@settings(deadline=None)
@given(any_layout, batches, any_ranks, st.integers(0, 3))
def test_restore_undoes_the_split(layout, documents, ranks, width):
    held, length = dealt(layout, documents, ranks)
    shape = (len(documents), held.padded_length, *([width] if width else []))
    tokens = np.random.default_rng(length).integers(0, 1000, shape)
    rows = np.arange(len(documents))[:, None]
    parts = [tokens[rows, held.index(rank)] for rank in range(ranks)]
    assert np.array_equal(restore(parts, held), tokens)
    assert np.array_equal(restore(parts, held, length), tokens[:, :length])


@settings(deadline=None)
@given(any_layout, batches, any_ranks)
def test_no_target_is_lost(layout, documents, ranks):
    """Labels shifted before the split survive it: tokens - documents of them, the same multiset (C022)."""
    held, _ = dealt(layout, documents, ranks)
    labels = np.full((len(documents), held.padded_length), -100)
    for row, lengths in enumerate(documents):
        labels[row, : sum(lengths)] = np.arange(1, sum(lengths) + 1)
        labels[row, np.cumsum(lengths, dtype=int) - 1] = -100
    rows = np.arange(len(documents))[:, None]
    parts = [labels[rows, held.index(rank)] for rank in range(ranks)]
    assert sorted(np.concatenate(parts, axis=None)) == sorted(labels.flat)
    targets = sum(map(sum, documents)) - sum(map(len, documents))
    assert sum((part != -100).sum() for part in parts) == targets


@settings(deadline=None)
@given(any_layout, batches, any_ranks, st.integers(0, 40), st.integers(0, 40))
def test_a_split_of_the_storage_is_a_slice_of_the_index(layout, documents, ranks, one, other):
    held, _ = dealt(layout, documents, ranks)
    start, stop = sorted((min(one, held.local_length), min(other, held.local_length)))
    for rank in range(ranks):
        for sequence, mine in enumerate(held.chunks(rank)):
            part = split(mine, start, stop)
            index = global_index(part).tolist() if part else []
            assert index == held.index(rank)[sequence, start:stop].tolist()


@settings(deadline=None)
@given(batches, st.integers(2, 9), windows)
def test_balanced_ranks_differ_by_one_chunk_of_work_at_most(documents, ranks, window):
    """Visible pairs of the heaviest and the lightest rank.

    Chunks are dealt the heaviest first to the lightest rank that has room. Let ranks A, B be the heaviest and lightest
    in the end, and a(l), b(l) the l-th chunk of each. What A got once B was full is no heavier than any of B's.
    Before that, either B had at least l chunks when A got a(l + 1), so that a(l + 1) <= b(l + 1) or, at l chunks, A
    was no heavier than B. So, after the last l where the latter holds, A gains one chunk on B and no more. Loads of
    earlier sequences count as part of what A and B had before.
    """
    held, length = dealt("balanced", documents, ranks, window)
    seen = oracle.visible(documents, held.padded_length, window).sum(-1).numpy()
    load = [sum(seen[row, held.index(rank)[row]].sum() for row in range(len(documents))) for rank in range(ranks)]
    pieces = chunks_per_rank(held.local_length)
    heaviest = seen.reshape(len(documents), ranks * pieces, -1).sum(-1).max()
    assert max(load) - min(load) <= heaviest
    assert max(load) <= seen.sum() / ranks + heaviest * (1 - 1 / ranks)


@settings(deadline=None)
@given(batches, any_ranks, windows)
def test_balanced_is_the_same_on_every_rank(documents, ranks, window):
    """A pure function: lists or arrays, again and again; and it follows the documents and the mask."""
    once, _ = dealt("balanced", documents, ranks, window)
    again, _ = dealt("balanced", [np.array(lengths, dtype=np.int64) for lengths in documents], ranks, window)
    for name in ("rank", "sequence", "start", "count", "row"):
        assert np.array_equal(getattr(once, name), getattr(again, name))


def test_balanced_balances_what_zigzag_cannot():
    """One document of half the sequence, then short ones: in zigzag the first ranks have nearly all the work."""
    documents = [(256,) + (8,) * 32]
    seen = oracle.visible(documents, 512, None).sum(-1).numpy()[0]
    load = {
        name: [seen[deal(name, documents, 512, 8).index(rank)[0]].sum() for rank in range(8)]
        for name in ("zigzag", "balanced")
    }
    mean = seen.sum() / 8
    assert max(load["balanced"]) < 1.01 * mean and max(load["zigzag"]) > 1.5 * mean


def test_grouped_keeps_documents_with_neighbours_and_ranks_busy():
    """1,000 short documents and two long ones, 16 ranks: short ones lie whole on one rank, each long one on an aligned
    group of no more ranks than its work is worth."""
    lengths = [40_000, 20_000, *np.random.default_rng(0).integers(20, 60, 1000).tolist()]
    length, ranks = padded_length("grouped", sum(lengths), 16), 16
    held = deal("grouped", [lengths], length, ranks)
    owner = np.empty(length, np.int64)
    for rank in range(ranks):
        owner[held.index(rank)[0]] = rank
    load, cut = np.zeros(ranks), 0
    for number, (start, count) in enumerate(zip(np.cumsum(lengths) - lengths, lengths, strict=True)):
        here = owner[start : start + count]
        load += np.bincount(here, np.arange(1, count + 1), ranks)
        if number < 2:
            group = np.unique(here)
            assert len(group) == {40_000: 16, 20_000: 8}[count] and group[0] % len(group) == 0
            assert (np.diff(group) == 1).all()
        else:
            cut += len(np.unique(here)) > 1
    assert cut <= ranks  # those that fill the last gaps
    assert (
        load.max() < 1.25 * load.mean()
    )  # the second long one is only half of the ranks': `balanced` would cut it finer


def test_worked_examples():
    """C021, and the padded lengths of C025."""
    assert indices("zigzag", 8, 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert indices("zigzag", 12, 3) == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert indices("striped", 12, 3) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert indices("contiguous", 8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # one causal document: the work of a chunk grows with its place, so the dealing is zigzag's
    assert [deal("balanced", [(8,)], 8, 2).index(rank).tolist() for rank in range(2)] == [
        [[0, 1, 6, 7]],
        [[2, 3, 4, 5]],
    ]
    named = ("contiguous", "zigzag", "striped", "balanced")
    assert [padded_length(layout, 7, 2) for layout in named] == [8, 8, 8, 8]
    with mock.patch.object(module, "CHUNK_TOKENS", 1024):
        assert [padded_length(layout, 2999, 4) for layout in named] == [3000, 3000, 3000, 3000]
    for layout in LAYOUTS:  # one rank: nothing to balance, nothing to pad
        assert deal(layout, [(13,)], padded_length(layout, 13, 1), 1).chunks(0) == [(Chunk(0, 13, 1),)]
    assert [chunks_per_rank(n) for n in (1, 8, 15, 16, 31, 64, 1000)] == [2, 2, 2, 4, 4, 16, 16]


def test_layouts_of_the_tests_are_lawful():
    for held in (random_owners(72, 8), random_owners(67, 1), empty_rank(80, 8)):
        index = np.concatenate([held.index(rank) for rank in range(held.ranks)], axis=1)
        assert (np.sort(index, axis=1) == np.arange(held.padded_length)).all()
    assert any((random_owners(72, 8).index(rank)[0] != random_owners(72, 8).index(rank)[1]).any() for rank in range(8))
    assert (empty_rank(80, 8).index(4) >= 67).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chunks("spiral", 8, 2, 0), "layout=spiral is unknown: use one of contiguous"),
        (lambda: deal("spiral", [(8,)], 8, 2), "layout=spiral is unknown: use one of contiguous"),
        (lambda: chunks("zigzag", 10, 2, 0), "length 10 .* use 12"),
        (lambda: chunks("striped", 8, 2, 2), "rank=2 .* use 0 to 1"),
        (lambda: chunks("balanced", 8, 2, 0), r"layout=balanced depends on the documents: use .*deal\(...\).chunks"),
        (lambda: deal("balanced", [(9,)], 9, 2), "length 9 does not divide into balanced chunks of 2 ranks: use 12"),
        (lambda: padded_length("striped", 0, 2), "sequence_length=0"),
        (lambda: padded_length("striped", 8, 0), "ranks=0"),
        (lambda: assemble([[[Chunk(0, 3)], [Chunk(3, 5)]]], 8), "rank 0 holds 3 tokens of 1 sequences, not equally"),
        (lambda: assemble([[[Chunk(0, 4, 1)], [Chunk(4, 4, 2)]]], 8), r"steps \[1, 2\]: a layout has one step"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
