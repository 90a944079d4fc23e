"""The longest sequence that a config has memory for, and what to paste to train with it. No torch here."""

import itertools
import math
from dataclasses import dataclass

from conf.schema import Degrees, Layout, Route, TrainConfig, resolve
from parallel.choose import USEFUL
from parallel.setting import whole
from training.planning import judge, limit_bytes, peak_bytes, shortage
from training.searching import LARGE_RING, Changes, arguments, now, vary

ALIGNED_TOKENS = 128  # of which a rank's part of the longest sequence is a multiple
LONGEST_TOKENS = 1 << 40


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits, a multiple of `unit` tokens, and what stands against one unit more.

    Attributes:
        arguments: what to give `plan.py` besides the config's own, with the layout and route that need so little.
        pinned: whether `arguments` set these where the config says auto: a run's choice may need more memory.
    """

    tokens: int
    unit: int
    peak_bytes: float
    reason: str
    arguments: str
    pinned: bool


def longest(config: TrainConfig, ranks: int) -> Longest:
    """The longest sequence, one document, that the config's axes and policies have memory for.

    `auto` takes another route as sequences grow, so that one length may fit and a shorter one not: each layout and
    route is looked at by itself, and one that does not hold a unit more than the best so far is left.

    Raises:
        ValueError: where not even one unit fits.
    """
    degrees = resolve(config, ranks)
    unit = degrees.sequence * degrees.tensor * ALIGNED_TOKENS
    best, found, reasons = 0, None, []
    for pins in _pins(config, degrees):
        probe = _Probe(config, ranks, degrees.accumulation, unit, pins)
        if reason := probe(best + 1):
            reasons.append(reason)
            continue
        start = max(best + 1, int(config.data.sequence_length) // unit)
        best = _bisect(probe, best + 1, start, unit, limit_bytes(config))
        found = probe, pins
    if found is None:
        raise ValueError(f"data.sequence_length={unit}, {ALIGNED_TOKENS} tokens a rank, does not fit: {reasons[0]}")
    probe, pins = found
    changes = probe.changes(best)
    words = arguments(changes, vary(config, changes), ranks)
    return Longest(best * unit, unit, probe.peaks[best], probe(best + 1), words, bool(pins))


def _pins(config: TrainConfig, degrees: Degrees) -> list[Changes]:
    """Every layout and route that `auto` may come to; nothing to set where the config says both, or sends nothing."""
    parallel, ring = config.parallel, degrees.sequence // degrees.ulysses
    automatic = Layout.auto is parallel.layout or Route.auto is parallel.route
    if ring == 1 or not automatic:
        return [{}]
    pins = []
    for name, names in USEFUL.items():
        route, layouts = Route(name), sorted(map(Layout, names), key=lambda layout: layout is not Layout.zigzag)
        if parallel.route not in (Route.auto, route):
            continue
        if ring > LARGE_RING:  # what needs a search of its own takes seconds, and no less memory than zigzag
            layouts = layouts[:1]
        for layout in layouts if parallel.layout is Layout.auto else (parallel.layout,):
            every = {"parallel.layout": layout, "parallel.route": route}
            if route is Route.direct and not parallel.prefetch:
                every["parallel.prefetch"] = 1
            pins.append({key: value for key, value in every.items() if value != now(config, key)})
    return pins


class _Probe:
    """Why sequences of so many units cannot be, "" where they can; `peaks`: bytes of a rank, infinite where refused."""

    def __init__(self, config: TrainConfig, ranks: int, accumulation: int, unit: int, pins: Changes):
        self.config, self.ranks, self.accumulation, self.unit, self.pins = config, ranks, accumulation, unit, pins
        self.peaks: dict[int, float] = {}
        self._reasons: dict[int, str] = {}

    def __call__(self, units: int) -> str:
        if units not in self._reasons:
            self.peaks[units], self._reasons[units] = self._ask(units)
        return self._reasons[units]

    def changes(self, units: int) -> Changes:
        """Of the config; as many micro-batches as it has."""
        length, parallel, train = units * self.unit, self.config.parallel, self.config.train
        changes: dict[str, object] = {"data.sequence_length": length}
        if train.global_batch_tokens is not None:
            data = self.ranks // (parallel.sequence * parallel.tensor)
            changes["train.global_batch_tokens"] = self.accumulation * data * train.micro_batch_size * length
        return changes | self.pins

    def _ask(self, units: int) -> tuple[float, str]:
        try:
            varied = vary(self.config, self.changes(units))
            degrees = resolve(varied, self.ranks)
            judged = judge(varied, degrees, whole(varied))
        except ValueError as error:
            return math.inf, str(error)
        if judged.refusals:
            return math.inf, judged.refusals[0]
        return peak_bytes(varied, judged.memory), shortage(varied, degrees, judged.memory)


def _bisect(probe: _Probe, low: int, high: int, unit: int, limit: float) -> int:
    """The most units that fit, from `low` on, which do.

    Where a rank's memory is what ends it, the next guess is where a straight line of the peaks meets the limit; every
    third guess, and where something else ends it, is the middle.
    """
    while not probe(high):
        if high * unit > LONGEST_TOKENS:
            raise ValueError(f"sequences of {high * unit:,} tokens still fit: nothing in this config grows with them")
        low, high = high, 2 * high
    for turn in itertools.count(1):
        if high - low <= 1:
            break
        guess, below, above = (low + high) // 2, probe.peaks[low], probe.peaks[high]
        if below <= limit < above < math.inf and turn % 3:
            line = low + (high - low) * (limit - below) / (above - below)
            guess = min(high - 1, max(low + 1, math.floor(line) + (math.floor(line) == low)))
        low, high = (guess, high) if not probe(guess) else (low, guess)
    return low
