"""Cutting and packing, against plain Python lists."""

import time
import tracemalloc
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import packing
from data.order import Epochs
from data.packing import Bins, best_fit, count, deal
from data.pieces import Pieces, joined, several

ROOM = 20
POLICIES = [("consecutive", "fit"), ("windows", "pack"), ("windows", "fit")]


def pieces_of(*rows):
    return Pieces(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))


def rows(pieces):
    return list(zip(pieces.item.tolist(), pieces.first.tolist(), pieces.length.tolist(), strict=True))


def tokens(pieces):
    """(item, token) of all, in order."""
    return [(item, token) for item, first, length in rows(pieces) for token in range(first, first + length)]


stretches = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50), st.integers(1, 30)), min_size=1, max_size=12).map(
    lambda some: pieces_of(*some)
)


@given(stretches, st.integers(0, 200), st.integers(0, 200))
def test_part(pieces, start, stop):
    part = pieces.part(start, stop)
    assert tokens(part) == tokens(pieces)[start:stop] and (part.length > 0).all()


@given(stretches, st.integers(1, 40))
def test_cut(pieces, length):
    cut, number = pieces.cut(length)
    assert tokens(cut) == tokens(pieces) and (cut.length > 0).all()
    assert np.repeat(number, cut.length).tolist() == [at // length for at in range(len(tokens(pieces)))]


@given(stretches, st.integers(1, 40))
def test_windows(pieces, length):
    windows, owner, tails, tail_owner = pieces.windows(length)
    assert set(windows.length.tolist()) <= {length} and all(0 < size < length for size in tails.length.tolist())
    for number, (item, first, size) in enumerate(rows(pieces)):
        own = rows(windows[owner == number]) + rows(tails[tail_owner == number])
        assert own == [(item, first + at, min(length, size - at)) for at in range(0, size, length)]


@given(stretches)
def test_merged(pieces):
    merged = pieces.merged()
    assert Counter(tokens(merged)) == Counter(tokens(pieces))
    cut, _ = pieces_of((3, 5, 40), (1, 0, 7)).cut(6)
    assert rows(cut[np.random.default_rng(0).permutation(len(cut.item))].merged()) == [(1, 0, 7), (3, 5, 40)]
    assert rows(pieces[:0].merged()) == []


def test_several():
    index, number = several(np.array([2, 0, 3]))
    assert index.tolist() == [0, 0, 2, 2, 2] and number.tolist() == [0, 1, 0, 1, 2]
    assert rows(joined([pieces_of((1, 2, 3)), pieces_of((4, 5, 6))])) == [(1, 2, 3), (4, 5, 6)]


def best_fit_by_lists(lengths, room):
    """Room left of each bin, longest first, each to the bin with the least room that it fits in."""
    left = []
    for length in sorted(lengths, reverse=True):
        fitting = [bin for bin in range(len(left)) if left[bin] >= length]
        if fitting:
            left[min(fitting, key=left.__getitem__)] -= length
        else:
            left.append(room - length)
    return left


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, ROOM), max_size=60), st.sampled_from([ROOM, 2047, 2048, 5000]))
def test_best_fit_is_best_fit(lengths, room):
    """Also where rooms are looked up over several words of bits."""
    lengths = np.array([length * room // ROOM for length in lengths], np.int64)
    bins = best_fit(lengths, room)
    used = np.bincount(bins, weights=lengths).astype(int)
    assert sorted(room - used) == sorted(best_fit_by_lists(lengths.tolist(), room))


def test_best_fit_of_a_million_documents_is_fast_and_small():
    """As web pages are; about a second, in arrays."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1.5, 10**6).astype(np.int64), 1, 8192)
    tracemalloc.start()
    began = time.perf_counter()
    bins = best_fit(lengths, 8192)
    seconds, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    used = np.bincount(bins, weights=lengths)
    assert used.max() <= 8192 and lengths.sum() / (len(used) * 8192) > 0.999
    assert seconds < 10 and peak < 150e6, (seconds, peak)  # 0.2 s without tracing on a quiet machine


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=25),
    st.integers(1, 30),
    st.sampled_from(POLICIES),
    st.integers(0, 9),
)
def test_deal(lengths, length, policy, seed):
    long, short = policy
    pieces = Epochs(np.array(lengths), seed).pieces(0)
    dealt = deal(pieces, length, long=long, short=short, seed=seed, epoch=0)
    sequences = [rows(dealt.sequence(n)) for n in range(len(dealt))]
    assert Counter(tokens(dealt.pieces)) == Counter(tokens(pieces))
    assert count(np.array(lengths), length, short) == len(dealt)
    assert all(0 < sum(size for *_, size in sequence) <= length for sequence in sequences)
    whole = [sequence for sequence in sequences if len(sequence) == 1 and sequence[0][2] == length]
    windows = Counter((item, at) for item, size in enumerate(lengths) for at in range(0, size - length + 1, length))
    assert not windows - Counter((item, first) for ((item, first, _),) in whole)
    if short == "fit":
        tails = Counter(size % length for size in lengths if size % length)
        assert tails == Counter(size for s in sequences for *_, size in s if size < length)  # none is cut
        assert len(sequences) == windows.total() + len(best_fit_by_lists(list(tails.elements()), length))
    else:
        rest = sum(size % length for size in lengths)
        assert len(sequences) == windows.total() + -(-rest // length)  # only one of them is not full
    if long == "consecutive":
        where = {(item, first): n for n, sequence in enumerate(sequences) for item, first, _ in sequence}
        for item, size in enumerate(lengths):
            places = [where[item, first] for first in range(0, size, length)]
            full = places[: size // length]
            assert places == sorted(places) and full == list(range(full[0], full[0] + len(full))) if full else True


def test_sequences_of_an_epoch_are_shuffled():
    """Windows of a document lie apart with data.long=windows, and another epoch has another order."""
    epochs = Epochs(np.array([1000]), 3)
    lane = Bins(epochs, 10, long="windows", short="fit")
    orders = [[int(lane.sequence(n + 100 * epoch).first[0]) for n in range(100)] for epoch in range(2)]
    assert [sorted(order) for order in orders] == [list(range(0, 1000, 10))] * 2
    assert orders[0] != orders[1] and sum(b - a == 10 for a, b in zip(orders[0], orders[0][1:], strict=False)) < 10
    consecutive = Bins(epochs, 10, long="consecutive", short="fit")
    assert [int(consecutive.sequence(n).first[0]) for n in range(100)] == list(range(0, 1000, 10))
    assert (lane.per_epoch, lane.fill) == (100, 1)


def test_what_is_left_of_an_epoch_keeps_its_order():
    """Which is no order of the documents: the next stage packs what it would have packed."""
    epochs = Epochs(np.ones(100, np.int64), 3)
    lane = Bins(epochs, 20, long="windows", short="pack").follow(2, 60)
    left = lane.sequence(0).item.tolist()
    assert left == [item for item in epochs.pieces(0).item.tolist() if item in left] != sorted(left)
    assert len(left) == 60 and sorted(lane.sequence(1).item.tolist() + lane.sequence(2).item.tolist()) == list(
        range(100)
    )
    again = lane.follow(0, 30)
    assert sorted(again.sequence(0).item.tolist() + again.sequence(1).item.tolist()) == sorted(left)


@pytest.mark.parametrize("long, short", POLICIES)
def test_whole_epochs_have_as_many_sequences(long, short):
    """Else a sequence could not be found by its number."""
    lengths = np.random.default_rng(1).integers(1, 60, 300)
    epochs = Epochs(lengths, 0, [(40, 3)])
    lane = Bins(epochs, 32, long=long, short=short)
    sizes = {len(deal(epochs.pieces(e), 32, long=long, short=short, seed=0, epoch=e)) for e in range(20)}
    assert len(sizes) == 1
    (size,) = sizes
    assert (lane.per_epoch, lane.fill) == (size, Fraction(int(epochs.num_tokens), size * 32))
    for epoch in (0, 1, 5):
        served = joined([lane.sequence(n) for n in range(epoch * size, (epoch + 1) * size)])
        assert Counter(tokens(served)) == Counter(tokens(epochs.pieces(epoch)))


@pytest.fixture
def calls(monkeypatch):
    """How often whole epochs were ordered, dealt and counted, in turn."""
    seen = []
    for name, module in {"deal": packing, "count": packing, "pieces": Epochs}.items():
        whole = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, _whole=whole, _name=name, **k: seen.append(_name) or _whole(*a, **k)
        )
    return seen


@pytest.mark.parametrize("long, short", POLICIES)
def test_an_epoch_is_dealt_once_and_another_at_most(long, short, calls):
    """With 10⁷ documents each takes seconds."""
    epochs = Epochs(np.random.default_rng(1).integers(1, 60, 300), 0)
    lane = Bins(epochs, 32, long=long, short=short)
    lane.sequence(0)
    assert lane.per_epoch > 0 and calls == ["pieces", "deal"]
    lane.sequence(int(lane.per_epoch))
    assert calls == ["pieces", "deal"] * 2
    calls.clear()
    later = Bins(Epochs(epochs.lengths, 0), 32, long=long, short=short)
    later.sequence(5 * int(lane.per_epoch) + 3)  # as at resume: the first to be dealt is the right one
    assert later.per_epoch == lane.per_epoch and calls == ["pieces", "deal"]
    calls.clear()
    padded = Bins(Epochs(np.full(300, 20), 0), 32, long=long, short=short)
    before = rows(padded.sequence(5 * 300 + 3))
    assert "count" not in calls and calls.count("deal") <= 2  # with much padding, another one is dealt first
    again = Bins(Epochs(np.full(300, 20), 0), 32, long=long, short=short)
    assert again.per_epoch > 0 and rows(again.sequence(5 * 300 + 3)) == before


@pytest.mark.parametrize("long, short", POLICIES)
def test_a_lane_lets_go_what_it_keeps_once_another_follows(long, short):
    """And may be read again."""
    lane = Bins(Epochs(np.full(100_000, 10), 0), 32, long=long, short=short)
    tracemalloc.start()
    before = rows(lane.sequence(7))
    kept = tracemalloc.get_traced_memory()[0]
    lane.follow(0, 64)
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept > 2.4e6 and left < 0.1e6, (kept, left)
    assert rows(lane.sequence(7)) == before
