"""The fastest configs for so many ranks. No torch here."""

import copy
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from conf.schema import (
    Degrees,
    Device,
    Layout,
    Recompute,
    Route,
    TrainConfig,
    check,
    check_ulysses,
    resolve,
)
from parallel.choose import Choice
from parallel.setting import Documents, Setting, shape, whole
from training.estimate import num_parameters
from training.memory import memory
from training.planning import default_ranks, largest_plans, limit_bytes, peak_bytes, shortage
from training.refusals import choose_kernel, refusals, slower
from training.ring_time import play_all
from training.timing import Timing, timing

LARGE_RING = 32  # ranks from which on `auto` takes seconds: more are looked at with a relay first
EXACT = 3  # ways to cut the ranks that are then looked at as they would run

Changes = Mapping[str, object]  # dotted keys of the config, and their new values


def vary(config: TrainConfig, changes: Changes) -> TrainConfig:
    """A copy with other values, its rules checked. Raises ValueError for a rule that is broken."""
    varied = copy.deepcopy(config)
    for key, value in changes.items():
        section, name = key.split(".")
        setattr(getattr(varied, section), name, value)
    check(varied)
    return varied


@dataclass(frozen=True)
class Row:
    """One config of a search that fits.

    Attributes:
        changes: what differs from the config that was given.
        distance: how much: one for each policy, and for each doubling or halving of an axis.
        layout: layout and route of the kind of attention that sees most.
    """

    config: TrainConfig
    degrees: Degrees
    changes: Changes
    distance: float
    peak_bytes: float
    host_bytes: float
    timing: Timing
    layout: str

    @property
    def overrides(self) -> str:
        return overrides(self.changes)

    @property
    def arguments(self) -> str:
        """What `plan.py` is given besides the config's own overrides; the number of ranks where axes do not say it."""
        return arguments(self.changes, self.config, self.degrees.world)


def overrides(changes: Changes) -> str:
    text = {key: str(value).lower() if isinstance(value, bool) else value for key, value in changes.items()}
    return " ".join(f"{key}={value}" for key, value in text.items())


def arguments(changes: Changes, config: TrainConfig, ranks: int) -> str:
    """Overrides for `plan.py`; `config` has the changes already."""
    given = f"--ranks {ranks}" if default_ranks(config) != ranks else ""
    return " ".join(part for part in (overrides(changes), given) if part)


@dataclass(frozen=True)
class Search:
    """Rows that fit, the fastest first; of the others, how many fell out for which reason.

    `trusted`: whether the cluster's rates are those of this dtype and kernel (`training.planning.slower`).
    """

    rows: list[Row]
    fell_out: Counter
    tried: int
    trusted: bool = True


def search(config: TrainConfig, ranks: int, lengths: Sequence[int] | None = None) -> Search:
    """Every way to cut `ranks` ranks into data, sequence with Ulysses, and tensor, with every policy of memory.

    Tensor and Ulysses ranks stay within a node. Layout, route and all else are left as the config has them. lengths: of
    the documents of each sequence.
    """
    rows: dict[str, list[Row]] = {}
    fell_out: Counter = Counter()
    policies, ways, rough = list(all_policies(config)), list(all_axes(config, ranks)), {}
    for axes in ways:
        large = axes["parallel.sequence"] // axes["parallel.ulysses"] > LARGE_RING
        simple = simplified(config) if large and not lengths else {}
        try:
            rows[str(axes)] = _cut(config, ranks, axes, simple, policies, lengths, fell_out)
        except ValueError as error:
            fell_out[_reason(error)] += len(policies)
            continue
        if simple:
            rough[str(axes)] = axes
    fastest = lambda way: max((row.timing.tokens_per_second for row in rows[way]), default=0.0)  # noqa: E731
    for way in sorted(rows, key=fastest, reverse=True)[:EXACT]:
        if way in rough:
            rows[way] = _cut(config, ranks, rough[way], {}, policies, lengths, Counter())
    # Of equally fast ones, first what differs least.
    ranked = sorted(
        itertools.chain.from_iterable(rows.values()),
        key=lambda row: (-float(f"{row.timing.tokens_per_second:.4g}"), row.distance),
    )
    trusted = not slower(config, choose_kernel(config)[0])
    return Search(ranked, fell_out, len(ways) * len(policies), trusted)


def documents_of(config: TrainConfig, lengths: Sequence[int] | None) -> Documents:
    return (tuple(lengths),) * config.train.micro_batch_size if lengths else whole(config)


def named(choice: Choice) -> str:
    """Layout and route of a choice, in words."""
    return f"{choice.layout_name} {choice.route.name}" + " via nodes" * (choice.route.node_ranks > 0)


