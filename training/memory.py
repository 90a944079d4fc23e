"""Bytes that one rank holds, by cause, at the moment of a step when they are most. No torch here.

A step is followed part by part as the code does it: what a layer keeps for its backward, what its parts hold while they
compute (`model.blocks`, `model.kernels.scratch`), the ring's pool (`parallel.pool`), and what sharding (FSDP2) gathers
and reduces on the way. A rehearsal (`training.rehearse`) counts the same on tensors; tests hold one against the other.
What an allocator cannot reuse is not in it: on GPUs leave a tenth of the memory free.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from conf.schema import Degrees, Device, Kernel, ModelConfig, Recompute, ReduceGradients, TrainConfig
from model.blocks import Blocks, blocks, ffn_bytes, loss_bytes
from model.kernels.scratch import of_tiles
from parallel.pool import pool_bytes
from parallel.schedule import HEAD_GROUPS, LOCAL_LENGTH, NUM_SEQUENCES, tile_rows
from parallel.setting import Setting, shape, whole

Causes = dict[str, float]


@dataclass(frozen=True)
class Memory:
    """What a rank holds when it holds most.

    Attributes:
        causes: bytes by cause; their sum is the peak.
        moment: what is computed then.
        moments: the sum at each moment of the step.
        host_bytes: of activations that are kept in the host's memory.
        copy_bytes: of the host's memory, for the copy that a checkpoint is written from in the background; on CPUs that
            is one of the causes.
        kernel_bytes: what attention's kernel takes while it runs, forward and backward.
    """

    causes: Causes
    moment: str
    moments: dict[str, float]
    host_bytes: float
    copy_bytes: float
    kernel_bytes: tuple[int, int]

    @property
    def peak_bytes(self) -> float:
        return sum(self.causes.values())


def memory(config: TrainConfig, degrees: Degrees, plans: Mapping[str, np.ndarray]) -> Memory:
    """Of the rank that `plans` (from `parallel.setting.Setting`) are for, in a step like the second.

    Counts what tensors take; cluster.runtime_bytes come on top.
    """
    step = _Step(config, degrees, plans)
    moments = dict(step.moments())
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    return Memory(
        {cause: size for cause, size in moments[moment].items() if size},
        moment,
        {name: sum(causes.values()) for name, causes in moments.items()},
        step.host_bytes,
        0 if step.on_cpu else step.copy,
        step.scratch,
    )


def planned(config: TrainConfig, degrees: Degrees, setting: Setting, ring_rank: int) -> Memory:
    """Of that rank of the ring, each sequence one document."""
    return memory(config, degrees, setting.plans(whole(config), ring_rank))


def layer_parameters(model: ModelConfig, tensor: int = 1) -> list[tuple[int, ...]]:
    """Shapes of one layer's parameters, as a rank of the tensor axis holds them."""
    queries, keys = model.num_heads * model.head_dim // tensor, model.num_kv_heads * model.head_dim // tensor
    width, ffn = model.model_dim, model.ffn_dim // tensor
    shapes: list[tuple[int, ...]] = [(queries, width), (keys, width), (keys, width), (width, queries)]
    shapes += [(ffn, width), (ffn, width), (width, ffn), (width,), (width,)]
    shapes += [(queries,), (keys,), (keys,)] if model.qkv_bias else []
    return shapes + ([(model.head_dim,), (model.head_dim,)] if model.qk_norm else [])


