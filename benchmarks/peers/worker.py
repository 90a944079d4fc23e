"""The loop of a process that is measured: ours and those of the peers wait for a line, measure, answer with a line.

Only the standard library here: each peer runs in an environment of its own, without what this checkout needs.
Requests and answers are JSON. A process that is not asked sleeps, so each side has the cores to itself in its turn.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PASSES = ("forward", "forward+backward")
RESULTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Task:
    """What the parent tells a process when it starts it.

    Attributes:
        folder: holds `problem`, float32 [4, S, H, D] with q, k, v, dout, and `NAME.answer`, float32 [4, S, H, D] with
            room for out, dq, dk, dv in the order of the tokens; both without a header.
        name: whose process this is.
        rank, ranks: which of the processes of this side.
        cores: the cores that it may use.
        length, heads, head_dim: S, H and D, one causal sequence.
    """

    folder: str
    name: str
    rank: int
    ranks: int
    cores: list[int]
    length: int
    heads: int
    head_dim: int

    @property
    def problem(self) -> Path:
        return Path(self.folder, "problem")

    @property
    def answer(self) -> Path:
        return Path(self.folder, f"{self.name}.answer")

    @property
    def rendezvous(self) -> str:
        """Where processes of one side meet; a file, so that no port can be taken."""
        return f"file://{self.folder}/{self.name}.rendezvous"


@dataclass(frozen=True)
class Request:
    """Measure once: with which setting, `passes` of PASSES, and whether to write the results to the answer file."""

    setting: str
    passes: str
    keep: bool

    @property
    def backward(self) -> bool:
        return self.passes == PASSES[1]


def serve(start: Callable[[Task], Callable[[Request], dict[str, float]]]) -> None:
    """Answer requests until standard input ends. `start` makes ready; what it returns measures: {"seconds": …}.

    Whatever libraries print goes to standard error, which the parent shows where a process fails.
    """
    task = Task(**json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, task.cores)
    measure = start(task)
    for line in sys.stdin:
        print(json.dumps(measure(Request(**json.loads(line)))), file=answers)
