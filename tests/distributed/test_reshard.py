"""A checkpoint of any layout goes on in any other: equal bits after the load, and the losses that follow.

Every pair of (gradient, tensor) in powers of two with a product of at most 8, and some with three ranks. One process
trains and saves; each layout loads that and saves it again; every other layout loads this. Few rows on many ranks leave
some without any. Pairs are float32 or float64, like the colours of a chessboard: each layout saves and loads both.
"""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from conf.compose import compose
from conf.schema import Degrees, resolve
from data.format import open_shard
from data.loader import Loader
from data.stream import Source, Stage, TokenStream
from parallel.apply import attend_over, build_model
from parallel.mesh import Mesh, build_mesh
from parallel.take import Take
from tests.harness import run_ranks
from tests.shards import write_documents
from training.checkpoint.checkpoints import Checkpoints
from training.loop import train_step
from training.optimizer import build_optimizer, learning_rate

POWERS = [(gradient, tensor) for tensor in (1, 2, 4, 8) for gradient in (1, 2, 4, 8) if gradient * tensor <= 8]
LAYOUTS = [*POWERS, (3, 1)]  # (gradient, tensor)
UNEVEN = [((3, 1), target) for target in ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2))]
UNEVEN += [(source, (3, 1)) for source in ((1, 1), (2, 1), (1, 2), (4, 1), (8, 1))]
PAIRS = [*itertools.product(POWERS, POWERS), *UNEVEN]
# Ranks, and which loads: what layouts save of the first ones is what the others load. Eight start once: they take long.
ROUNDS = [(2, 1, 0), (3, 1, 0), (4, 1, 0), (8, 1, 1), (4, 0, 1), (3, 0, 1), (2, 0, 1), (1, 1, 1)]
DTYPES = ("float64", "float32")
RELATIVE = {"float64": 1e-12, "float32": 1e-6}  # of a loss, in the three steps after the load

BEFORE, AFTER, SEQUENCES, LENGTH, VOCAB = 1, 3, 8, 13, 48
MODEL = {
    "model.vocab_size": VOCAB,
    "model.model_dim": 5,  # five rows: on three ranks 2, 2, 1; on four 2, 2, 1, 0 (C083)
    "model.num_layers": 1,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,  # divisible by every tensor axis
    "model.head_dim": 2,
    "model.ffn_dim": 16,
    "model.qk_norm": True,  # two values: most of eight ranks have none
    "model.qkv_bias": True,
    "data.sequence_length": LENGTH,
    "train.recompute": "none",
    "train.steps": BEFORE + AFTER,
    "train.global_batch_tokens": SEQUENCES * LENGTH,
    "optimizer.learning_rate": 1e-2,
    "optimizer.warmup_steps": 1,
    "checkpoint.keep": 0,
}


