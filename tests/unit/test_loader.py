"""The loader: each rank gets its slices of the right sequences, with the labels of the whole."""

import itertools
import threading
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.format import DataError
from data.loader import GAP_TOKENS, PIECE_TOKENS, Loader, reads
from tests.takes import Piece, contiguous, striped, zigzag


def scattered(length, ranks, rank):
    """Many chunks of uneven lengths, out of order: every rank has one of each size."""
    cuts = [0, *itertools.accumulate([1, 3, 2, 6] * (length // ranks // 12 + 1))]
    cuts = [cut for cut in cuts if cut < length // ranks] + [length // ranks]
    pieces = [
        Piece(a * ranks + rank * (b - a), b - a)  # the ranks' pieces of a size lie side by side
        for a, b in itertools.pairwise(cuts)
    ]
    return tuple(pieces[::2] + pieces[1::2])


ONE = {"micro_batch_size": 1, "accumulation": 1, "data_rank": 0, "data_size": 1}
LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped, "scattered": scattered}


class Line:
    """Sequences of whole documents, given as lists; what lies beyond the last one is empty.

    Attributes:
        asked: documents(n) of which n, in order.
        longest: most tokens that were read at once.
    """

    def __init__(self, documents, length):
        self.sequence_length, self.num_sequences = length, None
        self.asked, self.longest = [], 0
        self._documents = documents
        self._tokens = [token for document in documents for token in document]
        self._labels = [label for document in documents for label in [*document[1:], -100]]
        self._place = [place for document in documents for place in range(len(document))]
        self._ends = list(itertools.accumulate(map(len, documents)))

    def documents(self, n):
        self.asked.append(n)
        return self._lengths(n)

    def _lengths(self, n):
        first, last = n * self.sequence_length, (n + 1) * self.sequence_length
        edges = sorted({min(len(self._tokens), edge) for edge in (first, last)} | set(self._ends))
        inside = [edge for edge in edges if first <= edge <= last]
        return tuple(b - a for a, b in itertools.pairwise(inside))

    def labelled(self, n, start, stop):
        assert 0 <= start < stop <= sum(self._lengths(n))
        self.longest = max(self.longest, stop - start)
        first = n * self.sequence_length
        begins = list(itertools.accumulate(self._lengths(n), initial=0))
        origin = [max(begin for begin in begins if begin <= at) for at in range(start, stop)]
        positions = [at - begin for at, begin in zip(range(start, stop), origin, strict=True)]
        cut = slice(first + start, first + stop)
        return np.array(self._tokens[cut]), np.array(self._labels[cut]), np.array(positions)


class Flat:
    """Endless sequences of one document each, made up: token i of sequence n is n + i. Quick for long ones."""

    num_sequences = None

    def __init__(self, length):
        self.sequence_length, self.longest, self.num_read = length, 0, 0

    def documents(self, n):
        return (self.sequence_length,)

    def labelled(self, n, start, stop):
        self.longest, self.num_read = max(self.longest, stop - start), self.num_read + stop - start
        positions = np.arange(start, stop)
        return positions + n, positions + n + 1, positions


def taker(layout, length, ranks=1, rank=0):
    """`take` for a padded length; its plan is a value to recognise."""
    return lambda documents: (
        [LAYOUTS[layout](length, ranks, rank)] * len(documents),
        {"full": torch.tensor([rank])},
    )


def steps(sequences, take, **options):
    given = {**ONE, "first_sequence": 0, "num_steps": 1}
    with Loader(sequences, take, **given | options) as loader:
        return list(loader)


def restore(layout, length, parts):
    """Rows of all ranks back in global order, through explicit global indices."""
    whole = torch.empty(length, dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        pieces = LAYOUTS[layout](length, len(parts), rank)
        indices = [i for p in pieces for i in range(p.start, p.start + p.count * p.step, p.step)]
        whole[indices] = part
    return whole.tolist()


@pytest.mark.parametrize(
    ("layout", "positions"),
    [
        ("contiguous", [[0, 1, 2, 0], [1, 2, 3, 4]]),
        ("zigzag", [[0, 1, 3, 4], [2, 0, 1, 2]]),
        ("striped", [[0, 2, 1, 3], [1, 0, 2, 4]]),
    ],
)
def test_positions_follow_the_documents(layout, positions):
    """C021: documents of 3 and 5 over two ranks."""
    line = Line([[1, 2, 3], [4, 5, 6, 7, 8]], 8)
    for rank in range(2):
        [[batch]] = steps(line, taker(layout, 8, 2, rank))
        assert batch.positions.tolist() == [positions[rank]]
        assert batch.documents == [(3, 5)] and batch.plan["full"].item() == rank


def test_labels_are_shifted_before_the_split():
    """C022: tokens 0 to 7 on two ranks have 7 targets, that of the border among them."""
    line = Line([range(8)], 8)
    batches = [steps(line, taker("contiguous", 8, 2, rank))[0][0] for rank in range(2)]
    assert [batch.labels.tolist() for batch in batches] == [[[1, 2, 3, 4]], [[5, 6, 7, -100]]]
    assert [batch.valid_tokens for batch in batches] == [4, 3]
    assert all(t.dtype == torch.int64 for t in (batches[0].tokens, batches[0].labels, batches[0].positions))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("length", "padded", "ranks"), [(7, 8, 2), (7, 8, 4), (2999, 3000, 4), (2999, 3008, 4), (5, 32, 4), (1, 4, 4)]
)
def test_padding_loses_nothing(layout, length, padded, ranks):
    """C025, I14: lengths that the ranks do not divide keep every token and every target."""
    if layout == "zigzag" and padded % (2 * ranks):
        padded += ranks
    line = Line([range(1, length + 1)], length)
    batches = [steps(line, taker(layout, padded, ranks, rank))[0][0] for rank in range(ranks)]
    assert sum(batch.valid_tokens for batch in batches) == length - 1
    empty = padded - length
    rows = {
        name: restore(layout, padded, [getattr(b, name)[0] for b in batches])
        for name in ("tokens", "labels", "positions")
    }
    assert rows["tokens"] == [*range(1, length + 1)] + [0] * empty
    assert rows["labels"] == [*range(2, length + 1), -100] + [-100] * empty
    assert rows["positions"] == [*range(length)] + [0] * empty


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_hold_the_sequence(layout, ranks):
    """Many short documents, any layout: the ranks' parts are the whole sequence, document by document."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 90_000, n).tolist() for n in rng.integers(1, 40, 60)]
    line = Line(documents, 256)
    for n in range(3):
        batches = [steps(line, taker(layout, 256, ranks, rank), first_sequence=n)[0][0] for rank in range(ranks)]
        expected = line.labelled(n, 0, 256)
        for name, row in zip(("tokens", "labels", "positions"), expected, strict=True):
            assert restore(layout, 256, [getattr(batch, name)[0] for batch in batches]) == row.tolist()


def first_tokens(sequences, **options):
    return [
        [batch.tokens[:, 0].tolist() for batch in step] for step in steps(sequences, taker("contiguous", 4), **options)
    ]


def test_sequences_are_dealt_once():
    """C057: the union over data ranks, micro-batches and slots is each sequence once, in the stated order."""
    line = Line([range(4 * n, 4 * n + 4) for n in range(40)], 4)
    options = dict(micro_batch_size=3, accumulation=2, data_size=2, first_sequence=5, num_steps=2)
    got = [first_tokens(line, data_rank=rank, **options) for rank in range(2)]
    for rank in range(2):
        for step in range(2):
            for micro in range(2):
                first = 5 + ((step * 2 + micro) * 2 + rank) * 3
                assert got[rank][step][micro] == [4 * n for n in range(first, first + 3)]
    flat = sorted(token for rank in got for step in rank for micro in step for token in micro)
    assert flat == [4 * n for n in range(5, 29)]


@pytest.mark.parametrize("cost", [None, lambda documents: float(sum(n * n for n in documents))])
@pytest.mark.parametrize(
    ("data_size", "accumulation", "micro"), [(1, 1, 4), (2, 2, 1), (4, 1, 1), (1, 4, 1), (2, 1, 2)]
)
def test_the_step_holds_the_same_sequences_however_they_are_dealt(cost, data_size, accumulation, micro):
    """C084: another number of data ranks or micro-batches, dealt by cost or not, has the very same steps."""
    documents = [range(n, n + size) for n, size in zip(range(0, 1000, 10), [4, 1, 3, 2, 2] * 8, strict=False)]
    line = Line(documents, 4)
    options = dict(micro_batch_size=micro, accumulation=accumulation, data_size=data_size, cost=cost)
    for resumed in (0, 2):
        ranks = [
            first_tokens(line, data_rank=r, first_sequence=4 * resumed, num_steps=4 - resumed, **options)
            for r in range(data_size)
        ]
        for step in range(4 - resumed):
            first = 4 * (resumed + step)
            expected = sorted(int(line.labelled(n, 0, 1)[0][0]) for n in range(first, first + 4))
            assert sorted(token for rank in ranks for batch in rank[step] for token in batch) == expected


def test_what_is_dear_is_dealt_together():
    """Sequences of one document cost 16, those of four cost 4: micro-batches are of one kind; each asked for once."""
    long, short = [range(4)], [[9]] * 4
    line = Line(long + short + short + long, 4)
    options = dict(accumulation=2, data_size=2, cost=lambda documents: float(sum(n * n for n in documents)))
    for rank in range(2):
        line.asked.clear()
        [step] = steps(line, taker("contiguous", 4), data_rank=rank, **options)
        assert [batch.documents for batch in step] == [[(4,)], [(1, 1, 1, 1)]]
        assert sorted(line.asked) == [0, 1, 2, 3]  # not once more for what is this rank's


def test_prefetched_steps_are_not_lost():
    """C085: 20 sequences, stopped after 7 with 4 read ahead, then resumed: each once, in order."""
    line = Line([[n] for n in range(20)], 1)
    given = {**ONE, "prefetch": 4}
    loader = Loader(line, taker("contiguous", 1), first_sequence=0, num_steps=20, **given)
    served = [next(loader)[0].tokens.item() for _ in range(7)]
    loader.close()
    with Loader(line, taker("contiguous", 1), first_sequence=7, num_steps=13, **given) as rest:
        served += [step[0].tokens.item() for step in rest]
    assert served == list(range(20))


@pytest.mark.parametrize("cost", [None, len])
def test_finite_sequences_end_in_padding_on_every_rank(cost):
    """C062: all ranks take the same number of batches; those beyond the end hold no valid token."""
    line = Line([range(10)], 4)
    valid = []
    for rank in range(2):
        options = {"data_rank": rank, "data_size": 2, "num_steps": 3, "cost": cost}
        batches = [step[0] for step in steps(line, taker("contiguous", 4), **options)]
        assert len(batches) == 3
        valid.append([batch.valid_tokens for batch in batches])
        assert batches[2].documents == [()] and (batches[2].labels == -100).all()
        assert not batches[2].tokens.any() and not batches[2].positions.any()
    assert valid == [[4, 1, 0], [4, 0, 0]]


@pytest.mark.parametrize(("layout", "share"), [("striped", 8), ("contiguous", 1), ("zigzag", 1)])
def test_no_rank_reads_a_long_sequence_at_once(layout, share):
    """A striped rank reads the whole range, piece by piece; the others no token that is not theirs."""
    length, ranks, rank = 1 << 20, 8, 3
    flat = Flat(length)
    [[batch]] = steps(flat, taker(layout, length, ranks, rank), first_sequence=7)
    assert flat.longest <= (PIECE_TOKENS if layout == "striped" else length // ranks)
    assert flat.num_read <= share * length // ranks
    pieces = LAYOUTS[layout](length, ranks, rank)
    index = np.concatenate([np.arange(p.start, p.start + p.count * p.step, p.step) for p in pieces])
    assert np.array_equal(batch.positions.numpy()[0], index)
    assert np.array_equal(batch.tokens.numpy()[0], index + 7) and np.array_equal(batch.labels.numpy()[0], index + 8)


def test_many_tiny_chunks_share_reads():
    """10,000 chunks of 4 tokens, each 60 apart, cost as few reads as their range has pieces."""
    chunks = [Piece(64 * i, 4) for i in reversed(range(10_000))]
    found = reads(chunks, 640_000)
    assert len(found) <= -(-640_000 // PIECE_TOKENS) + 1
    assert sum(len(parts) for _, _, parts in found) == 10_000


def test_chunks_far_apart_are_read_alone():
    found = reads([Piece(0, 10), Piece(10 + GAP_TOKENS, 10)], 1 << 20)
    assert [(start, stop) for start, stop, _ in found] == [(0, 10), (10 + GAP_TOKENS, 20 + GAP_TOKENS)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_reads_are_the_chunks(data):
    """Any chunks of one step, against indices written out one by one."""
    step, length = data.draw(st.sampled_from([1, 2, 7, 70_000])), data.draw(st.integers(0, 400_000))
    starts = data.draw(st.lists(st.integers(0, 300_000), min_size=1, max_size=6))
    chunks = [Piece(start, data.draw(st.integers(0, 150_000 if step == 1 else 3000)), step) for start in starts]
    index = np.concatenate([p.start + step * np.arange(p.count) for p in chunks])
    held = np.full(len(index), -1)
    for start, stop, parts in reads(chunks, length):
        assert 0 <= start < stop <= length
        assert stop - start <= max(PIECE_TOKENS, max(p.count for p in chunks) if step == 1 else 0)
        for at, inside in parts:
            assert (held[at] == -1).all()
            held[at] = np.arange(start, stop)[inside]
    assert np.array_equal(held, np.where(index < length, index, -1))


def test_memory_is_flat():
    """C060, and It must show 5 in short (benchmarks/data.py takes 100,000 steps): 3,000 steps keep nothing."""
    line = Flat(64)
    given = ONE | {"accumulation": 2, "data_size": 2, "cost": lambda documents: float(sum(documents))}
    with Loader(line, taker("striped", 64, 2, 0), **given, first_sequence=0, num_steps=3001) as loader:
        held = []
        tracemalloc.start()
        try:
            for number, _ in enumerate(loader):
                if number in (500, 3000):
                    held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    assert held[1] - held[0] < 40_000  # 2,500 steps of 16 B each would be this much; a batch alone has 1,536


def test_an_error_of_the_thread_reaches_the_consumer():
    line = Line([range(1000)], 10)

    def broken(n, start, stop):
        raise DataError("tokens.bin is corrupt")

    line.labelled = broken
    loader = Loader(line, taker("contiguous", 10), **ONE, first_sequence=0, num_steps=5)
    with pytest.raises(DataError, match="corrupt"):
        next(loader)
    assert list(loader) == []


def test_close_ends_the_thread():
    line = Line([range(1000)], 10)
    before = threading.active_count()
    loader = Loader(line, taker("contiguous", 10), **ONE, first_sequence=0, num_steps=10**9)
    next(loader)
    loader.close()
    loader.close()
    assert threading.active_count() == before and list(loader) == []


def test_reads_ahead_and_counts_the_wait():
    line = Line([range(1000)], 10)

    def slow(documents):
        time.sleep(0.05)
        return taker("contiguous", 10)(documents)

    with Loader(line, slow, **ONE, first_sequence=0, num_steps=4, prefetch=4) as loader:
        next(loader)
        first = loader.wait_seconds
        assert first > 0.03
        time.sleep(0.4)
        assert len(list(loader)) == 3
        assert loader.wait_seconds - first < 0.03
