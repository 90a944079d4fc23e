"""Ulysses: heads <-> sequence all-to-all, around any attend().

The sequence axis is ulysses × ring: sequence rank s = ring_rank · degree + ulysses_rank. The layout deals one share of
degree · L tokens to each ring rank, and the ulysses ranks of that ring rank store equal slices of the share
(`parallel.layout.split`). On the way in, each of them gives up most heads of its slice for all tokens of a few heads:
[B, L, H, D] becomes [B, degree · L, H / degree, D] in the ring rank's own storage order, so that attend sees a ring
rank like any other, with the ring rank's plan. On the way out the heads of each token come together again.

Rank j attends with query heads [j·H/u, (j+1)·H/u) and the key/value heads that those belong to. Where the degree u
exceeds the G key/value heads, u/G ranks hold a copy of the same head, and their gradients are summed on its owner.

Source: arXiv:2309.14509 §3.1 (the all-to-all), arXiv:2405.07719 §3 (around a ring).
"""

import torch
import torch.distributed as dist
from torch import Tensor, library
from torch.distributed.distributed_c10d import _resolve_process_group

from conf.schema import check_ulysses
from model.attention import Attend
from model.kernels.tiles import accumulation_dtype
from parallel.collectives import all_to_all
from parallel.ring import check_shapes


def around(attend: Attend, group_name: str, degree: int) -> Attend:
    """`attend` of all heads and this rank's tokens, made of an `attend` of some heads and degree times the tokens.

    attend(q [B, L, H, D], k, v [B, L, G, D], plan) -> out [B, L, H, D], in q's dtype; inside it is called with q [B,
    degree · L, H / degree, D] and k, v [B, degree · L, max(1, G / degree), D], contiguous. `group_name` names the group
    of `degree` ranks that share a ring rank's tokens, in storage order.

    Collective over that group, in forward and in backward: one all-to-all on the way in and one on the way out. Raises
    ValueError for tensors or a degree that do not fit together, before anything is sent.
    """
    if degree == 1:
        return attend

    def attend_some_heads(q: Tensor, k: Tensor, v: Tensor, plan: Tensor) -> Tensor:
        return to_tokens(attend(*to_heads(q, k, v, group_name, degree), plan), group_name, degree)

    return attend_some_heads


@library.custom_op("longhaul::to_heads", mutates_args=())
def to_heads(q: Tensor, k: Tensor, v: Tensor, group_name: str, degree: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, L, H, D], k, v [B, L, G, D] of this rank's tokens -> this rank's heads of q, k, v for all ranks' tokens.

    Returns q [B, degree · L, H / degree, D] and k, v [B, degree · L, max(1, G / degree), D]. Differentiable; gradients
    of copies of a key/value head are summed in the accumulation dtype and rounded once. Collective over the group, in
    forward and in backward, one message per peer. An opaque node whose results selective recompute can save.

    Raises ValueError for shapes, dtypes or a degree that do not fit together, before anything is sent.
    """
    group = _resolve_process_group(group_name)
    _check(q, k, v, group, degree)
    batch, length, _, head_dim = q.shape
    per_rank = _heads_per_rank(q.shape[2], k.shape[2], degree)
    message = q.new_empty((degree, batch, length, sum(per_rank), head_dim))
    for x, part in zip((q, k, v), message.split(per_rank, dim=3), strict=True):
        owners = x.shape[2] // part.shape[3]
        # [owners, copies, B, L, heads, D]: with fewer owners than ranks, neighbours get copies of the same heads
        part.unflatten(0, (owners, -1)).copy_(x.unflatten(2, (owners, -1)).permute(2, 0, 1, 3, 4).unsqueeze(1))
    arrived = all_to_all(message, group)
    del message, part  # before the results are made
    return tuple(_join_tokens(part) for part in arrived.split(per_rank, dim=3))


@library.custom_op("longhaul::to_heads_backward", mutates_args=())
def to_heads_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, num_kv_heads: int, group_name: str, degree: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `to_heads`: dq [B, L, H, D], dk, dv [B, L, G, D] of this rank's tokens.

    Collective over the group.
    """
    message = torch.cat([x.unflatten(1, (degree, -1)).transpose(0, 1) for x in (dq, dk, dv)], dim=3).contiguous()
    arrived = all_to_all(message, _resolve_process_group(group_name))
    del message  # before the results are made
    parts = arrived.split([dq.shape[2], dk.shape[2], dv.shape[2]], dim=3)
    num_heads = (degree * dq.shape[2], num_kv_heads, num_kv_heads)
    return tuple(_join_heads(part, heads) for part, heads in zip(parts, num_heads, strict=True))


