"""Who holds a run up, from what its ranks say of themselves."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

# The order of a step's phases; data and micro-batches (0 and 1) take turns.
ORDER = {"start": 0, "data": 0, "first_step": 1, "step": 1, "validate": 2, "save": 3, "end": 4}
WORDS = {"first_step": "the first step", "save": "saving", "validate": "validation"}
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
LONGER = 1.2  # times the median: less is noise between equal machines
SHARE = 0.01  # of all seconds: less is not worth a look


@dataclass(frozen=True)
class Beat:
    """A rank's last sign of life. It came `age_seconds` ago, and is overdue after `late_seconds`."""

    rank: int
    host: str
    step: int  # that it works at; 0 = none yet
    micro_batch: int
    phase: str
    since_seconds: float  # in this phase, when the sign came
    age_seconds: float = 0.0
    late_seconds: float = 30.0
    start_id: str = ""  # of the run's start, which the ranks have in common

    @property
    def is_late(self) -> bool:
        """Whether the process is stopped, dead, or on a machine that is."""
        return self.age_seconds > self.late_seconds and self.phase != "end"

    @property
    def seconds(self) -> float:
        """In its phase until now."""
        return self.since_seconds + self.age_seconds

    def place(self) -> tuple[int, ...]:
        """How far it has come: ranks that share collectives should be at the same place."""
        order = ORDER.get(self.phase, 1)
        return self.step, max(order, 1), self.micro_batch, order


def behind(beats: Sequence[Beat], missing: Sequence[int] = ()) -> str:
    """The sentence that names who holds all others up; `missing`: ranks that have given no sign of life at all.

    That is who has not been heard for long; else who is behind the rank that has come farthest; else nobody.
    """
    if missing:
        return f"{_ranks(missing)} {_has(missing)} given no sign of life"
    late = [beat for beat in beats if beat.is_late]
    if late:
        return "; ".join(_silent(group) for group in _alike(late, lambda beat: (beat.host, beat.step, beat.phase)))
    if not beats:
        return "no rank has given a sign of life"
    first = max(beats, key=Beat.place)
    followers = [beat for beat in beats if beat.place() < first.place()]
    if not followers:
        return f"all {len(beats)} ranks are {_where(first)}: a collective between them does not end"
    last = min(followers, key=Beat.place).place()
    slow = [beat for beat in followers if beat.place() == last]
    groups = _alike(slow, lambda beat: (beat.host, beat.phase))
    return "; ".join(_follower(group, first) for group in groups)


def slowest(phases: Sequence[str], seconds: Sequence[Sequence[float]], hosts: Sequence[str]) -> str:
    """One line with the slowest rank of each phase, its seconds, and how many times the median of all that is.

    Phases without a rank that stands out are left out: less than 1.2 times the median, or fewer seconds above it than
    1 % of what a rank spent in all phases. "" where none is left.

    Args:
        seconds: [ranks][phases], spent since the last such line.
        hosts: [ranks], the nodes.
    """
    if not seconds:
        return ""
    columns = list(zip(*seconds, strict=True))
    total = median(sum(row) for row in seconds)
    found = []
    for phase, column in zip(phases, columns, strict=True):
        middle, most = median(column), max(column)
        if most >= LONGER * middle and most - middle >= SHARE * total > 0:
            rank = column.index(most)
            times = f", {most / middle:.1f} × the median" if middle > 0 else ""
            found.append(f"{_phase(phase)}: rank {rank} on {hosts[rank]} {most:.3g} s{times}")
    return "; ".join(found)


def _silent(group: Sequence[Beat]) -> str:
    ranks, ages = [beat.rank for beat in group], [beat.age_seconds for beat in group]
    return (
        f"{_ranks(ranks)} on {group[0].host} {_has(ranks)} not been heard for {min(ages):.0f} s, last {_at(group[0])}"
    )


def _follower(group: Sequence[Beat], first: Beat) -> str:
    beat, ranks = group[0], [beat.rank for beat in group]
    here = f"{_ranks(ranks)} on {beat.host} {'is' if len(ranks) == 1 else 'are'}"
    now = f"in {_phase(beat.phase)} for {max(beat.seconds for beat in group):.0f} s"
    steps = first.step - beat.step
    if steps:
        number = NUMBERS[steps] if steps < len(NUMBERS) else f"{steps:,}"
        return f"{here} {number} step{'s' * (steps > 1)} behind, {now}"
    if beat.phase == first.phase:
        return f"{here} behind at step {beat.step}, {now}, at micro-batch {beat.micro_batch} of {first.micro_batch}"
    return f"{here} behind at step {beat.step}, {now} where others are in {_phase(first.phase)}"


def _where(beat: Beat) -> str:
    return f"at step {beat.step}, in {_phase(beat.phase)}"


def _at(beat: Beat) -> str:
    return f"in step {beat.step}" if beat.phase == "step" else f"in {_phase(beat.phase)} at step {beat.step}"


def _phase(name: str) -> str:
    return WORDS.get(name, name)


def _alike(beats: Sequence[Beat], key: Callable[[Beat], object]) -> list[list[Beat]]:
    groups = defaultdict(list)
    for beat in sorted(beats, key=lambda beat: beat.rank):
        groups[key(beat)].append(beat)
    return list(groups.values())


def _ranks(ranks: Iterable[int]) -> str:
    """Such as "rank 3", "ranks 0, 2, 8-15"."""
    ordered = sorted(ranks)
    runs = [[rank for _, rank in group] for _, group in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])]
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ordered) > 1)} {', '.join(parts)}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
