"""Which global token lives on which rank. No torch here.

A layout gives each rank *chunks* of global indices; everything that belongs to a token (its id, label,
position, document, rotary angle) is gathered through the same chunks, and `restore` puts results back in
order. All chunks of one layout share one step. Every rank holds equally many tokens of each sequence, so only
the tail of a sequence may be padding.

`contiguous`, `zigzag` and `striped` are the same for all documents; `balanced` and `grouped` look at them: see
`parallel.deal`.

Source: zigzag arXiv:2407.21783 §3.3.2 (pieces i and 2R-1-i), striped arXiv:2311.09431.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LAYOUTS = ("contiguous", "zigzag", "striped", "balanced", "grouped")

CHUNK_TOKENS = 1024  # a balanced chunk is not shorter where it can be helped: shorter ones leave kernels half empty
CHUNKS_PER_RANK = 16  # more balance no better (parallel/wire.py) and cost messages and tiles


@dataclass(frozen=True)
class Chunk:
    """Global indices start, start + step, … (count of them), stored side by side on a rank."""

    start: int
    count: int
    step: int = 1

    def indices(self) -> np.ndarray:
        """The global indices, int64[count]."""
        return self.start + self.step * np.arange(self.count, dtype=np.int64)


@dataclass(frozen=True)
class Layout:
    """The chunks of all ranks for one micro-batch: int64[num_chunks] columns, sorted by rank, sequence, row.

    `row` is where a chunk begins among the rows of its rank: its tokens of sequence 0, then those of sequence 1, …
    """

    ranks: int
    num_sequences: int
    padded_length: int
    step: int
    rank: np.ndarray
    sequence: np.ndarray
    start: np.ndarray
    count: np.ndarray
    row: np.ndarray

    @property
    def local_length(self) -> int:
        """Tokens of one sequence on each rank."""
        return self.padded_length // self.ranks

    @property
    def local_rows(self) -> int:
        """Tokens of all sequences on each rank."""
        return self.num_sequences * self.local_length

    def chunks(self, rank: int) -> list[tuple[Chunk, ...]]:
        """The chunks of each sequence that `rank` holds, in the order in which it stores them."""
        held: list[list[Chunk]] = [[] for _ in range(self.num_sequences)]
        for c in np.flatnonzero(self.rank == rank):
            held[self.sequence[c]].append(Chunk(int(self.start[c]), int(self.count[c]), self.step))
        return [tuple(chunks) for chunks in held]

    def index(self, rank: int) -> np.ndarray:
        """Global index, within its sequence, of each token of `rank`: int64[num_sequences, local_length]."""
        return np.stack([global_index(chunks) for chunks in self.chunks(rank)])


def assemble(held: Sequence[Sequence[Sequence[Chunk]]], padded_length: int) -> Layout:
    """The layout in which rank r holds the chunks `held[sequence][r]`, in that order."""
    ranks = len(held[0])
    columns: list[tuple[int, int, int, int, int]] = []
    for rank in range(ranks):
        row = 0
        for sequence, by_rank in enumerate(held):
            for chunk in by_rank[rank]:
                columns.append((rank, sequence, chunk.start, chunk.count, row))
                row += chunk.count
            if row != (sequence + 1) * (padded_length // ranks):
                raise ValueError(
                    f"rank {rank} holds {row} tokens of {sequence + 1} sequences, not equally many of each"
                )
    steps = {chunk.step for by_rank in held for chunks in by_rank for chunk in chunks}
    if len(steps) != 1:
        raise ValueError(f"chunks have steps {sorted(steps)}: a layout has one step")
    table = np.array(columns, np.int64)
    return Layout(ranks, len(held), padded_length, steps.pop(), *table.T)


def padded_length(name: str, sequence_length: int, ranks: int, multiple: int = 1) -> int:
    """The smallest length >= sequence_length that layout `name` divides evenly over `ranks`.

    Every rank then holds the same number of tokens, divisible by `multiple` (ranks that split them once
    more), in equal pieces. With "auto", a length that every layout divides.
    """
    if name != "auto":
        check(name, ranks)
    if sequence_length < 1 or multiple < 1:
        raise ValueError(f"sequence_length={sequence_length}, multiple={multiple}: both must be at least 1")
    if ranks == 1:
        pieces = 1
    elif name in ("balanced", "auto"):
        pieces = chunks_per_rank(-(-sequence_length // ranks))
    else:
        pieces = 2 if name == "zigzag" else 1
    unit = ranks * math.lcm(pieces, multiple)
    return -(-sequence_length // unit) * unit


def chunks_per_rank(local_length: int) -> int:
    """Chunks that `balanced` deals to a rank of so many tokens: a power of two, 2 at least."""
    wish = min(CHUNKS_PER_RANK, max(2, local_length // CHUNK_TOKENS))
    return 1 << (wish.bit_length() - 1)


def chunks(name: str, padded_length: int, ranks: int, rank: int) -> tuple[Chunk, ...]:
    """The chunks of any sequence that `rank` holds, in the order in which it stores them; see `deal` for the others."""
    check(name, ranks)
    if name in ("balanced", "grouped"):
        raise ValueError(f"layout={name} depends on the documents: use parallel.deal.deal(...).chunks(rank)")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} is none of the {ranks} ranks: use 0 to {ranks - 1}")
    pieces = 2 if name == "zigzag" and ranks > 1 else 1
    count = piece_length(name, padded_length, ranks, pieces)
    if name == "striped":
        return (Chunk(rank, count, ranks),)
    if pieces == 1:
        return (Chunk(rank * count, count),)
    return join([Chunk(rank * count, count), Chunk((2 * ranks - 1 - rank) * count, count)])


def global_index(chunks: Sequence[Chunk]) -> np.ndarray:
    """Global index of each token a rank holds of one sequence, int64[L]."""
    return np.concatenate([chunk.indices() for chunk in chunks])


def restore(parts: Sequence[np.ndarray], layout: Layout, sequence_length: int | None = None) -> np.ndarray:
    """All ranks' parts [B, L, …], by rank, in global order [B, T, …]; T cut to sequence_length where given."""
    index = np.concatenate([layout.index(rank) for rank in range(layout.ranks)], axis=1)
    stored = np.concatenate(parts, axis=1)
    order = np.argsort(index, axis=1)
    ordered = np.stack([stored[sequence, order[sequence]] for sequence in range(len(stored))])
    return ordered if sequence_length is None else ordered[:, :sequence_length]


