"""What becomes of each document: for training, held out, or dropped because it is there already.

Documents are told apart by the digest of their text, on which it depends, too, who is held out: adding documents moves
no other, and no text is on both sides.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from data.documents import SPLITS, Document, Listing, Source, span
from data.scan import Found, measure, portions_of_rows

FATES = "fates"  # the file: one byte a document
TRAINING, HELD_OUT, DUPLICATE = range(3)  # places in SPLITS, and neither
SORTED_ROWS = 1 << 20  # about so many at once, in search of duplicates
NUMBERED = np.dtype([("number", "<i8"), ("digest", "<u8", (2,)), ("held", "u1")])  # a row of a part of them
_PLACES = 1 << 48


@dataclass(frozen=True)
class Half:
    """One of the two parts that the only document of a corpus is cut into: characters start .. stop - 1."""

    start: int
    stop: int
    num_bytes: int
    digest: str


@dataclass(frozen=True)
class Plan:
    """What was settled; the documents' fates lie in a file beside their rows.

    Attributes:
        num_rows: documents with text, duplicates included.
        counts: of documents, files, and what was passed by.
        num_bytes: of text, by split.
        notes: what people should know, one line each.
        halves: of the only document, where there is one only: for training, and held out.
    """

    num_rows: int
    counts: dict[str, int]
    num_bytes: dict[str, int]
    notes: list[str]
    halves: list[Half] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**value | {"halves": [Half(**half) for half in value["halves"]]})


def settle(source: Source, listing: Listing, found: Found, folder: Path, fraction: float) -> Plan:
    """Settles the fate of every document that has a row in `folder`.

    Raises:
        ValueError: where nothing is left to train on, or to hold out.
    """
    fates = np.zeros(found.num_rows, dtype=np.uint8)
    mark_duplicates(folder, fates)
    counts, duplicates = found.counts.copy(), int((fates == DUPLICATE).sum())
    counts.update(duplicate=duplicates, kept=found.num_rows - duplicates)
    notes = _notes(counts)
    if not counts["kept"]:
        raise ValueError(f"{listing.where} has no document with text ({'; '.join(notes)}): {source.advice(listing)}")
    halves = list[Half]()
    if source.held_out is not None:
        _split_by_name(source.held_out, listing, found, folder, fates)
    elif counts["kept"] == 1:
        halves = _halve(source, listing, int(np.flatnonzero(fates != DUPLICATE)[0]), folder, fraction)
    else:
        split_by_digest(folder, fates, fraction)
    (folder / FATES).write_bytes(fates.tobytes())
    sizes, chars = _totals(folder, fates)
    if halves:
        sizes, chars = [half.num_bytes for half in halves], [half.stop - half.start for half in halves]
        notes.append(f"one document only: its last {chars[HELD_OUT]:,} of {sum(chars):,} characters are held out")
    else:
        notes.append(f"held out: {chars[HELD_OUT]:,} of {sum(chars):,} characters")
    counts = {kind: count for kind, count in sorted(counts.items()) if count}
    return Plan(found.num_rows, counts, dict(zip(SPLITS, sizes, strict=True)), notes, halves)


def mark_duplicates(folder: Path, fates: np.ndarray) -> None:
    """Marks all but one of the documents with equal text: the first that is held out by name, else the first.

    Rows are dealt by their digest into files, each of which is sorted in memory: of many documents, too, they are read
    twice.
    """
    num_parts = max(1, -(-len(fates) // SORTED_ROWS))
    for first, row in _rows(folder):
        numbered = np.empty(len(row), dtype=NUMBERED)
        numbered["number"], numbered["digest"], numbered["held"] = (
            first + np.arange(len(row)),
            row["digest"],
            row["held"],
        )
        parts = row["digest"][:, 1] % np.uint64(num_parts)
        order = np.argsort(parts, kind="stable")
        bounds = np.searchsorted(parts[order], np.arange(num_parts + 1))
        for part in np.flatnonzero(np.diff(bounds)).tolist():
            with open(folder / f"part{part}", "ab") as file:
                file.write(numbered[order[bounds[part] : bounds[part + 1]]].tobytes())
    for part in range(num_parts):
        path = folder / f"part{part}"
        if path.exists():
            _mark(np.fromfile(path, dtype=NUMBERED), fates)
            path.unlink()


def _mark(rows: np.ndarray, fates: np.ndarray) -> None:
    digests = np.ascontiguousarray(rows["digest"])
    order = np.lexsort((rows["number"], rows["held"] == 0, digests[:, 0], digests[:, 1]))
    again = (digests[order[1:]] == digests[order[:-1]]).all(axis=1)
    fates[rows["number"][order[1:][again]]] = DUPLICATE


def split_by_digest(folder: Path, fates: np.ndarray, fraction: float) -> None:
    """Holds out the documents whose place, a hash of their text, is below `fraction`; of few documents, one that has
    about that share of the text, and never all."""
    bound, total = round(fraction * _PLACES), 0
    highest = (-1, 0)  # place and number
    for first, row in _rows(folder):
        place, fate = _places(row), fates[first : first + len(row)]
        kept = np.flatnonzero(fate != DUPLICATE)
        fate[kept[place[kept] < bound]] = HELD_OUT
        total += int(row["chars"][kept].sum())
        if len(kept):
            at = kept[place[kept].argmax()]
            highest = max(highest, (int(place[at]), int(first + at)))
    if not (fates == HELD_OUT).any():
        nearest = (np.inf, 0)
        for first, row in _rows(folder):
            off = np.abs(row["chars"] - fraction * total)
            off[fates[first : first + len(row)] == DUPLICATE] = np.inf
            nearest = min(nearest, (float(off.min()), int(first + off.argmin())))
        fates[nearest[1]] = HELD_OUT
    elif not (fates == TRAINING).any():
        fates[highest[1]] = TRAINING


def _split_by_name(patterns: tuple[str, ...], listing: Listing, found: Found, folder: Path, fates: np.ndarray) -> None:
    names = ", ".join(listing.names[:3]) + (", …" if len(listing.names) > 3 else "")
    for pattern in patterns:
        if not found.matches[pattern]:
            raise ValueError(f"data.validation_names={pattern} fits no document: names are like {names}")
    for first, row in _rows(folder):
        fate = fates[first : first + len(row)]
        fate[(fate != DUPLICATE) & (row["held"] > 0)] = HELD_OUT
    if not (fates == TRAINING).any():
        raise ValueError(
            f"data.validation_names={','.join(patterns)} fits all documents: leave some to train on; names are like "
            f"{names}"
        )


def _halve(source: Source, listing: Listing, number: int, folder: Path, fraction: float) -> list[Half]:
    """The only document, cut in two, so that its end is held out."""
    [total] = [int(row["chars"][number - first]) for first, row in _rows(folder) if 0 <= number - first < len(row)]
    if total < 2:
        raise ValueError(f"{listing.where} has one character: nothing can be held out, give more text")
    cut = min(max(1, round(total * (1 - fraction))), total - 1)
    document = next(d for n, d in enumerate(_documents(source, listing)) if n == number)
    halves = []
    for start, stop in ((0, cut), (cut, total)):
        digest, num_bytes, _ = measure(partial(span, document.pieces, start, stop))
        halves.append(Half(start, stop, num_bytes, digest.hex()))
    return halves


def _documents(source: Source, listing: Listing) -> Iterator[Document]:
    for name in listing.names:
        yield from source.read(name, (0, 0), Counter())


def _places(row: np.ndarray) -> np.ndarray:
    return row["digest"][:, 0] & np.uint64(_PLACES - 1)


def _totals(folder: Path, fates: np.ndarray) -> tuple[list[int], list[int]]:
    """Bytes and characters, by split."""
    sizes, chars = [0, 0], [0, 0]
    for first, row in _rows(folder):
        for split in (TRAINING, HELD_OUT):
            chosen = fates[first : first + len(row)] == split
            sizes[split] += int(row["bytes"][chosen].sum())
            chars[split] += int(row["chars"][chosen].sum())
    return sizes, chars


def _rows(folder: Path) -> Iterator[tuple[int, np.ndarray]]:
    first = 0
    for row in portions_of_rows(folder):
        yield first, row
        first += len(row)


def _notes(counts: Counter[str]) -> list[str]:
    """What was counted, in words: documents, and files where these make up documents."""
    always = ("kept", "empty", "duplicate")
    others = [kind for kind in sorted(counts) if kind not in always and not kind.startswith("files ")]
    shown = [f"{counts[kind]} {kind}" for kind in (*always, *others) if kind in always or counts[kind]]
    notes = ["documents: " + ", ".join(shown)]
    if files := [f"{counts[kind]} {kind[6:]}" for kind in sorted(counts) if kind.startswith("files ") and counts[kind]]:
        notes.append("files: " + ", ".join(files))
    return notes
