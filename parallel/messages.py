"""One rank's messages, and the rows of the arena where they come from and go to. No torch here.

Rows [0, local rows) of the arena are the rank's own, of keys and values in one tensor, of their gradients in another
one of the same rows. Behind them lie buffers, one for each block that the rank receives, packed to the rows that it
carries. A buffer's place is free again for another one once neither its keys nor its gradients are used: by a hop, or
by a message that has not been waited for. Places are found here, once, so that nothing is allocated while hops run.
"""

from dataclasses import dataclass

import numpy as np

from parallel.layout import Layout
from parallel.route import NEEDED, NODE, Route, Tour, block_at

KIND, EXCHANGE, PEER, START, STOP = range(5)  # columns of a message: a range of rows of the arena
# A message to or from one peer in one exchange may be several ranges, packed in this order. CLEAR has no peer: rows
# of the gradients that are zeroed before hop EXCHANGE computes.
SEND_KEYS, RECEIVE_KEYS, SEND_GRADIENTS, RECEIVE_GRADIENTS, CLEAR = range(5)


@dataclass
class Buffer:
    """Rows [low, high) of some chunks of a block, packed at `address`. Lives are hops, both ends included."""

    chunk: np.ndarray
    low: np.ndarray
    high: np.ndarray
    keys_life: tuple[int, int]
    gradients_life: tuple[int, int]
    address: int = 0

    @property
    def packed(self) -> np.ndarray:
        """Where each chunk's rows begin in the buffer, and the end: int64[num_chunks + 1]."""
        return np.concatenate([[0], np.cumsum(self.high - self.low)])

    @property
    def rows(self) -> int:
        return int((self.high - self.low).sum())


