"""Join attention over two sets of keys into attention over both.

Source: arXiv:1805.02867 (online softmax), in the form of arXiv:2205.14135 §3.1, written so that "no key
seen", lse = -inf, is a neutral element.
"""

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block's attention to a running state, in place.

    out, block_out are [N, H, D] and lse, block_lse [H, N], all in the accumulation dtype. Empty
    with empty stays (0, -inf); empty with x is x, bit for bit, in either order; no exponential is ever taken
    of a positive number.

        weight = sigmoid(block_lse - lse)
        out <- out + weight · (block_out - out)
        lse <- log(e^lse + e^block_lse)
    """
    weight = (block_lse - lse).sigmoid_()
    weight.masked_fill_(block_lse == -torch.inf, 0)  # -inf minus -inf is NaN; a NaN of the data stays
    out.lerp_(block_out, weight.transpose(-1, -2).unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)