@library.custom_op("longhaul::to_tokens", mutates_args=())
def to_tokens(out: Tensor, group_name: str, degree: int) -> Tensor:
    """out [B, degree · L, h, D] of this rank's heads -> [B, L, degree · h, D] of this rank's tokens. Differentiable.

    Collective over the group, in forward and in backward. An opaque node whose result selective recompute can save.
    """
    arrived = all_to_all(_split_tokens(out, degree), _resolve_process_group(group_name))
    return _join_heads(arrived, degree * out.shape[2])


@library.custom_op("longhaul::to_tokens_backward", mutates_args=())
def to_tokens_backward(dout: Tensor, group_name: str, degree: int) -> Tensor:
    """Gradient of `to_tokens`, [B, L, H, D] -> [B, degree · L, H / degree, D]. Collective over the group."""
    by_rank = dout.unflatten(2, (degree, -1)).permute(2, 0, 1, 3, 4)
    return _join_tokens(all_to_all(by_rank.contiguous(), _resolve_process_group(group_name)))


@to_heads.register_fake
def _to_heads_fake(q, k, v, group_name, degree):
    batch, length, num_heads, head_dim = q.shape
    per_rank = _heads_per_rank(num_heads, k.shape[2], degree)
    return tuple(q.new_empty((batch, degree * length, heads, head_dim)) for heads in per_rank)


@to_heads_backward.register_fake
def _to_heads_backward_fake(dq, dk, dv, num_kv_heads, group_name, degree):
    batch, length, heads, head_dim = dq.shape
    num_heads = (degree * heads, num_kv_heads, num_kv_heads)
    return tuple(dq.new_empty((batch, length // degree, heads, head_dim)) for heads in num_heads)


@to_tokens.register_fake
def _to_tokens_fake(out, group_name, degree):
    batch, length, heads, head_dim = out.shape
    return out.new_empty((batch, length // degree, degree * heads, head_dim))


@to_tokens_backward.register_fake
def _to_tokens_backward_fake(dout, group_name, degree):
    batch, length, heads, head_dim = dout.shape
    return dout.new_empty((batch, degree * length, heads // degree, head_dim))


def _to_heads_context(ctx, inputs, output):
    _, k, _, ctx.group_name, ctx.degree = inputs
    ctx.num_kv_heads = k.shape[2]


def _to_heads_gradients(ctx, dq, dk, dv):
    return *to_heads_backward(dq, dk, dv, ctx.num_kv_heads, ctx.group_name, ctx.degree), None, None


def _to_tokens_context(ctx, inputs, output):
    _, ctx.group_name, ctx.degree = inputs


def _to_tokens_gradients(ctx, dout):
    return to_tokens_backward(dout, ctx.group_name, ctx.degree), None, None


to_heads.register_autograd(_to_heads_gradients, setup_context=_to_heads_context)
to_tokens.register_autograd(_to_tokens_gradients, setup_context=_to_tokens_context)


def _heads_per_rank(num_heads: int, num_kv_heads: int, degree: int) -> list[int]:
    """Heads of q, k and v that each rank attends with."""
    return [num_heads // degree, *[max(1, num_kv_heads // degree)] * 2]


def _split_tokens(x: Tensor, degree: int) -> Tensor:
    """[B, u · L, h, D] -> [u, B, L, h, D], contiguous: for one sequence no copy."""
    return x.unflatten(1, (degree, -1)).transpose(0, 1).contiguous()


def _join_tokens(arrived: Tensor) -> Tensor:
    """[u, B, L, h, D], row i the tokens of rank i -> [B, u · L, h, D], contiguous."""
    degree, batch, length, heads, head_dim = arrived.shape
    return arrived.transpose(0, 1).contiguous().view(batch, degree * length, heads, head_dim)


def _join_heads(arrived: Tensor, num_heads: int) -> Tensor:
    """[u, B, L, h, D], row i the heads of rank i -> [B, L, num_heads, D]; copies of the same heads are summed."""
    owners = num_heads // arrived.shape[3]
    copies = arrived.unflatten(0, (owners, -1))
    once = copies.sum(1, dtype=accumulation_dtype(arrived.dtype)) if copies.shape[1] > 1 else copies.squeeze(1)
    # contiguous: with one head a rank the rest is but a view, and what an op returns must share no memory
    return once.to(arrived.dtype).permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()


def _check(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, degree: int) -> None:
    """Everything that can be wrong before a byte is sent."""
    check_shapes(q, k, v)
    check_ulysses(q.shape[2], k.shape[2], degree)
    if group.size() != degree:
        raise ValueError(f"degree={degree}, but the group has {group.size()} ranks: use {group.size()}")
