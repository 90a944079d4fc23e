"""What kernels allocate while they compute: equal to what PyTorch's allocator saw, its own scratch included."""

import pytest
import torch

from model.kernels import reference, scratch, sdpa
from model.mask import Mask
from parallel.schedule import plan, tile_rows
from tests.allocated import peak_bytes

KERNELS = {"sdpa": sdpa, "reference": reference}


def measured(kernel, dtype, tiles, rows, keys, heads, groups, head_dim):
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    draw = lambda n, heads: torch.randn(n, heads, head_dim).to(dtype)  # noqa: E731
    q, dout, k, v = draw(rows, heads), draw(rows, heads), draw(keys, groups), draw(keys, groups)
    out, lse = torch.zeros(rows, heads, head_dim, dtype=exact), torch.full((heads, rows), -torch.inf, dtype=exact)
    forward = peak_bytes(lambda: kernel.forward(q, k, v, tiles, into=(out, lse)))
    into = [torch.zeros(x.shape, dtype=exact) for x in (q, k, v)]
    final = out.to(dtype)
    return forward, peak_bytes(lambda: kernel.backward(dout, q, k, v, final, lse, tiles, into=into))


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("rows", "keys", "heads", "groups", "head_dim"),
    [(1024, 1024, 4, 4, 32), (2048, 512, 4, 2, 16), (1024, 2048, 2, 1, 64), (600, 300, 2, 2, 8), (16384, 64, 8, 1, 8)],
)
def test_one_tile(kernel, dtype, rows, keys, heads, groups, head_dim):
    tiles = torch.tensor([[0, 0, rows, 0, keys, 1 - rows, keys - 1, 0]])
    got = measured(KERNELS[kernel], dtype, tiles, rows, keys, heads, groups, head_dim)
    want = scratch.scratch_bytes(kernel, "cpu", rows, keys, heads, groups, head_dim, dtype.itemsize)
    if kernel == "reference" and rows % scratch.REFERENCE_ROWS:  # its last block is a small one
        assert all(a >= b for a, b in zip(want, got, strict=True))
    else:
        assert want == pytest.approx(got, rel=2e-3, abs=128)
    assert scratch.of_tiles(kernel, "cpu", tiles.numpy(), heads, groups, head_dim, dtype.itemsize) == want


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_tile_that_is_cut(kernel):
    """Of 1,024 rows the last sees 2,048 keys: sdpa computes a full piece and a triangle, the reference all at once."""
    tiles = torch.tensor([[0, 0, 1024, 0, 2048, -1023, 1024, 0]])
    got = measured(KERNELS[kernel], torch.float32, tiles, 1024, 2048, 4, 4, 32)
    want = scratch.of_tiles(kernel, "cpu", tiles.numpy(), 4, 4, 32, 4)
    assert want == pytest.approx(got, rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
def test_the_tiles_of_a_hop(layout, dtype):
    """The largest piece decides; what came before it is given back."""
    length, ranks = 4096, 2
    table = plan(layout, Mask(), [(length,)], length, length, ranks, 1)
    tiles = tile_rows(table)
    own = torch.from_numpy(tiles[tiles[:, 0] == 0])
    rows = length // ranks
    got = measured(sdpa, dtype, own, rows, rows, 4, 2, 16)
    want = scratch.of_tiles("sdpa", "cpu", own.numpy(), 4, 2, 16, dtype.itemsize)
    assert want == pytest.approx(got, rel=1e-2)
