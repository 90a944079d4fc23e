"""Trains on one document of 1,048,576 tokens, over four processes of this machine's cores.

    python benchmarks/million.py [--quick] [--json PATH]            (or: make million)

Real runs of train.py with experiment=million (one layer, one head of 16), forward, backward and optimizer, on a corpus
that data.prepare makes of this machine's Python sources: one step at 1,048,576 tokens, three at 262,144, and three at
65,536 whose losses are held to those of one process alone. Half an hour on two quiet cores, of which the long step
takes most; --quick leaves out all but 65,536 tokens. Nothing of full length is on any rank, so memory is a quarter of
what one process would need: measured (VmHWM of each process) beside what training/memory.py says beforehand. What a
process holds before it trains is taken from a run of 4,096 tokens, less the estimate for these.
"""

import json
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report, watched  # noqa: E402
from benchmarks.probe import OWN_THREADS, TIGHT_MALLOC  # noqa: E402
from conf.compose import compose  # noqa: E402
from conf.schema import resolve  # noqa: E402
from data.packages import package_documents  # noqa: E402
from data.shards import open_tokens  # noqa: E402
from parallel.setting import Setting  # noqa: E402
from training.memory import planned  # noqa: E402
from training.metrics import duration  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "experiment=million"
FULL, QUARTER, SHORT, TINY = 1 << 20, 1 << 18, 1 << 16, 1 << 12
RANKS = 4
CORPUS_CHARS = 5 << 20  # at less than three characters a token, more than a million tokens
LOSS_BOUND = 1e-6  # relative, float32: sums in another order
MEMORY_BOUND, MINUTES_BOUND = 4.0, 40.0  # GiB of a rank; of the full step on two cores
GIB = 1 << 30
TELL_SECONDS = 30.0


@dataclass(frozen=True)
class Run:
    """What one run of train.py did; `peak_bytes` of the process that needed most, `steps` as in metrics.jsonl."""

    length: int
    ranks: int
    steps: list[dict[str, Any]]
    peak_bytes: int
    cpu_seconds: float

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    @property
    def step_seconds(self) -> float:
        return min(step["step_seconds"] for step in self.steps)


def main() -> int:
    arguments = report.arguments(__doc__.splitlines()[0]).parse_args()
    machine = report.machine()
    try:
        tokens = prepare()
        with tempfile.TemporaryDirectory(prefix="million-") as folder:
            runs = _measure(Path(folder), arguments.quick)
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, ValueError, OSError) as error:
        print(f"million.py: error: {error}", file=sys.stderr)
        return 1
    *tiny, one, four = runs[:4]
    runtime = {run.ranks: run.peak_bytes - estimate(TINY, run.ranks) for run in tiny}
    runs = [one, four, *runs[4:]]
    rows = [_row(run, runtime[run.ranks]) for run in runs]
    notes = [
        f"one document of {tokens:,} tokens; each of {RANKS} processes holds {runtime[RANKS] / GIB:.2f} GiB before",
        f"losses at {SHORT:,} tokens: " + "; ".join(f"{run.ranks} ranks {run.losses}" for run in runs[:2]),
    ]
    return report.finish(machine, rows, _judge(runs, tokens), arguments.json, notes)


def prepare() -> int:
    """Makes the corpus, where it is not there, and returns the tokens of its longest document."""
    data = compose([RECIPE]).data
    path, folder = ROOT / str(data.path), ROOT / data.root / data.name
    if not path.exists():  # what is there stays: a corpus knows the very files that it was made from
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        written = write_text(temporary)
        temporary.rename(path)
        _say(f"{path.relative_to(ROOT)}: {written:,} characters of this machine's Python sources")
    log = folder.with_name(f".{folder.name}.log")
    watched.run([sys.executable, "-m", "data.prepare", RECIPE], log, _environment(), lambda seen: None)
    _say(log.read_text().splitlines()[-1])
    longest = max(entry["tokens"] for entry in open_tokens(folder / "train").documents())
    if longest <= FULL:  # the last token has a target, too
        raise RuntimeError(
            f"the document of {folder} has {longest:,} tokens, {FULL + 1:,} are needed: remove {folder} and {path}, "
            f"or write more text there"
        )
    return longest


def write_text(path: Path) -> int:
    """The sources of `data=packages` one after another, up to CORPUS_CHARS characters; how many these are."""
    left = CORPUS_CHARS
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as text:
        for document in package_documents().documents():
            for piece in document.pieces():
                if left and piece:
                    left -= text.write(piece[:left])
    return CORPUS_CHARS - left


