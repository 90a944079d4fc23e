"""The truth for a whole model: a plain float64 Llama with an explicit [T, T] mask, sharing no code with the product.

Parameters come as a dict by Hugging Face name (without `model.`); autograd differentiates straight through.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


def visible(documents: tuple[int, ...], length: int, window: int | None) -> Tensor:
    """[T, T] bool: may token i see token j? Written token by token from the definition."""
    owner = []
    for number, size in enumerate(documents):
        owner += [number] * size
    owner += [None] * (length - len(owner))
    mask = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(i + 1):
            same = owner[i] is not None and owner[i] == owner[j]
            mask[i, j] = same and (window is None or i - j < window)
    return mask


def places(documents: tuple[int, ...]) -> Tensor:
    """Positions that restart at each document."""
    return torch.cat([torch.arange(size) for size in documents])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding through complex numbers: pairs (i, i + D/2)."""
    half = x.shape[-1] // 2
    frequency = torch.tensor([theta ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    spin = torch.polar(torch.ones(len(positions), half, dtype=torch.float64), positions.double()[:, None] * frequency)
    z = torch.complex(x[..., :half], x[..., half:]) * spin[:, None]
    return torch.cat((z.real, z.imag), -1)


def attention(x: Tensor, w: Weights, prefix: str, config, kind: str, documents: tuple[int, ...]) -> Tensor:
    """x [T, C] -> [T, C] with an explicit mask and repeated key/value heads."""
    length, head_dim = len(x), config.head_dim

    def project(name: str) -> Tensor:
        out = x @ w[f"{prefix}.{name}.weight"].T
        if config.qkv_bias:
            out = out + w[f"{prefix}.{name}.bias"]
        return out.view(length, -1, head_dim)

    q, k, v = project("q_proj"), project("k_proj"), project("v_proj")
    if config.qk_norm:
        q = rms_norm(q, w[f"{prefix}.q_norm.weight"], config.norm_eps)
        k = rms_norm(k, w[f"{prefix}.k_norm.weight"], config.norm_eps)
    if not kind.endswith("norope"):
        positions = places(documents)
        q, k = turn(q, positions, config.rope_theta), turn(k, positions, config.rope_theta)
    repeat = config.num_heads // config.num_kv_heads
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / head_dim**0.5
    mask = visible(documents, length, config.attention_window if kind.startswith("window") else None)
    probabilities = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    out = torch.einsum("hij,jhd->ihd", probabilities, v).reshape(length, -1)
    return out @ w[f"{prefix}.o_proj.weight"].T


def sum_of_losses(w: Weights, config, tokens: Tensor, labels: Tensor, documents: tuple[int, ...]) -> Tensor:
    """The summed next-token loss of one sequence, with its z-loss; tokens and labels [T]."""
    x = w["embed_tokens.weight"][tokens]
    pattern = [kind.strip() for kind in config.attention_pattern.split(",")]
    for number in range(config.num_layers):
        layer = f"layers.{number}"
        normed = rms_norm(x, w[f"{layer}.input_layernorm.weight"], config.norm_eps)
        x = x + attention(normed, w, f"{layer}.self_attn", config, pattern[number % len(pattern)], documents)
        normed = rms_norm(x, w[f"{layer}.post_attention_layernorm.weight"], config.norm_eps)
        gates = F.silu(normed @ w[f"{layer}.mlp.gate_proj.weight"].T)
        x = x + (gates * (normed @ w[f"{layer}.mlp.up_proj.weight"].T)) @ w[f"{layer}.mlp.down_proj.weight"].T
    hidden = rms_norm(x, w["norm.weight"], config.norm_eps)
    head = w["embed_tokens.weight"] if config.tie_embeddings else w["lm_head.weight"]
    logits = hidden @ head[: config.vocab_size].T
    loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return loss + config.z_loss * logits[labels != -100].logsumexp(-1).square().sum()


def adamw(w: Weights, gradients: Weights, state: dict, step: int, rate: float, config) -> None:
    """One decoupled AdamW update in place, from the formula (arXiv:1711.05101, algorithm 2)."""
    for name, gradient in gradients.items():
        m, v = state.setdefault(name, (torch.zeros_like(gradient), torch.zeros_like(gradient)))
        m.mul_(config.beta1).add_((1 - config.beta1) * gradient)
        v.mul_(config.beta2).add_((1 - config.beta2) * gradient * gradient)
        decay = 0.0 if w[name].ndim == 1 else config.weight_decay
        update = (m / (1 - config.beta1**step)) / ((v / (1 - config.beta2**step)).sqrt() + config.eps)
        w[name].data.sub_(rate * (update + decay * w[name].data))
