"""The files of lines in a run's folder: metrics.jsonl, what was cut from it, and starts.jsonl. No torch here."""

import contextlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from data.writer import publish


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one a line. What a kill tore apart is passed over; a missing file is an empty one."""
    if path.exists():
        with open(path, "rb") as lines:
            yield from filter(None, map(_parsed, lines))


def cut(folder: Path, step: int) -> list[dict[str, Any]]:
    """Moves the lines of metrics.jsonl beyond `step` to metrics.before-step-N.jsonl, where N is `step`.

    A last line that a kill tore apart goes too. The lines moved are on the disk before metrics.jsonl is
    replaced; a kill between the two leaves them in both, and they are not moved twice. Returns the rows that were ever
    moved there: those of this and of earlier starts at `step`.
    """
    path, moved = folder / "metrics.jsonl", folder / f"metrics.before-step-{step}.jsonl"
    beyond = [line for line, number in _numbered(path) if number is None or number > step]
    if beyond:
        there = _lines(moved)
        known = set(there)
        ended = (line if line.endswith(b"\n") else line + b"\n" for line in beyond)
        write(moved, [*there, *(line for line in ended if line not in known)])
        write(path, (line for line, number in _numbered(path) if number is not None and number <= step))
    return list(rows(moved))


def write(path: Path, lines: Iterable[bytes]) -> None:
    """Replaces a file: its new lines are on the disk, or it stays as it was. OSError names it."""
    temporary = path.with_name(path.name + ".tmp")
    with named(path):
        try:
            with open(temporary, "wb") as file:
                file.writelines(lines)
            publish(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """An OSError inside names `path` where it names no file, as on a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def unmirrored(folder: Path, most: int) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, the last `most`, that were made since the last start that came to its end.

    Whoever mirrors them may have lost them: a start that was killed had no time to send what it held back. To be asked
    before this start is recorded.
    """
    first: int | None = None  # after which it is not known
    for event in rows(folder / "starts.jsonl"):
        if event.get("event") == "end":
            first = None
        elif event.get("event") == "start" and isinstance(event.get("step"), int):
            first = event["step"] if first is None else min(first, event["step"])
    if first is None:
        return []
    lines = deque((line for line, step in _numbered(folder / "metrics.jsonl") if step and step > first), maxlen=most)
    return [row for line in lines if (row := _parsed(line))]


def recorded(folder: Path, step: int) -> tuple[list[dict[str, Any]], str]:
    """The last 50 rows of metrics.jsonl up to `step`, and which steps are missing there, as "12-14, 17".

    A run that began at another run's checkpoint, as its first start says, has no rows of the steps before that.
    """
    starts = (event.get("step") for event in rows(folder / "starts.jsonl") if event.get("event") == "start")
    first = next((begun for begun in starts if isinstance(begun, int)), None)
    done, gaps, tail = first, [], deque(maxlen=50)
    for line, number in _numbered(folder / "metrics.jsonl"):
        if number is None:
            continue
        if done is not None and number > done + 1:
            gaps.append((done + 1, number - 1))
        done = number if done is None else max(done, number)
        tail.append(line)
    if done is not None and done < step:
        gaps.append((done + 1, step))
    named = [f"{begin}-{end}" if begin < end else str(begin) for begin, end in gaps]
    more = [f"and in {len(named) - 10} more places"] if len(named) > 10 else []
    return [row for line in tail if (row := _parsed(line))], ", ".join(named[:10] + more)


def has_row(folder: Path, step: int) -> bool:
    """Whether metrics.jsonl has the row of `step`."""
    return any(number == step for _, number in _numbered(folder / "metrics.jsonl"))


def began_at(folder: Path) -> float:
    """Unix seconds when this process began, which it has spent some of until there is a log to say so.

    At the earliest the newest sign of the start before, so that no time belongs to two; now, where nobody knows. To be
    asked before anything is written to the folder.
    """
    now = time.time()
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        began = now - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return now
    # A file's time may be some milliseconds behind what the clock said when it was written.
    signs = [path.stat().st_mtime + 0.05 for path in folder.glob("*.jsonl")]
    return min(max(began, *signs, 0.0), now)


def open_lines(path: Path) -> TextIO:
    """Opens a file of lines to append to; where a kill has torn its last line apart, the next one begins anew."""
    with named(path), open(path, "a+b", buffering=0) as file:
        if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")
    return open(path, "a")


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _numbered(path: Path) -> Iterator[tuple[bytes, int | None]]:
    """Each line and its step; None where it was torn apart."""
    if path.exists():
        with open(path, "rb") as lines:
            for line in lines:
                match = re.match(rb'\{"step": (\d+),.*\}\n', line)
                yield line, int(match[1]) if match else None


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