def _cut(
    config: TrainConfig,
    ranks: int,
    axes: Changes,
    simple: Changes,
    policies: Sequence[Changes],
    lengths: Sequence[int] | None,
    fell_out: Counter,
) -> list[Row]:
    """Rows of one way to cut the ranks: the ring is laid out and played once for all policies.

    `simple` narrows down what `auto` may choose, without being part of the rows.
    """
    cut = vary(config, axes | simple)
    degrees = resolve(cut, ranks)
    if least_bytes(cut, degrees) > limit_bytes(cut):
        fell_out["memory"] += len(policies)
        return []
    setting = Setting(cut, degrees, say=lambda text: None)
    documents = documents_of(cut, lengths)
    choices = setting.choose(documents)
    plans = largest_plans(cut, degrees, setting, documents, choices)
    kernel, _, refused, _ = choose_kernel(cut)
    refused += refusals(cut, degrees, setting, choices, kernel)
    if refused:
        raise ValueError(refused[0])
    fitting = []
    for policy in policies:
        try:
            varied = vary(cut, policy)
            degrees = resolve(varied, ranks)
            needs = memory(varied, degrees, plans)
        except ValueError as error:
            fell_out[_reason(error)] += 1
            continue
        if short := shortage(varied, degrees, needs):
            fell_out[short.partition(":")[0]] += 1
        else:
            fitting.append((policy, varied, degrees, needs))
    if not fitting:
        return []
    attention = play_all(setting, documents, choices)
    layout = named(next(iter(choices.values())))
    rows = []
    for policy, varied, degrees, needs in fitting:
        varied = vary(varied, {key: now(config, key) for key in simple})
        changes = {key: value for key, value in (axes | policy).items() if value != now(config, key)}
        distance = sum(distance_of(now(config, key), value) for key, value in changes.items())
        time = timing(varied, degrees, setting, documents, needs.host_bytes, attention)
        rows.append(Row(varied, degrees, changes, distance, peak_bytes(varied, needs), needs.host_bytes, time, layout))
    return rows


def least_bytes(config: TrainConfig, degrees: Degrees) -> float:
    """Of a rank under any policy, so that what is far from fitting needs no ring: states; unless offloaded, inputs."""
    element = shape(config).element_bytes
    states = 3 * max(4, element) * num_parameters(config.model) / (degrees.data * degrees.sequence * degrees.tensor)
    tokens = config.train.micro_batch_size * int(config.data.sequence_length) / (degrees.sequence * degrees.tensor)
    layers = 1 if config.cluster.device is Device.cuda else config.model.num_layers
    return config.cluster.runtime_bytes + states + layers * tokens * config.model.model_dim * element


def simplified(config: TrainConfig) -> dict[str, object]:
    """What a large ring is looked at with first: a balanced layout's relay, nearly as good as what `auto` finds."""
    parallel = config.parallel
    if parallel.layout is not Layout.auto or parallel.route is not Route.auto:
        return {}
    return {"parallel.layout": Layout.zigzag, "parallel.route": Route.relay}


def all_axes(config: TrainConfig, ranks: int) -> Iterator[dict[str, object]]:
    """Sizes of sequence, Ulysses and tensor that make `ranks` ranks with some number of data ranks."""
    model, node = config.model, min(config.cluster.node_gpus, ranks)
    cut = math.gcd(model.num_heads, model.num_kv_heads, model.ffn_dim, model.padded_vocab_size)
    for tensor in _divisors(math.gcd(ranks, cut), node):
        for sequence in _divisors(ranks // tensor):
            for ulysses in _divisors(sequence, max(1, node // tensor)):
                try:
                    check_ulysses(model.num_heads // tensor, model.num_kv_heads // tensor, ulysses)
                except ValueError:
                    continue
                axes = {"parallel.sequence": sequence, "parallel.ulysses": ulysses, "parallel.tensor": tensor}
                data = ranks // (sequence * tensor)
                yield axes if config.parallel.data == -1 else {"parallel.data": data} | axes


def all_policies(config: TrainConfig) -> Iterator[dict[str, object]]:
    """Recompute, offload where there are GPUs, and states sharded over all ranks or as the config says."""
    offloads = (False, True) if config.cluster.device is Device.cuda else (False,)
    for shard in dict.fromkeys((config.parallel.shard, -1)):
        for recompute in Recompute:
            for offload in offloads:
                yield {"train.recompute": recompute, "train.offload": offload, "parallel.shard": shard}


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [d for d in range(1, (most or number) + 1) if number % d == 0]


def now(config: TrainConfig, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def distance_of(before: object, after: object) -> float:
    if isinstance(before, int) and isinstance(after, int) and min(before, after) > 0 and before is not True:
        return abs(math.log2(after / before))
    return 1.0


def _reason(error: ValueError) -> str:
    """The key that a refusal names, or its first clause without the numbers, by which configs differ."""
    key = re.match(r"[a-z]+\.[a-z_]+", str(error))
    return key[0] if key else re.sub(r" of \d+ \w+", "", re.split(r"[:;,]", str(error))[0])
