"""Which checkpoints of a run to go on from, which to keep, and which to put aside or delete. Local, no torch.

What no longer counts is renamed before anything else happens to it: nothing that is half deleted, or given up, has a
checkpoint's name, and nothing that is deleted has a name that a save may use again.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from data.writer import sync
from training.checkpoint.files import (
    INDEX,
    MANIFEST,
    PART,
    CheckpointError,
    checked_manifest,
    finished,
    free_name,
    partial_of,
    quick_problem,
    step_of,
)


@dataclass(frozen=True)
class Choice:
    """`named`, and no other; where that is None the newest of `own`, the run's by step, that is whole; or none."""

    own: list[Path]
    named: Path | None = None
    note: str = ""  # to say where it is not what was wished


def choose(folder: Path, wish: str) -> Choice:
    """What `run.resume=wish` asks for in a run that has its checkpoints in `folder`.

    Raises:
        ValueError: where it names no checkpoint, or going that way would write over newer ones.
        CheckpointError: where it would, but none of them is whole; or the named one is not, as far as sizes tell.
    """
    own = finished(folder)
    if wish == "auto":
        return Choice(own)
    named = None if wish == "never" else Path(wish)
    if named is not None:
        _require_whole(named)
    if named is not None and named.resolve().parent != folder.resolve():
        return Choice(own, note=f"this run began at {named}, and goes on from its own") if own else Choice([], named)
    if own:
        newest = _newest_whole(folder, own)
        if named is None or named.resolve() != newest.resolve():
            raise ValueError(f"run.resume={wish} would write over {newest}: use run.resume=auto, or another run.name")
    return Choice(own, named)


def _require_whole(path: Path) -> None:
    """Refuses what the user named where it is no checkpoint, saying what else to name, or is damaged."""
    if not (path / MANIFEST).exists():
        inside = finished(path / "checkpoints") or finished(path)
        hint = f"did you mean {inside[-1]}?" if inside else "use auto, never, or the path of a checkpoint"
        raise ValueError(f"run.resume={path} is no checkpoint, it has no {MANIFEST}: {hint}")
    try:
        checked_manifest(path)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from None


def _newest_whole(folder: Path, own: list[Path]) -> Path:
    """As far as sizes tell."""
    problems = {}
    for path in reversed(own):
        if (problem := quick_problem(path)) is None:
            return path
        problems[path] = problem
    raise none_is_whole(folder, problems)


def none_is_whole(folder: Path, problems: Mapping[Path, object]) -> CheckpointError:
    """The error that names them all."""
    said = "; ".join(f"{path.name}: {problem}" for path, problem in problems.items())
    return CheckpointError(
        f"no checkpoint in {folder} is whole ({said}): restore one of them, or start anew with another run.name"
    )


def tidy(newest: Path, skipped: Iterable[Path], keep: int, keep_every: int) -> list[Path]:
    """Makes the name of `newest`, just committed, durable; only then puts aside what no longer counts.

    That is `skipped`, newer ones that the run could not go on from: they stay, under another name, as this is another
    way on from an older one. And what `keep` and `keep_every` leave out: the folders returned, for `sweep`. Nothing
    here is an error: the checkpoint counts.
    """
    try:
        sync(newest.parent)
        for path in skipped:
            if path != newest and path.exists():
                aside = path.rename(free_name(path, "skipped"))
                warn(f"{path} was skipped, and the run has gone on from an older one: it is now {aside.name}")
        old = [path.rename(free_name(path, "removed")) for path in _superfluous(newest, keep, keep_every)]
        return old + [path for path in _left_over(newest.parent) if path not in old]
    except OSError as error:
        warn(f"{newest} is written, but older checkpoints cannot be put aside: {error}")
        return []


def _superfluous(newest: Path, keep: int, keep_every: int) -> list[Path]:
    """All whole ones older than `newest` but the `keep` - 1 newest, and those of steps that `keep_every` divides.

    Damaged ones stay, and do not count; so does what is only a link. No more of them are looked into than is needed.
    """
    if keep == 0:
        return []
    kept, old = 1, []
    for path in reversed(finished(newest.parent)):
        if step_of(path) >= step_of(newest) or path.is_symlink():
            continue
        for_good = keep_every > 0 and step_of(path) % keep_every == 0
        if (kept >= keep and for_good) or quick_problem(path) is not None:
            continue
        if kept < keep:
            kept += 1
        else:
            old.append(path)
    return old


def _left_over(folder: Path) -> list[Path]:
    """What kills left: of a deletion, or of a save, which holds files of ours and nothing else."""
    for path in folder.glob("step_*.tmp"):
        if re.fullmatch(r"step_[0-9]{8,}\.tmp", path.name) and path.is_dir() and not path.is_symlink():
            names = os.listdir(path)
            if names and all(PART.fullmatch(name) or name in (INDEX, MANIFEST) for name in names):
                path.rename(free_name(path, "removed"))
    removed = re.compile(r"step_[0-9]{8,}(\.tmp)?\.removed(-[0-9]+)?")
    return [path for path in folder.iterdir() if removed.fullmatch(path.name) and not path.is_symlink()]


def sweep(folders: Iterable[Path]) -> None:
    """Deletes what `tidy` returned. What cannot be deleted stays, and is tried again after the next commit."""
    for folder in folders:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)  # the rest of it
            if os.path.lexists(folder):
                warn(f"cannot delete {folder}: {error}")


def make_empty(path: Path) -> None:
    """Makes the folder to write the checkpoint `path` into; what an interrupted save of that step left there goes."""
    discard(path)
    partial_of(path).mkdir(parents=True)


def discard(path: Path) -> None:
    """Deletes what was written of the checkpoint `path`, if anything: on a full disk all later saves would fail, too.

    Raises OSError where its name cannot be freed.
    """
    partial = partial_of(path)
    if os.path.lexists(partial):
        sweep([partial.rename(free_name(partial, "removed"))])


def warn(message: str) -> None:
    """Says it on stderr; to be called on one rank."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
