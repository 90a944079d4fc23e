"""How blocks of keys and values reach the ranks that need them, and gradients their owners. No torch here.

A ring of R ranks is cut into nodes of w neighbours (w = R where nothing is to be said of nodes). Rank (b, j) meets
the blocks of the others in *visits* (o, s): that of rank (b - o, j - s), o nodes and s places before its own.
Visits are grouped into hops: what arrives by exchange h - 1 is computed at hop h, while later exchanges are
under way.

* Inside a node a block is handed on from neighbour to neighbour (`relay`) or comes straight from its owner
  (`direct`).
* From another node it first comes to a node-mate, the one with the owner's place j: it crosses once, over its
  owner's network card, cut into pieces that spread over the exchanges before it is needed. The mate then stands in
  for the owner.
* Gradients of keys and values go the same ways back: along the relay, added to at each rank, or straight to where
  the block came from. A mate sums those of its node before one message crosses.
* `gather` has no messages of its own: each exchange is an all-gather of one group of key/value heads, its gradients
  a reduce-scatter.

Timing, in hops h with prefetch depth p: exchange e is posted before hop e - p + 1 and waited for after hop e. It
carries the keys of hop e + 1, and gradients found at hop e - p or before.

Source: arXiv:2310.01889 (relay), arXiv:2407.21783 §3.3.2 (gather), arXiv:2411.06465 (both levels of a network).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

ROUTES = ("relay", "direct", "gather")

NEEDED, NODE, WHOLE = range(3)  # which rows of a block a transfer carries: the visitor's, its node's, all


@dataclass(frozen=True)
class Route:
    """How a ring exchanges blocks.

    Attributes:
        name: relay, direct or gather.
        depth: exchanges posted ahead of the hop that is computed; a relay has 1, it hands on what it has.
        blocks_per_hop: blocks that one kernel call computes; direct only.
        node_ranks: neighbours of the ring on one node, over which transfers go `via` a mate; 0 = do not.
        head_groups: exchanges into which a gather is cut, by key/value heads; gather only.
        narrow: whether gradients travel in the dtype of the keys instead of the accumulation dtype; direct only, and
            not via: what is added up on the way must not be rounded at each step.

    Raises:
        ValueError: for what the route cannot do.
    """

    name: str = "relay"
    depth: int = 1
    blocks_per_hop: int = 1
    node_ranks: int = 0
    head_groups: int = 1
    narrow: bool = False

    def __post_init__(self) -> None:
        if self.name not in ROUTES:
            raise ValueError(f"route={self.name} is unknown: use one of {', '.join(ROUTES)}")
        for key in ("depth", "blocks_per_hop", "head_groups"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} must be at least 1")
        if self.name != "direct" and (self.depth > 1 or self.blocks_per_hop > 1):
            raise ValueError(
                f"route={self.name} has depth=1 and blocks_per_hop=1, not {self.depth} and {self.blocks_per_hop}: "
                "use route=direct for more"
            )
        if self.name != "gather" and self.head_groups > 1:
            raise ValueError(f"route={self.name} moves all heads at once: head_groups={self.head_groups} needs gather")
        if self.name == "gather" and self.node_ranks:
            raise ValueError(
                f"route=gather leaves nodes to its collective: use node_ranks=0, not {self.node_ranks}, or route=direct"
            )
        if self.narrow and (self.name != "direct" or self.node_ranks):
            raise ValueError(
                f"route={self.name} via {self.node_ranks} ranks a node adds gradients up on the way, which bfloat16 "
                "would round at each step: use float32 on the wire, or route=direct without nodes"
            )

    def width(self, ranks: int) -> int:
        """Neighbours among which blocks travel without a mate: all ranks where there are no nodes."""
        if not 1 < self.node_ranks < ranks:
            return ranks
        if ranks % self.node_ranks:
            raise ValueError(f"node_ranks={self.node_ranks} does not divide a ring of {ranks} ranks")
        return self.node_ranks


class Visit(NamedTuple):
    """All ranks meet the block `nodes` nodes and `places` places before their own, at `hop`."""

    nodes: int
    places: int
    hop: int


class Crossing(NamedTuple):
    """All ranks get the block of the same place `nodes` nodes before: in exchanges keys_first … keys_last, a piece
    each; its gradients go home in gradients_first … gradients_last. `first_hop`, `last_hop`: of its visits."""

    nodes: int
    keys_first: int
    keys_last: int
    gradients_first: int
    gradients_last: int
    first_hop: int
    last_hop: int


class Tour(NamedTuple):
    """What all ranks do when; each `Transfers` column is int64[n], one entry for each message of the whole ring."""

    visits: list[Visit]
    crossings: list[Crossing]
    num_hops: int
    keys: "Transfers"
    gradients: "Transfers"

    @property
    def num_batches(self) -> int:
        """Exchanges of a backward pass; a forward pass has num_hops - 1."""
        return 1 + int(max(self.keys.exchange.max(initial=-1), self.gradients.exchange.max(initial=-1)))


class Transfers(NamedTuple):
    """Messages from source to destination: piece `piece` of `pieces` of what `visitor` needs (`scope`) of `block`."""

    exchange: np.ndarray
    source: np.ndarray
    destination: np.ndarray
    block: np.ndarray
    visitor: np.ndarray
    scope: np.ndarray
    piece: np.ndarray
    pieces: np.ndarray
    rows: np.ndarray

    def of(self, chosen: np.ndarray) -> "Transfers":
        return Transfers(*(column[chosen] for column in self))

    def each(self) -> Iterator[tuple[int, ...]]:
        return zip(*(column.tolist() for column in self), strict=True)


def block_at(rank: np.ndarray | int, nodes: int, places: int, width: int, ranks: int) -> np.ndarray | int:
    """The rank whose block `rank` meets `nodes` nodes and `places` places back."""
    return ((rank // width - nodes) % (ranks // width)) * width + (rank % width - places) % width


def tour(route: Route, needed: np.ndarray, in_node: np.ndarray, block_rows: int) -> Tour:
    """Visits, hops and all messages of a relay or direct route.

    needed[r, o]: rows of the block of o that r needs, int64[R, R], 0 on the diagonal; in_node[b, o]: rows of it that
    node b needs, int64[R / width, R]. All ranks compute the same.
    """
    ranks = len(needed)
    width = route.width(ranks)
    visits, crossings = _visits(route, needed, width)
    num_hops = 1 + max((visit.hop for visit in visits), default=0)
    relay = route.name == "relay"
    everyone = np.arange(ranks)
    mate_of = lambda places: everyone // width * width + (everyone % width - places) % width  # noqa: E731
    keys, gradients = [], []
    last_places = {}
    for visit in visits:
        last_places[visit.nodes] = max(visit.places, last_places.get(visit.nodes, 0))
    for nodes, places, hop in visits:
        if places == 0:
            continue
        block = block_at(everyone, nodes, places, width, ranks)
        scope = WHOLE if relay else NEEDED
        keys.append((hop - 1, mate_of(1 if relay else places), everyone, block, everyone, scope, 0, 1))
        onward = relay and places < last_places[nodes]
        home = mate_of(-1) if onward else mate_of(places)
        gradients.append((hop + route.depth, everyone, home, block, everyone, scope, 0, 1))
    for crossing in crossings:
        owner = block_at(everyone, crossing.nodes, 0, width, ranks)
        scope = WHOLE if relay else NODE
        pieces = crossing.keys_last - crossing.keys_first + 1
        for piece in range(pieces):
            keys.append((crossing.keys_first + piece, owner, everyone, owner, everyone, scope, piece, pieces))
        pieces = crossing.gradients_last - crossing.gradients_first + 1
        for piece in range(pieces):
            gradients.append((crossing.gradients_first + piece, everyone, owner, owner, everyone, scope, piece, pieces))
    finish = lambda table: _transfers(table, ranks, width, needed, in_node, block_rows)  # noqa: E731
    return Tour(visits, crossings, num_hops, finish(keys), finish(gradients))


def peers(route: Route, rank: int, ranks: int) -> list[int]:
    """Whom `rank` usually reaches, and who reaches it: connections that are made once, at start.

    A relay that ends early sends its gradients home over a longer way, which is connected when it is first used.
    """
    if route.name == "gather":
        return []
    width, everyone = route.width(ranks), np.arange(ranks)
    near = everyone // width == rank // width
    if route.name == "relay":
        apart = (everyone - rank) % width
        near &= (apart == 1) | (apart == width - 1)
    crossing = (everyone % width == rank % width) & (width < ranks)
    return everyone[(near | crossing) & (everyone != rank)].tolist()


def _visits(route: Route, needed: np.ndarray, width: int) -> tuple[list[Visit], list[Crossing]]:
    """Visits that some rank needs, in order, and the hop and crossings that bring them in time."""
    ranks, depth = len(needed), route.depth
    everyone = np.arange(ranks)
    visits: list[Visit] = []
    drafts: list[tuple[int, int, int, int, int, bool]] = []
    met, shift, keys_first, earliest = 0, 0, 0, 0
    for nodes in range(ranks // width):
        places = [
            s
            for s in range(width)
            if (nodes or s) and needed[everyone, block_at(everyone, nodes, s, width, ranks)].any()
        ]
        if not places:
            continue
        if route.name == "relay":  # what is handed on passes everybody up to the last who needs it
            places = list(range(1 if nodes == 0 else 0, places[-1] + 1))
        hops = [1 + (met + n) // route.blocks_per_hop + shift for n in range(len(places))]
        met += len(places)
        if nodes:
            # Whole at the mate before it computes with it, and before it hands it on in its node.
            limits = [hop - 1 if s == 0 else hop - 1 - depth for s, hop in zip(places, hops, strict=True)]
            late = max(0, earliest - min(limits))
            hops, shift = [hop + late for hop in hops], shift + late
            keys_last = min(limits) + late
            drafts.append((nodes, min(keys_first, keys_last), keys_last, hops[0], hops[-1], places != [0]))
            keys_first, earliest = keys_last + 1, keys_last
        visits += [Visit(nodes, s, hop) for s, hop in zip(places, hops, strict=True)]
    crossings = []
    starts = [last + (2 * depth if fans_out else depth) for _, _, _, _, last, fans_out in drafts]
    for number, (nodes, first, last, first_hop, last_hop, _) in enumerate(drafts):
        # Spread like the keys, up to where those of the next node begin; the last ones are waited for, so at once.
        until = starts[number + 1] - 1 if number + 1 < len(drafts) else starts[number]
        crossings.append(Crossing(nodes, first, last, starts[number], max(starts[number], until), first_hop, last_hop))
    return visits, crossings


def _transfers(
    table: list[tuple], ranks: int, width: int, needed: np.ndarray, in_node: np.ndarray, block_rows: int
) -> Transfers:
    """The table's columns for all ranks, with the rows that each message carries; none that would be empty."""
    if not table:
        return Transfers(*(np.zeros(0, np.int64) for _ in range(9)))
    filled = np.empty((8, len(table), ranks), np.int64)
    for number, entry in enumerate(table):
        for column, value in enumerate(entry):
            filled[column, number] = value
    columns = filled.reshape(8, -1)
    _, _, _, block, visitor, scope, piece, pieces = columns
    total = np.select(
        [scope == NEEDED, scope == NODE], [needed[visitor, block], in_node[visitor // width, block]], block_rows
    )
    rows = total * (piece + 1) // pieces - total * piece // pieces
    return Transfers(*columns, rows).of(rows > 0)
