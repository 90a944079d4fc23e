"""Offload on a GPU: the same gradients bit for bit, less memory, and pinned copies."""

import pytest
import torch

from conf.schema import Recompute
from model.rope import rope_angles
from parallel.apply import recompute
from parallel.offload import Offload, StreamCopier
from tests.unit.test_recompute import POLICIES, model_of

DEVICE = torch.device("cuda")
LENGTH = 1 << 14

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def through(model, x):
    """The layers' output, with an `attend` that is a product: what moves does not depend on it."""
    angles = rope_angles(torch.arange(LENGTH, device=DEVICE)[None], 8, 1e4, torch.float32)
    for layer in model.layers:
        x = layer(x, angles, {"full": torch.zeros(1)})
    return x


def run(policy, offload):
    torch.cuda.empty_cache()
    model = model_of(Recompute.none, num_layers=6)
    for layer in model.layers:
        layer.self_attn.attend = lambda q, k, v, plan: q * k.repeat_interleave(2, 2)
    model.to(DEVICE)
    recompute(model, policy, offload)
    x = torch.linspace(-1, 1, LENGTH * 32, device=DEVICE).sin().view(1, LENGTH, 32)
    parameters = list(model.layers.parameters())
    for _ in range(2):
        out = through(model, x).square().sum()
        torch.cuda.synchronize()
        between = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, parameters)
    return grads, between


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_the_same_and_memory_is_less(policy):
    grads, between = run(policy, Offload(StreamCopier(DEVICE)))
    truths, more = run(policy, None)
    assert all(torch.equal(grad, truth) for grad, truth in zip(grads, truths, strict=True))
    assert more - between >= 4 * LENGTH * 32 * 4  # of five layers, the input at least


def test_copies_are_pinned_and_come_back():
    copier = StreamCopier(DEVICE)
    x = torch.arange(1 << 20, device=DEVICE)
    host, _ = copier.to_host(x)
    back, ready = copier.to_device(host)
    copier.wait(ready)
    assert host.is_pinned() and torch.equal(back, x)
