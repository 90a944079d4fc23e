"""Sums of weight gradients over blocks of tokens."""

import torch
from torch import Tensor


def add_product(total: Tensor, dout: Tensor, block: Tensor, scratch: Tensor | None) -> None:
    """total [R, C] += doutᵀ · block, of dout [m, R] and block [m, C], summed in total's dtype, float32 or float64.

    In 16-bit compute the product is taken in that dtype, as any linear's would be; the sum is not. It is taken some
    rows at a time, as many as `scratch` (flat, C elements or more, of block's dtype) has room for.
    """
    if block.dtype == total.dtype:
        total.addmm_(dout.T, block)
        return
    width = total.shape[1]
    rows = len(scratch) // width
    for start in range(0, len(total), rows):
        part = total[start : start + rows]
        product = scratch[: part.numel()].view(part.shape)
        torch.mm(dout[:, start : start + rows].T, block, out=product)
        part.add_(product)
