"""How evenly the ranks of a ring are busy: counted exactly, and played on a model of an H100 cluster.

    python benchmarks/balance.py [--quick] [--json PATH]

Nothing is timed but the choice itself, so a busy machine does not matter.

* Pairs of query and key that real plans compute at each hop, against the closed forms for one causal document.
* Three packed sequences of 1M tokens (few long documents; long ones among many short ones; what the web is like), and
  one document: layout and route as `parallel.choose` picks them, Llama-3-8B, nodes of 8 GPUs and 8 network cards.
  Times are those of `parallel.wire`, for one layer, forward and backward, as multiples of the ideal: whole documents,
  evenly shared, nothing sent. `bound` is what no schedule of that layout and route could beat, the larger of the
  busiest rank's computing and the busiest card. Plans of all 32 ranks are proven by `parallel.proof`.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from model.mask import Mask  # noqa: E402
from parallel.choose import choose  # noqa: E402
from parallel.cost import Rates, Shape  # noqa: E402
from parallel.proof import prove  # noqa: E402
from parallel.schedule import BUFFER_ROWS, HOP, lay_out, pairs, plan, tile_rows  # noqa: E402
from parallel.wire import Network  # noqa: E402
from parallel.work import work  # noqa: E402

LENGTH = 1 << 20
SHAPE = Shape(num_heads=32, num_kv_heads=8, head_dim=128)
RATES = Rates(forward_flops=600e12, backward_flops=550e12)
NETWORK = Network(8, 8, nic_bytes_per_second=45e9, link_bytes_per_second=370e9, latency_seconds=10e-6)
MAX_BLOCKS = 8  # buffers, in blocks of one rank
SQUARE = 128  # of a kernel
BALANCE = {("long", 32): 1.10, ("mixed", 32): 1.10, ("long", 64): 1.25, ("mixed", 64): 1.25}
ZIGZAG_NEEDS, CARD_SHARE = 1.9, 0.5


def main() -> int:
    arguments = report.arguments(__doc__.splitlines()[0]).parse_args()
    machine = report.machine()
    counted = [count(ranks) for ranks in (2, 4, 8)]
    different = sum(row["differences"] for row in counted)
    criteria = [report.at_most("hops whose pairs differ from the closed forms", different, 0)]
    rows, notes = [], []
    for name, documents in mixes().items():
        for ranks in (32, 64, 256):
            row, why = judge(name, documents, ranks, prove_plans=ranks == 32 or (ranks == 64 and not arguments.quick))
            rows.append(row)
            notes.append(f"{name}, R={ranks}: {why}")
            if limit := BALANCE.get((name, ranks)):
                criteria.append(report.at_most(f"{name}, R={ranks}: time over ideal", row["time"], limit))
                needs = f"{name}, R={ranks}: time of a zigzag relay over ideal"
                criteria.append(report.at_least(needs, row["zigzag relay"], ZIGZAG_NEEDS))
            if name == "one":
                criteria.append(report.at_most(f"one, R={ranks}: busiest card over compute", row["card"], CARD_SHARE))
            criteria.append(report.at_most(f"{name}, R={ranks}: buffers, in blocks", row["buffers"], MAX_BLOCKS))
    return report.finish(machine, rows, criteria, arguments.json, notes, pairs_of_one_causal_document=counted)


def count(ranks: int) -> dict[str, Any]:
    """Pairs of contiguous and of zigzag at each hop of each rank, and the slowest ranks' together."""
    c = LENGTH // ranks
    diagonal = c * (c + 1) // 2
    closed = {
        "contiguous": lambda rank, hop: c * c if rank >= hop else 0,
        "zigzag": lambda rank, hop: c * c // 2,
    }
    row: dict[str, Any] = {"ranks": ranks, "differences": 0}
    for layout, pairs_at in closed.items():
        work_by_hop = []
        for rank in range(ranks):
            tiles = tile_rows(plan(layout, Mask(), [(LENGTH,)], LENGTH, LENGTH, ranks, rank))
            hops = [int(pairs(tiles[tiles[:, HOP] == hop]).sum()) for hop in range(ranks)]
            want = [diagonal] + [pairs_at(rank, hop) for hop in range(1, ranks)]
            row["differences"] += sum(a != b for a, b in zip(hops, want, strict=True))
            work_by_hop.append(hops)
        row[layout] = sum(map(max, zip(*work_by_hop, strict=True)))
    row["ratio"] = row["contiguous"] / row["zigzag"]
    row["2 - 1/R"] = 2 - 1 / ranks
    row["differences"] += row["contiguous"] * (LENGTH + 1) != row["zigzag"] * (c + 1 + 2 * (ranks - 1) * c)
    return row


def mixes() -> dict[str, list[tuple[int, ...]]]:
    """Document lengths of one sequence of LENGTH tokens each; the last document is cut where the sequence ends."""
    random = np.random.default_rng(0)
    between = lambda low, high: np.exp(random.uniform(np.log(low), np.log(high)))  # noqa: E731
    return {
        "long": _fill(lambda: between(1 << 16, 1 << 19)),
        "mixed": _fill(lambda: between(1 << 16, 1 << 18) if random.random() < 0.05 else random.lognormal(8.3, 1.2)),
        "web": _fill(lambda: random.lognormal(5.8, 1.5)),
        "one": [(LENGTH,)],
    }


def _fill(draw: Callable[[], float]) -> list[tuple[int, ...]]:
    lengths: list[int] = []
    while (left := LENGTH - sum(lengths)) > 0:
        lengths.append(min(left, max(1, int(draw()))))
    return [tuple(lengths)]


def judge(name: str, documents: list[tuple[int, ...]], ranks: int, prove_plans: bool) -> tuple[dict[str, Any], str]:
    """A row of the table, times as multiples of the ideal, and why this was chosen."""
    given = (documents, LENGTH, LENGTH, ranks, Mask(), SHAPE, RATES, NETWORK, MAX_BLOCKS)
    begun = time.perf_counter()
    choice = choose(*given, granularity=SQUARE)
    seconds = time.perf_counter() - begun
    zigzag = choose(*given, granularity=SQUARE, layout="zigzag", route="relay")
    ideal, rows = choice.ideal_seconds, choice.buffer_rows
    total = work(choice.layout, lay_out(documents, LENGTH), Mask(), SQUARE).sum(axis=1)
    busiest = total.max() * SHAPE.num_heads * SHAPE.head_dim * (4 / RATES.forward_flops + 10 / RATES.backward_flops)
    bound = max(busiest, choice.busiest_nic_seconds)
    if prove_plans:
        shared = (choice.layout, Mask(), documents, LENGTH, LENGTH, ranks)
        plans = [plan(*shared, rank, choice.route) for rank in range(ranks)]
        prove(plans)
        if choice.route.name != "gather":
            rows = max(int(table[0, BUFFER_ROWS]) for table in plans)
    row = {
        "documents": name,
        "number": len(documents[0]),
        "longest": max(documents[0]),
        "ranks": ranks,
        "ideal ms": 1e3 * ideal,
        "time": choice.seconds / ideal,
        "bound": bound / ideal,
        "time/bound": choice.seconds / bound,
        "card": choice.busiest_nic_seconds / ideal,
        "zigzag relay": zigzag.seconds / ideal,
        "buffers": rows / choice.layout.local_rows,
        "proven": "yes" if prove_plans else "-",
        "chosen in s": seconds,
    }
    return row, choice.why


if __name__ == "__main__":
    sys.exit(main())
