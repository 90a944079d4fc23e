"""Tiles on a kernel for sequences of varying length: many tiles, few launches.

Such a kernel ("varlen": flash-attn 2 and 3, and the flash kernel inside PyTorch on CUDA) takes rows laid end
to end and the borders of its sequences. One launch treats all its sequences alike: every row sees all keys of
its sequence, or a causal triangle aligned to the *bottom right* corner, there perhaps no more than `left` keys
before the diagonal. So a tile's band is cut, by rows, into pieces of these three kinds; the far edge of a
window is a causal triangle once its rows and keys are read backwards.

In one launch no query row occurs twice (`launches`). Pieces without a mask that share query rows become one
sequence, whose keys are those of all of them; causal pieces that share rows go into different launches. So a
hop is at most two launches, and more only where causal pieces share rows, under a window, or where a kernel's
limits are met.

All of this is int64 arithmetic on the host, done once for a tile table and a device.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model.kernels.launches import Rows, counted, numbers, on, turns

REMEMBERED_BYTES = 256 << 20  # of the numbers on the device, for all hops of the plans in use
KEY_ROWS = 1 << 16  # keys of a launch after those of its first sequence: bounds the copies, and the gradients
MAX_SEQUENCES = (1 << 16) - 1  # of a launch: they are the second dim of a CUDA grid
SKEW = 64  # a launch is split by length where its longest sequence, times their number, is so many times their sum
BLOCK = 128  # rows that a kernel computes together: shorter sequences cost as much

CAUSAL, LEFT, STEP, ROW, ROWS, KEY, KEYS = range(7)  # columns of a piece; row and key are its first, in order of STEP

# Query rows, and key rows, as (first, number, step), int64[n, 3]; and the sequence that each of the latter belongs to.
Sequences = tuple[np.ndarray, np.ndarray, np.ndarray]


class Launch(NamedTuple):
    """One call of the kernel. Row i of a sequence of n rows and m keys sees keys up to i + m - n where `causal`,
    and from that number minus `left` on where left >= 0.
    """

    rows: Rows
    keys: Rows
    row_starts: Tensor  # int32[sequences + 1], on the device
    key_starts: Tensor
    max_rows: int
    max_keys: int
    causal: bool
    left: int


_remembered: "OrderedDict[tuple[bytes, torch.device], tuple[Launch, ...]]" = OrderedDict()


def group(tiles: Tensor, device: torch.device) -> tuple[Launch, ...]:
    """The launches of one hop's tiles, int64[n, 8] on the host, with their numbers on `device`.

    Remembered by the content of the table: the layers of a model ask for the same ones, forward and backward. What was
    asked for longest ago is forgotten once all of them take more than REMEMBERED_BYTES.
    """
    key = (tiles.numpy().tobytes(), device)
    made = _remembered.pop(key, None)
    if made is None:
        made = _group(tiles.numpy(), device)
    _remembered[key] = made
    while len(_remembered) > 1 and sum(map(_num_bytes, _remembered.values())) > REMEMBERED_BYTES:
        _remembered.popitem(last=False)
    return made


def _num_bytes(made: tuple[Launch, ...]) -> int:
    tensors = [x for launch in made for x in launch if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors)


def _group(tiles: np.ndarray, device: torch.device) -> tuple[Launch, ...]:
    pieces = cut(tiles)
    made = []
    for causal, left in np.unique(pieces[:, [CAUSAL, LEFT]], axis=0).tolist():
        alike = pieces[(pieces[:, CAUSAL] == causal) & (pieces[:, LEFT] == left)]
        sequences = _once_each(alike) if causal else _joined(alike)
        made += [_launch(rows, keys, of, bool(causal), left, device) for rows, keys, of in sequences]
    return tuple(made)


def cut(tiles: np.ndarray) -> np.ndarray:
    """Pieces of trimmed tiles, int64[n, 7] with the columns CAUSAL … KEYS; together they show the same pairs.

    Rows from `right_open` on see the last key of their tile, rows from `left_cut` on begin at a key of their own.
    Only rows are cut, so that the pieces of one tile share none.
    """
    _, q_start, q_stop, k_start, k_stop, lower, upper, _ = tiles.T
    rows, keys = q_stop - q_start, k_stop - k_start
    right_open = np.where(upper >= keys - 1, 0, np.minimum(rows, keys - upper))
    left_cut = np.where(lower <= 1 - rows, rows, np.maximum(0, -lower))
    last = np.maximum(right_open, left_cut)  # rows from here on are the far edge of a window
    zero, one = np.zeros_like(rows), np.ones_like(rows)
    edge = last + lower  # their first key
    parts = (
        (
            one,
            np.where(left_cut < right_open, upper - lower, -1),
            one,
            q_start,
            right_open,
            k_start,
            right_open + upper,
        ),
        (zero, -one, one, q_start + right_open, left_cut - right_open, k_start, keys),
        (one, -one, -one, q_stop - 1, rows - last, k_stop - 1, keys - edge),
    )
    pieces = np.concatenate([np.stack(part, axis=1) for part in parts])
    return pieces[pieces[:, ROWS] > 0]


def _joined(pieces: np.ndarray) -> Iterator[Sequences]:
    """Pieces without a mask, cut wherever one of them begins or ends: each run of rows, with all keys it sees."""
    start, stop = pieces[:, ROW], pieces[:, ROW] + pieces[:, ROWS]
    borders = np.unique(np.concatenate((start, stop)))
    first = np.searchsorted(borders, start)
    runs = np.searchsorted(borders, stop) - first
    piece = np.repeat(np.arange(len(pieces)), runs)
    run = counted(first, runs)
    order = np.lexsort((pieces[piece, KEY], run))
    kept, of = np.unique(run[order], return_inverse=True)
    rows = np.stack((borders[kept], borders[kept + 1] - borders[kept], np.ones_like(kept)), axis=1)
    yield from _within_limits(rows, pieces[piece[order]][:, [KEY, KEYS, STEP]], of)


def _once_each(pieces: np.ndarray) -> Iterator[Sequences]:
    """Each piece is a sequence; those that share query rows are kept apart."""
    low = np.where(pieces[:, STEP] > 0, pieces[:, ROW], pieces[:, ROW] - pieces[:, ROWS] + 1)
    order = np.lexsort((pieces[:, KEY], low))
    pieces, low = pieces[order], low[order]
    turn = turns(low, low + pieces[:, ROWS])
    for number in range(turn.max() + 1):
        chosen = pieces[turn == number]
        yield from _within_limits(chosen[:, [ROW, ROWS, STEP]], chosen[:, [KEY, KEYS, STEP]], np.arange(len(chosen)))


def _within_limits(rows: np.ndarray, keys: np.ndarray, of: np.ndarray) -> Iterator[Sequences]:
    """The sequences in one part, or in several where one would be too much for the kernel or for memory."""
    total = np.bincount(of, keys[:, 1], len(rows)).astype(np.int64)
    count = np.maximum(rows[:, 1], total)
    size = np.zeros_like(count)
    if len(count) * count.max() > SKEW * np.maximum(count, BLOCK).sum():
        size = np.log2(np.maximum(count, BLOCK)).astype(np.int64) // 2
    for chosen in (np.flatnonzero(size == each) for each in np.unique(size)):
        volume = (np.cumsum(total[chosen]) - 1) // KEY_ROWS
        crowd = np.arange(len(chosen)) // MAX_SEQUENCES
        borders = np.flatnonzero(np.diff(volume) | np.diff(crowd)) + 1
        for part in np.split(chosen, borders):
            number = np.full(len(rows), -1)
            number[part] = np.arange(len(part))
            mine = number[of] >= 0
            yield rows[part], keys[mine], number[of[mine]]


def _launch(
    rows: np.ndarray, keys: np.ndarray, of: np.ndarray, causal: bool, left: int, device: torch.device
) -> Launch:
    """Sequences laid end to end.

    max_rows is at least 2: at 1, and with grouped heads, flash-attn reshapes its lse in a way that fails.
    """
    key_counts = np.bincount(of, keys[:, 1], len(rows)).astype(np.int64)
    return Launch(
        rows=numbers(rows, device),
        keys=numbers(keys, device),
        row_starts=on(np.concatenate(([0], np.cumsum(rows[:, 1]))).astype(np.int32), device),
        key_starts=on(np.concatenate(([0], np.cumsum(key_counts))).astype(np.int32), device),
        max_rows=max(2, int(rows[:, 1].max())),
        max_keys=int(key_counts.max()),
        causal=causal,
        left=left,
    )
