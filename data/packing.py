"""How the documents of one source are cut into sequences of T tokens.

A *lane* is the sequences of one source at one sequence length, each found at once by its number. `follow` gives the
lane at another length that begins where this one has come to: no token is lost, and none comes twice.

Whole epochs are dealt only where one of their sequences is asked for, and only the last two are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from typing import Protocol, Self

import numpy as np

from data.order import Epochs, keys
from data.pieces import NOTHING, Pieces, joined, several


class Lane(Protocol):
    """The sequences of one source at one length."""

    @property
    def fill(self) -> Fraction:
        """Share of an epoch's sequences that is not padding."""

    @property
    def per_epoch(self) -> Fraction:
        """Sequences of a whole epoch."""

    def sequence(self, index: int) -> Pieces:
        """The pieces of a sequence, T tokens or less; the rest of it is padding."""

    def follow(self, index: int, sequence_length: int) -> Self:
        """The lane of another length that goes on before sequence `index` of this one, which lets go what it keeps:
        it may be read again, from scratch.
        """


class Line:
    """Documents laid end to end on a line of tokens without end, epoch after epoch. A sequence is T tokens of it:
    nothing is padded, and a document goes on in the next sequence.

    Args:
        start: on the line, of sequence 0.
        end: of the line; None = without. The last sequence is shorter.
    """

    fill = Fraction(1)

    def __init__(self, epochs: Epochs, sequence_length: int, start: int = 0, end: int | None = None) -> None:
        self._epochs, self._length, self._start, self._end = epochs, sequence_length, start, end

    @property
    def per_epoch(self) -> Fraction:
        return Fraction(self._epochs.num_tokens, self._length)

    def sequence(self, index: int) -> Pieces:
        first = self._start + index * self._length
        last = first + self._length if self._end is None else min(first + self._length, self._end)
        parts = [NOTHING]
        while first < last:
            epoch, begin = divmod(first, self._epochs.num_tokens)
            stop = min(begin + last - first, self._epochs.num_tokens)
            parts.append(self._epochs.kept(epoch).part(begin, stop))
            first += stop - begin
        return joined(parts)

    def follow(self, index: int, sequence_length: int) -> "Line":
        return Line(self._epochs, sequence_length, self._start + index * self._length)


