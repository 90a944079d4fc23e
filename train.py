"""Pretrains a transformer on very long sequences: the whole run, top to bottom.

    python train.py parallel.sequence=4 data.sequence_length=32K train.steps=200

Under torchrun or srun each process is one rank; started alone, this script starts the local processes it needs.
"""

import functools
import secrets
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from conf.schema import Degrees, TrainConfig, axes, load, longest_stage, resolve, settings, tokens_per_step
from data.loader import Loader
from data.stream import Sequences, Source, TokenStream
from model.kernels import capability, self_test
from parallel.apply import attend_over, build_model
from parallel.mesh import Mesh, build_mesh
from parallel.ring import KERNELS, warm_up
from parallel.take import Take
from training import estimate, rehearse, runtime
from training.agreement import agree, on_all_ranks, require_equal, together
from training.checkpoint.checkpoints import Checkpoints
from training.corpus import Corpus, Leg, held_out, legs, open_corpus, open_stream, require_disjoint, sequence_cost
from training.lock import locked
from training.loop import train
from training.memory import planned
from training.metrics import MetricsLog, peak_flops
from training.metrics_files import has_row
from training.optimizer import build_optimizer
from training.out_of_memory import report_out_of_memory
from training.save_clock import SaveClock
from training.trainer import Progress, Trainer
from training.validation import Validation
from training.watch import Watch


def run(config: TrainConfig) -> None:
    """One rank's part of the run. Collective over all ranks."""
    with runtime.session(config) as rank, ExitStack() as stack:
        degrees = axes(config, rank.size) if config.context else resolve(config, rank.size)
        require_equal(settings(config))  # first: ranks with other axes would wait for each other in other groups
        mesh = build_mesh(degrees, rank.device.type, config.timeouts.longest())
        kernel = together(lambda: choose_kernel(config, rank.device))
        corpus = together(lambda: open_corpus(config))
        agree(lambda: require_disjoint(corpus))
        stream = together(lambda: open_stream(config, corpus))
        require_equal(corpus.fingerprints | {"order of data": stream.fingerprint})

        folder = Path(config.run.dir, config.run.name)
        if not agree(lambda: stack.enter_context(locked(folder / "heartbeat" / "lock", "run.name"))):
            rank.say(f"warning: {folder} is on a file system without locks: see to it that no other run is in it")
        watch = stack.enter_context(Watch(folder / "heartbeat", rank, config, agree(lambda: secrets.token_hex(4))))
        checkpoints = Checkpoints(folder / "checkpoints", config, mesh)
        model = build_model(config, mesh, attend_over(mesh, kernel), rank.device)
        optimizer = build_optimizer(model, config.optimizer)
        saved = checkpoints.resume(config.run.resume, model, optimizer)
        progress = where_it_stands(saved, stream)
        if agree(lambda: has_row(folder, progress.step)):
            progress = replace(progress, owed=None)
        owing = progress.owed is not None  # the row of its last step
        if progress.step >= config.train.steps and not owing:
            rank.say(complete(config, progress))
            return
        place = progress.step, progress.stage, progress.sample
        ahead = together(lambda: legs(config, rank.size, *place, owing))
        changes = saved["warnings"] if saved else ()
        metrics = stack.enter_context(MetricsLog(config, rank.rank, progress.step - owing, changes))
        for remark in saved["remarks"] if saved else ():
            metrics.note(remark)  # said already
        saves = SaveClock(config, rank.size, estimate.checkpoint_seconds(config, rank.size), time.monotonic())
        metrics.say(banner(config, degrees, kernel, rank.device, progress, corpus, saves))
        sizes = on_all_ranks(lambda: rank.node_size)
        node_size = sizes[0] if len(set(sizes)) == 1 else 0
        takes = [Take(leg.config, mesh, node_size, metrics.say) for leg in ahead]  # all: refused now or never
        plan = functools.partial(plan_lines, ahead, takes)
        stack.enter_context(report_out_of_memory(config, folder, rank.rank, plan, watch.where))
        stack.enter_context(runtime.started())
        warm_up(mesh.ring.name, takes[0].usual_route, rank.device)
        flops = config.logging.peak_flops or peak_flops(rank.device, config.train.dtype)
        trainer = Trainer(
            mesh,
            model,
            optimizer,
            stream,
            checkpoints,
            metrics,
            watch,
            rank.stop,
            saves,
            flops,
            rank.device,
            first_step=progress.step + 1,
        )
        for leg, take in zip(ahead, takes, strict=True):
            model.use_rope(leg.config.model.rope_theta)
            metrics.say(leg_banner(leg, take))
            take.reserve(getattr(torch, config.train.dtype), rank.device)
            validate = Validation(held_out(leg.config, corpus), take, leg.config, mesh)
            with read_ahead(leg, stream.stage(leg.number), take, mesh) as loader:
                progress = train(leg.config, progress.entering(leg.number), trainer, loader, validate)
        trainer.close("done")


def read_ahead(leg: Leg, sequences: Sequences, take: Take, mesh: Mesh) -> Loader:
    """The batches of a leg, as this rank holds them."""
    return Loader(
        sequences,
        take,
        micro_batch_size=leg.config.train.micro_batch_size,
        accumulation=leg.degrees.accumulation,
        data_rank=mesh.data.rank,
        data_size=mesh.data.size,
        first_sequence=leg.sample,
        num_steps=leg.steps,
        cost=sequence_cost(leg.config),
    )


