"""Which global token lives on which rank. No torch here.

A layout gives each rank *chunks* of global indices; everything that belongs to a token (its id, label,
position, document, rotary angle) is gathered through the same chunks, and `restore` puts results back in
order. All chunks of one layout share one step. Every rank holds equally many tokens, so only the tail of the
sequence may be padding.

Source: zigzag arXiv:2407.21783 §3.3.2 (pieces i and 2R-1-i), striped arXiv:2311.09431.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LAYOUTS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class Chunk:
    """Global indices start, start + step, … (count of them), stored side by side on a rank."""

    start: int
    count: int
    step: int = 1

    def indices(self) -> np.ndarray:
        """The global indices, int64[count]."""
        return self.start + self.step * np.arange(self.count, dtype=np.int64)


def padded_length(layout: str, sequence_length: int, ranks: int, multiple: int = 1) -> int:
    """The smallest length >= sequence_length that `layout` divides evenly over `ranks`.

    Every rank then holds the same number of tokens, divisible by `multiple` (ranks that split them once
    more), and both pieces of a zigzag are equal.
    """
    _check(layout, ranks)
    if sequence_length < 1 or multiple < 1:
        raise ValueError(f"sequence_length={sequence_length}, multiple={multiple}: both must be at least 1")
    pieces = 2 if layout == "zigzag" and ranks > 1 else 1
    unit = ranks * math.lcm(pieces, multiple)
    return -(-sequence_length // unit) * unit


def chunks(layout: str, padded_length: int, ranks: int, rank: int) -> tuple[Chunk, ...]:
    """The chunks that `rank` holds, in the order in which it stores them."""
    _check(layout, ranks)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} is none of the {ranks} ranks: use 0 to {ranks - 1}")
    pieces = 2 if layout == "zigzag" and ranks > 1 else 1
    count, rest = divmod(padded_length, ranks * pieces)
    if rest:
        nearest = (count + 1) * ranks * pieces
        raise ValueError(f"length {padded_length} does not divide into {layout} chunks of {ranks} ranks: use {nearest}")
    if layout == "striped":
        return (Chunk(rank, count, ranks),)
    if pieces == 1:
        return (Chunk(rank * count, count),)
    if rank == ranks - 1:  # its two pieces are neighbours: one chunk makes one tile of what would be three
        return (Chunk(rank * count, 2 * count),)
    return Chunk(rank * count, count), Chunk((2 * ranks - 1 - rank) * count, count)


def global_index(chunks: Sequence[Chunk]) -> np.ndarray:
    """Global index of each token a rank holds, int64[L]."""
    return np.concatenate([chunk.indices() for chunk in chunks])


def restore(parts: Sequence[np.ndarray], layout: str, sequence_length: int | None = None, dim: int = 0) -> np.ndarray:
    """All ranks' parts, by rank, in global order along `dim`; cut to sequence_length where given."""
    length = sum(part.shape[dim] for part in parts)
    owner = np.concatenate([global_index(chunks(layout, length, len(parts), rank)) for rank in range(len(parts))])
    ordered = np.take(np.concatenate(parts, dim), np.argsort(owner), dim)
    return ordered if sequence_length is None else np.take(ordered, np.arange(sequence_length), dim)


def _check(layout: str, ranks: int) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout} is unknown: use one of {', '.join(LAYOUTS)}")
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: a layout needs at least 1")
