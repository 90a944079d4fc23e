"""Ring attention over two processes of one thread, against PyTorch's attention on two threads and against peers.

    python benchmarks/attention.py [--quick] [--peers [NAME ...]] [--json PATH]
    python benchmarks/attention.py --device cuda        (one rank on one GPU: benchmarks/attention_cuda.py)

One causal sequence of 8,192 tokens, 8 heads of 64, float32, on two cores on all sides: against PyTorch, the ratio of
throughputs is what distributing costs. Runs are interleaved (each side in turn, again and again) and the fastest of
each counts: a machine that is busy for a moment then disturbs all sides alike. What each side computes is held to
dense float64 attention once.

`--peers` installs other implementations of ring attention where they are missing, each into an environment of its own
under benchmarks/.peers/ (1.6 GB in all, a minute), and measures them in the same runs, at their fastest settings and
at usual ones: half a minute for each repetition.
"""

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import attention_cuda, critical_path, report  # noqa: E402
from benchmarks.attention_rank import LAYOUTS  # noqa: E402
from benchmarks.peers.environments import PEERS, Peer, install  # noqa: E402
from benchmarks.peers.processes import Side  # noqa: E402
from benchmarks.peers.worker import PASSES, RESULTS  # noqa: E402

LENGTH, HEADS, HEAD_DIM = SHAPE = 8192, 8, 64
RANKS = 2
BOTH = PASSES[1]
SDPA, ZIGZAG = "torch sdpa", "ring, zigzag"
SDPA_BOUND = 0.93  # of PyTorch's throughput, forward and backward, with zigzag
# Contiguous over zigzag: 1.5 in theory, for pairs. A kernel computes whole squares on the diagonal, as many in both
# layouts: by the times of PyTorch's calls on triangles and squares, 1.47 is left at 8,192 tokens and 1.48 at 16,384.
# Two cores at work are each a little slower than one alone, as contiguous has it half of the time. So this is judged on
# the longer sequence.
LAYOUT_BOUND, LAYOUT_LENGTH = 1.45, 16_384
ERROR_BOUND = 1e-5  # relative L2, float32 against float64
WRONG = 1e-3  # with a larger error, a peer computes something else
MINIMUM_RUNS = 3


class Measured(Protocol):
    """Something that computes attention on the problem's inputs, and in which passes it is measured."""

    passes: tuple[str, ...]

    def measure(self, passes: str, keep: bool = False) -> dict[str, float]:
        """Seconds of one run, as {"seconds": …}; with `keep`, its results stay for `results`."""
        ...

    def results(self) -> dict[str, Tensor]:
        """out, dq, dk, dv [1, S, H, D], or those that there are."""
        ...


@dataclass
class Setting:
    """Processes (`Side`) as they are asked for one of the things that they can do."""

    side: Side
    name: str
    passes: tuple[str, ...] = PASSES

    def measure(self, passes: str, keep: bool = False) -> dict[str, float]:
        return self.side.measure(self.name, passes, keep)

    def results(self) -> dict[str, Tensor]:
        return self.side.results()


class Sdpa:
    """PyTorch's attention in this process, on q, k, v, dout [1, H, S, D]: the order in which it is fastest."""

    passes = PASSES

    def __init__(self, inputs: Sequence[Tensor], dtype: torch.dtype = torch.float32):
        self.inputs = [x.to(dtype).transpose(1, 2).contiguous() for x in inputs]
        self.kept: list[Tensor] = []

    def measure(self, passes: str, keep: bool = False) -> dict[str, float]:
        q, k, v = (x.detach().requires_grad_(passes == BOTH) for x in self.inputs[:3])
        begun = time.perf_counter()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if passes == BOTH:
            out.backward(self.inputs[3])
        seconds = time.perf_counter() - begun
        if keep:
            self.kept = [x.transpose(1, 2) for x in (out.detach(), q.grad, k.grad, v.grad)]
        return {"seconds": seconds}

    def results(self) -> dict[str, Tensor]:
        return dict(zip(RESULTS, self.kept, strict=True))


