"""`python -m training.checkpoint verify|list|show PATH`: looks into checkpoints. Reads only, runs nothing of them."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from conf.schema import TrainConfig
from training.checkpoint.blocks import read_blocks
from training.checkpoint.files import MANIFEST, CheckpointError, checked_manifest, finished
from training.checkpoint.index import Index, open_checkpoint
from training.config_change import flat, shown

MOST_TOLD = 20  # damaged blocks of one file


def checkpoints_at(path: Path) -> list[Path]:
    """A checkpoint itself, or those of its run's folder, or of the folder they lie in, by step.

    Raises:
        ValueError: where there is none.
    """
    if (path / MANIFEST).exists() or (path.is_dir() and path in finished(path.parent)):
        return [path]
    if found := finished(path / "checkpoints") or finished(path):
        return found
    what = "holds no checkpoint" if path.exists() else "does not exist"
    raise ValueError(f"{path} {what}: give a checkpoint (…/checkpoints/step_00000040), or the folder of a run")


def verify(path: Path) -> int:
    """Reads every byte of the checkpoints at `path`, says what is not as it was written; returns the exit code."""
    paths = checkpoints_at(path)
    total, damaged = sum(map(_num_bytes, paths)), 0
    with tqdm(total=total, desc="verifying", unit="B", unit_scale=True, disable=None) as bar:
        for each in paths:
            count = 0
            for problem in problems(each, bar.update):
                count += 1
                with tqdm.external_write_mode():
                    print(f"{each}: {problem}", flush=True)
            damaged += count > 0
            if not count:
                with tqdm.external_write_mode():
                    print(f"{each}: whole", flush=True)
    return 1 if damaged else 0


def problems(path: Path, advance: Callable[[int], Any] = lambda _: None) -> Iterator[str]:
    """What is wrong with a checkpoint; `advance` is told of bytes as they are read."""
    try:
        _, index = open_checkpoint(path)
    except CheckpointError as error:
        yield str(error)
        return
    for name in sorted(index.files):
        try:
            yield from _file_problems(path, index, name, advance)
        except OSError as error:
            yield f"{name} cannot be read: {error}"


def _file_problems(path: Path, index: Index, name: str, advance: Callable[[int], Any]) -> Iterator[str]:
    sums, count = index.files[name], 0
    for number, block, whole in read_blocks(path / name, sums, range(len(sums.crc32))):
        advance(len(block))
        count += not whole
        if not whole and count <= MOST_TOLD:
            yield index.damage(name, number)
    if count > MOST_TOLD:
        yield f"{name} has {count - MOST_TOLD} more damaged blocks of {len(sums.crc32)}"


def list_all(path: Path) -> int:
    """Prints a table of the checkpoints at `path`."""
    rows = [("step", "size", "age", "whole by sizes", "layout")]
    for each in checkpoints_at(path):
        try:
            manifest = checked_manifest(each)
        except OSError as error:
            rows.append((each.name, "", _age(each), f"no: {error}", ""))
            continue
        size = sum(facts["bytes"] for facts in manifest["files"].values())
        rows.append((str(manifest["step"]), _size(size), _age(each), "yes", _layout(manifest["layout"])))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for step, size, age, whole, layout in rows:
        line = f"{step:>{widths[0]}}  {size:>{widths[1]}}  {age:>{widths[2]}}  {whole:<14}  {layout}"
        print(line.rstrip())
    return 0


def show(path: Path) -> int:
    """Prints what a checkpoint, or the newest of a run, says of itself. Raises CheckpointError where it is damaged."""
    path = checkpoints_at(path)[-1]
    try:
        manifest, index = open_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    size = sum(sums.bytes for sums in index.files.values())
    print(f"checkpoint {path}\nstep       {manifest['step']}\nsize       {_size(size)} in {len(index.files)} files")
    print(f"layout     {_layout(manifest['layout'])}")
    print(f"versions   {json.dumps(manifest['versions'])}\nstate      {json.dumps(manifest['state'])}")
    for kind, told in (("model.", "parameters"), ("optimizer.", "optimizer"), ("random.", "random")):
        counts: dict[str, int] = {}
        for name, entry in index.tensors.items():
            if name.startswith(kind):
                counts[entry.dtype] = counts.get(entry.dtype, 0) + entry.num_elements
        print(f"{told:<10} {', '.join(f'{number:,} {dtype}' for dtype, number in sorted(counts.items())) or 'none'}")
    defaults, changed = flat(asdict(TrainConfig())), flat(manifest["config"])
    lines = [
        f"  {shown(key)}={shown(value)}"
        for key, value in changed.items()
        if defaults.get(key, "") != value and (key == "cluster.name" or not key.startswith("cluster."))
    ]
    print("config, where it is not the default\n" + "\n".join(lines))
    return 0


def _num_bytes(path: Path) -> int:
    """Bytes that `problems` reads."""
    try:
        return sum(sums.bytes for sums in open_checkpoint(path)[1].files.values())
    except CheckpointError:
        return 0


def _layout(layout: dict[str, int]) -> str:
    return ", ".join(f"{shown(axis)} {size}" for axis, size in layout.items())


def _age(path: Path) -> str:
    """Since it was finished."""
    file = path / MANIFEST
    seconds = time.time() - (file if file.exists() else path).stat().st_mtime
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _size(num_bytes: int) -> str:
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: see python -m training.checkpoint --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m training.checkpoint",
        description="Looks into checkpoints. PATH: one of them, their folder, or the folder of a run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""exit codes: 0 done, 1 verify found damage, 3 an argument is refused, 74 it cannot be read

examples:
  python -m training.checkpoint list runs/million
  python -m training.checkpoint verify runs/million/checkpoints/step_00000040
  python -m training.checkpoint show runs/million""",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, told in (
        ("verify", "read every byte of it, or of all of them, and compare the checksums"),
        ("list", "a table of them: step, size, age, whether they are whole by their sizes, layout"),
        ("show", "what it, or the newest of them, says of itself: state, layout, parameters, config"),
    ):
        command = commands.add_parser(name, help=told, description=told)
        command.add_argument("path", metavar="PATH", type=Path)
    return parser


def main(arguments: list[str]) -> int:
    """Runs a command and returns its exit code; errors are one line on standard error."""
    try:
        options = _parser().parse_args(arguments)
        code = {"verify": verify, "list": list_all, "show": show}[options.command](options.path)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # nobody reads on: what is still to be written must not fail when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"training.checkpoint: {' '.join(str(error).split())}", file=sys.stderr)
        return 3 if isinstance(error, ValueError) else 74
    except KeyboardInterrupt:
        return 130
