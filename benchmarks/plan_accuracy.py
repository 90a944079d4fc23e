"""Does the planner say what happens? Memory and seconds of real steps beside what was predicted for them.

    python benchmarks/plan_accuracy.py [--quick] [--only WORD] [--memory] [--json PATH]

Configurations of all kinds (`benchmarks/plan_cases.py`) run for real, in processes of one thread each:

* memory: peaks of two steps above what a process holds before it trains, of the rank that needs most
  (`benchmarks/probe.py`), beside `training.memory`; to be within 10 %.
* seconds: the fastest of two steps after the first, beside `training.timing`, to be within 25 %, once the rates of this
  machine are measured in the same run: by as many ranks at once as the configuration has, in its dtype
  (`benchmarks/calibrate.py`). Where there are more ranks than cores, seconds are not judged: they share cores then,
  which no planner reckons with.

A quarter of an hour on two quiet cores. Memory repeats on a busy machine, seconds do not: --memory leaves them out.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from benchmarks.plan_cases import CASES, HEAD_DIM, QUICK, Case  # noqa: E402
from benchmarks.probe import OWN_THREADS, Probe, probe  # noqa: E402
from conf.compose import compose  # noqa: E402
from conf.schema import Dtype, TrainConfig, resolve  # noqa: E402
from parallel.setting import Setting  # noqa: E402
from training.memory import Memory, memory  # noqa: E402
from training.timing import Timing, timing  # noqa: E402

MEMORY_BOUND, SECONDS_BOUND = 0.10, 0.25  # |predicted / measured - 1|
LEAST_CASES = 20
LEAST_PEAK = 150e6  # bytes: below, what a process takes by chance would count
MB = 1e6
STEPS = 3


def main() -> int:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="configurations with this word in their name")
    parser.add_argument("--memory", action="store_true", help="leave out seconds, and measuring rates")
    arguments = parser.parse_args()
    machine = report.machine()
    cases = [case for case in (QUICK if arguments.quick else CASES) if arguments.only in case.name]
    if not cases:
        parser.exit(3, f"no configuration has {arguments.only!r} in its name: {', '.join(c.name for c in CASES)}\n")
    rows, memories, seconds, failures = [], [], [], []
    try:
        for number, case in enumerate(cases, 1):
            print(f"{number} of {len(cases)}: {case.name}", flush=True)
            try:
                row, held, timed = _compare(case, arguments)
            except (ValueError, RuntimeError, TimeoutError) as error:
                failures.append(f"{case.name} failed: {error}")
                print(f"  {failures[-1]}", flush=True)
                continue
            rows.append(row)
            memories.append(_by_cause(case, held.causes, MB) | {"moment": held.moment})
            exposed = {name: cause.exposed_seconds for name, cause in timed.causes.items()}
            seconds.append(_by_cause(case, exposed, 1.0))
    except KeyboardInterrupt:
        return 130
    tables = {"memory_by_cause_in_MB": _filled(memories)}
    if not arguments.memory:
        tables["seconds_by_cause"] = _filled(seconds)
    criteria = _judge(rows, len(cases), failures, arguments.quick or bool(arguments.only))
    rates = [{"ranks and dtype": str(key), **found} for key, found in _RATES.items()]
    return report.finish(machine | {"rates": rates}, rows, criteria, arguments.json, failures, **tables)


def _compare(case: Case, arguments: Namespace) -> tuple[dict[str, Any], Memory, Timing]:
    """Run and predict one configuration, with rates that are measured before where nobody has yet."""
    cores = len(report.cores())
    overrides = list(case.overrides)
    if not arguments.memory:
        overrides = [*rates(min(case.ranks, cores), compose(overrides).train.dtype, arguments.quick), *overrides]
    held, timed = predict(overrides, case.ranks, case.documents)
    found = probe(overrides, case.ranks, documents=case.documents)
    fastest = None
    if case.ranks <= cores and not arguments.memory:
        fastest = min(_run_for_time(overrides, case).step_seconds[1:])
    row = {
        "configuration": case.name,
        "ranks": case.ranks,
        "peak MB": max(found.peak_bytes) / MB,
        "predicted MB": held.peak_bytes / MB,
        "memory ratio": held.peak_bytes / max(found.peak_bytes),
        "step s": fastest,
        "predicted s": None if arguments.memory else timed.step_seconds,
        "seconds ratio": None if fastest is None else timed.step_seconds / fastest,
    }
    print("  " + ", ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float)), flush=True)
    return row, held, timed


def _run_for_time(overrides: Sequence[str], case: Case) -> Probe:
    # A malloc that hands every block back at once makes fresh pages dear, which memory repeats with and time does not.
    return probe(overrides, case.ranks, steps=STEPS, documents=case.documents, tight_malloc=False)


def predict(overrides: Sequence[str], ranks: int, lengths: Sequence[int] | None = None) -> tuple[Memory, Timing]:
    """What the planner says of the rank that needs most memory, and of the step."""
    config: TrainConfig = compose(list(overrides))
    degrees = resolve(config, ranks)
    setting = Setting(config, degrees, ranks, say=lambda line: None)
    documents = (tuple(lengths or (setting.length,)),) * config.train.micro_batch_size
    of_ranks = [memory(config, degrees, setting.plans(documents, rank)) for rank in range(setting.ring_size)]
    return max(of_ranks, key=lambda one: one.peak_bytes), timing(config, degrees, setting, documents)


_RATES: dict[tuple[int, str], dict[str, Any]] = {}


@cache
def rates(ranks: int, dtype: Dtype, quick: bool) -> tuple[str, ...]:
    """Overrides with what this machine reaches while `ranks` of its processes compute in `dtype` at once."""
    print(f"  measuring rates: {ranks} at once, {dtype}", flush=True)
    script = Path(__file__).with_name("calibrate.py")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rates.json")
        options = [f"--ranks={ranks}", f"--dtype={dtype}", f"--head-dim={HEAD_DIM}", f"--json={path}"]
        command = [sys.executable, str(script), *options, *(["--quick"] if quick else [])]
        environment = os.environ | OWN_THREADS | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} left with exit code {done.returncode}: {done.stderr[-2000:]}")
        found = json.loads(path.read_text())["machine"]["rates"]
    measured = {key: value for key, value in found.items() if value is not None}
    _RATES[ranks, str(dtype)] = measured
    return tuple(f"cluster.{key}={value}" for key, value in measured.items())


def _by_cause(case: Case, causes: dict[str, float], unit: float) -> dict[str, Any]:
    return {"configuration": case.name} | {name: value / unit for name, value in causes.items()}


def _filled(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All with the same keys, words last: - where a configuration has no such cause."""
    names = sorted(dict.fromkeys(name for row in rows for name in row), key=lambda name: name == "moment")
    return [{name: row.get(name) for name in names} for row in rows]


