"""Rotary position embedding from explicit positions.

Positions are data: a rank that holds a permuted part of a sequence passes the positions of its own tokens. Angles are
products in float64, so that they are exact to float32 at a million positions and more; only their cosines and sines are
cast. Pairs are (i, i + D/2), as in Hugging Face's Llama. Source: arXiv:2104.09864 §3.4.
"""

import torch
from torch import Tensor, library

BLOCK_ELEMENTS = (1 << 18, 1 << 22)  # turned at once: on CPU what stays in the cache, on CUDA what keeps it busy


def rope_angles(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `positions` [B, L] int64, each [B, L, 1, D/2] in `dtype`; computed in float64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.to(torch.float64)[..., None] * theta**-exponents
    return angles.cos().to(dtype)[:, :, None], angles.sin().to(dtype)[:, :, None]


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turns x [B, L, heads, D] by its tokens' angles; computed in the angles' dtype, returned in x's.

    Keeps nothing but the angles, which all layers share: the gradient is turned back.
    """
    return turn(x, *angles, 1)


@library.custom_op("longhaul::turn", mutates_args=())
def turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """`rotate`, by the angles or (sign -1) back; differentiable in x. One operation, which computes some tokens at a
    time, so that copies in the angles' dtype are small."""
    out, half = _turn_fake(x, cos, sin, sign), x.shape[-1] // 2
    step = max(1, BLOCK_ELEMENTS[x.device.type == "cuda"] // (x.shape[0] * x.shape[2] * x.shape[3]))
    for start in range(0, x.shape[1], step):
        part = slice(start, start + step)
        first, second = x[:, part, :, :half].to(cos.dtype), x[:, part, :, half:].to(cos.dtype)
        c, s = cos[:, part], sin[:, part]
        out[:, part, :, :half] = (first * c).addcmul_(second, s, value=-sign)
        out[:, part, :, half:] = (second * c).addcmul_(first, s, value=sign)
    return out


@turn.register_fake
def _turn_fake(x, cos, sin, sign):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _keep(ctx, inputs, output):
    _, cos, sin, ctx.sign = inputs
    ctx.save_for_backward(cos, sin)


def _turn_back(ctx, dout):
    return turn(dout, *ctx.saved_tensors, -ctx.sign), None, None, None


turn.register_autograd(_turn_back, setup_context=_keep)
