"""The audit: whatever corpora, policies and stages, and wherever a run is interrupted and goes on on other ranks, its
global batches are those of one rank that is never interrupted, and each token comes once an epoch.
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.loader import Loader
from data.stream import IGNORE, Source, Stage, TokenStream
from tests.sources import Numbered
from tests.takes import contiguous, striped, zigzag

FIRST = [1_000_000, 2_000_000, 3_000_000]  # the number that is a source's first token; 0 is padding
PER_STEP = 4  # sequences
LENGTHS = [8, 16, 24]  # of sequences: 4 ranks have 2 chunks of each, or a stripe


@dataclass(frozen=True)
class Ranks:
    """How a part of the run is laid out."""

    data: int
    micro_batch_size: int
    sequence: int
    tensor: int
    layout: object
    balanced: bool

    @property
    def accumulation(self):
        return PER_STEP // self.data // self.micro_batch_size


ONE_RANK = Ranks(1, 1, 1, 1, contiguous, False)


def steps_of(sequences, first, num_steps, ranks):
    """Of each step the global batch: one (tokens, labels, positions) for each of its sequences, put together from what
    all ranks hold.
    """
    length, per_data_rank = sequences.sequence_length, []
    for data_rank in range(ranks.data):
        whole = [[] for _ in range(num_steps)]
        for rank in range(ranks.sequence):
            held = ranks.layout(length, ranks.sequence, rank)
            index = np.concatenate([np.arange(p.start, p.start + p.count * p.step, p.step) for p in held])
            copies = []
            for _ in range(ranks.tensor):
                with Loader(
                    sequences,
                    lambda documents, held=held: ([held] * len(documents), {}),
                    micro_batch_size=ranks.micro_batch_size,
                    accumulation=ranks.accumulation,
                    data_rank=data_rank,
                    data_size=ranks.data,
                    first_sequence=first,
                    num_steps=num_steps,
                    cost=(lambda documents: float(sum(n * n for n in documents))) if ranks.balanced else None,
                ) as loader:
                    copies.append(list(loader))
            for copy in copies[1:]:  # ranks of the tensor axis hold the same
                assert all(
                    (a.tokens == b.tokens).all()
                    for x, y in zip(copy, copies[0], strict=True)
                    for a, b in zip(x, y, strict=True)
                )
            for step, batches in enumerate(copies[0]):
                rows = [row for batch in batches for row in batch_rows(batch)]
                if not whole[step]:
                    whole[step] = [np.full((3, length), -7) for _ in rows]
                for into, row in zip(whole[step], rows, strict=True):
                    into[:, index] = row
        per_data_rank.append(whole)
    return [[sequence for whole in per_data_rank for sequence in whole[step]] for step in range(num_steps)]


def batch_rows(batch):
    return [
        np.stack(row) for row in zip(batch.tokens.numpy(), batch.labels.numpy(), batch.positions.numpy(), strict=True)
    ]


def as_set(batch):
    return Counter(sequence.tobytes() for sequence in batch)


@st.composite
def layouts(draw):
    data = draw(st.sampled_from([1, 2, 4]))
    micro = draw(st.sampled_from([size for size in (1, 2, 4) if size * data <= PER_STEP]))
    layout = draw(st.sampled_from([contiguous, zigzag, striped]))
    return Ranks(
        data, micro, draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), layout, draw(st.booleans())
    )


@st.composite
def runs(draw):
    """Sources by share and lengths, stages in steps, policies, and where the run is interrupted."""
    num_sources = draw(st.integers(1, 3))
    weights = [draw(st.integers(1, 5)) for _ in range(num_sources)]
    lengths = [
        draw(st.lists(st.integers(1, 60), min_size=1, max_size=12).map(lambda some: [*some, 24])) for _ in weights
    ]
    stages = [(draw(st.sampled_from(LENGTHS)), draw(st.integers(1, 6))) for _ in range(draw(st.integers(1, 3)))]
    policies = {
        "seed": draw(st.integers(0, 2**40)),
        "long": draw(st.sampled_from(["consecutive", "windows"])),
        "short": draw(st.sampled_from(["pack", "fit"])),
        "upweight": draw(st.sampled_from([[], [(20, 2)], [(5, 2), (30, 3)]])),
        "positions": draw(st.sampled_from(["document", "sequence"])),
    }
    parts = draw(st.lists(st.tuples(st.integers(1, 6), layouts()), min_size=1, max_size=5))
    return weights, lengths, stages, policies, parts


def open_stream(weights, lengths, stages, policies):
    sources = [
        Source(f"source {s}", Numbered(some, first=FIRST[s], where=f"source {s}"), Fraction(w, sum(weights)))
        for s, (w, some) in enumerate(zip(weights, lengths, strict=True))
    ]
    return TokenStream(sources, [Stage(length, steps * PER_STEP) for length, steps in stages], **policies)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runs())
def test_global_batches_are_those_of_one_rank(run):
    """It must show 1; C057, C084, C085, C087."""
    weights, lengths, stages, policies, parts = run
    alone = open_stream(weights, lengths, stages, policies)
    expected = []
    for number, (_, steps) in enumerate(stages):
        expected += steps_of(alone.stage(number), 0, steps, ONE_RANK)
    check_labels(expected, lengths)
    check_epochs(alone, stages, lengths, policies["upweight"])

    seen, cursor = [], alone.cursor(0, 0)
    parts = [*parts, (len(expected), ONE_RANK)]  # to the end
    for steps, ranks in parts:
        stream = open_stream(weights, lengths, stages, policies)  # another process: nothing but the cursor is left
        stage, sample = stream.start(cursor)
        while steps and len(seen) < len(expected):
            count = min(steps, stages[stage][1] - sample // PER_STEP)
            seen += steps_of(stream.stage(stage), sample, count, ranks)
            steps, sample = steps - count, sample + count * PER_STEP
            if sample == stages[stage][1] * PER_STEP and stage + 1 < len(stages):
                stage, sample = stage + 1, 0
        cursor = stream.cursor(stage, sample)
        assert cursor["tokens"] == sum(len(sequence[0]) for batch in seen for sequence in batch)
    assert [as_set(batch) for batch in seen] == [as_set(batch) for batch in expected]


@pytest.mark.parametrize("long, short", [("consecutive", "pack"), ("windows", "fit")])
@pytest.mark.parametrize("lengths", [[1] * 1_000_000, [1_000_000_000] * 3], ids=["tiny", "huge"])
def test_many_documents_and_huge_ones(lengths, long, short):
    """I09: 10⁶ documents of one token, 3 of 10⁹: two stages, on other ranks each time, as on one rank."""
    stages, policies = [(4096, 2), (16384, 3)], {"seed": 1, "long": long, "short": short}
    alone = open_stream([1], [lengths], stages, policies)
    expected = [as_set(b) for n, (_, steps) in enumerate(stages) for b in steps_of(alone.stage(n), 0, steps, ONE_RANK)]
    seen, cursor = [], alone.cursor(0, 0)
    for ranks in (
        Ranks(4, 1, 1, 1, contiguous, False),
        Ranks(1, 2, 4, 1, zigzag, True),
        Ranks(2, 2, 2, 1, striped, False),
        Ranks(2, 1, 4, 1, contiguous, True),
        ONE_RANK,
    ):
        stream = open_stream([1], [lengths], stages, policies)
        stage, sample = stream.start(cursor)
        seen += map(as_set, steps_of(stream.stage(stage), sample, 1, ranks))
        cursor = stream.cursor(stage, sample + PER_STEP)
    assert seen == expected


def check_labels(batches, lengths):
    """A label is the next token, but for the last ones of documents and for padding."""
    last = {FIRST[s] + end - 1 for s, some in enumerate(lengths) for end in np.cumsum(some).tolist()}
    for batch in batches:
        for tokens, labels, _ in batch:
            assert (labels[tokens == 0] == IGNORE).all()
            for token, label in zip(tokens[tokens > 0].tolist(), labels[tokens > 0].tolist(), strict=True):
                assert label == (IGNORE if token in last else token + 1)


def check_epochs(stream, stages, lengths, upweight):
    """What is served of each source, in order, is one whole epoch after the other."""
    served = {f"source {s}": [] for s in range(len(lengths))}
    for number, (length, steps) in enumerate(stages):
        sequences = stream.stage(number)
        for n in range(steps * PER_STEP):
            (name,) = {stretch.source for stretch in sequences.stretches(n)}
            served[name] += sequences.read(n, 0, length).tolist()
    for s, some in enumerate(lengths):
        tokens, epoch = served[f"source {s}"], Counter()
        for start, size in zip(np.cumsum([0, *some]).tolist(), some, strict=False):
            times = max((often for least, often in upweight if size >= least), default=1)
            epoch.update({FIRST[s] + token: times for token in range(start, start + size)})
        whole = len(tokens) // epoch.total()
        for number in range(whole):
            assert Counter(tokens[number * epoch.total() : (number + 1) * epoch.total()]) == epoch
        assert not Counter(tokens[whole * epoch.total() :]) - epoch
