"""The documents that will be in a corpus, in order, from the first or from where somebody stopped; and a sample."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from data.documents import SPLITS, TRAIN, Document, Source, span
from data.scan import portions_of_rows
from data.split import DUPLICATE, FATES, Plan

LONGEST_SAMPLE = 16  # times as long as asked for may a portion of the sample be, where a line goes on and on


class Changed(ValueError):
    """The text is no longer that which was read first."""

    def __init__(self) -> None:
        super().__init__("the text changed while it was prepared: run the same command again")


@dataclass(frozen=True, slots=True)
class Planned:
    """A document that will be in the corpus."""

    document: Document
    file: int  # place of its name among those of the corpus
    row: int
    half: int  # of the only document: 0 or 1
    split: str
    digest: bytes
    num_bytes: int


@dataclass(frozen=True)
class Corpus:
    """What a source lists, read, with the fates that were settled, in files in `folder`."""

    source: Source
    names: list[str]
    folder: Path
    plan: Plan

    def documents(self, file: int = 0, place: tuple[int, int] = (0, 0), row: int = 0) -> Iterator[Planned]:
        """Those that are kept, in order, from that of `row` on, which is at `place` in `file`.

        Raises:
            Changed: where the files are no longer those that were read first.
        """
        fates = self._fates(row)
        for number in range(file, len(self.names)):
            start = place if number == file else (0, 0)
            for document in self.source.read(self.names[number], start, Counter()):
                fate, digest, num_bytes = next(fates, (None, b"", 0))
                if fate is None:
                    raise Changed
                if fate != DUPLICATE:
                    planned = Planned(document, number, row, 0, SPLITS[fate], digest, num_bytes)
                    yield from self._halves(planned) if self.plan.halves else [planned]
                row += 1
        if row != self.plan.num_rows:
            raise Changed

    def sample(self, num_bytes: int, portion_chars: int) -> Iterator[str]:
        """About `num_bytes` of the training documents, in portions that are spread evenly over all of them."""
        share = min(1.0, num_bytes / max(1, self.plan.num_bytes[TRAIN]))
        due = 1.0  # the first portion is in
        for planned in self.documents():
            if planned.split == TRAIN:
                for piece in planned.document.pieces():
                    for portion in sentences(piece or "", portion_chars):
                        if due >= 1.0:
                            due -= 1.0
                            yield portion
                        due += share

    def _fates(self, row: int) -> Iterator[tuple[int, bytes, int]]:
        """Fate, digest and bytes of each document from `row` on."""
        with open(self.folder / FATES, "rb") as file:
            file.seek(row)
            for rows in portions_of_rows(self.folder, row):
                fates = np.frombuffer(file.read(len(rows)), dtype=np.uint8)
                digests = np.ascontiguousarray(rows["digest"])
                for number, (fate, num_bytes) in enumerate(zip(fates.tolist(), rows["bytes"].tolist(), strict=True)):
                    yield fate, digests[number].tobytes(), num_bytes

    def _halves(self, whole: Planned) -> Iterator[Planned]:
        for number, (half, split, end) in enumerate(zip(self.plan.halves, SPLITS, ("", " (end)"), strict=True)):
            document = whole.document
            pieces = partial(span, document.pieces, half.start, half.stop)
            part = Document(document.name + end, pieces, document.facts, document.place)
            yield Planned(part, whole.file, whole.row, number, split, bytes.fromhex(half.digest), half.num_bytes)


def sentences(text: str, size: int) -> Iterator[str]:
    """A text in portions to train on: cut before the first newline after `size` characters."""
    start = 0
    while start < len(text):
        newline = text.find("\n", start + size, start + LONGEST_SAMPLE * size)
        stop = newline if newline >= 0 else start + LONGEST_SAMPLE * size
        yield text[start:stop]
        start = stop
