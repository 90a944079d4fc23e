"""The truth about attention: dense, in float64, the mask written out, differentiated by autograd."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Attention(NamedTuple):
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def visible(documents: Sequence[Sequence[int]], length: int, window: int | None) -> Tensor:
    """bool[B, T, T]: whether query i sees key j, from the definition. Past its documents: padding."""
    seen = torch.zeros(len(documents), length, length, dtype=torch.bool)
    for number, lengths in enumerate(documents):
        start = 0
        for count in lengths:
            for i in range(start, start + count):
                first = start if window is None else max(start, i - window + 1)
                seen[number, i, first : i + 1] = True
            start += count
    return seen


def dense(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Tensor) -> Attention:
    """q, dout [B, T, H, D], k, v [B, T, G, D] of any dtype, in float64. Rows that see nothing give zero."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    share = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(share, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) / q.shape[3] ** 0.5
    empty = ~seen.any(-1)
    allowed = (seen | empty[:, :, None])[:, None]
    weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), -1)
    weights = weights.masked_fill(empty[:, None, :, None], 0.0)
    out = torch.einsum("bhij,bjhd->bihd", weights, values)
    return Attention(out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double()))


def assert_close(got: Attention, want: Attention, tolerance: float, context: str = "") -> None:
    """Each of out, dq, dk, dv within `tolerance` of the truth, relative to its largest value (at least 1)."""
    for name, a, b in zip(Attention._fields, got, want, strict=True):
        error = (a.double() - b).abs().max().item() / max(1.0, b.abs().max().item())
        assert error <= tolerance, f"{name} is off by {error:.2e} > {tolerance:.0e} {context}"
