"""Our normalisation against PyTorch's, in value, gradients and what it keeps."""

import pytest
import torch
import torch.nn.functional as F

from model import norm
from model.norm import RMSNorm


@pytest.fixture(autouse=True, params=[8, 1 << 18])
def blocks(request, monkeypatch):
    """In blocks of one row and in one block."""
    monkeypatch.setattr(norm, "BLOCK_ELEMENTS", request.param)


@pytest.mark.parametrize("shape", [(3, 5, 8), (7, 8), (2, 3, 4, 8)])
def test_equals_torchs_own(shape):
    module = RMSNorm(8, eps=1e-5, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.randn(8, dtype=torch.float64))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(shape, dtype=torch.float64)
    ours = torch.autograd.grad(module(x), (x, module.weight), dout)
    theirs = torch.autograd.grad(F.rms_norm(x, (8,), module.weight, 1e-5), (x, module.weight), dout)
    torch.testing.assert_close(module(x), F.rms_norm(x, (8,), module.weight, 1e-5), rtol=1e-14, atol=1e-14)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_gradients_by_finite_differences():
    module = RMSNorm(8, eps=1e-3, dtype=torch.float64)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: norm.normalise(x, w, 1e-3)[0], (x, module.weight))


def test_bfloat16_is_rounded_once():
    module = RMSNorm(8, eps=1e-5)
    x = torch.randn(64, 8)
    exact = F.rms_norm(x.bfloat16().double(), (8,), module.weight.double(), 1e-5)
    half = RMSNorm(8, eps=1e-5, dtype=torch.bfloat16)
    torch.testing.assert_close(half(x.bfloat16()), exact.bfloat16(), rtol=2**-8, atol=0)


def test_keeps_its_input_and_a_number_a_row():
    kept = []
    x = torch.randn(16, 8, dtype=torch.bfloat16, requires_grad=True)
    module = RMSNorm(8, eps=1e-5, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        module(x)
    assert sorted((str(t.dtype), t.numel()) for t in kept) == [
        ("torch.bfloat16", 8),
        ("torch.bfloat16", 128),
        ("torch.float32", 16),
    ]


def test_the_fused_operations_of_cuda_are_called_as_they_want():
    """There is no GPU here: the same calls, on tensors without numbers."""
    x, weight = torch.randn(6, 8, device="meta"), torch.randn(8, device="meta")
    out, scale = torch.ops.aten._fused_rms_norm(x, x.shape[1:], weight, 1e-5)
    assert (out.shape, scale.shape) == ((6, 8), (6, 1))
    dx, dweight = torch.ops.aten._fused_rms_norm_backward(out, x, x.shape[1:], scale, weight, [True, True])
    assert (dx.shape, dweight.shape) == (x.shape, weight.shape)