def split(chunks: Sequence[Chunk], start: int, stop: int) -> tuple[Chunk, ...]:
    """The part of a rank's chunks at the positions [start, stop) of its storage."""
    parts, offset = [], 0
    for chunk in chunks:
        first, last = max(0, start - offset), min(chunk.count, stop - offset)
        if first < last:
            parts.append(Chunk(chunk.start + first * chunk.step, last - first, chunk.step))
        offset += chunk.count
    return tuple(parts)


def join(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Neighbours as one chunk: it makes one tile of what would be several."""
    joined = [chunks[0]]
    for chunk in chunks[1:]:
        last = joined[-1]
        if chunk.start == last.start + last.count:
            joined[-1] = Chunk(last.start, last.count + chunk.count)
        else:
            joined.append(chunk)
    return tuple(joined)


def piece_length(name: str, padded_length: int, ranks: int, pieces: int) -> int:
    """Tokens of each of a rank's pieces."""
    count, rest = divmod(padded_length, ranks * pieces)
    if rest or not count:
        nearest = (count + 1) * ranks * pieces
        raise ValueError(f"length {padded_length} does not divide into {name} chunks of {ranks} ranks: use {nearest}")
    return count


def check(name: str, ranks: int) -> None:
    if name not in LAYOUTS:
        raise ValueError(f"layout={name} is unknown: use one of {', '.join(LAYOUTS)}")
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: a layout needs at least 1")
