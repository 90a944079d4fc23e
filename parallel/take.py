"""From the documents of a micro-batch to the tokens that this rank holds of it, and its plans.

Every rank of the sequence axis makes its own, from the same documents, and all come to the same choice.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import torch

from conf.schema import GradientWire, TrainConfig
from conf.schema import Layout as LayoutName
from conf.schema import Route as RouteName
from model.mask import Mask
from parallel import layout, schedule
from parallel.choose import Choice, Rates, Shape, choose
from parallel.layout import Chunk, Layout
from parallel.mesh import Mesh
from parallel.route import Route
from parallel.wire import Network

Documents = tuple[tuple[int, ...], ...]  # of each sequence, the lengths of its documents


class Take:
    """`take(documents)`: the chunks of each sequence that this rank holds, and a plan for each kind of attention.

    Args:
        node_size: ranks on each node; 0 where they differ, then the cluster's GPUs are reckoned with.
        say: is told what `auto` picked and why, when it is picked first.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, node_size: int = 0, say: Callable[[str], None] = print):
        self.config, self.ring, self.ulysses, self.say = config, mesh.ring, mesh.ulysses, say
        self.length = int(config.data.sequence_length)
        multiple = self.ulysses.size * mesh.tensor.size
        self.padded = layout.padded_length(config.parallel.layout, self.length, self.ring.size, multiple)
        self.masks, self.shape = masks(config), shape(config)
        cluster = config.cluster
        rates = cluster.attention_forward_flops, cluster.attention_backward_flops, cluster.memory_bytes_per_second
        self.rates = Rates(*rates)
        self.network = network(config, node_size, self.ring.size)
        self.background_seconds = background_seconds(config, mesh.gradient.size, self.network)
        self.said: set[tuple[str, Route]] = set()
        self._make = lru_cache(maxsize=16)(self._of)  # sequences inside one long document all have the same plan
        for mask in self.masks.values():  # where nobody can be spared anything, before the first step
            longest = ((self.length,),) * config.train.micro_batch_size
            try:
                self._pick(longest, mask, str(config.parallel.layout), None, self._most_blocks())
            except ValueError as error:
                raise ValueError(f"parallel.buffer_blocks={config.parallel.buffer_blocks}: {error}") from None

    def __call__(
        self, documents: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[Chunk, ...]], Mapping[str, torch.Tensor]]:
        return self._make(tuple(map(tuple, documents)))

    @property
    def usual_route(self) -> Route:
        """One whose peers are worth connecting at start: those of a relay, unless another route is sure."""
        width, sure = self.network.ranks_per_node, self.config.parallel.route is RouteName.direct
        via = 1 < width < self.ring.size and not self.ring.size % width
        return Route("direct" if sure else "relay", node_ranks=width if via else 0)

    def _of(self, documents: Documents) -> tuple[list[tuple[Chunk, ...]], Mapping[str, torch.Tensor]]:
        (first, mask), *others = self.masks.items()
        choice = self._choose(documents, mask, str(self.config.parallel.layout))
        routes = {first: choice.route}
        for kind, other in others:  # tokens are dealt once; how blocks travel is a question of its own for each kind
            routes[kind] = self._choose(documents, other, choice.layout_name, choice.layout).route
        sizes = self.length, self.padded, self.ring.size, self.ring.rank
        plans = {
            kind: torch.from_numpy(schedule.plan(choice.layout, self.masks[kind], documents, *sizes, route))
            for kind, route in routes.items()
        }
        share = self.padded // (self.ring.size * self.ulysses.size)
        mine = self.ulysses.rank * share, (self.ulysses.rank + 1) * share
        chunks = [layout.split(held, *mine) for held in choice.layout.chunks(self.ring.rank)]
        self._tell(choice)
        # Not a dict: FSDP moves tensors in a dict to the GPU, and a plan is read on the host.
        return chunks, MappingProxyType(plans)

    def _choose(self, documents: Documents, mask: Mask, name: str, dealt: Layout | None = None) -> Choice:
        """The choice within the budget; where these documents need more after all, the one that needs least."""
        try:
            return self._pick(documents, mask, name, dealt, self._most_blocks())
        except ValueError as error:
            self.say(f"ring     {error}: parallel.buffer_blocks={self.config.parallel.buffer_blocks} is exceeded")
            return self._pick(documents, mask, name, dealt, 4 * self.ring.size)  # more than all there is

    def _most_blocks(self) -> float:
        """The budget, and what a kernel that counts elements in 32 bits can index besides the rank's own rows."""
        rows = self.config.train.micro_batch_size * self.padded // self.ring.size
        indexed = ((1 << 31) - 1) // (self.shape.key_elements * rows)
        return min(self.config.parallel.buffer_blocks, max(1, indexed - 1))

    def _pick(self, documents: Documents, mask: Mask, name: str, dealt: Layout | None, blocks: float) -> Choice:
        parallel = self.config.parallel
        return choose(
            documents,
            self.length,
            self.padded,
            self.ring.size,
            mask,
            self.shape,
            self.rates,
            self.network,
            blocks,
            layout=name,
            route=str(parallel.route),
            depth=parallel.prefetch,
            narrow=parallel.gradient_wire is GradientWire.bfloat16,
            background_seconds=self.background_seconds,
            dealt=dealt,
        )

    def _tell(self, choice: Choice) -> None:
        parallel = self.config.parallel
        automatic = LayoutName.auto is parallel.layout or RouteName.auto is parallel.route
        pick = choice.layout_name, choice.route
        if self.ring.size > 1 and automatic and pick not in self.said:
            self.said.add(pick)
            self.say(f"ring     {choice.why}")


def masks(config: TrainConfig) -> dict[str, Mask]:
    """The mask of each kind of attention that some layer has, the one that sees most first."""
    kinds = [kind.startswith("window") for kind in config.model.attention_kinds()]
    full = {"full": Mask()} if not all(kinds) else {}
    return full | ({"window": Mask(config.model.attention_window)} if any(kinds) else {})


def shape(config: TrainConfig) -> Shape:
    """Attention of one rank, behind tensor and Ulysses ranks."""
    model, inner = config.model, config.parallel.tensor * config.parallel.ulysses
    size = {"float64": 8, "float32": 4, "bfloat16": 2}[config.train.dtype]
    return Shape(model.num_heads // inner, max(1, model.num_kv_heads // inner), model.head_dim, size)


def background_seconds(config: TrainConfig, gradient_size: int, network: Network) -> float:
    """For which each network card brings the weights of one layer into its node; no more than once into each."""
    model = config.model
    if gradient_size * config.parallel.tensor <= network.ranks_per_node * network.rings_per_node:
        return 0.0
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    weights = model.model_dim * (attention + 3 * model.ffn_dim) * shape(config).element_bytes
    return weights / (network.nics_per_node * network.nic_bytes_per_second)


def network(config: TrainConfig, node_size: int, ring_size: int) -> Network:
    """The cluster as a ring sees it: tensor and Ulysses ranks, which are neighbours, lie between its ranks."""
    cluster, inner = config.cluster, config.parallel.tensor * config.parallel.ulysses
    gpus = node_size or cluster.node_gpus
    on_node = min(ring_size, max(1, gpus // inner))
    return Network(
        ranks_per_node=on_node,
        nics_per_node=cluster.node_nics,
        nic_bytes_per_second=cluster.nic_bytes_per_second,
        link_bytes_per_second=cluster.link_bytes_per_second,
        latency_seconds=cluster.latency_seconds,
        rings_per_node=max(1, gpus // on_node),
    )
