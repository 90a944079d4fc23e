"""Dealing the tokens of a micro-batch to ranks, whatever the layout. No torch here.

Two layouts look at the documents; both deal what is heaviest first, to who has least to do. `balanced` deals chunks of
equal length, so that all ranks are equally busy whatever the documents; blocks then travel between all of them.
`grouped` deals documents: each to as few neighbouring ranks as can share it, in pieces like a zigzag's, so that most of
what a rank needs is with its neighbours or with itself. Short documents never travel; groups as large as a node or
smaller stay inside one.

Every rank deals for itself and all must deal alike: work is counted in whole pairs, and ties go to the lower number.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from model.mask import Mask
from parallel.layout import Chunk, Layout, assemble, check, chunks, chunks_per_rank, join, piece_length

GROUP_SHARE = 0.5  # of a rank's work that a document may take of each rank of its group; more, and the group is doubled
PIECE_TOKENS = 128  # a document is not cut into shorter pieces: they leave kernels half empty

Held = list[list[tuple[int, int]]]  # of each rank, (start, count) of what it holds of a sequence


def deal(
    name: str, documents: Sequence[Sequence[int]], padded_length: int, ranks: int, mask: Mask | None = None
) -> Layout:
    """The layout `name` of a micro-batch whose sequences have these document lengths, each padded to padded_length.

    `mask` is the one to balance for (causal by default). Raises ValueError for an unknown layout, or a length that it
    cannot divide.
    """
    check(name, ranks)
    if name == "balanced":
        return _balanced(documents, padded_length, ranks, mask or Mask())
    if name == "grouped":
        return _grouped(documents, padded_length, ranks, mask or Mask())
    held = [chunks(name, padded_length, ranks, rank) for rank in range(ranks)]
    return assemble([held] * len(documents), padded_length)


def visible(lengths: np.ndarray, reach: int) -> np.ndarray:
    """Pairs that the first `lengths` queries of a document see: query p sees min(p + 1, reach) keys."""
    short = np.minimum(lengths, reach)
    return short * (short + 1) // 2 + (lengths - short) * np.minimum(reach, lengths)


def _balanced(documents: Sequence[Sequence[int]], padded_length: int, ranks: int, mask: Mask) -> Layout:
    """Equal chunks to the rank with the least work so far, the heaviest first; each rank gets equally many."""
    local = padded_length // ranks
    pieces = 1 if ranks == 1 else chunks_per_rank(local)
    while pieces > 2 and local % pieces:  # padding for another reason may have moved the length past a power of two
        pieces //= 2
    count = piece_length("balanced", padded_length, ranks, pieces)
    load = [0] * ranks
    held = []
    for lengths in documents:
        work = _work_of_chunks(np.asarray(lengths, np.int64), padded_length, count, mask)
        mine: list[list[int]] = [[] for _ in range(ranks)]
        heap = [(load[rank], rank) for rank in range(ranks)]
        heapq.heapify(heap)
        for piece in np.argsort(-work, kind="stable").tolist():
            least, rank = heapq.heappop(heap)
            mine[rank].append(piece)
            load[rank] = least + int(work[piece])
            if len(mine[rank]) < pieces:
                heapq.heappush(heap, (load[rank], rank))
        held.append([join([Chunk(piece * count, count) for piece in sorted(chosen)]) for chosen in mine])
    return assemble(held, padded_length)


def _work_of_chunks(lengths: np.ndarray, padded_length: int, count: int, mask: Mask) -> np.ndarray:
    """Visible pairs of the queries in each chunk of `count` tokens, int64[padded_length / count]."""
    stop = np.cumsum(lengths)
    edges = np.unique(np.concatenate([stop - lengths, stop, np.arange(0, padded_length + 1, count)]))
    start, end = edges[:-1], edges[1:]
    around = np.searchsorted(stop, start, side="right")
    inside = around < len(stop)
    begin = np.where(inside, (stop - lengths)[np.minimum(around, len(stop) - 1)], 0) if len(stop) else start
    pairs = np.where(inside, visible(end - begin, mask.reach) - visible(start - begin, mask.reach), 0)
    return np.bincount(start // count, pairs, padded_length // count).astype(np.int64)


def _grouped(documents: Sequence[Sequence[int]], padded_length: int, ranks: int, mask: Mask) -> Layout:
    """Documents to groups of ranks; what finds no room whole is cut where room is left, and so is the padding."""
    local = piece_length("grouped", padded_length, ranks, 1)
    lengths = [np.asarray(sequence, np.int64) for sequence in documents]
    table = [
        (int(work), number, int(start), int(length))
        for number, sequence in enumerate(lengths)
        for work, start, length in zip(
            visible(sequence, mask.reach), np.cumsum(sequence) - sequence, sequence, strict=True
        )
    ]
    table.sort(key=lambda document: (-document[0], *document[1:]))
    fair = max(1, sum(work for work, *_ in table) // ranks)
    room = np.full((len(documents), ranks), local)
    load = np.zeros(ranks, np.int64)
    held: list[Held] = [[[] for _ in range(ranks)] for _ in documents]
    rest, short, widths = [], [], _widths(ranks)
    for work, number, start, length in table:
        width = _width(work, length, fair, local, widths)
        if width == 1:
            short.append((work, number, start, length))
        elif not _to_group(work, number, start, length, widths[widths.index(width) :], room, load, held):
            rest.append((number, start, length))
    rest += _to_ranks(short, room, load, held)
    rest += [
        (number, int(sequence.sum()), padded_length - int(sequence.sum())) for number, sequence in enumerate(lengths)
    ]
    for number, start, length in rest:
        while length:
            rank = int(np.argmax(room[number]))
            count = min(length, int(room[number, rank]))
            held[number][rank].append((start, count))
            room[number, rank] -= count
            start, length = start + count, length - count
    assert not room.any()
    parts = [[join([Chunk(*span) for span in sorted(spans)]) for spans in by_rank] for by_rank in held]
    return assemble(parts, padded_length)


def _widths(ranks: int) -> list[int]:
    """Sizes of aligned groups, ascending: powers of two that divide the ring, and the whole ring."""
    powers = [1 << n for n in range(ranks.bit_length()) if ranks % (1 << n) == 0]
    return powers if powers[-1] == ranks else [*powers, ranks]


def _width(work: int, length: int, fair: int, local: int, widths: list[int]) -> int:
    """Ranks to share a document: the fewest to which it is not too much."""
    enough = [width for width in widths if work <= GROUP_SHARE * fair * width and length <= local * width]
    width = enough[0] if enough else widths[-1]
    short = [
        other for other in widths if other < width and length < 2 * width * PIECE_TOKENS and length <= local * other
    ]
    return short[-1] if short else width


def _to_group(
    work: int,
    number: int,
    start: int,
    length: int,
    widths: list[int],
    room: np.ndarray,
    load: np.ndarray,
    held: list[Held],
) -> bool:
    """Deals a document to the least busy group with room for it, of the first width that has one; False if none has."""
    for width in widths:
        fits = np.flatnonzero(room[number].reshape(-1, width).min(axis=1) >= 2 * -(-length // (2 * width)))
        if len(fits):
            break
    else:
        return False
    first = width * int(fits[np.argmin(load.reshape(-1, width).max(axis=1)[fits])])
    cuts = [length * piece // (2 * width) for piece in range(2 * width + 1)]
    for piece in range(2 * width):
        rank, count = first + min(piece, 2 * width - 1 - piece), cuts[piece + 1] - cuts[piece]
        if count:
            held[number][rank].append((start + cuts[piece], count))
            room[number, rank] -= count
    load[first : first + width] += work // width
    return True


def _to_ranks(
    short: Sequence[tuple[int, int, int, int]], room: np.ndarray, load: np.ndarray, held: list[Held]
) -> list[tuple[int, int, int]]:
    """Deals each document to the least busy rank with room for it; (sequence, start, length) of those without."""
    without = []
    heap = [(int(busy), rank) for rank, busy in enumerate(load)]
    heapq.heapify(heap)
    left = room.tolist()
    for work, number, start, length in short:
        full = []
        while heap and left[number][heap[0][1]] < length:
            full.append(heapq.heappop(heap))
        if heap:
            busy, rank = heap[0]
            held[number][rank].append((start, length))
            left[number][rank] -= length
            heapq.heapreplace(heap, (busy + work, rank))
        else:
            without.append((number, start, length))
        for entry in full:
            heapq.heappush(heap, entry)
    room[:] = left
    return without
