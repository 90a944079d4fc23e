"""Layout × mask × route -> what one rank computes at each hop, and what it sends and receives. No torch here.

A tile is a rectangle of query rows × key rows inside one document, with a band (`model.mask`). Query rows are the
rank's own tokens; key rows are those of an *arena*: the rank's own tokens first, then buffers for what arrives.
Tiles are trimmed to what is visible, empty ones vanish, neighbouring full ones merge. From documents and mask follows
which rows of which rank a rank needs at all: `direct` sends no others, and hops that no rank needs do not exist.

A plan is one int64 table `[2 + messages + tiles, 8]`, so that it can travel through a compiled model as one tensor:
two header rows, the messages (`parallel.messages`), the tiles sorted by hop. All ranks make theirs from the same
arguments, without a word to each other; AGREEMENT is a hash of these arguments.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from model.mask import (
    HOP,
    K_START,
    K_STOP,
    LOWER,
    Q_START,
    Q_STOP,
    UPPER,
    Mask,
    band,
    is_full,
    trim,
    visible_pairs,
)
from parallel.deal import deal
from parallel.layout import Layout
from parallel.messages import messages
from parallel.route import Route, Tour, block_at, tour

NUM_HOPS, NUM_RANKS, RANK, NUM_SEQUENCES, LOCAL_LENGTH, NUM_MESSAGES, DEPTH, BUFFER_ROWS = range(8)  # of header row 0
NUM_BATCHES, HEAD_GROUPS, NARROW, AGREEMENT = range(4)  # of header row 1; HEAD_GROUPS is 0 where nothing is gathered
HEADER_ROWS = 2


class Documents(NamedTuple):
    """Documents of a micro-batch, in order: global range [start, stop) of each, and the sequence it is in."""

    sequence: np.ndarray
    start: np.ndarray
    stop: np.ndarray


class Parts(NamedTuple):
    """Where chunks meet documents: the indices [first, last) of `chunk` that lie in `document`. Sorted by chunk."""

    chunk: np.ndarray
    document: np.ndarray
    first: np.ndarray
    last: np.ndarray


class Needs(NamedTuple):
    """Rows [low[c, r], high[c, r]) of chunk c that rank r needs of it, int64[num_chunks, R]; low = high: none.

    Hulls: what lies between two needed rows of a chunk counts as needed. A rank needs nothing of itself.
    """

    low: np.ndarray
    high: np.ndarray


def plan(
    layout: str | Layout,
    mask: Mask,
    documents: Sequence[Sequence[int]],
    sequence_length: int,
    padded_length: int,
    ranks: int,
    rank: int,
    route: Route = Route(),  # noqa: B008 - frozen
) -> np.ndarray:
    """The plan of `rank` for one micro-batch, int64[2 + messages + tiles, 8].

    `documents` holds the document lengths of each sequence; what lies beyond their sum is padding, which sees
    nothing and is seen by nobody. `layout` is a name, or the layout in which the tokens were really dealt. Every rank
    gives the same arguments but for `rank`.

    Raises ValueError for documents that are empty or longer than the sequence, or a length that the layout
    cannot divide.
    """
    laid = lay_out(documents, sequence_length)
    dealt = _dealt(layout, documents, sequence_length, padded_length, ranks)
    parts = meetings(dealt, laid)
    if route.name == "gather" and ranks > 1:
        num_hops, num_batches, groups, buffer_rows = 1 + route.head_groups, 2 + route.head_groups, route.head_groups, 0
        sent = np.zeros((0, 8), np.int64)
        base, hops = dealt.rank * dealt.local_rows + dealt.row, np.ones(ranks, np.int64)
    else:
        needs = needed(dealt, laid, parts, mask)
        trip = tour(route, *needed_rows(dealt, needs, route.width(ranks)), dealt.local_rows)
        num_hops, num_batches, groups = trip.num_hops, trip.num_batches, 0
        sent, base, buffer_rows = messages(dealt, needs.low, needs.high, trip, route, rank)
        hops = _hops(trip, route, rank, ranks)
    tiles = _tiles(dealt, laid, parts, mask, rank, base, hops)
    agreement = _agreement(dealt, laid, mask, sequence_length, route)
    header = np.zeros((HEADER_ROWS, 8), np.int64)
    header[0] = num_hops, ranks, rank, len(documents), dealt.local_length, len(sent), route.depth, buffer_rows
    header[1, :4] = num_batches, groups, route.narrow, agreement
    return np.concatenate([header, sent, tiles])


def message_rows(plan: np.ndarray) -> np.ndarray:
    """The messages of a plan, int64[num_messages, 8]."""
    return plan[HEADER_ROWS : HEADER_ROWS + plan[0, NUM_MESSAGES]]


def tile_rows(plan: np.ndarray) -> np.ndarray:
    """The tiles of a plan, int64[num_tiles, 8], sorted by hop."""
    return plan[HEADER_ROWS + plan[0, NUM_MESSAGES] :]


def hop_starts(plan: np.ndarray) -> np.ndarray:
    """Row of the plan at which the tiles of each hop begin, and one past the last: int64[num_hops + 1]."""
    first = HEADER_ROWS + plan[0, NUM_MESSAGES]
    return first + np.searchsorted(plan[first:, HOP], np.arange(plan[0, NUM_HOPS] + 1))


def pairs(tiles: np.ndarray) -> np.ndarray:
    """Visible (query, key) pairs of each tile, int64[num_tiles]."""
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


def meetings(layout: Layout, documents: Documents) -> Parts:
    """All parts of chunks inside a document."""
    length, step = layout.padded_length, layout.step
    # Sequences end to end on one line, on which documents are in order.
    offset = layout.sequence * length
    begin = layout.start + offset
    end = begin + (layout.count - 1) * step + 1
    starts, stops = documents.start + documents.sequence * length, documents.stop + documents.sequence * length
    one = np.searchsorted(stops, begin, side="right")
    number = np.maximum(0, np.searchsorted(starts, end, side="left") - one)
    chunk = np.repeat(np.arange(len(number)), number)
    document = np.arange(len(chunk)) - np.repeat(np.cumsum(number) - number, number) + one[chunk]
    first = np.clip(-((begin[chunk] - starts[document]) // step), 0, layout.count[chunk])
    last = np.clip(-((begin[chunk] - stops[document]) // step), 0, layout.count[chunk])
    touched = first < last
    return Parts(chunk[touched], document[touched], first[touched], last[touched])


def needed(layout: Layout, documents: Documents, parts: Parts, mask: Mask) -> Needs:
    """What each rank needs of each chunk."""
    ranks, chunks = layout.ranks, len(layout.rank)
    low, high = np.zeros((chunks, ranks), np.int64), np.zeros((chunks, ranks), np.int64)
    if ranks == 1:
        return Needs(low, high)
    if layout.step > 1:  # rank r looks back over the tokens h before its own: to any, or to none
        longest = np.zeros(layout.num_sequences, np.int64)
        np.maximum.at(longest, documents.sequence, documents.stop - documents.start)
        before = (np.arange(ranks)[None, :] - layout.rank[:, None]) % ranks
        met = (before > 0) & (before < np.minimum(longest, mask.reach)[layout.sequence][:, None])
        return Needs(low, np.where(met, layout.count[:, None], 0))
    # Only documents on several chunks concern others. Of each such part, and each rank, find the rank's next part.
    several = np.bincount(parts.document, minlength=len(documents.start))[parts.document] > 1
    chunk, document, first, last = (column[several] for column in parts)
    position = layout.start[chunk] + first
    order = np.lexsort((position, document))
    chunk, document, first, last, position = (x[order] for x in (chunk, document, first, last, position))
    index, rank = np.arange(len(chunk)), layout.rank[chunk]
    order = np.argsort(chunk, kind="stable")
    touched, heads = np.unique(chunk[order], return_index=True)
    if not len(touched):
        return Needs(low, high)
    if mask.reach >= layout.padded_length:  # to the start of the part: whoever comes later in the document sees all
        begins = np.unique(document, return_index=True)[1]
        number = np.cumsum(np.isin(index, begins)) - 1  # of the document
        latest = np.full((len(begins), ranks), -1)
        np.maximum.at(latest, (number, rank), index)
        sees = (latest[number[order]] > index[order][:, None]) & (rank[order][:, None] != np.arange(ranks))
        from_row = np.broadcast_to(first[order][:, None], sees.shape)
    else:
        following = np.where(rank[:, None] == np.arange(ranks), index[:, None], len(chunk))
        following = np.minimum.accumulate(following[::-1], axis=0)[::-1]
        document_end = np.searchsorted(document, document, side="right")
        sees = (following < document_end[:, None]) & (rank[:, None] != np.arange(ranks))
        # Its first query there looks back furthest, to the start of the part or as far as the window goes.
        query = position[np.minimum(following, len(chunk) - 1)]
        from_row = np.maximum(first[:, None], first[:, None] + query - mask.reach + 1 - position[:, None])
        sees &= from_row < last[:, None]
        sees, from_row = sees[order], from_row[order]
    lowest, highest = np.where(sees, from_row, layout.count.max()), np.where(sees, last[order][:, None], 0)
    if len(touched) < len(chunk):  # chunks with several parts
        lowest, highest = np.minimum.reduceat(lowest, heads), np.maximum.reduceat(highest, heads)
    low[touched], high[touched] = lowest, highest
    return Needs(np.where(high > 0, low, 0), high)


def needed_rows(layout: Layout, needs: Needs, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows of the block of o that r needs, int64[R, R]; that node b of `width` ranks needs, int64[R / width, R])."""
    heads = np.searchsorted(layout.rank, np.arange(layout.ranks))
    by_rank = np.add.reduceat(needs.high - needs.low, heads, axis=0).T
    low, high = in_nodes(needs.low, needs.high, width)
    return by_rank, np.add.reduceat(high - low, heads, axis=0).T


