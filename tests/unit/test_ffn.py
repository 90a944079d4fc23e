"""The blockwise feed-forward against the plain formula under autograd."""

import pytest
import torch
import torch.nn.functional as F

from model.ffn import FeedForward


def gradients(function, x, module):
    out = function(x)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    weights = [module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight]
    return out, torch.autograd.grad(out, [x, *weights], dout)


@pytest.mark.parametrize("block_tokens", [1, 3, 4, 7, 10, 64])
@pytest.mark.parametrize("length", [1, 4, 5, 10])
def test_equals_the_formula_for_any_block(block_tokens, length):
    """C020: lengths that the block does not divide lose nothing."""
    torch.manual_seed(0)
    module = FeedForward(6, 11, block_tokens).double()
    x = torch.randn(2, length, 6, dtype=torch.float64, requires_grad=True)

    def plain(x):
        gate, up, down = module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    out, grads = gradients(module, x, module)
    expected, expected_grads = gradients(plain, x, module)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for grad, truth in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, truth, rtol=1e-12, atol=1e-12)


def test_weight_gradients_accumulate_in_float32():
    """C014: 256 and sixteen ones are 272; bfloat16 accumulation would stop at 256."""
    module = FeedForward(1, 1, block_tokens=1).to(torch.bfloat16)
    for weight in module.parameters():
        weight.data.fill_(1.0)
    x = torch.full((1, 17, 1), 8.0, dtype=torch.bfloat16)
    dout = torch.full_like(x, 1 / 64)
    dout[0, 0] = 4.0
    module(x).backward(dout)
    # silu(8) · 8 is 63.98, 64 in bfloat16: the down projection's gradient is 64 · (4 + 16 / 64) = 272.
    assert module.down_proj.weight.grad.item() == 272.0


@pytest.mark.parametrize("block_tokens", [1, 7, 64, 100])
def test_sixteen_bit_weight_gradients_in_pieces(block_tokens):
    """Products that are added some rows at a time, as many as a block has room for, are those of the whole."""
    torch.manual_seed(0)
    module = FeedForward(24, 40, block_tokens).to(torch.bfloat16)
    exact = FeedForward(24, 40, 100).double()
    exact.load_state_dict(module.state_dict())
    x = torch.randn(1, 70, 24).to(torch.bfloat16).requires_grad_()
    _, grads = gradients(module, x, module)
    _, truths = gradients(exact, x.detach().double().requires_grad_(), exact)
    for grad, truth in zip(grads, truths, strict=True):
        assert (grad.double() - truth).norm() < 0.01 * truth.norm()


def test_two_backwards_through_one_graph():
    module = FeedForward(6, 11, 3).double()
    x = torch.randn(1, 5, 6, dtype=torch.float64, requires_grad=True)
    out = module(x).sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
