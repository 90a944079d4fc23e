"""The training loop: batches in, weights, checkpoints and one line of metrics a step out."""

import contextlib
import functools
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from conf.schema import ReduceGradients, TrainConfig
from data.loader import Batch, Loader
from model.transformer import Transformer
from parallel.collectives import all_total, exchange_clock
from parallel.mesh import Mesh
from parallel.ring import num_grown, require_same_plan
from training.estimate import flops_per_sequence
from training.metrics import memory_bytes
from training.optimizer import clip_by_global_norm, learning_rate
from training.trainer import Leave, Progress, Trainer
from training.validation import Validation

FULL_COLLECTION_STEPS = 100  # between searches of everything for garbage; each step searches what is young


class Unstable(FloatingPointError):
    """The loss or the gradient is no longer a number, step after step; nothing was written over."""

    exit_code = 70
    agreed = True  # all ranks raise it


@dataclass(frozen=True)
class StepResult:
    """What one step reports, the same on all ranks; FLOPs are the whole step's, without recompute."""

    loss: float
    gradient_norm: float
    flops_causal: float
    flops_noncausal: float
    skipped: bool = False


def train_step(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    mesh: Mesh,
    config: TrainConfig,
    rate: float,
    device: torch.device,
    before: Callable[[int], None] = lambda number: None,
) -> StepResult:
    """One optimizer step over all micro-batches. Collective over all ranks.

    Every mean divides by the number of valid tokens of the whole step, over all ranks and micro-batches, so neither the
    layout nor the number of micro-batches changes what is computed. A step without any valid token changes nothing, nor
    does one whose loss or gradient norm is not finite on any rank: it is skipped, on all ranks.

    `before` is called with the number of each micro-batch before it begins.

    Raises:
        ValueError: where ranks that share a sequence have made different plans of it.
    """
    before(0)
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
    # Over all ranks, though those of a tensor axis have the same: none may take for finite what another does not.
    loss = all_total(accumulate(model, batches, tokens, config, device, before), mesh.world.group).item()
    loss /= mesh.tensor.size
    norm = clip_by_global_norm(model.parameters(), config.optimizer.clip_norm, mesh)
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite:
        update(optimizer, rate)
    else:
        optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, norm, *flops, skipped=not finite)


def accumulate(
    model: Transformer,
    batches: list[Batch],
    tokens: float,
    config: TrainConfig,
    device: torch.device,
    before: Callable[[int], None] = lambda number: None,
) -> torch.Tensor:
    """Adds up the gradients of all micro-batches; this rank's share of the loss, a float64 scalar on `device`.

    `tokens`: valid ones of the whole step, over all ranks. `before` is called with the number of each micro-batch but
    the first before it begins. Collective over all ranks.
    """
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for number, batch in enumerate(batches):
        if number:
            before(number)
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


