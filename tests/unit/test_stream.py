"""The stream: every token of every document once an epoch, in an order that depends on the seed only."""

import gc
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
import tracemalloc
import weakref
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from data.order import Epochs
from data.sequences import NEAR, gather
from data.shards import open_tokens
from data.stream import IGNORE, Source, Stage, Stretch, TokenStream, finite
from tests.shards import write_documents
from tests.sources import Numbered, stream_of

LENGTHS = [10, 3, 1, 25, 7, 4]
TOTAL = sum(LENGTHS)
STARTS = np.cumsum([0, *LENGTHS]).tolist()
POLICIES = [("consecutive", "pack"), ("consecutive", "fit"), ("windows", "pack"), ("windows", "fit")]


def splitmix(value):
    """In Python's own integers."""
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def order_of(seed, epoch):
    """The order of documents in an epoch, as it has always been."""
    state = splitmix(splitmix(seed) ^ epoch)
    return sorted(range(len(LENGTHS)), key=lambda document: splitmix(document ^ state))


def line(order):
    """(token, label, which of the order) along the line."""
    rows = []
    for instance, document in enumerate(order):
        tokens = list(range(STARTS[document], STARTS[document + 1]))
        rows += [(token, label, instance) for token, label in zip(tokens, [*tokens[1:], IGNORE], strict=True)]
    return rows


