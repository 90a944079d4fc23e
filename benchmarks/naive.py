"""What `benchmarks/max_context.py` compares with: a layer's parts as everybody writes them first.

Each rung of the ladder is a function that puts such parts in the place of the product's, in a model that is already
built. Autograd keeps whatever it likes. One rank only: they know of no other.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from model.loss import NO_TARGET
from model.transformer import Transformer


def vanilla(model: Transformer) -> None:
    """Attention by its scores, feed-forward and cross-entropy over all tokens at once."""
    for layer in model.layers:
        layer.self_attn.attend = attend
    memory_efficient(model)


def memory_efficient(model: Transformer) -> None:
    """The product's attention, which never holds the scores; feed-forward and cross-entropy over all tokens at once."""
    for layer in model.layers:
        layer.mlp.forward = feed_forward(layer.mlp)
    blockwise_feed_forward(model)


def blockwise_feed_forward(model: Transformer) -> None:
    """The product's attention and feed-forward; cross-entropy over all tokens at once."""
    model.lm_head.forward = cross_entropy(model.lm_head)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Tensor) -> Tensor:
    """Causal attention of one document; q [B, L, H, D], k, v [B, L, G, D] -> [B, L, H, D]. `plan` is not looked at."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(hidden, float("-inf"))
    return (scores.softmax(dim=-1) @ v).transpose(1, 2)


def feed_forward(mlp: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    """The forward of a feed-forward that keeps its hidden states [B, L, F]."""
    return lambda x: mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def cross_entropy(head: torch.nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The forward of a head that makes all logits [B, L, V]."""

    def forward(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(hidden, head.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_TARGET, reduction="sum")

    return forward