class Run:
    """One rank of a run."""

    def __init__(self, shard: Path, layout: tuple[int, int], dtype: str):
        gradient, tensor = layout
        sizes = {"data": 1, "sequence": 1, axis_of(layout): gradient, "tensor": tensor}
        options = MODEL | {f"parallel.{name}": size for name, size in sizes.items()}
        options |= {"train.dtype": dtype, "train.micro_batch_size": SEQUENCES // sizes["data"]}
        self.config = compose([f"{key}={value}" for key, value in options.items()])
        degrees = resolve(self.config, gradient * tensor)
        self.mesh = mesh_of(degrees)
        self.model = build_model(self.config, self.mesh, attend_over(self.mesh, "sdpa"), torch.device("cpu"))
        self.optimizer = build_optimizer(self.model, self.config.optimizer)
        stream = TokenStream([Source("documents", open_shard(shard), Fraction(1))], [Stage(LENGTH, None)], seed=3)
        loader = Loader(
            stream.stage(0),
            Take(self.config, self.mesh, say=lambda _: None),
            micro_batch_size=self.config.train.micro_batch_size,
            accumulation=degrees.accumulation,
            data_rank=self.mesh.data.rank,
            data_size=self.mesh.data.size,
            first_sequence=0,
            num_steps=self.config.train.steps,
            cost=lambda documents: float(sum(documents)),
        )
        self.batches = list(loader)  # of all steps
        self.places = {name: places(parameter.detach()) for name, parameter in self.model.named_parameters()}

    def train(self, first: int, last: int) -> list[float]:
        """The losses of the steps first to last, counted from 1."""
        losses, device = [], torch.device("cpu")
        for step in range(first, last + 1):
            rate, batches = learning_rate(step, self.config), self.batches[step - 1]
            losses.append(train_step(self.model, self.optimizer, batches, self.mesh, self.config, rate, device).loss)
        return losses

    def save(self, folder: Path) -> None:
        Checkpoints(folder, self.config, self.mesh).save(BEFORE, self.model, self.optimizer, {"tokens": 7})

    def resume(self, folder: Path) -> None:
        state = Checkpoints(folder, self.config, self.mesh).resume("auto", self.model, self.optimizer)
        assert (state["step"], state["tokens"]) == (BEFORE, 7)

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Weights and AdamW's state: the parameter's name, what it is of that, the tensor."""
        for name, parameter in self.model.named_parameters():
            for key, tensor in {"weight": parameter.detach(), **self.optimizer.state[parameter]}.items():
                yield name, key, tensor

    def everything(self) -> dict[str, np.ndarray]:
        """All of it, gathered from all ranks."""
        return {f"{name}/{key}": whole(tensor).numpy().copy() for name, key, tensor in self.tensors()}

    def forget(self) -> None:
        """Leaves nothing that could pass for loaded."""
        for _, _, tensor in self.tensors():
            local(tensor).fill_(float("nan"))

    def differing(self, saved: dict[str, np.ndarray]) -> list[str]:
        """What is not, bit for bit, this rank's part of `saved`, by name."""
        wrong = []
        for name, key, tensor in self.tensors():
            expected = saved[f"{name}/{key}"]
            if isinstance(tensor, DTensor):
                expected = expected.reshape(-1)[self.places[name]]
            if local(tensor).numpy().tobytes() != expected.tobytes():
                wrong.append(f"{name}/{key}")
        return wrong


@cache
def mesh_of(degrees: Degrees) -> Mesh:
    return build_mesh(degrees, "cpu")


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def places(parameter: DTensor) -> np.ndarray:
    """Where each element that this rank holds lies in the whole, as indices into all its elements; collective.

    Each shard is filled with marks, its number and its elements', and gathered: much faster than all values each time.
    """
    shard, mesh, size = 0, parameter.device_mesh, parameter.numel()
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            shard = shard * mesh.size(axis) + mesh.get_local_rank(axis)
    marks = torch.zeros_like(parameter, dtype=torch.int64)
    mine = marks.to_local()
    mine.copy_(torch.arange(mine.numel()).reshape(mine.shape) + shard * size)
    gathered = marks.full_tensor().flatten().numpy()
    (here,) = np.nonzero(gathered // size == shard)
    assert len(here) == mine.numel()
    return here[np.argsort(gathered[here])]


def axis_of(layout: tuple[int, int]) -> str:
    return "sequence" if LAYOUTS.index(layout) % 2 or layout == (3, 1) else "data"


def of_size(ranks: int) -> list[tuple[int, int]]:
    return [layout for layout in LAYOUTS if layout[0] * layout[1] == ranks]


def name_of(layout: tuple[int, int], dtype: str) -> str:
    return f"{layout[0]}x{layout[1]}-{dtype}"


def dtype_of(source: tuple[int, int], target: tuple[int, int]) -> str:
    return DTYPES[(LAYOUTS.index(source) + LAYOUTS.index(target)) % 2]


def train_and_save(folder: Path) -> dict[str, list[float]]:
    """One process of each dtype: trains, saves, and goes on; the losses that follow."""
    losses = {}
    for dtype in DTYPES:
        run = Run(folder / "shard", (1, 1), dtype)
        run.train(1, BEFORE)
        run.save(folder / name_of((1, 1), dtype))
        np.savez(folder / f"{dtype}.npz", **run.everything())
        losses[dtype] = run.train(BEFORE + 1, BEFORE + AFTER)
    return losses


def load_all(folder: Path, ranks: int, first: int, others: int):
    """What each load into the layouts of `ranks` ranks gives, by source, target and dtype: the names of tensors that
    are not as they were saved, and the losses that follow.

    `first`: what the one process has saved; it is saved again. `others`: what the layouts have saved again.
    """
    runs = {(layout, dtype): Run(folder / "shard", layout, dtype) for layout in of_size(ranks) for dtype in DTYPES}
    truth = {dtype: dict(np.load(folder / f"{dtype}.npz")) for dtype in DTYPES}
    found = {}

    def load(source: tuple[int, int], target: tuple[int, int], dtype: str) -> None:
        run = runs[target, dtype]
        run.forget()
        run.resume(folder / name_of(source, dtype))
        wrong = run.differing(truth[dtype])
        if source == (1, 1) != target:
            run.save(folder / name_of(target, dtype))
        go_on = dtype == dtype_of(source, target)
        found[source, target, dtype] = wrong, run.train(BEFORE + 1, BEFORE + AFTER) if go_on else []

    for source, target in PAIRS:  # from the one process come first
        if target in of_size(ranks) and (first if source == (1, 1) else others):
            for dtype in DTYPES if source == (1, 1) else [dtype_of(source, target)]:
                load(source, target, dtype)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The losses of the run that was saved, and what every rank found at each load."""
    folder, generator = tmp_path_factory.mktemp("reshard"), torch.Generator().manual_seed(5)
    documents = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in (90, 7, 33, 150, 300)]
    write_documents(folder, documents, VOCAB)
    [losses] = run_ranks(train_and_save, 1, folder)
    loaded = {}
    for ranks, first, others in ROUNDS:
        for rank, found in enumerate(run_ranks(load_all, ranks, folder, ranks, first, others, timeout=400)):
            loaded |= {(rank, *key): value for key, value in found.items()}
    return losses, loaded


def test_every_layout_is_loaded_into_every_other_bit_for_bit(results):
    """C083: weights and AdamW's state, on each rank; uneven shards, and ranks without a row."""
    _, loaded = results
    assert {key[1:3] for key in loaded} == set(PAIRS)
    assert {key: wrong for key, (wrong, _) in loaded.items() if wrong} == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_next_losses_are_those_of_the_run_that_was_saved(dtype, results):
    """C083: three steps after every load."""
    saved, loaded = results
    compared = {key: losses for key, (_, losses) in loaded.items() if key[3] == dtype and losses}
    assert {key[1:3] for key in compared} == {pair for pair in PAIRS if dtype_of(*pair) == dtype}
    for key, losses in compared.items():
        assert losses == pytest.approx(saved[dtype], rel=RELATIVE[dtype], abs=0), key
