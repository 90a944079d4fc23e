"""Laws of layouts, for any length and number of ranks, and the worked examples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.layout import LAYOUTS, Chunk, chunks, global_index, padded_length, restore

layouts = st.sampled_from(LAYOUTS)


def indices(layout, length, ranks):
    return [global_index(chunks(layout, length, ranks, rank)).tolist() for rank in range(ranks)]


@given(layouts, st.integers(1, 200), st.integers(1, 9), st.integers(1, 4))
def test_padded_length_is_the_smallest_that_fits(layout, length, ranks, multiple):
    def fits(candidate):
        local, rest = divmod(candidate, ranks)
        return not rest and not local % multiple and not (layout == "zigzag" and ranks > 1 and local % 2)

    assert padded_length(layout, length, ranks, multiple) == next(n for n in range(length, 4000) if fits(n))


@given(layouts, st.integers(1, 200), st.integers(1, 9))
def test_every_token_lives_on_exactly_one_rank(layout, length, ranks):
    """Bijection, equal counts, one step for all chunks, only the tail padded (C025)."""
    padded = padded_length(layout, length, ranks)
    held = indices(layout, padded, ranks)
    assert sorted(sum(held, [])) == list(range(padded))
    assert {len(rank) for rank in held} == {padded // ranks}
    assert len({chunk.step for rank in range(ranks) for chunk in chunks(layout, padded, ranks, rank)}) == 1
    assert sum(index < length for rank in held for index in rank) == length


@given(layouts, st.integers(1, 100), st.integers(1, 9), st.integers(0, 1))
def test_restore_undoes_the_split(layout, length, ranks, dim):
    padded = padded_length(layout, length, ranks)
    tokens = np.random.default_rng(length).integers(0, 1000, (padded, 3) if dim == 0 else (3, padded))
    parts = [np.take(tokens, index, dim) for index in indices(layout, padded, ranks)]
    assert np.array_equal(restore(parts, layout, dim=dim), tokens)
    assert np.array_equal(restore(parts, layout, length, dim), np.take(tokens, range(length), dim))


@given(layouts, st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 9))
def test_no_target_is_lost(layout, documents, ranks):
    """Labels shifted before the split survive it: S - documents of them, the same multiset (C022)."""
    length = sum(documents)
    padded = padded_length(layout, length, ranks)
    labels = np.full(padded, -100)
    labels[:length] = np.arange(1, length + 1)
    labels[np.cumsum(documents) - 1] = -100
    split = [labels[index] for index in indices(layout, padded, ranks)]
    assert sorted(np.concatenate(split).tolist()) == sorted(labels.tolist())
    assert sum((part != -100).sum() for part in split) == length - len(documents)


def test_worked_examples():
    """C021, and the padded lengths of C025."""
    assert indices("zigzag", 8, 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert indices("zigzag", 12, 3) == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert indices("striped", 12, 3) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert indices("contiguous", 8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [padded_length(layout, 7, 2) for layout in LAYOUTS] == [8, 8, 8]
    assert [padded_length(layout, 2999, 4) for layout in LAYOUTS] == [3000, 3000, 3000]
    assert chunks("zigzag", 13, 1, 0) == (Chunk(0, 13, 1),)  # one rank: nothing to balance, nothing to pad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chunks("spiral", 8, 2, 0), "layout=spiral is unknown: use one of contiguous"),
        (lambda: chunks("zigzag", 10, 2, 0), "length 10 .* use 12"),
        (lambda: chunks("striped", 8, 2, 2), "rank=2 .* use 0 to 1"),
        (lambda: padded_length("striped", 0, 2), "sequence_length=0"),
        (lambda: padded_length("striped", 8, 0), "ranks=0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
