"""Each kernel, tile by tile, against dense attention; and the table of what each can do."""

import numpy as np
import pytest
import torch

from model.kernels import capability, reference, sdpa
from model.mask import trim
from tests import oracle

KERNELS = {"reference": reference, "sdpa": sdpa}
HEAD_DIM = 8


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of rows small enough that small tiles have several."""
    monkeypatch.setattr(reference, "ROW_BLOCK", 5)
    monkeypatch.setattr(sdpa, "ROW_BLOCK", 4)


def tensors(rows, columns, heads, groups, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, heads, HEAD_DIM), (columns, groups, HEAD_DIM), (columns, groups, HEAD_DIM)]
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [*shapes, shapes[0]])
    return tuple(x.to(dtype) for x in (q, k, v, dout))


def table(*tiles):
    """Rows (q_start, q_stop, k_start, k_stop, lower, upper) of hop 0."""
    return torch.tensor([(0, *tile, 0) for tile in tiles], dtype=torch.int64).reshape(-1, 8)


def shown(rows, columns, tiles):
    seen = torch.zeros(rows, columns, dtype=torch.bool)
    for q_start, q_stop, k_start, k_stop, lower, upper in tiles:
        i, j = torch.arange(q_stop - q_start)[:, None], torch.arange(k_stop - k_start)[None]
        seen[q_start:q_stop, k_start:k_stop] |= (j >= i + lower) & (j <= i + upper)
    return seen


def dense(q, k, v, dout, seen):
    """The oracle's truth, for rows: [N, H, D] without a sequence dim."""
    return oracle.Attention(*(x[0] for x in oracle.dense(q[None], k[None], v[None], dout[None], seen[None])))


def random_tiles(rng, rows, columns):
    """Trimmed tiles over disjoint ranges of rows: bands of every kind."""
    cuts = sorted({0, rows, *rng.integers(1, rows, 3).tolist()})
    tiles = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        left, right = sorted(rng.choice(columns + 1, 2, replace=False).tolist())
        lower = int(rng.choice([-100, *rng.integers(-12, 12, 3)]))
        upper = lower + int(rng.integers(0, 20)) if rng.random() < 0.8 else 100
        cut = [int(x) for x in trim(stop - start, right - left, lower, upper)]
        if cut[1] > cut[0]:
            tiles.append((start + cut[0], start + cut[1], left + cut[2], left + cut[3], cut[4], cut[5]))
    return tiles


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_random_tiles_equal_dense(kernel, heads, groups, dtype, tolerance):
    module, rng = KERNELS[kernel], np.random.default_rng(heads + groups)
    for case in range(30):
        rows, columns = rng.integers(2, 30, 2).tolist()
        tiles = random_tiles(rng, rows, columns)
        q, k, v, dout = tensors(rows, columns, heads, groups, dtype, seed=case)
        out, lse = module.forward(q, k, v, table(*tiles))
        grads = module.backward(dout, q, k, v, out, lse, table(*tiles))
        seen = shown(rows, columns, tiles)
        assert {x.dtype for x in (out, lse, *grads)} == {dtype}
        assert torch.equal(lse.isneginf().all(0), ~seen.any(-1)) and out[~seen.any(-1)].eq(0).all()
        oracle.assert_close(oracle.Attention(out, *grads), dense(q, k, v, dout, seen), tolerance, str(tiles))


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_keys_of_a_row_may_come_in_several_calls(kernel):
    """Forward merges; backward, given the global out and lse, is a sum. State is changed in place."""
    module = KERNELS[kernel]
    q, k, v, dout = tensors(10, 24, 4, 2)
    parts = [table((0, 10, 0, 6, -9, 5)), table((0, 10, 6, 20, -9, 4)), table()]
    state = module.forward(q, k, v, parts[0])
    for part in parts[1:]:
        assert all(a is b for a, b in zip(module.forward(q, k, v, part, into=state), state, strict=True))
    grads = tuple(torch.zeros_like(x) for x in (q, k, v))
    for part in parts:
        module.backward(dout, q, k, v, *state, part, into=grads)
    seen = shown(10, 24, [(0, 10, 0, 6, -9, 5), (0, 10, 6, 20, -9, 4)])
    oracle.assert_close(oracle.Attention(state[0], *grads), dense(q, k, v, dout, seen), 1e-13)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (5, 5)])
