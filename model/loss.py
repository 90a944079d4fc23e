"""Next-token loss in blocks of tokens: the [tokens, vocab] logits never exist whole.

The loss is a sum over tokens, so each block's gradients are known as soon as its logits are, up to one scalar factor
that backward brings. They are therefore produced in the forward pass and no logits are kept or computed twice.
Source: arXiv:2305.19370 §3 (blockwise loss); the fusion is that of Liger Kernel, arXiv:2410.10989 §3.2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.kernels.tiles import accumulation_dtype

NO_TARGET = -100  # the label of a token that has no next token


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Vocabulary:
    """Which rows of the head are here, and how to combine a scalar per token over those who hold the other rows."""

    start: int = 0
    maximum: Callable[[Tensor], Tensor] = _same
    total: Callable[[Tensor], Tensor] = _same


def sum_of_losses(hidden: Tensor, weight: Tensor, labels: Tensor, block_tokens: int, vocabulary: Vocabulary) -> Tensor:
    """The sum of -log softmax(hidden · weightᵀ)[label] over tokens with a label.

    hidden [B, L, C]; weight [V, C], or this rank's rows of it; labels [B, L] int64 with NO_TARGET where a token has no
    target. Returns a scalar in float32 (float64 for float64 input). Gradients of `hidden` are partial sums over the
    rows of `weight` that are here.
    """
    return _BlockwiseLoss.apply(hidden, weight, labels, block_tokens, vocabulary)


class _BlockwiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, block_tokens: int, vocabulary: Vocabulary):
        rows, targets = hidden.flatten(0, -2), labels.flatten()
        wide = accumulation_dtype(hidden.dtype)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        dhidden = torch.empty_like(rows) if need_hidden else None
        dweight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        for start in range(0, len(rows), block_tokens):
            block, target = rows[start : start + block_tokens], targets[start : start + block_tokens]
            block_loss, dlogits = _block(block, weight, target, vocabulary, wide)
            loss += block_loss
            if dhidden is not None:
                dhidden[start : start + block_tokens] = dlogits.to(weight.dtype) @ weight
            if dweight is not None:
                # In 16-bit compute the product is taken in that dtype, as any linear's would be; the sum is not.
                dweight += (dlogits.to(block.dtype).T @ block).to(wide)
        ctx.save_for_backward(dhidden, dweight)
        ctx.shape, ctx.weight_dtype = hidden.shape, weight.dtype
        return loss

    @staticmethod
    def backward(ctx, dloss: Tensor):
        dhidden, dweight = ctx.saved_tensors
        if dhidden is not None:
            # The factor is not rounded to 16 bits first: it would scale every gradient below alike.
            dhidden = (dhidden.to(dloss.dtype) * dloss).to(dhidden.dtype).view(ctx.shape)
        if dweight is not None:
            dweight = (dweight * dloss).to(ctx.weight_dtype)
        return dhidden, dweight, None, None, None


def _block(block: Tensor, weight: Tensor, target: Tensor, vocabulary: Vocabulary, wide: torch.dtype):
    """Loss of one block and the gradient of its logits, [block, rows of weight] in `wide`."""
    logits = (block @ weight.T).to(wide)
    top = vocabulary.maximum(logits.amax(dim=-1))
    exps = (logits - top[:, None]).exp()
    valid = target != NO_TARGET
    local = target - vocabulary.start
    here = valid & (local >= 0) & (local < weight.shape[0])
    index = torch.where(here, local, 0)[:, None]
    chosen = torch.where(here, logits.gather(1, index)[:, 0], 0)
    total, chosen = vocabulary.total(torch.stack((exps.sum(dim=-1), chosen)))
    loss = torch.where(valid, total.log() + top - chosen, 0).sum()
    dlogits = exps.mul_((valid / total)[:, None])
    dlogits.scatter_add_(1, index, -here.to(wide)[:, None])
    return loss, dlogits
