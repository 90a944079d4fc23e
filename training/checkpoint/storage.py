"""Between the plans of torch.distributed.checkpoint (DCP) and our files: what each rank writes, and reads.

DCP plans which rank writes which piece of a tensor, each once, and which pieces a rank needs of what was saved at any
other layout; it moves no bytes here. No collective runs in these classes but in DCP's own calls of them.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from training.checkpoint.blocks import BLOCK_BYTES, Sums, cut, read_blocks, write_file
from training.checkpoint.files import CheckpointError, part_name
from training.checkpoint.index import DTYPE_BYTES, Entry, Index, Piece
from training.checkpoint.memory import HostMemory, Placed, Wanted, bytes_of

ALIGN_BYTES = 64  # of a piece in its file
DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


class Planner(DefaultSavePlanner):
    """DCP's, of a state dict {"tensors": tensors by name}: DCP does costly things for each of the outer names."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict["tensors"], storage_meta, is_coordinator)


class Writer(StorageWriter):
    """One save's: writes this rank's pieces into one file of `partial`, or has that done from a copy of them.

    Attributes:
        work: writes the file, and returns its sums by its name; to be called once, after `write_data`, in any thread.
        plan: what DCP has planned for this rank; tensors: on rank 0, after dcp.save, all tensors by name.
        num_bytes: of this rank's file; seconds: that writing it took.
    """

    def __init__(self, partial: Path, rank: int, memory: HostMemory | None) -> None:
        self._partial, self._name, self._memory = partial, part_name(rank), memory
        self.work: Callable[[], dict[str, Sums]] = dict
        self.plan = SavePlan([])
        self.tensors: dict[str, Entry] = {}
        self.num_bytes, self.seconds = 0, 0.0

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Places the pieces; without `memory` writes them, straight from the tensors."""
        self.plan = plan
        placed, results = [], []
        for item in plan.items:
            tensor = planner.resolve_data(item).detach()
            if not tensor.numel():
                continue
            position = -(-self.num_bytes // ALIGN_BYTES) * ALIGN_BYTES
            placed.append((position, tensor))
            results.append(WriteResult(item.index, tensor.nbytes, (self._name, position)))
            self.num_bytes = position + tensor.nbytes
        if placed:
            self._place(placed)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _place(self, placed: Placed) -> None:
        if self._memory is None:
            sums = self._write(cut((position, bytes_of(tensor)) for position, tensor in placed))
            self.work = lambda: sums
        else:
            image = memoryview(self._memory.copy(placed, self.num_bytes).numpy())
            self.work = lambda: self._write(cut([(0, image)]))

    def _write(self, blocks: Iterator[list[memoryview]]) -> dict[str, Sums]:
        begin = time.perf_counter()
        sums = write_file(self._partial / self._name, blocks)
        self.seconds = time.perf_counter() - begin
        return {self._name: sums}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0: puts together what the plan says of each tensor, and where each rank's pieces went."""
        places = {(result.index.fqn, result.index.offset): result.storage_data for part in results for result in part}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), name
            pieces = [
                Piece(*places[name, chunk.offsets], tuple(chunk.offsets), tuple(chunk.sizes))
                for chunk in entry.chunks
                if math.prod(chunk.sizes)
            ]
            self.tensors[name] = Entry(dtype_name(entry.properties.dtype), tuple(entry.size), pieces)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


@dataclass(frozen=True)
class Planned:
    """What DCP has planned at a run's first save, for all of them: rank 0 plans for 256 ranks for 20 s."""

    plan: SavePlan  # of this rank
    tensors: dict[str, Entry]  # on rank 0, with their places
    kinds: list[Any]  # of the tensors it is for

    @classmethod
    def after(cls, writer: Writer, tensors: dict[str, Tensor]) -> "Planned":
        """What `writer` has been told by dcp.save of `tensors`."""
        return cls(writer.plan, writer.tensors, _kinds(tensors))

    def write(self, writer: Writer, tensors: dict[str, Tensor]) -> None:
        """Does this rank's part of dcp.save once more. Local."""
        assert _kinds(tensors) == self.kinds, "a run's tensors have changed between two saves"
        planner = Planner()
        planner.set_up_planner({"tensors": tensors})
        writer.write_data(self.plan, planner)
        writer.tensors = self.tensors


