"""Gated feed-forward, evaluated blockwise over tokens.

Only the input is kept for backward; each block's intermediates [block, F] are computed again there, so memory does not
grow with F times the tokens. What a block takes is in `model/blocks.py`.
Source: arXiv:2305.19370 §3 (blockwise feed-forward), arXiv:2002.05202 (SwiGLU).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.kernels.tiles import accumulation_dtype
from model.products import add_product


class FeedForward(nn.Module):
    """down(silu(gate(x)) · up(x)), in blocks of `block_tokens` tokens; the result does not depend on the block size."""

    def __init__(self, model_dim: int, ffn_dim: int, block_tokens: int):
        super().__init__()
        self.gate_proj = nn.Linear(model_dim, ffn_dim, bias=False)
        self.up_proj = nn.Linear(model_dim, ffn_dim, bias=False)
        self.down_proj = nn.Linear(ffn_dim, model_dim, bias=False)
        self.block_tokens = block_tokens

    def forward(self, x: Tensor) -> Tensor:
        """x [B, L, C] -> [B, L, C].

        Two nodes, of which the first keeps what backward needs and the second computes. Where the layer is computed
        again for its backward, that ends with the last tensor kept: the second node is not evaluated once more.
        """
        weights = (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        kept = _Keep.apply(x, *weights, self.block_tokens)
        return _Compute.apply(kept, *(weight.detach() for weight in weights), self.block_tokens)


class _Compute(torch.autograd.Function):
    """Forward of the feed-forward; its backward hands dout on to `_Keep`, which knows the rest."""

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, block_tokens: int) -> Tensor:
        rows = x.flatten(0, -2)
        out = torch.empty_like(rows)
        room = rows.new_empty(2, min(block_tokens, len(rows)), len(gate))
        for start in range(0, len(rows), block_tokens):
            block = rows[start : start + block_tokens]
            gates, ups = room[:, : len(block)]
            torch.mm(block, gate.T, out=gates)
            torch.mm(block, up.T, out=ups)
            torch.mm(F.silu(gates, inplace=True).mul_(ups), down.T, out=out[start : start + block_tokens])
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        return dout, None, None, None, None


class _Keep(torch.autograd.Function):
    """x as it is. Backward takes the gradient of the feed-forward's output for that of its own.

    Weight gradients accumulate over blocks in float32 (float64 for float64 weights).
    """

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, block_tokens: int) -> Tensor:
        ctx.save_for_backward(x, gate, up, down)
        ctx.block_tokens = block_tokens
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        x, gate, up, down = ctx.saved_tensors
        rows, douts = x.flatten(0, -2), dout.flatten(0, -2)
        dx = torch.empty_like(rows)
        wide = accumulation_dtype(gate.dtype)
        sums = [torch.zeros_like(weight, dtype=wide) for weight in (gate, up, down)]
        _blocks_backward(rows, douts, gate, up, down, dx, sums, ctx.block_tokens)
        # One after another: each sum goes as soon as it is rounded.
        dweights = [sums.pop(0).to(weight.dtype) for weight in (gate, up, down)]
        return dx.view(x.shape), *dweights, None


def _blocks_backward(
    rows: Tensor, douts: Tensor, gate: Tensor, up: Tensor, down: Tensor, dx: Tensor, sums: list[Tensor], size: int
) -> None:
    """Fills dx [T, C] and adds to the sums of dgate [F, C], dup [F, C] and ddown [C, F], `size` tokens at a time."""
    dgate, dup, ddown = sums
    width, (tokens, model_dim) = len(gate), rows.shape
    room = rows.new_empty(3, min(size, tokens), width)
    scratch = None
    if dgate.dtype != gate.dtype:
        scratch = rows.new_empty(max(room[0].numel(), model_dim))
    for start in range(0, tokens, size):
        block, dblock = rows[start : start + size], douts[start : start + size]
        gates, ups, third = room[:, : len(block)]
        torch.mm(block, gate.T, out=gates)
        torch.mm(block, up.T, out=ups)
        hidden = torch.ops.aten.silu(gates, out=third).mul_(ups)
        add_product(ddown, dblock, hidden, scratch)
        dhidden = torch.mm(dblock, down, out=third)
        # silu'(g) = s + g·s·(1 - s) with s = sigmoid(g)
        dgates = torch.ops.aten.silu_backward(ups.mul_(dhidden), gates, grad_input=ups)
        dups = dhidden.mul_(F.silu(gates, inplace=True))
        add_product(dup, dups, block, scratch)
        add_product(dgate, dgates, block, scratch)
        torch.mm(dgates, gate, out=dx[start : start + size]).addmm_(dups, up)
