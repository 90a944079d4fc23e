"""The training loop: batches in, weights, checkpoints and one line of metrics a step out."""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from conf.schema import ReduceGradients, TrainConfig
from data.loader import Batch, Loader
from data.stream import TokenStream
from model.transformer import Transformer
from parallel.collectives import all_total, exchange_clock
from parallel.mesh import Mesh
from parallel.ring import num_grown, require_same_plan
from training.checkpoint import Checkpoints
from training.estimate import flops_per_sequence
from training.metrics import MetricsLog, memory_bytes
from training.optimizer import clip_by_global_norm, learning_rate


class Unstable(FloatingPointError):
    """The loss or the gradient is no longer a number; nothing was written over."""

    exit_code = 70


@dataclass
class Progress:
    """Where a run stands after `step` steps; what a checkpoint keeps besides weights and optimizer."""

    step: int = 0
    tokens: int = 0
    stage: int = 0
    sample: int = 0  # sequences of this stage that are done

    def entering(self, stage: int) -> "Progress":
        """The same place, as the beginning of `stage` where that is another one."""
        return self if stage == self.stage else Progress(self.step, self.tokens, stage)


@dataclass(frozen=True)
class StepResult:
    """What one step reports, the same on all ranks; FLOPs are the whole step's, without recompute."""

    loss: float
    gradient_norm: float
    flops_causal: float
    flops_noncausal: float


def train_step(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    mesh: Mesh,
    config: TrainConfig,
    rate: float,
    device: torch.device,
) -> StepResult:
    """One optimizer step over all micro-batches. Collective over all ranks.

    Every mean divides by the number of valid tokens of the whole step, over all ranks and micro-batches, so neither the
    layout nor the number of micro-batches changes what is computed. A step without any valid token changes nothing.

    Raises:
        Unstable: before the weights are touched, where the loss or the gradient norm is not finite.
        ValueError: where ranks that share a sequence have made different plans of it.
    """
    plans = [plan for batch in batches for plan in batch.plan.values()]
    for axis in (mesh.sequence, mesh.tensor):
        require_same_plan(plans, axis.name, device)
    tokens, causal, noncausal = all_total(_counts(batches, config, device), mesh.gradient.group).tolist()
    flops = (
        causal / mesh.sequence.size,
        noncausal / mesh.sequence.size,
    )  # ranks of a ring counted the same sequences
    if not tokens:
        return StepResult(0.0, 0.0, *flops)
    loss = all_total(accumulate(model, batches, tokens, config, device), mesh.gradient.group).item()
    norm = clip_by_global_norm(model.parameters(), config.optimizer.clip_norm, mesh)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise Unstable(
            f"loss {loss}, gradient norm {norm}: lower optimizer.learning_rate, or set a smaller positive "
            "optimizer.clip_norm, then resume"
        )
    update(optimizer, rate)
    return StepResult(loss, norm, *flops)


def accumulate(
    model: Transformer, batches: list[Batch], tokens: float, config: TrainConfig, device: torch.device
) -> torch.Tensor:
    """Adds up the gradients of all micro-batches; this rank's share of the loss, a float64 scalar on `device`.

    `tokens`: valid ones of the whole step, over all ranks. Collective over all ranks.
    """
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last or config.parallel.reduce_gradients is ReduceGradients.each)
        local = batch.to(device)
        share = model(local.tokens, local.positions, local.plan, local.labels) / tokens
        share.backward()
        loss += share.detach().double()
    return loss


def update(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Changes the weights by the gradients, which it drops."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _counts(batches: list[Batch], config: TrainConfig, device: torch.device) -> torch.Tensor:
    """This rank's valid tokens, and the FLOPs of its sequences in both conventions; float64 [3], exact below 2^53."""
    length = int(config.data.sequence_length)
    flops = [flops_per_sequence(config.model, documents, length) for batch in batches for documents in batch.documents]
    causal, noncausal = (sum(column) for column in zip(*flops, strict=True))
    tokens = sum(batch.valid_tokens for batch in batches)
    return torch.tensor([tokens, causal, noncausal], dtype=torch.float64, device=device)


def train(
    config: TrainConfig,
    progress: Progress,
    *,
    mesh: Mesh,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    stream: TokenStream,
    loader: Loader,
    validate: Callable[[Transformer, torch.device], dict[str, float]],
    checkpoints: Checkpoints,
    metrics: MetricsLog,
    peak_flops: float,
    device: torch.device,
) -> Progress:
    """Takes all steps of `loader`, from `progress` on; the last of the run is `train.steps`. Collective over all ranks.

    `config` is that of the stage; `validate` gives what a line of metrics says of held-out documents.
    """
    steps, waited = config.train.steps, loader.wait_seconds
    exchange_clock.read_and_reset()
    grown, begin = num_grown(mesh.ring.name), time.perf_counter()
    for batches in loader:
        rate = learning_rate(progress.step + 1, config)
        result = train_step(model, optimizer, batches, mesh, config, rate, device)
        sequences = len(batches) * mesh.data.size * config.train.micro_batch_size
        tokens = sequences * int(config.data.sequence_length)
        progress = Progress(progress.step + 1, progress.tokens + tokens, progress.stage, progress.sample + sequences)
        seconds = time.perf_counter() - begin
        peak = seconds * peak_flops * mesh.world.size
        row: dict[str, Any] = {
            "step": progress.step,
            "tokens": progress.tokens,
            "stage": progress.stage,
            "sequence_length": int(config.data.sequence_length),
            "loss": result.loss,
            "learning_rate": rate,
            "gradient_norm": result.gradient_norm,
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "mfu_causal": result.flops_causal / peak,
            "mfu_noncausal": result.flops_noncausal / peak,
            "exchange_wait_seconds": exchange_clock.read_and_reset(),
            "data_wait_seconds": loader.wait_seconds - waited,
            "memory_bytes": memory_bytes(device),
        }
        last = progress.step == steps
        if _due(config.validation.every, progress.step, last):
            row |= validate(model, device)
        metrics.log(row)
        if num_grown(mesh.ring.name) > grown:
            grown = num_grown(mesh.ring.name)
            metrics.say("ring     its buffers grew: these documents need more than sequences of one document each")
        if _due(config.checkpoint.every, progress.step, last):
            state = dataclasses.asdict(progress) | {"cursor": stream.cursor(progress.stage, progress.sample)}
            checkpoints.save(progress.step, model, optimizer, state)
        exchange_clock.read_and_reset()
        begin, waited = time.perf_counter(), loader.wait_seconds
    return progress


def _due(every: int, step: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)
