"""The config that can run and differs least from one that cannot. No torch here."""

import contextlib
from collections.abc import Sequence

from conf.schema import Degrees, Device, Dtype, Kernel, Recompute, TrainConfig, resolve
from model.kernels.capability import INDEXED
from parallel.setting import Setting
from training.memory import memory
from training.planning import judge, largest_plans, limit_bytes, peak_bytes, shortage
from training.refusals import choose_kernel
from training.ring_time import play_all
from training.searching import (
    LARGE_RING,
    Changes,
    Row,
    all_axes,
    all_policies,
    distance_of,
    documents_of,
    least_bytes,
    named,
    now,
    simplified,
    vary,
)
from training.timing import timing

MOST_RANKS = 1024  # how far `nearest` looks


def nearest(config: TrainConfig, ranks: int, lengths: Sequence[int] | None = None) -> Row | None:
    """The config that runs and differs least from `config`: on as many ranks, else on twice as many, and so on.

    It is judged exactly as it would be pasted. Rings too large to ask `auto` about are given layout and route.
    """
    repaired = _repairs(config)
    while True:
        if row := _nearest(config, repaired, ranks, lengths):
            return row
        ranks *= 2
        if ranks > MOST_RANKS:
            return None


def _nearest(config: TrainConfig, repaired: Changes, ranks: int, lengths: Sequence[int] | None) -> Row | None:
    """Of those on so many ranks. Only the one that is returned is timed."""
    policies, ways = list(all_policies(config)), {}
    tried = []
    for axes in all_axes(config, ranks):
        large = axes["parallel.sequence"] // axes["parallel.ulysses"] > LARGE_RING
        axes = {**axes, **(simplified(config) if large else {})}
        for policy in policies:
            every = {**repaired, **axes, **policy}
            changes = {key: value for key, value in every.items() if value != now(config, key)}
            distance = sum(distance_of(now(config, key), value) for key, value in changes.items())
            tried.append((distance, len(tried), axes, changes))
    for distance, _, axes, changes in sorted(tried, key=lambda one: one[:2]):
        way = str(axes)
        if way not in ways:
            ways[way] = _Way(config, {**repaired, **axes}, ranks, lengths)
        try:
            if ways[way].hopeless or ways[way].short(changes):
                continue
            varied = vary(config, changes)
            degrees = resolve(varied, ranks)
            documents = documents_of(varied, lengths)
            judged = judge(varied, degrees, documents)
        except ValueError:
            continue
        needs, choice = judged.memory, next(iter(judged.choices.values()))
        if judged.refusals or shortage(varied, degrees, needs):
            continue
        attention = play_all(judged.setting, documents, judged.choices)
        time = timing(varied, degrees, judged.setting, documents, needs.host_bytes, attention)
        peak = peak_bytes(varied, needs)
        return Row(varied, degrees, changes, distance, peak, needs.host_bytes, time, named(choice))
    return None


class _Way:
    """One way to cut the ranks, laid out once: with a relay first, which takes least time and about the least memory.

    Attributes:
        hopeless: no policy of memory helps.
    """

    def __init__(self, config: TrainConfig, axes: Changes, ranks: int, lengths: Sequence[int] | None):
        self.config, self.ranks, self.plans, self.hopeless = config, ranks, None, True
        try:
            cut = vary(config, axes)
            degrees = resolve(cut, ranks)
        except ValueError:
            return
        if _never(cut, degrees):
            return
        simple = vary(cut, {} if lengths else simplified(cut))
        try:
            setting = Setting(simple, degrees, say=lambda text: None)
        except ValueError:
            # Buffers exceed what they may have: no question of policies. What is not simple is asked as it would run.
            with contextlib.suppress(ValueError):
                Setting(cut, degrees, say=lambda text: None)
                self.hopeless = False
            return
        documents = documents_of(simple, lengths)
        self.plans = largest_plans(simple, degrees, setting, documents, setting.choose(documents))
        gpus = cut.cluster.device is Device.cuda
        leanest = {**axes, "parallel.shard": -1, "train.offload": gpus}
        try:
            short = [self.short({**leanest, "train.recompute": one}) for one in (Recompute.full, Recompute.block)]
        except ValueError:  # a budget below one block
            return
        # What a node's host lacks, other policies keep on the GPUs.
        self.hopeless = all(text and (text.startswith("memory") or not gpus) for text in short)

    def short(self, changes: Changes) -> str:
        """What a relay has too little of under a policy."""
        if self.plans is None:
            return ""
        varied = vary(self.config, changes)
        degrees = resolve(varied, self.ranks)
        return shortage(varied, degrees, memory(varied, degrees, self.plans))


def _repairs(config: TrainConfig) -> Changes:
    """What makes a kernel of what the config asks for, where none can do it: what differs least."""
    kernel, dtype = {"parallel.kernel": Kernel.auto}, {"train.dtype": Dtype.bfloat16}
    for changes in ({}, kernel, dtype, kernel | dtype, {"parallel.kernel": Kernel.reference}):
        try:
            if not choose_kernel(vary(config, changes))[2]:
                return changes
        except ValueError:
            continue
    return {}


def _never(config: TrainConfig, degrees: Degrees) -> bool:
    """Whether no policy of memory and no route helps: states are too large, or queries for a kernel to index."""
    least, cluster = least_bytes(config, degrees), config.cluster
    if least > limit_bytes(config):
        return True
    if cluster.device is Device.cpu:
        return least * min(cluster.node_gpus, degrees.world) > cluster.host_memory_bytes
    tokens = config.train.micro_batch_size * int(config.data.sequence_length) // degrees.sequence
    queries = tokens * config.model.num_heads // degrees.tensor * config.model.head_dim
    return config.parallel.kernel is not Kernel.reference and queries > INDEXED