@pytest.mark.parametrize("length", [1, 4, 7, 13, 49, 50])
def test_sequences_are_cut_from_one_line(length):
    """C054, C034, C087: documents go on over sequence and epoch borders; labels end with a document only. The order is
    pinned, as a cursor outlives this version."""
    assert splitmix(0) == 0xE220A8397B1DCDAF  # the published first output for seed 0
    sequences = stream_of(LENGTHS, length, seed=3).stage(0)
    assert sequences.num_sequences is None and sequences.sequence_length == length
    expected = line([document for epoch in range(8) for document in order_of(3, epoch)])
    for n in range(min(60, len(expected) // length)):
        rows = expected[n * length : (n + 1) * length]
        tokens, labels, positions = sequences.labelled(n, 0, length)
        assert tokens.tolist() == [row[0] for row in rows] == sequences.read(n, 0, length).tolist()
        assert labels.tolist() == [row[1] for row in rows]
        assert {part.dtype for part in (tokens, labels, positions)} == {np.dtype(np.int64)}
        pieces = Counter(row[2] for row in rows)
        assert sequences.documents(n) == tuple(pieces.values()) and sum(sequences.documents(n)) == length
        assert positions.tolist() == [i for size in pieces.values() for i in range(size)]


@pytest.mark.parametrize("positions", ["document", "sequence"])
@pytest.mark.parametrize("long, short", POLICIES)
def test_any_range_of_a_sequence_is_part_of_the_whole(long, short, positions):
    sequences = stream_of([*LENGTHS, 70, 33], 32, seed=1, long=long, short=short, positions=positions).stage(0)
    for n in range(12):
        size = sum(sequences.documents(n))
        whole = sequences.labelled(n, 0, 32)
        assert [len(part) for part in whole] == [size] * 3
        for start, stop in np.sort(np.random.default_rng(n).integers(0, 33, (40, 2)), axis=1).tolist():
            parts = sequences.labelled(n, start, stop)
            assert all((part == full[start:stop]).all() for part, full in zip(parts, whole, strict=True))
            assert [len(part) for part in parts] == [max(0, min(stop, size) - min(start, size))] * 3
            assert (sequences.read(n, start, stop) == whole[0][start:stop]).all()


@pytest.mark.parametrize("long, short", POLICIES)
def test_labels_and_positions_follow_the_stretches(long, short):
    """A label is the next token of the document, whatever lies next in the sequence."""
    ends = np.cumsum([*LENGTHS, 70, 33])
    for positions in ("document", "sequence"):
        sequences = stream_of([*LENGTHS, 70, 33], 32, seed=4, long=long, short=short, positions=positions).stage(0)
        for n in range(20):
            tokens, labels, position = sequences.labelled(n, 0, 32)
            stretches = sequences.stretches(n)
            assert sequences.documents(n) == tuple(stretch.length for stretch in stretches)
            starts = [(ends[part.document - 1] if part.document else 0) + part.first for part in stretches]
            expected = [t for s, part in zip(starts, stretches, strict=True) for t in range(s, s + part.length)]
            assert tokens.tolist() == expected
            assert labels.tolist() == [IGNORE if token + 1 in ends else token + 1 for token in expected]
            in_documents = [i for part in stretches for i in range(part.length)]
            assert position.tolist() == (in_documents if positions == "document" else list(range(len(expected))))


def test_a_document_longer_than_the_sequence():
    """C054: 10 tokens in sequences of 4: [0-3], [4-7], [8-9 and the next epoch's first two]."""
    sequences = stream_of([10], 4).stage(0)
    assert [sequences.read(n, 0, 4).tolist() for n in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    labels = [sequences.labelled(n, 0, 4)[1].tolist() for n in range(3)]
    assert labels == [[1, 2, 3, 4], [5, 6, 7, 8], [9, -100, 1, 2]]
    assert [sequences.documents(n) for n in range(3)] == [(4,), (4,), (2, 2)]
    assert sequences.stretches(2) == [Stretch("numbered", 0, 8, 2), Stretch("numbered", 0, 0, 2)]


def test_a_million_tokens_in_sequences_of_4096_lose_none():
    """C054: 244 sequences of 4096, and what is left of the document begins the next one."""
    sequences = stream_of([1_000_000], 4096).stage(0)
    served = np.concatenate([sequences.read(n, 0, 4096) for n in range(245)])
    assert (served[:1_000_000] == np.arange(1_000_000)).all() and served[1_000_000:].tolist() == list(range(3520))


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("long, short", POLICIES)
def test_documents_about_as_long_as_the_sequence(long, short, length):
    """I09: exactly T, T ± 1 and 2 T; nothing empty, nothing lost."""
    sequences = stream_of([16, 15, 17, 32], length, seed=2, long=long, short=short).stage(0)
    served, n = [], 0
    while len(served) < 80:
        served += sequences.read(n, 0, length).tolist()
        assert all(size > 0 for size in sequences.documents(n))
        n += 1
    assert sorted(served[:80]) == list(range(80))


def test_the_order_changes_from_epoch_to_epoch_seed_to_seed_and_source_to_source():
    whole = stream_of(LENGTHS, TOTAL).stage(0)
    assert len({tuple(whole.read(epoch, 0, TOTAL).tolist()) for epoch in range(20)}) > 15
    assert len({tuple(stream_of(LENGTHS, TOTAL, seed=s).stage(0).read(0, 0, TOTAL).tolist()) for s in range(20)}) > 15
    twins = [Source(name, Numbered(LENGTHS, where=name), Fraction(1, 2)) for name in "ab"]
    both = TokenStream(twins, [Stage(TOTAL, None)], seed=0).stage(0)
    assert both.read(0, 0, TOTAL).tolist() != both.read(1, 0, TOTAL).tolist()


def test_order_is_random():
    """Over many seeds each document comes first about equally often."""
    firsts = Counter(int(stream_of([1] * 8, 8, seed=seed).stage(0).read(0, 0, 1)[0]) for seed in range(800))
    assert len(firsts) == 8 and all(60 < count < 145 for count in firsts.values())


def test_order_does_not_depend_on_the_reading():
    """Sequences may be asked for in any order, and again."""
    for long, short in POLICIES:
        sequences = stream_of(LENGTHS, 8, seed=2, long=long, short=short).stage(0)
        expected = [sequences.read(n, 0, 8).tolist() for n in range(40)]
        for n in np.random.default_rng(0).integers(0, 40, 100).tolist():
            assert sequences.read(n, 0, 8).tolist() == expected[n]


def test_upweighted_documents_come_more_often():
    """Documents of 7 tokens or more twice, of 25 or more four times, in each epoch; the copies are shuffled, too."""
    times = [2, 1, 1, 4, 2, 1]
    expected = Counter({t: often for d, often in enumerate(times) for t in range(STARTS[d], STARTS[d] + LENGTHS[d])})
    stream = stream_of(LENGTHS, 10, upweight=[(7, 2), (25, 4)])
    size = expected.total()
    orders = set()
    for epoch in range(4):
        whole = stream_of(LENGTHS, size, upweight=[(7, 2), (25, 4)]).stage(0)
        assert Counter(whole.read(epoch, 0, size).tolist()) == expected
        orders.add(tuple(stretch.document for stretch in whole.stretches(epoch)))
    assert len(orders) == 4
    assert sum(Counter(stream.stage(0).read(n, 0, 10).tolist())[STARTS[3]] for n in range(size)) == 40  # 10 epochs


def test_finite_sequences():
    """Validation: in order, each token once, the last sequence short, nothing after it."""
    sequences = finite(Numbered(LENGTHS), 16)
    assert sequences.num_sequences == 4  # 50 tokens
    assert [sum(sequences.documents(n)) for n in range(6)] == [16, 16, 16, 2, 0, 0]
    assert sequences.documents(0) == (10, 3, 1, 2) and sequences.documents(5) == () == tuple(sequences.stretches(5))
    assert [token for n in range(6) for token in sequences.read(n, 0, 16).tolist()] == list(range(TOTAL))
    assert [part.tolist() for part in sequences.labelled(3, 0, 16)] == [[48, 49], [49, IGNORE], [0, 1]]
    assert finite(Numbered(LENGTHS), 16, "sequence").labelled(0, 8, 16)[2].tolist() == list(range(8, 16))
    assert [len(part) for part in sequences.labelled(9, 0, 16)] == [0, 0, 0]
    assert finite(Numbered(LENGTHS), 1000).documents(0) == tuple(LENGTHS)


@pytest.mark.parametrize("long, short", POLICIES)
def test_shards_as_they_are_read_from_disk(tmp_path, long, short):
    """The same as in memory, from two files."""
    documents = [list(range(start, start + size)) for start, size in zip(STARTS, LENGTHS, strict=False)]
    write_documents(tmp_path, documents[:2], vocab_size=100, name="00000")
    write_documents(tmp_path, documents[2:], vocab_size=100, name="00001")
    source = Source("numbered", open_tokens(tmp_path), Fraction(1))
    there = TokenStream([source], [Stage(8, None)], seed=0, long=long, short=short).stage(0)
    here = stream_of(LENGTHS, 8, long=long, short=short).stage(0)
    for n in range(20):
        for ours, theirs in zip(here.labelled(n, 1, 8), there.labelled(n, 1, 8), strict=True):
            assert ours.tolist() == theirs.tolist() and ours.dtype == theirs.dtype


# Reading.


def test_reads_what_is_asked_for_and_one_token_more():
    tokens = Numbered([1 << 30])
    stream = TokenStream([Source("long", tokens, Fraction(1))], [Stage(1 << 20, None)], seed=0)
    stream.stage(0).labelled(3, 1000, 2000)
    assert tokens.reads == [((3 << 20) + 1000, (3 << 20) + 2001)]


def test_short_documents_near_one_another_are_read_together():
    """C060: 4,096 documents of one token, shuffled, take few reads, and none is out of bounds or doubled."""
    tokens = Numbered([1] * 100_000)
    sequences = TokenStream([Source("tiny", tokens, Fraction(1))], [Stage(4096, None)], seed=0).stage(0)
    served = sequences.read(0, 0, 4096)
    assert len(set(served.tolist())) == 4096 and len(tokens.reads) < 5
    assert (np.diff(np.sort(served)) < NEAR).all()


@pytest.mark.parametrize("seed", range(20))
def test_gather_equals_reading_one_by_one(seed):
    random = np.random.default_rng(seed)
    tokens = Numbered([3_000_000])
    lengths = random.choice([1, 2, 7, NEAR - 1, NEAR, 5000], 60)
    starts = random.integers(0, random.choice([20_000, 2_900_000]), 60)
    alone = [token for s, n in zip(starts.tolist(), lengths.tolist(), strict=True) for token in range(s, s + n)]
    assert gather(tokens, starts, lengths).tolist() == alone
    assert max(stop - start for start, stop in tokens.reads) <= (1 << 20) + 5000


def test_gather_reads_a_bounded_part_at_once():
    """However many short stretches lie near one another."""
    tokens = Numbered([4_000_000])
    starts = np.random.default_rng(0).permutation(np.arange(0, 4_000_000, 1000))
    assert gather(tokens, starts, np.ones_like(starts)).tolist() == starts.tolist()
    assert max(stop - start for start, stop in tokens.reads) <= 1 << 20 and len(tokens.reads) == 4
    tokens.reads.clear()
    gather(tokens, np.array([0, 5010]), np.array([5000, 1]))  # a long one goes straight to where it belongs
    assert tokens.reads == [(0, 5000), (5010, 5011)]


# Many documents, and long ones.


@pytest.mark.parametrize("long, short", POLICIES)
def test_a_million_documents_of_one_token(long, short):
    """I09, C060: arrays and no lists, so about a hundred bytes a document; a sequence at once."""
    tokens = Numbered([1] * 1_000_000)
    tracemalloc.start()
    stream = TokenStream([Source("tiny", tokens, Fraction(1))], [Stage(8192, None)], seed=0, long=long, short=short)
    served = stream.stage(0).read(100, 0, 8192)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(served.tolist())) == 8192
    assert peak < 250e6, peak
    per_epoch = -(-1_000_000 // 8192) if (long, short) != ("consecutive", "pack") else 1_000_000 / 8192
    assert stream.cursor(0, 1000)["epoch"] == int(1000 // per_epoch)


@pytest.mark.parametrize("long, short", POLICIES)
def test_three_documents_of_a_billion_tokens(long, short):
    """C052, I09: offsets and places of 64 bits, up to the last token."""
    size, length = 1_000_000_000, 1 << 20
    tokens = Numbered([size] * 3)
    assert tokens.offsets.tolist() == [0, size, 2 * size, 3 * size]
    stream = TokenStream([Source("long", tokens, Fraction(1))], [Stage(length, None)], seed=5, long=long, short=short)
    sequences = stream.stage(0)
    on_a_line = (long, short) == ("consecutive", "pack")
    num_sequences = 2861 if on_a_line else 2862  # the last one lies in the next epoch, too, or is padded
    parts = [part for n in range(num_sequences) for part in sequences.stretches(n)]
    ranges = sorted((size * part.document + part.first, part.length) for part in parts)
    assert all(start + length <= after for (start, length), (after, _) in itertools.pairwise(ranges))
    assert sum(part.length for part in parts) == (2861 * length if on_a_line else 3 * size)
    last = max(range(num_sequences), key=lambda n: sequences.read(n, 0, 1)[0])
    tokens, labels, _ = sequences.labelled(last, 500_000, 500_004)
    assert tokens[0] > 2**31 and tokens.tolist() == [int(tokens[0]) + i for i in range(4)]
    assert labels.tolist() == [token + 1 for token in tokens.tolist()]


# Resuming.


def test_a_cursor_is_small_and_says_where():
    """C085: after 14 sequences of 8 tokens of 50."""
    stream = stream_of(LENGTHS, 8, seed=5, upweight=[])
    cursor = stream.cursor(0, 14)
    source = hashlib.sha256(json.dumps([["numbered", "numbered 6 50 0", "1"]]).encode()).hexdigest()[:16]
    assert cursor == {
        "stage": 0,
        "epoch": 2,
        "sample": 14,
        "tokens": 112,
        "fingerprint": {
            "sources": source,
            "seed": 5,
            "long": "consecutive",
            "short": "pack",
            "upweight": [],
            "positions": "document",
            "stages": [[8, None, ""]],
        },
    }
    assert stream.start(cursor) == (0, 14)


def test_a_cursor_stays_the_same_as_json():
    """Whatever a label says."""
    upweight, label = [(7, 2), (25, 4)], 'rope_theta=1e6, "other" =, {x} / é'
    stream = staged([(8, 14, label), (16, None, label)], upweight=upweight)
    cursor = stream.cursor(1, 2)
    assert json.loads(json.dumps(cursor)) == cursor
    assert cursor["fingerprint"]["upweight"] == [[7, 2], [25, 4]]
    assert cursor["fingerprint"]["stages"] == [[8, 14, label], [16, None, label]]
    assert stream.start(json.loads(json.dumps(cursor))) == (1, 2)
    with pytest.raises(
        ValueError, match=re.escape("use 'context=[{tokens:112,sequence_length:8," + label[:10] + ":1e6, ")
    ):
        staged([(8, 14), (16, None, label)], upweight=upweight).start(cursor)


def test_the_epoch_of_a_cursor_is_where_the_furthest_source_is():
    """On a line of 50 tokens and one of 20 by halves, exactly, and over stages."""
    sources = [Source(name, Numbered(sizes), Fraction(1, 2)) for name, sizes in {"a": LENGTHS, "b": [13, 7]}.items()]
    stream = TokenStream(sources, [Stage(8, 14), Stage(5, None)], seed=0)
    assert [stream.cursor(0, n)["epoch"] for n in (0, 4, 5, 6, 14)] == [0, 0, 0, 1, 2]
    assert [stream.cursor(1, n)["epoch"] for n in (0, 1, 2, 3)] == [2, 2, 3, 3]


@pytest.mark.parametrize("long, short", POLICIES)
def test_a_cursor_takes_no_epoch(long, short, monkeypatch):
    """A process that has read nothing has it at once, and it is the one that another has."""

    def of():
        lengths = np.random.default_rng(0).integers(1, 200, 1000).tolist()
        return staged([(64, 3000), (128, 500), (32, None)], long=long, short=short, lengths=lengths)

    expected = []
    for stream, read in ((of(), True), (of(), False)):
        if read:
            stream.stage(2).read(0, 0, 32)
        else:
            monkeypatch.setattr(Epochs, "_order", None)  # nothing can be ordered from here on
        expected.append([stream.cursor(*at) for at in ((0, 2999), (1, 0), (1, 177), (2, 12_345))])
    assert expected[0] == expected[1]
    assert [cursor["epoch"] for cursor in expected[0]] == [1, 1, 2, 6]


@pytest.mark.parametrize("long, short", POLICIES)
def test_only_the_last_stage_is_kept(long, short):
    """What an earlier one had dealt goes at once, not only when Python looks for circles; it may be read again."""
    stages, policies = [(8, 10), (16, 10), (24, None)], {"long": long, "short": short, "lengths": [*LENGTHS, 70, 33]}
    parts = [(number, n) for number in range(3) for n in range(10)]

    def read(stream, parts):
        return {(number, n): stream.stage(number).read(n, 0, stages[number][0]).tolist() for number, n in parts}

    stream = staged(stages, **policies)
    there = read(stream, parts)
    assert read(stream, reversed(parts)) == there
    gc.collect()
    gc.disable()
    try:
        stream.stage(0).read(0, 0, 8)
        lanes = [weakref.ref(lane) for lane in stream.stage(0).lanes]
        stream.stage(1).read(0, 0, 16)
        assert [lane() for lane in lanes] == [None]
    finally:
        gc.enable()


def staged(stages, *, seed=5, long="consecutive", short="pack", lengths=LENGTHS, upweight=(), positions="document"):
    return TokenStream(
        [Source("books", Numbered(lengths, where="corpora/books/train"), Fraction(1))],
        [Stage(*stage) for stage in stages],
        seed=seed,
        long=long,
        short=short,
        upweight=upweight,
        positions=positions,
    )


def test_the_next_stage_goes_on_on_the_same_line():
    """112 tokens at 8, then at 16, then at 5: the line of the epochs is read on."""
    expected = [row[0] for row in line([document for epoch in range(8) for document in order_of(5, epoch)])]
    stream = staged([(8, 14), (16, 3), (5, None)])
    served = [token for n in range(14) for token in stream.stage(0).read(n, 0, 8).tolist()]
    served += [token for n in range(3) for token in stream.stage(1).read(n, 0, 16).tolist()]
    served += [token for n in range(9) for token in stream.stage(2).read(n, 0, 5).tolist()]
    assert served == expected[: len(served)]
    assert stream.cursor(2, 9)["tokens"] == len(served) and stream.cursor(1, 0)["tokens"] == 112
    assert stream.stage(1) is stream.stage(1) and stream.stage(1).num_sequences == 3
    assert stream.stage(1).documents(3) == () and len(stream.stage(1).read(3, 0, 16)) == 0  # those are of the next one


@pytest.mark.parametrize("long, short", POLICIES[1:])
@pytest.mark.parametrize("cuts", [(1, 2, 3), (4, 1, 2), (0, 0, 5), (2, 0, 3), (9, 9, 9)])
def test_stages_share_an_epoch(long, short, cuts):
    """What a stage leaves of an epoch comes first in the next one: neighbours as one piece, cut anew."""
    lengths = [40, 3, 17, 25, 7, 9, 64]
    stream = staged([(8, cuts[0]), (16, cuts[1]), (5, cuts[2]), (33, None)], long=long, short=short, lengths=lengths)
    served = []
    for number, count in enumerate([*cuts, 12]):
        for n in range(count):
            served += stream.stage(number).read(n, 0, stream.stages[number].sequence_length).tolist()
    total = sum(lengths)
    assert len(served) > 2 * total
    assert sorted(served[:total]) == sorted(served[total : 2 * total]) == list(range(total))


def test_what_is_left_is_cut_anew_at_the_new_length():
    """One document of 64: two windows of 8 are served, what is left are windows of 16 that begin where they may."""
    stream = staged([(8, 2), (16, None)], long="consecutive", short="fit", lengths=[64])
    assert [stream.stage(0).read(n, 0, 8)[0] for n in range(2)] == [0, 8]
    assert [stream.stage(1).documents(n) for n in range(4)] == [(16,), (16,), (16,), (16,)]
    assert [int(stream.stage(1).read(n, 0, 16)[0]) for n in range(4)] == [16, 32, 48, 0]


def test_the_end_of_a_stage_is_the_start_of_the_next():
    stream = staged([(8, 14), (16, 3), (5, None)])
    assert stream.start(stream.cursor(0, 14)) == stream.start(stream.cursor(1, 0)) == (1, 0)
    assert stream.start(stream.cursor(1, 2)) == (1, 2)
    ended = staged([(8, 14)])
    assert ended.start(ended.cursor(0, 14)) == (0, 14)


def test_stages_that_have_not_begun_may_change():
    """Also the end of the one that has, as long as it is not before the cursor."""
    cursor = staged([(8, 14), (16, 10, "rope_theta=1e6")]).cursor(1, 3)
    for stages in (
        [(8, 14), (16, None, "rope_theta=1e6")],
        [(8, 14), (16, 3, "rope_theta=1e6"), (32, None)],
        [(8, 14), (16, 40, "rope_theta=1e6"), (5, 7), (4, None)],
    ):
        assert staged(stages).start(cursor) == ((1, 3) if stages[1][1] != 3 else (2, 0))
    assert staged([(8, 5), (10, None)]).start(staged([(8, None)]).cursor(0, 5)) == (1, 0)
    with pytest.raises(
        ValueError, match=r"context\.1\.tokens=32, but .* consumed 48 .* use context\.1\.tokens=48 or m"
    ):
        staged([(8, 14), (16, 2, "rope_theta=1e6")]).start(cursor)


@pytest.mark.parametrize(
    "before, at, after, legal",
    [
        ([(8, None)], (0, 14), [(16, None)], "{tokens:112,sequence_length:8},{sequence_length:16}"),
        (
            [(8, 14, "rope_theta=500"), (16, None, "rope_theta=1e6")],
            (1, 2),
            [(8, 14, "rope_theta=500"), (20, None, "rope_theta=1e6")],
            "{tokens:112,sequence_length:8,rope_theta:500},{tokens:32,sequence_length:16,rope_theta:1e6},"
            "{sequence_length:20,rope_theta:1e6}",
        ),
        (
            [(8, 14), (16, None)],
            (1, 2),
            [(16, None)],
            "{tokens:112,sequence_length:8},{sequence_length:16}",
        ),
        ([(8, 14), (16, None)], (1, 0), [(8, 10), (16, None)], "{tokens:112,sequence_length:8},{sequence_length:16}"),
        # The present stage is as it was: it goes on, and is not trained once more.
        (
            [(8, 14), (16, 10), (5, None)],
            (1, 2),
            [(8, 10), (16, 10), (5, None)],
            "{tokens:112,sequence_length:8},{tokens:160,sequence_length:16},{sequence_length:5}",
        ),
        (
            [(8, 14), (16, 10), (5, None)],
            (1, 2),
            [(8, 10), (16, 1), (5, None)],
            "{tokens:112,sequence_length:8},{tokens:32,sequence_length:16},{sequence_length:5}",
        ),
    ],
)
def test_other_stages_are_refused_with_those_that_are_legal(before, at, after, legal):
    cursor = staged(before).cursor(*at)
    with pytest.raises(ValueError, match=re.escape(f"use 'context=[{legal}]'")):
        staged(after).start(cursor)
    entries = [dict(pair.split(":") for pair in entry.split(",")) for entry in legal[1:-1].split("},{")]
    advised = []
    for entry in entries:
        length, tokens, rope = int(entry["sequence_length"]), entry.get("tokens"), entry.get("rope_theta")
        advised.append((length, tokens and int(tokens) // length, f"rope_theta={rope}" if rope else ""))
    stream = staged(advised)
    stage, sample = stream.start(cursor)
    assert stream.cursor(stage, sample)["tokens"] == cursor["tokens"]


def test_stages_that_were_others_are_told_as_they_are_given():
    cursor = staged([(8, 14, "rope_theta=500"), (16, None)]).cursor(1, 2)
    then = "[{tokens:112,sequence_length:8,rope_theta:500},{tokens:32,sequence_length:16}]"
    with pytest.raises(
        ValueError, match=re.escape(f"context is not what the checkpoint's 144 tokens were trained with ({then}")
    ):
        staged([(8, 14), (16, None)]).start(cursor)
    with pytest.raises(ValueError, match=r"data\.sequence_length=8 is not what the checkpoint's 144 tokens"):
        staged([(8, None)]).start(cursor)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"seed": 6}, r"train\.seed=6 documents come in another order than .*use train\.seed=5,.*run\.name=NAME"),
        ({"long": "windows", "short": "fit"}, r"data\.long=windows, data\.short=fit .*use data\.long=consecutive data"),
        ({"upweight": [(7, 2)]}, r"data\.upweight=7:2 .*use data\.upweight=null"),
        ({"upweight": [(7, 2), (25, 4)]}, r'data\.upweight="7:2,25:4" documents .*use data\.upweight=null'),
        (
            {"positions": "sequence"},
            "data.positions=sequence tokens have other positions than the checkpoint .*use data.positions=document",
        ),
        (
            {"positions": "sequence", "seed": 6},
            "train.seed=6, data.positions=sequence documents come in another order and tokens have other positions "
            "than the checkpoint .*use train.seed=5 data.positions=document",
        ),
        ({"lengths": [3, 50]}, r"other documents .*books:1 \(corpora/books/train\).*data\.name.*run\.name=NAME"),
    ],
)
def test_a_cursor_of_another_order_is_refused(changed, words):
    """C084: naming what differs, and never a restart from the beginning."""
    cursor = staged([(8, None)]).cursor(0, 3)
    with pytest.raises(ValueError, match=words):
        staged([(8, None)], **changed).start(cursor)


def test_a_cursor_of_another_mixture_is_refused():
    def of(share):
        shares = {"a": share, "b": 1 - share}
        sources = [Source(name, Numbered(LENGTHS, where=name), share) for name, share in shares.items()]
        return TokenStream(sources, [Stage(8, None)], seed=0)

    assert of(Fraction(1, 3)).start(of(Fraction(1, 3)).cursor(0, 4)) == (0, 4)
    with pytest.raises(ValueError, match=r"other documents .* a:1/2 \(a\), b:1/2 \(b\)"):
        of(Fraction(1, 2)).start(of(Fraction(1, 3)).cursor(0, 4))


def test_what_is_to_be_used_is_typed_as_it_is():
    cursor = staged([(8, None)], upweight=[(7, 2), (25, 4)]).cursor(0, 3)
    with pytest.raises(
        ValueError, match=re.escape("""data.upweight=null documents come in another order""")
    ) as refused:
        staged([(8, None)]).start(cursor)
    assert """use 'data.upweight="7:2,25:4"', or""" in str(refused.value)


@pytest.mark.parametrize("position", [{"sequence_length": 8}, {"stage": 0, "sample": 14}])
def test_a_cursor_of_an_earlier_version_is_refused(position):
    with pytest.raises(ValueError, match="earlier version.*run.name=NAME"):
        stream_of(LENGTHS, 8).start({"tokens": 112, "epoch": 2, "fingerprint": "seed=0 stages=8"} | position)


def test_the_fingerprint_is_of_all_that_decides():
    options = [
        {},
        {"seed": 1},
        {"long": "windows"},
        {"short": "fit"},
        {"upweight": [(3, 2)]},
        {"positions": "sequence"},
    ]
    stages = [[(8, None)], [(16, None)], [(8, 2), (16, None)], [(8, None, "rope_theta=1")]]
    prints = {staged(some, **option).fingerprint for some in stages for option in options}
    assert len(prints) == 24
    assert staged([(8, None)]).fingerprint == staged([(8, None)]).fingerprint


@pytest.mark.parametrize("long, short", POLICIES)
def test_resuming_takes_as_long_anywhere(long, short):
    """It must show 2, the counting part: as many tokens are read, as many epochs ordered, wherever a cursor is."""
    lengths = np.random.default_rng(0).integers(1, 4000, 20_000)  # 40M tokens
    seconds = {}
    for position in (10**7, 10**8):
        tokens = Numbered(lengths)
        before = TokenStream([Source("s", tokens, Fraction(1))], [Stage(8192, None)], seed=0, long=long, short=short)
        cursor = before.cursor(0, position // 8192)
        best = []
        for _ in range(3):
            tokens.reads.clear()
            began = time.perf_counter()
            source = Source("s", tokens, Fraction(1))
            after = TokenStream([source], [Stage(8192, None)], seed=0, long=long, short=short)
            stage, sample = after.start(cursor)
            after.stage(stage).labelled(sample, 0, 8192)
            best.append(time.perf_counter() - began)
            assert sum(stop - start for start, stop in tokens.reads) < 8192 + 16 * 2048
        seconds[position] = min(best)
    assert seconds[10**8] < 3 * seconds[10**7] + 0.05  # what grows with the position would be ten times as long


# What is refused.


def test_data_without_documents_is_refused():
    """C067."""
    for opened in (lambda: stream_of([], 8), lambda: finite(Numbered([]), 8)):
        with pytest.raises(ValueError, match="numbered has no documents: prepare data that has some"):
            opened()


def test_a_sequence_longer_than_the_corpus_is_refused():
    with pytest.raises(
        ValueError, match=r"data\.sequence_length=51 is more than the 50 tokens of numbered: use 50 or le"
    ):
        stream_of(LENGTHS, 51)
    stream_of(LENGTHS, 51, upweight=[(25, 2)])
    with pytest.raises(ValueError, match=r"context\.1\.sequence_length=64 is more than the 50 tokens of corpora/books"):
        staged([(8, 2), (64, None)])


def test_the_command_says_how_it_is_used():
    for words in ([], ["explan", "step=1"]):
        done = subprocess.run(
            [sys.executable, "-m", "data.stream", *words], capture_output=True, text=True, cwd=os.getcwd(), timeout=60
        )
        assert done.returncode == 3 and "python -m data.stream explain step=N rank=R" in done.stderr
