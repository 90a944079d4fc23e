"""Checkpoints: weights, AdamW's state, every rank's random state; whole or not at all, for any layout.

    checkpoints/step_00000040/
      rank_00000.bin …  pieces of tensors end to end, raw; one file for each rank that has any
      tensors.json      dtype, shape and pieces of each tensor; CRC-32 of each block of the files
      manifest.json     written last: state of the run, config, layout, versions, files with their sizes; sealed

A checkpoint is written into `step_N.tmp`, fsynced and renamed; only then are older ones removed. It holds numbers and
JSON: reading it runs no code. torch.distributed.checkpoint (DCP) plans who writes and reads which piece; what it would
let pass in silence is refused here: flipped bytes, other dtypes, names that one side lacks.

`python -m training.checkpoint verify|list|show PATH` looks into them.
"""

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from conf.schema import TrainConfig
from parallel.mesh import Mesh
from training import config_change
from training.agreement import agree, on_all_ranks, together
from training.checkpoint.blocks import Sums
from training.checkpoint.choice import choose, discard, make_empty, none_is_whole, sweep, tidy
from training.checkpoint.files import CheckpointError, checked_manifest, commit, partial_of, step_of
from training.checkpoint.index import Index, read_index
from training.checkpoint.memory import HostMemory
from training.checkpoint.storage import Planned, Planner, Reader, Writer, agreed, named
from training.checkpoint.tensors import (
    description,
    layout_of,
    manifest_of,
    random_states,
    require_fitting,
    restore_random,
    run_tensors,
    seed,
)


@dataclass(frozen=True)
class SaveRecord:
    """What a save took.

    Attributes:
        bytes: of this rank.
        blocked_seconds: that training stood still, in `save` and `finish`.
        write_seconds: that this rank's writer took.
        seconds: from the beginning of the save until it counted, without what it waited for somebody to call `finish`:
            what a save takes at least that nothing may follow.
    """

    step: int
    bytes: int
    blocked_seconds: float
    write_seconds: float
    seconds: float


@dataclass
class _Save:
    """A save that is not committed yet."""

    path: Path
    manifest: dict[str, Any]
    writer: Writer
    began: float  # as all of these by time.perf_counter
    blocked_seconds: float = 0.0
    written: float = 0.0  # when this rank's file was
    done: Future[dict[str, Sums]] = field(default_factory=Future)  # sums of this rank's file

    def write(self) -> None:
        """What is left to do of the writing. In any thread: no collective runs here."""
        try:
            sums = self.writer.work()
        except BaseException as error:
            self.done.set_exception(error)
        else:
            self.written = time.perf_counter()
            self.done.set_result(sums)

    def sums(self) -> dict[str, Sums]:
        """Waits for the writer, and raises what it met."""
        with named(f"rank {dist.get_rank()}"):
            return self.done.result()


