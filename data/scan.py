"""The first reading of a corpus: every document measured and hashed, one row each in a file.

What works on the rows takes a portion of them at a time, so that nothing grows with the number of documents.
"""

import hashlib
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import numpy as np

from data.documents import Document, Listing, Pieces, Source
from data.vocabulary import to_bytes
from data.workers import FEW_JOBS, in_order
from data.writer import DIGEST_BYTES

ROW = np.dtype([("digest", "<u8", (2,)), ("bytes", "<i8"), ("chars", "<i8"), ("held", "u1")])
_ROW = struct.Struct(f"<{DIGEST_BYTES}sqqB")
ROWS = "rows"  # the file
GROUP_BYTES, GROUP_FILES = 8 << 20, 1_000  # read by one process at a time, a large file more
PORTION_ROWS = 1 << 18
LARGE_TEXT = 64 << 20  # bytes on the disk, which processes read sooner, however few their groups are


@dataclass(frozen=True)
class Found:
    """Documents with text; what was counted of all there is; how many documents each pattern of a name fits."""

    num_rows: int
    counts: Counter[str]
    matches: Counter[str]


def read_all(
    source: Source, listing: Listing, folder: Path, workers: int, advance: Callable[[int], None] = lambda count: None
) -> Found:
    """Writes a row for each document of the source, in order, to `folder / ROWS`.

    Args:
        advance: told of bytes that were read, as they are on the disk.

    Raises:
        ValueError: for text that cannot be read, naming its place.
    """
    groups = list(_groups(listing))
    few = 2 if sum(listing.num_bytes) > LARGE_TEXT else FEW_JOBS
    here, told = workers == 1 or len(groups) < few, 0  # what this process reads, it can tell of on the way
    number, num_rows, counts, matches = 0, 0, Counter(listing.counts), Counter[str]()

    def tell(count: int) -> None:
        nonlocal told
        count = min(count, groups[number][0] - told)  # packed files have more text than bytes
        told += count
        advance(count)

    work = partial(read_group, source, folder, advance=tell if here else None)
    jobs = ((size, (number, names)) for number, (size, names) in enumerate(groups))
    with open(folder / ROWS, "wb") as rows, closing(in_order(work, jobs, workers, few)) as results:
        for size, found in results:
            path = _group_file(folder, number)
            with open(path, "rb") as file:
                shutil.copyfileobj(file, rows, 1 << 20)
            path.unlink()
            num_rows += found.num_rows
            counts.update(found.counts)
            matches.update(found.matches)
            advance(size - told)
            number, told = number + 1, 0
    return Found(num_rows, counts, matches)


def read_group(
    source: Source, folder: Path, job: tuple[int, list[str]], advance: Callable[[int], None] | None = None
) -> Found:
    """Writes the rows of some of the listed names to a file of their own, named by the group's number."""
    number, names = job
    num_rows, counts, matches = 0, Counter[str](), Counter[str]()
    with open(_group_file(folder, number), "wb") as rows:
        for name in names:
            for document in source.read(name, (0, 0), counts):
                held = _matching(document, source.held_out or ())
                matches.update(held)
                rows.write(_ROW.pack(*measure(document.pieces, advance), bool(held)))
                num_rows += 1
    return Found(num_rows, counts, matches)


def measure(pieces: Pieces, advance: Callable[[int], None] | None = None) -> tuple[bytes, int, int]:
    """Digest, bytes and characters of a document."""
    digest, num_bytes, num_chars = hashlib.blake2b(digest_size=DIGEST_BYTES), 0, 0
    for piece in pieces():
        if piece is not None:
            data = to_bytes(piece)
            digest.update(data)
            num_bytes += len(data)
            num_chars += len(piece)
            if advance:
                advance(len(data))
    return digest.digest(), num_bytes, num_chars


def portions_of_rows(folder: Path, first: int = 0) -> Iterator[np.ndarray]:
    """Rows [n] of documents `first` and following."""
    with open(folder / ROWS, "rb") as rows:
        rows.seek(first * ROW.itemsize)
        while len(found := np.frombuffer(rows.read(PORTION_ROWS * ROW.itemsize), dtype=ROW)):
            yield found


def _group_file(folder: Path, number: int) -> Path:
    return folder / f"group{number}"


def _groups(listing: Listing) -> Iterator[tuple[int, list[str]]]:
    """Names that are read together, and their bytes on the disk."""
    names, size = list[str](), 0
    for name, num_bytes in zip(listing.names, listing.num_bytes, strict=True):
        names.append(name)
        size += num_bytes
        if size >= GROUP_BYTES or len(names) == GROUP_FILES:
            yield size, names
            names, size = [], 0
    if names:
        yield size, names


def _matching(document: Document, patterns: tuple[str, ...]) -> list[str]:
    names = (document.name, *document.labels)
    return [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]
