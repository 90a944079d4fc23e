"""Tiles of attention on PyTorch's own flash kernels, called through aten because only there the logsumexp
comes along.

Nothing aten gets wrong in silence ever reaches it: an empty q or k (a crash on CPU), a row without keys (lse
0 there, NaN in backward), a last stride other than 1, a mask of another dtype than q. So a band is first cut
into pieces that a kernel computes whole, or causally from the top left corner, or, at the far edge of a
window, under a small mask.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from model.kernels.merge import merge
from model.kernels.tiles import accumulation_dtype, empty_gradients, empty_state, iterate
from model.mask import is_full, trim

ROW_BLOCK = 256  # rows of a window tile that are cut into pieces together; masks are at most about 3 × ROW_BLOCK wide

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


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
    """Attention of q [B, L, H, D] over the keys k, v [B, Lk, G, D] that `tiles` (int64[n, 8]) show, G
    dividing H.

    Returns (out [B, L, H, D], lse [B, H, L]), float32 (float64 for float64): 0 and -inf where a row meets no
    key. With `into`, merges into that state in place instead, and returns it. On CPU bfloat16 is computed in
    float32.
    """
    out, lse = empty_state(q) if into is None else into
    q, k, v = _operands(q, k, v)
    call = _cuda_forward if q.is_cuda else _cpu_forward
    for sequence, rows, columns, piece in _pieces(tiles, square=q.is_cuda):
        block_out, block_lse = call(
            q[sequence, rows][None], k[sequence, columns][None], v[sequence, columns][None], piece
        )
        merge(out[sequence, rows], lse[sequence, :, rows], block_out[0], block_lse[0])
    return out, lse


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

    dout, q, out [B, L, H, D], k, v [B, Lk, G, D], lse [B, H, L]. Returns (dq, dk, dv) in the accumulation
    dtype, zero where no tile comes. With `into`, adds to those in place instead, and returns them.
    """
    dq, dk, dv = empty_gradients(q, k) if into is None else into
    dout, q, k, v, out = _operands(dout, q, k, v, out)
    call = _cuda_backward if q.is_cuda else _cpu_backward
    for sequence, rows, columns, piece in _pieces(tiles, square=q.is_cuda):
        at_rows, at_columns = (
            (x[sequence, rows][None] for x in (dout, q, out)),
            (x[sequence, columns][None] for x in (k, v)),
        )
        grads = call(*at_rows, *at_columns, lse[sequence, :, rows][None], piece)
        dq[sequence, rows] += grads[0][0]
        dk[sequence, columns] += grads[1][0]
        dv[sequence, columns] += grads[2][0]
    return dq, dk, dv


def _operands(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What the kernels are given: one dtype, last stride 1.

    The CPU kernel's backward would accumulate dk, dv in bfloat16 (errors of 1e-2), so it never sees bfloat16.
    """
    dtype = tensors[1].dtype if tensors[1].is_cuda else accumulation_dtype(tensors[1].dtype)
    tensors = tuple(tensor.to(dtype) for tensor in tensors)
    return tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)


def _pieces(tiles: Tensor, square: bool) -> Iterator[tuple[int, slice, slice, Piece]]:
    """All pieces of all tiles, with the rows and columns of q and k that they touch."""
    for tile in iterate(tiles):
        for piece in pieces(tile.num_rows, tile.num_columns, tile.lower, tile.upper, square):
            row, column = tile.rows.start + piece.row, tile.columns.start + piece.column
            yield tile.sequence, slice(row, row + piece.rows), slice(column, column + piece.columns), piece


def pieces(rows: int, columns: int, lower: int, upper: int, square: bool = False) -> Iterator[Piece]:
    """Cut a trimmed tile into pieces that kernels compute directly; together they show exactly its visible
    pairs.

    No piece has a row without a key. With `square`, causal pieces have as many rows as columns: kernels that
    align the triangle to the bottom right corner then agree with those that align it to the top left.
    """
    if is_full(rows, columns, lower, upper):
        yield Piece(0, rows, 0, columns, None, causal=False)
    elif lower <= 1 - rows:
        yield from _causal_pieces(rows, columns, upper, square)
    else:
        for row in range(0, rows, ROW_BLOCK):
            yield from _window_pieces(row, min(ROW_BLOCK, rows - row), columns, lower + row, upper + row, square)


def _causal_pieces(rows: int, columns: int, upper: int, square: bool) -> Iterator[Piece]:
    """Columns that every row sees, then the triangle. A trimmed tile has upper >= 0."""
    if upper > 0:
        yield Piece(0, rows, 0, upper, None, causal=False)
    triangle = columns - upper
    if square and rows > triangle:
        yield Piece(triangle, rows - triangle, upper, triangle, None, causal=False)
        rows = triangle
    yield Piece(0, rows, upper, triangle, (1 - rows, 0), causal=True)


def _window_pieces(row: int, rows: int, columns: int, lower: int, upper: int, square: bool) -> Iterator[Piece]:
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
            for piece in pieces(n, m, low, high, square):
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


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
    """One call on [1, rows, H, D] and [1, columns, G, D]; aten takes the transposed views without a copy."""
    mask = _attn_mask(piece, q.dtype)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = _flash_cpu(q, k, v, 0.0, piece.causal, attn_mask=mask)
    return out.transpose(1, 2), lse


def _cpu_backward(
    dout: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, piece: Piece
) -> tuple[Tensor, ...]:
    mask = _attn_mask(piece, q.dtype)
    dout, q, out, k, v = (x.transpose(1, 2) for x in (dout, q, out, k, v))
    grads = _flash_cpu_backward(dout, q, k, v, out, lse, 0.0, piece.causal, attn_mask=mask)
    return tuple(grad.transpose(1, 2) for grad in grads)


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
    """Flash 2 inside PyTorch: grouped heads as they are, lse in float32."""
    assert piece.band is None or piece.causal, "windows are refused on CUDA by model.kernels.capability"
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, piece.causal, False
    )
    return out.float(), lse


def _cuda_backward(
    dout: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, piece: Piece
) -> tuple[Tensor, ...]:
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # random state: there is no dropout
    return torch.ops.aten._flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        piece.causal,
        unused,
        unused,
    )
