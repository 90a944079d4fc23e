"""In which order the documents of one source come, epoch after epoch: a function of the seed."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from data.pieces import Pieces


class Epochs:
    """The documents of one source in each epoch, shuffled anew, long ones more often where that is asked for.

    Copy c of document d is *item* c * num_documents + d. An epoch has each item once.

    Args:
        lengths: tokens of each document, int64 [num_documents]; at least one document.
        seed: of the order; None = always the order in which they are stored.
        upweight: (tokens, times): documents of so many tokens or more come so often in an epoch; of several that
            apply, the one with the most tokens.

    Attributes:
        num_tokens: of one epoch, copies included; lengths: of its items, in no order of an epoch; int64.
        kept: epoch -> the same as `pieces`. Two epochs are kept: a sequence may lie in both.
        num_dealt: (sequence length, short) -> sequences that an epoch is dealt to, which is the same for all epochs:
            what `data.packing` has found so far.
    """

    def __init__(self, lengths: np.ndarray, seed: int | None, upweight: Sequence[tuple[int, int]] = ()) -> None:
        self.seed = seed
        times = np.ones(len(lengths), np.int64)
        for tokens, often in sorted(upweight):
            times[lengths >= tokens] = often
        copies = range(int(times.max(initial=1)))
        self._items = np.concatenate([np.flatnonzero(times > copy) + copy * len(lengths) for copy in copies])
        self.lengths = lengths[self._items % len(lengths)]
        self.num_tokens = int(self.lengths.sum())
        self.kept = lru_cache(maxsize=2)(self.pieces)
        self.num_dealt: dict[tuple[int, str], int] = {}

    def pieces(self, epoch: int) -> Pieces:
        """The documents of an epoch, whole, in order."""
        order = self._order(epoch, self._items)
        return Pieces(self._items[order], np.zeros_like(self.lengths), self.lengths[order])

    def ordered(self, epoch: int, pieces: Pieces) -> Pieces:
        """The pieces in the order that this epoch has their items in."""
        return pieces[self._order(epoch, pieces.item)]

    def _order(self, epoch: int, items: np.ndarray) -> np.ndarray | slice:
        return slice(None) if self.seed is None else np.argsort(keys(self.seed, epoch, items), kind="stable")


def keys(seed: int, epoch: int, items: np.ndarray) -> np.ndarray:
    """A random uint64 for each item, no two equal, by splitmix64: numpy's own orders may change with its version.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    state = _scramble(np.array([seed & (1 << 64) - 1], dtype=np.uint64))
    state = _scramble(state ^ np.array([epoch], dtype=np.uint64))
    return _scramble(items.astype(np.uint64) ^ state)


def _scramble(value: np.ndarray) -> np.ndarray:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
