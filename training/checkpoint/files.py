"""The folders of checkpoints: written beside and renamed, described by a sealed manifest, judged whole or not. Local.

Nothing that lies in a folder is trusted before it is checked: names, kinds of files, sizes, sums. No torch.
"""

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from data.writer import sync

FORMAT = "longhaul checkpoint 2"
MANIFEST, INDEX = "manifest.json", "tensors.json"
PART = re.compile(r"rank_[0-9]{5,7}\.bin")  # the pieces of tensors that one rank wrote
MOST_JSON_BYTES = 1 << 31  # a thousand ranks' places of ten thousand tensors are a tenth of it
KINDS = {"format": str, "step": int, "state": dict, "layout": dict, "versions": dict, "config": dict, "files": dict}


class CheckpointError(OSError):
    """A checkpoint cannot be written, or what lies on the disk is not a whole one."""


def part_name(rank: int) -> str:
    """The file of a rank's pieces."""
    return f"rank_{rank:05d}.bin"


def finished(folder: Path) -> list[Path]:
    """The folders with a finished checkpoint's name, by step; whether they are whole is another question."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if re.fullmatch(r"step_[0-9]{8,}", path.name) and path.is_dir()]
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    """By the name that `finished` asks for."""
    return int(path.name.removeprefix("step_"))


def manifest_text(manifest: dict[str, Any]) -> str:
    """The manifest as it is written: with the SHA-256 of all the rest of it, so that no digit of it changes unseen."""
    return json.dumps(manifest | {"sha256": _seal(manifest)}, indent=1)


def _seal(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, indent=1).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest in the checkpoint's folder `path`, checked as far as it goes by itself.

    Raises:
        CheckpointError: where it is missing, cannot be read, is of another format, or is not what was written.
    """
    try:
        manifest = json.loads(read_whole(path / MANIFEST))
    except FileNotFoundError:
        raise CheckpointError(f"it has no {MANIFEST}, its writing was never finished") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{MANIFEST} is not of the format {FORMAT!r}" + (f", but of {found!r}" if found else ""))
    for key, kind in KINDS.items():
        if type(manifest.get(key)) is not kind:
            raise CheckpointError(f"{MANIFEST} has no {key} that is a {kind.__name__}")
    if manifest.get("sha256") != _seal(manifest):
        raise CheckpointError(f"{MANIFEST} is not what was written (SHA-256 differs)")
    if manifest["state"].get("step") != manifest["step"]:
        raise CheckpointError(f"{MANIFEST} is of step {manifest['step']}, and its state of another")
    named = re.fullmatch(r"step_([0-9]{8,})", path.name)  # people may give other names
    if named and int(named[1]) != manifest["step"]:  # a copy: it would be the newest for ever
        raise CheckpointError(f"{MANIFEST} is of step {manifest['step']}, unlike its folder's name")
    for name, facts in manifest["files"].items():
        size = facts.get("bytes") if isinstance(facts, dict) else None
        if not (name == INDEX or PART.fullmatch(name)) or type(size) is not int or size < 0:
            raise CheckpointError(f"{MANIFEST} names {name!r}, which is no file of a checkpoint of ours")
    if not isinstance(manifest["files"].get(INDEX, {}).get("sha256"), str):
        raise CheckpointError(f"{MANIFEST} names no {INDEX} with its SHA-256")
    layout = manifest["layout"]
    if "ranks" not in layout or any(type(size) is not int for size in layout.values()):
        raise CheckpointError(f"{MANIFEST} does not say of which layout it is")
    return manifest


def checked_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint `path`, once its files have the sizes that it tells. Raises CheckpointError."""
    if (problem := quick_problem(path)) is not None:
        raise CheckpointError(problem)
    return read_manifest(path)


def quick_problem(path: Path) -> str | None:
    """Why the checkpoint is not whole, as far as its manifest and the sizes of its files tell; None where it may be."""
    try:
        return _files_problem(path, read_manifest(path)["files"])
    except OSError as error:
        return str(error)


def _files_problem(path: Path, files: dict[str, dict[str, Any]]) -> str | None:
    """The first of `files` that is not in the folder `path`, as a regular file of its bytes. Raises OSError."""
    for name, facts in files.items():
        if not os.path.lexists(path / name):
            return f"{name} is missing"
        status = os.lstat(path / name)
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is no regular file"  # a link out of the folder, a pipe that never ends
        if status.st_size != facts["bytes"]:
            return f"{name} has {status.st_size} bytes instead of {facts['bytes']}"
    return None


def read_whole(path: Path) -> bytes:
    """The bytes of a JSON file, which must be a regular one, of no absurd size. Raises OSError."""
    with open_part(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MOST_JSON_BYTES:
            raise CheckpointError(f"{path.name} has {size} bytes, more than any of ours")
        return file.read()


def open_part(path: Path) -> Any:
    """Opens a regular file of a checkpoint for unbuffered reading; never a link, nor what would block. OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = open(path, "rb", buffering=0, opener=lambda name, _: os.open(name, flags))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path.name} is no regular file")
    return file


def partial_of(path: Path) -> Path:
    """Where the checkpoint `path` is written before it counts."""
    return path.with_name(path.name + ".tmp")


def commit(path: Path, index: str, manifest: dict[str, Any]) -> None:
    """Makes what was written count as `path`: index, manifest, fsync, rename. Its new name is not durable yet.

    `manifest["files"]` names the parts with their bytes; the index is added. What has that name already is moved aside.

    Raises:
        CheckpointError: where a part is not there as it was written.
        OSError: where the disk fails. Older checkpoints are as they were.
    """
    content, partial = index.encode(), partial_of(path)
    if (problem := _files_problem(partial, manifest["files"])) is not None:
        raise CheckpointError(f"{problem}, right after it was written")
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    _write(partial / INDEX, content)
    _write(partial / MANIFEST, manifest_text(manifest | {"files": manifest["files"] | {INDEX: facts}}).encode())
    sync(partial)
    sync(path.parent.parent)  # the folder of all of them may be new
    if path.exists():
        path.rename(free_name(path, "replaced"))
    partial.rename(path)


def free_name(path: Path, word: str) -> Path:
    """`path` with `.word-1` behind it, or the next number that nothing has."""
    number = 1
    while os.path.lexists(candidate := path.with_name(f"{path.name}.{word}-{number}")):
        number += 1
    return candidate


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
