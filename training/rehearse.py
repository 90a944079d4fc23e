"""Rehearsal: one rank of many runs alone, with nobody at the other end of its exchanges.

`python train.py run.rehearse=256:17 …` builds what rank 17 of 256 would build, and takes two steps with it. On a GPU
kernels and memory are real. Without one, tensors have shapes but no numbers, so an 8B model at a million tokens takes
seconds and some hundred megabytes: bytes are counted as tensors come and go (`training.tracker`), and what kernels take
inside of one operation is added from `model.kernels.scratch`.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from conf.schema import Degrees, TrainConfig, resolve
from data.loader import Batch
from model.kernels import capability
from parallel import ring
from parallel.apply import attend_over, initialise, lay_out
from parallel.mesh import build_mesh
from parallel.offload import Offload
from parallel.setting import whole
from parallel.take import Take
from training import runtime
from training.loop import accumulate, update
from training.memory import Memory, planned
from training.optimizer import build_optimizer, clip_by_global_norm
from training.tracker import Tracker

ops = torch.ops.longhaul
STEPS = 2  # optimizer states come with the first: the second one is what later ones are like


@dataclass(frozen=True)
class Rehearsal:
    """What one rank took, in bytes and in seconds of this machine.

    Attributes:
        plan: what `training.memory` expected.
        moments: bytes alive after each part of the second step, in order.
        at_peak: the largest of what was alive at the peak: bytes and a description. Empty on a GPU.
    """

    rank: int
    degrees: Degrees
    plan: Memory
    device: str
    peak_bytes: int
    moments: dict[str, int]
    at_peak: list[tuple[int, str]]
    step_seconds: list[float]


def report(config: TrainConfig) -> str:
    """What to say of the rehearsal that `run.rehearse` asks for, next to what was planned."""
    rehearsal = rehearse(config)
    degrees, plan = rehearsal.degrees, rehearsal.plan
    cluster, tensors = config.cluster, "tensors without numbers" if rehearsal.device == "cpu" else "a GPU"
    seconds = ", ".join(f"{seconds:.1f}" for seconds in rehearsal.step_seconds)
    gb = lambda size: f"{size / 1e9:9.3f} GB"  # noqa: E731
    lines = [
        f"rehearsed  rank {rehearsal.rank} of {degrees.world} = data {degrees.data} × sequence {degrees.sequence} × "
        f"tensor {degrees.tensor}, alone, on {tensors}: {STEPS} steps in {seconds} s",
        f"peak       {gb(rehearsal.peak_bytes)} of tensors; planned {gb(plan.peak_bytes).strip()} ({plan.moment})",
        f"a rank has {gb(cluster.memory_bytes)} (cluster={cluster.name}), {gb(cluster.runtime_bytes).strip()} of them "
        "taken before the first tensor",
        *(f"{gb(size)}  {moment}" for moment, size in rehearsal.moments.items()),
    ]
    if rehearsal.at_peak:
        lines.append("alive at the peak:")
        lines += [f"{gb(size)}  {made}" for size, made in rehearsal.at_peak[:12]]
    return "\n".join(lines)


def parse(text: str) -> tuple[int, int]:
    """(number of ranks, rank) of `run.rehearse`."""
    size, colon, rank = text.partition(":")
    if not (colon and size.isdecimal() and rank.isdecimal()) or not int(rank) < int(size):
        raise ValueError(
            f"run.rehearse={text} should be RANKS:RANK, the rank from 0 to RANKS - 1: write it like 256:17"
        )
    return int(size), int(rank)


def rehearse(config: TrainConfig, pool_times: int = 1) -> Rehearsal:
    """Two steps as the rank that `run.rehearse` names, each sequence one document: of all corpora the most work.

    `pool_times`: as large a pool for the ring again and again, to see that it is counted.

    Raises:
        ValueError: for what such a run would refuse.
    """
    size, rank = parse(str(config.run.rehearse))
    degrees = resolve(config, size)
    with runtime.alone(rank, size) as device, _own_pool():
        mesh = build_mesh(degrees, device.type, config.timeouts.longest())
        kernel = capability.choose(
            config.parallel.kernel,
            device.type,
            config.train.dtype,
            window=config.model.attention_window > 0,
            head_dim=config.model.head_dim,
        )
        take = Take(config, mesh, min(size, config.cluster.node_gpus), lambda _: None)
        take(whole(config))  # plans are real, made here once: the host reads them
        plan = planned(config, degrees, take.setting, take.ring.rank)
        meter = _Real(device) if device.type == "cuda" else _Fake(plan.kernel_bytes)
        offload = Offload(meter.copier) if config.train.offload and meter.copier else None
        model = lay_out(config, mesh, attend_over(mesh, kernel), device, offload)
        with meter:
            model.to_empty(device=device)
            if device.type == "cuda":
                initialise(model, config.train.seed)
            optimizer = build_optimizer(model, config.optimizer)
            take.reserve(getattr(torch, config.train.dtype), device, pool_times)
            moments, seconds = {}, []
            for step in range(STEPS):
                moments, begin = {}, time.perf_counter()
                batches = _batches(config, degrees, take)
                meter.begin(last=step == STEPS - 1)
                moments["before"] = meter.live_bytes
                accumulate(model, batches, 1.0, config, device)
                moments["after backward"] = meter.live_bytes
                clip_by_global_norm(model.parameters(), config.optimizer.clip_norm, mesh)
                update(optimizer, config.optimizer.learning_rate)
                moments["after the update"] = meter.live_bytes
                seconds.append(time.perf_counter() - begin)
            return Rehearsal(rank, degrees, plan, device.type, meter.peak_bytes, moments, meter.largest(), seconds)


@contextlib.contextmanager
def _own_pool() -> Iterator[None]:
    """The pool of a ring is gone afterwards: what comes next would find storages without memory."""
    try:
        yield
    finally:
        ring.BUFFERS.clear()


def _batches(config: TrainConfig, degrees: Degrees, take: Take) -> list[Batch]:
    """Micro-batches of one step; no more than two, after which nothing changes any more."""
    documents = whole(config)
    chunks, plan = take(documents)
    shape = (len(documents), sum(chunk.count for chunk in chunks[0]))
    empty = lambda: torch.zeros(shape, dtype=torch.int64)  # noqa: E731
    valid = shape[0] * shape[1]
    return [Batch(empty(), empty(), empty(), plan, valid, list(documents)) for _ in range(min(2, degrees.accumulation))]


class _Fake:
    """Fake tensors, counted."""

    def __init__(self, kernel_bytes: tuple[int, int]) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)  # as plans are
        self.fake.cache_enabled = False
        self.tracker = Tracker(self.fake)
        self.copier = _Elsewhere(self.tracker)
        for operation, size in zip((ops.attend.default, ops.attend_backward.default), kernel_bytes, strict=True):
            self.tracker.inside[operation] = size

    def __enter__(self) -> None:
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(self.fake)
        self.stack.enter_context(self.tracker)

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def begin(self, last: bool) -> None:
        self.tracker.peak_bytes, self.tracker.watch = 0, last

    @property
    def live_bytes(self) -> int:
        return self.tracker.live_bytes

    @property
    def peak_bytes(self) -> int:
        return self.tracker.peak_bytes

    def largest(self) -> list[tuple[int, str]]:
        """All that was alive at the peak, by what made it, the largest first."""
        return [
            (size, f"{made.removeprefix('aten.').removesuffix('.default')} {dtype}{list(shape)}")
            for (made, dtype, shape), size in self.tracker.at_peak.most_common()
        ]


class _Elsewhere:
    """How fake tensors reach a host's memory: their bytes no longer count. See `parallel.offload.Copier`."""

    def __init__(self, tracker: Tracker):
        self.tracker = tracker

    def to_host(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.tracker.paused = True
        try:
            return torch.empty_like(x), None
        finally:
            self.tracker.paused = False

    def to_device(self, host: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty_like(host), None

    def wait(self, event: None) -> None:
        pass


class _Real:
    """A GPU's own count."""

    copier = None  # the device's own

    def __init__(self, device: torch.device):
        self.device = device

    def __enter__(self) -> None:
        torch.cuda.empty_cache()

    def __exit__(self, *error: object) -> None:
        pass

    def begin(self, last: bool) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def live_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def largest(self) -> list[tuple[int, str]]:
        return []
