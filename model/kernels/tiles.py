"""What kernels share: the dtype they accumulate in, the state they add to, a plan's rows as numbers."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Tile(NamedTuple):
    """One row of a plan: which queries of a sequence meet which keys, and their band (`model.mask`)."""

    sequence: int
    rows: slice
    columns: slice
    num_rows: int
    num_columns: int
    lower: int
    upper: int


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def iterate(tiles: Tensor) -> Iterator[Tile]:
    """The tiles of a plan's rows, int64[num_tiles, 8]; converted together: each is microseconds of work."""
    for _, sequence, q_start, q_stop, k_start, k_stop, lower, upper in tiles.tolist():
        rows, columns = slice(q_start, q_stop), slice(k_start, k_stop)
        yield Tile(sequence, rows, columns, q_stop - q_start, k_stop - k_start, lower, upper)


def empty_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries [B, L, H, D] that have seen no key yet: zeros [B, L, H, D] and -inf [B, H, L]."""
    dtype = accumulation_dtype(q.dtype)
    batch, length, heads, _ = q.shape
    return q.new_zeros(q.shape, dtype=dtype), q.new_full((batch, heads, length), -torch.inf, dtype=dtype)


def empty_gradients(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeroed (dq, dk, dv) in the accumulation dtype."""
    dtype = accumulation_dtype(q.dtype)
    return (
        q.new_zeros(q.shape, dtype=dtype),
        k.new_zeros(k.shape, dtype=dtype),
        k.new_zeros(k.shape, dtype=dtype),
    )