def messages(
    layout: Layout, low: np.ndarray, high: np.ndarray, trip: Tour, route: Route, rank: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """(messages int64[n, 8], base int64[num_chunks], rows of all buffers) of `rank`.

    low, high: needs of each rank of each chunk. base[c] is the row of the arena at which chunk c's first token would
    lie: own chunks, and those that the rank's buffers hold at least a part of; -1 for others.
    """
    stay = _Stay(layout, low, high, trip, route, rank)
    buffer_rows = stay.allocate(layout.local_rows)
    rows = [*_clears(stay)]
    for table, send, receive in (
        (trip.keys, SEND_KEYS, RECEIVE_KEYS),
        (trip.gradients, SEND_GRADIENTS, RECEIVE_GRADIENTS),
    ):
        for kind, end, other in ((send, table.source, table.destination), (receive, table.destination, table.source)):
            peers = other[end == rank].tolist()
            for peer, transfer in zip(peers, table.of(end == rank).each(), strict=True):
                rows += [(kind, transfer[0], peer, *span) for span in stay.spans(transfer)]
    out = np.zeros((len(rows), 8), np.int64)
    if rows:
        out[:, :5] = rows
        order = np.where(out[:, KIND] == CLEAR, out[:, START], np.arange(len(out)))  # messages: as both sides pack them
        out = out[np.lexsort((order, out[:, PEER], out[:, EXCHANGE], out[:, KIND]))]
        joins = (out[1:, :START] == out[:-1, :START]).all(axis=1) & (out[1:, START] == out[:-1, STOP])
        head, tail = np.flatnonzero(np.r_[True, ~joins]), np.flatnonzero(np.r_[~joins, True])
        out[head, STOP] = out[tail, STOP]
        out = out[head]
    return out, stay.base(), buffer_rows


def allocate(buffers: list[Buffer], first_row: int) -> int:
    """Gives each buffer the lowest place that is free during its lives; the number of rows used behind first_row."""
    placed: list[tuple[int, int, tuple[int, int], tuple[int, int]]] = []
    end = first_row
    for buffer in sorted(buffers, key=lambda buffer: (buffer.keys_life, buffer.gradients_life)):
        taken = sorted(
            (start, stop)
            for start, stop, keys_life, gradients_life in placed
            if overlap(keys_life, buffer.keys_life) or overlap(gradients_life, buffer.gradients_life)
        )
        address = first_row
        for start, stop in taken:
            if start - address >= buffer.rows:
                break
            address = max(address, stop)
        buffer.address = address
        placed.append((address, address + buffer.rows, buffer.keys_life, buffer.gradients_life))
        end = max(end, address + buffer.rows)
    return end - first_row


def _joined(buffers: list[Buffer]) -> Buffer:
    """One buffer for the rows of several, in use as long as any of them."""
    if len(buffers) == 1:
        return buffers[0]
    lives = ([buffer.keys_life for buffer in buffers], [buffer.gradients_life for buffer in buffers])
    return Buffer(
        *(np.concatenate([getattr(buffer, name) for buffer in buffers]) for name in ("chunk", "low", "high")),
        *((min(first for first, _ in life), max(last for _, last in life)) for life in lives),
    )


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two lives, both ends included, have a hop in common."""
    return a[0] <= b[1] and b[0] <= a[1]


class _Stay:
    """The buffers of one rank during a tour, by the block that each holds."""

    def __init__(self, layout: Layout, low: np.ndarray, high: np.ndarray, trip: Tour, route: Route, rank: int):
        self.layout, self.low, self.high, self.rank = layout, low, high, rank
        self.width = route.width(layout.ranks)
        self.chunks_of = np.searchsorted(layout.rank, np.arange(layout.ranks + 1))
        self.buffers: dict[int, Buffer] = {}
        depth = route.depth
        keys = trip.keys.of((trip.keys.source == rank) | (trip.keys.destination == rank))
        gradients = trip.gradients.of((trip.gradients.source == rank) | (trip.gradients.destination == rank))
        hops = {block_at(rank, o, s, self.width, layout.ranks): hop for o, s, hop in trip.visits}
        zeroed = {block_at(rank, o.nodes, 0, self.width, layout.ranks): o.first_hop for o in trip.crossings}
        self.comes: dict[int, tuple[int, int]] = {}  # the message, or the first, that brings each block
        for block in dict.fromkeys(keys.block[keys.destination == rank].tolist()):
            arrives = keys.exchange[(keys.block == block) & (keys.destination == rank)]
            source = keys.source[(keys.block == block) & (keys.destination == rank)][0]
            self.comes[block] = (int(arrives.min()), int(source))
            leaves = keys.exchange[(keys.block == block) & (keys.source == rank)]
            goes_on = gradients.exchange[gradients.block == block]
            met = hops.get(block, 0)
            first = zeroed.get(block, met)
            scope = keys.scope[(keys.block == block) & (keys.destination == rank)][0]
            self.buffers[block] = Buffer(
                *self.rows_of(block, rank, int(scope)),
                keys_life=(int(arrives.min()) - depth + 1, max(met, int(leaves.max(initial=0)))),
                gradients_life=(first, max(met, int(goes_on.max(initial=0)))),
            )

    def allocate(self, first_row: int) -> int:
        """Places for all buffers. Blocks that come in one message lie side by side, as they are packed in it."""
        together: dict[tuple[int, int], list[Buffer]] = {}
        for block, buffer in self.buffers.items():
            together.setdefault(self.comes[block], []).append(buffer)
        rooms = [_joined(buffers) for buffers in together.values()]
        rows = allocate(rooms, first_row)
        for room, buffers in zip(rooms, together.values(), strict=True):
            address = room.address
            for buffer in buffers:
                buffer.address, address = address, address + buffer.rows
        return rows

    def rows_of(self, block: int, visitor: int, scope: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(chunk, low, high) of the rows of `block` that a transfer for `visitor` carries."""
        chunk = np.arange(*self.chunks_of[block : block + 2])
        if scope == NEEDED:
            low, high = self.low[chunk, visitor], self.high[chunk, visitor]
        elif scope == NODE:
            node = slice(visitor // self.width * self.width, visitor // self.width * self.width + self.width)
            high = self.high[chunk, node].max(axis=1)
            low = np.where(self.high[chunk, node] > 0, self.low[chunk, node], high[:, None]).min(axis=1)
        else:
            low, high = np.zeros(len(chunk), np.int64), self.layout.count[chunk]
        kept = high > low
        return chunk[kept], low[kept], high[kept]

    def spans(self, transfer: tuple[int, ...]) -> list[tuple[int, int]]:
        """The rows of this rank's arena that hold what a transfer carries, in its order."""
        _, _, _, block, visitor, scope, piece, pieces, rows = transfer
        chunk, low, high = self.rows_of(block, visitor, scope)
        packed = np.concatenate([[0], np.cumsum(high - low)])
        total = int(packed[-1])
        start, stop = total * piece // pieces, total * (piece + 1) // pieces
        assert stop - start == rows, (transfer, start, stop)
        low, high = np.maximum(low, low + start - packed[:-1]), np.minimum(high, low + stop - packed[:-1])
        base = self.base_of(block)[chunk - self.chunks_of[block]]
        spans: list[tuple[int, int]] = []
        for first, last in zip((base + low).tolist(), (base + high).tolist(), strict=True):
            if first >= last:
                continue
            if spans and spans[-1][1] == first:
                spans[-1] = (spans[-1][0], last)
            else:
                spans.append((first, last))
        return spans

    def base_of(self, block: int) -> np.ndarray:
        """The row of the arena at which each chunk of `block` would begin."""
        chunk = slice(*self.chunks_of[block : block + 2])
        if block == self.rank:
            return self.layout.row[chunk]
        base = np.full(chunk.stop - chunk.start, -1, np.int64)
        if block in self.buffers:
            buffer = self.buffers[block]
            base[buffer.chunk - chunk.start] = buffer.address + buffer.packed[:-1] - buffer.low
        return base

    def base(self) -> np.ndarray:
        return np.concatenate([self.base_of(block) for block in range(self.layout.ranks)])


def _clears(stay: _Stay) -> list[tuple[int, int, int, int, int]]:
    """Gradients are zeroed where a buffer is first computed with, or gets those of a node-mate."""
    return [
        (CLEAR, buffer.gradients_life[0], -1, buffer.address, buffer.address + buffer.rows)
        for buffer in stay.buffers.values()
    ]
