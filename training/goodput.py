"""What a run's time went into. No torch here.

    python -m training.goodput RUN_FOLDER

Goodput is the share of a run's time, from its first start to its last sign of life, in which steps were made that
stayed.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from training.metrics_files import rows
from training.save_clock import RANK_HOURS, RESTART_SECONDS, duration, expected

CAUSES = ("useful", "start", "lost steps", "down", "save", "validation", "data wait", "skipped", "other")
FEWEST_SAVES = 3  # of which a mean says what one costs


@dataclass
class Life:
    """From one start of a run to the next: unix seconds, steps, and seconds by cause."""

    began: float
    step: int  # after which it started
    last_step: int
    reason: str  # of its end; "" where it ended without a word, or has not ended
    saves: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Goodput:
    """What the time of a run went into, so far."""

    lives: list[Life]

    @property
    def saves(self) -> int:
        return sum(life.saves for life in self.lives)

    @property
    def seconds(self) -> dict[str, float]:
        """By cause, of all lives."""
        return {cause: sum(life.seconds[cause] for life in self.lives) for cause in CAUSES}

    @property
    def wall_seconds(self) -> float:
        """From the first start to the last sign of life."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Useful seconds of all; 0 where there are none."""
        return self.seconds["useful"] / self.wall_seconds if self.wall_seconds > 0 else 0.0

    def expected(self, mtbf_seconds: float) -> float | None:
        """The share that Daly's model gives for saves, restarts and intervals as they were.

        None where there were too few saves. A restart is from a life's last sign to the first step of the next;
        `RESTART_SECONDS` where there was none.
        """
        seconds = self.seconds
        if self.saves < FEWEST_SAVES or seconds["useful"] <= 0:
            return None
        restarts = [this.seconds["down"] + after.seconds["start"] for this, after in itertools.pairwise(self.lives)]
        restart = statistics.mean(restarts) if restarts else RESTART_SECONDS
        return expected(seconds["save"] / self.saves, seconds["useful"] / self.saves, mtbf_seconds, restart)


_SPENT = ("step", "save", "validation", "data_wait")


class _Step(NamedTuple):
    """What a row says of time; `lost` where it was computed again later."""

    time: float
    step: int
    seconds: float
    save: float
    validation: float
    wait: float
    skipped: bool
    lost: bool


def measured(folder: Path) -> Goodput:
    """What the run in `folder` has spent its time on: by starts.jsonl, metrics.jsonl and what was cut from it.

    A life that was killed ends with its last step: what came after it counts as down. A step that a kill left both in
    metrics.jsonl and in what was cut from it counts once, as lost.
    """
    events = [event for event in rows(folder / "starts.jsonl") if _number(event, "time")]
    kept, lost = [folder / "metrics.jsonl"], folder.glob("metrics.before-step-*.jsonl")
    found = {}
    for paths, is_lost in ((kept, False), (lost, True)):
        found.update({(step.time, step.step): step for path in paths for step in _steps(path, is_lost)})
    steps = sorted(found.values())
    starts = [at for at, event in enumerate(events) if event.get("event") == "start"]
    lives = []
    for begin, stop in itertools.pairwise([*starts, len(events)]):
        start, signs = events[begin], events[begin:stop]  # in the file's order: clocks of nodes differ
        following = events[stop] if stop < len(events) else None
        end = following["time"] if following else math.inf
        first, past = (bisect_left(steps, (moment,)) for moment in (start["time"], end))
        life, last = _life(start, signs, steps[first:past])
        life.seconds["down"] = max(0.0, end - last) if following else 0.0
        lives.append(life)
    return Goodput(lives)


def _steps(path: Path, lost: bool) -> Iterator[_Step]:
    for row in rows(path):
        if not (at := _number(row, "time")):
            continue
        number = int(_number(row, "step"))
        seconds, save, validation, wait = (_number(row, f"{what}_seconds") for what in _SPENT)
        if validated := _number(row, "validated"):  # by the next start
            yield _Step(validated, number, 0.0, 0.0, validation, 0.0, False, lost)
            validation = 0.0
        yield _Step(at, number, seconds, save, validation, wait, bool(row.get("skipped")), lost)


