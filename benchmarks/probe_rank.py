"""The server of `benchmarks/probe.py`, and the rank that it forks for each process of a job.

The server reads jobs as lines of JSON and answers each with the exit codes of its ranks. It runs no tensor operation,
so it has one thread, and forking it is safe. A rank leaves its result in the job's folder.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

from benchmarks.probe import OUT_OF_MEMORY, Job
from conf.compose import compose
from conf.schema import TrainConfig, resolve
from data.loader import Batch, Loader
from model.transformer import Transformer
from parallel import ring
from parallel.apply import attend_over, build_model
from parallel.mesh import Mesh, build_mesh
from parallel.take import Take
from train import choose_kernel
from training import runtime
from training.loop import StepResult, train_step
from training.optimizer import build_optimizer

PR_SET_PDEATHSIG, PR_SET_THP_DISABLE = 1, 41
RATE = 1e-4  # learning rate: what is learnt does not matter
SMALL_WIDTH, SMALL_BLOCK, SHORT_LENGTH = 64, 16, 64  # of the first step: model width, tokens per block and per rank
LIBC = ctypes.CDLL(None, use_errno=True)


# --- the server


def serve() -> None:
    """Runs jobs until the caller closes the pipe."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints must not be taken for a reply
    gc.collect()
    gc.freeze()  # what is here is in all ranks' baselines: collecting would only copy its pages
    for line in sys.stdin:
        print(json.dumps(_run(Job(**json.loads(line)))), file=replies, flush=True)


def _run(job: Job) -> dict[str, Any]:
    """Forks the ranks, and waits for them; the first that fails ends all."""
    environment = _environment(job.ranks)
    ranks = {_fork(job, rank, environment): rank for rank in range(job.ranks)}
    deadline, exits = time.monotonic() + job.timeout_seconds, []
    timed_out = False
    with selectors.DefaultSelector() as caller:
        caller.register(sys.stdin, selectors.EVENT_READ)
        while ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                exits.append((ranks.pop(pid), os.waitstatus_to_exitcode(status)))
                if exits[-1][1]:
                    _kill(ranks, exits)
                continue
            timed_out = time.monotonic() > deadline
            # The caller has nothing to say meanwhile: what can be read is the end of the pipe.
            if timed_out or caller.select(0.01):
                _kill(ranks, exits)
    return {"exits": exits, "timed_out": timed_out}


def _kill(ranks: dict[int, int], exits: list[tuple[int, int]]) -> None:
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    for pid in list(ranks):
        _, status = os.waitpid(pid, 0)
        exits.append((ranks.pop(pid), os.waitstatus_to_exitcode(status)))


def _environment(ranks: int) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _fork(job: Job, rank: int, environment: dict[str, str]) -> int:
    server, pid = os.getpid(), os.fork()
    if pid:
        return pid
    code = 1
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(code)
        LIBC.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # a huge page would count whole where a part is used
        log = os.open(f"{job.folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log, stream.fileno())
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
        code = _result(job, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)  # an orderly end would wait for peers that are gone


# --- a rank


def _result(job: Job, rank: int) -> int:
    """Runs the rank's part and leaves its result; the exit code."""
    path, limit = Path(job.folder, f"rank{rank}"), resource.getrlimit(resource.RLIMIT_DATA)
    try:
        result, code = measure(job), 0
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_DATA, limit)  # there must be room to say what happened
        text = f"{type(error).__name__}: {error}"
        result, code = {"error": text, "refused": isinstance(error, ValueError)}, 1
        if not (job.budget_bytes and OUT_OF_MEMORY.search(text)):
            traceback.print_exc()
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").rename(path.with_suffix(".json"))
    return code


def measure(job: Job) -> dict[str, Any]:
    """This rank's peak, seconds and losses. Collective over all ranks."""
    config = compose(job.overrides)
    with runtime.session(config) as rank:
        degrees = resolve(config, rank.size)
        mesh = build_mesh(degrees, rank.device.type, config.timeouts.longest())
        kernel = choose_kernel(config, rank.device)
        small = _small(config)
        wire(small, mesh, rank, kernel, job.change).step()
        _give_back(config)
        if job.hold_states:  # a step on few tokens makes the optimizer's states
            parts = wire(_short(config), mesh, rank, kernel, job.change)
            parts.step()
            _give_back(config)
        baseline = Resident()
        if job.budget_bytes is not None:
            _limit(job.budget_bytes)
        if job.hold_states:
            parts = parts.on(config, job.documents)
        else:
            parts = wire(config, mesh, rank, kernel, job.change, job.documents)
        built = baseline.growth()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        seconds, losses = [], []
        for _ in range(job.steps):
            begun = time.perf_counter()
            losses.append(parts.step().loss)
            seconds.append(time.perf_counter() - begun)
        peak = baseline.growth("VmHWM")
    return {"peak_bytes": peak, "built_bytes": built, "step_seconds": seconds, "losses": losses}


class Resident:
    """Resident memory from here on, without pages of files."""

    def __init__(self):
        self.all, self.files = _status("VmRSS"), _status("RssFile")

    def growth(self, name: str = "VmRSS") -> int:
        """By how much the line `name` of /proc/self/status has grown, in bytes."""
        return _status(name) - self.all - (_status("RssFile") - self.files)


