"""What a layout and a route take for a micro-batch: seconds, network and buffers, as far as can be told beforehand.

No torch here. All ranks must find the same, to the last bit: what is summed up are whole numbers, of which a sum does
not depend on the order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from model.mask import Mask
from parallel.deal import deal
from parallel.layout import Layout
from parallel.route import Route, Tour, block_at, tour
from parallel.schedule import Needs, lay_out, meetings, needed, needed_rows
from parallel.wire import Network, Played, play, play_gather
from parallel.work import squares, work

CALL_ROWS = 32768  # keys of one kernel call, where blocks are smaller: merging the results of more calls costs time
MOST_BLOCKS_PER_HOP = 8
ROUNDED = 1 - 1e-9  # sums in another order differ in their last bits


@dataclass(frozen=True)
class Shape:
    """Of attention on one rank, inside of tensor and Ulysses ranks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int = 2

    @property
    def key_elements(self) -> int:
        """Of the keys and values of one token."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Rates:
    """What kernels reach on one rank: FLOP/s, and bytes/s of memory where results are merged (0: at no cost)."""

    forward_flops: float
    backward_flops: float
    memory_bytes_per_second: float = 0.0


class Estimate(NamedTuple):
    """Seconds of one layer's attention, forward and backward; those for which the busiest network card is busy; rows of
    buffers on the rank that needs most."""

    layout: str
    route: Route
    seconds: float
    nic_seconds: float
    buffer_rows: int

    @property
    def name(self) -> str:
        words = [f"{self.layout} {self.route.name}"]
        if self.route.depth > 1:
            words.append(f"{self.route.depth} ahead")
        return " ".join(words + ["via nodes"] * (self.route.node_ranks > 0))


class Ring:
    """What candidates have in common, computed once."""

    def __init__(
        self,
        documents: Sequence[Sequence[int]],
        sequence_length: int,
        padded_length: int,
        ranks: int,
        mask: Mask,
        shape: Shape,
        rates: Rates,
        network: Network,
        granularity: int,
    ):
        self.documents, self.laid = documents, lay_out(documents, sequence_length)
        self.padded_length, self.ranks, self.mask = padded_length, ranks, mask
        self.shape, self.rates, self.network, self.granularity = shape, rates, network, granularity
        self.local_rows = len(documents) * padded_length // ranks
        self.dealt: dict[str, tuple[Layout, np.ndarray]] = {}
        self.same: dict[str, tuple] = {}  # what a layout is, by its name; and what follows from that
        self.work: dict[tuple, np.ndarray] = {}
        self.needs: dict[tuple, Needs] = {}
        self.rows: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
        self.least: dict[tuple, float] = {}
        self.last: tuple = ("", None, None)
        width = shape.num_heads * shape.head_dim
        self.pair_seconds = 4 * width / rates.forward_flops, 10 * width / rates.backward_flops
        length = self.laid.stop - self.laid.start
        whole = int(squares(length, length, 1 - mask.reach, 0, granularity).sum())
        self.ideal_seconds = whole / ranks * sum(self.pair_seconds)

    def deal(self, name: str) -> tuple[Layout, np.ndarray]:
        """(layout, pairs of rank r with the block of o, float64[R, R])."""
        if name not in self.dealt:
            self.take(name, deal(name, self.documents, self.padded_length, self.ranks, self.mask))
        return self.dealt[name]

    def take(self, name: str, layout: Layout) -> None:
        """From now on `name` is this layout."""
        columns = (column.tobytes() for column in (layout.rank, layout.sequence, layout.start, layout.count))
        self.same[name] = layout.step, *columns  # layouts of different names may deal alike
        if self.same[name] not in self.work:
            self.work[self.same[name]] = work(layout, self.laid, self.mask, self.granularity)
        self.dealt[name] = layout, self.work[self.same[name]]

    def needed_rows(self, name: str, width: int) -> tuple[np.ndarray, np.ndarray]:
        """What ranks and nodes of `width` ranks need of one another: see `parallel.schedule.needed_rows`."""
        layout, _ = self.deal(name)
        same = self.same[name]
        if same not in self.needs:
            self.needs[same] = needed(layout, self.laid, meetings(layout, self.laid), self.mask)
        if (same, width) not in self.rows:
            self.rows[same, width] = needed_rows(layout, self.needs[same], width)
        return self.rows[same, width]

    def bound(self, name: str) -> float:
        """Seconds of the rank that has most to compute."""
        return float(self.deal(name)[1].sum(axis=1).max()) * sum(self.pair_seconds)

    def least_seconds(self, name: str, route: Route, most_blocks: int) -> float:
        """No estimate with up to most_blocks blocks a hop is below: what the busiest rank computes and merges."""
        if self.gathers(route):
            return ROUNDED * self.bound(name)
        layout, pairs = self.deal(name)
        key = self.same[name], route.name, most_blocks
        if key not in self.least:
            by_rank, _ = self.needed_rows(name, self.ranks)
            rows, keys = (column * (by_rank > 0) for column in self._merged_rows(layout, pairs, by_rank, route.name))
            totals = pairs.sum(axis=1), rows.sum(axis=1) / most_blocks, keys.sum(axis=1)
            self.least[key] = ROUNDED * sum(float(seconds.max()) for seconds in self._hop_seconds(*totals))
        return self.least[key]

    def blocks_per_hop(self, name: str, route: Route, max_blocks: float) -> list[int]:
        """As many blocks as have CALL_ROWS keys on average, then fewer, where that is too much for buffers."""
        if route.name != "direct":
            return [1]
        by_rank, _ = self.needed_rows(name, self.ranks)
        each = max(1, int(by_rank.sum()) // max(1, int(np.count_nonzero(by_rank))))
        most = max(1, min(MOST_BLOCKS_PER_HOP, CALL_ROWS // each))
        fit = max(1, int(max_blocks * self.local_rows) // ((route.depth + 1) * each))
        return [blocks for blocks in (most >> n for n in range(most.bit_length())) if blocks == 1 or blocks <= fit]

    def estimate(self, name: str, route: Route, background_seconds: float, max_blocks: float) -> Estimate:
        """Not played, and of infinite seconds, where buffers of max_blocks blocks are too small."""
        rows = self.buffer_rows(name, route)
        if rows > max_blocks * self.local_rows:
            return Estimate(name, route, np.inf, np.inf, rows)
        forward, backward = self.play(name, route, background_seconds)
        nic_seconds = forward.nic_seconds + backward.nic_seconds
        return Estimate(name, route, max(forward.makespan + backward.makespan, nic_seconds), nic_seconds, rows)

    def buffer_rows(self, name: str, route: Route) -> int:
        if self.gathers(route):
            return -(-2 * self.ranks * self.local_rows // route.head_groups)  # two groups at a time
        rows = self.needed_rows(name, route.width(self.ranks))
        return int(buffer_rows(self._tour(name, route)[0], route, *rows, self.local_rows).max())

    def play(self, name: str, route: Route, background_seconds: float = 0.0) -> list[Played]:
        """A forward pass and a backward pass. background_seconds: for which other traffic uses each card in each."""
        if self.gathers(route):
            return self._play_gather(name, route, background_seconds)
        trip, hops = self._tour(name, route)
        keys, gradients = self.row_bytes(route.narrow)
        return [
            play(trip, route.depth, seconds, self.network, keys, back, background_seconds)
            for seconds, back in zip(self._hop_seconds(*hops), (0, gradients), strict=True)
        ]

    def gathers(self, route: Route) -> bool:
        return route.name == "gather" and self.ranks > 1

    def row_bytes(self, narrow: bool) -> tuple[int, int]:
        """On the wire, of one token: its keys and values; their gradients."""
        elements, size = self.shape.key_elements, self.shape.element_bytes
        return elements * size, elements * (size if narrow else max(4, size))

    def _play_gather(self, name: str, route: Route, background_seconds: float) -> list[Played]:
        groups = route.head_groups
        pairs = np.repeat(self.deal(name)[1].sum(axis=1)[:, None] / groups, 1 + groups, axis=1)
        pairs[:, 0] = 0  # nothing is there yet
        keys, gradients = (self.local_rows * size for size in self.row_bytes(False))
        return [
            play_gather(groups, pairs * seconds, self.network, keys, back, background_seconds)
            for seconds, back in zip(self.pair_seconds, (0, gradients), strict=True)
        ]

    def _tour(self, name: str, route: Route) -> tuple[Tour, np.ndarray]:
        """The tour, and (pairs, query rows, key rows) of each rank at each hop, float64[3, R, hops]; own rows apart."""
        if self.last[:2] == (name, route):
            return self.last[2]
        layout, pairs = self.deal(name)
        width, everyone = route.width(self.ranks), np.arange(self.ranks)
        by_rank, by_node = self.needed_rows(name, width)
        trip = tour(route, by_rank, by_node, self.local_rows)
        rows, keys = self._merged_rows(layout, pairs, by_rank, route.name)
        hops = np.zeros((3, self.ranks, trip.num_hops))
        hops[0, :, 0] = np.diag(pairs)
        for nodes, places, hop in trip.visits:
            block = block_at(everyone, nodes, places, width, self.ranks)
            hops[:, :, hop] += [column[everyone, block] for column in (pairs, rows, keys)]
        hops[1] = np.minimum(self.local_rows, hops[1])
        self.last = name, route, (trip, hops)
        return trip, hops

    def _merged_rows(
        self, layout: Layout, pairs: np.ndarray, by_rank: np.ndarray, route_name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Query rows and key rows whose results each rank merges with each block, [R, R]: as if each query saw all of
        the keys, or in a triangle half of them."""
        rows = np.minimum(self.local_rows, pairs * (2 if layout.step > 1 else 1) // np.maximum(1, by_rank))
        return rows, by_rank if route_name == "direct" else np.full_like(by_rank, self.local_rows)

    def _hop_seconds(self, pairs: np.ndarray, rows: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of forward and backward: the kernel, and adding its results to those of earlier hops, which memory limits."""
        forward, backward = (pairs * seconds for seconds in self.pair_seconds)
        if self.rates.memory_bytes_per_second:
            width, narrower = (heads * self.shape.head_dim for heads in (self.shape.num_heads, self.shape.num_kv_heads))
            forward = forward + 10 * width * rows / self.rates.memory_bytes_per_second
            backward = backward + (24 * width * rows + 20 * narrower * keys) / self.rates.memory_bytes_per_second
        return forward, backward


class _Room(NamedTuple):
    """A buffer of each rank: the hops in which its keys and its gradients are in use, ends included; int64[R] rows."""

    keys: tuple[int, int]
    gradients: tuple[int, int]
    rows: np.ndarray


def buffer_rows(trip: Tour, route: Route, needed: np.ndarray, in_node: np.ndarray, block_rows: int) -> np.ndarray:
    """Rows of the buffers in each rank's plan, int64[R]: as `parallel.messages` lays them out, for all ranks at once.

    Arguments as those of `route.tour`. A rank to which less comes than to others may need a little less.
    """
    ranks = len(needed)
    rooms = sorted(_rooms(trip, route, needed, in_node, block_rows), key=lambda room: room[:2])
    start, stop = np.zeros((2, len(rooms), ranks), np.int64)
    lives = np.array([[room.keys, room.gradients] for room in rooms], np.int64).reshape(-1, 2, 2)
    first_hop, last_hop = lives[:, :, 0], lives[:, :, 1]
    for number, (_, _, rows) in enumerate(rooms):
        meets = (first_hop[:number] <= last_hop[number]) & (first_hop[number] <= last_hop[:number])
        taken = np.flatnonzero(meets.any(axis=1))
        order = np.argsort(start[taken], axis=0, kind="stable")
        address, placed = np.zeros(ranks, np.int64), np.zeros(ranks, bool)
        for first, last in zip(*(np.take_along_axis(ends[taken], order, 0) for ends in (start, stop)), strict=True):
            placed |= first - address >= rows  # the lowest place that is free
            address = np.where(placed, address, np.maximum(address, last))
        start[number], stop[number] = address * (rows > 0), (address + rows) * (rows > 0)
    return stop.max(axis=0, initial=0)


def _rooms(trip: Tour, route: Route, needed: np.ndarray, in_node: np.ndarray, block_rows: int) -> list[_Room]:
    """Buffers, each for the blocks that come in one message."""
    ranks, depth, relay = len(needed), route.depth, route.name == "relay"
    width, everyone = route.width(ranks), np.arange(ranks)
    hops = {(nodes, places): hop for nodes, places, hop in trip.visits}
    together: dict[tuple[int, ...], list[_Room]] = {}
    for (nodes, places), hop in hops.items():
        if places:
            rows = needed[everyone, block_at(everyone, nodes, places, width, ranks)]
            room = _Room((hop - depth, hop), (hop, hop + depth), np.full(ranks, block_rows) if relay else rows)
            together.setdefault((hop - 1, 1 if relay else places), []).append(room)
    for nodes, arrives, _, _, until, first_hop, _ in trip.crossings:
        handed_on = [hop - 1 for (node, places), hop in hops.items() if node == nodes and places]
        last = max(hops.get((nodes, 0), 0), *(handed_on[:1] if relay else handed_on), 0)
        rows = in_node[everyone // width, block_at(everyone, nodes, 0, width, ranks)]
        room = _Room((arrives - depth + 1, last), (first_hop, until), np.full(ranks, block_rows) if relay else rows)
        together[arrives, 0, nodes] = [room]
    return [
        _Room(*((min(a), max(b)) for a, b in (zip(*lives, strict=True) for lives in (keys, gradients))), sum(rows))
        for keys, gradients, rows in (zip(*rooms, strict=True) for rooms in together.values())
    ]
