"""The exchanges of all ranks of a ring, played on a model of the network. No torch here.

Rules of the model. A ring has one communicator, so its exchanges queue: exchange e begins on a rank once the rank has
posted it (before hop e - depth + 1) and its exchange e - 1 has ended. A message passes once both ranks have begun the
exchange; it takes `latency_seconds` and then its bytes' time at the bandwidth that is left to it. All messages of one
exchange that use the same network card, or the same rank's NVLink, share it, each direction by itself; they pass
together. An exchange ends on a rank with the last of the rank's messages. Hop h begins once hop h - 1 is computed and
exchange h - 1, which is waited for then, has ended. Other traffic of the node (sharded parameters, tensor ranks) takes
an even share of every card all through the pass.

What the model leaves out: exchanges of different numbers that meet on one card pass as if each were alone (a card is
one rank's where a node has as many as ranks), so compare `makespan` with `nic_seconds`, which no order of messages
can beat.
"""

from dataclasses import dataclass

import numpy as np

from parallel.route import Tour

COMPUTE, EXCHANGE = range(2)  # kinds of rows that are drawn


@dataclass(frozen=True)
class Network:
    """A cluster, as the ranks of one ring see it: rank r is in place r % ranks_per_node of node r // ranks_per_node.

    Attributes:
        ranks_per_node: of this ring; with tensor or Ulysses ranks in between fewer than the node has GPUs.
        nics_per_node: network cards of a node, dealt evenly to its GPUs.
        nic_bytes_per_second: of one card, one direction.
        link_bytes_per_second: inside a node (NVLink), of one rank, one direction.
        latency_seconds: of one exchange.
        rings_per_node: rings that share the node and its cards, all as busy as this one.
    """

    ranks_per_node: int
    nics_per_node: int
    nic_bytes_per_second: float
    link_bytes_per_second: float
    latency_seconds: float = 0.0
    rings_per_node: int = 1

    @property
    def cards(self) -> int:
        """Cards of a node that this ring's ranks tell apart."""
        return min(self.ranks_per_node, self.nics_per_node)

    @property
    def card_bytes_per_second(self) -> float:
        """What one of them has for this ring: the cards that the node's GPUs reach, shared by all of its rings."""
        reached = min(self.nics_per_node, self.ranks_per_node * self.rings_per_node)
        return reached * self.nic_bytes_per_second / (self.rings_per_node * self.cards)

    def card_of(self, ranks: int) -> np.ndarray:
        """The card of each rank, int64[ranks], numbered through all nodes."""
        node, place = np.divmod(np.arange(ranks), self.ranks_per_node)
        return node * self.cards + place * self.cards // self.ranks_per_node


@dataclass(frozen=True)
class Played:
    """One pass of all ranks, in seconds from its beginning: hops float64[hops, R], exchanges float64[exchanges, R].

    Attributes:
        nic_seconds: for which the busiest card was busy, in its busier direction, other traffic included.
    """

    hop_begin: np.ndarray
    hop_end: np.ndarray
    exchange_begin: np.ndarray
    exchange_end: np.ndarray
    finish: np.ndarray
    nic_seconds: float

    @property
    def makespan(self) -> float:
        return float(self.finish.max())

    @property
    def exposed(self) -> np.ndarray:
        """Seconds that each rank waited for exchanges, float64[R]."""
        following = np.vstack([self.hop_begin[1:], self.finish])
        return (following - self.hop_end).sum(axis=0)

    def rows(self) -> list[tuple[int, int, int, float, float]]:
        """(rank, COMPUTE or EXCHANGE, number, begin, end) of all that takes time, to be drawn."""
        drawn = []
        for kind, begins, ends in (
            (COMPUTE, self.hop_begin, self.hop_end),
            (EXCHANGE, self.exchange_begin, self.exchange_end),
        ):
            number, rank = np.nonzero(ends > begins)
            columns = rank, np.full(len(rank), kind), number, begins[number, rank], ends[number, rank]
            drawn += zip(*(column.tolist() for column in columns), strict=True)
        return drawn


class _Collectives:
    """Exchanges that all ranks enter together, and how long each takes: float64[exchanges]."""

    def __init__(self, seconds: np.ndarray):
        self.seconds = seconds

    def end(self, number: int, begun: np.ndarray) -> np.ndarray:
        return np.full_like(begun, begun.max() + self.seconds[number])


class _Messages:
    """Exchanges of messages between pairs: both ends of each, sorted by exchange."""

    def __init__(
        self, exchange: np.ndarray, source: np.ndarray, destination: np.ndarray, seconds: np.ndarray, exchanges: int
    ):
        order = np.argsort(exchange, kind="stable")
        self.ends = np.stack([source, destination])[:, order]
        self.seconds = seconds[order]
        self.bounds = np.searchsorted(exchange[order], np.arange(exchanges + 1))

    def end(self, number: int, begun: np.ndarray) -> np.ndarray:
        part = slice(*self.bounds[number : number + 2])
        source, destination = self.ends[:, part]
        ended, passed = begun.copy(), np.maximum(begun[source], begun[destination]) + self.seconds[part]
        np.maximum.at(ended, source, passed)
        np.maximum.at(ended, destination, passed)
        return ended


