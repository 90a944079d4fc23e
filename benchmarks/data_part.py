"""What one part of `benchmarks/data.py` has found."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import Criterion


@dataclass(frozen=True)
class Part:
    """A table by its name, what is promised of it, and remarks."""

    name: str
    rows: Sequence[dict[str, Any]]
    criteria: Sequence[Criterion] = ()
    notes: Sequence[str] = field(default_factory=list)
