"""How often to save: by what a save costs, and how often machines fail. No torch here.

A save costs time, and so does what is computed again after a failure: Young and Daly say how often to save. Intervals
are everywhere from the end of one save to the begin of the next.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from conf.schema import TrainConfig

RANK_HOURS = 50_000  # between failures of one rank: 419 in 54 days on 16,384 GPUs (Source: arXiv:2407.21783 §3.3.4)
LONGEST_INTERVAL = 3600.0  # seconds between saves, however reliable the machines are said to be
RESTART_SECONDS = 300.0  # assumed in plans: until a failure is noticed, nodes are there again, and a checkpoint is read
YEAR_SECONDS = 365 * 86_400.0


def mtbf_seconds(config: TrainConfig, ranks: int) -> float:
    """Mean time between failures of a run on so many ranks: `run.mtbf_hours`, or what its ranks have together."""
    hours = config.run.mtbf_hours
    return 3600.0 * (RANK_HOURS / ranks if hours is None else hours)


def interval_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of training between the end of one save and the begin of the next that lose the least time.

    Source: Young 1974 (doi:10.1145/361147.361115), sqrt(2 δ M), with the terms of higher order of Daly 2006
    (doi:10.1016/j.future.2004.11.016, eq. 37).
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    share = save_seconds / (2 * mtbf_seconds)
    young = math.sqrt(2 * save_seconds * mtbf_seconds)
    return young * (1 + math.sqrt(share) / 3 + share / 9) - save_seconds


def expected(save_seconds: float, interval_seconds: float, mtbf_seconds: float, restart_seconds: float) -> float:
    """Useful share of the time of a long run that saves each `interval_seconds` of training.

    Failures come independently of each other, in training, saving and restarting alike.

    Source: Daly 2006 (doi:10.1016/j.future.2004.11.016, eq. 20), the complete model: an interval τ of training takes
    M e^(R/M) (e^((τ+δ)/M) − 1).
    """
    exponent = (interval_seconds + save_seconds) / mtbf_seconds
    if exponent + restart_seconds / mtbf_seconds > 500:
        return 0.0  # beyond what floats hold, and beyond hope
    return interval_seconds / (mtbf_seconds * math.exp(restart_seconds / mtbf_seconds) * math.expm1(exponent))


@dataclass(frozen=True)
class Forecast:
    """What a plan says of a run's saves; seconds, and the useful share of its time."""

    save_seconds: float  # for which training stands still
    interval_seconds: float
    mtbf_seconds: float
    expected: float


def forecast(config: TrainConfig, ranks: int, save_seconds: float, step_seconds: float) -> Forecast:
    """Saves as often as the run would make them, if `RESTART_SECONDS` go by between a failure and the next step."""
    mtbf = mtbf_seconds(config, ranks)
    if config.checkpoint.every is None:
        interval = min(interval_seconds(save_seconds, mtbf), LONGEST_INTERVAL)
    else:
        interval = step_seconds * (config.checkpoint.every or config.train.steps)
    return Forecast(save_seconds, interval, mtbf, expected(save_seconds, interval, mtbf, RESTART_SECONDS))


class Saved(Protocol):
    """What a save has cost; `training.checkpoint` keeps it."""

    step: int
    blocked_seconds: float
    write_seconds: float


class SaveClock:
    """Says on rank 0 when to save: each `checkpoint.every` steps, or as often as pays where that is null.

    Args:
        ranks: of the run.
        estimate_seconds: of the first save, as long as none was measured: bytes of the state by the rate of the disks.
        now: seconds of a monotonic clock; the first interval begins here.
    """

    def __init__(self, config: TrainConfig, ranks: int, estimate_seconds: float, now: float):
        self.every, self.mtbf = config.checkpoint.every, mtbf_seconds(config, ranks)
        self.blocked: deque[float] = deque(maxlen=5)  # seconds of the newest saves
        self.write_seconds, self.estimate, self.begun = 0.0, estimate_seconds, now
        self.step: int | None = None  # of the newest save known

    @property
    def save_seconds(self) -> float:
        """For which a save holds up training: the median of the newest ones, as the first makes its buffers too."""
        return statistics.median(self.blocked) if self.blocked else self.estimate

    @property
    def interval_seconds(self) -> float:
        """Between two saves, where the clock decides; a write in the background has ended by then."""
        paying = interval_seconds(self.save_seconds, self.mtbf)
        return max(min(paying, LONGEST_INTERVAL), self.write_seconds - self.save_seconds)

    def due(self, step: int, now: float, writing: bool = False) -> bool:
        """Whether to save after `step`. Where it says yes by the clock, that save begins now.

        `writing`: a save in the background has not ended; it is not waited for, unless `checkpoint.every` says so.
        """
        if self.every is not None:
            return self.every > 0 and step % self.every == 0
        if writing or now - self.begun < self.interval_seconds + self.save_seconds:  # it began before that save
            return False
        self.begun = now
        return True

    def saved(self, record: Saved) -> None:
        """Learns what a save has cost; once for each, however often it is told."""
        if record.step != self.step:
            self.step, self.write_seconds = record.step, record.write_seconds
            self.blocked.append(record.blocked_seconds)

    def sentence(self) -> str:
        """What decides when to save, for the log."""
        if self.every is not None:
            return _after_steps(self.every) if self.every else "after the last step only"
        interval, about = self.interval_seconds, "" if self.blocked else "about "
        often = _after_steps(1) if interval < 1 else f"each {duration(interval)}"
        # Beyond a year it says nothing of this run.
        failure = f", a failure is expected each {duration(self.mtbf)}" if self.mtbf <= YEAR_SECONDS else ""
        share = expected(self.save_seconds, max(interval, 1e-6), self.mtbf, RESTART_SECONDS)  # saves may cost nothing
        return (
            f"{often}: a save takes {about}{self.save_seconds:.3g} s{failure}; saves and failures alone leave "
            f"{100 * share:.2f} % of the time"
        )


def _after_steps(every: int) -> str:
    return f"after each {every} steps" if every > 1 else "after every step"


def duration(seconds: float) -> str:
    """2d03h, 1h05m, 2m10s or 9s."""
    whole = round(seconds)
    days, hours, minutes = whole // 86_400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"
