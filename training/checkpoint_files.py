"""The files of a checkpoint: written beside and renamed, listed with size and SHA-256, judged whole or not. Local."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

FORMAT = "longhaul checkpoint 1"


class CheckpointError(OSError):
    """A checkpoint cannot be written, or what lies on the disk is not a whole one."""


def finished(folder: Path) -> list[Path]:
    """The folders with a finished checkpoint's name, by step; whether they are whole is another question."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if re.fullmatch(r"step_\d{8}", path.name) and path.is_dir()]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step_")))


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except FileNotFoundError:
        raise CheckpointError("it has no manifest.json, its writing was never finished") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"manifest.json cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"manifest.json is not of the format {FORMAT!r}")
    if missing := {"step", "state", "layout", "config", "files"} - manifest.keys():
        raise CheckpointError(f"manifest.json lacks {', '.join(sorted(missing))}")
    return manifest


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint that the user named, or what else to name."""
    if not (path / "manifest.json").exists():
        inside = finished(path / "checkpoints") or finished(path)
        hint = f"did you mean {inside[-1]}?" if inside else "use auto, never, or the path of a checkpoint"
        raise ValueError(f"run.resume={path} is no checkpoint, it has no manifest.json: {hint}")
    if (problem := quick_problem(path)) is not None:
        raise CheckpointError(f"checkpoint {path} is damaged: {problem}")
    return read_manifest(path)


def make_empty(partial: Path) -> None:
    """Makes the folder to write into; what an interrupted save of the same step left there goes."""
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def describe(partial: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of the files that DCP wrote for `rank`."""
    names = [path.name for path in partial.glob(f"__{rank}_*")] + ([".metadata"] if rank == 0 else [])
    return {name: {"bytes": (partial / name).stat().st_size, "sha256": _sha256(partial / name)} for name in names}


def commit(partial: Path, path: Path, manifest: dict[str, Any], keep: int) -> None:
    """Makes a written checkpoint count: manifest, fsync, rename; then prunes."""
    with open(partial / "manifest.json", "w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _fsync_folder(partial)
    if path.exists():
        path.rename(_free_name(path))
    partial.rename(path)
    _fsync_folder(path.parent)
    _prune(path, keep)


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.replaced-{number}")).exists():
        number += 1
    return candidate


def _prune(newest: Path, keep: int) -> None:
    """Keeps `newest`, just written, and the `keep` - 1 newest other whole ones; damaged ones stay."""
    for removed in newest.parent.glob("step_*.removed"):  # a kill came while it was being deleted
        shutil.rmtree(removed)
    if keep == 0:
        return
    whole = [path for path in finished(newest.parent) if path != newest and quick_problem(path) is None]
    for path in whole[: max(0, len(whole) - (keep - 1))]:
        # Renamed first: a folder that is half deleted must not carry a checkpoint's name.
        removed = path.rename(path.with_name(path.name + ".removed"))
        shutil.rmtree(removed)


def quick_problem(path: Path) -> str | None:
    """Why the checkpoint is not whole, as far as its manifest and the sizes of its files tell."""
    try:
        manifest = read_manifest(path)
        for name, entry in manifest["files"].items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if (found := (path / name).stat().st_size) != entry["bytes"]:
                return f"{name} has {found} bytes instead of {entry['bytes']}"
    except OSError as error:
        return str(error)
    return None


def damaged_file(path: Path, rank: int, num_ranks: int) -> str | None:
    """Reads this rank's share of the files; the first that is not what was written, in words."""
    try:
        for name, entry in sorted(read_manifest(path)["files"].items())[rank::num_ranks]:
            if _sha256(path / name) != entry["sha256"]:
                return f"{name} is not what was written (SHA-256 differs)"
    except OSError as error:
        return str(error)
    return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