def main() -> int:
    parser = report.arguments(__doc__.splitlines()[0])
    names = [peer.name for peer in PEERS]
    parser.add_argument(
        "--peers", nargs="*", choices=names, metavar="NAME", help=f"install and measure: {', '.join(names)}"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: one rank on one GPU instead")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        return attention_cuda.main(arguments)
    machine = report.machine()
    peers = [peer for peer in PEERS if arguments.peers is not None and peer.name in (arguments.peers or names)]
    try:
        for peer in peers:
            install(peer)
    except RuntimeError as error:
        parser.exit(1, f"{error}\n")
    repetitions, budget_seconds = (MINIMUM_RUNS, 80) if arguments.quick else (7, 600)
    torch.set_num_threads(RANKS)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        inputs = [torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
        _write(inputs, Path(folder, "problem"))
        sides: dict[str, Measured] = {SDPA: Sdpa(inputs), **_start(folder, peers, stack)}
        errors = _check(sides, inputs)
        runs = _measure(sides, repetitions, budget_seconds)
    rows = _rows(runs, errors)
    seconds = _layouts(MINIMUM_RUNS)
    paths, balance = critical_path.measure(MINIMUM_RUNS if arguments.quick else 5)
    bounds = [(peer, *setting) for peer in PEERS for setting in peer.settings.items() if setting[1] is not None]
    name = f"seconds of contiguous over zigzag, {RANKS} ranks, {LAYOUT_LENGTH} tokens, {BOTH}"
    layouts = report.at_least(name, seconds["contiguous"] / seconds["zigzag"], LAYOUT_BOUND)
    criteria = [*_own_criteria(rows), layouts, *(_peer_criterion(rows, errors, *bound) for bound in bounds), *balance]
    absent = [_absent_row(peer) for peer in PEERS if peer not in peers]
    notes = _notes(errors)
    longer = [{"layout": layout, "tokens": LAYOUT_LENGTH, "seconds": spent} for layout, spent in seconds.items()]
    tables = {"layouts": longer, "critical_path": paths}
    return report.finish(machine, [*rows, *absent], criteria, arguments.json, notes, **tables)


def _write(inputs: Sequence[Tensor], path: Path) -> None:
    """q, k, v, dout one after another, for the processes of all sides."""
    size = sum(x.numel() for x in inputs)
    with path.open("wb") as file:
        file.truncate(4 * size)
    torch.from_file(str(path), shared=True, size=size).copy_(torch.stack(list(inputs)).flatten())


def _start(folder: str, peers: Sequence[Peer], stack: ExitStack) -> dict[str, Measured]:
    """Our ranks and those of the peers, on the same two cores; they leave when `stack` closes."""
    here = Path(__file__).resolve().parent

    def start(name: str, python: str | Path, script: Path, processes: int) -> Side:
        return stack.enter_context(closing(Side(name, python, script, processes, RANKS, folder, SHAPE)))

    ours = start("ring", sys.executable, here / "attention_rank.py", RANKS)
    sides: dict[str, Measured] = {f"ring, {layout}": Setting(ours, layout) for layout in LAYOUTS}
    for peer in peers:
        side = start(peer.name, peer.python, here / "peers" / peer.script, peer.processes)
        sides |= {_title(peer, setting): Setting(side, setting, (BOTH,)) for setting in peer.settings}
    return sides


def _layouts(repetitions: int) -> dict[str, float]:
    """Seconds forward and backward of contiguous and zigzag over LAYOUT_LENGTH tokens, interleaved."""
    shape = (LAYOUT_LENGTH, HEADS, HEAD_DIM)
    script = Path(__file__).resolve().parent / "attention_rank.py"
    with tempfile.TemporaryDirectory() as folder:
        inputs = [torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
        _write(inputs, Path(folder, "problem"))
        with closing(Side("ring", sys.executable, script, RANKS, RANKS, folder, shape)) as ours:
            seconds = {"contiguous": float("inf"), "zigzag": float("inf")}
            for repetition in range(repetitions + 1):
                for layout in seconds:
                    spent = ours.measure(layout, BOTH)["seconds"]
                    if repetition:  # the first warms up
                        seconds[layout] = min(seconds[layout], spent)
    return seconds


def _check(sides: Mapping[str, Measured], inputs: Sequence[Tensor]) -> dict[str, dict[str, float]]:
    """Relative L2 error of out, dq, dk, dv of each side; the runs warm up, too, and do not count."""
    dense = Sdpa(inputs, torch.float64)
    dense.measure(BOTH, keep=True)
    truth = dense.results()
    errors = {}
    for title, side in sides.items():
        for passes in side.passes:
            side.measure(passes, keep=passes == BOTH)
        found = side.results()
        errors[title] = {name: float((found[name] - truth[name]).norm() / truth[name].norm()) for name in RESULTS}
    return errors


def _measure(
    sides: Mapping[str, Measured], repetitions: int, budget_seconds: float
) -> dict[tuple[str, str], list[dict[str, float]]]:
    """All runs by (title, passes). On a machine that others keep busy: fewer figures rather than late ones."""
    begun = time.monotonic()
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for repetition in range(repetitions):
        if repetition >= MINIMUM_RUNS and time.monotonic() - begun > budget_seconds:
            break
        for passes in PASSES:
            for title, side in sides.items():
                if passes in side.passes:
                    runs.setdefault((title, passes), []).append(side.measure(passes))
    return runs


def _rows(
    runs: Mapping[tuple[str, str], list[dict[str, float]]], errors: Mapping[str, dict[str, float]]
) -> list[dict[str, Any]]:
    rows = []
    for (title, passes), measured in runs.items():
        seconds = sorted(run["seconds"] for run in measured)
        fastest = min(measured, key=lambda run: run["seconds"])
        rows.append(
            {
                "attention": title,
                "passes": passes,
                "seconds": seconds[0],
                "median": seconds[len(seconds) // 2],
                "runs": len(seconds),
                "of sdpa": min(run["seconds"] for run in runs[SDPA, passes]) / seconds[0],
                "waited": fastest.get("waited"),
                "error": max(errors[title].values()) if passes == BOTH else errors[title]["out"],
            }
        )
    return rows


def _title(peer: Peer, setting: str) -> str:
    return f"{peer.title}, {setting}"


def _absent_row(peer: Peer) -> dict[str, Any]:
    nothing = dict.fromkeys(["seconds", "median", "runs", "of sdpa", "waited", "error"])
    return {"attention": f"{peer.title}, not measured: --peers", "passes": BOTH, **nothing}


def _fastest(rows: Sequence[dict[str, Any]], title: str) -> float:
    """Seconds forward and backward."""
    return next(row["seconds"] for row in rows if (row["attention"], row["passes"]) == (title, BOTH))


def _own_criteria(rows: Sequence[dict[str, Any]]) -> list[report.Criterion]:
    ours, sdpa = (_fastest(rows, title) for title in (ZIGZAG, SDPA))
    error = max(row["error"] for row in rows if row["attention"].startswith("ring,"))
    return [
        report.at_least(f"zigzag ring throughput over torch sdpa, {BOTH}", sdpa / ours, SDPA_BOUND),
        report.at_most("relative error of our rings against dense float64 attention", error, ERROR_BOUND),
    ]


def _peer_criterion(
    rows: Sequence[dict[str, Any]], errors: Mapping[str, dict[str, float]], peer: Peer, setting: str, bound: float
) -> report.Criterion:
    title = _title(peer, setting)
    name = f"zigzag ring, times faster than {title}"
    if title not in errors:
        command = f"python benchmarks/attention.py --peers {peer.name}"
        return report.not_judged(name, bound, f"`{command}` installs it into {peer.shown} and measures it")
    if not errors[title]["out"] <= WRONG:
        return report.not_judged(name, bound, f"its output differs from dense attention by {errors[title]['out']:.1e}")
    return report.at_least(name, _fastest(rows, title) / _fastest(rows, ZIGZAG), bound)


def _notes(errors: Mapping[str, dict[str, float]]) -> list[str]:
    """Where somebody's results are not those of dense attention: their seconds are what they take for these."""
    notes = []
    for title, error in errors.items():
        wrong = [f"{name} by {error[name]:.2g}" for name in RESULTS if not error[name] <= WRONG]
        if wrong:
            notes.append(f"note: {title}: differs from dense attention, relative L2: {', '.join(wrong)}")
    return notes


if __name__ == "__main__":
    sys.exit(main())
