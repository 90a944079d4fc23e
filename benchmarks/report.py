"""What benchmarks share: the machine they ran on, a table, JSON, and the exit code."""

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


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


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: ends within two minutes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write machine, rows and criteria there")
    return parser


def machine() -> dict[str, Any]:
    """What a figure is worth: processor, cores, versions, and how busy the machine is right now."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "processor": _processor(),
        "cores": len(cores()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": round(os.getloadavg()[0], 2),
    }


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
    machine: dict[str, Any], rows: Sequence[dict[str, Any]], criteria: Sequence[Criterion], path: Path | None
) -> int:
    """Print rows and criteria, write the JSON, return the exit code: 1 where a criterion does not hold."""
    where = f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}"
    print(f"{where}, load {machine['load_average']}")
    print(table(rows))
    for criterion in criteria:
        verdict = "holds" if criterion.holds else "DOES NOT HOLD"
        if criterion.holds is None:
            verdict = f"not judged: {criterion.reason}"
        print(f"{criterion.name}: {criterion.value} (bound {criterion.bound}) {verdict}")
    if path is not None:
        result = {
            "machine": machine,
            "rows": list(rows),
            "criteria": [asdict(criterion) for criterion in criteria],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(criterion.holds is False for criterion in criteria) else 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with the same keys as aligned columns: words to the left, numbers to the right."""
    if not rows:
        return ""
    head = list(rows[0])
    cells = [head] + [[_text(row[column]) for column in head] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    numeric = [isinstance(rows[0][column], int | float) for column in head]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(line, widths, numeric, strict=True)
        )
        for line in cells
    )


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