@dataclass
class Parts:
    """What a step needs, wired as in `train.py`."""

    config: TrainConfig
    mesh: Mesh
    rank: runtime.Rank
    model: Transformer
    optimizer: torch.optim.Optimizer
    batches: list[Batch]

    def step(self) -> StepResult:
        """One train step. Collective over all ranks."""
        parts = self.model, self.optimizer, self.batches, self.mesh, self.config, RATE, self.rank.device
        return train_step(*parts)

    def on(self, config: TrainConfig, documents: list[int] | None = None) -> "Parts":
        """The same model and states with the sequences of another config."""
        return replace(self, config=config, batches=make_batches(config, self.mesh, self.rank, documents))


def wire(
    config: TrainConfig,
    mesh: Mesh,
    rank: runtime.Rank,
    kernel: str,
    change: str,
    documents: list[int] | None = None,
) -> Parts:
    """Model, optimizer and batches of `config`. Collective over all ranks."""
    model = build_model(config, mesh, attend_over(mesh, kernel), rank.device)
    if change:
        _named(change)(model)
    optimizer = build_optimizer(model, config.optimizer)
    return Parts(config, mesh, rank, model, optimizer, make_batches(config, mesh, rank, documents))


def make_batches(config: TrainConfig, mesh: Mesh, rank: runtime.Rank, documents: list[int] | None) -> list[Batch]:
    """The micro-batches of one step, of made-up tokens; peers of the ring are then connected."""
    take = Take(config, mesh, rank.node_size, lambda message: None)
    ring.warm_up(mesh.ring.name, take.usual_route, rank.device)
    take.reserve(getattr(torch, config.train.dtype), rank.device)
    length = int(config.data.sequence_length)
    loader = Loader(
        Synthetic(documents or [length], length, config.model.vocab_size),
        take,
        micro_batch_size=config.train.micro_batch_size,
        accumulation=resolve(config, rank.size).accumulation,
        data_rank=mesh.data.rank,
        data_size=mesh.data.size,
        first_sequence=0,
        num_steps=1,
    )
    with loader:
        return next(loader)


class Synthetic:
    """Endless sequences that all have the same documents, and tokens that depend on sequence and index only."""

    def __init__(self, documents: list[int], sequence_length: int, vocab_size: int):
        if not 0 < sum(documents) <= sequence_length or min(documents) < 1:
            raise ValueError(f"documents of {sum(documents)} tokens do not fit a sequence of {sequence_length}")
        self.lengths, self.vocab_size = tuple(documents), vocab_size
        self.sequence_length, self.num_sequences = sequence_length, None
        self.ends = np.cumsum(documents)

    def documents(self, n: int) -> tuple[int, ...]:
        return self.lengths

    def labelled(self, n: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `data.stream.Sequences.labelled`."""
        index = np.arange(start, stop + 1, dtype=np.int64)
        line = _scrambled(index + n * int(self.ends[-1])) % self.vocab_size
        tokens, labels, index = line[:-1], line[1:].copy(), index[:-1]
        document = np.searchsorted(self.ends, index, side="right")
        labels[index + 1 == self.ends[document]] = -100
        starts = np.concatenate([[0], self.ends])[document]
        return tokens, labels, index - starts


def _scrambled(x: np.ndarray) -> np.ndarray:
    """A number for each of x, int64 below 2^31, without any order that a model could learn."""
    x = x.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x >> np.uint64(33)).astype(np.int64)


def _small(config: TrainConfig) -> TrainConfig:
    """The same kind of model with small sizes, so that what is kept by size is not kept for the real ones."""
    small = _short(config)
    model, tensor = small.model, small.parallel.tensor
    model.model_dim = SMALL_WIDTH
    model.ffn_dim = SMALL_WIDTH * tensor
    model.vocab_size = SMALL_WIDTH * tensor * model.vocab_multiple
    model.ffn_block_tokens = model.loss_block_tokens = SMALL_BLOCK
    return small


def _short(config: TrainConfig) -> TrainConfig:
    """The same model on few tokens."""
    short = deepcopy(config)
    short.data.sequence_length = SHORT_LENGTH * short.parallel.sequence * short.parallel.tensor
    short.train.global_batch_tokens = None
    return short


def _give_back(config: TrainConfig) -> None:
    """Frees what the first step has left, and has the libraries take what they will have anyway."""
    ring.BUFFERS.clear()
    gc.collect()
    _fill_library_buffers(config)
    gc.collect()
    LIBC.malloc_trim(0)


def _fill_library_buffers(config: TrainConfig) -> None:
    """Matrix products large enough that MKL's packing buffers, which it keeps, have their final size."""
    dtype = getattr(torch, config.train.dtype)
    a, b = torch.ones(1024, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    for left, right in ((a, b), (a.T, b), (a, b.T)):
        torch.addmm(a, left, right)


def _limit(budget_bytes: int) -> None:
    limit = _status("VmData") + budget_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def _named(change: str) -> Callable[[Transformer], None]:
    module, name = change.split(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    serve()
