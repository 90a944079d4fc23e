"""An endless, resumable stream of sequences whose cursor is a small dict.

Documents, in an order that depends on seed and epoch only, are laid end to end on one line of tokens without
end, epoch after epoch. Sequence n is line[n * T : (n + 1) * T]. Nothing is dropped and nothing padded: a
document longer than what is left of a sequence goes on in the next one. Nothing here knows of ranks, batches
or prefetching, so a position on the line means the same to every run that reads this shard with this seed.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.format import Shard

IGNORE = -100  # the label of a token that has no next token in its document


@dataclass(frozen=True)
class _Pieces:
    """A range of the line as stretches of single documents, in order; int64 [n] each."""

    line: np.ndarray  # where the document starts on the line; may lie before the range
    shard: np.ndarray  # where the stretch starts in the shard
    length: np.ndarray
    ends: np.ndarray  # bool: the document ends with the stretch


class TokenStream:
    """Sequences of `sequence_length` tokens from a shard.

    Args:
        shard: the documents.
        sequence_length: T, tokens of one sequence.
        seed: of the order of documents.
        shuffle: another order in each epoch; otherwise the shard's own.
        epochs: how often the documents are read; None = without end. After the last of them the line ends:
            the last sequence is shorter, and those beyond it are empty.

    Attributes:
        num_sequences: sequences that have tokens; None where the stream has no end.
    """

    def __init__(
        self,
        shard: Shard,
        sequence_length: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        if shard.num_tokens == 0:
            raise ValueError(f"{shard.folder} has no documents: prepare data that has some under another data.name")
        self.shard, self.sequence_length, self.seed, self.shuffle = shard, sequence_length, seed, shuffle
        self.num_sequences = None if epochs is None else -(-epochs * shard.num_tokens // sequence_length)
        self._end = None if epochs is None else epochs * shard.num_tokens
        self._lengths = np.diff(shard.offsets)
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        content = f"{shard.fingerprint} {seed if shuffle else 'in order'}"
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]

    def documents(self, n: int) -> tuple[int, ...]:
        """Lengths of the stretches of documents in sequence n: T in all, or less where the stream ends."""
        return tuple(self._pieces(*self._range(n, 0, self.sequence_length)).length.tolist())

    def read(self, n: int, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop - 1 of sequence n, int64 [stop - start]."""
        return self._read(self._pieces(*self._range(n, start, stop)), ahead=False)

    def labelled(self, n: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens start .. stop - 1 of sequence n with their labels and positions, int64 [stop - start] each.

        A label is the next token of the same document, also where that lies beyond `stop` or beyond the
        sequence, and -100 for a document's last token. Positions count from 0 at the start of each stretch of
        the sequence.
        """
        first, last = self._range(n, start, stop)
        pieces = self._pieces(first, last)
        line = self._read(pieces, ahead=True)
        tokens, labels = line[:-1], line[1:].copy()
        labels[np.cumsum(pieces.length)[pieces.ends] - 1] = IGNORE
        origin = np.maximum(pieces.line, n * self.sequence_length)
        positions = np.arange(first, last) - np.repeat(origin, pieces.length)
        return tokens, labels, positions

    def cursor(self, n: int) -> dict[str, Any]:
        """What a checkpoint keeps: the position on the line before sequence n, for any ranks or batches."""
        tokens = n * self.sequence_length
        return {
            "tokens": tokens,
            "epoch": tokens // self.shard.num_tokens,
            "sequence_length": self.sequence_length,
            "fingerprint": self.fingerprint,
        }

    def start(self, cursor: dict[str, Any]) -> int:
        """The first sequence after a cursor, which may have been taken at another sequence length.

        Raises:
            ValueError: where the cursor is of other data or another seed, or lies inside one of this stream's
                sequences.
        """
        if cursor["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"the checkpoint's order of data is {cursor['fingerprint']}, that of {self.shard.folder} "
                f"with train.seed={self.seed} is {self.fingerprint}: use the data.name and train.seed that "
                "it was trained with, or start another run with run.name=NAME"
            )
        tokens, length = cursor["tokens"], self.sequence_length
        if tokens % length:
            legal = sorted({cursor["sequence_length"], math.gcd(tokens, length)})
            raise ValueError(
                f"data.sequence_length={length} does not divide the {tokens} tokens that the checkpoint has "
                f"consumed at {cursor['sequence_length']}: use {' or '.join(map(str, legal))}"
            )
        return tokens // length

    def _range(self, n: int, start: int, stop: int) -> tuple[int, int]:
        assert 0 <= start <= stop <= self.sequence_length, f"tokens {start} to {stop} of {self.sequence_length}"
        first, last = n * self.sequence_length + start, n * self.sequence_length + stop
        return (first, last) if self._end is None else (min(first, self._end), min(last, self._end))

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents in this epoch's order, and where each starts in the epoch; int64 [n] and [n + 1]."""
        if epoch not in self._epochs:
            for old in [known for known in self._epochs if abs(known - epoch) > 1]:
                self._epochs.pop(old, None)
            order = np.arange(self.shard.num_documents)
            if self.shuffle:
                order = np.argsort(_mix(self.seed, epoch, order), kind="stable")
            starts = np.concatenate([[0], np.cumsum(self._lengths[order])])
            self._epochs[epoch] = order, starts
        return self._epochs[epoch]

    def _pieces(self, first: int, last: int) -> _Pieces:
        total, parts = self.shard.num_tokens, []
        while first < last or not parts:
            epoch = first // total
            origin = epoch * total
            begin, end = first - origin, min(last - origin, total)
            order, starts = self._order(epoch)
            low = int(np.searchsorted(starts, begin, side="right")) - 1
            high = max(low, int(np.searchsorted(starts, end, side="left"))) if end > begin else low
            head, tail = starts[low:high], starts[low + 1 : high + 1]
            begins, ends = np.maximum(head, begin), np.minimum(tail, end)
            shard = self.shard.offsets[order[low:high]] + begins - head
            parts.append((head + origin, shard, ends - begins, ends == tail))
            first = origin + end
        return _Pieces(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _read(self, pieces: _Pieces, ahead: bool) -> np.ndarray:
        """The tokens of the pieces, int64; `ahead` adds the last document's next one, or 0 where it ends."""
        size = int(pieces.length.sum())
        tokens = np.zeros(size + ahead, dtype=np.int64)
        if not size:
            return tokens
        starts, stops = pieces.shard, pieces.shard + pieces.length
        # Documents that are neighbours in the shard are read by one call.
        breaks = np.flatnonzero(starts[1:] != stops[:-1])
        starts, stops = starts[np.concatenate([[0], breaks + 1])], stops[np.concatenate([breaks, [-1]])]
        if ahead and not pieces.ends[-1]:
            stops[-1] += 1
        done = 0
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            tokens[done : done + stop - start] = self.shard.read(start, stop)
            done += stop - start
        return tokens


def _mix(seed: int, epoch: int, documents: np.ndarray) -> np.ndarray:
    """A random uint64 for each document, by splitmix64: numpy's own orders may change with its version.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    mask = (1 << 64) - 1
    state = _scramble(np.array([seed & mask], dtype=np.uint64))
    state = _scramble(state ^ np.array([epoch], dtype=np.uint64))
    return _scramble(documents.astype(np.uint64) ^ state)


def _scramble(value: np.ndarray) -> np.ndarray:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
