"""Dealing the sequences of a step: all of them, each once, and no rank waits longer than it must."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.compose import compose
from data.balance import deal, sequences_of_step
from training.estimate import flops_per_sequence

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))


def lockstep(costs, dealt):
    """What a step lasts where ranks wait for each other in each micro-batch, by plain sums."""
    return sum(max(sum(costs[i] for i in share) for share in micro) for micro in dealt.tolist())


def totals(costs, dealt):
    return [sum(costs[i] for i in dealt[:, rank].ravel().tolist()) for rank in range(dealt.shape[1])]


@st.composite
def steps(draw):
    sizes = draw(SIZES)
    number = math.prod(sizes)
    return sizes, draw(st.lists(st.integers(0, 50), min_size=number, max_size=number))


@settings(max_examples=200, deadline=None)
@given(steps())
def test_every_sequence_is_dealt_once(step):
    sizes, costs = step
    dealt = deal(costs, *sizes)
    assert dealt.shape == sizes and dealt.dtype == np.int64
    assert sorted(dealt.ravel().tolist()) == list(range(len(costs)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=6, max_size=6), st.sampled_from([(3, 2, 1), (2, 3, 1), (6, 1, 1)]))
def test_one_sequence_a_rank_waits_as_little_as_can_be(costs, sizes):
    """Against every way to group six sequences."""
    best = min(
        lockstep(costs, np.array(order).reshape(sizes)) for order in itertools.permutations(range(6)) if order[0] == 0
    )
    assert lockstep(costs, deal(costs, *sizes)) == best


@settings(max_examples=200, deadline=None)
@given(steps())
def test_totals_differ_by_no_more_than_one_micro_batch_does(step):
    """What is dealt to who has least: ranks' totals lie no further apart than the shares of one micro-batch."""
    sizes, costs = step
    dealt = deal(costs, *sizes)
    apart = max(
        max(loads) - min(loads) for loads in ([sum(costs[i] for i in share) for share in m] for m in dealt.tolist())
    )
    assert max(totals(costs, dealt)) - min(totals(costs, dealt)) <= apart


@settings(max_examples=200, deadline=None)
@given(steps())
def test_micro_batches_hold_like_costs_heaviest_first(step):
    sizes, costs = step
    held = [sorted(costs[i] for i in micro.ravel().tolist()) for micro in deal(costs, *sizes)]
    for heavier, lighter in itertools.pairwise(held):
        assert heavier[0] >= lighter[-1]


def test_shares_of_several_sequences_even_out():
    """Two ranks, two slots: 8 goes with 1, 5 with 3; by number rank 0 would hold 8 + 5."""
    assert deal([8, 5, 3, 1], 1, 2, 2).tolist() == [[[0, 3], [1, 2]]]


def test_equal_costs_keep_their_numbers():
    """One long document everywhere: nothing to gain, nothing moved."""
    assert deal([7.0] * 12, 3, 4, 1).ravel().tolist() == list(range(12))


def test_the_same_costs_are_dealt_the_same_way():
    """Ties do not depend on anything but the number."""
    costs = [random.Random(1).choice([1.5, 2.5]) for _ in range(64)]
    assert np.array_equal(deal(costs, 4, 8, 2), deal(np.array(costs), 4, 8, 2))
    assert deal([1, 1, 2, 2], 2, 2, 1).tolist() == [[[2], [3]], [[0], [1]]]


def test_sequences_of_a_step_are_looked_up_once():
    asked = []

    def documents(n):
        asked.append(n)
        return (n % 5 + 1,)

    sizes = {"accumulation": 2, "data_size": 3, "micro_batch_size": 2}
    dealt = sequences_of_step(documents, 100, lambda lengths: float(sum(lengths)), **sizes)
    assert asked == list(range(100, 112)) and sorted(dealt.ravel().tolist()) == asked
    assert sequences_of_step(documents, 100, None, **sizes).ravel().tolist() == list(range(100, 112))
    assert len(asked) == 12


@pytest.mark.parametrize("seed", range(3))
def test_packed_documents_at_128k_cost_little_more_than_ideal(seed):
    """It must show 6, one step: 8 data ranks, 4 micro-batches, documents of very different lengths, an 8b model."""
    model, length = compose(["model=8b"]).model, 1 << 17
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(32):
        lengths = []
        while sum(lengths) < length:
            long = rng.random() < 0.05
            drawn = int(np.exp(rng.uniform(np.log(1 << 16), np.log(1 << 18))) if long else rng.lognormal(8.3, 1.2))
            lengths.append(max(1, min(drawn, length - sum(lengths))))
        sequences.append(tuple(lengths))
    costs = [flops_per_sequence(model, documents, length)[0] for documents in sequences]
    undealt, dealt = np.arange(32).reshape(4, 8, 1), deal(costs, 4, 8, 1)
    ideal = sum(costs) / 8
    assert max(totals(costs, dealt)) <= 1.15 * ideal and lockstep(costs, dealt) <= 1.2 * ideal
    assert lockstep(costs, undealt) > 1.3 * ideal
