"""Whether a resumed run goes on as it was: its first losses beside those recorded before. No torch here.

A step that is computed again has the same weights, documents and random state, so its loss is the same up to what other
ranks or kernels round. Steps that nobody recorded have losses near those before them, unless weights, optimizer or
data are not what they were.
"""

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

# Largest relative difference that is rounding: of other layouts, kernels, machines.
ROUNDING = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-3}
AGAIN = 10  # steps after the resume that are compared where they were recorded before
NEW = 5  # and where they were not: whose median is held against that of as many before the resume
TOO_FAR = 4.0  # standard deviations of the difference between neighbours, as their median tells it: spikes are in none
LEAST_RISE = 0.2  # of the loss: what is not restored costs more, and the next long document often this
HELD_OUT = ("validation.", "data.validation")  # keys that no step's loss depends on


class Continuity:
    """Compares the first steps after a resume; give it each row once, in order.

    Args:
        before: rows of steps after the checkpoint, as recorded before it was resumed; of a step's rows the last counts.
        history: the last rows up to the checkpoint, some 50.
        dtype: of compute.
        warnings: sentences on options changed since, each with its key and "=" in front: losses may differ for them.
    """

    def __init__(
        self,
        before: Iterable[dict[str, Any]],
        history: Iterable[dict[str, Any]],
        dtype: str,
        warnings: Sequence[str] = (),
    ):
        self.dtype, self.reason = dtype, _reason(warnings)
        self.before = {row["step"]: _loss(row) for row in before if isinstance(row.get("step"), int)}
        self.history = [loss for loss in map(_loss, history) if loss is not None]
        self.new: list[tuple[int, float]] = []  # steps that nobody recorded, and their losses
        self.seen = self.compared = 0
        self.first: int | None = None  # step that drifts
        self.worst = (0.0, "", 0)  # difference, the sentence on it, its step
        self.ended = False

    def compare(self, row: dict[str, Any]) -> str | None:
        """What there is to say after this step's row, if anything."""
        step, loss = row["step"], _loss(row)
        self.seen += 1
        if self.ended or self.seen > AGAIN:
            return None
        if step in self.before:
            return self._again(step, loss)
        if self.compared:
            return self._summary()  # the records have a gap
        self.new.append((step, math.inf if loss is None else loss))
        return self._new() if len(self.new) == NEW else None

    def _again(self, step: int, loss: float | None) -> str | None:
        then, said = self.before[step], None
        difference = _apart(loss, then)
        apart = f" ({100 * difference:.2g} % apart)" if difference < math.inf else ""
        text = f"loss of step {step} is {_shown(loss)}, before the resume it was {_shown(then)}{apart}"
        self.compared += 1
        if difference > self.worst[0]:
            self.worst = (difference, text, step)
        if difference > ROUNDING[self.dtype] and self.first is None:
            self.first = step
            accusing = f"more than {self.dtype} rounds: weights, optimizer or data are not what they were"
            said = f"{text}, {self.reason}" if self.reason else f"warning: {text}, {accusing}"
        if self.seen == AGAIN or step + 1 not in self.before:
            said = "\n".join(filter(None, [said, self._summary()]))
        return said or None

    def _summary(self) -> str | None:
        self.ended = True
        difference, text, step = self.worst
        if self.first is None:
            many = "1 step" if self.compared == 1 else f"{self.compared} steps"
            within = f", within what {self.dtype} rounds" if difference else ""
            return f"continues as recorded ({many} compared, largest difference {100 * difference:.2g} %{within})"
        mark = "" if self.reason else "warning: "
        return None if step == self.first else f"{mark}{text}: the most of {self.compared} steps"

    def _new(self) -> str | None:
        """Medians, so that neither a spike nor a heavy tail is one: three of the five must be too high."""
        self.ended = True
        if len(self.history) < 2 * NEW:
            return None
        medians = [statistics.median(self.history[at : at + NEW]) for at in range(len(self.history) - NEW + 1)]
        rises = [after - this for this, after in zip(medians, medians[NEW:], strict=False)]
        changes = [abs(after - this) for this, after in itertools.pairwise(self.history)]
        spread = statistics.median(changes) / 0.6745  # as of a normal distribution
        level, now = medians[-1], statistics.median(loss for _, loss in self.new)
        if now - level <= max(TOO_FAR * spread, LEAST_RISE * abs(level), *rises):
            return None
        first, last = self.new[0][0], self.new[-1][0]
        text = f"losses of steps {first}-{last} have the median {_shown(now)}, those before the resume {_shown(level)}"
        if self.reason:
            return f"{text}, {self.reason}"
        return f"warning: {text}: weights, optimizer or data may not be what they were"


def _reason(warnings: Sequence[str]) -> str:
    """ "as train.steps was changed", or "" where nothing was that a loss depends on."""
    found = [re.match(r"([a-z_]+(?:\.[a-z0-9_]+)*)=", warning) for warning in warnings]
    keys = [match[1] for match in found if match and not match[1].startswith(HELD_OUT)]
    others = [warning.partition(":")[0] for match, warning in zip(found, warnings, strict=True) if not match]
    changed = [f"{' and '.join(keys)} {'was' if len(keys) == 1 else 'were'} changed"] if keys else []
    return f"as {'; '.join(changed + others)}" if keys or others else ""


def _loss(row: dict[str, Any]) -> float | None:
    """None where it is not a number, which files have as null."""
    loss = row.get("loss")
    return float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None


def _apart(now: float | None, then: float | None) -> float:
    """Relative difference; infinite where only one of the two is a number."""
    if now is None or then is None:
        return 0.0 if now is then else math.inf
    return abs(now - then) / max(abs(then), 1e-30) if now != then else 0.0


def _shown(loss: float | None) -> str:
    return "no number" if loss is None or loss == math.inf else f"{loss:.6g}"
