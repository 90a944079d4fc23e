"""Stretches of documents as arrays: what sequences are made of before any token is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np


@dataclass(frozen=True)
class Pieces:
    """Stretches of single documents of one source, in order; int64 [n] each."""

    item: np.ndarray  # of which document, and of which of its copies: see `data.order.Epochs`
    first: np.ndarray  # first token, counted in the document
    length: np.ndarray  # tokens, 1 or more

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each starts when all are laid end to end, and last where they end; int64 [n + 1]."""
        return np.concatenate([[0], np.cumsum(self.length)])

    def __getitem__(self, index: np.ndarray | slice) -> Self:
        return type(self)(self.item[index], self.first[index], self.length[index])

    def part(self, start: int, stop: int) -> Self:
        """Tokens start .. stop - 1 of all pieces laid end to end; fewer where they end before."""
        stop = min(stop, int(self.starts[-1]))
        if start >= stop:
            return self[:0]
        low = int(np.searchsorted(self.starts, start, side="right")) - 1
        high = int(np.searchsorted(self.starts, stop, side="left"))
        begins, ends = np.maximum(self.starts[low:high], start), np.minimum(self.starts[low + 1 : high + 1], stop)
        return type(self)(self.item[low:high], self.first[low:high] + begins - self.starts[low:high], ends - begins)

    def cut(self, length: int) -> tuple[Self, np.ndarray]:
        """Laid end to end and cut after each `length` tokens; with the number of the cut that each then lies in."""
        low, high = self.starts[:-1] // length, (self.starts[1:] - 1) // length
        owner, number = several(high - low + 1)
        number += low[owner]
        begins = np.maximum(self.starts[owner], number * length)
        ends = np.minimum(self.starts[owner + 1], (number + 1) * length)
        return type(self)(self.item[owner], self.first[owner] + begins - self.starts[owner], ends - begins), number

    def windows(self, length: int) -> tuple[Self, np.ndarray, Self, np.ndarray]:
        """Each piece cut from its own start into windows of `length` tokens, and the tail that is left, where one is.

        Returns:
            The windows in order, the number of the piece that each is of, and the same of the tails.
        """
        full, left = np.divmod(self.length, length)
        owner, number = several(full)
        windows = type(self)(self.item[owner], self.first[owner] + number * length, np.full(len(owner), length))
        rest = np.flatnonzero(left)
        tails = type(self)(self.item[rest], self.first[rest] + full[rest] * length, left[rest])
        return windows, owner, tails, rest

    def merged(self) -> Self:
        """Pieces of the same copy that are neighbours in it as one; sorted by item."""
        if not len(self.item):
            return self
        ordered = self[np.lexsort((self.first, self.item))]
        ends = ordered.first + ordered.length
        goes_on = (ordered.item[1:] == ordered.item[:-1]) & (ordered.first[1:] == ends[:-1])
        heads = np.flatnonzero(np.concatenate([[True], ~goes_on]))
        return type(self)(ordered.item[heads], ordered.first[heads], np.add.reduceat(ordered.length, heads))


NOTHING = Pieces(*np.zeros((3, 0), np.int64))


def joined(parts: Sequence[Pieces]) -> Pieces:
    """One after the other."""
    columns = zip(*((part.item, part.first, part.length) for part in parts), strict=True)
    return Pieces(*(np.concatenate(column) for column in columns))


def several(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[2, 0, 3] → [0, 0, 2, 2, 2] and [0, 1, 0, 1, 2]: each index so many times, and which time it is."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - (np.cumsum(counts) - counts)[index]
