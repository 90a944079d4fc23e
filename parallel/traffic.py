"""What one pass over a plan sends, receives and keeps: the arena of keys and values, and that of their gradients.

The ring's loop says `before` and `after` each hop, and asks what is there `at` it. Whether blocks come as messages or
are gathered is decided here, by the plan. No bytes are sent here but through an `Exchange`.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from parallel.collectives import Exchange, Message, Pending
from parallel.messages import CLEAR, RECEIVE_GRADIENTS, RECEIVE_KEYS, SEND_GRADIENTS, SEND_KEYS
from parallel.pool import GRADIENTS, KEYS, OWN_GRADIENTS, OWN_KEYS, arriving, leaving
from parallel.schedule import (
    BUFFER_ROWS,
    DEPTH,
    HEAD_GROUPS,
    LOCAL_LENGTH,
    NARROW,
    NUM_BATCHES,
    NUM_HOPS,
    NUM_RANKS,
    NUM_SEQUENCES,
    hop_starts,
    message_rows,
)  # fmt: skip

Spans = list[tuple[int, int]]  # ranges of rows, packed one after the other into one message


class Program:
    """A plan's numbers, read once for a pass.

    Attributes:
        hops: the tiles of each hop, views of the plan; after a gather all hops but the first have the same.
        messages: by kind and exchange, the spans for each peer.
    """

    def __init__(self, plan: Tensor):
        table = plan.numpy()
        head, more = table[0].tolist(), table[1].tolist()
        self.ranks, self.depth = head[NUM_RANKS], head[DEPTH]
        self.local_rows, self.buffer_rows = head[NUM_SEQUENCES] * head[LOCAL_LENGTH], head[BUFFER_ROWS]
        self.num_batches, self.head_groups, self.narrow = more[NUM_BATCHES], more[HEAD_GROUPS], bool(more[NARROW])
        self.hops = [plan[start:stop] for start, stop in pairwise(hop_starts(table).tolist())]
        if self.head_groups:
            self.hops = self.hops[:1] + [self.hops[1]] * self.head_groups
        self.messages: dict[tuple[int, int], dict[int, Spans]] = {}
        for kind, exchange, peer, start, stop in message_rows(table)[:, :5].tolist():
            self.messages.setdefault((kind, exchange), {}).setdefault(peer, []).append((start, stop))
        assert len(self.hops) == head[NUM_HOPS]


class Buffers:
    """One pool of memory for all layers and passes of a ring: storages by name (`parallel.pool`).

    `reserve` makes them beforehand, so that a pass allocates nothing that lasts. Where a pass asks for more all the
    same, a storage grows. What `take` gives is valid until the same name is taken again.

    Attributes:
        num_grown: storages that a pass had to make or to enlarge.
    """

    def __init__(self):
        self._storages: dict[tuple[str, torch.device], Tensor] = {}
        self.num_grown = 0

    @property
    def num_bytes(self) -> int:
        return sum(storage.numel() for storage in self._storages.values())

    def reserve(self, sizes: Mapping[str, int], device: torch.device) -> None:
        """Storages of at least so many bytes, by name."""
        for name, size in sizes.items():
            self._storage(name, size, torch.empty(0, device=device).device)  # cuda is cuda:0

    def sizes(self) -> dict[str, int]:
        """Bytes of each storage, by name."""
        return {name: storage.numel() for (name, _), storage in self._storages.items()}

    def take(self, name: str, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor with whatever values are there."""
        shape = tuple(shape)
        size = dtype.itemsize
        for length in shape:
            size *= length
        storage, grown = self._storage(name, size, device)
        self.num_grown += grown
        return storage[:size].view(dtype).view(shape)

    def _storage(self, name: str, size: int, device: torch.device) -> tuple[Tensor, bool]:
        """(at least `size` bytes under this name, whether there were fewer)."""
        storage = self._storages.get((name, device))
        if storage is not None and storage.numel() >= size:
            return storage, False
        self._storages.pop((name, device), None)
        del storage  # the old one is given back first
        storage = self._storages[name, device] = torch.empty(size, dtype=torch.uint8, device=device)
        return storage, True


class Block(NamedTuple):
    """Keys and values of one hop, rows [M, G, D] of the arena: group `group` of `groups` of all heads."""

    k: Tensor
    v: Tensor
    group: int = 0
    groups: int = 1

    def heads(self, num_heads: int) -> slice:
        """The query heads, of num_heads, that see them."""
        share = num_heads // self.groups
        return slice(self.group * share, (self.group + 1) * share)


