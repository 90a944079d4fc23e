"""The loader: each rank gets its slices of the right sequences, with the labels of the whole."""

import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from data.format import DataError, ShardWriter, open_shard
from data.loader import Loader
from data.stream import TokenStream


@dataclass(frozen=True)
class Piece:
    start: int
    count: int
    step: int


def contiguous(length, ranks, rank):
    return (Piece(rank * length // ranks, length // ranks, 1),)


def zigzag(length, ranks, rank):
    half = length // ranks // 2
    return Piece(rank * half, half, 1), Piece((2 * ranks - 1 - rank) * half, half, 1)


def striped(length, ranks, rank):
    return (Piece(rank, length // ranks, ranks),)


ONE = {"micro_batch_size": 1, "accumulation": 1, "data_rank": 0, "data_size": 1}
LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}


def taker(layout, length, ranks=1, rank=0):
    """`take` for a padded length; its plan is a value to recognise."""
    return lambda documents: (
        [LAYOUTS[layout](length, ranks, rank)] * len(documents),
        {"full": torch.tensor([rank])},
    )


def make_stream(folder, documents, length, **options):
    with ShardWriter(folder, 100_000, "pieces") as writer:
        for tokens in documents:
            writer.write(np.array(tokens))
            writer.end_document("d", num_bytes=1)
    return TokenStream(open_shard(folder), length, **options)


def steps(stream, take, **options):
    settings = {**ONE, "first_sequence": 0, "num_steps": 1}
    with Loader(stream, take, **settings | options) as loader:
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
def test_positions_follow_the_documents(tmp_path, layout, positions):
    """C021: documents of 3 and 5 over two ranks."""
    stream = make_stream(tmp_path / "s", [[1, 2, 3], [4, 5, 6, 7, 8]], 8, shuffle=False)
    for rank in range(2):
        [[batch]] = steps(stream, taker(layout, 8, 2, rank))
        assert batch.positions.tolist() == [positions[rank]]
        assert batch.documents == [(3, 5)] and batch.plan["full"].item() == rank


def test_labels_are_shifted_before_the_split(tmp_path):
    """C022: tokens 0 to 7 on two ranks have 7 targets, that of the border among them."""
    stream = make_stream(tmp_path / "s", [range(8)], 8)
    batches = [steps(stream, taker("contiguous", 8, 2, rank))[0][0] for rank in range(2)]
    assert [batch.labels.tolist() for batch in batches] == [[[1, 2, 3, 4]], [[5, 6, 7, -100]]]
    assert [batch.valid_tokens for batch in batches] == [4, 3]
    assert all(t.dtype == torch.int64 for t in (batches[0].tokens, batches[0].labels, batches[0].positions))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("length", "padded", "ranks"), [(7, 8, 2), (2999, 3000, 4), (2999, 3008, 4), (5, 32, 4)])
def test_padding_loses_nothing(tmp_path, layout, length, padded, ranks):
    """C025: lengths that the ranks do not divide keep every token and every target."""
    if layout == "zigzag" and padded % (2 * ranks):
        padded += ranks
    stream = make_stream(tmp_path / "s", [range(1, length + 1)], length)
    batches = [steps(stream, taker(layout, padded, ranks, rank))[0][0] for rank in range(ranks)]
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
def test_ranks_together_hold_the_sequence(tmp_path, layout, ranks):
    """Many short documents, any layout: the ranks' parts are the stream's own sequence."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 90_000, n) for n in rng.integers(1, 40, 300)]
    stream = make_stream(tmp_path / "s", documents, 512, seed=1)
    for n in range(3):
        batches = [steps(stream, taker(layout, 512, ranks, rank), first_sequence=n)[0][0] for rank in range(ranks)]
        expected = stream.labelled(n, 0, 512)
        for name, row in zip(("tokens", "labels", "positions"), expected, strict=True):
            assert restore(layout, 512, [getattr(batch, name)[0] for batch in batches]) == row.tolist()


def first_tokens(stream, **options):
    return [
        [batch.tokens[:, 0].tolist() for batch in step] for step in steps(stream, taker("contiguous", 4), **options)
    ]


def test_sequences_are_dealt_once(tmp_path):
    """C057: the union over data ranks, micro-batches and slots is each sequence once, in the stated order."""
    stream = make_stream(tmp_path / "s", [range(4 * n, 4 * n + 4) for n in range(100)], 4, shuffle=False)
    options = dict(micro_batch_size=3, accumulation=2, data_size=2, first_sequence=5, num_steps=2)
    got = [first_tokens(stream, data_rank=rank, **options) for rank in range(2)]
    for rank in range(2):
        for step in range(2):
            for micro in range(2):
                first = 5 + ((step * 2 + micro) * 2 + rank) * 3
                assert got[rank][step][micro] == [4 * n for n in range(first, first + 3)]
    flat = sorted(token for rank in got for step in rank for micro in step for token in micro)
    assert flat == [4 * n for n in range(5, 29)]


@pytest.mark.parametrize(
    ("data_size", "accumulation", "micro"), [(1, 1, 4), (2, 2, 1), (4, 1, 1), (1, 4, 1), (2, 1, 2)]
)
def test_the_step_holds_the_same_sequences_however_they_are_dealt(tmp_path, data_size, accumulation, micro):
    """C084: another number of data ranks or micro-batches resumes with the very next sequences."""
    stream = make_stream(tmp_path / "s", [range(4 * n, 4 * n + 4) for n in range(16)], 4, seed=7)
    expected = [[int(stream.read(4 * step + i, 0, 1)[0]) for i in range(4)] for step in range(4)]
    options = dict(micro_batch_size=micro, accumulation=accumulation, data_size=data_size)
    for resume in (0, 2):
        first = stream.start(stream.cursor(4 * resume))
        ranks = [
            first_tokens(stream, data_rank=r, first_sequence=first, num_steps=4 - resume, **options)
            for r in range(data_size)
        ]
        for step in range(4 - resume):
            held = sorted(token for rank in ranks for batch in rank[step] for token in batch)
            assert held == sorted(expected[resume + step])


def test_prefetched_steps_are_not_lost(tmp_path):
    """C085: 20 sequences, stopped after 7 with 4 read ahead, then resumed: each once, in order."""
    stream = make_stream(tmp_path / "s", [[n] for n in range(20)], 1, seed=3)
    settings = {**ONE, "prefetch": 4}
    loader = Loader(stream, taker("contiguous", 1), first_sequence=0, num_steps=20, **settings)
    served = [next(loader)[0].tokens.item() for _ in range(7)]
    loader.close()
    first = stream.start(stream.cursor(7))
    with Loader(stream, taker("contiguous", 1), first_sequence=first, num_steps=13, **settings) as rest:
        served += [step[0].tokens.item() for step in rest]
    assert served == stream.read(0, 0, 1).tolist() + [int(stream.read(n, 0, 1)[0]) for n in range(1, 20)]
    assert sorted(served) == list(range(20))


def test_finite_stream_ends_in_padding_on_every_rank(tmp_path):
    """C062: all ranks take the same number of batches; those beyond the end hold no valid token."""
    stream = make_stream(tmp_path / "s", [range(10)], 4, shuffle=False, epochs=1)
    for rank in range(2):
        batches = [step[0] for step in steps(stream, taker("contiguous", 4), data_rank=rank, data_size=2, num_steps=3)]
        assert len(batches) == 3
        assert [batch.valid_tokens for batch in batches] == ([4, 1, 0] if rank == 0 else [4, 0, 0])
        assert batches[2].documents == [()] and (batches[2].labels == -100).all()


def test_an_error_of_the_thread_reaches_the_consumer(tmp_path):
    stream = make_stream(tmp_path / "s", [range(1000)], 10)
    with open(tmp_path / "s" / "tokens.bin", "r+b") as file:
        file.write(b"\xff\xff")
    loader = Loader(stream, taker("contiguous", 10), **ONE, first_sequence=0, num_steps=5)
    with pytest.raises(DataError, match="corrupt"):
        next(loader)
    assert list(loader) == []


def test_close_ends_the_thread(tmp_path):
    stream = make_stream(tmp_path / "s", [range(1000)], 10)
    before = threading.active_count()
    loader = Loader(stream, taker("contiguous", 10), **ONE, first_sequence=0, num_steps=10**9)
    next(loader)
    loader.close()
    loader.close()
    assert threading.active_count() == before and list(loader) == []


def test_reads_ahead_and_counts_the_wait(tmp_path):
    stream = make_stream(tmp_path / "s", [range(1000)], 10)

    def slow(documents):
        time.sleep(0.05)
        return taker("contiguous", 10)(documents)

    with Loader(stream, slow, **ONE, first_sequence=0, num_steps=4, prefetch=4) as loader:
        next(loader)
        first = loader.wait_seconds
        assert first > 0.03
        time.sleep(0.4)
        assert len(list(loader)) == 3
        assert loader.wait_seconds - first < 0.03
