"""Layout × mask × route -> the tiles that one rank computes at each hop. No torch here.

Route `relay`: key/value blocks go round a ring of ranks, so at hop h rank r computes with the block of rank
(r - h) mod R. A tile is a rectangle of local query rows × the visiting block's key columns inside one
document, with a band (`model.mask`). Tiles are trimmed to what is visible, empty ones vanish, neighbouring
full ones merge. Hops that have no tile on any rank do not exist: sliding windows end the ring early by
themselves.

A plan is one int64 table `[1 + num_tiles, 8]`, so that it can travel through a compiled model as one tensor:
row 0 is a header (columns NUM_HOPS … LOCAL_LENGTH), the others are tiles sorted by hop (columns HOP … UPPER).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from model.mask import Mask, band, is_full, trim, visible_pairs
from parallel.layout import Chunk, chunks

HOP, SEQUENCE, Q_START, Q_STOP, K_START, K_STOP, LOWER, UPPER = range(8)  # columns of a tile
NUM_HOPS, NUM_RANKS, RANK, NUM_SEQUENCES, LOCAL_LENGTH = range(5)  # columns of the header; the rest are 0


class Documents(NamedTuple):
    """Documents of a micro-batch: global range [start, stop) of each, and the sequence it is in."""

    sequence: np.ndarray
    start: np.ndarray
    stop: np.ndarray


class Placed(NamedTuple):
    """A chunk and where it begins among its rank's local tokens."""

    chunk: Chunk
    offset: int


def plan(
    layout: str,
    mask: Mask,
    documents: Sequence[Sequence[int]],
    sequence_length: int,
    padded_length: int,
    ranks: int,
    rank: int,
) -> np.ndarray:
    """The plan of `rank` for one micro-batch, int64[1 + num_tiles, 8].

    `documents` holds the document lengths of each sequence; what lies beyond their sum is padding, which sees
    nothing and is seen by nobody. Every rank gives the same arguments but for `rank`.

    Raises ValueError for documents that are empty or longer than the sequence, or a length that the layout
    cannot divide.
    """
    laid = lay_out(documents, sequence_length)
    if padded_length < sequence_length:
        raise ValueError(f"padded_length={padded_length} is less than sequence_length={sequence_length}")
    hops = num_hops(layout, mask, laid, padded_length, ranks)
    header = np.zeros((1, 8), np.int64)
    header[0, :5] = hops, ranks, rank, len(documents), padded_length // ranks
    placed = [_place(chunks(layout, padded_length, ranks, r)) for r in range(ranks)]
    queries = [_clip(laid, q) for q in placed[rank]]
    parts = [header]
    for hop in range(hops):
        rows = [_tiles(mask, hop, query, key) for query in queries for key in placed[(rank - hop) % ranks]]
        parts.append(_merge_full(np.concatenate(rows)))
    return np.concatenate(parts)


def num_hops(layout: str, mask: Mask, documents: Documents, padded_length: int, ranks: int) -> int:
    """Hops of the ring, exactly: one more than the last at which any rank has a tile, at least 1."""
    if layout == "striped":  # rank r meets the tokens h before its own at hop h
        longest = int(np.max(documents.stop - documents.start, initial=1))
        return min(ranks, longest, mask.reach)
    held = sorted((chunk.start, rank) for rank in range(ranks) for chunk in chunks(layout, padded_length, ranks, rank))
    start, owner = np.array(held, np.int64).T
    hop = (owner[:, None] - owner[None, :]) % ranks
    index = np.arange(len(start))
    # The first query of a chunk looks back furthest: to the start of its document, or as far as the window
    # goes.
    furthest = np.full(len(start), padded_length)
    for sequence in np.unique(documents.sequence):
        document_start = documents.start[documents.sequence == sequence]
        filled = int(documents.stop[documents.sequence == sequence][-1])
        around = document_start[np.searchsorted(document_start, start, side="right") - 1]
        furthest = np.minimum(furthest, np.where(start < filled, around, padded_length))
    furthest = np.maximum(furthest, start - mask.reach + 1)
    first_key = np.searchsorted(start, furthest, side="right") - 1
    met = (index[None, :] >= first_key[:, None]) & (index[None, :] <= index[:, None])
    return 1 + int(np.max(hop, where=met, initial=0))


def hop_starts(plan: np.ndarray) -> np.ndarray:
    """Row of the plan at which each hop begins, and one past the last: int64[num_hops + 1]."""
    return 1 + np.searchsorted(plan[1:, HOP], np.arange(plan[0, NUM_HOPS] + 1))


def pairs(tiles: np.ndarray) -> np.ndarray:
    """Visible (query, key) pairs of each tile, int64[num_tiles] (tiles: plan[1:], or some rows of it)."""
    rows, columns = tiles[:, Q_STOP] - tiles[:, Q_START], tiles[:, K_STOP] - tiles[:, K_START]
    return visible_pairs(rows, columns, tiles[:, LOWER], tiles[:, UPPER])


