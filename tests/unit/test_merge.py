"""Merging two sets of keys: safe at every extreme."""

import math

import pytest
import torch

from model.kernels.merge import merge

INF = math.inf


def state(out, lse, dtype=torch.float32):
    """(out [1, 1, 2], lse [1, 1]) filled with one value each."""
    return torch.full((1, 1, 2), out, dtype=dtype), torch.full((1, 1), lse, dtype=dtype)


def merged(first, second):
    out, lse = (x.clone() for x in first)
    merge(out, lse, *second)
    return out, lse


@pytest.mark.parametrize("far", [100.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dominant_block_wins_without_overflow(far, dtype):
    """C001: the larger logsumexp, exactly, whichever side it is on."""
    small, large = state(0.0, 0.0, dtype), state(1.0, far, dtype)
    for first, second in ((small, large), (large, small)):
        out, lse = merged(first, second)
        assert lse.item() == far and out.eq(1).all()


def test_empty_is_neutral_bit_for_bit():
    """C002: empty with empty is empty, empty with x is x, in either order."""
    generator = torch.Generator().manual_seed(0)
    empty = torch.zeros(50, 3, 8), torch.full((3, 50), -INF)
    some = torch.randn(50, 3, 8, generator=generator), torch.randn(3, 50, generator=generator) * 100
    for first, second, want in ((empty, empty, empty), (empty, some, some), (some, empty, some)):
        for a, b in zip(merged(first, second), want, strict=True):
            assert torch.equal(a, b)


def test_only_rows_that_saw_something_change():
    out, lse = merged(state(3.0, 2.0), state(0.0, -INF))
    assert out.eq(3).all() and lse.item() == 2.0


def test_nan_of_the_data_is_not_hidden():
    out, lse = merged(state(1.0, 0.0), state(math.nan, math.nan))
    assert out.isnan().all() and lse.isnan().all()


def test_equals_softmax_over_both():
    """Any split of the keys, merged in any order, against softmax in float64."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(4, 30, dtype=torch.float64, generator=generator) * 20
    values = torch.randn(30, 5, dtype=torch.float64, generator=generator)
    out, lse = torch.zeros(4, 1, 5, dtype=torch.float64), torch.full((1, 4), -INF, dtype=torch.float64)
    for part in (slice(20, 30), slice(0, 1), slice(1, 20)):
        block_lse = scores[:, part].logsumexp(-1)
        merge(out, lse, (scores[:, part].softmax(-1) @ values[part])[:, None], block_lse[None])
    torch.testing.assert_close(out[:, 0], scores.softmax(-1) @ values, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse[0], scores.logsumexp(-1), rtol=1e-15, atol=0)
