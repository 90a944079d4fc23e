"""A run struck down over and over, each time started again, and held to one that nobody struck: drill.py's engine."""

import json
import math
import random
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drill_life import POLL_SECONDS, Life
from data.writer import ShardWriter
from training.checkpoint.commands import problems
from training.checkpoint.files import finished
from training.checkpoint.index import DTYPE_BYTES

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 64
STEPS = 40
OVERRIDES = [
    "model.model_dim=32",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "model.ffn_dim=48",
    "data.name=tiny",
    f"data.vocab_size={VOCAB}",
    "data.sequence_length=96",
    "parallel.data=2",
    "parallel.sequence=2",
    f"train.steps={STEPS}",
    "train.global_batch_tokens=384",  # two micro-batches: a signal can come between them
    "train.recompute=none",
    "optimizer.learning_rate=3e-3",
    "optimizer.warmup_steps=2",
    "validation.every=8",
    "validation.sequences=16",
    "checkpoint.every=5",
    "checkpoint.keep=2",
    "checkpoint.background=true",
    "timeouts.start_seconds=120",
    "timeouts.first_step_seconds=120",
    "timeouts.step_seconds=60",
    "timeouts.save_seconds=60",
    "timeouts.validate_seconds=60",
    "run.heartbeat_seconds=0.02",  # phases are seen by them, from outside
    "logging.peak_flops=1e12",
]
LIFE_SECONDS = 300.0  # a life that takes longer, struck or not, hangs
END_SECONDS = 150.0  # from a blow to the end of all processes; longer than any timeout above
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)
TARGETS = ("one rank", "all ranks", "launcher", "everything")
MOMENTS = ("start", "load", "train", "save", "validate")
# Exit codes: dead by the signal itself, or a peer of one that is; requeue me, where it was heard.
CODES = {signal.SIGKILL: {137, 69}, signal.SIGTERM: {143, 75}, signal.SIGUSR1: {138, 75}}
MOST_TOLD = 8  # differences of one run
ALIKE = ("tokens", "loss", "gradient_norm", "learning_rate", "validation_loss")  # of every step, bit for bit

Say = Callable[[str], None]


@dataclass(frozen=True)
class Strike:
    """A signal, to whom, and while what."""

    number: signal.Signals
    target: str
    moment: str


@dataclass(frozen=True)
class Ended:
    """How a life went that was struck.

    Attributes:
        moment: what it was seen to do when it was struck.
        code: its exit code, None where it did not end by itself.
        end_seconds: from the blow to the end of all its processes.
        restart_seconds: from its start to its first step; None where it did not come to one.
        lost_steps: that it had done, and that are in no checkpoint.
    """

    strike: Strike
    moment: str
    code: int | None
    end_seconds: float
    restart_seconds: float | None
    lost_steps: int


@dataclass
class Report:
    """What all lives of all runs came to; each fault in words."""

    lives: list[Ended] = field(default_factory=list)  # those that were struck
    completed: int = 0  # runs
    differences: list[str] = field(default_factory=list)  # one entry for a completed run that has any
    damaged: list[str] = field(default_factory=list)  # checkpoints that are not whole, or went before a newer one came
    wrong_codes: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)  # processes that outlived their run

    @property
    def faults(self) -> list[str]:
        return self.differences + self.damaged + self.wrong_codes + self.hangs + self.orphans