def play(
    trip: Tour,
    depth: int,
    hop_seconds: np.ndarray,
    network: Network,
    key_bytes: float,
    gradient_bytes: float = 0.0,
    background_seconds: float = 0.0,
) -> Played:
    """A forward pass of all ranks, or with gradient_bytes > 0 a backward pass, along a relay or direct route.

    hop_seconds[r, h], float64[R, num_hops]: what rank r computes at hop h. key_bytes and gradient_bytes: those of one
    row on the wire, keys and values together. background_seconds: for which other traffic uses each card meanwhile.
    """
    exchanges = trip.num_batches if gradient_bytes else trip.num_hops - 1
    tables = [(trip.keys, key_bytes)] + [(trip.gradients, gradient_bytes)] * (gradient_bytes > 0)
    exchange, source, destination = (
        np.concatenate([table[column] for table, _ in tables])
        for column in range(3)  # the first ones of Transfers
    )
    size = np.concatenate([table.rows * row_bytes for table, row_bytes in tables])
    outside = source // network.ranks_per_node != destination // network.ranks_per_node
    card, across, inside = network.card_of(len(hop_seconds)), np.where(outside, size, 0), np.where(outside, 0, size)
    on_card = np.maximum(*(_together(exchange, card[end], across) for end in (source, destination)))
    on_link = np.maximum(*(_together(exchange, end, inside) for end in (source, destination)))
    busiest = max(np.bincount(card[end], across).max(initial=0) for end in (source, destination))
    busy = float(busiest) / network.card_bytes_per_second
    left = network.card_bytes_per_second * _share_left(hop_seconds, busy, background_seconds)
    seconds = network.latency_seconds + np.where(outside, on_card / left, on_link / network.link_bytes_per_second)
    parties = _Messages(exchange, source, destination, seconds, exchanges)
    return _play(hop_seconds, depth, exchanges, parties, busy + background_seconds)


def play_gather(
    groups: int,
    hop_seconds: np.ndarray,
    network: Network,
    block_key_bytes: float,
    block_gradient_bytes: float = 0.0,
    background_seconds: float = 0.0,
) -> Played:
    """`play` for the route gather: one all-gather for each group of heads, in backward a reduce-scatter two later.

    hop_seconds is float64[R, 1 + groups]; block_key_bytes and block_gradient_bytes are those of all rows of one rank.
    A collective is a ring through all ranks, as NCCL builds them: into each node comes what the node does not have,
    over all of its cards evenly, and into each rank over NVLink everything; once round costs a latency for each node.
    """
    backward = block_gradient_bytes > 0
    ranks, exchanges = len(hop_seconds), groups + 2 if backward else groups
    nodes = -(-ranks // network.ranks_per_node)
    inside = -(-ranks // nodes)
    share = np.zeros(exchanges)
    share[:groups] += block_key_bytes / groups
    if backward:
        share[2:] += block_gradient_bytes / groups
    card_seconds = (ranks - inside) / network.cards * share / network.card_bytes_per_second
    busy = float(np.cumsum(card_seconds)[-1])
    link_seconds = (ranks - 1) * share / network.link_bytes_per_second if inside > 1 else 0 * share
    card_seconds /= _share_left(hop_seconds, busy, background_seconds)
    seconds = network.latency_seconds * nodes + np.maximum(card_seconds, link_seconds)
    return _play(hop_seconds, 1, exchanges, _Collectives(seconds), busy + background_seconds)


def _play(
    hop_seconds: np.ndarray, depth: int, exchanges: int, parties: _Messages | _Collectives, nic_seconds: float
) -> Played:
    """The loop over hops that every rank runs, all ranks at once."""
    ranks, hops = hop_seconds.shape
    last = max(hops, exchanges)
    clock, queue = np.zeros(ranks), np.zeros(ranks)
    hop_begin, hop_end = np.zeros((2, last, ranks))
    exchange_begin, exchange_end = np.zeros((2, exchanges, ranks))
    posted = 0
    for hop in range(last):
        while posted < min(hop + depth, exchanges):
            exchange_begin[posted] = np.maximum(clock, queue)
            queue = exchange_end[posted] = parties.end(posted, exchange_begin[posted])
            posted += 1
        hop_begin[hop] = clock
        clock = hop_end[hop] = clock + hop_seconds[:, hop] if hop < hops else clock
        if hop < exchanges:
            clock = np.maximum(clock, exchange_end[hop])
    return Played(hop_begin, hop_end, exchange_begin, exchange_end, clock, nic_seconds)


def _together(exchange: np.ndarray, end: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Bytes of all messages of the same exchange at the same end, for each message."""
    number = exchange * (1 + end.max(initial=0)) + end
    return np.bincount(number, size)[number] if len(number) else size


def _share_left(hop_seconds: np.ndarray, busy: float, background_seconds: float) -> float:
    """The part of a card's bandwidth that other traffic leaves, if it is spread over a pass that nothing delays."""
    if not busy:
        return 1.0
    computing = float(np.cumsum(hop_seconds, axis=1)[:, -1].max())
    return 1.0 - background_seconds / max(computing, busy + background_seconds)