def _judge(rows: Sequence[dict[str, Any]], asked: int, failures: Sequence[str], part: bool) -> list[report.Criterion]:
    several = f"configurations whose predicted peak is within {MEMORY_BOUND:.0%} of the measured one"
    within = sum(abs(row["memory ratio"] - 1) <= MEMORY_BOUND for row in rows)
    criteria = [
        report.at_most("configurations that failed", len(failures), 0),
        report.at_least(several, within, asked if part else max(asked, LEAST_CASES)),
    ]
    if rows:
        worst = max(abs(row["memory ratio"] - 1) for row in rows)
        criteria.append(report.at_most("predicted peak memory over measured, less 1, the most", worst, MEMORY_BOUND))
        least = min(row["peak MB"] for row in rows)
        criteria.append(report.at_least("least measured peak, MB", least, LEAST_PEAK / MB))
    name = "predicted seconds of a step over measured, less 1, the most"
    timed = [abs(row["seconds ratio"] - 1) for row in rows if row["seconds ratio"] is not None]
    if timed:
        criteria.append(report.at_most(f"{name} of {len(timed)}", max(timed), SECONDS_BOUND))
    else:
        reason = f"no configuration with as few ranks as cores ({len(report.cores())}) was run for them"
        criteria.append(report.not_judged(name, SECONDS_BOUND, reason))
    return criteria


if __name__ == "__main__":
    sys.exit(main())