def drill(folder: Path, kills: int, seed: int = 0, say: Say = lambda line: None) -> Report:
    """Strikes a run in `folder`, which is empty, that many times, and others after it until all blows are spent.

    Raises:
        RuntimeError: where even the run that nobody strikes does not complete.
    """
    draw, found = random.Random(seed), Report()
    left, run = strikes(kills, draw), folder / "runs" / "struck"
    write_corpus(folder / "corpora" / "tiny")
    whole, usual_seconds = undisturbed(folder)
    say(f"undisturbed: {STEPS} steps, the first after {usual_seconds:.1f} s")
    missed = 0  # in a row: the run completed before it came to what it was to be struck at
    while (left or run.exists()) and missed <= len(left):
        strike = next_strike(left, run)
        code, ended = live(folder, strike, draw, usual_seconds, found)
        if strike is not None:
            left.remove(strike)
        if strike is not None and ended is None:
            left.append(strike)
            missed += 1
        elif ended is not None:
            missed = 0
            found.lives.append(ended)
            say(f"{len(found.lives)}/{kills} {_line(ended)}")
        if code == 0:
            found.completed += 1
            if differences := compare(whole, run):
                more = f"; and {len(differences) - MOST_TOLD} more" if len(differences) > MOST_TOLD else ""
                found.differences.append("; ".join(differences[:MOST_TOLD]) + more)
            say(f"completed, {found.differences[-1] if differences else 'bit for bit as the undisturbed run'}")
            shutil.rmtree(run)
        elif ended is None:
            break  # neither struck nor completed, which has been noted: the next life would not be, either
    return found


def strikes(number: int, draw: random.Random) -> list[Strike]:
    """That many blows, in disorder: of each signal, target and moment about as many as of the others."""
    # 3, 4 and 5 have no common divisor: each of the 60 kinds of blow comes up once in 60.
    chosen = [Strike(*(choices[n % len(choices)] for choices in (SIGNALS, TARGETS, MOMENTS))) for n in range(number)]
    draw.shuffle(chosen)
    return chosen


def next_strike(left: Sequence[Strike], run: Path) -> Strike | None:
    """The blow to strike next: a run without a checkpoint has none to load. None where all are spent."""
    loads = bool(finished(run / "checkpoints"))
    return next((strike for strike in left if loads or strike.moment != "load"), next(iter(left), None))


def command(name: str, *overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *OVERRIDES, f"run.name={name}", *overrides]


def undisturbed(folder: Path) -> tuple[Path, float]:
    """The folder of a run that nobody struck, and the seconds to its first step."""
    run = folder / "runs" / "whole"
    with Life(command("whole"), folder, run) as life:
        life.wait_for("train", 1, LIFE_SECONDS)
        code, _ = life.end(LIFE_SECONDS)
        if code != 0 or life.first_row_seconds is None:
            raise RuntimeError(f"the run that nobody strikes left with exit code {code}:\n{life.said()}")
        return run, life.first_row_seconds


def live(
    folder: Path, strike: Strike | None, draw: random.Random, usual_seconds: float, found: Report
) -> tuple[int | None, Ended | None]:
    """One life of the run: its exit code, and how it went where it was struck. Faults go into `found`."""
    run = folder / "runs" / "struck"
    before = newest_step(run)
    with Life(command("struck"), folder, run) as life:
        moment = hit(life, strike, draw, usual_seconds) if strike else None
        struck = life.seconds
        code, left = life.end(END_SECONDS if moment else LIFE_SECONDS)
        end_seconds, seen = life.seconds - struck, life.see()
        about = f"{_words(strike) if moment and strike else 'not struck'}: exit code {code}"
        if code is None:
            found.hangs.append(f"{about}, left over: {'; '.join(left)}\n{life.said()}")
        else:
            found.orphans += [f"{about}: {process}" for process in left]
            if code not in {0} | (CODES[strike.number] if moment and strike else set()):
                found.wrong_codes.append(f"{about}\n{life.said()}")
    found.damaged += [f"{about}: {problem}" for problem in damages(run, before)]
    if not (moment and strike):
        return code, None
    lost = max(0, seen.step - newest_step(run))
    return code, Ended(strike, moment, code, end_seconds, life.first_row_seconds, lost)


