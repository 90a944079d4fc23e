"""The stream: every token of every document once an epoch, in an order that depends on the seed only."""

from collections import Counter

import numpy as np
import pytest

from data.format import ShardWriter, open_shard
from data.stream import IGNORE, TokenStream

LENGTHS = [10, 3, 1, 25, 7, 4]
EOS = 0


def make_shard(folder, documents):
    with ShardWriter(folder, 1000, "pieces") as writer:
        for tokens in documents:
            writer.write(np.array(tokens))
            writer.end_document("d", num_bytes=1)
    return open_shard(folder)


@pytest.fixture
def shard(tmp_path):
    """Documents of unique tokens, each ending in EOS."""
    ids = iter(range(1, 1000))
    return make_shard(tmp_path / "s", [[next(ids) for _ in range(n - 1)] + [EOS] for n in LENGTHS])


def line(shard, order):
    """(token, label, document instance) along the line, by plain Python lists."""
    out = []
    for instance, document in enumerate(order):
        tokens = shard.read(int(shard.offsets[document]), int(shard.offsets[document + 1])).tolist()
        out += [(t, n, instance) for t, n in zip(tokens, [*tokens[1:], IGNORE], strict=True)]
    return out


def order_of(stream, shard, epoch):
    """Which documents an epoch serves, told from the tokens alone."""
    total = shard.num_tokens
    whole = TokenStream(shard, total, stream.seed, stream.shuffle)
    first = {int(shard.read(int(start), int(start) + 1)[0]): i for i, start in enumerate(shard.offsets[:-1])}
    tokens, out, at = whole.read(epoch, 0, total).tolist(), [], 0
    while at < total:
        out.append(first[tokens[at]])
        at += LENGTHS[out[-1]]
    return out


@pytest.mark.parametrize("length", [1, 4, 7, 50, 64, 173])
@pytest.mark.parametrize("shuffle", [True, False])
def test_sequences_are_cut_from_one_line(shard, length, shuffle):
    """C054, C034: documents go on over sequence and epoch borders; labels end with a document only."""
    stream = TokenStream(shard, length, seed=3, shuffle=shuffle)
    order = [document for epoch in range(8) for document in order_of(stream, shard, epoch)]
    expected = line(shard, order)
    for n in range(min(60, len(expected) // length)):
        rows = expected[n * length : (n + 1) * length]
        tokens, labels, positions = stream.labelled(n, 0, length)
        assert tokens.tolist() == [row[0] for row in rows] == stream.read(n, 0, length).tolist()
        assert labels.tolist() == [row[1] for row in rows]
        pieces = Counter(row[2] for row in rows)
        assert stream.documents(n) == tuple(pieces.values()) and sum(stream.documents(n)) == length
        assert positions.tolist() == [i for size in pieces.values() for i in range(size)]


def test_any_range_of_a_sequence_is_part_of_the_whole(shard):
    stream = TokenStream(shard, 64, seed=1)
    for n in range(4):
        whole = stream.labelled(n, 0, 64)
        for start, stop in np.sort(np.random.default_rng(n).integers(0, 65, (30, 2)), axis=1).tolist():
            parts = stream.labelled(n, start, stop)
            assert all((part == full[start:stop]).all() for part, full in zip(parts, whole, strict=True))
            assert (stream.read(n, start, stop) == whole[0][start:stop]).all()


def test_a_document_longer_than_the_sequence(tmp_path):
    """C054: 10 tokens in sequences of 4: [0-3], [4-7], [8-9 and the next epoch's first two]."""
    stream = TokenStream(make_shard(tmp_path / "s", [range(10)]), 4)
    assert [stream.labelled(n, 0, 4)[0].tolist() for n in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 0, 1],
    ]
    assert [stream.labelled(n, 0, 4)[1].tolist() for n in range(3)] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, -100, 1, 2],
    ]
    assert [stream.documents(n) for n in range(3)] == [(4,), (4,), (2, 2)]


def test_labels_at_document_borders(tmp_path):
    """C034: documents [1, 2, 3] and [4, 5], without and with an end token."""
    plain = TokenStream(make_shard(tmp_path / "a", [[1, 2, 3], [4, 5]]), 5, shuffle=False)
    assert plain.labelled(0, 0, 5)[1].tolist() == [2, 3, -100, 5, -100]
    ended = TokenStream(make_shard(tmp_path / "b", [[1, 2, 3, 0], [4, 5, 0]]), 7, shuffle=False)
    assert ended.labelled(0, 0, 7)[1].tolist() == [2, 3, 0, -100, 5, 0, -100]


