"""Sequences as they are read: tokens, labels and positions of any part of one, and which documents it is made of.

Nothing here knows of ranks, batches or prefetching: sequence n is the same to every run with the same sources, seed
and policies. Only the tokens that are asked for are read, and no Python loop runs over tokens or short documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

import numpy as np

from data.format import Tokens
from data.mixture import Turns
from data.order import Epochs
from data.packing import Lane, Line
from data.pieces import NOTHING, Pieces, several

IGNORE = -100  # the label of a token that has no next token in its document
NEAR = 2048  # tokens between two short pieces that cost no more to read than to skip: a page of 4 KiB
AT_ONCE = 1 << 20  # tokens, about the most that short pieces are read together for


@dataclass(frozen=True)
class Stretch:
    """A part of a document in a sequence."""

    source: str  # its name
    document: int  # counted in the source
    first: int  # token of the document
    length: int


class Sequences(Protocol):
    """What is trained or validated on. A sequence is `documents(n)` end to end; the rest of its T tokens is padding,
    and is not read. Any n may be asked for: beyond the end of finite ones there is nothing but padding.
    """

    sequence_length: int  # T
    num_sequences: int | None  # None = without end

    def documents(self, n: int) -> tuple[int, ...]:
        """Lengths of the stretches of documents in sequence n: T in all, or less."""

    def stretches(self, n: int) -> list[Stretch]:
        """The same, with where they are from."""

    def read(self, n: int, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop - 1 of sequence n, int64 [stop - start], or fewer where its documents end."""

    def labelled(self, n: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same tokens with their labels and positions, int64 each.

        A label is the next token of the same document, also where that lies beyond `stop` or beyond the sequence,
        and -100 for a document's last token. Positions count from 0 at the start of each stretch, or of the sequence.
        """


class Interleaved:
    """`Sequences` of several sources, by turns.

    Args:
        names, tokens, lanes: of each source.
        turns: which source each sequence is of.
        positions: document = they start anew with each stretch, sequence = they go on through the sequence.
    """

    def __init__(
        self,
        names: Sequence[str],
        tokens: Sequence[Tokens],
        lanes: Sequence[Lane],
        turns: Turns,
        *,
        sequence_length: int,
        num_sequences: int | None,
        positions: str,
    ) -> None:
        self.sequence_length, self.num_sequences = sequence_length, num_sequences
        self.lanes = lanes
        self._names, self._tokens = names, tokens
        self._positions = positions

        def find(n: int) -> tuple[int, Pieces]:  # knows no `self`: in a circle with its cache all of it would go late
            """The source of sequence n and its pieces."""
            assert n >= 0, f"sequence {n}"
            source, index = turns.turn(n)
            ended = num_sequences is not None and n >= num_sequences
            return source, NOTHING if ended else lanes[source].sequence(index)

        self._sequence = lru_cache(maxsize=8)(find)  # a sequence is read in many parts

    def documents(self, n: int) -> tuple[int, ...]:
        return tuple(self._sequence(n)[1].length.tolist())

    def stretches(self, n: int) -> list[Stretch]:
        source, pieces = self._sequence(n)
        documents = self._documents(source, pieces).tolist()
        parts = zip(documents, pieces.first.tolist(), pieces.length.tolist(), strict=True)
        return [Stretch(self._names[source], *part) for part in parts]

    def read(self, n: int, start: int, stop: int) -> np.ndarray:
        source, pieces = self._part(n, start, stop)
        tokens = self._tokens[source]
        return gather(tokens, tokens.offsets[self._documents(source, pieces)] + pieces.first, pieces.length)

    def labelled(self, n: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        source, pieces = self._part(n, start, stop)
        if not len(pieces.item):
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
        tokens, documents = self._tokens[source], self._documents(source, pieces)
        starts = tokens.offsets[documents] + pieces.first
        ahead = starts + pieces.length < tokens.offsets[documents + 1]  # it goes on: one token more is read
        if len(pieces.item) == 1:  # a part of one document, as most of long sequences are: nothing to take together
            line, labels = _with_labels(tokens, int(starts[0]), int(pieces.length[0]), bool(ahead[0]))
            return line, labels, self._position(n, start, pieces)
        line = gather(tokens, starts, pieces.length + ahead)
        labels, ends = np.empty_like(line), np.cumsum(pieces.length + ahead)
        np.add(line[1:], 0, out=labels[:-1])  # copying to where all is shifted by a token takes several times as long
        labels[-1], labels[ends[~ahead] - 1] = IGNORE, IGNORE
        if ahead[:-1].any():
            line, labels = np.delete(line, ends[ahead] - 1), np.delete(labels, ends[ahead] - 1)
        elif ahead[-1]:
            line, labels = line[:-1], labels[:-1]
        return line, labels, self._position(n, start, pieces)

    def _position(self, n: int, start: int, pieces: Pieces) -> np.ndarray:
        """Of each token of the pieces that begin at `start`."""
        size = int(pieces.starts[-1])
        if self._positions == "sequence":
            return np.arange(start, start + size)
        starts = self._sequence(n)[1].starts
        first = start - int(starts[np.searchsorted(starts, start, side="right") - 1])
        if len(pieces.length) == 1:
            return np.arange(first, first + size)
        position = np.ones(size, np.int64)  # summed up in place: one more each time, but back to 0 at a new stretch
        back = pieces.length[:-1].copy()
        back[:1] += first
        position[0], position[pieces.starts[1:-1]] = first, 1 - back
        return np.cumsum(position, out=position)

    def _part(self, n: int, start: int, stop: int) -> tuple[int, Pieces]:
        assert 0 <= start <= stop <= self.sequence_length, f"tokens {start} to {stop} of {self.sequence_length}"
        source, pieces = self._sequence(n)
        return source, pieces.part(start, stop)

    def _documents(self, source: int, pieces: Pieces) -> np.ndarray:
        return pieces.item % self._tokens[source].num_documents


def finite(tokens: Tokens, sequence_length: int, positions: str = "document", most: int | None = None) -> Sequences:
    """For validation: the documents in the order in which they are stored, each token once, end to end. The last
    sequence is shorter. With `most`, only so many of the first.

    Raises:
        ValueError: where there are no documents.
    """
    check_documents(tokens)
    epochs, available = Epochs(np.diff(tokens.offsets), seed=None), -(-tokens.num_tokens // sequence_length)
    return Interleaved(
        [tokens.where],
        [tokens],
        [Line(epochs, sequence_length, end=tokens.num_tokens)],
        Turns([Fraction(1)]),
        sequence_length=sequence_length,
        num_sequences=available if most is None else min(most, available),
        positions=positions,
    )


def check_documents(tokens: Tokens) -> None:
    """Refuses data without a token.

    Raises:
        ValueError: naming the data.
    """
    if not tokens.num_tokens:
        raise ValueError(f"{tokens.where} has no documents: prepare data that has some under another data.name")


def _with_labels(tokens: Tokens, start: int, size: int, ahead: bool) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of one stretch and the next ones, int64 [size] each; `ahead`: the last one, too, has a next one."""
    found = tokens.read(start, start + size + ahead)
    labels = np.empty(size, np.int64)
    labels[: size - 1 + ahead] = found[1:]
    if not ahead:
        labels[-1] = IGNORE
    return found[:size].astype(np.int64), labels


def gather(tokens: Tokens, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The tokens of stretches laid end to end, int64 [sum of lengths].

    Neighbours are read by one call, and so are short stretches that lie near one another, whatever their order.
    """
    out = np.empty(int(lengths.sum()), np.int64)
    if not len(out):
        return out
    heads = np.flatnonzero(np.concatenate([[True], starts[1:] != starts[:-1] + lengths[:-1]]))
    starts, lengths = starts[heads], np.add.reduceat(lengths, heads)
    places = np.cumsum(lengths) - lengths
    order = np.argsort(starts, kind="stable")
    starts, lengths, places = starts[order], lengths[order], places[order]
    short = lengths < NEAR
    near = (starts[1:] < starts[:-1] + lengths[:-1] + NEAR) & (starts[1:] // AT_ONCE == starts[:-1] // AT_ONCE)
    breaks = np.flatnonzero(~(near & short[1:] & short[:-1])) + 1
    for low, high in zip([0, *breaks.tolist()], [*breaks.tolist(), len(starts)], strict=True):
        first = int(starts[low])
        if high - low == 1:
            size, at = int(lengths[low]), int(places[low])
            out[at : at + size] = tokens.read(first, first + size)
        else:
            found = tokens.read(first, int((starts[low:high] + lengths[low:high]).max()))
            stretch, number = several(lengths[low:high])
            out[places[low:high][stretch] + number] = found[starts[low:high][stretch] - first + number]
    return out