def numel(shapes: list[tuple[int, ...]], shard: int = 1) -> int:
    """Elements of parameters, or of one rank's shards: FSDP cuts the first dim into equal parts and pads the last."""
    return sum(-(-shape[0] // shard) * int(np.prod(shape[1:], dtype=np.int64)) for shape in shapes)


class _Step:
    """The sizes of one rank, and the moments of its step."""

    def __init__(self, config: TrainConfig, degrees: Degrees, plans: Mapping[str, np.ndarray]):
        model, self.config, self.model, self.degrees = config.model, config, config.model, degrees
        ring = shape(config)
        self.element = ring.element_bytes
        self.wide = max(4, self.element)  # of sums, and of the weights that the optimizer changes
        self.blocks: Blocks = blocks(model, self.element, int(config.cluster.block_bytes), degrees.tensor)
        plan = next(iter(plans.values()))
        sequences, of_ring = int(plan[0, NUM_SEQUENCES]), int(plan[0, LOCAL_LENGTH])
        self.tokens = sequences * of_ring // degrees.ulysses
        self.split = degrees.tensor > 1 and config.parallel.tensor_shards_activations
        self.outer = self.tokens // degrees.tensor if self.split else self.tokens  # between the tensor axis's regions
        heads, kv_heads = model.num_heads // degrees.tensor, model.num_kv_heads // degrees.tensor
        self.q = self.tokens * heads * model.head_dim * self.element
        self.k = self.tokens * kv_heads * model.head_dim * self.element
        self.k_ring = self.k * max(1, degrees.ulysses // kv_heads)  # heads of others' tokens, copies included
        self.lse = self.tokens * heads * self.wide
        self.hidden, self.inner = (n * model.model_dim * self.element for n in (self.outer, self.tokens))
        self.scale = self.outer * self.wide  # of a norm
        self.gathered = self.inner if self.split else 0  # the same of all tokens, on the way into a region
        self.pool = pool_bytes(plans.values(), ring.num_heads, ring.num_kv_heads, ring.head_dim, ring.element_bytes)
        self.scratch = self._scratch(plans, ring.num_heads, ring.num_kv_heads)
        self.layer = layer_parameters(model, degrees.tensor)
        self.table = [(model.padded_vocab_size // degrees.tensor, model.model_dim)]
        ffn_dim = model.ffn_dim // degrees.tensor
        self.ffn = ffn_bytes(self.tokens, self.blocks.ffn, ffn_dim, model.model_dim, self.element)
        self.kept = self._kept(config.train.recompute)
        self.everything = self._kept(Recompute.none)
        tables = self.table if model.tie_embeddings else 2 * self.table
        rest = numel([*tables, (model.model_dim,)], degrees.shard)
        self.sharded = model.num_layers * numel(self.layer, degrees.shard) + rest
        self.on_cpu = config.cluster.device is Device.cpu
        self.copy = self._copy() if config.checkpoint.background else 0

    def _copy(self) -> float:
        """Of this rank's part of a checkpoint, which replicas share. PyTorch takes a power of two of pinned memory."""
        size = 3 * self.sharded * self.wide * self.degrees.shard / (self.degrees.data * self.degrees.sequence)
        return size if self.on_cpu else 1 << (math.ceil(size) - 1).bit_length()

    def _scratch(self, plans: Mapping[str, np.ndarray], num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        """What attention takes inside of its one operation, forward and backward: the kernel, and an lse by rows."""
        kernel = "reference" if self.config.parallel.kernel is Kernel.reference else "sdpa"  # flash is like sdpa's
        found = []
        for plan in plans.values():
            groups = int(plan[1, HEAD_GROUPS]) or 1  # of heads, which a gather brings one after the other
            heads = num_heads // groups, num_kv_heads // groups, self.model.head_dim, self.element
            found.append(of_tiles(kernel, self.config.cluster.device, tile_rows(plan), *heads))
        forward, backward = (max(column) for column in zip(*found, strict=True))
        return forward + self.lse, backward

    # What a layer keeps from its forward until its backward.

    def _kept(self, policy: Recompute) -> Causes:
        """Bytes by tensor."""
        ulysses = self.degrees.ulysses > 1
        kept: Causes = {"input": self.hidden}
        if policy is not Recompute.full:
            kept |= {"out": self.q, "lse": self.lse}
        if ulysses and policy is not Recompute.full:
            kept |= {"q": self.q, "k, v": 2 * self.k_ring, "out of all heads": self.q}
        if policy is Recompute.none:
            kept |= {"normalised": self.inner, "scales": 2 * self.scale, "middle": self.hidden}
            kept |= {"normalised again": self.inner, "q": self.q, "k, v": 2 * (self.k_ring if ulysses else self.k)}
            if self.model.qk_norm:
                kept["before q and k norms"] = self.q + self.k
                kept["scales of q and k"] = (self.q + self.k) // self.model.head_dim // self.element * self.wide
        return kept

    @property
    def host_bytes(self) -> float:
        """The last layer's stay. PyTorch keeps pinned memory in pieces of a power of two bytes."""
        if not self.config.train.offload:
            return 0
        pieces = [1 << (math.ceil(size) - 1).bit_length() for size in self.kept.values()]
        return (self.model.num_layers - 1) * sum(pieces)

    def _kept_bytes(self, layers: int) -> float:
        """On the device, of so many layers: with offload those of the one in use come to `everything`, and the next."""
        return sum(self.kept.values()) * (min(layers, 1) if self.config.train.offload else layers)

    # What is there all along, and what sharding holds.

    def _always(self) -> Causes:
        batches = min(2, self.degrees.accumulation) * 3 * 8 * self.tokens
        angles = self.tokens * self.model.head_dim * self.wide
        return {
            "weights": self.sharded * self.wide,
            "optimizer": 2 * self.sharded * self.wide,
            "copy for checkpoints": self.copy if self.on_cpu else 0,
            "ring buffers": sum(self.pool.values()),
            "batch": batches + angles,
        }

    def _gathered(self, unit: list[tuple[int, ...]], following: list[tuple[int, ...]] | None = None) -> float:
        """Weights of the unit that computes; in forward with the message that brought them, in backward with the one
        that brings the `following` ones."""
        if self.degrees.shard == 1:
            return self.element * numel(unit)
        message = unit if following is None else following
        return self.element * (numel(unit) + self.degrees.shard * numel(message, self.degrees.shard))

    def _reduced(self, unit: list[tuple[int, ...]]) -> float:
        """The message in which a unit's gradients are summed; it stays until the next one's."""
        return self.wide * self.degrees.shard * numel(unit, self.degrees.shard)

    def _gradients(self, first_layer: int, head: bool = True, embedding: bool = False) -> Causes:
        """Of what backward has come by: layers from first_layer on; in shards, while earlier micro-batches' wait whole
        where they are summed at the last only."""
        model, shard = self.model, self.degrees.shard
        own = [*self.table] * (int(head and not model.tie_embeddings) + embedding)
        layers = model.num_layers - first_layer
        sharded = layers * numel(self.layer, shard) + numel(own, shard) + numel([(model.model_dim,)], shard)
        tables = 1 if model.tie_embeddings or head else 2
        whole = first_layer * numel(self.layer) + tables * numel(self.table) * (not embedding)
        waits = self.degrees.accumulation > 1 and self.config.parallel.reduce_gradients is ReduceGradients.last
        if self.degrees.accumulation > 1 and not waits:
            sharded = self.sharded
        tied = self.element * numel(self.table) if model.tie_embeddings and head and not embedding else 0
        return {
            "gradients": sharded * self.wide + tied,
            "gradients of earlier micro-batches": waits * whole * self.wide,
        }

    def _before_backward(self) -> Causes:
        """What earlier micro-batches have left: of their last message, too, where they sum up gradients."""
        each = self.degrees.accumulation > 1 and self.config.parallel.reduce_gradients is ReduceGradients.each
        message = {"gradients reduced": self._reduced(self.table)} if each else {}
        return self._gradients(self.model.num_layers, False) | message

    # The step.

    def moments(self) -> Iterator[tuple[str, Causes]]:
        """(what is computed, bytes by cause) of all moments when much is held."""
        last = self.model.num_layers - 1
        always = self._always()
        if self.model.tie_embeddings:
            always["embedding and head"] = self.element * numel(self.table)
        for number in sorted({0, last}):  # what lies between lies between
            for name, causes in self._forward(number):
                yield f"forward of layer {number}, {name}", always | causes
        for name, causes in self._head():
            yield name, always | causes
        # The last has no layer's gradients before it, the first no other layer's tensors on their way to it.
        for number in sorted({0, min(1, last), max(0, last - 1), last}, reverse=True):
            for name, causes in self._backward(number):
                yield f"backward of layer {number}, {name}", always | causes
        for name, causes in self._embedding():
            yield name, always | causes
        yield "update", always | {"gradients": self.sharded * self.wide}

    def _forward(self, number: int) -> Iterator[tuple[str, Causes]]:
        q, k, hidden, inner = self.q, self.k, self.hidden, self.inner
        keeps = self.config.train.recompute is Recompute.none
        base = {"kept for backward": self._kept_bytes(number), "weights gathered": self._gathered(self.layer)}
        base |= self._before_backward()
        before = hidden + inner + self.scale
        yield "rotary positions", base | {"one layer": before + 2 * q + 3 * k}
        yield "attention", base | {"one layer": before + 2 * q + 2 * k + self.lse + self.scratch[0]}
        yield "output projection", base | {"one layer": before + 2 * q + 2 * k + self.lse + inner + hidden * self.split}
        stays = sum(self.everything.values()) if keeps else 2 * hidden + inner
        yield "feed-forward", base | {"one layer": stays + self.ffn["forward"]}

    def _head(self) -> Iterator[tuple[str, Causes]]:
        rows = self.table[0][0]
        loss = loss_bytes(self.tokens, self.blocks.loss, rows, self.model.model_dim, self.element)
        tied = self.model.tie_embeddings
        base = {"kept for backward": self._kept_bytes(self.model.num_layers)}
        states = 2 * self.hidden + self.scale + self.gathered
        waiting = self._before_backward()
        # Tied, nothing has to be gathered: the last layer's message has not been dropped for another one.
        forward = {"weights gathered": self._gathered([], self.layer) if tied else self._gathered(self.table)}
        yield "loss", base | waiting | forward | {"loss": states + loss["forward"]}
        backward = {} if tied else {"weights gathered": self._gathered(self.table, self.layer)}
        yield "gradients of the loss", base | waiting | backward | {"loss": states + loss["backward"]}
        if not tied:
            reducing = self.element * numel(self.table) + self._reduced(self.table)
            message = {"weights gathered": self._gathered([], self.layer), "gradients reduced": reducing}
            yield "reduction of the head", base | waiting | message | {"loss": 2 * self.hidden}

    def _backward(self, number: int) -> Iterator[tuple[str, Causes]]:
        q, k, hidden, inner = self.q, self.k, self.hidden, self.inner
        last = number == self.model.num_layers - 1
        end = [] if self.model.tie_embeddings else self.table  # the head or embedding, where they are units alone
        previous, following = end if last else self.layer, self.layer if number else end
        base = {
            "kept for backward": self._kept_bytes(number),
            "weights gathered": self._gathered(self.layer, following),
            "gradients reduced": self._reduced(previous),
            **self._gradients(number + 1),
        }
        everything = sum(self.everything.values())
        gradient = hidden + self.gathered
        yield "feed-forward", base | {"one layer": everything + gradient + self.ffn["backward"]}
        later = everything - hidden - inner - self.scale
        weights = numel(self.layer[3:7]) * self.element  # gradients of the feed-forward's, and of attention's output
        held = later + gradient + weights
        yield "attention", base | {"one layer": held + 2 * q + 2 * k + self.scratch[1]}
        yield "rotary positions", base | {"one layer": held - 2 * q - 2 * k + 3 * q + 4 * k}
        unit = {"gradients reduced": self.element * numel(self.layer) + self._reduced(self.layer)}
        gathered = {"weights gathered": self._gathered([], following)}
        yield "reduction", base | gathered | unit | {"one layer": 2 * hidden}

    def _embedding(self) -> Iterator[tuple[str, Causes]]:
        table, wide = numel(self.table), self.tokens * self.model.model_dim * self.wide
        base = self._gradients(0)
        held = {"weights gathered": 0 if self.model.tie_embeddings else self._gathered(self.table, [])}
        held["gradients reduced"] = self._reduced(self.layer)
        states = self.hidden + self.gathered
        rounded = table * self.element if self.element < self.wide else 0
        yield "embedding's gradient", base | held | {"embedding": states + wide + table * self.wide + rounded}
        reducing = self.element * table + self._reduced(self.table)
        yield "reduction of the embedding", base | {"gradients reduced": reducing}
