"""What kernels share: the dtype they accumulate in, the state they add to, a plan's rows as numbers."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Tile(NamedTuple):
    """One row of a plan: which query rows meet which key rows, and their band (`model.mask`)."""

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
    """The tiles of a plan's rows, int64[num_tiles, 8] with the columns HOP … UPPER of `model.mask`.

    They are converted together: each is microseconds of work.
    """
    for _, q_start, q_stop, k_start, k_stop, lower, upper, _ in tiles.tolist():
        rows, columns = slice(q_start, q_stop), slice(k_start, k_stop)
        yield Tile(rows, columns, q_stop - q_start, k_stop - k_start, lower, upper)


def empty_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries [N, H, D] that have seen no key yet: zeros [N, H, D] and -inf [H, N]."""
    dtype = accumulation_dtype(q.dtype)
    rows, heads, _ = q.shape
    return q.new_zeros(q.shape, dtype=dtype), q.new_full((heads, rows), -torch.inf, dtype=dtype)


def empty_gradients(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeroed (dq [N, H, D], dk, dv [M, G, D]) of q [N, H, D] and k [M, G, D], in the accumulation dtype."""
    dtype = accumulation_dtype(q.dtype)
    return (
        q.new_zeros(q.shape, dtype=dtype),
        k.new_zeros(k.shape, dtype=dtype),
        k.new_zeros(k.shape, dtype=dtype),
    )
