"""Does the error grow with the number of ranks? out, dq, dk and dv against dense float64 attention, relative L2.

bfloat16 inputs, causal and packed documents, R ranks as threads of one process through the very ring that trains. What
adds up over hops does so in float32, so the error at 64 ranks must be that at 1; with gradients in bfloat16 on the wire
(parallel.gradient_wire=bfloat16) it grows by the one rounding of each partial, and the table shows by how much.

For comparison, two rows of what a ring must not do: the running output kept in bfloat16, and the gradients of keys and
values added up in bfloat16 as they travel.

    python benchmarks/numerics.py [--quick] [--json PATH]
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from model.kernels import sdpa  # noqa: E402
from parallel.route import Route  # noqa: E402
from parallel.schedule import K_START, K_STOP  # noqa: E402
from tests import oracle  # noqa: E402
from tests.threads import ring_attention  # noqa: E402

HEADS, GROUPS, HEAD_DIM = 4, 2, 64
NAMES = ("out", "dq", "dk", "dv")
RANKS = (1, 2, 4, 8, 16, 32, 64)
DOCUMENTS = {"one document": lambda length: [(length,)], "packed": lambda length: [(length // 3, 5, length // 2)]}
WIRES = {
    "float32, relay": Route(),
    "float32, direct": Route("direct", depth=2),
    "float32, gather": Route("gather", head_groups=2),
    "bfloat16, direct": Route("direct", depth=2, narrow=True),
}
BOUNDS = {"float32": {8: 1.05, 64: 1.05}, "bfloat16": {8: 1.25, 64: 1.40}}


def main() -> int:
    arguments = report.arguments(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    machine = report.machine()
    length = 1024 if arguments.quick else 2048
    rows, criteria = [], []
    for packing, documents in DOCUMENTS.items():
        inputs = draw(length)
        want = oracle.dense(*inputs, oracle.visible(documents(length), length, None))
        for wire, route in WIRES.items():
            errors = {}
            for ranks in RANKS:
                got = ring_attention(inputs, "zigzag", documents(length), None, ranks, sdpa, route=route)
                errors[ranks] = error(got, want)
                rows.append(row(packing, wire, ranks, errors))
            criteria += growth(f"{packing}, {wire}", errors, BOUNDS[wire.split(",")[0]])
        for name, mutant in MUTANTS.items():
            errors = {}
            for ranks in (1, 8, 64):
                got = ring_attention(inputs, "zigzag", documents(length), None, ranks, mutant)
                errors[ranks] = error(got, want)
                rows.append(row(packing, name, ranks, errors))
            worst = max(many / one for one, many in zip(errors[1], errors[64], strict=True))
            criteria.append(report.at_least(f"{packing}, {name}: caught, error at 64 ranks / 1 rank", worst, 1.05))
    return report.finish(machine, rows, criteria, arguments.json)


def draw(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, length, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16() for shape in shapes]


def error(got: oracle.Attention, want: oracle.Attention) -> list[float]:
    """Relative L2 error of each of out, dq, dk, dv, rounded to the dtype of the inputs as training gets them."""
    return [((a.bfloat16().double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]


def row(packing: str, wire: str, ranks: int, errors: dict[int, list[float]]) -> dict[str, object]:
    shown = dict(zip(NAMES, (f"{value:.2e}" for value in errors[ranks]), strict=True))
    worst = max(many / one for one, many in zip(errors[1], errors[ranks], strict=True))
    return {"documents": packing, "accumulation, route": wire, "ranks": ranks, **shown, "worst / 1 rank": worst}


def growth(name: str, errors: dict[int, list[float]], bounds: dict[int, float]) -> list[report.Criterion]:
    """The largest error up to each bound's ranks, over that of one rank; the worst of out, dq, dk, dv."""
    criteria = []
    for limit, bound in bounds.items():
        worst = max(
            errors[ranks][part] / errors[1][part] for ranks in errors if ranks <= limit for part in range(len(NAMES))
        )
        criteria.append(report.at_most(f"{name}: error up to {limit} ranks / 1 rank", worst, bound))
    return criteria


def _out_in_bfloat16(rank: int) -> SimpleNamespace:
    def forward(q, k, v, tiles, into):
        out, lse = sdpa.forward(q, k, v, tiles, into=into)
        return out.copy_(out.bfloat16()), lse

    return SimpleNamespace(forward=forward, backward=sdpa.backward)


def _gradients_in_bfloat16(rank: int) -> SimpleNamespace:
    def backward(dout, q, k, v, out, lse, tiles, into):
        dq, dk, dv = sdpa.backward(dout, q, k, v, out, lse, tiles, into=into)
        dq.copy_(dq.bfloat16())
        for start, stop in tiles[:, K_START : K_STOP + 1].tolist():  # not what is on its way meanwhile
            for gradient in (dk[start:stop], dv[start:stop]):
                gradient.copy_(gradient.bfloat16())
        return dq, dk, dv

    return SimpleNamespace(forward=sdpa.forward, backward=backward)


MUTANTS = {"bfloat16 running out": _out_in_bfloat16, "bfloat16 accumulators": _gradients_in_bfloat16}

if __name__ == "__main__":
    sys.exit(main())
