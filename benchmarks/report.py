"""What benchmarks share: the machine they ran on, a table, JSON, and the exit code."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

MAX_LOAD = 0.5  # load average at start above which others are at work: timings are then only indicative


@dataclass(frozen=True)
class Criterion:
    """One promise: `value` against `bound`. `holds` is None where it cannot be judged; `reason` says why."""

    name: str
    value: float | None
    bound: float
    holds: bool | None
    reason: str = ""


def at_least(name: str, value: float, bound: float) -> Criterion:
    return Criterion(name, round(value, 4), bound, value >= bound)


def at_most(name: str, value: float, bound: float) -> Criterion:
    return Criterion(name, float(f"{value:.4g}"), bound, value <= bound)


def not_judged(name: str, bound: float, reason: str) -> Criterion:
    return Criterion(name, None, bound, None, reason)


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: ends within two minutes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write machine, rows and criteria there")
    return parser


def add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw it into this PNG; needs matplotlib")


def plot_path(arguments: argparse.Namespace) -> Path | None:
    """Where to draw, None where nobody asked or nothing can draw, which is said."""
    if arguments.plot and find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed; `pip install matplotlib` adds it", flush=True)
        return None
    return arguments.plot


def machine() -> dict[str, Any]:
    """What a figure is worth: processor, cores, versions, and how busy the machine is, said aloud where it is."""
    facts = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "processor": _processor(),
        "cores": len(cores()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": round(os.getloadavg()[0], 2),
    }
    _warn_if_busy(facts)
    return facts


def _warn_if_busy(machine: dict[str, Any]) -> None:
    if machine["load_average"] > MAX_LOAD:
        print(
            f"WARNING: load average {machine['load_average']} at start, more than {MAX_LOAD}: others use the cores, so "
            "timings are only indicative. Run it again when they are done.",
            file=sys.stderr,
            flush=True,
        )


def cores() -> list[int]:
    """The cores that this process may use, where the system tells, else all."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def finish(
    machine: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    criteria: Sequence[Criterion],
    path: Path | None,
    notes: Sequence[str] = (),
    **tables: Sequence[dict[str, Any]],
) -> int:
    """Print rows and criteria, write the JSON, return the exit code: 1 where a criterion does not hold.

    `notes` are printed below the rows; `tables` are further rows, each with a name, which is their key in the JSON.
    """
    where = f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}"
    print(f"{where}, load {machine['load_average']}")
    print(table(rows))
    for name, more in tables.items():
        print(f"\n{name.replace('_', ' ')}\n{table(more)}")
    print("".join(f"\n{note}" for note in notes))
    for criterion in criteria:
        verdict = "holds" if criterion.holds else "DOES NOT HOLD"
        if criterion.holds is None:
            verdict = f"not judged: {criterion.reason}"
        print(f"{criterion.name}: {criterion.value} (bound {criterion.bound}) {verdict}")
    _warn_if_busy(machine)
    if path is not None:
        result = {"machine": machine, "rows": list(rows), **tables, "notes": list(notes)}
        result["criteria"] = [asdict(criterion) for criterion in criteria]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(criterion.holds is False for criterion in criteria) else 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with the same keys as aligned columns: words to the left, numbers to the right, None as -."""
    if not rows:
        return ""
    head = list(rows[0])
    cells = [head] + [[_text(row[column]) for column in head] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    numeric = [any(isinstance(row[column], int | float) for row in rows) for column in head]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(line, widths, numeric, strict=True)
        )
        for line in cells
    )


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
