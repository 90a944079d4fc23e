"""The learning rate by step, and AdamW's groups. Clipping needs ranks: see test_gradient_norm.py."""

import math

import pytest
import torch

from conf.compose import compose
from model.blocks import Blocks
from model.transformer import Transformer
from training.optimizer import build_optimizer, learning_rate


def rates(*overrides, steps=10):
    config = compose([f"train.steps={steps}", "optimizer.learning_rate=1.0", *overrides])
    return [learning_rate(step, config) for step in range(1, steps + 1)]


def test_cosine_by_hand():
    found = rates("optimizer.warmup_steps=4", "optimizer.final_learning_rate_ratio=0.1", steps=8)
    # Quarter turns of the cosine: (1 + cos(k·π/4))/2 between peak and floor.
    root = math.sqrt(2) / 4
    expected = [
        0.25,
        0.5,
        0.75,
        1.0,
        0.1 + 0.9 * (0.5 + root),
        0.1 + 0.9 * 0.5,
        0.1 + 0.9 * (0.5 - root),
        0.1,
    ]
    assert found == pytest.approx(expected, rel=1e-12)


def test_wsd_by_hand():
    found = rates(
        "optimizer.schedule=wsd", "optimizer.warmup_steps=2", "optimizer.decay_steps=4",
        "optimizer.final_learning_rate_ratio=0.0",
    )  # fmt: skip
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("warmup", [0, 1, 9, 10, 20])
def test_every_warm_up_stays_between_zero_and_the_peak(warmup):
    found = rates(f"optimizer.warmup_steps={warmup}")
    assert all(0 < rate <= 1 for rate in found)
    peak = found.index(max(found))
    assert found[:peak] == sorted(found[:peak]) and found[peak:] == sorted(found[peak:], reverse=True)


def test_depends_on_the_step_alone():
    """C090: a resumed run asks for steps 4 to 10 and gets what the uninterrupted one got, bit for bit."""
    config = compose(["train.steps=10", "optimizer.warmup_steps=4"])
    uninterrupted = [learning_rate(step, config) for step in range(1, 11)]
    again = compose(["train.steps=10", "optimizer.warmup_steps=4"])
    assert [learning_rate(step, again) for step in range(4, 11)] == uninterrupted[3:]
    assert learning_rate(50, config) == learning_rate(10, config)  # the floor stays


def test_groups_and_no_decay_on_vectors():
    config = compose(["optimizer.weight_decay=0.2", "model.qkv_bias=true", "model.qk_norm=true"])
    with torch.device("meta"):
        model = Transformer(config.model, attend=None, blocks=Blocks(1, 1))
    optimizer = build_optimizer(model, config.optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, bare = ([names[p] for p in group["params"]] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert all(name.endswith("bias") or "norm" in name for name in bare)
    assert not any(name.endswith("bias") or "norm" in name for name in decayed)
    assert sorted(decayed + bare) == sorted(names.values())
    assert optimizer.defaults["betas"] == (config.optimizer.beta1, config.optimizer.beta2)
