"""Root-mean-square normalisation that keeps its input and one number a row, on every device and in every dtype.

PyTorch's own does so on CUDA only; elsewhere it keeps up to four copies of its input, in float32.
Source: arXiv:1910.07467.
"""

import torch
from torch import Tensor, library, nn

from model.kernels.tiles import accumulation_dtype

BLOCK_ELEMENTS = 1 << 18  # on CPU: what is computed at once stays in the cache


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x²) + eps) · weight over the last dim, computed in float32 (float64 for float64), returned in x's
    dtype. The gradient of `weight` is summed in float32 as well."""

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x, self.weight, self.eps)[0]


@library.custom_op("longhaul::normalise", mutates_args=())
def normalise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [..., C], weight [C] -> (normalised [..., C], 1 / root of the mean square [..., 1] in the accumulation dtype).

    One operation, so that whoever counts or compiles sees what it keeps and not how it gets there. Differentiable in x
    and weight through the first result.
    """
    if x.is_cuda:
        return torch.ops.aten._fused_rms_norm(x, x.shape[-1:], weight, eps)
    wide = accumulation_dtype(x.dtype)
    out, scale = _empty(x), x.new_empty((*x.shape[:-1], 1), dtype=wide)
    rows, outs, scales = (y.view(-1, y.shape[-1]) for y in (x.contiguous(), out, scale))
    step = max(1, BLOCK_ELEMENTS // rows.shape[1])
    for start in range(0, len(rows), step):
        block, part = rows[start : start + step].to(wide), scales[start : start + step]
        torch.rsqrt(block.square().mean(-1, keepdim=True).add_(eps), out=part)
        outs[start : start + step] = (block * part).mul_(weight)
    return out, scale


@library.custom_op("longhaul::normalise_backward", mutates_args=())
def normalise_backward(dout: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """With n = x · scale and d = dout · weight: dx = scale · (d - n · mean(d · n)), dweight = sum of dout · n."""
    if x.is_cuda:
        given = dout.contiguous(), x, x.shape[-1:], scale, weight, [True, True]
        return torch.ops.aten._fused_rms_norm_backward(*given)
    wide = scale.dtype
    dx, dweight = _empty(x), torch.zeros(x.shape[-1], dtype=wide, device=x.device)
    given = (y.view(-1, y.shape[-1]) for y in (dout.contiguous(), x.contiguous(), dx, scale))
    douts, rows, dxs, scales = given
    step = max(1, BLOCK_ELEMENTS // rows.shape[1])
    for start in range(0, len(rows), step):
        part, dblock = scales[start : start + step], douts[start : start + step].to(wide)
        normal = rows[start : start + step].to(wide) * part
        dweight += (dblock * normal).sum(0)
        dnormal = dblock * weight
        shared = (dnormal * normal).mean(-1, keepdim=True)
        dxs[start : start + step] = dnormal.sub_(normal.mul_(shared)).mul_(part)
    return dx, dweight.to(weight.dtype)


@normalise.register_fake
def _normalise_fake(x, weight, eps):
    return _empty(x), x.new_empty((*x.shape[:-1], 1), dtype=accumulation_dtype(x.dtype))


@normalise_backward.register_fake
def _normalise_backward_fake(dout, x, weight, scale):
    return _empty(x), torch.empty_like(weight)


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _keep(ctx, inputs, output):
    x, weight, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, output[1])


def _gradients(ctx, dout, _):
    return (None,) * 3 if dout is None else (*normalise_backward(dout, *ctx.saved_tensors), None)


normalise.register_autograd(_gradients, setup_context=_keep)