def hit(life: Life, strike: Strike, draw: random.Random, usual_seconds: float) -> str | None:
    """Waits for the moment and strikes; what the run was seen to do then. None where it ended before."""
    nth = draw.randint(1, 8 if strike.moment == "train" else 2)
    start_seconds = 0.8 * usual_seconds  # without what goes into the first step
    # At any time of the start; else a little later than the moment begins: a step or a save takes some 0.05 s.
    delay = draw.uniform(0, start_seconds if strike.moment == "start" else 0.05)
    if not life.wait_for(strike.moment, 1 if strike.moment in ("start", "load") else nth, LIFE_SECONDS):
        return None
    while "rank" in strike.target and not life.ranks() and life.process.poll() is None:
        life.pause(POLL_SECONDS)  # there are none yet: it is the start
        delay = draw.uniform(0, max(0.0, start_seconds - life.seconds))
    life.pause(delay)
    seen, ranks = life.see(), life.ranks()
    pids = {
        "one rank": [draw.choice(ranks)] if ranks else [],
        "all ranks": ranks,
        "launcher": [life.process.pid],
        "everything": list(life.members()),
    }[strike.target]
    if not pids or life.process.poll() is not None:
        return None
    life.send(strike.number, pids)
    return seen.moment


def damages(run: Path, before: int) -> list[str]:
    """What is wrong with the checkpoints of a run whose newest one was of step `before`."""
    found = [f"{path.name}: {problem}" for path in finished(run / "checkpoints") for problem in problems(path)]
    if (newest := newest_step(run)) < before:
        found.append(f"the newest checkpoint is of step {newest}, it was of step {before}")
    return found


def newest_step(run: Path) -> int:
    """Of its newest checkpoint; 0 where there is none."""
    return max((int(path.name.removeprefix("step_")) for path in finished(run / "checkpoints")), default=0)


def compare(whole: Path, run: Path) -> list[str]:
    """In what a completed run differs from the undisturbed one: its steps, what each says, and what it saved last."""
    rows, truth = rows_of(run), rows_of(whole)
    if [row["step"] for row in rows] != list(range(1, STEPS + 1)):
        return [f"metrics.jsonl has steps {[row['step'] for row in rows]}"]
    differences = [
        f"{key} of step {row['step']} is {row.get(key)}, was {true.get(key)}"
        for row, true in zip(rows, truth, strict=True)
        for key in ALIKE
        if row.get(key) != true.get(key)
    ]
    if newest_step(run) != STEPS:
        return [*differences, f"the last checkpoint is of step {newest_step(run)}"]
    saved, true_saved = (contents(path / "checkpoints" / f"step_{STEPS:08d}") for path in (run, whole))
    names = sorted(name for name in saved.keys() | true_saved.keys() if saved.get(name) != true_saved.get(name))
    return differences + [f"{name} is saved in other bits" for name in names]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def contents(path: Path) -> dict[str, bytes]:
    """Every tensor of a checkpoint by its name: weights, AdamW's state, random states. Not read by a run's code."""
    found = {}
    for name, entry in json.loads((path / "tensors.json").read_text())["tensors"].items():
        width = DTYPE_BYTES[entry["dtype"]]
        whole = np.zeros((*entry["shape"], width), np.uint8)
        for file, position, offsets, sizes in entry["pieces"]:
            box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            count = math.prod(sizes) * width
            piece = np.fromfile(path / file, np.uint8, count, offset=position)
            whole[box] = piece.reshape(*sizes, width)
        found[name] = whole.tobytes()
    return found


def write_corpus(folder: Path) -> None:
    """Random documents of many lengths, enough for all steps and as many sequences of validation as are asked for."""
    draw = np.random.default_rng(1)
    for part, number in {"train": 300, "validation": 60}.items():
        with ShardWriter(folder / part, VOCAB, tokenizer_fingerprint="drill") as writer:
            for name in range(number):
                tokens = draw.integers(1, VOCAB, size=draw.integers(2, 400))
                writer.write(tokens)
                writer.end_document(f"document {name}", num_bytes=len(tokens))


def _words(strike: Strike) -> str:
    return f"{strike.number.name.removeprefix('SIG')} to {strike.target} at {strike.moment}"


def _line(ended: Ended) -> str:
    restart = "" if ended.restart_seconds is None else f", first step after {ended.restart_seconds:.1f} s"
    seen = "" if ended.moment == ended.strike.moment else f" (seen: {ended.moment})"
    return (
        f"{_words(ended.strike)}{seen}: exit code {ended.code} after {ended.end_seconds:.1f} s, "
        f"{ended.lost_steps} steps lost{restart}"
    )
