"""The loop that kernels share: tiles become launches, one call of an underlying kernel each.

A launch names the query rows and the key rows that it takes. In one launch no query row occurs twice, so that
what it gives is merged into the running state as a whole; key rows may, and their gradients are summed.
"""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from model.kernels.merge import merge

Rows = slice | Tensor  # where they lie together, else their numbers, int64 on the device


class Launch(Protocol):
    rows: Rows
    keys: Rows


def forward(
    call: Callable[[Tensor, Tensor, Tensor, Launch], tuple[Tensor, Tensor]],
    launches: Iterable[Launch],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Merge all launches into state = (out [N, H, D], lse [H, N]) in place, and return it.

    `call(q [n, H, D], k [m, G, D], v [m, G, D], launch)` gives (out [n, H, D], lse [H, n]) in any dtype.
    """
    for launch in launches:
        _merge(*call(_take(q, launch.rows), _take(k, launch.keys), _take(v, launch.keys), launch), launch.rows, state)
    return state


def _merge(block_out: Tensor, block_lse: Tensor, rows: Rows, state: tuple[Tensor, Tensor]) -> None:
    """A function of its own: what a launch gave is gone before the next one."""
    out, lse = state
    block_out, block_lse = block_out.to(out.dtype), block_lse.to(lse.dtype)
    if isinstance(rows, slice):
        merge(out[rows], lse[:, rows], block_out, block_lse)
        return
    before = out.index_select(0, rows), lse.index_select(1, rows)
    merge(*before, block_out, block_lse)
    out.index_copy_(0, rows, before[0])
    lse.index_copy_(1, rows, before[1])


def backward(
    call: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Launch], tuple[Tensor, Tensor, Tensor]],
    launches: Iterable[Launch],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Add all launches to gradients = (dq [N, H, D], dk, dv [M, G, D]) in place, and return them.

    `call(dout, q, out [n, H, D], k, v [m, G, D], lse [H, n], launch)` gives (dq, dk, dv) of its launch, in any
    dtype; they are summed in the dtype of `gradients`.
    """
    for launch in launches:
        at_rows = (_take(x, launch.rows) for x in (dout, q, out))
        at_keys = (_take(x, launch.keys) for x in (k, v))
        parts = call(*at_rows, *at_keys, _take(lse, launch.rows, dim=1), launch)
        for total, rows, part in zip(gradients, (launch.rows, launch.keys, launch.keys), parts, strict=True):
            _add(total, rows, part)
        del parts, part  # before the next launch makes its own
    return gradients


def _take(x: Tensor, rows: Rows, dim: int = 0) -> Tensor:
    if isinstance(rows, Tensor):
        return x.index_select(dim, rows)
    return x[rows] if dim == 0 else x[:, rows]


def _add(total: Tensor, rows: Rows, part: Tensor) -> None:
    """A row that is named several times receives all its parts."""
    if isinstance(rows, Tensor):
        total.index_add_(0, rows, part.to(total.dtype))
    else:
        total[rows].add_(part)  # `total[rows] += part` would copy the rows onto themselves as well


def numbers(ranges: np.ndarray, device: torch.device) -> Rows:
    """The rows of ranges (first, number, step), int64[n, 3], one range after another."""
    first, number, step = ranges.T
    if (step == 1).all() and (first[1:] == first[:-1] + number[:-1]).all():
        return slice(int(first[0]), int(first[-1] + number[-1]))
    return on(counted(first, number, step), device)


def counted(first: np.ndarray, number: np.ndarray, step: np.ndarray | int = 1) -> np.ndarray:
    """first, first + step, … (`number` of them), one range after another."""
    begin = np.cumsum(number) - number
    step = np.repeat(np.broadcast_to(step, first.shape), number)
    return np.repeat(first, number) + step * (np.arange(number.sum()) - np.repeat(begin, number))


def on(array: np.ndarray, device: torch.device) -> Tensor:
    """To the device without waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def turns(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Numbers 0, 1, … for ranges sorted by start: those of one number are disjoint. As few as possible."""
    turn = np.zeros(len(start), np.int64)
    if (start[1:] >= stop[:-1]).all():
        return turn
    free: list[tuple[int, int]] = []  # (where a number's last range ends, the number)
    for index, (begin, end) in enumerate(zip(start.tolist(), stop.tolist(), strict=True)):
        number = heappop(free)[1] if free and free[0][0] <= begin else len(free)
        turn[index] = number
        heappush(free, (end, number))
    return turn
