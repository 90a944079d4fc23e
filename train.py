"""Pretrains a transformer on very long sequences: the whole run, top to bottom.

    python train.py parallel.sequence=4 data.sequence_length=32K train.steps=200

Under torchrun or srun each process is one rank; started alone, this script starts the local processes it needs.
"""

from contextlib import ExitStack
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch.optim import Optimizer

from conf.schema import Degrees, TrainConfig, load, resolve, settings
from data.format import Shard, check_vocabulary, open_shard
from data.loader import Loader
from data.stream import TokenStream
from model.kernels import capability, self_test
from model.transformer import Transformer
from parallel.apply import attend_over, build_model
from parallel.mesh import build_mesh
from parallel.ring import KERNELS, warm_up
from parallel.take import Take
from training import estimate, rehearse, runtime
from training.agreement import on_all_ranks, require_equal, together
from training.checkpoint import Checkpoints
from training.loop import Progress, train
from training.memory import planned
from training.metrics import MetricsLog, peak_flops
from training.optimizer import build_optimizer
from training.validation import Validation


def run(config: TrainConfig) -> None:
    """One rank's part of the run. Collective over all ranks."""
    with runtime.session(config) as rank:
        degrees = resolve(config, rank.size)
        require_equal(settings(config))  # first: ranks with other axes would wait for each other in other groups
        mesh = build_mesh(degrees, rank.device.type, config.run.timeout_seconds)
        kernel = together(lambda: choose_kernel(config, rank.device))
        documents, held_out = together(lambda: open_corpus(config))
        stream = TokenStream(documents, int(config.data.sequence_length), seed=config.train.seed)
        require_equal({"training data": stream.fingerprint, "held-out data": held_out.fingerprint})

        checkpoints = Checkpoints(Path(config.run.dir, config.run.name, "checkpoints"), config, mesh)
        model = build_model(config, mesh, attend_over(mesh, kernel), rank.device)
        optimizer = build_optimizer(model, config.optimizer)
        progress = resume(config, checkpoints, model, optimizer, stream)
        if progress.step >= config.train.steps:
            rank.say(complete(config, progress))
            return
        with MetricsLog(config, rank.rank, progress.step) as metrics, ExitStack() as stack:
            metrics.say(banner(config, degrees, kernel, rank.device, progress))
            sizes = on_all_ranks(lambda: rank.node_size)
            take = Take(config, mesh, sizes[0] if len(set(sizes)) == 1 else 0, metrics.say)
            metrics.say(planned_memory(config, degrees, take))
            stack.enter_context(runtime.started())
            warm_up(mesh.ring.name, take.usual_route, rank.device)
            take.reserve(getattr(torch, config.train.dtype), rank.device)
            loader = Loader(
                stream,
                take,
                micro_batch_size=config.train.micro_batch_size,
                accumulation=degrees.accumulation,
                data_rank=mesh.data.rank,
                data_size=mesh.data.size,
                first_sequence=progress.sequences,
                num_steps=config.train.steps - progress.step,
            )
            validation = Validation(held_out, take, config, mesh)
            with loader:
                train(
                    config,
                    progress,
                    mesh=mesh,
                    model=model,
                    optimizer=optimizer,
                    stream=stream,
                    loader=loader,
                    validate=lambda: validation(model, rank.device),
                    checkpoints=checkpoints,
                    metrics=metrics,
                    peak_flops=config.logging.peak_flops or peak_flops(rank.device, config.train.dtype),
                    device=rank.device,
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


def open_corpus(config: TrainConfig) -> tuple[Shard, Shard]:
    """The prepared documents to train on, and those held out; both in the model's vocabulary."""
    corpus = Path(config.data.root, config.data.name)
    documents, held_out = open_shard(corpus / "train"), open_shard(corpus / "validation")
    check_vocabulary(documents, config.model.vocab_size)
    check_vocabulary(held_out, config.model.vocab_size)
    return documents, held_out


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
    return Progress(state["step"], state["tokens"], stream.start(state["cursor"]))


def banner(config: TrainConfig, degrees: Degrees, kernel: str, device: torch.device, progress: Progress) -> str:
    """What this run is, in a few lines, before its first step."""
    length = int(config.data.sequence_length)
    per_step = degrees.accumulation * degrees.data * config.train.micro_batch_size * length
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
            f"tokens   sequences of {length:,} from {config.data.root}/{config.data.name}; {per_step:,} a step",
        ]
    )


def planned_memory(config: TrainConfig, degrees: Degrees, take: Take) -> str:
    """What `plan.py` would say of this rank's memory, each sequence one document."""
    needs = planned(config, degrees, take.setting, take.ring.rank)
    offloaded = f", {needs.host_bytes / 1e9:.2f} GB of its host" if needs.host_bytes else ""
    return f"memory   {needs.peak_bytes / 1e9:.2f} GB of a rank at its peak{offloaded}, planned: {needs.moment}"


def complete(config: TrainConfig, progress: Progress) -> str:
    """What to say of a run that has nothing left to do."""
    return (
        f"{config.run.dir}/{config.run.name} is complete: step {progress.step} of train.steps={config.train.steps}. "
        f"Go on with train.steps={2 * progress.step}, or start another run with run.name=NAME."
    )


def main(cfg: DictConfig) -> None:
    """Called with the config that Hydra composed of conf/train.yaml and the command line."""
    config = load(cfg)
    if config.run.rehearse is not None:
        print(rehearse.report(config))
    else:
        runtime.launch(run, config)


if __name__ == "__main__":
    runtime.enter(main)
