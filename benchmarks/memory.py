"""Does peak memory grow in proportion to the tokens of a rank, and as the estimate says?

    python benchmarks/memory.py [--quick] [--full] [--json PATH] [--plot PATH]

For each recompute policy and 1, 2 (and with --full 4) ranks of a ring, two steps at each of five sequence lengths run
in processes of their own (`benchmarks/probe.py`), and the largest rank's peak is fitted with a straight line. Beside it
stands the line through the estimates of `training/memory.py` at the same lengths. float32, states sharded over the
ranks. A slope is bytes per token of the sequence, not of the rank.

What a ring keeps and one rank does not, its buffers of keys, values and their gradients, grows with the width of keys
and values: one head of 64 here, in two layers of width 4,096, where one pool serves both. Widths and blocks are such
that tokens, not weights, make the peak at every length: peaks of two moments, each linear, would make a line with a
bend.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import memory_plot, report  # noqa: E402
from benchmarks.probe import probe  # noqa: E402
from conf.compose import compose  # noqa: E402
from conf.schema import Recompute, resolve  # noqa: E402
from parallel.setting import Setting  # noqa: E402
from training.memory import planned  # noqa: E402

MODEL = [
    "model.model_dim=4096",
    "model.ffn_dim=256",
    "model.num_layers=2",
    "model.vocab_size=256",
    "model.num_heads=1",
    "model.num_kv_heads=1",
    "model.head_dim=64",
    "model.ffn_block_tokens=128",
    "model.loss_block_tokens=128",
    "train.dtype=float32",
    "parallel.kernel=sdpa",
]
LENGTHS, QUICK_LENGTHS = (2048, 3072, 4096, 6144, 8192), (1024, 1536, 2048, 3072, 4096)
RANKS, FULL_RANKS = (1, 2), (1, 2, 4)
STRAIGHT_BOUND, ESTIMATE_BOUND, RING_BOUND = 0.995, 0.10, 0.05


@dataclass(frozen=True)
class Line:
    """A straight line through points: bytes per token, bytes without any, and R²."""

    slope: float
    start: float
    straight: float

    @classmethod
    def through(cls, tokens: Sequence[int], sizes: Sequence[float]) -> "Line":
        slope, start = np.polyfit(tokens, sizes, 1)
        return cls(float(slope), float(start), float(np.corrcoef(tokens, sizes)[0, 1] ** 2))


@dataclass(frozen=True)
class Series:
    """Peaks in bytes of one policy on so many ranks, at each of `lengths`."""

    policy: str
    ranks: int
    lengths: tuple[int, ...]
    measured: tuple[int, ...]
    estimated: tuple[float, ...]

    @property
    def line(self) -> Line:
        return Line.through(self.lengths, self.measured)

    @property
    def estimate(self) -> Line:
        return Line.through(self.lengths, self.estimated)


def main() -> int:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="a ring of four ranks, too")
    report.add_plot(parser)
    arguments = parser.parse_args()
    plot = report.plot_path(arguments)
    machine = report.machine()
    lengths = QUICK_LENGTHS if arguments.quick else LENGTHS
    found = [
        measure(str(policy), ranks, lengths)
        for policy in Recompute
        for ranks in (FULL_RANKS if arguments.full else RANKS)
    ]
    if plot:
        memory_plot.draw(found, plot)
    rows = [_row(series, _alone(series, found)) for series in found]
    return report.finish(machine, rows, judge(found), arguments.json, peaks=_peaks(found))


def measure(policy: str, ranks: int, lengths: Sequence[int]) -> Series:
    """The largest rank's peak at each length, measured and estimated."""
    measured, estimated = [], []
    for length in lengths:
        overrides = [
            *MODEL,
            f"data.sequence_length={length}",
            f"train.recompute={policy}",
            f"parallel.sequence={ranks}",
        ]
        measured.append(max(probe(overrides, ranks).peak_bytes))
        estimated.append(estimate(overrides, ranks))
        print(f"{policy}, {ranks} ranks, {length} tokens: {measured[-1]:,} bytes, {estimated[-1]:,.0f} estimated")
    return Series(policy, ranks, tuple(lengths), tuple(measured), tuple(estimated))


def estimate(overrides: Sequence[str], ranks: int) -> float:
    """The largest rank's peak by the formulas, in bytes."""
    config = compose(list(overrides))
    degrees = resolve(config, ranks)
    setting = Setting(config, degrees, ranks, lambda message: None)
    return max(planned(config, degrees, setting, rank).peak_bytes for rank in range(setting.ring_size))


def judge(found: Sequence[Series]) -> list[report.Criterion]:
    criteria = []
    for series in found:
        name = f"recompute={series.policy}, {series.ranks} ranks"
        criteria.append(report.at_least(f"{name}: R² of peak over tokens", series.line.straight, STRAIGHT_BOUND))
        ratio = series.line.slope / series.estimate.slope
        criteria.append(_near(f"{name}: slope / estimate", ratio, ESTIMATE_BOUND))
        if series.ranks > 1:
            ratio = series.ranks * series.line.slope / _alone(series, found).line.slope
            criteria.append(_near(f"{name}: slope x {series.ranks} / slope of one rank", ratio, RING_BOUND))
    return criteria


def _near(name: str, ratio: float, tolerance: float) -> report.Criterion:
    """That a ratio is 1 within a tolerance."""
    return report.Criterion(f"{name}, 1 ± {tolerance}", round(ratio, 4), 1.0, abs(ratio - 1) <= tolerance)


def _alone(series: Series, found: Sequence[Series]) -> Series:
    return next(one for one in found if one.policy == series.policy and one.ranks == 1)


def _row(series: Series, alone: Series) -> dict[str, Any]:
    line, estimated = series.line, series.estimate
    off = [e / m - 1 for e, m in zip(series.estimated, series.measured, strict=True)]
    return {
        "recompute": series.policy,
        "ranks": series.ranks,
        "bytes per token": line.slope,
        "estimate": estimated.slope,
        "slope / estimate": line.slope / estimated.slope,
        "ranks x slope / one rank": series.ranks * line.slope / alone.line.slope,
        "R²": round(line.straight, 6),
        "MB without tokens": line.start / 1e6,
        "estimate MB": estimated.start / 1e6,
        "estimated peak off by": max(off, key=abs),
    }


def _peaks(found: Sequence[Series]) -> list[dict[str, Any]]:
    """Every point, a row each."""
    return [
        {
            "recompute": series.policy,
            "ranks": series.ranks,
            "tokens": tokens,
            "measured MB": measured / 1e6,
            "estimated MB": estimated / 1e6,
        }
        for series in found
        for tokens, measured, estimated in zip(series.lengths, series.measured, series.estimated, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
