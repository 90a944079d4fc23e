"""Tiles of attention on PyTorch's own flash kernels, called through aten because only there the logsumexp
comes along. On CUDA that is flash 2, driven by `varlen`; the rest of this page is about the CPU.

Nothing aten gets wrong in silence ever reaches it: an empty q or k (a crash on CPU), a row without keys (lse
0 there, NaN in backward), a last stride other than 1, a mask of another dtype than q. So a band is first cut
into pieces that the kernel computes whole, or causally from the top left corner, or, at the far edge of a
window, under a small mask.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model.kernels import launches, varlen
from model.kernels.launches import Rows, numbers, turns
from model.kernels.tiles import accumulation_dtype, empty_gradients, empty_state, iterate
from model.kernels.varlen import Launch
from model.mask import K_START, K_STOP, LOWER, Q_START, Q_STOP, UPPER, is_full, trim

ROW_BLOCK = 256  # rows of a window tile that are cut into pieces together; masks are at most about 3 × ROW_BLOCK wide
MANY = 8  # tiles of a hop from which on small ones are computed together
SMALL = 16  # most rows and columns of a small tile
BATCH = 1024  # most tiles of one call: bounds the copies

CPU = torch.device("cpu")
_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_varlen_cuda = torch.ops.aten._flash_attention_forward.default
_varlen_cuda_backward = torch.ops.aten._flash_attention_backward.default


class Batch(NamedTuple):
    """A launch on CPU: the same piece of `count` tiles, their rows and keys one after another."""

    rows: Rows
    keys: Rows
    count: int
    piece: "Piece"


class Piece(NamedTuple):
    """Part of a tile that one kernel call computes: its corner and size in the tile, and how it is masked.

    `band` is None where every row sees every column, and else (lower, upper); causal means that it is (1 -
    rows, 0).
    """

    row: int
    rows: int
    column: int
    columns: int
    band: tuple[int, int] | None
    causal: bool


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of q [N, H, D] over the keys k, v [M, G, D] that `tiles` (int64[n, 8]) show, G dividing H.

    Returns (out [N, H, D], lse [H, N]), float32 (float64 for float64): 0 and -inf where a row meets no
    key. With `into`, merges into that state in place instead, and returns it. On CPU bfloat16 is computed in
    float32.
    """
    state = empty_state(q) if into is None else into
    if q.is_cuda:
        return launches.forward(_cuda_forward, varlen.group(tiles, q.device), q, k, v, state)
    seen, tiles = _seen(tiles)
    return launches.forward(_cpu_forward, _batches(tiles), *_operands(q, k[seen], v[seen]), state)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tensor,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward` through these tiles, given the *global* out and lse: those over all keys a row
    ever sees.

    dout, q, out [N, H, D], k, v [M, G, D], lse [H, N]. Returns (dq, dk, dv) in the accumulation
    dtype, zero where no tile comes. With `into`, adds to those in place instead, and returns them.
    """
    gradients = empty_gradients(q, k) if into is None else into
    if q.is_cuda:
        given = dout, q, k, v, out.to(q.dtype), lse
        return launches.backward(_cuda_backward, varlen.group(tiles, q.device), *given, gradients)
    seen, tiles = _seen(tiles)
    dq, dk, dv = gradients
    operands = _operands(dout, q, k[seen], v[seen], out)
    launches.backward(_cpu_backward, _batches(tiles), *operands, lse, (dq, dk[seen], dv[seen]))
    return gradients


def _operands(*tensors: Tensor) -> Iterator[Tensor]:
    """What the CPU kernel is given: the accumulation dtype, last stride 1.

    Its backward would accumulate dk, dv in bfloat16 (errors of 1e-2), so it never sees bfloat16.
    """
    for tensor in tensors:
        dtype = accumulation_dtype(tensor.dtype)
        if tensor.dtype != dtype or tensor.stride(-1) != 1:
            tensor = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
        yield tensor


def _seen(tiles: Tensor) -> tuple[slice, Tensor]:
    """The key rows between the first and the last that a tile touches, and the tiles counted from there."""
    if len(tiles) == 0:
        return slice(0, 0), tiles
    first = int(tiles[:, K_START].min())
    moved = tiles.clone()
    moved[:, [K_START, K_STOP]] -= first
    return slice(first, int(tiles[:, K_STOP].max())), moved


def _batches(tiles: Tensor) -> Iterator[Batch]:
    """All pieces of all tiles. Small tiles of one shape are computed together: a call costs more than they do."""
    if len(tiles) < MANY:
        yield from _one_by_one(tiles)
        return
    table = tiles.numpy()
    rows, columns = table[:, Q_STOP] - table[:, Q_START], table[:, K_STOP] - table[:, K_START]
    small = (rows <= SMALL) & (columns <= SMALL)
    yield from _one_by_one(tiles[~small])
    shapes = np.stack((rows, columns, table[:, LOWER], table[:, UPPER]), axis=1)[small]
    kinds, kind = np.unique(shapes, axis=0, return_inverse=True)
    for number, shape in enumerate(kinds.tolist()):
        yield from _alike(table[small][kind == number], shape)


def _one_by_one(tiles: Tensor) -> Iterator[Batch]:
    for tile in iterate(tiles):
        for piece in pieces(tile.num_rows, tile.num_columns, tile.lower, tile.upper):
            row, column = tile.rows.start + piece.row, tile.columns.start + piece.column
            yield Batch(slice(row, row + piece.rows), slice(column, column + piece.columns), 1, piece)


def _alike(table: np.ndarray, shape: list[int]) -> Iterator[Batch]:
    """Tiles of one shape (rows, columns, lower, upper), together as far as they share no query row."""
    table = table[np.argsort(table[:, Q_START], kind="stable")]
    turn = turns(table[:, Q_START], table[:, Q_STOP])
    for number in range(turn.max() + 1):
        chosen = table[turn == number]
        for start in range(0, len(chosen), BATCH):
            part = chosen[start : start + BATCH]
            one = np.ones(len(part), np.int64)
            for piece in pieces(*shape):
                rows = np.stack((part[:, Q_START] + piece.row, one * piece.rows, one), axis=1)
                columns = np.stack((part[:, K_START] + piece.column, one * piece.columns, one), axis=1)
                yield Batch(numbers(rows, CPU), numbers(columns, CPU), len(part), piece)


def pieces(rows: int, columns: int, lower: int, upper: int) -> Iterator[Piece]:
    """Cut a trimmed tile into pieces that the CPU kernel computes directly; together they show exactly its
    visible pairs.

    No piece has a row without a key.
    """
    if is_full(rows, columns, lower, upper):
        yield Piece(0, rows, 0, columns, None, causal=False)
    elif lower <= 1 - rows:
        yield from _causal_pieces(rows, columns, upper)
    else:
        for row in range(0, rows, ROW_BLOCK):
            yield from _window_pieces(row, min(ROW_BLOCK, rows - row), columns, lower + row, upper + row)


def _causal_pieces(rows: int, columns: int, upper: int) -> Iterator[Piece]:
    """Columns that every row sees, then the triangle. A trimmed tile has upper >= 0."""
    if upper > 0:
        yield Piece(0, rows, 0, upper, None, causal=False)
    yield Piece(0, rows, upper, columns - upper, (1 - rows, 0), causal=True)


def _window_pieces(row: int, rows: int, columns: int, lower: int, upper: int) -> Iterator[Piece]:
    """One block of rows of a window: the edge where old keys drop out, what all rows see, the causal edge.

    Where the middle is too narrow to be worth calls of its own, all of it is one masked piece.
    """
    start, stop = max(0, lower), min(columns, rows + upper)
    seen_by_all, no_longer = max(start, rows - 1 + lower), min(stop, upper + 1)
    if no_longer - seen_by_all < ROW_BLOCK:
        edges = [(start, stop)]
    else:
        yield Piece(row, rows, seen_by_all, no_longer - seen_by_all, None, causal=False)
        edges = [(start, seen_by_all), (no_longer, stop)]
    for left, right in edges:
        cut = trim(rows, right - left, lower - left, upper - left)
        n, m = int(cut.row_stop - cut.row_start), int(cut.column_stop - cut.column_start)
        if n == 0:
            continue
        first, column, low, high = (
            row + int(cut.row_start),
            left + int(cut.column_start),
            int(cut.lower),
            int(cut.upper),
        )
        if low <= 1 - n:
            for piece in pieces(n, m, low, high):
                yield piece._replace(row=piece.row + first, column=piece.column + column)
        else:
            yield Piece(first, n, column, m, (low, high), causal=False)


@lru_cache(maxsize=16)
def _mask(rows: int, columns: int, lower: int, upper: int, dtype: torch.dtype) -> Tensor:
    """0 where row i sees column j, -inf elsewhere."""
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    hidden = (j < i + lower) | (j > i + upper)
    return torch.zeros(rows, columns, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _attn_mask(piece: Piece, dtype: torch.dtype) -> Tensor | None:
    return None if piece.causal or piece.band is None else _mask(piece.rows, piece.columns, *piece.band, dtype)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """One call on [n, H, D] and [m, G, D]; aten takes the transposed views without a copy."""
    mask = _attn_mask(batch.piece, q.dtype)
    q, k, v = (_heads_first(x, batch.count) for x in (q, k, v))
    out, lse = _flash_cpu(q, k, v, 0.0, batch.piece.causal, attn_mask=mask)
    return out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)


def _cpu_backward(
    dout: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, batch: Batch
) -> tuple[Tensor, ...]:
    mask = _attn_mask(batch.piece, q.dtype)
    dout, q, out, k, v = (_heads_first(x, batch.count) for x in (dout, q, out, k, v))
    lse = lse.unflatten(1, (batch.count, -1)).transpose(0, 1)
    grads = _flash_cpu_backward(dout, q, k, v, out, lse, 0.0, batch.piece.causal, attn_mask=mask)
    return tuple(grad.transpose(1, 2).flatten(0, 1) for grad in grads)


def _heads_first(x: Tensor, count: int) -> Tensor:
    """[count · n, H, D] -> [count, H, n, D]"""
    return x.unflatten(0, (count, -1)).transpose(1, 2)


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> tuple[Tensor, Tensor]:
    """Flash 2 inside PyTorch: q [n, H, D], k, v [m, G, D] -> out [n, H, D] in their dtype, lse [H, n] float32."""
    out, lse, *_ = _varlen_cuda(
        q,
        k,
        v,
        launch.row_starts,
        launch.key_starts,
        launch.max_rows,
        launch.max_keys,
        0.0,
        launch.causal,
        False,
        window_size_left=launch.left,
        window_size_right=0 if launch.causal else -1,
    )
    return out, lse


def _cuda_backward(
    dout: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, launch: Launch
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # random state: there is no dropout
    return _varlen_cuda_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        launch.row_starts,
        launch.key_starts,
        launch.max_rows,
        launch.max_keys,
        0.0,
        launch.causal,
        unused,
        unused,
        window_size_left=launch.left,
        window_size_right=0 if launch.causal else -1,
    )
