"""Bands against the definition, pair by pair."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.mask import Mask, band, is_full, trim, visible_pairs

sizes = st.integers(1, 12)
offsets = st.integers(-15, 15)


def shown(rows, columns, lower, upper):
    i, j = np.ogrid[:rows, :columns]
    return (j >= i + lower) & (j <= i + upper)


@given(
    st.one_of(st.none(), st.integers(1, 30)),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(1, 5),
    sizes,
    sizes,
)
def test_band_is_the_definition(window, query_start, key_start, step, rows, columns):
    queries = query_start + step * np.arange(rows)[:, None]
    keys = key_start + step * np.arange(columns)[None]
    distance = queries - keys
    visible = (distance >= 0) & (distance < (window or 10**9))
    assert np.array_equal(shown(rows, columns, *band(Mask(window), query_start, key_start, step)), visible)


@given(sizes, sizes, offsets, offsets)
def test_trim_keeps_the_visible_and_nothing_else(rows, columns, lower, upper):
    whole = shown(rows, columns, lower, upper)
    cut = trim(rows, columns, lower, upper)
    inside = np.zeros_like(whole)
    part = shown(cut.row_stop - cut.row_start, cut.column_stop - cut.column_start, cut.lower, cut.upper)
    inside[cut.row_start : cut.row_stop, cut.column_start : cut.column_stop] = part
    assert np.array_equal(inside, whole)
    assert part.any(axis=1).all() and part.any(axis=0).all()
    if part.size:
        assert is_full(*part.shape, cut.lower, cut.upper) == part.all()
        assert not part.all() or (cut.lower, cut.upper) == (1 - part.shape[0], part.shape[1] - 1)


@given(sizes, sizes, offsets, offsets)
def test_visible_pairs_counts_them(rows, columns, lower, upper):
    assert visible_pairs(rows, columns, lower, upper) == shown(rows, columns, lower, upper).sum()


def test_functions_work_on_arrays():
    rng = np.random.default_rng(0)
    rows, columns = rng.integers(1, 9, 200), rng.integers(1, 9, 200)
    lower, upper = rng.integers(-10, 10, 200), rng.integers(-10, 10, 200)
    together = trim(rows, columns, lower, upper)
    for n, case in enumerate(zip(rows, columns, lower, upper, strict=True)):
        assert [int(column[n]) for column in together] == [int(value) for value in trim(*case)]
        assert visible_pairs(rows, columns, lower, upper)[n] == visible_pairs(*case)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window=0 .* use at least 1"):
        Mask(0)
