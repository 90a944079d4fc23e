"""The parts of one step: what computes, what is exchanged, and what of that nothing hides. No torch here.

The ring is played on the model of the network that `parallel.choose` uses. Around it lie matrix products at
`cluster.linear_flops`, passes over memory at `cluster.memory_bytes_per_second`, and the collectives of the other axes:
those of tensor and Ulysses ranks are waited for; a layer's weights are brought while the layer before is computed.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from conf.schema import Degrees, Device, ModelConfig, Recompute, ReduceGradients, TrainConfig
from model.blocks import Blocks, blocks
from parallel.setting import Setting
from training.estimate import layer_matrices, matmul_parameters, num_parameters
from training.links import Cost, Group, groups
from training.ring_time import Attention

COMPUTE = {
    "attention_forward": "attention forward",
    "attention_backward": "attention backward",
    "attention_again": "attention recomputed",
    "merge": "merging blocks",
    "linear": "matrix products",
    "linear_again": "products recomputed",
    "head": "head and loss",
    "elementwise": "norms, rope, activations",
    "optimizer": "optimizer",
}
COMMUNICATION = {
    "ring": "ring",
    "ulysses": "ulysses exchanges",
    "tensor": "tensor exchanges",
    "shard": "weights and gradients",
    "offload": "offload",
}


class Cause(NamedTuple):
    """Seconds of a step that something takes, and those of them that nothing hides: these add up to the step."""

    seconds: float
    exposed_seconds: float


class Traffic(NamedTuple):
    """Bytes of one step on one axis, in the busier direction: those of the busiest rank, and of its network card."""

    rank_bytes: float
    nic_bytes: float


def recomputed_parameters(model: ModelConfig, policy: Recompute) -> int:
    """Parameters of one layer whose products with the tokens a backward pass computes once more.

    The feed-forward keeps its input only, whatever the policy, and computes gate and up again. A layer that is computed
    again runs all four projections, since what follows attention is needed too.
    """
    attention, ffn = layer_matrices(model)
    again = 2 * ffn // 3
    return again if policy is Recompute.none else again + attention


class Step:
    """Sums seconds and bytes over the layers and micro-batches of one step."""

    def __init__(
        self,
        config: TrainConfig,
        degrees: Degrees,
        setting: Setting,
        attention: Mapping[str, Attention],
        host_bytes: float,
    ):
        self.config, self.degrees, self.setting, self.attention = config, degrees, setting, attention
        self.model, self.cluster, self.policy = config.model, config.cluster, config.train.recompute
        self.groups: dict[str, Group] = groups(degrees, config.cluster)
        self.element, self.host_bytes = setting.shape.element_bytes, host_bytes
        self.wide = max(4, self.element)  # of master weights, gradients and accumulators
        self.rows = config.train.micro_batch_size * setting.local_length  # tokens of a rank, inside regions
        self.split = degrees.tensor if config.parallel.tensor_shards_activations else 1
        budget = int(config.cluster.block_bytes)
        self.blocks: Blocks = blocks(config.model, self.element, budget, degrees.tensor)
        self.seconds: dict[str, float] = dict.fromkeys([*COMPUTE, *COMMUNICATION], 0.0)
        self.exposed: dict[str, float] = dict.fromkeys(COMMUNICATION, 0.0)
        self.traffic: dict[str, Traffic] = {}

    def run(self) -> None:
        micro_batches = self.degrees.accumulation
        kinds = ["window" if kind.startswith("window") else "full" for kind in self.model.attention_kinds()]
        layers = {kind: self._layer(kind) for kind in dict.fromkeys(kinds)}  # windows of one layer: (forward, backward)
        for kind in kinds:
            self._attend(self.attention[kind], micro_batches)
        self._products(len(kinds) * micro_batches)
        self._memory(len(kinds) * micro_batches)
        self._tensor(len(kinds), micro_batches)
        self._ulysses(len(kinds) * micro_batches)
        self._head(micro_batches)
        self._shard([layers[kind] for kind in kinds])
        self._offload([layers[kind] for kind in kinds])
        self._optimizer()

    def causes(self) -> dict[str, Cause]:
        compute = {name: Cause(self.seconds[name], self.seconds[name]) for name in COMPUTE}
        return compute | {name: Cause(self.seconds[name], self.exposed[name]) for name in COMMUNICATION}

    def ceiling_seconds(self, tokens: int) -> float:
        """Kernels alone, balanced and without recompute. tokens: of one data rank's micro-batch."""
        kinds = ["window" if kind.startswith("window") else "full" for kind in self.model.attention_kinds()]
        attention = sum(self.attention[kind].ideal_seconds for kind in kinds)
        share = tokens / (self.degrees.sequence * self.degrees.tensor)
        return self.degrees.accumulation * (
            attention + 6 * matmul_parameters(self.model) * share / self.cluster.linear_flops
        )

    # --- what is computed --------------------------------------------------------------------------------------------

    def _layer(self, kind: str) -> tuple[float, float]:
        """Seconds for which one layer computes and waits in forward and in backward: under these weights can come.

        Where ring and weights share network cards, less those for which the ring uses them.
        """
        attention, again = self.attention[kind], self.policy is Recompute.full
        ring = [sum(part[n] for part in (attention.kernel, attention.merge, attention.exposed)) for n in (0, 1)]
        products, repeated = self._product_seconds()
        forward_memory, backward_memory = self._memory_seconds()
        tensor, exchanges = self._tensor_costs(), self._ulysses_cost().seconds
        repeat = 0 if self.policy is Recompute.none else forward_memory + tensor[2].seconds
        repeat += (ring[0] + exchanges) * again
        forward = ring[0] + products / 3 + forward_memory + tensor[0].seconds + exchanges
        backward = ring[1] + 2 * products / 3 + backward_memory + tensor[1].seconds + exchanges + repeat + repeated
        if self.groups["shard"].crosses:
            forward -= attention.nic_seconds[0]
            backward -= attention.nic_seconds[1] + attention.nic_seconds[0] * again
        return forward, backward

    def _attend(self, attention: Attention, times: int) -> None:
        again = self.policy is Recompute.full
        forward, backward = attention.kernel
        self.seconds["attention_forward"] += times * forward
        self.seconds["attention_backward"] += times * backward
        self.seconds["attention_again"] += times * again * forward
        per_pass = (times * (1 + again), times)
        for name, part in (("merge", attention.merge), ("ring", attention.sent)):
            self.seconds[name] += sum(number * value for number, value in zip(per_pass, part, strict=True))
        self.exposed["ring"] += sum(n * value for n, value in zip(per_pass, attention.exposed, strict=True))
        card = self.cluster.nic_bytes_per_second
        nic_bytes = sum(n * value * card for n, value in zip(per_pass, attention.nic_seconds, strict=True))
        rank_bytes = sum(n * value for n, value in zip(per_pass, attention.rank_bytes, strict=True))
        before = self.traffic.get("ring", Traffic(0.0, 0.0))
        self.traffic["ring"] = Traffic(before.rank_bytes + rank_bytes, before.nic_bytes + nic_bytes)

    def _product_seconds(self) -> tuple[float, float]:
        """Of one layer's products, forward and backward; of those that are repeated."""
        share = self.rows / self.degrees.tensor / self.cluster.linear_flops
        return 6 * sum(layer_matrices(self.model)) * share, 2 * recomputed_parameters(self.model, self.policy) * share

    def _products(self, times: int) -> None:
        once, again = self._product_seconds()
        self.seconds["linear"] += times * once
        self.seconds["linear_again"] += times * again

    def _memory_seconds(self) -> tuple[float, float]:
        """Of one layer's passes over memory between its products, forward and backward."""
        model, e, wide, tensor = self.model, self.element, self.wide, self.degrees.tensor
        width = model.model_dim * self.rows / self.split
        heads = (model.num_heads + model.num_kv_heads) * model.head_dim * self.rows / tensor
        hidden = model.ffn_dim * self.rows / tensor
        rope = (2 * e + 7 * wide) * heads  # to float32, two products, back
        forward = 10 * e * width + rope + 5 * e * hidden  # norms 2 × 2 and sums 2 × 3; silu 2 and product 3
        backward = 12 * e * width + rope + 16 * e * hidden  # norms and sums 4 × 3; `model.ffn` in place
        sums = layer_matrices(model)[1] / tensor * (2 * e * (e < wide) + 2 * wide)  # of weight gradients, over blocks
        backward += sums * -(-self.rows // self.blocks.ffn)
        rate = self.cluster.memory_bytes_per_second
        return forward / rate, backward / rate

    def _memory(self, times: int) -> None:
        forward, backward = self._memory_seconds()
        again = 0.0 if self.policy is Recompute.none else forward
        self.seconds["elementwise"] += times * (forward + backward + again)

    def _head(self, times: int) -> None:
        """Products at their rate; logits pass through memory eight times, in 16-bit compute four times more."""
        parameters = self.model.padded_vocab_size * self.model.model_dim / self.degrees.tensor
        e, wide = self.element, self.wide
        narrow = 2 * (e + wide) * (e < wide)
        logits = self.rows * self.model.padded_vocab_size / self.degrees.tensor * (8 * wide + narrow)
        sums = parameters * (2 * wide + 2 * e * (e < wide)) * -(-self.rows // self.blocks.loss)
        seconds = 6 * parameters * self.rows / self.cluster.linear_flops
        self.seconds["head"] += times * (seconds + (logits + sums) / self.cluster.memory_bytes_per_second)

    def _optimizer(self) -> None:
        """AdamW reads four numbers a parameter and writes three; clipping reads one, then reads and writes it."""
        shard = num_parameters(self.model) / (self.degrees.tensor * self.degrees.shard)
        self.seconds["optimizer"] += 10 * self.wide * shard / self.cluster.memory_bytes_per_second

    # --- what is exchanged -------------------------------------------------------------------------------------------

    def _tensor_costs(self) -> tuple[Cost, Cost, Cost]:
        """Of one layer: forward, backward, and what recomputing sends again.

        With split activations each region gathers its tokens and scatters its sums; else it reduces its sums on the way
        out, and their gradients on the way in. The last region's sums are not needed again.
        """
        group, whole = self.groups["tensor"], self.rows * self.model.model_dim * self.element
        if self.config.parallel.tensor_shards_activations:
            one, repeated = group.gather(whole), 3
            forward = one.times(4)
        else:
            one, repeated = group.reduce(whole), 1
            forward = one.times(2)
        return forward, forward, one.times(0 if self.policy is Recompute.none else repeated)

    def _tensor(self, layers: int, micro_batches: int) -> None:
        group, whole = self.groups["tensor"], self.rows * self.model.model_dim * self.element
        cost = sum(self._tensor_costs(), Cost()).times(layers)
        # Embedding and head: tokens scattered and gathered, forward and backward; three float32 a token of the loss.
        cost += group.gather(whole).times(4) if self.split > 1 else group.reduce(whole).times(2)
        scalars = group.reduce(self.wide * min(self.rows, self.blocks.loss)) + group.reduce(
            2 * self.wide * min(self.rows, self.blocks.loss)
        )
        cost += scalars.times(-(-self.rows // self.blocks.loss))
        self._add("tensor", cost.times(micro_batches), 1.0)

    def _ulysses_cost(self) -> Cost:
        """Of one layer, forward: queries, keys and values to heads, results to tokens. Backward is the same."""
        model, degrees = self.model, self.degrees
        kv_heads = max(model.num_kv_heads // degrees.tensor, degrees.ulysses)
        token = model.head_dim * self.element
        group = self.groups["ulysses"]
        queries = model.num_heads // degrees.tensor * self.rows * token
        return group.exchange(queries + 2 * kv_heads * self.rows * token) + group.exchange(queries)

    def _ulysses(self, times: int) -> None:
        passes = 3 if self.policy is Recompute.full else 2
        self._add("ulysses", self._ulysses_cost().times(passes * times), 1.0)

    def _add(self, name: str, cost: Cost, exposed_share: float) -> None:
        self.seconds[name] += cost.seconds
        if name in self.exposed:
            self.exposed[name] += cost.seconds * exposed_share
        before = self.traffic.get(name, Traffic(0.0, 0.0))
        self.traffic[name] = Traffic(before.rank_bytes + cost.rank_bytes, before.nic_bytes + cost.nic_bytes)

    def _shard(self, layers: Sequence[tuple[float, float]]) -> None:
        """Weights gathered for each pass of each unit; gradients reduced in each micro-batch's backward, or the last's.

        Those of a layer while another is computed; of a pass's first unit, and the gradients of its last, openly. On
        CPUs all of it openly.
        """
        config, e, wide = self.config, self.element, self.wide
        model, tensor = self.model, self.degrees.tensor
        table = model.padded_vocab_size * model.model_dim / tensor
        per_layer = (num_parameters(model) - (1 if model.tie_embeddings else 2) * table * tensor) / model.num_layers
        hides = self.cluster.device is Device.cuda
        reduces = self.degrees.accumulation if config.parallel.reduce_gradients is ReduceGradients.each else 1

        def gather(parameters: float) -> Cost:
            cost = self.groups["shard"].gather(parameters * e)
            moved = parameters * ((wide + e) / self.degrees.shard + 2 * e)  # cast, and copied out
            return cost._replace(seconds=cost.seconds + moved / self.cluster.memory_bytes_per_second)

        def reduce(parameters: float) -> Cost:
            cost = self.groups["shard"].gather(parameters * wide)
            moved = parameters * (e + wide + 2 * wide / self.degrees.shard)
            return cost._replace(seconds=cost.seconds + moved / self.cluster.memory_bytes_per_second)

        def replicate(parameters: float) -> Cost:
            return self.groups["replicate"].reduce(parameters / self.degrees.shard * wide)

        layer = per_layer / tensor
        brought, table_brought = gather(layer), gather(table)
        copies, table_copies = replicate(layer), replicate(table)
        summed, table_summed = reduce(layer) + copies, reduce(table) + table_copies
        # One micro-batch without gradients, and what reducing them adds.
        units = len(layers)
        whole = (brought.times(2 * units) + table_brought.times(2 if model.tie_embeddings else 4)).times(
            self.degrees.accumulation
        )
        tables = 1 if model.tie_embeddings else 2
        whole += (summed.times(units) + table_summed.times(tables)).times(reduces)
        replicas = (copies.times(units) + table_copies.times(tables)).times(reduces)
        if hides:
            wait = lambda cost, window: max(0.0, cost.seconds - max(0.0, window))  # noqa: E731
            forward, backward = zip(*layers, strict=True)
            opening = 2 * brought.seconds + 2 * table_brought.seconds
            each = opening + sum(wait(brought, window) for window in forward[:-1])
            each += wait(table_brought, forward[-1]) * (not model.tie_embeddings)
            # Backward runs from the last layer to the first.
            without = each + sum(wait(brought, window) for window in backward[1:])
            with_sums = each + sum(wait(brought + summed, window) for window in backward[1:])
            with_sums += wait(summed + table_brought, backward[0]) + table_summed.seconds
            exposed = (self.degrees.accumulation - reduces) * without + reduces * with_sums
        else:
            exposed = whole.seconds
        self.seconds["shard"] += whole.seconds
        self.exposed["shard"] += exposed
        rank_bytes, nic_bytes = whole.rank_bytes - replicas.rank_bytes, whole.nic_bytes - replicas.nic_bytes
        self.traffic["shard"] = Traffic(rank_bytes, nic_bytes)
        self.traffic["replicate"] = Traffic(replicas.rank_bytes, replicas.nic_bytes)

    def _offload(self, layers: Sequence[tuple[float, float]]) -> None:
        """What one layer keeps goes to the host while the next is computed, and comes back while that runs backward.

        What the last layer keeps never leaves the device.
        """
        moved = len(layers) - 1
        seconds = self.host_bytes / max(1, moved) / self.cluster.host_bytes_per_second
        waits = sum(max(0.0, seconds - window) for layer in layers[1:] for window in layer)
        self.seconds["offload"] += self.degrees.accumulation * 2 * moved * seconds
        self.exposed["offload"] += self.degrees.accumulation * waits
