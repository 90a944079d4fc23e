"""Next-token loss in blocks of tokens: the [tokens, vocab] logits never exist whole.

The loss is a sum over tokens, so each block's gradients are known as soon as its logits are, up to one scalar factor
that backward brings. They are therefore produced in the forward pass, in the memory of the logits, and no logits are
kept or computed twice. What a block takes is in `model/blocks.py`.
Source: arXiv:2305.19370 §3 (blockwise loss); the fusion is that of Liger Kernel, arXiv:2410.10989 §3.2; z-loss:
arXiv:2204.02311 §5.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.kernels.tiles import accumulation_dtype
from model.products import add_product

NO_TARGET = -100  # the label of a token that has no next token


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Vocabulary:
    """Which rows of the head are here, and how to combine a scalar per token over those who hold the other rows.

    The head's rows from `size` on are padding, which no token is and none predicts.
    """

    size: int
    start: int = 0
    maximum: Callable[[Tensor], Tensor] = _same
    total: Callable[[Tensor], Tensor] = _same


def sum_of_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, block_tokens: int, vocabulary: Vocabulary, z_loss: float = 0.0
) -> Tensor:
    """The sum over tokens with a label of -log softmax(z)[label] + z_loss · log(Σ exp z)², z = hidden · weightᵀ.

    hidden [B, L, C]; weight [V, C], or this rank's rows of it; labels [B, L] int64 with NO_TARGET where a token has no
    target. Returns a scalar in float32 (float64 for float64 input). Gradients of `hidden` are partial sums over the
    rows of `weight` that are here. Backward can be taken once.
    """
    with_gradients = torch.is_grad_enabled()
    return _BlockwiseLoss.apply(hidden, weight, labels, block_tokens, vocabulary, z_loss, with_gradients)


class _BlockwiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, block_tokens, vocabulary, z_loss, with_gradients):
        rows, targets = hidden.flatten(0, -2), labels.flatten()
        need_hidden, need_weight = (with_gradients and need for need in ctx.needs_input_grad[:2])
        wide = accumulation_dtype(hidden.dtype)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        dhidden = torch.empty_like(rows) if need_hidden else None
        dweight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        room = _Room(min(block_tokens, len(rows)), weight, wide)
        for start in range(0, len(rows), block_tokens):
            block = rows[start : start + block_tokens]
            logits = room.logits(block, weight)
            loss += _become_gradients(logits, targets[start : start + block_tokens], vocabulary, z_loss)
            if need_hidden or need_weight:
                dlogits = room.rounded(logits)
            if need_hidden:
                torch.mm(dlogits, weight, out=dhidden[start : start + block_tokens])
            if need_weight:
                add_product(dweight, dlogits, block, room.scratch)
        ctx.gradients = dhidden, dweight
        ctx.shape, ctx.weight_dtype, ctx.block_tokens = hidden.shape, weight.dtype, block_tokens
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss: Tensor):
        if ctx.gradients is None:
            raise RuntimeError("the loss's gradients were made in its forward and are gone: call it again")
        (dhidden, dweight), ctx.gradients = ctx.gradients, None
        if dhidden is not None:
            for block in dhidden.split(ctx.block_tokens):
                # The factor is not rounded to 16 bits first: it would scale every gradient below alike.
                _scale(block, dloss)
            dhidden = dhidden.view(ctx.shape)
        if dweight is not None:
            dweight = dweight.mul_(dloss).to(ctx.weight_dtype)
        return dhidden, dweight, None, None, None, None, None


def _scale(x: Tensor, factor: Tensor) -> None:
    """x *= factor, in factor's dtype."""
    if x.dtype == factor.dtype:
        x.mul_(factor)
    else:
        x.copy_(x.to(factor.dtype).mul_(factor))


class _Room:
    """The memory of a block: wide logits, and in 16-bit compute those that the matrix products read and write."""

    def __init__(self, block_tokens: int, weight: Tensor, wide: torch.dtype):
        shape = (block_tokens, len(weight))
        self.short, self.scratch = None, None
        if weight.dtype == wide:
            self.wide = weight.new_empty(shape)
            return
        self.short = weight.new_empty(shape)
        elements = self.short.numel()
        room = weight.new_empty(max(elements, -(-weight.shape[1] // 2)), dtype=wide)
        self.wide = room[:elements].view(shape)
        self.scratch = room.view(weight.dtype)  # free once a block's gradients are rounded

    def logits(self, block: Tensor, weight: Tensor) -> Tensor:
        """block [m, C] · weightᵀ -> [m, V], wide; in 16-bit compute rounded as any linear's output."""
        wide = self.wide[: len(block)]
        if self.short is None:
            return torch.mm(block, weight.T, out=wide)
        return wide.copy_(torch.mm(block, weight.T, out=self.short[: len(block)]))

    def rounded(self, dlogits: Tensor) -> Tensor:
        """dlogits [m, V] in the dtype of compute; `scratch` lies where they were."""
        return dlogits if self.short is None else self.short[: len(dlogits)].copy_(dlogits)


def _become_gradients(logits: Tensor, target: Tensor, vocabulary: Vocabulary, z_loss: float) -> Tensor:
    """Turns a block's logits [m, V] into the gradients of its loss, in place, and returns that loss, a scalar.

    Collective over the ranks that hold the vocabulary: a maximum, and then two sums, of a scalar for each token.
    """
    local, valid = target - vocabulary.start, target != NO_TARGET
    here = valid & (local >= 0) & (local < logits.shape[1])
    index = torch.where(here, local, 0)[:, None]
    if (own := max(0, vocabulary.size - vocabulary.start)) < logits.shape[1]:
        logits[:, own:] = -torch.inf
    top = vocabulary.maximum(logits.amax(dim=-1))  # finite: some rank holds a row that is no padding
    logits.sub_(top[:, None])
    known = ~valid | (target >= 0) & (target < vocabulary.size)  # an infinite loss says so where a label is not
    chosen = torch.where(known, torch.where(here, logits.gather(1, index)[:, 0], 0), -torch.inf)
    total, chosen = vocabulary.total(torch.stack((logits.exp_().sum(dim=-1), chosen)))
    log_total = total.log()
    losses, factor = log_total - chosen, valid / total
    if z_loss:
        lse = log_total + top
        losses, factor = losses + z_loss * lse.square(), factor * (1 + 2 * z_loss * lse)
    logits.mul_(factor[:, None])
    logits.scatter_add_(1, index, -here.to(logits.dtype)[:, None])
    return torch.where(valid, losses, 0).sum()