def _life(start: dict[str, Any], signs: list[dict[str, Any]], steps: list[_Step]) -> tuple[Life, float]:
    """What is known of a start until the next one, and the time of its last sign."""
    began, seconds = start["time"], dict.fromkeys(CAUSES, 0.0)
    for step in steps:
        seconds["save"] += step.save  # of one that came before this step, which it does not share the fate of
        if step.lost:
            seconds["lost steps"] += step.seconds + step.validation
            continue
        seconds["validation"] += step.validation
        if step.skipped:
            seconds["skipped"] += step.seconds
        else:
            wait = min(step.seconds, step.wait)
            seconds["useful"] += step.seconds - wait
            seconds["data wait"] += wait
    ended = next((event for event in signs if event.get("event") == "end"), {})
    last_save = _number(ended, "save_seconds")
    seconds["save"] += last_save
    last = max([event["time"] for event in signs] + [step.time for step in steps])
    seconds["start"] = last - began
    if steps:
        first = steps[0]  # whose time is when all of its row had been done
        seconds["start"] = max(0.0, first.time - first.seconds - first.save - first.validation - began)
    seconds["other"] = max(0.0, last - began - sum(seconds.values()))
    after = int(_number(start, "step"))
    done = max((step.step for step in steps), default=after)
    saves = sum(step.save > 0 for step in steps) + (last_save > 0)
    return Life(began, after, done, str(ended.get("reason", "")), saves, seconds), last


def _number(row: dict[str, Any], key: str) -> float:
    value = row.get(key)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def sentence(goodput: Goodput, expected: float | None = None) -> str:
    """One line for the log: "goodput 93.1 % of 1h02m: start 2.1 %, lost steps 1.4 %; saves and failures alone would
    leave 98.2 %"."""
    wall = goodput.wall_seconds or 1.0
    losses = sorted(((spent, cause) for cause, spent in goodput.seconds.items() if cause != "useful"), reverse=True)
    parts = ", ".join(f"{cause} {100 * spent / wall:.1f} %" for spent, cause in losses if spent >= 0.0005 * wall)
    text = f"goodput {100 * goodput.share:.1f} % of {duration(goodput.wall_seconds)}" + (f": {parts}" if parts else "")
    return text if expected is None else f"{text}; saves and failures alone would leave {100 * expected:.1f} %"


def table(goodput: Goodput) -> str:
    """By start and by cause, and all together."""
    width = max(map(len, CAUSES))
    titles = " ".join(cause.rjust(width) for cause in CAUSES)
    lines = [f"{'start':19}  {'steps':>15} {titles}  end"]
    for life in goodput.lives:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(life.began))
        cells = " ".join(f"{life.seconds[cause]:{width},.1f}" for cause in CAUSES)
        lines.append(f"{when}  {f'{life.step}-{life.last_step}':>15} {cells}  {life.reason or '?'}")
    seconds, wall = goodput.seconds, goodput.wall_seconds or 1.0
    lines.append(f"{'seconds':19}  {'':15} " + " ".join(f"{seconds[cause]:{width},.1f}" for cause in CAUSES))
    lines.append(
        f"{'share':19}  {'':15} " + " ".join(f"{100 * seconds[cause] / wall:{width - 2}.1f} %" for cause in CAUSES)
    )
    return "\n".join(lines)


def _mtbf_of(folder: Path) -> float | None:
    """By the newest checkpoint's manifest: ranks and run.mtbf_hours are there; None where there is none to read."""
    for path in sorted(folder.glob("checkpoints/step_*/manifest.json"), reverse=True):
        try:
            manifest = json.loads(path.read_text())
            hours = manifest["config"]["run"].get("mtbf_hours")
            return 3600.0 * (RANK_HOURS / manifest["layout"]["ranks"] if hours is None else hours)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
            continue
    return None


def main(arguments: list[str] | None = None) -> int:
    """The command; 0, or 3 for wrong usage and where the folder is no run's."""
    parser = argparse.ArgumentParser(
        prog="python -m training.goodput",
        description="What a run's time went into: seconds by cause and by start, and the share that made steps.",
    )
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="such as runs/laptop")
    parser.error = lambda message: parser.exit(3, f"{message}: see {parser.prog} --help\n")  # type: ignore
    folder = parser.parse_args(arguments).folder
    goodput = measured(folder)
    if not goodput.lives:
        print(
            f"{folder} has no starts.jsonl with a start in it: name the folder of a run, such as runs/laptop",
            file=sys.stderr,
        )
        return 3
    mtbf = _mtbf_of(folder)
    print(table(goodput))
    print(sentence(goodput, None if mtbf is None else goodput.expected(mtbf)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
