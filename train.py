"""Pretrains a transformer on very long sequences: the whole run, top to bottom.

    python train.py parallel.sequence=4 data.sequence_length=32K train.steps=200

Under torchrun or srun each process is one rank; started alone, this script starts the local processes it needs.
"""

from contextlib import ExitStack
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch.optim import Optimizer

from conf.schema import Degrees, TrainConfig, axes, load, longest_stage, resolve, settings, tokens_per_step
from data.loader import Loader
from data.stream import Sequences, Source, TokenStream
from model.kernels import capability, self_test
from model.transformer import Transformer
from parallel.apply import attend_over, build_model
from parallel.mesh import Mesh, build_mesh
from parallel.ring import KERNELS, warm_up
from parallel.take import Take
from training import estimate, rehearse, runtime
from training.agreement import agree, on_all_ranks, require_equal, together
from training.checkpoint import Checkpoints
from training.corpus import Corpus, Leg, held_out, legs, open_corpus, open_stream, require_disjoint, sequence_cost
from training.loop import Progress, train
from training.memory import planned
from training.metrics import MetricsLog, peak_flops
from training.optimizer import build_optimizer
from training.validation import Validation


def run(config: TrainConfig) -> None:
    """One rank's part of the run. Collective over all ranks."""
    with runtime.session(config) as rank:
        degrees = axes(config, rank.size) if config.context else resolve(config, rank.size)
        require_equal(settings(config))  # first: ranks with other axes would wait for each other in other groups
        mesh = build_mesh(degrees, rank.device.type, config.run.timeout_seconds)
        kernel = together(lambda: choose_kernel(config, rank.device))
        corpus = together(lambda: open_corpus(config))
        agree(lambda: require_disjoint(corpus))
        stream = together(lambda: open_stream(config, corpus))
        require_equal(corpus.fingerprints | {"order of data": stream.fingerprint})

        checkpoints = Checkpoints(Path(config.run.dir, config.run.name, "checkpoints"), config, mesh)
        model = build_model(config, mesh, attend_over(mesh, kernel), rank.device)
        optimizer = build_optimizer(model, config.optimizer)
        progress = resume(config, checkpoints, model, optimizer, stream)
        if progress.step >= config.train.steps:
            rank.say(complete(config, progress))
            return
        ahead = together(lambda: legs(config, rank.size, progress.step, progress.stage, progress.sample))
        with MetricsLog(config, rank.rank, progress.step) as metrics, ExitStack() as stack:
            metrics.say(banner(config, degrees, kernel, rank.device, progress, corpus))
            sizes = on_all_ranks(lambda: rank.node_size)
            node_size = sizes[0] if len(set(sizes)) == 1 else 0
            takes = [Take(leg.config, mesh, node_size, metrics.say) for leg in ahead]  # all: refused now or never
            stack.enter_context(runtime.started())
            warm_up(mesh.ring.name, takes[0].usual_route, rank.device)
            flops = config.logging.peak_flops or peak_flops(rank.device, config.train.dtype)
            for leg, take in zip(ahead, takes, strict=True):
                model.use_rope(leg.config.model.rope_theta)
                metrics.say(leg_banner(leg, take))
                take.reserve(getattr(torch, config.train.dtype), rank.device)
                with read_ahead(leg, stream.stage(leg.number), take, mesh) as loader:
                    progress = train(
                        leg.config,
                        progress.entering(leg.number),
                        mesh=mesh,
                        model=model,
                        optimizer=optimizer,
                        stream=stream,
                        loader=loader,
                        validate=Validation(held_out(leg.config, corpus), take, leg.config, mesh),
                        checkpoints=checkpoints,
                        metrics=metrics,
                        peak_flops=flops,
                        device=rank.device,
                    )


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


def resume(
    config: TrainConfig, checkpoints: Checkpoints, model: Transformer, optimizer: Optimizer, stream: TokenStream
) -> Progress:
    """Loads what `run.resume` asks for into model and optimizer, and says where the run stands.

    Raises:
        ValueError: where that is no checkpoint, or another model's, or would write over newer ones of this run.
    """
    path = checkpoints.choose(config.run.resume)
    if path is None:
        checkpoints.seed(step=0)
        return Progress()
    state = checkpoints.load(path, model, optimizer)
    return Progress(state["step"], state["tokens"], *stream.start(state["cursor"]))


def banner(
    config: TrainConfig, degrees: Degrees, kernel: str, device: torch.device, progress: Progress, corpus: Corpus
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