class Traffic(Protocol):
    """The exchanges of one pass. Until `after(hop)` what hop + 1 needs may be on its way."""

    def before(self, hop: int) -> None:
        """Posts what is to be under way while `hop` is computed. Collective over the ring, as is `after`."""

    def at(self, hop: int) -> Block:
        """The keys and values that `hop` computes with."""

    def gradients_at(self, hop: int) -> tuple[Tensor, Tensor]:
        """Where dk and dv of that block add up, [M, G, D] in the accumulation dtype."""

    def after(self, hop: int) -> None:
        """Waits for what hop + 1 needs, and adds the gradients that came."""

    def own_gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dk and dv of this rank's keys and values, new tensors [N, G, D], once all is waited for."""


def begin(
    program: Program, exchange: Exchange, buffers: Buffers, k: Tensor, v: Tensor, gradients: torch.dtype | None = None
) -> Traffic:
    """The traffic of a forward pass over k, v [N, G, D], or of a backward pass whose gradients have that dtype."""
    if program.head_groups:
        return _Gathered(program, exchange, buffers, k, v, gradients)
    return (_Messages if program.messages else _Own)(program, exchange, buffers, k, v, gradients)


class _Own:
    """Nobody needs what another rank has."""

    def __init__(
        self,
        program: Program,
        exchange: Exchange,
        buffers: Buffers,
        k: Tensor,
        v: Tensor,
        gradients: torch.dtype | None,
    ):
        self.block = Block(k, v)
        self.returned = gradients == k.dtype  # as they are: then they lie in no pool
        if self.returned:
            self.dk, self.dv = (k.new_zeros(k.shape, dtype=gradients) for _ in range(2))
        elif gradients:
            self.dk, self.dv = buffers.take(GRADIENTS, (2, *k.shape), gradients, k.device).zero_()

    def before(self, hop: int) -> None:
        pass

    def at(self, hop: int) -> Block:
        return self.block

    def gradients_at(self, hop: int) -> tuple[Tensor, Tensor]:
        return self.dk, self.dv

    def after(self, hop: int) -> None:
        pass

    def own_gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.returned and dtype == self.dk.dtype:
            return self.dk, self.dv
        return _new(self.dk, dtype), _new(self.dv, dtype)


