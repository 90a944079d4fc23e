"""What a config needs and how fast it can be: for `plan.py`. No torch here.

Memory is `training.memory`'s, time `training.timing`'s, and what a run would refuse is asked of the same functions that
refuse it. Nothing is clamped: a plan that does not fit is reported as it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from conf.schema import Degrees, Device, TrainConfig, resolve
from model.kernels import capability
from parallel.choose import Choice
from parallel.setting import Documents, Setting, whole
from training.estimate import checkpoint_bytes, checkpoint_seconds
from training.memory import Memory, memory
from training.refusals import choose_kernel, refusals, slower
from training.ring_time import Attention, play_all
from training.save_clock import Forecast, forecast
from training.timing import Timing, timing

USABLE = 0.9  # of a GPU's memory: see `training.memory`


@dataclass(frozen=True)
class Condition:
    """Whether blocks are long enough to hide their transfer behind the attention computed with them.

    c >= (e / 2k) (n_kv / n_q) F/B forward, ((e + g) / 5k) (n_kv / n_q) F/B backward, on the `link` that `per_hop`
    blocks cross at each hop; e bytes an element of keys, g of their gradients; k of the pairs visible on the busiest
    rank. Latency and other traffic are left out; `training.timing` has them. Source: arXiv:2310.01889 §3.
    """

    link: str  # "link" inside a node, "nic" between nodes
    direction: str  # forward, backward
    needed_tokens: float
    tokens: int
    visible: float
    per_hop: float

    @property
    def holds(self) -> bool:
        return self.tokens >= self.needed_tokens


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What decides whether a config can run, without a second of its time.

    Attributes:
        plans: of the rank that needs most memory.
        kernel: that the run would take; `kernels` what each can do, as far as this machine has the packages.
        refusals: what ends the run before its first step, in its own words.
        notes: what a reader must know who trusts the figures.
    """

    setting: Setting
    choices: dict[str, Choice]
    plans: dict[str, np.ndarray]
    memory: Memory
    kernel: str
    kernels: tuple[capability.Row, ...]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Plan(Judged):
    """One config on so many ranks.

    Attributes:
        documents: of each sequence of a micro-batch.
        checkpoint_bytes, checkpoint_seconds: of all ranks together; all nodes write at once.
        saves: how often to write one, and the share of time that is left for steps that count.
        host_bytes: of one node, for what is offloaded and for copies that checkpoints are written from.
    """

    config: TrainConfig
    degrees: Degrees
    documents: Documents
    attention: Mapping[str, Attention]
    timing: Timing
    conditions: tuple[Condition, ...]
    checkpoint_bytes: int
    checkpoint_seconds: float
    saves: Forecast
    host_bytes: float

    @property
    def nodes(self) -> int:
        return -(-self.degrees.world // self.config.cluster.node_gpus)

    @property
    def fits(self) -> bool:
        """In a rank's memory and in its node's."""
        return not shortage(self.config, self.degrees, self.memory)

    @property
    def whole(self) -> bool:
        """Whether each sequence is one document."""
        return self.documents == whole(self.config)

    @property
    def mfu(self) -> dict[str, float | None]:
        """Causal, non-causal and what kernels alone would reach.

        None where the cluster's rates are not those of this dtype and kernel; non-causal with packed documents too:
        it counts pairs of tokens of different documents, and exceeds 100 %.
        """
        time, hold = self.timing, not slower(self.config, self.kernel)
        return {
            "causal": time.mfu_causal if hold else None,
            "noncausal": time.mfu_noncausal if hold and self.whole else None,
            "ceiling": time.mfu_ceiling if hold else None,
        }

    @property
    def causes(self) -> dict[str, float]:
        """Bytes of a rank at its peak, by cause."""
        runtime = self.config.cluster.runtime_bytes
        return self.memory.causes | ({"runtime": runtime} if runtime else {})

    @property
    def peak_bytes(self) -> float:
        return peak_bytes(self.config, self.memory)

    @property
    def limit_bytes(self) -> float:
        return limit_bytes(self.config)


def default_ranks(config: TrainConfig) -> int:
    """data × sequence × tensor, where parallel.data=-1 counts as one."""
    return max(1, config.parallel.data) * config.parallel.sequence * config.parallel.tensor


def plan(config: TrainConfig, ranks: int, documents: Sequence[Sequence[int]] | None = None) -> Plan:
    """What `config` needs on `ranks` ranks.

    Raises:
        ValueError: where there is nothing to plan: axes that do not make so many ranks, or a budget below one block.
    """
    degrees = resolve(config, ranks)
    documents = tuple(map(tuple, documents or whole(config)))
    judged = judge(config, degrees, documents)
    setting, needs = judged.setting, judged.memory
    attention = play_all(setting, documents, judged.choices)
    on_node = min(config.cluster.node_gpus, ranks)
    time = timing(config, degrees, setting, documents, needs.host_bytes, attention)
    seconds = checkpoint_seconds(config, ranks)
    judged = replace(
        judged, notes=(*judged.notes, *short_timeouts(config, time.step_seconds / degrees.accumulation, seconds))
    )
    blocked = seconds
    if config.checkpoint.background:  # only while states are copied into the host's memory
        blocked = checkpoint_bytes(config) / ranks / config.cluster.host_bytes_per_second
    return Plan(
        **vars(judged),
        config=config,
        degrees=degrees,
        documents=documents,
        attention=attention,
        timing=time,
        conditions=tuple(conditions(config, setting, attention)) if documents == whole(config) else (),
        checkpoint_bytes=checkpoint_bytes(config),
        checkpoint_seconds=seconds,
        saves=forecast(config, ranks, blocked, time.step_seconds),
        host_bytes=(needs.host_bytes + needs.copy_bytes) * on_node,
    )


def short_timeouts(config: TrainConfig, micro_batch_seconds: float, save_seconds: float) -> Iterator[str]:
    """Limits that would take a healthy run for a stalled one, in words: below twice what is planned."""
    planned = {
        "step_seconds": micro_batch_seconds,
        "first_step_seconds": micro_batch_seconds,
        "save_seconds": save_seconds,
    }
    for name, seconds in planned.items():
        limit = getattr(config.timeouts, name)
        if limit < 2 * seconds:
            what = "checkpoint" if name == "save_seconds" else "micro-batch"
            yield (
                f"timeouts.{name}={limit} would end a run as stalled whose {what} takes longer: one takes "
                f"{seconds:,.0f} s here, use {4 * seconds:.0f}"
            )


def judge(config: TrainConfig, degrees: Degrees, documents: Documents) -> Judged:
    """Memory and refusals, by the functions that the run itself asks. Raises ValueError as `plan` does."""
    setting = Setting(config, degrees, say=lambda text: None)
    choices = setting.choose(documents)
    plans = largest_plans(config, degrees, setting, documents, choices)
    kernel, kernels, refused, notes = choose_kernel(config)
    refused += refusals(config, degrees, setting, choices, kernel)
    return Judged(
        setting=setting,
        choices=choices,
        plans=plans,
        memory=memory(config, degrees, plans),
        kernel=kernel,
        kernels=tuple(kernels),
        refusals=tuple(refused),
        notes=tuple(notes),
    )


def largest_plans(
    config: TrainConfig,
    degrees: Degrees,
    setting: Setting,
    documents: Sequence[Sequence[int]],
    choices: dict[str, Choice],
) -> dict[str, np.ndarray]:
    """The plans of a rank of the ring that needs most memory.

    Where blocks come straight from their owners, ranks need buffers of different sizes: a few are asked, of which the
    one that needs most is within a hundredth of the largest.
    """
    ring = setting.ring_size
    direct = any(choice.route.name == "direct" for choice in choices.values())
    asked = sorted({0, 1, ring // 4, ring // 2, ring // 2 + 1, 3 * ring // 4}) if direct and ring > 1 else [0]
    plans = [setting.plans(documents, rank, choices) for rank in asked if rank < ring]
    return max(plans, key=lambda plan: memory(config, degrees, plan).peak_bytes)


def peak_bytes(config: TrainConfig, needs: Memory) -> float:
    """Of a rank, with what is taken before its first tensor."""
    return needs.peak_bytes + config.cluster.runtime_bytes


def limit_bytes(config: TrainConfig) -> float:
    """Of a rank: its memory, on GPUs less what an allocator cannot always reuse."""
    share = USABLE if config.cluster.device is Device.cuda else 1.0
    return share * config.cluster.memory_bytes


def shortage(config: TrainConfig, degrees: Degrees, needs: Memory) -> str:
    """What there is too little of, in words; "" where all fits.

    A rank's peak; and in its node's memory what the node's ranks keep there, which is what they offload and what
    checkpoints are written from, or, where ranks compute on CPUs, all they have.
    """
    peak, limit, cluster = peak_bytes(config, needs), limit_bytes(config), config.cluster
    on_node, there = min(cluster.node_gpus, degrees.world), cluster.host_memory_bytes
    if peak > limit:
        return f"memory: a rank needs {_gb(peak)} of {_gb(limit)}: {_gb(peak - limit)} too much"
    if (hosted := (needs.host_bytes + needs.copy_bytes) * on_node) > there:
        uses = ["what its ranks offload"] * bool(needs.host_bytes)
        uses += ["copies that checkpoints are written from (checkpoint.background)"] * bool(needs.copy_bytes)
        return f"host memory: a node's host needs {_gb(hosted)} of {_gb(there)} for {' and '.join(uses)}"
    if cluster.device is Device.cpu and peak * on_node > there:
        return (
            f"host memory: {on_node} ranks of a node share its memory (cluster.host_memory_bytes) and need "
            f"{_gb(peak * on_node)} of {_gb(there)}, {_gb(peak)} each"
        )
    return ""


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"


def conditions(config: TrainConfig, setting: Setting, attention: Mapping[str, Attention]) -> Iterator[Condition]:
    """Of full attention: for each kind of link that the ring uses, forward and backward."""
    if "full" not in attention or setting.ring_size == 1:
        return
    choice, network, shape = attention["full"].choice, setting.network, setting.shape
    visible = 1.0 if choice.layout_name == "contiguous" else 0.5
    gradient = shape.element_bytes if choice.route.narrow else max(4, shape.element_bytes)
    width, cards = network.ranks_per_node, network.cards
    # Blocks that cross one card at each hop: a relay's one at each end of a node; straight from their owners as many
    # as the node has ranks; through a mate, or gathered, each block once into a node, where that many ranks meet it.
    per_card = {"relay": 1.0, "direct": width / cards, "gather": 1.0 / cards}[choice.route.name]
    if choice.route.node_ranks:
        per_card = 1.0 / cards
    links = [("link", network.link_bytes_per_second, 1.0)] if width > 1 else []
    links += [("nic", network.card_bytes_per_second, per_card)] if width < setting.ring_size else []
    for link, rate, per_hop in links:
        for direction, share, flops in (
            ("forward", shape.element_bytes / 2, setting.rates.forward_flops),
            ("backward", (shape.element_bytes + gradient) / 5, setting.rates.backward_flops),
        ):
            needed = share / visible * shape.num_kv_heads / shape.num_heads * flops / rate * per_hop
            tokens = setting.padded // setting.ring_size
            yield Condition(link, direction, needed, tokens, visible, per_hop)