def in_nodes(low: np.ndarray, high: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Needs of whole nodes of `width` ranks: the hull of what their ranks need, int64[num_chunks, R / width]."""
    shape = (len(low), -1, width)
    none = high.reshape(shape) == 0
    far = high.max(initial=0)
    together = np.where(none, far, low.reshape(shape)).min(axis=2)
    highest = high.reshape(shape).max(axis=2)
    return np.where(highest > 0, together, 0), highest


def _dealt(
    layout: str | Layout, documents: Sequence[Sequence[int]], sequence_length: int, padded_length: int, ranks: int
) -> Layout:
    if padded_length < sequence_length:
        raise ValueError(f"padded_length={padded_length} is less than sequence_length={sequence_length}")
    dealt = deal(layout, documents, padded_length, ranks) if isinstance(layout, str) else layout
    if (dealt.ranks, dealt.num_sequences, dealt.padded_length) != (ranks, len(documents), padded_length):
        given = f"{dealt.num_sequences} sequences of {dealt.padded_length} tokens on {dealt.ranks} ranks"
        raise ValueError(
            f"the layout is for {given}, not {len(documents)} sequences of {padded_length} on {ranks}: deal it again"
        )
    return dealt


def _hops(trip: Tour, route: Route, rank: int, ranks: int) -> np.ndarray:
    """The hop at which `rank` meets each block, int64[R]; -1 for one that nobody needs of it."""
    hops = np.full(ranks, -1, np.int64)
    hops[rank] = 0
    width = route.width(ranks)
    for nodes, places, hop in trip.visits:
        hops[block_at(rank, nodes, places, width, ranks)] = hop
    return hops


def _tiles(
    layout: Layout, documents: Documents, parts: Parts, mask: Mask, rank: int, base: np.ndarray, hops: np.ndarray
) -> np.ndarray:
    """The tiles of `rank`, sorted by hop; base[c] is the row of the arena at which chunk c's first token would be."""
    own = np.searchsorted(layout.rank, [rank, rank + 1])
    bounds = np.searchsorted(parts.chunk, np.searchsorted(layout.rank, np.arange(layout.ranks + 1)))
    queries = Parts(*(column[slice(*np.searchsorted(parts.chunk, own))] for column in parts))
    order = np.argsort(queries.document, kind="stable")
    queries = Parts(*(column[order] for column in queries))
    found: dict[int, list[np.ndarray]] = {}
    for block in range(layout.ranks):
        keys = Parts(*(column[bounds[block] : bounds[block + 1]] for column in parts))
        tiles = _tiles_between(layout, mask, queries, keys, base)
        if len(tiles):
            assert hops[block] >= 0, f"rank {rank} needs the block of {block}, which no visit brings"
            tiles[:, HOP] = hops[block]
            found.setdefault(int(hops[block]), []).append(tiles)
    merged = [_merge_full(np.concatenate(found.pop(hop))) for hop in sorted(found)]
    return np.concatenate([np.zeros((0, 8), np.int64), *merged])


def _tiles_between(layout: Layout, mask: Mask, queries: Parts, keys: Parts, base: np.ndarray) -> np.ndarray:
    """Tiles of all pairs of parts of one document that have a visible pair; queries are sorted by document."""
    one = np.searchsorted(queries.document, keys.document, side="left")
    number = np.searchsorted(queries.document, keys.document, side="right") - one
    k = np.repeat(np.arange(len(number)), number)
    q = np.arange(len(k)) - np.repeat(np.cumsum(number) - number, number) + one[k]
    q_chunk, k_chunk, q_first, k_first = queries.chunk[q], keys.chunk[k], queries.first[q], keys.first[k]
    step = layout.step
    lower, upper = band(mask, layout.start[q_chunk] + step * q_first, layout.start[k_chunk] + step * k_first, step)
    cut = trim(queries.last[q] - q_first, keys.last[k] - k_first, lower, upper)
    seen = np.flatnonzero(cut.row_start < cut.row_stop)
    tiles = np.zeros((len(seen), 8), np.int64)
    q_zero, k_zero = (layout.row[q_chunk] + q_first)[seen], (base[k_chunk] + k_first)[seen]
    tiles[:, Q_START], tiles[:, Q_STOP] = q_zero + cut.row_start[seen], q_zero + cut.row_stop[seen]
    tiles[:, K_START], tiles[:, K_STOP] = k_zero + cut.column_start[seen], k_zero + cut.column_stop[seen]
    tiles[:, LOWER], tiles[:, UPPER] = cut.lower[seen], cut.upper[seen]
    return tiles


def _merge_full(tiles: np.ndarray) -> np.ndarray:
    """Join full tiles that are neighbours: first of the same rows, then of the same columns."""
    for same, start, stop in (((Q_START, Q_STOP), K_START, K_STOP), ((K_START, K_STOP), Q_START, Q_STOP)):
        if len(tiles) < 2:
            break
        tiles = tiles[np.lexsort((tiles[:, start], tiles[:, same[0]]))]
        rows, columns = tiles[:, Q_STOP] - tiles[:, Q_START], tiles[:, K_STOP] - tiles[:, K_START]
        full = is_full(rows, columns, tiles[:, LOWER], tiles[:, UPPER])
        before, after = tiles[:-1], tiles[1:]
        joins = full[:-1] & full[1:] & (before[:, stop] == after[:, start])
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


def _agreement(layout: Layout, documents: Documents, mask: Mask, sequence_length: int, route: Route) -> int:
    """A hash of everything that ranks must have in common, in 63 bits."""
    digest = hashlib.blake2b(digest_size=8)
    words = (layout.ranks, layout.num_sequences, layout.padded_length, layout.step, sequence_length, mask, route)
    digest.update(repr(words).encode())
    for column in (layout.rank, layout.sequence, layout.start, layout.count, *documents):
        digest.update(np.ascontiguousarray(column).tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1
