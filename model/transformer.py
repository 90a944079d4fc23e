"""A Llama-family decoder. It knows no rank, no group and no layout.

Tokens, positions and the attention plan are data: a permuted part of a sequence is just other data. Parameter names are
those of Hugging Face's Llama and Qwen models without the leading `model.`.
"""

import math
import zlib
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import ModelConfig
from model.attention import Attend, Attention
from model.blocks import Blocks
from model.ffn import FeedForward
from model.kernels.tiles import accumulation_dtype
from model.loss import Vocabulary, sum_of_losses
from model.norm import RMSNorm
from model.rope import rope_angles


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on a normalised copy that is added back."""

    def __init__(self, config: ModelConfig, kind: str, attend: Attend, ffn_block_tokens: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.model_dim, eps=config.norm_eps)
        self.self_attn = Attention(config, kind, attend)
        self.post_attention_layernorm = RMSNorm(config.model_dim, eps=config.norm_eps)
        self.mlp = FeedForward(config.model_dim, config.ffn_dim, ffn_block_tokens)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], plan: Mapping[str, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, plan)
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nn.Embedding):
    """Token ids [B, L] -> [B, L, C]. A rank may hold the rows [start, start + n) only; other ids then give zero."""

    start = 0

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.weight
        if len(weight) == self.num_embeddings:
            return _Lookup.apply(tokens, weight)
        local = tokens - self.start
        here = (local >= 0) & (local < weight.shape[0])
        return _Lookup.apply(torch.where(here, local, 0), weight) * here[..., None]


class _Lookup(torch.autograd.Function):
    """A frequent token's gradient is a sum of thousands: taken in float32, whatever the table's dtype."""

    @staticmethod
    def forward(ctx, index: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.dtype = weight.shape[0], weight.dtype
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx, dout: Tensor):
        (index,) = ctx.saved_tensors
        dout = dout.to(accumulation_dtype(dout.dtype))
        return None, torch.ops.aten.embedding_dense_backward(dout, index, ctx.rows, -1, False).to(ctx.dtype)


class Head(nn.Module):
    """The output projection together with the loss, so that logits exist for one block of tokens at a time."""

    def __init__(self, config: ModelConfig, block_tokens: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.model_dim))
        self.block_tokens = block_tokens
        self.z_loss = config.z_loss
        self.vocabulary = Vocabulary(config.vocab_size)  # all rows are here; the tensor axis puts its own in place

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """hidden [B, L, C], labels [B, L] -> the sum of the tokens' losses, a scalar; in training with the z-loss."""
        z_loss = self.z_loss if self.training else 0.0
        return sum_of_losses(hidden, self.weight, labels, self.block_tokens, self.vocabulary, z_loss)


class Transformer(nn.Module):
    """Embedding, layers, norm and head; feed-forward and loss go through the tokens in blocks of `blocks`.

    Embedding and head have a row for each of `padded_vocab_size` tokens; those from `vocab_size` on are never used.
    """

    def __init__(self, config: ModelConfig, attend: Attend, blocks: Blocks):
        super().__init__()
        self.config = config
        self.rope_theta = config.rope_theta
        self.embed_tokens = Embedding(config.padded_vocab_size, config.model_dim)
        self.layers = nn.ModuleList(Block(config, kind, attend, blocks.ffn) for kind in config.attention_kinds())
        self.norm = RMSNorm(config.model_dim, eps=config.norm_eps)
        self.lm_head = Head(config, blocks.loss)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def use_rope(self, theta: float) -> None:
        """Turns by another base from now on: what changes where training goes on with longer sequences."""
        self.rope_theta = theta

    def forward(
        self, tokens: Tensor, positions: Tensor, plan: Mapping[str, Tensor], labels: Tensor | None = None
    ) -> Tensor:
        """The final hidden state [B, L, C], or with `labels` [B, L] the sum of the tokens' losses.

        tokens and positions [B, L] int64; plan: a table of tiles for each kind of attention.
        """
        x = self.embed_tokens(tokens)
        wide = accumulation_dtype(x.dtype)
        angles = rope_angles(positions, self.config.head_dim, self.rope_theta, wide)
        for layer in self.layers:
            x = layer(x, angles, plan)
        hidden = self.norm(x)
        return hidden if labels is None else self.lm_head(hidden, labels)


def initial_rows(config: ModelConfig, seed: int, name: str, shape: torch.Size, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of the parameter `name` before training, float32.

    Norms are 1, biases 0, the rest normal with deviation init_std, divided by √(2 · layers) where a layer writes into
    the residual stream (GPT-2's rule). Values depend on seed and name alone: rows are drawn in blocks, each from its
    own counter of a Philox generator, so every rank makes exactly its own part and all layouts start equal.
    """
    rest = tuple(shape[1:])
    if name.endswith("bias"):
        return np.zeros((stop - start, *rest), np.float32)
    if "norm" in name:
        return np.ones((stop - start, *rest), np.float32)
    residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    deviation = config.init_std / (math.sqrt(2 * config.num_layers) if residual else 1.0)
    block_rows = max(1, 65_536 // math.prod(rest))
    blocks = []
    for block in range(start // block_rows, -(-stop // block_rows)):
        bits = np.random.Philox(key=[seed, zlib.crc32(name.encode())], counter=[0, 0, 0, block])
        first = block * block_rows
        rows = np.random.Generator(bits).standard_normal((block_rows, *rest), dtype=np.float32)
        blocks.append(rows[max(0, start - first) : max(0, stop - first)])
    if not blocks:
        return np.zeros((0, *rest), np.float32)
    return np.concatenate(blocks) * np.float32(deviation)
