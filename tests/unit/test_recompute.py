"""What layers keep for their backward under each policy, and what they compute again."""

import pytest
import torch

from conf.compose import compose
from conf.schema import Recompute
from model.blocks import Blocks
from model.mask import Mask
from model.rope import rope_angles
from model.transformer import Transformer
from parallel import ring
from parallel.apply import recompute
from parallel.schedule import plan
from training.tracker import Tracker

LENGTH, FFN_BLOCK, LOSS_BLOCK, VOCAB = 24, 10, 8, 40
OPTIONS = [
    "model.model_dim=32",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "model.ffn_dim=96",
    f"model.vocab_size={VOCAB}",
]
FFN_BLOCKS, LOSS_BLOCKS = 3, 3
POLICIES = list(Recompute)


def attend(q, k, v, tiles):
    return ring.attend(q, k, v, tiles, "", "sdpa")[0]


def model_of(policy, *more, num_layers=2, dtype=torch.float32, offload=None):
    config = compose([*OPTIONS, f"model.num_layers={num_layers}", *more]).model
    model = Transformer(config, attend, Blocks(FFN_BLOCK, LOSS_BLOCK)).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * spread if parameter.dim() == 1 else 0.2 * spread)
    recompute(model, policy, offload)
    return model


def plan_of():
    return {"full": torch.from_numpy(plan("contiguous", Mask(), [(LENGTH,)], LENGTH, LENGTH, 1, 0))}


def loss_of(model):
    tokens = torch.arange(LENGTH)[None] * 7 % VOCAB
    return model(tokens, torch.arange(LENGTH)[None], plan_of(), (tokens + 1) % VOCAB)


def layers_of(model):
    """The output of the layers alone: unlike the loss's, its backward can be taken twice."""
    x = torch.randn(1, LENGTH, 32, generator=torch.Generator().manual_seed(1))
    angles = rope_angles(torch.arange(LENGTH)[None], 8, 1e4, torch.float32)
    for layer in model.layers:
        x = layer(x, angles, plan_of())
    return x


def gradients_of(model):
    loss = loss_of(model)
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("policy", [Recompute.block, Recompute.full])
def test_results_do_not_depend_on_the_policy(policy):
    """Bit for bit: what is computed again is computed by the same operations."""
    (loss, grads), (want, truths) = gradients_of(model_of(policy)), gradients_of(model_of(Recompute.none))
    assert torch.equal(loss, want)
    assert all(torch.equal(grad, truth) for grad, truth in zip(grads, truths, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_computed_once_too_often(policy):
    """The feed-forward's backward computes its intermediates again under each policy, and its forward runs once; what
    attention exchanged is computed again under `full` only, and the projections around it under both others."""
    layers, again = 2, policy is not Recompute.none
    model = model_of(policy, num_layers=layers)
    with Tracker() as tracker:
        gradients_of(model)
    forward = {"mm": 3, "silu_": 1}
    backward = {"mm": 4, "addmm_": 4, "silu": 1, "silu_": 1, "silu_backward": 1}
    want = {name: layers * FFN_BLOCKS * (forward.get(name, 0) + backward.get(name, 0)) for name in forward | backward}
    want["mm"] += layers * (12 + 4 * again)  # attention's four projections
    want["mm"] += 2 * LOSS_BLOCKS  # logits and the gradient of hidden states
    want["addmm_"] += LOSS_BLOCKS
    want |= {"attend": layers * (1 + (policy is Recompute.full)), "attend_backward": layers}
    assert {name: tracker.calls[name] for name in want} == want


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_keeps_what_the_policy_says(policy, dtype, qk_norm):
    """Bytes of one layer more, after forward; to the byte."""

    def kept(num_layers):
        model = model_of(policy, f"model.qk_norm={qk_norm}", num_layers=num_layers, dtype=dtype)
        with Tracker() as tracker:
            loss = loss_of(model)
            live = tracker.live_bytes
        del loss
        return live

    width, queries, keys, heads, wide = 32, 32, 16, 4, max(4, dtype.itemsize)
    lists = {
        # The residual stream before attention and before the feed-forward, both normalised; q, k, v, out.
        Recompute.none: (4 * width + 2 * queries + 2 * keys + qk_norm * (queries + keys), heads + 2 + qk_norm * 6),
        Recompute.block: (width + queries, heads),  # the layer's input, and attention's out and lse
        Recompute.full: (width, 0),
    }
    elements, wide_numbers = lists[policy]  # for each token
    assert kept(3) - kept(2) == LENGTH * (elements * dtype.itemsize + wide_numbers * wide)
