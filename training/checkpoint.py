"""Checkpoints: weights, AdamW's state, every rank's random state; whole or not at all, for any layout.

    checkpoints/step_00000040/
      __0_0.distcp …   tensors, one file per rank, in the format of torch.distributed.checkpoint (DCP)
      .metadata        where each tensor's pieces lie
      manifest.json    written last: state of the run, config, layout, every file's size and SHA-256

A checkpoint is written into `step_N.tmp`, fsynced and renamed; only then are older ones removed. It holds
tensors and JSON, never pickled objects; DCP's `.metadata` is a pickle, and is read by an unpickler that knows
DCP's classes only. What DCP would let pass in silence is refused here: flipped bytes, other dtypes, names
that one side lacks.
"""

import hashlib
import pickle
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from conf.schema import TrainConfig
from parallel.mesh import Mesh
from training.agreement import agree, on_all_ranks
from training.checkpoint_files import (
    FORMAT,
    CheckpointError,
    commit,
    damaged_file,
    describe,
    finished,
    make_empty,
    manifest_of,
    quick_problem,
)

FREE_MODEL_KEYS = (
    "name",
    "init_std",
    "ffn_block_tokens",
    "loss_block_tokens",
    "z_loss",
    "vocab_multiple",  # where it changes a tensor's size, that is refused
)  # may differ from the checkpoint's


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run, in `folder`. Methods are collective over `world` and raise on all ranks."""

    folder: Path
    config: TrainConfig
    mesh: Mesh
    _checked: set[Path] = field(default_factory=set, init=False)  # found whole once: not read again

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Path:
        """Writes the checkpoint of `step`, then removes all but the newest `checkpoint.keep` whole ones.

        `state` is what else the run needs to go on, as JSON: tokens seen, the data cursor. A folder of that
        step that is already there is moved aside, never overwritten.

        Raises:
            CheckpointError: where writing fails on any rank; earlier checkpoints are untouched.
        """
        path = self.folder / f"step_{step:08d}"
        partial = path.with_name(path.name + ".tmp")
        agree(lambda: make_empty(partial))
        tensors = {**_tensors(model, optimizer), **self._random_states()}
        with _as_one_error(f"cannot write {path}"):
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial), process_group=self.mesh.world.group)
        described = on_all_ranks(lambda: describe(partial, self.mesh.world.rank))
        manifest = {
            "format": FORMAT,
            "step": step,
            "state": {"step": step, **state},
            "layout": self._layout(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "config": asdict(self.config),
            "files": {name: entry for part in described for name, entry in part.items()},
        }
        agree(lambda: commit(partial, path, manifest, self.config.checkpoint.keep))
        return path

    def newest(self) -> Path | None:
        """The newest whole checkpoint, every byte of it checked; None where none was ever finished.

        Rank 0 says which newer ones were skipped and why. Ranks share the reading. Nothing is deleted.

        Raises:
            CheckpointError: where there are checkpoints but none is whole: no run starts over in silence.
        """
        skipped = []
        for path in reversed(agree(lambda: finished(self.folder))):
            if (problem := self._problem(path)) is None:
                return path
            skipped.append(f"{path.name}: {problem}")
            if self.mesh.world.rank == 0:
                print(f"warning: skipped checkpoint {path}: {problem}", file=sys.stderr, flush=True)
        if skipped:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole ({'; '.join(skipped)}): restore one of them, or "
                "start anew with another run.name"
            )
        return None

    def choose(self, wish: str) -> Path | None:
        """The checkpoint to start from for `run.resume=wish`: auto, never, or a path; None to start anew.

        A run that began at another run's checkpoint goes on from its own once it has any, and says so.

        Raises:
            ValueError: where `wish` is none of the three, or going that way would write over newer checkpoints.
        """
        newest = self.newest()
        if wish == "auto":
            return newest
        path = None if wish == "never" else Path(wish)
        if path is not None:
            agree(lambda: manifest_of(path))
        if newest is None:
            return path
        if path is not None and path.resolve().parent != newest.resolve().parent:
            if self.mesh.world.rank == 0:
                print(f"this run began at {path}, and goes on from its own {newest}", flush=True)
            return newest
        if path is None or path.resolve() != newest.resolve():
            raise ValueError(f"run.resume={wish} would write over {newest}: use run.resume=auto, or another run.name")
        return path

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Loads the checkpoint at `path`, of any layout, into `model` and `optimizer`; returns its state.

        At the same number of ranks each rank's random state is restored; at another, each rank is seeded anew
        from (train.seed, step, rank).

        Raises:
            ValueError: where there is none, or it is another model's, naming keys or tensors and both values.
            CheckpointError: where it is damaged or cannot be read.
        """
        manifest = agree(lambda: self._manifest(path))
        if (problem := self._problem(path)) is not None:
            raise CheckpointError(f"checkpoint {path} is damaged: {problem}")
        reader, tensors = _Reader(path), _tensors(model, optimizer)
        saved = agree(lambda: _fitting(reader.saved_tensors(manifest["files"]), tensors, path))
        random = {key: value for key, value in self._random_states().items() if key in saved}
        if manifest["layout"]["ranks"] != self.mesh.world.size:
            random = {}
        with _as_one_error(f"cannot read {path}"):
            dcp.load({**tensors, **random}, storage_reader=reader, process_group=self.mesh.world.group)
        self.seed(manifest["step"])
        for key, value in random.items():
            (torch.cuda if key.startswith("random.cuda.") else torch).set_rng_state(value)
        return manifest["state"]

    def seed(self, step: int) -> None:
        """Seeds this rank's random numbers from (train.seed, step, rank): where a run starts, or changes its ranks."""
        digest = hashlib.sha256(f"{self.config.train.seed} {step} {self.mesh.world.rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:7], "little"))

    def _manifest(self, path: Path) -> dict[str, Any]:
        manifest = manifest_of(path)
        _check_model(manifest["config"]["model"], asdict(self.config.model), path)
        return manifest

    def _layout(self) -> dict[str, int]:
        mesh = self.mesh
        axes = {"data": mesh.data.size, "sequence": mesh.sequence.size, "tensor": mesh.tensor.size}
        return {"ranks": mesh.world.size, **axes, "shard": mesh.parameters["shard"].size()}

    def _random_states(self) -> dict[str, Tensor]:
        """This rank's random states by the key they are saved under: every rank has its own."""
        rank = self.mesh.world.rank
        states = {f"random.cpu.{rank}": torch.get_rng_state()}
        if self.mesh.parameters.device_type == "cuda":
            states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
        return states

    def _problem(self, path: Path) -> str | None:
        """Why the checkpoint at `path` is not whole, or None. Every file is read by one of the ranks."""
        if path in self._checked:
            return None
        problem = agree(lambda: quick_problem(path))
        if problem is not None:
            return problem
        world = self.mesh.world
        found = on_all_ranks(lambda: damaged_file(path, world.rank, world.size))
        problem = next((problem for problem in found if problem is not None), None)
        if problem is None:
            self._checked.add(path)
        return problem


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of a run by its name in a checkpoint: parameters, all the state a model has, and AdamW's.

    State that the optimizer has not made yet is made here, with the values it would start from.
    """
    tensors = {}
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        assert id(parameter) in trained, f"{name} is frozen, or its shards are gathered just now"
        value = parameter.detach()
        tensors[f"model.{name}"] = value
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=value.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(value), torch.zeros_like(value)
        tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in state.items()}
    return tensors


def _check_model(saved: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    for key, value in wanted.items():
        if key not in FREE_MODEL_KEYS and key in saved and saved[key] != value:
            raise ValueError(
                f"model.{key}={value}, but {path} is of a model with {key}={saved[key]}: use "
                f"model.{key}={saved[key]}, or another run.name"
            )


def _fitting(saved: dict[str, str], tensors: dict[str, Tensor], path: Path) -> dict[str, str]:
    """`saved`, which describes each tensor by name; refused where they are not exactly those wanted."""
    trained = {name: description for name, description in saved.items() if not name.startswith("random.")}
    wanted = {name: _description(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    differences = [
        f"{name}: {trained.get(name, 'missing')} in the checkpoint, {wanted.get(name, 'unknown')} in the run"
        for name in sorted(trained.keys() | wanted.keys())
        if trained.get(name) != wanted.get(name)
    ]
    if differences:
        more = f"; and {len(differences) - 10} more" if len(differences) > 10 else ""
        raise ValueError(f"{path} does not fit this run: {'; '.join(differences[:10])}{more}")
    return saved


def _description(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


class _Reader(dcp.FileSystemReader):
    """DCP's reader, but reading `.metadata` runs no code, and no other file stands in where that fails."""

    def read_metadata(self) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            return _MetadataUnpickler(file).load()

    def saved_tensors(self, files: dict[str, Any]) -> dict[str, str]:
        """Description of every tensor by name; refuses what is no tensor, or in no file of the manifest."""
        try:
            metadata = self.read_metadata()
            entries = metadata.state_dict_metadata.items()
            outside = {info.relative_path for info in metadata.storage_data.values()} - files.keys()
            objects = [name for name, entry in entries if not isinstance(entry, TensorStorageMetadata)]
        except Exception as error:
            raise CheckpointError(f"{self.path}/.metadata cannot be read: {error}") from None
        if outside or objects:
            raise CheckpointError(f"{self.path}/.metadata names what no checkpoint of ours holds: {outside or objects}")
        return {name: _description(entry.size, entry.properties.dtype) for name, entry in entries}


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the plain records of DCP's metadata, none of which can run code, and nothing else."""

    RECORDS = {
        "torch.distributed.checkpoint.metadata": {
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size"},
        "pathlib": {"PosixPath"},
        "pathlib._local": {"PosixPath"},  # its name since Python 3.13
    }

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in self.RECORDS.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of a checkpoint")
        return super().find_class(module, name)


@contextmanager
def _as_one_error(what: str) -> Iterator[None]:
    """DCP raises a BaseException that lists tracebacks of all failed ranks; ours is one line on each."""
    try:
        yield
    except CheckpointException as failure:
        rank, (cause, _) = min(failure.failures.items())
        raise CheckpointError(f"{what}: rank {rank}: {type(cause).__name__}: {cause}") from failure
