"""What a config makes of a micro-batch's documents: how tokens are dealt, how blocks travel, the plans. No torch here.

The ranks of a run and a planner on a login node ask the same `Setting`, so they cannot disagree.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from conf.schema import Degrees, GradientWire, TrainConfig
from conf.schema import Layout as LayoutName
from conf.schema import Route as RouteName
from model.kernels.capability import INDEXED
from model.mask import Mask
from parallel import layout, schedule
from parallel.choose import Choice, Rates, Shape, choose
from parallel.layout import Chunk, Layout
from parallel.route import Route
from parallel.wire import Network

Documents = tuple[tuple[int, ...], ...]  # of each sequence, the lengths of its documents


class Setting:
    """Attention of one config on so many ranks; the same on all of them.

    Args:
        node_size: ranks on each node; 0 where they differ, then the cluster's GPUs are reckoned with.
        say: is told what `auto` picked and why, when it is picked first.

    Attributes:
        length, padded: tokens of a sequence, and what the ranks hold of it in all, padding included.
        local_length: of these, what one rank of the sequence axis holds; a ring rank attends for `ulysses` times that.
        masks: of each kind of attention that some layer has.

    Raises ValueError where parallel.buffer_blocks, or what kernels can index, is too little for one document of the
    full length.
    """

    def __init__(
        self, config: TrainConfig, degrees: Degrees, node_size: int = 0, say: Callable[[str], None] = print
    ) -> None:
        self.config, self.degrees, self.say = config, degrees, say
        self.ring_size = degrees.sequence // degrees.ulysses
        self.length = int(config.data.sequence_length)
        multiple = degrees.ulysses * degrees.tensor
        self.padded = layout.padded_length(config.parallel.layout, self.length, self.ring_size, multiple)
        self.local_length = self.padded // degrees.sequence
        self.masks, self.shape = masks(config), shape(config)
        cluster = config.cluster
        rates = cluster.attention_forward_flops, cluster.attention_backward_flops, cluster.memory_bytes_per_second
        self.rates = Rates(*rates)
        self.network = network(config, node_size, self.ring_size)
        self.background_seconds = background_seconds(config, degrees.data * degrees.sequence, self.network)
        self._said: set[tuple[str, Route]] = set()
        self._exceeded: set[Mask] = set()
        self._pick_first = lru_cache(maxsize=16)(self._pick)
        for mask in self.masks.values():  # where nobody can be spared anything, before the first step
            try:
                self._pick_first(whole(config), mask, str(config.parallel.layout), self._most_blocks())
            except ValueError as error:
                raise ValueError(self._too_little(error)) from None

    @property
    def usual_route(self) -> Route:
        """One whose peers are worth connecting at start: those of a relay, unless another route is sure."""
        width, sure = self.network.ranks_per_node, self.config.parallel.route is RouteName.direct
        via = 1 < width < self.ring_size and not self.ring_size % width
        return Route("direct" if sure else "relay", node_ranks=width if via else 0)

    def choose(self, documents: Sequence[Sequence[int]]) -> dict[str, Choice]:
        """The layout and route for each kind of attention. Tokens are dealt once: all have the same layout."""
        documents = tuple(map(tuple, documents))
        (first, mask), *others = self.masks.items()
        choice = self._choose(documents, mask, str(self.config.parallel.layout))
        choices = {first: choice}
        for kind, other in others:  # how blocks travel is a question of its own for each kind
            choices[kind] = self._choose(documents, other, choice.layout_name, choice.layout)
        self._tell(choice)
        return choices

    def chunks(self, choices: dict[str, Choice], ring_rank: int, ulysses_rank: int) -> list[tuple[Chunk, ...]]:
        """Of each sequence the indices that a rank of the sequence axis holds: its part of what its ring rank has."""
        mine = ulysses_rank * self.local_length, (ulysses_rank + 1) * self.local_length
        held_in_common = next(iter(choices.values())).layout.chunks(ring_rank)
        return [layout.split(held, *mine) for held in held_in_common]

    def plans(
        self, documents: Sequence[Sequence[int]], ring_rank: int, choices: dict[str, Choice] | None = None
    ) -> dict[str, np.ndarray]:
        """The plan of one rank of the ring for each kind of attention; `choices` where they are made already."""
        choices = choices or self.choose(documents)
        sizes = self.length, self.padded, self.ring_size, ring_rank
        return {
            kind: schedule.plan(choice.layout, self.masks[kind], documents, *sizes, choice.route)
            for kind, choice in choices.items()
        }

    def _choose(self, documents: Documents, mask: Mask, name: str, dealt: Layout | None = None) -> Choice:
        """The choice within the budget; where these documents need more after all, the one that needs least."""
        pick = self._pick_first if dealt is None else self._pick
        given = (documents, mask, name, self._most_blocks()) + (() if dealt is None else (dealt,))
        try:
            return pick(*given)
        except ValueError as error:
            if mask not in self._exceeded:  # once: documents of a corpus are alike
                self._exceeded.add(mask)
                self.say(f"ring     {error}: parallel.buffer_blocks={self.config.parallel.buffer_blocks} is exceeded")
            return self._pick(documents, mask, name, 4 * self.ring_size, dealt)  # more than all there is

    def _most_blocks(self) -> float:
        """The budget, and what a kernel that counts elements in 32 bits can index besides the rank's own rows."""
        return min(self.config.parallel.buffer_blocks, max(1, self._indexed_blocks - 1))

    @property
    def _rows(self) -> int:
        """Of a ring rank."""
        return self.config.train.micro_batch_size * self.padded // self.ring_size

    @property
    def _indexed_blocks(self) -> int:
        return INDEXED // (self.shape.key_elements * self._rows)

    def _too_little(self, error: ValueError) -> str:
        """Whichever limit binds, by its key."""
        parallel = self.config.parallel
        if self._indexed_blocks - 1 >= parallel.buffer_blocks:
            return f"parallel.buffer_blocks={parallel.buffer_blocks}: {error}"
        return (
            f"parallel.sequence={parallel.sequence} leaves {self._rows} tokens to a ring rank, of whose keys and "
            f"values a kernel that counts elements in 32 bits indexes {self._indexed_blocks} blocks, too few for any "
            "layout and route that is left: use more ranks (parallel.sequence) or a smaller train.micro_batch_size"
        )

    def _pick(self, documents: Documents, mask: Mask, name: str, blocks: float, dealt: Layout | None = None) -> Choice:
        parallel = self.config.parallel
        return choose(
            documents,
            self.length,
            self.padded,
            self.ring_size,
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
        if self.ring_size > 1 and automatic and pick not in self._said:
            self._said.add(pick)
            self.say(f"ring     {choice.why}")


def whole(config: TrainConfig) -> Documents:
    """The documents of a micro-batch where each sequence is one document: of all corpora the most work."""
    return ((int(config.data.sequence_length),),) * config.train.micro_batch_size


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