class Checkpoints:
    """The checkpoints of one run, in `folder`. Methods are collective over `world`, and raise on all ranks.

    With `config.checkpoint.background` a save returns once it has a copy in the host's memory, which a thread writes;
    the one after it waits for it. Whoever saves must `finish` before the end, or the last one is lost.
    """

    def __init__(self, folder: Path, config: TrainConfig, mesh: Mesh) -> None:
        self.folder, self.config, self.mesh = folder, config, mesh
        self.last: SaveRecord | None = None  # of the newest save that was committed
        self._saving: _Save | None = None
        self._memory = HostMemory(mesh.parameters.device_type) if config.checkpoint.background else None
        self._planned: Planned | None = None
        self._skipped: list[Path] = []  # newer ones than the one that was loaded, until something is committed
        self._sweeper: threading.Thread | None = None

    @property
    def writing(self) -> bool:
        """Whether this rank's writer is at work. Local."""
        return self._saving is not None and not self._saving.done.done()

    @property
    def failed(self) -> bool:
        """Whether this rank's writer has met an error, which `finish` will raise. Local."""
        saving = self._saving
        return saving is not None and saving.done.done() and saving.done.exception() is not None

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Writes the checkpoint of `step`, or begins to, after it has finished the one before.

        `state` is what else the run needs to go on, as JSON: tokens seen, the data cursor. A folder of that step that
        is already there is moved aside, never overwritten. Once it is committed all go but the newest
        `checkpoint.keep` whole ones, and those of steps that `checkpoint.keep_every` divides.

        Raises:
            CheckpointError: where writing it, or the one before, fails on any rank; earlier ones are untouched.
        """
        self.finish()
        path, world = self.folder / f"step_{step:08d}", self.mesh.world
        manifest = manifest_of(step, state, self.config, self.mesh)
        writer = Writer(partial_of(path), world.rank, self._memory)
        saving = _Save(path, manifest, writer, began=time.perf_counter())
        tensors = run_tensors(model, optimizer) | random_states(self.mesh)
        with self._or_discarded(path):
            agree(lambda: make_empty(path))
            self._hand_over(tensors, writer)
        self._saving = saving
        if self._memory is not None:
            threading.Thread(target=saving.write, name="checkpoint writer", daemon=True).start()
        saving.blocked_seconds = time.perf_counter() - saving.began
        if self._memory is None:
            saving.write()
            self.finish()

    def _hand_over(self, tensors: dict[str, Tensor], writer: Writer) -> None:
        """DCP plans the first save; the tensors of a run stay as they are, so that later ones need no plan."""
        group, planned = self.mesh.world.group, self._planned
        if planned is None:
            dcp.save({"tensors": tensors}, storage_writer=writer, planner=Planner(), process_group=group)
            self._planned = Planned.after(writer, tensors)
            return

        def write() -> None:
            with named(f"rank {dist.get_rank()}"):
                planned.write(writer, tensors)

        together(write)

    def finish(self) -> Path | None:
        """Waits for the writers of all ranks, and commits what they wrote; nothing to do where no save is under way.

        Raises:
            CheckpointError: where any of them failed. What was written of it is removed, earlier ones are untouched.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        begin = time.perf_counter()
        with self._or_discarded(saving.path):
            parts = on_all_ranks(saving.sums)
            agree(lambda: self._commit(saving, {name: sums for part in parts for name, sums in part.items()}))
        end, writer = time.perf_counter(), saving.writer
        self.last = SaveRecord(
            saving.manifest["step"],
            writer.num_bytes,
            blocked_seconds=saving.blocked_seconds + end - begin,
            write_seconds=writer.seconds,
            seconds=saving.written - saving.began + end - max(begin, saving.written),
        )
        return saving.path

    @contextmanager
    def _or_discarded(self, path: Path) -> Iterator[None]:
        try:
            with named(f"cannot write {path}"):
                yield
        except CheckpointError:
            with suppress(OSError):  # what went wrong first is raised
                agree(lambda: discard(path))
            raise

    def _commit(self, saving: _Save, files: dict[str, Sums]) -> None:
        """Rank 0's part. Deleting takes long where files are large: in the background a thread does it, for which the
        next commit waits. Whatever fails once the new one counts is a warning.
        """
        if self._sweeper is not None:
            self._sweeper.join()
        index = Index(saving.writer.tensors, files)
        manifest = saving.manifest | {"files": {name: {"bytes": sums.bytes} for name, sums in sorted(files.items())}}
        commit(saving.path, index.text(), manifest)
        old = tidy(saving.path, self._skipped, self.config.checkpoint.keep, self.config.checkpoint.keep_every)
        self._skipped = [path for path in self._skipped if path != saving.path and path.exists()]
        self._sweeper = threading.Thread(target=sweep, args=[old], name="checkpoint sweeper")
        self._sweeper.start()
        if self._memory is None:
            self._sweeper.join()

    def resume(self, wish: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Loads what `run.resume=wish` asks for: auto, never, or the path of a checkpoint, of any layout.

        Of the run's own checkpoints that is the newest that is whole: damaged ones are skipped, which rank 0 says, and
        nothing is deleted; when the run next saves they are renamed to `step_N.skipped-1`. A run that began at another
        run's checkpoint goes on from its own once it has any. At the same number of ranks each rank's random state is
        restored; at another, each rank is seeded anew. Where an error is raised, model and optimizer may hold anything.

        Returns:
            What was saved as `state`, with "config", "layout" and "path" of the checkpoint, "warnings" of what has
            changed since, and "remarks", which were made already. None to start anew: then all ranks are seeded.

        Raises:
            ValueError: where `wish` is none of the three, the checkpoint is another model's, naming keys or tensors and
                both values, or going that way would write over newer checkpoints.
            CheckpointError: where there are checkpoints but none is whole, or the one that was named is not: no run
                starts over in silence.
        """
        choice = agree(lambda: choose(self.folder, wish))
        if choice.named is not None:
            with named(f"checkpoint {choice.named} is damaged"):
                found = self._load(choice.named, model, optimizer)
        elif choice.own:
            found = self._load_newest(choice.own, model, optimizer)
        else:
            seed(self.config, self.mesh, step=0)
            return None
        self._skipped = [path for path in choice.own if step_of(path) > found["step"]]
        if choice.note:
            found["remarks"].append(self._say(f"{choice.note} {found['path']}", sys.stdout))
        return found

    def _load_newest(self, own: list[Path], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        problems: dict[Path, Any] = {}
        remarks = []
        for path in reversed(own):
            try:
                return self._load(path, model, optimizer) | {"remarks": remarks}
            except CheckpointError as error:
                problems[path] = error
                remarks.append(self._say(f"warning: skipped checkpoint {path}: {error}", sys.stderr))
        raise agreed(none_is_whole(self.folder, problems))

    def _load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Every rank reads what it needs, once: each block is checked, then copied to where it belongs.

        Raises:
            CheckpointError: where it is damaged, saying how, but not that it is `path`. Tensors may hold some of it.
            ValueError: where it does not fit this run.
        """
        manifest = agree(lambda: checked_manifest(path))
        saved, layout = manifest["layout"], layout_of(self.mesh)
        warnings = agree(lambda: config_change.check(manifest["config"], self.config, saved, layout))
        index, tensors = together(lambda: read_index(path, manifest)), run_tensors(model, optimizer)
        agree(lambda: require_fitting(index, tensors, path))
        random = random_states(self.mesh) if saved["ranks"] == layout["ranks"] else {}
        random = {key: value for key, value in random.items() if str(index.tensors.get(key)) == description(value)}
        reader = Reader(path, index, self.mesh.world.rank)
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with named():
            wanted = {**tensors, **random}
            dcp.load(wanted, storage_reader=reader, planner=planner, process_group=self.mesh.world.group)
        seed(self.config, self.mesh, manifest["step"])
        together(lambda: restore_random(random))
        origin = {"config": manifest["config"], "layout": saved, "path": str(path)}
        return manifest["state"] | origin | {"warnings": warnings, "remarks": []}

    def _say(self, message: str, stream: Any) -> str:
        if self.mesh.world.rank == 0:
            print(message, file=stream, flush=True)
        return message