def lay_out(documents: Sequence[Sequence[int]], sequence_length: int) -> Documents:
    """Documents laid end to end in each sequence. Raises ValueError where they do not fit."""
    lengths = [np.asarray(sequence, np.int64).reshape(-1) for sequence in documents]
    for number, sequence in enumerate(lengths):
        if sequence.size and sequence.min() < 1:
            raise ValueError(f"sequence {number} has a document of {sequence.min()} tokens: each needs at least 1")
        if sequence.sum() > sequence_length:
            raise ValueError(
                f"documents of sequence {number} hold {sequence.sum()} tokens, more than {sequence_length=}"
            )
    if not lengths:
        raise ValueError(
            "documents=[]: a micro-batch needs at least one sequence (one without documents is all padding)"
        )
    stop = np.concatenate([np.cumsum(sequence) for sequence in lengths])
    number = np.repeat(np.arange(len(lengths)), [sequence.size for sequence in lengths])
    return Documents(number, stop - np.concatenate(lengths), stop)


def _place(held: Sequence[Chunk]) -> list[Placed]:
    offsets = np.cumsum([0, *(chunk.count for chunk in held)])
    return [Placed(chunk, int(offset)) for chunk, offset in zip(held, offsets[:-1], strict=True)]


class _Clipped(NamedTuple):
    """A chunk of queries and the part [first, last) of it that lies in each document that it touches."""

    placed: Placed
    documents: Documents
    first: np.ndarray
    last: np.ndarray


def _inside(chunk: Chunk, documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """Range [first, last) of the chunk's own indices inside each document."""
    first = np.clip(-((chunk.start - documents.start) // chunk.step), 0, chunk.count)
    last = np.clip(-((chunk.start - documents.stop) // chunk.step), 0, chunk.count)
    return first, last


def _clip(documents: Documents, query: Placed) -> _Clipped:
    first, last = _inside(query.chunk, documents)
    touched = first < last
    return _Clipped(query, Documents(*(column[touched] for column in documents)), first[touched], last[touched])


def _tiles(mask: Mask, hop: int, query: _Clipped, key: Placed) -> np.ndarray:
    """Tiles between a chunk of queries and one of keys: one per document with a visible pair there."""
    first, last = _inside(key.chunk, query.documents)
    step = key.chunk.step
    lower, upper = band(mask, query.placed.chunk.start + step * query.first, key.chunk.start + step * first, step)
    cut = trim(query.last - query.first, last - first, lower, upper)
    seen = np.flatnonzero(cut.row_start < cut.row_stop)
    tiles = np.empty((len(seen), 8), np.int64)
    tiles[:, HOP] = hop
    tiles[:, SEQUENCE] = query.documents.sequence[seen]
    q_zero, k_zero = query.first[seen] + query.placed.offset, first[seen] + key.offset
    tiles[:, Q_START], tiles[:, Q_STOP] = q_zero + cut.row_start[seen], q_zero + cut.row_stop[seen]
    tiles[:, K_START], tiles[:, K_STOP] = k_zero + cut.column_start[seen], k_zero + cut.column_stop[seen]
    tiles[:, LOWER], tiles[:, UPPER] = cut.lower[seen], cut.upper[seen]
    return tiles


def _merge_full(tiles: np.ndarray) -> np.ndarray:
    """Join full tiles that are neighbours: first of the same rows, then of the same columns."""
    for same, start, stop in (((Q_START, Q_STOP), K_START, K_STOP), ((K_START, K_STOP), Q_START, Q_STOP)):
        if len(tiles) < 2:
            break
        tiles = tiles[np.lexsort((tiles[:, start], tiles[:, same[0]], tiles[:, SEQUENCE]))]
        rows, columns = tiles[:, Q_STOP] - tiles[:, Q_START], tiles[:, K_STOP] - tiles[:, K_START]
        full = is_full(rows, columns, tiles[:, LOWER], tiles[:, UPPER])
        before, after = tiles[:-1], tiles[1:]
        joins = (
            full[:-1] & full[1:] & (before[:, SEQUENCE] == after[:, SEQUENCE]) & (before[:, stop] == after[:, start])
        )
        for column in same:
            joins &= before[:, column] == after[:, column]
        if not joins.any():
            continue
        head = np.flatnonzero(np.r_[True, ~joins])
        tail = np.r_[head[1:], len(tiles)] - 1
        merged = tiles[head]
        merged[:, stop] = tiles[tail, stop]
        full = full[head]
        merged[full, LOWER] = 1 - (merged[full, Q_STOP] - merged[full, Q_START])
        merged[full, UPPER] = merged[full, K_STOP] - merged[full, K_START] - 1
        tiles = merged
    return tiles
