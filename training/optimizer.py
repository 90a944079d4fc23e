"""AdamW, its learning rate as a function of the step, and clipping by the true global gradient norm."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from conf.schema import OptimizerConfig, Schedule, TrainConfig
from model.kernels.tiles import accumulation_dtype
from parallel.collectives import all_total
from parallel.mesh import Mesh


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW over `model`'s parameters in two groups: weight decay on matrices, none on norms and
    biases.

    Source: arXiv:1711.05101. The loop sets each group's `lr` from `learning_rate` before every step.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
    )


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of `step`, counted from 1: nothing but the step has to be saved to go on from it.

    Warm-up rises linearly and reaches the peak at step `warmup_steps`; the floor is reached at `train.steps`
    and kept beyond. In between lies a half cosine (arXiv:1608.03983), or the peak and, over the last
    `decay_steps`, a line (arXiv:2404.06395 §4). An extended run follows the curve of its new number of steps.
    """
    options, steps = config.optimizer, config.train.steps
    assert step >= 1, step
    peak, ratio = options.learning_rate, options.final_learning_rate_ratio
    if step <= options.warmup_steps:
        return peak * step / options.warmup_steps
    span = options.decay_steps if options.schedule is Schedule.wsd else steps - options.warmup_steps
    progress = min(1.0, max(0.0, 1 - (steps - step) / span)) if span > 0 else 1.0
    share = 1 - progress if options.schedule is Schedule.wsd else (1 + math.cos(math.pi * progress)) / 2
    return peak * (ratio + (1 - ratio) * share)


@torch.no_grad()
def clip_by_global_norm(parameters: Iterable[nn.Parameter], max_norm: float, mesh: Mesh) -> float:
    """Scales gradients in place to a global norm of at most `max_norm`; returns the norm before that.

    Collective over `world`, one all-reduce of a scalar; every rank gets the same bits. Each element of a
    gradient is counted once, whoever holds copies of it. A parameter's norm is taken in float32 (float64 for
    float64 gradients), and their squares are summed in float64. `max_norm` 0 only measures. A norm that is
    not finite is returned as it is and leaves the gradients alone: what to do then is the caller's decision,
    and the same on all ranks.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=mesh.parameters.device_type)
    for gradient in gradients:
        if _counts_here(gradient, mesh):
            local = gradient.to_local()
            norm = torch.linalg.vector_norm(local, dtype=accumulation_dtype(local.dtype))
            total += norm.to(torch.float64).square()
    total = all_total(total, mesh.world.group)
    norm = math.sqrt(float(total)) if total >= 0 else math.nan
    if max_norm > 0 and max_norm < norm < math.inf:
        for gradient in gradients:
            gradient.to_local().mul_(max_norm / norm)
    return norm


def _counts_here(gradient: Tensor, mesh: Mesh) -> bool:
    """Whether this rank speaks for its shard of `gradient`: of several copies only the first counts."""
    assert gradient.device_mesh.size() == mesh.world.size, (gradient.device_mesh, mesh.world.size)
    assert not any(placement.is_partial() for placement in gradient.placements), gradient.placements
    coordinate = gradient.device_mesh.get_coordinate()
    return all(
        place == 0 for place, placement in zip(coordinate, gradient.placements, strict=True) if placement.is_replicate()
    )
