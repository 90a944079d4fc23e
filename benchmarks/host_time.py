"""Host time of the ring's loop: what a hop costs beside its kernel and its exchange.

    python benchmarks/host_time.py [--quick] [--json PATH]

Rank 1 of rings of 8 and 64 ranks, in one process: a fake process group takes every message and moves nothing, and a
fake kernel returns at once. What is left is what the host does: reading the plan, posting, waiting, packing, clearing
and adding, of blocks so small that their bytes cost nothing. A pass over all hops is timed and compared with its
batches alone, the same messages posted and waited for once more, in turns with it. Medians of processor time, divided
by the hops. The bound is for hops of one block: one of four does what four of those would, in less time than they take.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from model.mask import Mask  # noqa: E402
from parallel import ring, schedule  # noqa: E402
from parallel.collectives import Pending, RingExchange  # noqa: E402
from parallel.route import Route  # noqa: E402
from parallel.traffic import Buffers  # noqa: E402

RANK, LOCAL, HEADS, HEAD_DIM, LAYOUT = 1, 4, 4, 8, "zigzag"
BOUND = 60.0  # microseconds a hop
ROUTES = {
    "relay": Route(),
    "direct": Route("direct", depth=2),
    "direct via nodes of 8": Route("direct", depth=2, node_ranks=8),
    "direct, 4 blocks a hop": Route("direct", depth=2, blocks_per_hop=4),
    "gather, 4 groups of heads": Route("gather", head_groups=4),
}
NOTHING = SimpleNamespace(forward=lambda *given, into: into, backward=lambda *given, into: into)


def main() -> int:
    arguments = report.arguments(__doc__.splitlines()[0]).parse_args()
    machine = report.machine()
    torch.set_num_threads(1)
    repetitions = 40 if arguments.quick else 200
    rows = []
    for ranks in (8, 64):
        dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=ranks)
        try:
            for name, route in ROUTES.items():
                if route.node_ranks < ranks:
                    rows += _measure(name, route, ranks, repetitions)
        finally:
            dist.destroy_process_group()
    worst = max(row["more"] for row in rows if row["blocks"] == 1)
    name = "host microseconds a hop of one block more than its messages alone, median, the most of all rows"
    criterion = report.Criterion(name, round(worst, 2), BOUND, worst <= BOUND)
    return report.finish(machine, rows, [criterion], arguments.json)


class Recorded:
    """The exchange of a rank, which remembers what it was asked for."""

    def __init__(self, exchange: RingExchange):
        self.exchange, self.rank, self.size = exchange, exchange.rank, exchange.size
        self.asked: list[Callable[[], Pending]] = []

    def __getattr__(self, name: str) -> Callable[..., Pending]:
        def ask(*given: object) -> Pending:
            self.asked.append(lambda: getattr(self.exchange, name)(*given))
            return self.asked[-1]()

        return ask


def _measure(name: str, route: Route, ranks: int, repetitions: int) -> list[dict[str, object]]:
    """A row for each pass."""
    length = LOCAL * ranks
    plan = torch.from_numpy(schedule.plan(LAYOUT, Mask(), [(length,)], length, length, ranks, RANK, route))
    hops = int(plan[0, schedule.NUM_HOPS])
    q, k, v, dout = (torch.randn(1, LOCAL, HEADS, HEAD_DIM).bfloat16() for _ in range(4))
    exchange, buffers = RingExchange(dist.group.WORLD), Buffers()
    out, lse = ring.forward(q, k, v, plan, exchange, NOTHING, buffers)
    final = out.to(q.dtype)
    passes = {
        "forward": lambda by: ring.forward(q, k, v, plan, by, NOTHING, buffers),
        "backward": lambda by: ring.backward(dout, q, k, v, final, lse, plan, by, NOTHING, buffers),
    }
    rows = []
    for which, run in passes.items():
        recorded = Recorded(exchange)
        run(recorded)
        times = []
        gc.disable()  # a collection in the middle of a pass is not the ring's
        for _ in range(repetitions):
            whole = _microseconds(lambda: run(exchange))  # noqa: B023
            alone = _microseconds(lambda: [ask().wait() for ask in recorded.asked])  # noqa: B023
            times.append((whole / hops, alone / hops))
        gc.enable()
        whole, alone = (statistics.median(column) for column in zip(*times, strict=True))
        times = {"µs a hop": whole, "messages alone": alone, "more": whole - alone}
        rows.append(
            {"ranks": ranks, "route": name, "pass": which, "hops": hops, "blocks": route.blocks_per_hop} | times
        )
    return rows


def _microseconds(run: Callable[[], object]) -> float:
    """Processor time of this thread, which other processes lengthen little: nothing here waits for anything."""
    begun = time.thread_time()
    run()
    return (time.thread_time() - begun) * 1e6


if __name__ == "__main__":
    sys.exit(main())