def train(config: TrainConfig, progress: Progress, trainer: Trainer, loader: Loader, validate: Validation) -> Progress:
    """Takes all steps of `loader`, from `progress` on; the last of the run is `train.steps`. Collective over all ranks.

    `config` is that of the stage; `validate` measures its held-out documents.

    Raises:
        Stopped: where a rank was asked to stop, with a checkpoint of the last whole step where there was time.
        Unstable: where more than `train.max_skipped_steps` steps in a row were not finite.
        CheckpointError: where a checkpoint cannot be written.
    """
    mesh, device, grown = trainer.mesh, trainer.device, num_grown(trainer.mesh.ring.name)
    sequences, first = loader.sequences_per_step, progress.step + 1  # which makes buffers for this stage's lengths
    tokens = sequences * int(config.data.sequence_length)
    clock = _StepClock(trainer, loader)
    try:
        with _garbage_between_steps() as collect:
            if progress.owed is not None:
                trainer.metrics.log(progress.owed | trainer.validate(validate, progress))
                progress = replace(progress, owed=None)
            for number, batches in clock.watched(progress.step + 1):
                phase, rate = "first_step" if number == first else "step", learning_rate(number, config)
                before = functools.partial(trainer.before_micro_batch, phase, number)
                result = train_step(trainer.model, trainer.optimizer, batches, mesh, config, rate, device, before)
                progress = progress.after(tokens, sequences, result.skipped)
                row = {
                    "step": progress.step,
                    "tokens": progress.tokens,
                    "stage": progress.stage,
                    "sequence_length": int(config.data.sequence_length),
                    "loss": result.loss,
                    "learning_rate": rate,
                    "gradient_norm": result.gradient_norm,
                } | clock.read(tokens, result)
                if result.skipped:
                    row |= {"skipped": True, "skipped_steps": progress.skipped}
                last = progress.step == config.train.steps
                if last or _due(config.validation.every, progress.step):
                    progress = replace(progress, owed=row | {"time": time.time()})  # should ranks leave meanwhile
                    row |= trainer.validate(validate, progress)
                    progress = replace(progress, owed=None)
                trainer.metrics.log(row)
                if num_grown(mesh.ring.name) > grown:
                    grown = num_grown(mesh.ring.name)
                    trainer.metrics.say(
                        "ring     its buffers grew: these documents need more than sequences of one document each"
                    )
                if progress.skipped_in_a_row > config.train.max_skipped_steps:
                    raise Unstable(_unstable(config, progress, result))
                # Not while steps are skipped: should the weights be why, good checkpoints would give way to bad ones.
                if last or (trainer.save_is_due and not progress.skipped_in_a_row):
                    trainer.save(progress)
                if _due(config.logging.ranks_every, progress.step):
                    trainer.compare_ranks()
                collect(progress.step)
        trainer.commit()
    except Leave:
        trainer.leave(progress)
    except Unstable:
        trainer.commit()
        raise
    return progress


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _unstable(config: TrainConfig, progress: Progress, result: StepResult) -> str:
    many = f"{progress.skipped_in_a_row} steps in a row were skipped" if progress.skipped_in_a_row > 1 else "skipped"
    return (
        f"step {progress.step}: loss {result.loss}, gradient norm {result.gradient_norm}; {many} "
        f"(train.max_skipped_steps={config.train.max_skipped_steps}): lower optimizer.learning_rate, or set a smaller "
        "positive optimizer.clip_norm, then resume: the last checkpoint is from before them"
    )


@contextlib.contextmanager
def _garbage_between_steps() -> Iterator[Callable[[int], None]]:
    """Python searches for garbage when it is told to, with the number of a step; not when it likes, on each rank at
    another moment while the others wait."""
    gc.collect()
    gc.freeze()  # what is there by now stays
    gc.disable()

    def collect(step: int) -> None:
        gc.collect(2 if step % FULL_COLLECTION_STEPS == 0 else 1)

    try:
        yield collect
    finally:
        gc.enable()
        gc.unfreeze()


class _StepClock:
    """Seconds of a step by what they went into: for its row, and for comparing ranks."""

    def __init__(self, trainer: Trainer, loader: Loader):
        self.trainer, self.loader = trainer, loader
        self.begin, self.waited, self.saving = time.perf_counter(), loader.wait_seconds, 0.0

    def watched(self, first: int) -> Iterator[tuple[int, list[Batch]]]:
        """Each step's number and batches; its seconds begin when the step before it is done with."""
        for number in itertools.count(first):
            exchange_clock.read_and_reset()
            self.begin, self.waited = time.perf_counter(), self.loader.wait_seconds
            self.saving = self.trainer.watch.seconds["save"]
            self.trainer.watch.enter("data", number)
            batches = next(self.loader, None)
            if batches is None:
                return
            yield number, batches

    def read(self, tokens: int, result: StepResult) -> dict[str, Any]:
        """What a row says of the step that has just been done."""
        trainer = self.trainer
        committing = trainer.watch.seconds["save"] - self.saving  # of a save in the background: no part of the step
        seconds = time.perf_counter() - self.begin - committing
        exchange, data = exchange_clock.read_and_reset(), self.loader.wait_seconds - self.waited
        trainer.spend({"data": data, "exchange wait": exchange, "feed-forward": trainer.pace.read_and_reset()})
        peak = seconds * trainer.peak_flops * trainer.mesh.world.size
        row = {
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "mfu_causal": result.flops_causal / peak,
            "mfu_noncausal": result.flops_noncausal / peak,
            "exchange_wait_seconds": exchange,
            "data_wait_seconds": data,
            "memory_bytes": memory_bytes(trainer.device),
        }
        saving = trainer.saving_seconds()  # after the row before: a checkpoint follows the row of its step
        return row | ({"save_seconds": saving} if saving else {})