class Bins:
    """Sequences that end with the epoch: its pieces are cut and dealt by `deal`, what is left is padding.

    Args:
        epoch: the first one.
        rest: what is left of that epoch where another lane has served the others; None = all.
    """

    def __init__(
        self,
        epochs: Epochs,
        sequence_length: int,
        *,
        long: str,
        short: str,
        epoch: int = 0,
        rest: Pieces | None = None,
    ) -> None:
        self._epochs, self._length, self._long, self._short = epochs, sequence_length, long, short
        self._epoch, self._first_whole = epoch, epoch + (rest is not None)
        deal_part = partial(deal, sequence_length=sequence_length, long=long, short=short, seed=epochs.seed)
        self._rest = None if rest is None else deal_part(rest, epoch=epoch)
        self._num_rest = 0 if self._rest is None else len(self._rest)

        def whole(epoch: int) -> Dealt:  # knows no `self`: a lane in a circle with what it keeps would go late
            dealt = deal_part(epochs.pieces(epoch), epoch=epoch)
            epochs.num_dealt[sequence_length, short] = len(dealt)
            return dealt

        self._whole = lru_cache(maxsize=2)(whole)

    @property
    def _num_whole(self) -> int:
        """Sequences of each whole epoch. Where none has been dealt they are counted, which takes no order."""
        found, key = self._epochs.num_dealt, (self._length, self._short)
        if key not in found:
            found[key] = count(self._epochs.lengths, *key)
        return found[key]

    @property
    def fill(self) -> Fraction:
        return Fraction(self._epochs.num_tokens, self._num_whole * self._length)

    @property
    def per_epoch(self) -> Fraction:
        return Fraction(self._num_whole)

    def sequence(self, index: int) -> Pieces:
        epoch, at = self._find(index)
        return self._dealt(epoch).sequence(at)

    def follow(self, index: int, sequence_length: int) -> "Bins":
        epoch, at = self._find(index)
        rest = None
        if epoch < self._first_whole or at:
            rest = self._epochs.ordered(epoch, self._dealt(epoch).after(at).merged())
        self._whole.cache_clear()
        return Bins(self._epochs, sequence_length, long=self._long, short=self._short, epoch=epoch, rest=rest)

    def _find(self, index: int) -> tuple[int, int]:
        """The epoch of a sequence, and its number in what this lane has of that epoch."""
        if index < self._num_rest:
            return self._epoch, index
        index -= self._num_rest
        if index * self._length < self._epochs.num_tokens:  # no epoch has fewer: nothing need be counted
            return self._first_whole, index
        if (self._length, self._short) not in self._epochs.num_dealt:
            # Dealing an epoch tells how many sequences each has. With little padding this one is the one asked for.
            self._whole(self._first_whole + index * self._length // self._epochs.num_tokens)
        epochs, at = divmod(index, self._num_whole)
        return self._first_whole + epochs, at

    def _dealt(self, epoch: int) -> "Dealt":
        return self._rest if self._rest is not None and epoch == self._epoch else self._whole(epoch)


@dataclass(frozen=True)
class Dealt:
    """The pieces of sequences, one sequence after the other."""

    pieces: Pieces
    bounds: np.ndarray  # int64 [num_sequences + 1], where each sequence starts in `pieces`

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def sequence(self, index: int) -> Pieces:
        at = np.arange(self.bounds[index], self.bounds[index + 1])
        return self.pieces[at]  # a copy: a view would keep the whole epoch

    def after(self, index: int) -> Pieces:
        """All pieces from this sequence on."""
        return self.pieces[self.bounds[index] :]


def deal(pieces: Pieces, sequence_length: int, *, long: str, short: str, seed: int, epoch: int) -> Dealt:
    """Cuts the pieces of an epoch and deals them to sequences, in a random order.

    Each window of T tokens is a sequence of its own. Tails and shorter pieces share sequences: end to end, cut where a
    sequence ends (short=pack), or uncut, each where it fits best (short=fit). With long=consecutive the windows of a
    document come in a row, and after them the sequence with its tail.
    """
    windows, owner, tails, tail_owner = pieces.windows(sequence_length)
    if short == "fit":
        shared = best_fit(tails.length, sequence_length)
    else:
        tails, shared = tails.cut(sequence_length)
    number = np.concatenate([np.arange(len(owner)), len(owner) + shared])  # of each piece's sequence, windows first
    num_sequences = int(number.max(initial=-1)) + 1
    together = np.arange(num_sequences)  # sequences of one number stay together, as they are
    if long == "consecutive":
        assert short == "fit", "on a line documents are consecutive by themselves"
        home = np.searchsorted(owner, np.arange(len(pieces.item)))  # the first window of each piece
        home[tail_owner] = len(owner) + shared
        together[: len(owner)] = home[owner]
    order = np.argsort(keys(seed ^ SEQUENCES, epoch, together), kind="stable")
    place = np.empty(num_sequences, np.int64)
    place[order] = np.arange(num_sequences)
    place = place[number]
    counts = np.bincount(place, minlength=num_sequences)
    return Dealt(joined([windows, tails])[np.argsort(place, kind="stable")], np.concatenate([[0], np.cumsum(counts)]))


def count(lengths: np.ndarray, sequence_length: int, short: str) -> int:
    """The number of sequences that pieces of these lengths are dealt to, in whatever order they come."""
    tails = lengths % sequence_length
    if short == "fit":
        shared = _fitted(*_by_size(tails[tails > 0]), sequence_length)[1]
    else:
        shared = -(-int(tails.sum()) // sequence_length)
    return int((lengths // sequence_length).sum()) + shared


SEQUENCES = 1 << 63  # makes another seed of a seed: documents and sequences are shuffled independently


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """A bin for each length: longest first, each to where it leaves the least room; int64 [n], bins from 0.

    Equal lengths are placed together: the fullest bins that have room for one take as many as they can.
    """
    order = np.argsort(-lengths, kind="stable")
    runs, _ = _fitted(*_by_size(lengths), room)
    firsts, numbers, each = np.array(runs, np.int64).reshape(-1, 3).T
    run, at = several(numbers)
    chosen = np.empty(len(lengths), np.int64)
    chosen[order] = np.repeat(firsts[run] + at, each[run])
    return chosen


def _by_size(lengths: np.ndarray) -> tuple[list[int], list[int]]:
    """The lengths that occur, longest first, and how often each does."""
    sizes, counts = np.unique(lengths, return_counts=True)
    return sizes[::-1].tolist(), counts[::-1].tolist()


def _fitted(sizes: Sequence[int], counts: Sequence[int], room: int) -> tuple[list[tuple[int, int, int]], int]:
    """(first bin, bins, lengths in each) for the lengths in turn, longest first; and the number of all bins."""
    runs, bins, num_bins = [], _Bins(room), 0
    for size, count in zip(sizes, counts, strict=True):
        while count:
            free, first, number = bins.take(size) or (room, num_bins, -(-count // (room // size)))
            num_bins = max(num_bins, first + number)
            each = free // size
            filled, over = min(number, count // each), 0
            runs.append((first, filled, each))
            bins.put(free - each * size, first, filled)
            count -= filled * each
            if filled < number and count:  # the last of them takes fewer than it could
                runs.append((first + filled, 1, count))
                bins.put(free - count * size, first + filled, 1)
                count, over = 0, 1
            bins.put(free, first + filled + over, number - filled - over)
    return runs, num_bins


WORD = 1024  # bits


class _Bins:
    """Runs of bins by how much room they have left. Which rooms occur is kept as bits, in words and a word of words."""

    def __init__(self, room: int) -> None:
        self._runs: dict[int, list[tuple[int, int]]] = {}
        self._words, self._top = [0] * (room // WORD + 1), 0

    def put(self, free: int, first: int, number: int) -> None:
        """Adds bins first .. first + number - 1, that have `free` left each."""
        if free and number:
            self._runs.setdefault(free, []).append((first, number))
            self._words[free // WORD] |= 1 << free % WORD
            self._top |= 1 << free // WORD

    def take(self, size: int) -> tuple[int, int, int] | None:
        """Removes a run of bins that have the least room of all that have `size`: (free, first, number)."""
        word = size // WORD
        bits = self._words[word] >> size % WORD
        free = size
        if not bits:
            above = self._top >> word + 1
            if not above:
                return None
            word += _lowest(above) + 1
            bits, free = self._words[word], word * WORD
        free += _lowest(bits)
        runs = self._runs[free]
        first, number = runs.pop()
        if not runs:
            del self._runs[free]
            self._words[word] &= ~(1 << free % WORD)
            if not self._words[word]:
                self._top &= ~(1 << word)
        return free, first, number


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
