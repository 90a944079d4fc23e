"""Rotary position embedding from explicit positions.

Positions are data: a rank that holds a permuted part of a sequence passes the positions of its own tokens. Angles are
products in float64, so that they are exact to float32 at a million positions and more; only their cosines and sines are
cast. Pairs are (i, i + D/2), as in Hugging Face's Llama. Source: arXiv:2104.09864 §3.4.
"""

import torch
from torch import Tensor


def rope_angles(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `positions` [B, L] int64, each [B, L, 1, D/2] in `dtype`; computed in float64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.to(torch.float64)[..., None] * theta**-exponents
    return angles.cos().to(dtype)[:, :, None], angles.sin().to(dtype)[:, :, None]


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turns x [B, L, heads, D] by its tokens' angles; computed in the angles' dtype, returned in x's."""
    cos, sin = angles
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
