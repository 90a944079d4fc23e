"""Does the exchange of ring attention hide behind its computation, and from which block size on?

    python benchmarks/overlap.py [--quick] [--json PATH] [--plot PATH]

Two ranks of one thread and one core each, in network namespaces of their own, joined by a link of 0.2, 0.5, 1 or
2 Gb/s (`benchmarks/namespaces.py`; Linux, root and iproute2, without which nothing is judged). Causal, zigzag, float32,
8 query heads of 64; swept are the block size, in tokens per rank, and the ratio of key/value to query heads. In each
cell three things are timed in turn, again and again, and the fastest of each counts, of the slower rank:

    compute    the ring with an exchange that moves nothing
    transfer   the same messages without the ring, which sleeps where it would compute with none under way
    step       the ring as it is

`benchmarks/overlap_model.py` says what the first two predict of the third, and where the knee lies: the block size from
which computing covers transfer. Judged are the steps, and whether knees move with link and heads as the formula says.
Times are seconds; `over` is what the overlapped part of a step took over what it should take, to be at most 1.10.
"""

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import namespaces, overlap_plot, report  # noqa: E402
from benchmarks.overlap_model import OVER_BOUND, Case, Cell, Knee, Step, exponents, knees, slope  # noqa: E402
from benchmarks.overlap_rank import DTYPE, HEAD_DIM, HEADS, Ranks  # noqa: E402

GIGABITS, KV_HEADS, BLOCKS = (0.2, 0.5, 1.0, 2.0), (8, 2), (512, 1024, 2048, 4096, 8192)
ROUNDS, SEVERAL_TURNS = 3, 2048  # blocks of at most half that many tokens have several turns a round
CELLS_BOUND, SLOPE_BOUND, SLOPE_TOLERANCE = 0.90, 1.0, 0.10
CRITERIA = (
    (f"share of steps <= {OVER_BOUND} max(compute, transfer) + what nothing hides", CELLS_BOUND),
    (f"slope of measured knees over the formula's, ± {SLOPE_TOLERANCE}", SLOPE_BOUND),
)


def main() -> int:
    parser = report.arguments(__doc__.splitlines()[0])
    report.add_plot(parser)
    arguments = parser.parse_args()
    machine = report.machine()
    plot = report.plot_path(arguments)
    try:
        namespaces.check()
        with tempfile.TemporaryDirectory() as folder, Ranks(folder) as ranks:
            cells = _measure(ranks, BLOCKS[1:-1] if arguments.quick else BLOCKS)
    except KeyboardInterrupt:
        _say("")
        return 130
    except namespaces.Unavailable as error:
        unjudged = [report.not_judged(name, bound, str(error)) for name, bound in CRITERIA]
        return report.finish(machine, [], unjudged, arguments.json)
    found = [*knees(cells, "forward"), *knees(cells, "backward")]
    if plot:
        overlap_plot.draw(cells, found, plot)
    rows = [_row(cell, step) for cell in cells for step in cell.steps()]
    notes = []
    if found:
        notes = ["knees grow as (1 / link)^{:.2f} and (key/value heads)^{:.2f}".format(*exponents(found))]
    return report.finish(
        machine, rows, _judge(rows, found), arguments.json, notes, knees=[vars(knee) for knee in found]
    )


def _judge(rows: Sequence[dict[str, Any]], found: Sequence[Knee]) -> list[report.Criterion]:
    (share_name, share_bound), (slope_name, slope_bound) = CRITERIA
    share, slope_found = sum(row["holds"] for row in rows) / len(rows), slope(found)
    criteria = [report.at_least(share_name, share, share_bound)]
    if slope_found is None:
        criteria.append(report.not_judged(slope_name, slope_bound, f"{len(found)} knees lie in the sweep"))
    else:
        holds = abs(slope_found - slope_bound) <= SLOPE_TOLERANCE
        criteria.append(report.Criterion(slope_name, round(slope_found, 4), slope_bound, holds))
    return criteria


def _measure(ranks: Ranks, blocks: Sequence[int]) -> list[Cell]:
    """All cells. Those that differ in the link only share what is computed without it.

    Everything takes turns in each of the rounds, so that a machine that is busy for a minute spoils one of them.
    """
    cases = [Case(block, HEADS, kv_heads, HEAD_DIM, DTYPE.itemsize) for kv_heads in KV_HEADS for block in blocks]
    hops, transfers, seconds = defaultdict(list), defaultdict(list), defaultdict(list)
    for number in range(1, ROUNDS + 1):
        for case in cases:
            _say(f"round {number} of {ROUNDS}: block {case.block}, heads {case.ratio_text}")
            # Short times need more turns until one of them is undisturbed.
            for _ in range(max(1, SEVERAL_TURNS // case.block)):
                shape = (case.block, case.kv_heads)
                hops[case].append(ranks.slower("compute", *shape))
                _, a1, _, b1 = _fastest_hops(hops[case])
                for gigabits in GIGABITS:
                    ranks.ask("shape", gigabits)
                    transfers[case, gigabits].append(ranks.slower("transfer", (a1, b1)))
                    seconds[case, gigabits].append(ranks.slower("step", *shape))
    _say("")
    return [
        Cell(
            case,
            gigabits,
            _fastest_hops(hops[case]),
            _fastest(transfers[case, gigabits]),
            _fastest(seconds[case, gigabits]),
        )
        for case in cases
        for gigabits in GIGABITS
    ]


def _fastest(times: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(min(each) for each in zip(*times, strict=True))


def _fastest_hops(times: Sequence[tuple[float, float, float, float]]) -> tuple[float, float, float, float]:
    """Both hops of the fastest forward, and of the fastest backward pass."""
    forward, backward = min((a[:2] for a in times), key=sum), min((b[2:] for b in times), key=sum)
    return (*forward, *backward)


def _say(text: str) -> None:
    """What is under way: on a terminal in place of the line before, which "" clears."""
    if sys.stdout.isatty():
        print(f"\r\x1b[K{text}", end="", flush=True)
    elif text:
        print(text, flush=True)


def _row(cell: Cell, step: Step) -> dict[str, Any]:
    return {
        "Gb/s": cell.gigabits,
        "kv/q heads": cell.case.ratio_text,
        "block": cell.case.block,
        "passes": step.passes,
        "compute": step.compute,
        "transfer": step.transfer,
        "predicted": step.predicted,
        "step": step.seconds,
        "over": step.over,
        "holds": step.over <= OVER_BOUND,
    }


if __name__ == "__main__":
    sys.exit(main())
