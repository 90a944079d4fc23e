"""Which configs do better than the one given: the fastest, the nearest that fits, the longest sequence. No torch."""

import copy
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from conf.schema import Degrees, Device, Layout, Recompute, Route, TrainConfig, check, check_ulysses, resolve
from parallel.setting import Setting
from training.estimate import num_parameters
from training.memory import ELEMENT_BYTES, memory
from training.planning import choose_kernel, largest_plans, limit_bytes, peak_bytes, refusals, shortage, whole
from training.ring_time import play_all
from training.timing import Timing, timing

MOST_RANKS = 1024  # how far `nearest` looks
ALIGNED_TOKENS = 128  # of which a rank's part of the longest sequence is a multiple
LONGEST_TOKENS = 1 << 40
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
        text = {key: str(value).lower() if isinstance(value, bool) else value for key, value in self.changes.items()}
        return " ".join(f"{key}={value}" for key, value in text.items())


@dataclass(frozen=True)
class Search:
    """Rows that fit, the fastest first; of the others, how many fell out for which reason."""

    rows: list[Row]
    fell_out: Counter
    tried: int


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits, a multiple of `unit` tokens, and what stands against one unit more."""

    tokens: int
    unit: int
    peak_bytes: float
    reason: str


def search(config: TrainConfig, ranks: int, lengths: Sequence[int] | None = None) -> Search:
    """Every way to cut `ranks` ranks into data, sequence with Ulysses, and tensor, with every policy of memory.

    Tensor and Ulysses ranks stay within a node. Layout, route and all else are left as the config has them. lengths: of
    the documents of each sequence.
    """
    rows: dict[str, list[Row]] = {}
    fell_out: Counter = Counter()
    policies, ways, rough = list(_policies(config)), list(_axes(config, ranks)), {}
    for axes in ways:
        large = axes["parallel.sequence"] // axes["parallel.ulysses"] > LARGE_RING
        simple = _simple(config) if large and not lengths else {}
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
    return Search(ranked, fell_out, len(ways) * len(policies))


def nearest(config: TrainConfig, ranks: int, lengths: Sequence[int] | None = None) -> Row | None:
    """The config that fits and differs least from `config`: on as many ranks, else on twice as many, and so on."""
    while True:
        if found := search(config, ranks, lengths).rows:
            return min(found, key=lambda row: (row.distance, -row.timing.tokens_per_second))
        ranks *= 2
        if ranks > MOST_RANKS:
            return None


def longest(config: TrainConfig, ranks: int) -> Longest:
    """The longest sequence, one document, that the config's axes and policies have memory for.

    Between one length that fits and one that does not, the next guess is where a straight line of the peaks meets the
    limit; the longest has been found when one unit more does not fit.

    Raises:
        ValueError: where not even one unit fits.
    """
    degrees = resolve(config, ranks)
    settled = _settled(config, degrees)
    unit = degrees.sequence * degrees.tensor * ALIGNED_TOKENS
    peaks: dict[int, tuple[float, str]] = {}

    def reason(units: int) -> str:
        if units not in peaks:
            peaks[units] = _peak(settled, ranks, degrees.accumulation, units * unit)
            if peaks[units][0] == math.inf and settled is not config:
                peaks[units] = _peak(config, ranks, degrees.accumulation, units * unit)
        return peaks[units][1]

    low, high = 0, max(1, int(config.data.sequence_length) // unit)
    while not reason(high):
        if high * unit > LONGEST_TOKENS:
            raise ValueError(f"sequences of {high * unit:,} tokens still fit: nothing in this config grows with them")
        low, high = high, 2 * high
    while high - low > 1:
        guess = (low + high) // 2
        (below, _), (above, _) = peaks.get(low, (math.nan, "")), peaks[high]
        if below < above < math.inf:
            line = low + (high - low) * (limit_bytes(config) - below) / (above - below)
            guess = min(high - 1, max(low + 1, math.floor(line) + (math.floor(line) == low)))
        low, high = (guess, high) if not reason(guess) else (low, guess)
    if low == 0:
        raise ValueError(f"data.sequence_length={unit}, {ALIGNED_TOKENS} tokens a rank, does not fit: {reason(1)}")
    return Longest(low * unit, unit, peaks[low][0], reason(high))


def _settled(config: TrainConfig, degrees: Degrees) -> TrainConfig:
    """The config with the layout and route that `auto` chooses for its own length, where asking takes seconds."""
    if degrees.sequence // degrees.ulysses <= LARGE_RING:
        return config
    try:
        choice = next(iter(Setting(config, degrees, say=lambda text: None).choose(whole(config)).values()))
    except ValueError:
        return config
    depth = choice.route.depth if choice.route.name == "direct" else 0
    route = Route(choice.route.name)
    settled = {"parallel.layout": Layout(choice.layout_name), "parallel.route": route, "parallel.prefetch": depth}
    return vary(config, settled)


def _peak(config: TrainConfig, ranks: int, accumulation: int, length: int) -> tuple[float, str]:
    """(peak bytes of a rank, why sequences of `length` tokens cannot be; "" where they can)."""
    changes: dict[str, object] = {"data.sequence_length": length}
    if config.train.global_batch_tokens is not None:
        data = ranks // (config.parallel.sequence * config.parallel.tensor)
        changes["train.global_batch_tokens"] = accumulation * data * config.train.micro_batch_size * length
    try:
        varied = vary(config, changes)
        degrees = resolve(varied, ranks)
        setting = Setting(varied, degrees, say=lambda text: None)
        choices = setting.choose(whole(varied))
        needs = memory(varied, degrees, largest_plans(varied, degrees, setting, whole(varied), choices))
        refused = refusals(varied, degrees, setting, choices, choose_kernel(varied)[0])
    except ValueError as error:
        return math.inf, str(error)
    if refused:
        return math.inf, refused[0]
    return peak_bytes(varied, needs), shortage(varied, degrees, needs)


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
    if _least_bytes(cut, degrees) > limit_bytes(cut):
        fell_out["memory"] += len(policies)
        return []
    setting = Setting(cut, degrees, say=lambda text: None)
    documents = (tuple(lengths),) * cut.train.micro_batch_size if lengths else whole(cut)
    choices = setting.choose(documents)
    plans = largest_plans(cut, degrees, setting, documents, choices)
    refused = refusals(cut, degrees, setting, choices, choose_kernel(cut)[0])
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
    choice = next(iter(choices.values()))
    layout = f"{choice.layout_name} {choice.route.name}" + " via nodes" * (choice.route.node_ranks > 0)
    rows = []
    for policy, varied, degrees, needs in fitting:
        varied = vary(varied, {key: _now(config, key) for key in simple})
        changes = {key: value for key, value in (axes | policy).items() if value != _now(config, key)}
        distance = sum(_distance(_now(config, key), value) for key, value in changes.items())
        time = timing(varied, degrees, setting, documents, needs.host_bytes, attention)
        rows.append(Row(varied, degrees, changes, distance, peak_bytes(varied, needs), needs.host_bytes, time, layout))
    return rows


def _least_bytes(config: TrainConfig, degrees: Degrees) -> float:
    """Of a rank under any policy, so that what is far from fitting needs no ring: states; unless offloaded, inputs."""
    element = ELEMENT_BYTES[config.train.dtype]
    states = 3 * max(4, element) * num_parameters(config.model) / (degrees.data * degrees.sequence * degrees.tensor)
    tokens = config.train.micro_batch_size * int(config.data.sequence_length) / (degrees.sequence * degrees.tensor)
    layers = 1 if config.cluster.device is Device.cuda else config.model.num_layers
    return config.cluster.runtime_bytes + states + layers * tokens * config.model.model_dim * element


def _simple(config: TrainConfig) -> dict[str, object]:
    """What a large ring is looked at with first: a balanced layout's relay, nearly as good as what `auto` finds."""
    parallel = config.parallel
    if parallel.layout is not Layout.auto or parallel.route is not Route.auto:
        return {}
    return {"parallel.layout": Layout.zigzag, "parallel.route": Route.relay}


def _axes(config: TrainConfig, ranks: int) -> Iterator[dict[str, object]]:
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


def _policies(config: TrainConfig) -> Iterator[dict[str, object]]:
    """Recompute, offload where there are GPUs, and states sharded over all ranks or as the config says."""
    offloads = (False, True) if config.cluster.device is Device.cuda else (False,)
    for shard in dict.fromkeys((config.parallel.shard, -1)):
        for recompute in Recompute:
            for offload in offloads:
                yield {"train.recompute": recompute, "train.offload": offload, "parallel.shard": shard}


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [d for d in range(1, (most or number) + 1) if number % d == 0]


def _now(config: TrainConfig, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _distance(before: object, after: object) -> float:
    if isinstance(before, int) and isinstance(after, int) and min(before, after) > 0 and before is not True:
        return abs(math.log2(after / before))
    return 1.0


def _reason(error: ValueError) -> str:
    """The key that a refusal names, or how it begins."""
    key = re.match(r"[a-z]+\.[a-z_]+", str(error))
    return key[0] if key else " ".join(re.sub(r"\d+ ", "", str(error)).split()[:6])
