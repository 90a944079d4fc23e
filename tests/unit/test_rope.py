"""Rotary positions against float64 trigonometry and complex multiplication."""

import math

import pytest
import torch

from model import rope
from model.rope import rope_angles, rotate
from tests import dense


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_angles_are_exact_at_a_million_positions(theta):
    """C004, C006: positions and their product with the frequency are never rounded before the cosine."""
    positions = torch.tensor([[257, 4097, 15_962, 131_072, 1_000_000, 4_194_303]])
    cos, sin = rope_angles(positions, 128, theta, torch.float32)
    for column, position in enumerate(positions[0].tolist()):
        for pair in range(64):
            angle = position * theta ** (-2 * pair / 128)
            assert abs(float(cos[0, column, 0, pair]) - math.cos(angle)) < 1e-6
            assert abs(float(sin[0, column, 0, pair]) - math.sin(angle)) < 1e-6
    assert float(cos[0, 2, 0, 0]) == pytest.approx(-0.9080, abs=1e-4)


def test_rotation_is_complex_multiplication():
    x = torch.randn(1, 7, 3, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 0, 1, 50, 100_000])
    turned = rotate(x, rope_angles(positions[None], 8, 1e4, torch.float64))
    torch.testing.assert_close(turned[0], dense.turn(x[0], positions, 1e4), rtol=1e-12, atol=1e-12)


def test_sixteen_bit_inputs_are_turned_in_float32():
    """C004: neighbouring positions far out stay apart although bfloat16 cannot tell them apart."""
    x = torch.ones(1, 2, 1, 8, dtype=torch.bfloat16)
    angles = rope_angles(torch.tensor([[999_998, 999_999]]), 8, 1e4, torch.float32)
    turned = rotate(x, angles)
    assert turned.dtype == torch.bfloat16
    assert not torch.equal(turned[0, 0], turned[0, 1])


def test_gradients_are_those_of_complex_multiplication():
    x = torch.randn(1, 7, 3, 8, dtype=torch.float64, requires_grad=True)
    positions, dout = torch.tensor([0, 1, 2, 0, 1, 50, 100_000]), torch.randn(1, 7, 3, 8, dtype=torch.float64)
    (ours,) = torch.autograd.grad(rotate(x, rope_angles(positions[None], 8, 1e4, torch.float64)), x, dout)
    (theirs,) = torch.autograd.grad(dense.turn(x[0], positions, 1e4)[None], x, dout)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_tokens_are_turned_in_blocks(monkeypatch):
    """Blocks of one token give the same bits as one block."""
    x, angles = torch.randn(1, 7, 3, 8), rope_angles(torch.arange(7)[None], 8, 1e4, torch.float32)
    at_once = rotate(x, angles)
    monkeypatch.setattr(rope, "BLOCK_ELEMENTS", (24, 24))
    assert torch.equal(rotate(x, angles), at_once)
