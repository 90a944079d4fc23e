"""Whose turn it is: shares are kept exactly, over any stretch of sequences."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.mixture import MOST_TURNS, Turns, by_fill, check_shares, rounded
from data.stream import Source, Stage, TokenStream
from tests.sources import Numbered


def fractions(*parts):
    return [Fraction(part) for part in parts]


weights = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(weights)
def test_every_prefix_has_its_shares(parts):
    """Less than 1 - 1 / (2k - 2) of a sequence away, for every prefix, as Tijdeman proved; hence any window."""
    shares = [Fraction(part, sum(parts)) for part in parts]
    turns, k = Turns(shares), len(parts)
    bound = 1 - Fraction(1, max(2 * k - 2, 1))
    given_out = [0] * k
    apart = [[Fraction(0)] * k]
    for n in range(2 * sum(parts) + 3):
        assert turns.counts(n) == given_out
        source, index = turns.turn(n)
        assert index == given_out[source]
        given_out[source] += 1
        apart.append([count - (n + 1) * share for count, share in zip(given_out, shares, strict=True)])
        assert max(map(abs, apart[-1])) <= bound
    spread = max(max(column) - min(column) for column in zip(*apart, strict=True))
    assert spread <= (1 if k == 2 else 2 * bound)


def test_turns_are_found_at_once_anywhere():
    turns = Turns(fractions("2/3", "1/3"))
    far = 3 * 10**15
    assert turns.counts(far) == [2 * 10**15, 10**15]
    assert sorted(turns.turn(far + i) for i in range(3)) == [(0, 2 * 10**15), (0, 2 * 10**15 + 1), (1, 10**15)]


def test_shares_with_no_small_denominator_are_refused():
    check_shares(fractions(f"1/{MOST_TURNS}", f"{MOST_TURNS - 1}/{MOST_TURNS}"))
    with pytest.raises(
        ValueError, match=r"denominator 1048577, the most is 1048576: use for example 1/10000, 9999/10000"
    ):
        check_shares([Fraction(1, MOST_TURNS + 1), Fraction(MOST_TURNS, MOST_TURNS + 1)])


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=8))
def test_rounded_shares(parts):
    shares = [Fraction(part, sum(parts)) for part in parts]
    near = rounded(shares, 65536)
    assert sum(near) == 1 and min(near) > 0
    assert all(abs(a - b) < Fraction(len(parts), 65536) for a, b in zip(near, shares, strict=True))


def test_padding_is_made_up_for():
    """Half-filled sequences come twice as often: the tokens have their shares."""
    assert by_fill(fractions("1/2", "1/2"), fractions("1", "1/2")) == fractions("21845/65536", "43691/65536")
    assert by_fill(fractions("1/3", "2/3"), fractions("3/4", "3/4")) == fractions("1/3", "2/3")


@pytest.mark.parametrize("long, short", list(itertools.product(["consecutive", "windows"], ["pack", "fit"])))
def test_tokens_of_a_stream_have_their_shares(long, short):
    """Documents of 60 fill sequences of 100 by 60 %, those of 50 whole; served tokens are as 3:1 all the same."""
    sizes = {"a": [60] * 40, "b": [50] * 30}
    sources = [
        Source(name, Numbered(lengths, where=name), share)
        for (name, lengths), share in zip(sizes.items(), fractions("3/4", "1/4"), strict=True)
    ]
    sequences = TokenStream(sources, [Stage(100, None)], seed=0, long=long, short=short).stage(0)
    tokens = {"a": 0, "b": 0}
    for n in range(4000):
        for stretch in sequences.stretches(n):
            tokens[stretch.source] += stretch.length
    if short == "fit":
        assert sum(tokens.values()) < 0.7 * 4000 * 100
    assert abs(tokens["a"] / sum(tokens.values()) - 0.75) < 0.0005


def test_each_source_has_its_own_epochs():
    """Three sources of other sizes, by shares: what is served of each, epoch by epoch, is all of it."""
    lengths = {"a": [5, 9, 4, 22], "b": [3], "c": list(range(1, 9))}
    sources = [
        Source(name, Numbered(sizes, where=name), share)
        for (name, sizes), share in zip(lengths.items(), fractions("1/2", "1/6", "1/3"), strict=True)
    ]
    sequences = TokenStream(sources, [Stage(3, None)], seed=1).stage(0)
    served = {name: [] for name in lengths}
    for n in range(240):
        (name,) = {stretch.source for stretch in sequences.stretches(n)}
        served[name] += sequences.read(n, 0, 3).tolist()
    assert {name: len(tokens) for name, tokens in served.items()} == {"a": 360, "b": 120, "c": 240}
    for name, tokens in served.items():
        size = sum(lengths[name])
        for epoch in range(len(tokens) // size):
            assert sorted(tokens[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_counts_are_numpy_free_numbers():
    """They go into a cursor, as JSON."""
    turns = Turns(fractions("1/2", "1/2"))
    assert {type(count) for count in turns.counts(7)} == {int} and not isinstance(turns.turn(5)[1], np.integer)
