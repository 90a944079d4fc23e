"""The start-up check of a kernel: passes those we have, and refuses one that is a little wrong."""

from types import SimpleNamespace

import pytest
import torch

from model.kernels import reference, sdpa, self_test


@pytest.mark.parametrize("kernel", [reference, sdpa])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_our_kernels_pass(kernel, dtype):
    self_test.check(kernel, dtype, torch.device("cpu"), heads_per_group=4, head_dim=16)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_one_wrong_gradient_is_refused(wrong):
    """C011's kind: a forward that is right proves nothing about backward."""

    def backward(*args):
        gradients = list(sdpa.backward(*args))
        gradients[wrong] = gradients[wrong] * 1.001
        return gradients

    kernel = SimpleNamespace(__name__="kernels.wrong", forward=sdpa.forward, backward=backward)
    with pytest.raises(RuntimeError, match=("dq", "dk", "dv")[wrong]):
        self_test.check(kernel, torch.float32, torch.device("cpu"), heads_per_group=1, head_dim=16)


def test_wrong_causal_alignment_is_refused():
    """C009: bottom-right instead of top-left alignment shows in the second tile only."""

    def forward(q, k, v, tiles):
        tiles = tiles.clone()
        tiles[1, 6] -= 1
        return sdpa.forward(q, k, v, tiles)

    kernel = SimpleNamespace(__name__="kernels.wrong", forward=forward, backward=sdpa.backward)
    with pytest.raises(RuntimeError, match="out differs"):
        self_test.check(kernel, torch.float32, torch.device("cpu"), heads_per_group=1, head_dim=16)