def test_each_epoch_serves_each_token_once(shard):
    """C087: and the order changes from epoch to epoch and seed to seed."""
    total = shard.num_tokens
    stream = TokenStream(shard, total, seed=0)
    everything = sorted(shard.read(0, total).tolist())
    assert all(sorted(stream.read(epoch, 0, total).tolist()) == everything for epoch in range(5))
    orders = {tuple(order_of(stream, shard, epoch)) for epoch in range(20)}
    assert len(orders) > 10
    assert len({tuple(order_of(TokenStream(shard, 5, seed=s), shard, 0)) for s in range(20)}) > 10


def test_order_is_pinned(shard):
    """A cursor outlives this version: the order of a seed must never change."""

    def splitmix(value):
        mask = (1 << 64) - 1
        value = (value + 0x9E3779B97F4A7C15) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    assert splitmix(0) == 0xE220A8397B1DCDAF  # the published first output for seed 0
    for epoch in (0, 1, 5):
        state = splitmix(splitmix(42) ^ epoch)
        expected = sorted(range(len(LENGTHS)), key=lambda document: splitmix(document ^ state))
        assert order_of(TokenStream(shard, 5, seed=42), shard, epoch) == expected


def test_order_is_random(tmp_path):
    """Over many seeds each document comes first about equally often."""
    shard = make_shard(tmp_path / "s", [[i] for i in range(8)])
    firsts = Counter(int(TokenStream(shard, 8, seed).read(0, 0, 1)[0]) for seed in range(800))
    assert len(firsts) == 8 and all(60 < count < 145 for count in firsts.values())


def test_finite_stream(shard):
    """Validation: in order, each token once, the last sequence short, nothing after it."""
    stream = TokenStream(shard, 16, shuffle=False, epochs=1)
    assert stream.num_sequences == 4  # 50 tokens
    assert [sum(stream.documents(n)) for n in range(6)] == [16, 16, 16, 2, 0, 0]
    assert stream.documents(5) == ()
    served = [token for n in range(6) for token in stream.read(n, 0, 16).tolist()]
    assert served == shard.read(0, 50).tolist()
    tokens, labels, positions = stream.labelled(3, 0, 2)
    assert (tokens.tolist(), labels.tolist(), positions.tolist()) == (served[48:], [EOS, IGNORE], [0, 1])
    assert [len(part) for part in stream.labelled(9, 0, 16)] == [0, 0, 0]


def test_resume_goes_on_where_it_stopped(shard):
    """C085: at the same length, at half and at double, the next token on the line is the next one served."""
    before = TokenStream(shard, 8, seed=5)
    cursor = before.cursor(14)
    assert cursor == {"tokens": 112, "epoch": 2, "sequence_length": 8, "fingerprint": before.fingerprint}
    expected = np.concatenate([before.read(n, 0, 8) for n in range(14, 24)])
    for length in (8, 4, 16, 28):
        after = TokenStream(shard, length, seed=5)
        n = after.start(cursor)
        served = np.concatenate([after.read(n + i, 0, length) for i in range(-(-80 // length))])
        assert (served[:80] == expected).all()


def test_cursor_inside_a_sequence_is_refused(shard):
    cursor = TokenStream(shard, 8, seed=5).cursor(3)
    with pytest.raises(ValueError, match=r"data\.sequence_length=16 does not divide the 24 tokens .* use 8"):
        TokenStream(shard, 16, seed=5).start(cursor)


def test_cursor_of_other_data_is_refused(shard, tmp_path):
    stream = TokenStream(shard, 8, seed=5)
    with pytest.raises(ValueError, match=rf"{stream.fingerprint}.*train\.seed=6.*run\.name=NAME"):
        TokenStream(shard, 8, seed=6).start(stream.cursor(3))
    other = make_shard(tmp_path / "other", [[1, 2, 3]])
    with pytest.raises(ValueError, match=stream.fingerprint):
        TokenStream(other, 8, seed=5).start(stream.cursor(3))


def test_a_shard_without_documents_is_refused(tmp_path):
    """C067."""
    with pytest.raises(ValueError, match="has no documents"):
        TokenStream(make_shard(tmp_path / "s", []), 8)


def test_order_does_not_depend_on_the_reading(shard):
    """Sequences may be asked for in any order, and again."""
    stream = TokenStream(shard, 8, seed=2)
    expected = [TokenStream(shard, 8, seed=2).read(n, 0, 8).tolist() for n in range(40)]
    for n in np.random.default_rng(0).integers(0, 40, 200).tolist():
        assert stream.read(n, 0, 8).tolist() == expected[n]
