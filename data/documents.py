"""Documents: a name, and a way to read its text as often as needed, without ever holding a corpus in memory.

A source lists what there is, sorted by name, so that all machines with the same files see the same documents in the
same order, and reads each of them, from the document where somebody stopped.
"""

import codecs
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)
PORTION_BYTES = 1 << 20
HEAD_BYTES = 8_192  # of a file, in which a NUL tells that it is no text

Pieces = Callable[[], Iterator[str | None]]


@dataclass(frozen=True, slots=True)
class Document:
    """`pieces()` gives the text in portions, None before each file of a document that is made of files.

    `place` is where it starts in the file it is read from, in whatever its reader counts. `labels` are further names
    that people know it by.
    """

    name: str
    pieces: Pieces
    facts: dict[str, Any] = field(default_factory=dict)
    place: tuple[int, int] = (0, 0)
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Listing:
    """What a source will read, in order, and what it passed by."""

    where: str  # for messages
    names: list[str]
    num_bytes: list[int]  # on the disk, of each
    counts: Counter[str]
    state: dict[str, str]  # what identifies all of it: other text, another state


class Source(Protocol):
    """Where documents come from. Pickled to the processes that read."""

    held_out: tuple[str, ...] | None  # patterns of the names that are for validation; None = by digest

    def listing(self) -> Listing:
        """Reads names and sizes only. Raises: ValueError where there is nothing to read."""
        ...

    def read(self, name: str, place: tuple[int, int], counts: Counter[str]) -> Iterator[Document]:
        """The documents of a listed name that have text, from the one at `place` on; counts the others."""
        ...

    def advice(self, listing: Listing) -> str:
        """What to do where none of it has text."""
        ...


# Text


def portions(path: Path) -> Iterator[str]:
    """The text of a file, bytes that are no UTF-8 as surrogates, with the line ends that it has."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    with open(path, "rb") as file:
        while data := file.read(PORTION_BYTES):
            if text := decoder.decode(data):
                yield text
    if text := decoder.decode(b"", final=True):
        yield text


def slices(text: str) -> Iterator[str]:
    """A text in portions, so that what follows copies a portion and not the whole."""
    for start in range(0, len(text), PORTION_BYTES):
        yield text[start : start + PORTION_BYTES]


def span(pieces: Pieces, start: int, stop: int) -> Iterator[str | None]:
    """Characters start .. stop - 1; a file that starts at `start` does so in this span."""
    for piece in pieces():
        if piece is None:
            if start <= 0 < stop:
                yield None
            continue
        if text := piece[max(0, start) : max(0, stop)]:
            yield text
        start, stop = start - len(piece), stop - len(piece)
        if stop <= 0:
            return


# Files


def walk(root: Path, without: frozenset[str], besides: Path | None = None) -> tuple[list[str], Counter[str]]:
    """Regular files below a folder, by their path from there, sorted, and what was passed by. Hidden names are."""
    paths, counts = list[str](), Counter[str]()

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=fail):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        hidden = [name for name in folders + names if name.startswith(".")]
        passed = {*links, *hidden, *without}
        folders[:] = [name for name in folders if name not in passed]
        if besides:
            folders[:] = [name for name in folders if Path(folder, name).resolve() != besides]
        start = os.path.relpath(folder, root).replace(os.sep, "/")
        start = "" if start == "." else f"{start}/"
        paths += [start + name for name in names if name[0] != "." and os.path.isfile(os.path.join(folder, name))]
        counts.update({"links to folders": len(links), "hidden": len(hidden)})
    return sorted(paths), +counts


def kind(path: Path) -> str:
    """Of a file: "binary" (a NUL is near its start), "empty" (blank all through), or "kept"."""
    with open(path, "rb") as file:
        if b"\x00" in file.read(HEAD_BYTES):
            return "binary"
    return "kept" if any(not portion.isspace() for portion in portions(path)) else "empty"


def tree(root: Path, files: list[str], name: str) -> Iterator[str | None]:
    """The pieces of a document made of the files below `root`: before each one None, and a line with its path."""
    for path in files:
        yield None
        yield f"{name}/{path}\n"
        yield from portions(root / path)
