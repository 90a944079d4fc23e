"""A few tiles at start-up: does the chosen kernel compute what the reference does, on this device, in this dtype?"""

from types import ModuleType

import torch
from torch import Tensor

from model.kernels import reference

# Relative L2 error allowed. Kernels that read 16-bit inputs round probabilities to 16 bits: about 4e-3.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}

# 64 queries meet 48 keys: a causal triangle; rows that see all keys but the last ones; a window whose last rows see
# the last key (see parallel/schedule.py).
TILES = [[0, 0, 32, 0, 32, -31, 0, 0], [0, 32, 48, 0, 48, -15, 32, 0], [0, 48, 64, 16, 48, 0, 20, 0]]


def check(kernel: ModuleType, dtype: torch.dtype, device: torch.device, heads_per_group: int, head_dim: int) -> None:
    """Compares out, dq, dk and dv with the reference in float64; draws nothing from the global random state.

    Raises:
        RuntimeError: naming what differs, by how much, and what to use instead.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, head_dim, generator=generator, dtype=torch.float64).to(device, dtype)

    q, k, v, dout = draw(64, 2 * heads_per_group), draw(48, 2), draw(48, 2), draw(64, 2 * heads_per_group)
    tiles = torch.tensor(TILES)
    truth_inputs = [x.double() for x in (q, k, v)]
    out, lse = reference.forward(*truth_inputs, tiles)
    truth = (out, *reference.backward(dout.double(), *truth_inputs, out, lse, tiles))
    got_out, got_lse = kernel.forward(q, k, v, tiles)
    got = (got_out, *kernel.backward(dout, q, k, v, got_out.to(dtype), got_lse, tiles))
    for name, value, expected in zip(("out", "dq", "dk", "dv"), got, truth, strict=True):
        error = float((value.double() - expected).norm() / expected.norm())
        if not error <= TOLERANCE[dtype]:
            kernel_name = kernel.__name__.rpartition(".")[2]
            raise RuntimeError(
                f"parallel.kernel={kernel_name} fails its self-test on {device.type}: {name} differs from the "
                f"reference by {error:.1e} in {dtype}, {TOLERANCE[dtype]:.0e} is allowed: use parallel.kernel=reference"
            )
