"""Clipping by the true global norm: every element counted once, the same bits on every rank."""

import math

import pytest
import torch

from conf.compose import compose
from conf.schema import Degrees
from parallel.apply import build_model
from parallel.mesh import build_mesh
from tests.harness import run_ranks
from training.optimizer import clip_by_global_norm

DIVISIONS = [  # (data, sequence, tensor, shard)
    (1, 1, 1, 1),
    (1, 1, 2, 1),
    (1, 2, 1, 2),
    (2, 1, 1, 1),
    (1, 2, 2, 2),
    (2, 2, 1, 2),
    (2, 1, 2, 1),
    (4, 1, 1, 4),
]
# Widths that no axis divides evenly: shards of several sizes, and empty ones.
MODEL = [
    "model.model_dim=6",
    "model.num_layers=1",
    "model.head_dim=2",
    "model.ffn_dim=10",
    "data.vocab_size=14",
]


def build(division, *overrides):
    config = compose([*MODEL, "train.dtype=float64", "model.qk_norm=true", "model.qkv_bias=true", *overrides])
    mesh = build_mesh(Degrees(*division, accumulation=1), "cpu")
    return build_model(config, mesh, None, torch.device("cpu")), mesh


def clip(division, special, value, max_norm):
    """Norm, and all gradients: of norm 4 on the final norm's weight, `value` on `special`, zero elsewhere."""
    model, mesh = build(division)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        if name == "norm.weight":
            parameter.grad.to_local().fill_(4 / math.sqrt(6))  # 6 elements: norm 4
        if name == special:
            parameter.grad.to_local().fill_(value)
    norm = clip_by_global_norm(model.parameters(), max_norm, mesh)
    return norm, {name: parameter.grad.full_tensor().numpy() for name, parameter in model.named_parameters()}


CLIPS = {1.0: 1 / 5, 0.0: 1.0, 5.5: 1.0}  # the scale each max_norm leads to


def clip_all(cases, special, value):
    return [clip(division, special, value, max_norm) for division, max_norm in cases]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_whole_and_sharded_parameters_count_once(ranks):
    """C015: norm 4 in a parameter that every tensor rank holds, 3 in one that they share, make 5."""
    cases = [(division, bound) for division in DIVISIONS if math.prod(division[:3]) == ranks for bound in CLIPS]
    element = 3 / math.sqrt(14 * 6)
    for case in zip(cases, *run_ranks(clip_all, ranks, cases, "lm_head.weight", element), strict=True):
        (_, bound), *results = case
        norms = [norm for norm, _ in results]
        assert norms == [norms[0]] * ranks  # the same bits
        assert norms[0] == pytest.approx(5.0, rel=1e-14)
        for _, gradients in results:
            assert gradients["norm.weight"] == pytest.approx(4 / math.sqrt(6) * CLIPS[bound], rel=1e-14)
            assert gradients["lm_head.weight"] == pytest.approx(element * CLIPS[bound], rel=1e-14)


def one_bad_rank(division, bads):
    return [spoil(division, bad) for bad in bads]


def spoil(division, bad):
    model, mesh = build(division)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if mesh.world.rank == 1:
        model.lm_head.weight.grad.to_local()[0, 0] = bad
    norm = clip_by_global_norm(model.parameters(), 1.0, mesh)
    return norm, model.norm.weight.grad.full_tensor().tolist()


def test_a_number_lost_on_one_rank_is_seen_by_all():
    """C017: all ranks get the same answer and can decide alike; gradients are left as they are."""
    for results in run_ranks(one_bad_rank, 2, (1, 2, 1, 2), [math.inf, -math.inf, math.nan]):
        (plus, a), (minus, b), (lost, c) = results
        assert plus == minus == math.inf and math.isnan(lost)
        assert a == b == c == [1.0] * 6