def test_no_tiles_give_nothing(kernel, shape):
    """Empty tensors and empty hops never reach a kernel that would crash on them."""
    q, k, v, dout = tensors(*shape, 2, 2)
    out, lse = KERNELS[kernel].forward(q, k, v, table())
    assert out.eq(0).all() and lse.isneginf().all()
    assert all(grad.eq(0).all() for grad in KERNELS[kernel].backward(dout, q, k, v, out, lse, table()))


@pytest.mark.parametrize("kernel", KERNELS)
def test_causal_of_unequal_lengths_is_the_band_that_was_asked_for(kernel):
    """C009: the last 2 of 5 tokens over all 5, with uniform scores: rows of 1/4 and of 1/5."""
    q, k = torch.zeros(2, 1, 8), torch.zeros(5, 1, 8)
    v = torch.nn.functional.pad(torch.eye(5), (0, 3))[:, None]
    out, _ = KERNELS[kernel].forward(q, k, v, table((0, 2, 0, 5, -1, 3)))
    want = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.0], [0.2] * 5])
    torch.testing.assert_close(out[:, 0, :5], want, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kernel", KERNELS)
def test_views_with_odd_strides(kernel):
    """Fused projections hand over views. A last stride that is not 1 would be nonsense in aten, silently."""
    q, k, v, dout = tensors(9, 9, 4, 2)
    tile = table((0, 9, 0, 9, -8, 0))
    want = KERNELS[kernel].forward(q, k, v, tile)
    fused = torch.cat((q, k, v), dim=1)
    views = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    turned = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    for inputs in (views, turned):
        got = KERNELS[kernel].forward(*inputs, tile)
        grads = KERNELS[kernel].backward(dout.expand(9, 4, 8), *inputs, *got, tile)
        expected = KERNELS[kernel].backward(dout, q, k, v, *want, tile)
        for a, b in zip((*got, *grads), (*want, *expected), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kernel", KERNELS)
def test_bfloat16_is_computed_and_returned_in_float32(kernel):
    """Bit for bit what float32 gives on the rounded inputs: nothing accumulates in bfloat16."""
    q, k, v, dout = tensors(20, 20, 4, 1, torch.bfloat16)
    tile = table((0, 20, 0, 20, -6, 0))
    out, lse = KERNELS[kernel].forward(q, k, v, tile)
    grads = KERNELS[kernel].backward(dout, q, k, v, out, lse, tile)
    wide = [x.float() for x in (q, k, v)]
    want = KERNELS[kernel].forward(*wide, tile)
    for a, b in zip(
        (out, lse, *grads), (*want, *KERNELS[kernel].backward(dout.float(), *wide, *want, tile)), strict=True
    ):
        assert a.dtype == torch.float32 and torch.equal(a, b)


def test_pieces_cover_a_tile_once_and_have_no_empty_row():
    rng = np.random.default_rng(3)
    for _ in range(500):
        rows, columns = rng.integers(1, 40, 2).tolist()
        cut = [int(x) for x in trim(rows, columns, *sorted(rng.integers(-40, 40, 2).tolist()))]
        rows, columns, lower, upper = cut[1] - cut[0], cut[3] - cut[2], cut[4], cut[5]
        if rows == 0:
            continue
        i, j = np.ogrid[:rows, :columns]
        counted = np.zeros((rows, columns), int)
        for piece in sdpa.pieces(rows, columns, lower, upper):
            low, high = piece.band or (-piece.rows, piece.columns)
            seen = (j[:, : piece.columns] >= i[: piece.rows] + low) & (j[:, : piece.columns] <= i[: piece.rows] + high)
            assert seen.any(axis=1).all()
            if piece.causal:
                assert piece.band == (1 - piece.rows, 0)
            elif piece.band:
                assert piece.columns <= 3 * sdpa.ROW_BLOCK and piece.rows <= sdpa.ROW_BLOCK
            counted[piece.row : piece.row + piece.rows, piece.column : piece.column + piece.columns] += seen
        assert np.array_equal(counted, (j >= i + lower) & (j <= i + upper))


def test_many_small_tiles_are_computed_together(monkeypatch):
    """Short documents: few calls, not one for each, also where tiles share query rows and key rows."""
    monkeypatch.setattr(sdpa, "BATCH", 30)
    calls = []
    monkeypatch.setattr(
        sdpa, "_flash_cpu", lambda *args, original=sdpa._flash_cpu, **k: calls.append(0) or original(*args, **k)
    )
    rng = np.random.default_rng(5)
    shapes = [(3, 3, -2, 0), (3, 3, -2, 2), (2, 4, -1, 2), (5, 5, -2, 0), (20, 20, -19, 0)]
    tiles = []
    for _ in range(200):
        rows, columns, lower, upper = shapes[rng.integers(len(shapes))]
        q_start, k_start = rng.integers(0, 280), rng.integers(0, 280)
        tiles.append((q_start, q_start + rows, k_start, k_start + columns, lower, upper))
    q, k, v, dout = tensors(300, 300, 4, 2)
    results = []
    for kernel in (sdpa, reference):
        out, lse = kernel.forward(q, k, v, table(*tiles))
        results.append((out, lse, *kernel.backward(dout, q, k, v, out, lse, table(*tiles))))
    assert len(calls) < 120
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_only_the_keys_that_tiles_see_are_converted():
    """The arena may hold the keys of all ranks, a hop sees few; what is not there yet may be anything."""
    q, k, v, dout = tensors(6, 40, 2, 2, torch.bfloat16)
    k[:10], v[30:] = torch.nan, torch.inf
    tile = table((0, 6, 12, 20, -5, 4))
    out, lse = sdpa.forward(q, k, v, tile)
    grads = sdpa.backward(dout, q, k, v, out, lse, tile)
    assert all(x.isfinite().all() for x in (out, lse, *grads))


@pytest.fixture(params=[False, True], ids=["without flash-attn", "with flash-attn"])
def flash_attn(request, monkeypatch):
    monkeypatch.setattr(capability, "find_spec", lambda module: object() if request.param else None)
    return request.param


def test_auto_is_the_fastest_kernel_that_is_there(flash_attn):
    assert capability.choose("auto", "cpu", "float64", window=True) == "sdpa"
    assert capability.choose("auto", "cuda", "bfloat16", window=True) == ("flash" if flash_attn else "sdpa")
    assert capability.choose("reference", "cuda", "float32", window=True) == "reference"


def test_capability_table(flash_attn):
    flash, sdpa_row, slow = capability.table("cuda", "bfloat16", 128)
    assert [row.kernel for row in (flash, sdpa_row, slow)] == ["flash", "sdpa", "reference"]
    assert sdpa_row.reason == slow.reason == "" and (flash.reason == "") == flash_attn
    for row in (flash, sdpa_row, slow):
        assert row.causal and row.documents and row.window and not row.dropout
        assert row.layouts == row.routes == "all" and "bfloat16" in row.dtypes
    on_cpu = {row.kernel: row for row in capability.table("cpu", "float64", 128)}
    assert on_cpu["flash"].dtypes == "none" and "does not run on cpu" in on_cpu["flash"].reason
    assert on_cpu["sdpa"].reason == on_cpu["reference"].reason == ""


@pytest.mark.parametrize("flash_attn", [False], indirect=True)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fast", "cpu", "float32"), "parallel.kernel=fast is unknown: use auto, flash, sdpa or reference"),
        (("flash", "cpu", "float32"), "does not run on cpu: use cuda, or parallel.kernel=auto"),
        (("flash", "cuda", "bfloat16"), "flash-attn is not installed: pip install .*, or use parallel.kernel=sdpa"),
        (
            ("auto", "cuda", "float32"),
            r"auto \(sdpa\) is refused: .*float32 on cuda: use train.dtype=bfloat16 or paral",
        ),
        (("sdpa", "cuda", "bfloat16", False, 100), "multiple of 8, 256 at most: use model.head_dim=104"),
        (("sdpa", "xpu", "float32"), "does not run on xpu: use cpu or cuda"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused_with_the_alternative(arguments, message, flash_attn):
    with pytest.raises(ValueError, match=message):
        capability.choose(*arguments)


@pytest.mark.parametrize("kernel", ["flash", "sdpa"])
def test_tensors_beyond_a_32_bit_index_are_refused(kernel):
    capability.refuse_large(2**31 - 1, kernel, "cuda")
    with pytest.raises(ValueError, match="2147483648 elements.*kernel=.* on cuda.*at most 2147483647; use more ranks"):
        capability.refuse_large(2**31, kernel, "cuda")
    capability.refuse_large(2**40, "reference", "cuda")
    capability.refuse_large(2**40, "sdpa", "cpu")