def _kinds(tensors: dict[str, Tensor]) -> list[Any]:
    """All that a plan depends on."""
    layouts = ("placements", "device_mesh")
    return [
        (name, tensor.shape, tensor.dtype, *(getattr(tensor, of, None) for of in layouts))
        for name, tensor in tensors.items()
    ]


class Reader(StorageReader):
    """One load's: reads what this rank needs of the checkpoint `path`, each file once; each block is checked.

    Where one is damaged, targets hold what came before.
    """

    def __init__(self, path: Path, index: Index, rank: int) -> None:
        self._path, self._index, self._rank = path, index, rank

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self, *args: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for name, entry in self._index.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.pieces]
            properties = TensorProperties(DTYPES[entry.dtype])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads files from this rank's own on, in order of position; CheckpointError at the first damaged block."""
        wanted: dict[str, list[Wanted]] = {}
        pieces = {
            name: {piece.offsets: piece for piece in self._index.tensors[name].pieces}
            for name in {item.storage_index.fqn for item in plan.items}
        }
        for item in plan.items:
            assert item.storage_index.offset is not None
            piece = pieces[item.storage_index.fqn][tuple(item.storage_index.offset)]
            target = planner.resolve_tensor(item).detach()
            if target.numel():
                wanted.setdefault(piece.file, []).append(_want(piece, item, target))
        names = sorted(wanted)
        first = next((at for at, name in enumerate(names) if name >= part_name(self._rank)), 0)
        for name in names[first:] + names[:first]:  # not all ranks at the same one
            self._read_file(name, sorted(wanted[name], key=lambda want: want.start))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_file(self, name: str, wants: list[Wanted]) -> None:
        at, active = 0, list[Wanted]()
        for number, block, whole in read_blocks(self._path / name, self._index.files[name], _numbers(wants)):
            if not whole:
                raise CheckpointError(self._index.damage(name, number))
            start, stop = number * BLOCK_BYTES, number * BLOCK_BYTES + len(block)
            content = torch.from_numpy(block)
            while at < len(wants) and wants[at].start < stop:
                active.append(wants[at])
                at += 1
            for want in active:
                want.take(content, start, stop)
            active = [want for want in active if want.stop > stop]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _numbers(wants: list[Wanted]) -> Iterator[int]:
    """Numbers of the blocks that some want needs, in order. `wants` are in order of their start."""
    done = 0
    for want in wants:
        first, end = want.start // BLOCK_BYTES, -(-want.stop // BLOCK_BYTES)
        yield from range(max(first, done), end)
        done = max(done, end)


def _want(piece: Piece, item: ReadItem, target: Tensor) -> Wanted:
    """What `item` needs of `piece`, whose elements lie row-major."""
    strides = [math.prod(piece.sizes[dim + 1 :]) for dim in range(len(piece.sizes))]
    offsets, lengths = item.storage_offsets, item.lengths
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    count = 1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
    size = target.element_size()
    start = piece.position + first * size
    direct = count == target.numel() and target.device.type == "cpu" and target.is_contiguous()
    return Wanted(start, start + count * size, tuple(strides), target, direct)


@contextmanager
def named(what: str = "") -> Iterator[None]:
    """What the disk refuses, or what lies there is not, as one CheckpointError that begins with `what`.

    DCP raises a BaseException that lists tracebacks of all failed ranks: the first one's error is meant. What is no
    error of files is a bug, and stays one.
    """
    rank, cause = "", None
    try:
        yield
    except CheckpointException as failure:
        number, (cause, _) = min(failure.failures.items())
        rank, failed = f"rank {number}", failure
    except OSError as error:
        cause = failed = error
    if cause is None:
        return
    said = str(cause) if isinstance(cause, OSError) else f"{type(cause).__name__}: {cause}"
    kind = CheckpointError if isinstance(cause, OSError) else RuntimeError
    raise agreed(kind(": ".join(part for part in (what, rank, said) if part))) from failed


def agreed(error: Exception) -> Exception:
    """`error`, which all ranks raise: rank 0 alone prints it."""
    error.agreed = True  # type: ignore[attr-defined]
    return error
