"""Gated feed-forward, evaluated blockwise over tokens.

Only the input is kept for backward; each block's intermediates [block, F] are computed again there, so memory does not
grow with F times the tokens. Source: arXiv:2305.19370 §3 (blockwise feed-forward), arXiv:2002.05202 (SwiGLU).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.kernels.tiles import accumulation_dtype


class FeedForward(nn.Module):
    """down(silu(gate(x)) · up(x)), in blocks of `block_tokens` tokens; the result does not depend on the block size."""

    def __init__(self, model_dim: int, ffn_dim: int, block_tokens: int):
        super().__init__()
        self.gate_proj = nn.Linear(model_dim, ffn_dim, bias=False)
        self.up_proj = nn.Linear(model_dim, ffn_dim, bias=False)
        self.down_proj = nn.Linear(ffn_dim, model_dim, bias=False)
        self.block_tokens = block_tokens

    def forward(self, x: Tensor) -> Tensor:
        """x [B, L, C] -> [B, L, C]."""
        weights = (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        return _Blockwise.apply(x, *weights, self.block_tokens)


class _Blockwise(torch.autograd.Function):
    """Weight gradients accumulate over blocks in float32 (float64 for float64 weights)."""

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, block_tokens: int) -> Tensor:
        ctx.save_for_backward(x, gate, up, down)
        ctx.block_tokens = block_tokens
        rows = x.flatten(0, -2)
        out = torch.empty_like(rows)
        for start in range(0, len(rows), block_tokens):
            block = rows[start : start + block_tokens]
            out[start : start + block_tokens] = (F.silu(block @ gate.T) * (block @ up.T)) @ down.T
        return out.view_as(x)

    @staticmethod
    def backward(ctx, dout: Tensor):
        x, gate, up, down = ctx.saved_tensors
        rows, douts = x.flatten(0, -2), dout.flatten(0, -2)
        dx = torch.empty_like(rows)
        dgate, dup, ddown = (_Accumulator(weight) for weight in (gate, up, down))
        for start in range(0, len(rows), ctx.block_tokens):
            block, dblock = rows[start : start + ctx.block_tokens], douts[start : start + ctx.block_tokens]
            gates, ups = block @ gate.T, block @ up.T
            sigmoid = torch.sigmoid(gates)
            silu = gates * sigmoid
            ddown.add(dblock, silu * ups)
            dhidden = dblock @ down
            dups = dhidden * silu
            dgates = dhidden * ups * (sigmoid + silu * (1 - sigmoid))  # silu'(g) = s + g·s·(1 - s)
            dup.add(dups, block)
            dgate.add(dgates, block)
            dx[start : start + ctx.block_tokens] = dgates @ gate + dups @ up
        return dx.view_as(x), dgate.total(), dup.total(), ddown.total(), None


class _Accumulator:
    """The sum over blocks of doutᵀ · input, at least float32, returned in the weight's dtype."""

    def __init__(self, weight: Tensor):
        self.dtype = weight.dtype
        self.sum = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))

    def add(self, dout: Tensor, block: Tensor) -> None:
        if self.dtype == self.sum.dtype:
            self.sum.addmm_(dout.T, block)
        else:
            self.sum += dout.T @ block

    def total(self) -> Tensor:
        return self.sum.to(self.dtype)
