"""Tiles of attention with the mask written out: any dtype and device, slow, easy to believe.

The truth in float64, and the kernel to ask for where a fast one refuses.
"""

import math

import torch
from torch import Tensor

from model.kernels.merge import merge
from model.kernels.tiles import Tile, accumulation_dtype, empty_gradients, empty_state, iterate

ROW_BLOCK = 512  # rows whose scores exist at once: memory is H × ROW_BLOCK × columns of a tile, never rows × columns


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of q [N, H, D] over the keys k, v [M, G, D] that `tiles` (int64[n, 8]) show, G dividing H.

    Returns (out [N, H, D], lse [H, N]), float32 (float64 for float64): 0 and -inf where a row meets no
    key. With `into`, merges into that state in place instead, and returns it.
    """
    out, lse = empty_state(q) if into is None else into
    for tile in iterate(tiles):
        for part in _row_blocks(tile):
            _, query, key, value, scores = _scores(q, k, v, part)
            block_lse = torch.logsumexp(scores, -1)  # [G, H/G, rows]
            block_out = torch.exp(scores - block_lse[..., None]) @ value
            rows = part.num_rows
            merge(
                out[part.rows],
                lse[:, part.rows],
                block_out.reshape(-1, rows, q.shape[2]).transpose(0, 1),
                block_lse.reshape(-1, rows),
            )
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

    dout, q, out [N, H, D], k, v [M, G, D], lse [H, N]. Returns (dq, dk, dv) in the accumulation
    dtype, zero where no tile comes. With `into`, adds to those in place instead, and returns them.

        p = exp(q·kᵀ/√D - lse)                          dv = pᵀ·dout
        ds = p · (dout·vᵀ - rowsum(dout · out)) / √D    dq = ds·k       dk = dsᵀ·q
    """
    dq, dk, dv = empty_gradients(q, k) if into is None else into
    scale = q.shape[2] ** -0.5
    for tile in iterate(tiles):
        for part in _row_blocks(tile):
            dtype, query, key, value, scores = _scores(q, k, v, part)
            groups = key.shape[0]
            grad = _grouped(dout[part.rows].to(dtype), groups)
            final = _grouped(out[part.rows].to(dtype), groups)
            weights = torch.exp(scores - lse[:, part.rows].reshape(groups, -1, part.num_rows, 1))
            dscores = weights * (grad @ value.transpose(-1, -2) - (grad * final).sum(-1, keepdim=True)) * scale
            dq[part.rows] += (dscores @ key).reshape(-1, part.num_rows, q.shape[2]).transpose(0, 1)
            dk[part.columns] += (dscores.transpose(-1, -2) @ query).sum(1).transpose(0, 1)
            dv[part.columns] += (weights.transpose(-1, -2) @ grad).sum(1).transpose(0, 1)
    return dq, dk, dv


def _row_blocks(tile: Tile):
    """The tile in blocks of rows; bands move with their first row."""
    for start in range(0, tile.num_rows, ROW_BLOCK):
        rows = min(ROW_BLOCK, tile.num_rows - start)
        first = tile.rows.start + start
        yield tile._replace(
            rows=slice(first, first + rows), num_rows=rows, lower=tile.lower + start, upper=tile.upper + start
        )


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[rows, H, D] -> [G, H/G, rows, D]: the query heads beside the key/value head that they share."""
    return x.transpose(0, 1).unflatten(0, (groups, -1))


def _scores(q: Tensor, k: Tensor, v: Tensor, part: Tile) -> tuple[torch.dtype, Tensor, Tensor, Tensor, Tensor]:
    """(dtype, query [G, H/G, rows, D], key, value [G, 1, columns, D], scores [G, H/G, rows, columns])."""
    dtype = accumulation_dtype(q.dtype)
    query = _grouped(q[part.rows].to(dtype), k.shape[1])
    key, value = (x[part.columns].to(dtype).transpose(0, 1).unsqueeze(1) for x in (k, v))
    i = torch.arange(part.num_rows, device=q.device)[:, None]
    j = torch.arange(part.num_columns, device=q.device)[None, :]
    hidden = (j < i + part.lower) | (j > i + part.upper)
    scores = (query @ key.transpose(-1, -2)) / math.sqrt(q.shape[2])
    return dtype, query, key, value, scores.masked_fill(hidden, -torch.inf)