class _Messages:
    """Blocks by messages: K and V of a row side by side, [rows, 2, G, D], so that any rows are one message."""

    def __init__(
        self,
        program: Program,
        exchange: Exchange,
        buffers: Buffers,
        k: Tensor,
        v: Tensor,
        gradients: torch.dtype | None,
    ):
        self.program, self.exchange, self.buffers = program, exchange, buffers
        self.posted = 0
        self.num_batches = program.num_batches if gradients else len(program.hops) - 1
        self.pending: dict[int, tuple[Pending, Tensor | None]] = {}
        shape = (len(k) + program.buffer_rows, 2, *k.shape[1:])
        self.keys = buffers.take(KEYS, shape, k.dtype, k.device)
        self.keys[: len(k), 0], self.keys[: len(k), 1] = k, v
        self.gradients = buffers.take(GRADIENTS, shape, gradients, k.device) if gradients else None
        self.wire = k.dtype if program.narrow else gradients
        if self.gradients is not None:
            self.gradients[: len(k)].zero_()

    def before(self, hop: int) -> None:
        while self.posted < min(hop + self.program.depth, self.num_batches):
            self._post(self.posted)
            self.posted += 1
        if self.gradients is not None:
            for _, spans in self._spans(CLEAR, hop):
                for start, stop in spans:
                    self.gradients[start:stop].zero_()

    def at(self, hop: int) -> Block:
        return Block(self.keys[:, 0], self.keys[:, 1])

    def gradients_at(self, hop: int) -> tuple[Tensor, Tensor]:
        return self.gradients[:, 0], self.gradients[:, 1]

    def after(self, hop: int) -> None:
        if hop not in self.pending:
            return
        pending, arrived = self.pending.pop(hop)
        pending.wait()
        if arrived is None:
            return
        row = 0
        for _, spans in self._spans(RECEIVE_GRADIENTS, hop):
            for start, stop in spans:
                self.gradients[start:stop].add_(arrived[row : row + stop - start])  # += would copy it onto itself
                row += stop - start

    def own_gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        own = self.gradients[: self.program.local_rows]
        return _new(own[:, 0], dtype), _new(own[:, 1], dtype)

    def _post(self, number: int) -> None:
        """One exchange: keys first, then gradients, on both sides."""
        sends, receives, arriving = self._outgoing(SEND_KEYS, number, self.keys, self.keys.dtype), [], None
        for peer, spans in self._spans(RECEIVE_KEYS, number):
            ((start, stop),) = spans  # a buffer is packed like the message
            receives.append((peer, self.keys[start:stop]))
        if self.gradients is not None:
            sends += self._outgoing(SEND_GRADIENTS, number, self.gradients, self.wire)
            arriving, messages = self._incoming(number)
            receives += messages
        if sends or receives:
            self.pending[number] = (self.exchange.start(sends, receives), arriving)

    def _spans(self, kind: int, number: int) -> Iterable[tuple[int, Spans]]:
        return self.program.messages.get((kind, number), {}).items()

    def _room(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        """Rows beside the arena, for an exchange's own use until it has been waited for."""
        return self.buffers.take(name, (rows, *self.keys.shape[1:]), dtype, self.keys.device)

    def _outgoing(self, kind: int, number: int, arena: Tensor, dtype: torch.dtype) -> list[Message]:
        """Messages as they lie in the arena where that is possible, else packed."""
        messages = self._spans(kind, number)
        packed = {peer for peer, spans in messages if len(spans) > 1 or dtype != arena.dtype}
        rows = sum(_rows(spans) for peer, spans in messages if peer in packed)
        room = self._room(leaving(kind, number % self.program.depth), rows, dtype) if rows else None
        sends, row = [], 0
        for peer, spans in messages:
            if peer not in packed:
                sends.append((peer, arena[spans[0][0] : spans[0][1]]))
                continue
            first = row
            for start, stop in spans:
                room[row : row + stop - start] = arena[start:stop]
                row += stop - start
            sends.append((peer, room[first:row]))
        return sends

    def _incoming(self, number: int) -> tuple[Tensor | None, list[Message]]:
        """Where gradients arrive before they are added, and as which messages."""
        messages = self._spans(RECEIVE_GRADIENTS, number)
        rows = sum(_rows(spans) for _, spans in messages)
        if not rows:
            return None, []
        room, receives, row = self._room(arriving(number % self.program.depth), rows, self.wire), [], 0
        for peer, spans in messages:
            receives.append((peer, room[row : row + _rows(spans)]))
            row += _rows(spans)
        return room, receives


class _Gathered:
    """All blocks at once, one group of key/value heads after the other: gathered, and their gradients scattered back.

    Exchange e gathers group e, which hop e + 1 computes, and scatters the gradients of group e - 2. Two groups are in
    memory at a time.
    """

    def __init__(
        self,
        program: Program,
        exchange: Exchange,
        buffers: Buffers,
        k: Tensor,
        v: Tensor,
        gradients: torch.dtype | None,
    ):
        groups, (rows, heads, width) = program.head_groups, k.shape
        if heads % groups:
            raise ValueError(f"head_groups={groups} does not divide {heads} key/value heads")
        self.groups, self.exchange, self.ranks, self.rows = groups, exchange, program.ranks, rows
        self.pending: dict[int, list[Pending]] = {}

        def room(name: str, number: int, times: int, dtype: torch.dtype) -> Tensor:
            return buffers.take(name, (number, times * rows, 2, heads // groups, width), dtype, k.device)

        self.own_keys = room(OWN_KEYS, groups, 1, k.dtype)
        for part, x in enumerate((k, v)):
            self.own_keys[:, :, part] = x.unflatten(1, (groups, -1)).transpose(0, 1)
        self.keys = room(KEYS, 2, program.ranks, k.dtype)
        self.num_batches = program.num_batches if gradients else groups
        self.own = room(OWN_GRADIENTS, groups, 1, gradients) if gradients else None
        self.gradients = room(GRADIENTS, 2, program.ranks, gradients) if gradients else None

    def before(self, hop: int) -> None:
        if hop >= self.num_batches:
            return
        works = self.pending[hop] = []
        if hop < self.groups:
            works.append(self.exchange.gather(self._by_rank(self.keys[hop % 2]), self.own_keys[hop]))
        if self.gradients is not None:
            if hop >= 2:
                works.append(self.exchange.scatter_sum(self.own[hop - 2], self._by_rank(self.gradients[hop % 2])))
            if 1 <= hop <= self.groups:
                self.gradients[(hop - 1) % 2].zero_()

    def at(self, hop: int) -> Block:
        keys = self.keys[(hop - 1) % 2]
        return Block(keys[:, 0], keys[:, 1], hop - 1, self.groups)

    def gradients_at(self, hop: int) -> tuple[Tensor, Tensor]:
        gradients = self.gradients[(hop - 1) % 2]
        return gradients[:, 0], gradients[:, 1]

    def after(self, hop: int) -> None:
        for pending in self.pending.pop(hop, []):
            pending.wait()

    def own_gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        by_row = self.own.transpose(0, 1)  # [rows, groups, 2, heads of a group, D]
        dk, dv = (_new(by_row[:, :, part], dtype).flatten(1, 2) for part in range(2))
        return dk, dv

    def _by_rank(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.ranks, self.rows))


def _new(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What lies in the pool as a contiguous tensor of its own: converted, it is not copied twice."""
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _rows(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)