def _measure(folder: Path, quick: bool) -> list[Run]:
    """The runs, tiny ones first, of one rank and of all each; those before tell how long the longer ones will take."""
    runs = [_train(folder, length, ranks, steps) for length, steps in ((TINY, 1), (SHORT, 3)) for ranks in (1, RANKS)]
    if not quick:
        runs.append(_train(folder, QUARTER, RANKS, 3, _expected(runs[-1:], QUARTER)))
        runs.append(_train(folder, FULL, RANKS, 1, _expected(runs[-2:], FULL)))
    return runs


def _expected(runs: list[Run], length: int) -> float:
    """Seconds of a step of `length` tokens: attention grows with their square, the rest with their number."""
    *_, (tokens, seconds) = points = [(run.length, run.step_seconds) for run in runs]
    if len(points) == 1:
        return seconds * (length / tokens) ** 2
    (a, x), (b, y) = points
    square = max(0.0, (y / b - x / a) / (b - a))
    return length * (max(0.0, x / a - square * a) + square * length)


def _train(folder: Path, length: int, ranks: int, steps: int, step_seconds: float = 0.0) -> Run:
    """A run of train.py; says how far it is. `step_seconds`: what each step will take, as far as is known."""
    name = f"tokens-{length}-ranks-{ranks}"
    overrides = [*_overrides(length, ranks), f"train.steps={steps}", f"run.dir={folder}", f"run.name={name}"]
    what = f"{length:,} tokens over {ranks} rank{'s' * (ranks > 1)}, {steps} step{'s' * (steps > 1)}"
    about = f", about {duration(steps * step_seconds)}" if step_seconds else ""
    _say(f"{what}{about}")
    told = time.monotonic()

    def tell(seen: watched.Watched) -> None:
        nonlocal told
        if time.monotonic() - told < TELL_SECONDS or not seen.peak_bytes:
            return
        told = time.monotonic()
        peak = max(seen.peak_bytes.values()) / GIB
        _say(f"  {duration(seen.seconds)}{about and ' of' + about[1:]}, {peak:.2f} GiB at most in one process")

    command = [sys.executable, str(ROOT / "train.py"), *overrides]
    seen = watched.run(command, folder / f"{name}.txt", _environment(), tell)
    steps_done = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    peak = max(*seen.peak_bytes.values(), steps_done[-1]["memory_bytes"])
    run = Run(length, ranks, steps_done, peak, seen.cpu_seconds)
    _say(f"  loss {run.losses[-1]:.4f}, {duration(run.step_seconds)} a step, {peak / GIB:.2f} GiB")
    return run


def _overrides(length: int, ranks: int) -> list[str]:
    return [RECIPE, f"data.sequence_length={length}", f"parallel.sequence={ranks}"]


def _environment() -> dict[str, str]:
    """One thread for each rank, on the CPU; memory that is freed is given back, or peaks would not repeat."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "SLURM_"))}
    return mine | OWN_THREADS | TIGHT_MALLOC | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def estimate(length: int, ranks: int) -> float:
    """Bytes of the rank that needs most, beside what the process holds before it trains."""
    config = compose(_overrides(length, ranks))
    degrees = resolve(config, ranks)
    setting = Setting(config, degrees, ranks, say=lambda line: None)
    return max(planned(config, degrees, setting, rank).peak_bytes for rank in range(setting.ring_size))


def _row(run: Run, runtime: float) -> dict[str, Any]:
    predicted, tensors = estimate(run.length, run.ranks), run.peak_bytes - runtime
    return {
        "tokens": run.length,
        "ranks": run.ranks,
        "steps": len(run.steps),
        "loss": run.losses[-1],
        "s/step": run.step_seconds,
        "tokens/s": run.length / run.step_seconds,
        "GiB a rank": run.peak_bytes / GIB,
        "of it training": tensors / GIB,
        "estimate": predicted / GIB,
        "estimate/measured": predicted / tensors,
        "GiB in metrics.jsonl": run.steps[-1]["memory_bytes"] / GIB,
    }


def _judge(runs: list[Run], tokens: int) -> list[report.Criterion]:
    one, four, *longer = runs
    error = max(abs(a - b) / abs(a) for a, b in zip(one.losses, four.losses, strict=True))
    criteria = [
        report.at_least("tokens of the document", tokens, FULL + 1),
        report.at_most(f"relative loss of {RANKS} ranks against one, {SHORT:,} tokens", error, LOSS_BOUND),
    ]
    for run in (four, *longer):
        name = f"GiB of the rank that needs most, {run.length:,} tokens"
        criteria.append(report.at_most(name, run.peak_bytes / GIB, MEMORY_BOUND))
    name = f"minutes of a whole step at {FULL:,} tokens"
    if longer:
        assert all(math.isfinite(loss) for run in longer for loss in run.losses)
        criteria.append(report.at_most(name, longer[-1].step_seconds / 60, MINUTES_BOUND))
    else:
        criteria.append(report.not_judged(name, MINUTES_BOUND, "--quick leaves it out"))
    return criteria


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
