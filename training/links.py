"""What a collective of one axis takes: seconds, and bytes of a rank and of a network card. No torch here.

Ranks of a group lie `stride` ranks apart: tensor ranks are neighbours, then Ulysses ranks, then those over which states
are sharded, then replicas. All groups of an axis are at work at once and share the cards of their nodes.
"""

from dataclasses import dataclass
from typing import NamedTuple

from conf.schema import ClusterConfig, Degrees


class Cost(NamedTuple):
    """Of one collective, or of a sum of them; bytes in the busier direction."""

    seconds: float = 0.0
    rank_bytes: float = 0.0
    nic_bytes: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        return Cost(*(mine + its for mine, its in zip(self, other, strict=True)))

    def times(self, number: float) -> "Cost":
        return Cost(*(number * value for value in self))


@dataclass(frozen=True)
class Group:
    """`size` ranks, `stride` apart, on nodes of `node_ranks` ranks that share `cluster.node_nics` cards."""

    size: int
    stride: int
    node_ranks: int
    cluster: ClusterConfig

    @property
    def inside(self) -> int:
        """Ranks of the group on one node."""
        return max(1, min(self.size, self.node_ranks // self.stride))

    @property
    def crosses(self) -> bool:
        return self.size > self.inside

    def gather(self, whole_bytes: float) -> Cost:
        """An all-gather of `whole_bytes` in all, or a reduce-scatter: a ring through all ranks, as NCCL builds them.

        Into each rank comes what it does not have; over the cards of a node, once, what the node does not have.
        """
        if self.size == 1:
            return Cost()
        into_rank = whole_bytes * (self.size - 1) / self.size
        into_node = whole_bytes * (1 - self.inside / self.size) * self._groups
        return self._cost(into_rank, into_rank if self.inside > 1 else 0.0, into_node)

    def reduce(self, whole_bytes: float) -> Cost:
        """An all-reduce: a reduce-scatter, then an all-gather."""
        return self.gather(whole_bytes).times(2)

    def exchange(self, rank_bytes: float) -> Cost:
        """An all-to-all, in which each rank deals out `rank_bytes` evenly, its own part included."""
        if self.size == 1:
            return Cost()
        share = rank_bytes / self.size
        across = share * (self.size - self.inside)
        return self._cost(share * (self.size - 1), share * (self.inside - 1), across * self.inside * self._groups)

    @property
    def _groups(self) -> float:
        """Groups that share a node."""
        return self.node_ranks / self.inside

    def _cost(self, rank_bytes: float, link_bytes: float, node_bytes: float) -> Cost:
        cluster = self.cluster
        nic_bytes = node_bytes / cluster.node_nics
        nodes = -(-self.size // self.inside)
        seconds = max(link_bytes / cluster.link_bytes_per_second, nic_bytes / cluster.nic_bytes_per_second)
        return Cost(seconds + cluster.latency_seconds * nodes, rank_bytes, nic_bytes)


def groups(degrees: Degrees, cluster: ClusterConfig) -> dict[str, Group]:
    """The groups whose collectives a step waits for: tensor, ulysses, shard, replicate (see `parallel.mesh`)."""
    node_ranks = min(cluster.node_gpus, degrees.world)
    replicas = degrees.data * degrees.sequence // degrees.shard
    sizes = {"tensor": degrees.tensor, "ulysses": degrees.ulysses, "shard": degrees.shard, "replicate": replicas}
    inner = degrees.tensor
    strides = {"tensor": 1, "ulysses": inner, "shard": inner, "replicate": inner * degrees.shard}
    return {name: Group(size, strides[name], node_ranks, cluster) for name, size in sizes.items()}