def choose_kernel(config: TrainConfig, device: torch.device) -> str:
    """The kernel of `parallel.kernel`, once it can do this model and agrees with the reference on this device."""
    model, dtype = config.model, config.train.dtype
    name = capability.choose(
        config.parallel.kernel, device.type, dtype, window=model.attention_window > 0, head_dim=model.head_dim
    )
    heads_per_group = model.num_heads // model.num_kv_heads
    self_test.check(KERNELS[name], getattr(torch, dtype), device, heads_per_group, model.head_dim)
    return name


def where_it_stands(saved: dict[str, Any] | None, stream: TokenStream) -> Progress:
    """The place that a checkpoint's state tells of, or the beginning."""
    if saved is None:
        return Progress()
    if missing := {"step", "tokens", "cursor", "skipped", "skipped_in_a_row", "owed"} - saved.keys():
        raise ValueError(f"{saved['path']} is of no run of ours: its state has no {', '.join(sorted(missing))}")
    stage, sample = stream.start(saved["cursor"])
    rest = (saved[name] for name in ("skipped", "skipped_in_a_row", "owed"))
    return Progress(saved["step"], saved["tokens"], stage, sample, *rest)


def banner(
    config: TrainConfig,
    degrees: Degrees,
    kernel: str,
    device: torch.device,
    progress: Progress,
    corpus: Corpus,
    saves: SaveClock,
) -> str:
    """What this run is, in a few lines, before its first step."""
    inside = f" (ulysses {degrees.ulysses} × ring)" if degrees.ulysses > 1 else ""
    doubt = ", which has no GPUs: name yours" if (device.type, config.cluster.name) == ("cuda", "laptop") else ""
    start = f"after step {progress.step}" if progress.step else "from the first weights"
    return "\n".join(
        [
            f"run      {config.run.dir}/{config.run.name}, {start}, to step {config.train.steps}",
            f"model    {config.model.name}: {estimate.num_parameters(config.model):,} parameters, {config.train.dtype}",
            f"ranks    {degrees.world} on {device.type} = data {degrees.data} × sequence {degrees.sequence}{inside} × "
            f"tensor {degrees.tensor}; states sharded over {degrees.shard}",
            f"ring     {config.parallel.layout} layout, {config.parallel.route} route, {kernel} kernel; "
            f"recompute {config.train.recompute}; auto reckons with cluster={config.cluster.name}{doubt}",
            f"tokens   {'; '.join(map(source_line, corpus.training))}; long documents {config.data.long}, short ones "
            f"{config.data.short}",
            f"saves    {saves.sentence()}",
        ]
    )


def source_line(source: Source) -> str:
    """One source of the run and its share."""
    share = f"{100 * float(source.share):.4g} % " if source.share != 1 else ""
    return f"{share}{source.name}, {source.tokens.num_tokens:,} in {source.tokens.num_documents:,} documents"


def leg_banner(leg: Leg, take: Take) -> str:
    """Steps and sequences of a leg, and what `plan.py` would say of this rank's memory, each sequence one document."""
    data, per_step = leg.config.data, tokens_per_step(leg.config, leg.degrees)
    stage = f"stage {leg.number}: " if leg.config.context else ""
    rope = f", rope_theta {leg.config.model.rope_theta:g}" if leg.config.context else ""
    needs = planned(leg.config, leg.degrees, take.setting, take.ring.rank)
    offloaded = f", {needs.host_bytes / 1e9:.2f} GB of its host" if needs.host_bytes else ""
    return "\n".join(
        [
            f"steps    {stage}{leg.steps} of {per_step:,} tokens, in sequences of {int(data.sequence_length):,}{rope}",
            f"memory   {needs.peak_bytes / 1e9:.2f} GB of a rank at its peak{offloaded}, planned: {needs.moment}",
        ]
    )


def plan_lines(ahead: list[Leg], takes: list[Take]) -> list[str]:
    """Bytes of this rank by cause, at the peak of each leg, as `plan.py` reckons."""
    lines = []
    for leg, take in zip(ahead, takes, strict=True):
        needs = planned(leg.config, leg.degrees, take.setting, take.ring.rank)
        lines.append(f"{needs.peak_bytes / 1e9:10.3f} GB  stage {leg.number}, at its peak: {needs.moment}")
        lines += [f"{size / 1e9:10.3f} GB  {cause}" for cause, size in needs.causes.items()]
    return lines


def complete(config: TrainConfig, progress: Progress) -> str:
    """What to say of a run that has nothing left to do."""
    more = " and stages for them" if config.context and config.context[-1].tokens is not None else ""
    return (
        f"{config.run.dir}/{config.run.name} is complete: step {progress.step} of train.steps={config.train.steps}. "
        f"Go on with train.steps={2 * progress.step}{more}, or start another run with run.name=NAME."
    )


def main(cfg: DictConfig) -> None:
    """Called with the config that Hydra composed of conf/train.yaml and the command line."""
    config = load(cfg)
    if config.run.rehearse is not None:
        print(rehearse.report(longest_stage(config)))
    else:
        runtime.launch(run, config)


if __name__ == "__main__":
    runtime.enter(main)
