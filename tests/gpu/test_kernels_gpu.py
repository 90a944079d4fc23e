"""The CUDA kernels against the reference in float64: out, dq, dk and dv separately.

Needs torch, numpy and pytest only; flash-attn where it is installed.
"""

import pytest
import torch

from model.kernels import capability, flash, reference, sdpa, self_test

DEVICE = torch.device("cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

KERNELS = {"sdpa": sdpa, "flash": flash}

# Relative L2 error. Inputs are the same bfloat16 numbers for the truth; the kernels round probabilities, score
# gradients and what they return to 8 bits each, 2e-3 at most and mostly less: 4e-3 together. One row in a hundred
# that sees a key too many, or one too few, is far beyond this.
TOLERANCE = 8e-3
LSE_TOLERANCE = 1e-3  # absolute: lse is float32 throughout


@pytest.fixture(params=KERNELS)
def kernel(request):
    if request.param == "flash" and not capability.flash_is_installed():
        pytest.skip("flash-attn is not installed")
    return KERNELS[request.param]


def tile(q, k, lower=None, upper=None):
    """Rows and columns as (start, stop); without a band every row sees every key."""
    rows, columns = q[1] - q[0], k[1] - k[0]
    return 0, *q, *k, 1 - rows if lower is None else lower, columns - 1 if upper is None else upper, 0


def causal(q, k):
    return tile(q, k, upper=k[1] - k[0] - (q[1] - q[0]))


# Hops of 400 query rows and 600 key rows; each list is one call of the kernel.
CASES = {
    "causal": [[causal((0, 400), (0, 400))]],
    "full": [[tile((0, 400), (0, 600))]],
    "one row, one key": [[tile((7, 8), (9, 10))]],
    "zigzag": [
        [causal((0, 200), (0, 200)), tile((200, 400), (0, 200)), causal((200, 400), (200, 400))],
        [tile((0, 400), (400, 500))],
        [tile((200, 400), (500, 600))],
    ],
    "documents": [[causal((n, n + size), (n, n + size)) for n, size in ((0, 1), (1, 130), (131, 2), (133, 260))]],
    "blocks that share rows": [[tile(q, (k, k + 90)) for q in ((0, 150), (150, 400)) for k in (0, 100, 350, 500)]],
    "triangles that share rows": [[causal((1, 300), (n, n + 299)) for n in (0, 150, 301)]],
    "upper in between": [[tile((0, 300), (100, 350), upper=60)]],
    "window": [
        [tile((0, 200), (0, 330), 0, 130), tile((200, 330), (330, 590), -130, 0), tile((330, 400), (500, 570), 0)]
    ],
    "window of one": [[tile((0, 400), (100, 500), 0, 0)]],
    "window that clips both ends": [[tile((0, 400), (0, 500), -120, 200)]],
}


def draw(rows, keys, heads, groups, head_dim, seed=0):
    """bfloat16 on the GPU as the ring has them: q and dout heads of something wider, k and v views of one arena."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)

    q, dout = normal(rows, heads + 2, head_dim)[:, 2:], normal(rows, heads, head_dim)
    return q, *normal(keys, 2, groups, head_dim).unbind(1), dout


def assert_close(names, got, want):
    for name, value, truth in zip(names, got, want, strict=True):
        assert value.dtype == torch.float32, name
        error = float((value.double() - truth).norm() / truth.norm().clamp_min(1.0))  # of one key, dq and dk are 0
        assert error <= TOLERANCE, f"{name} is off by {error:.1e}"


def run(module, q, k, v, dout, hops):
    """(out, lse, dq, dk, dv) over all hops, merged and summed in place."""
    state = module.forward(q, k, v, hops[0])
    for tiles in hops[1:]:
        module.forward(q, k, v, tiles, into=state)
    grads = module.backward(dout, q, k, v, *state, hops[0])
    for tiles in hops[1:]:
        module.backward(dout, q, k, v, *state, tiles, into=grads)
    return *state, *grads


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(4, 4, 64), (8, 2, 128), (3, 1, 40)])
def test_tiles_equal_the_reference(kernel, case, heads, groups, head_dim):
    hops = [torch.tensor(tiles) for tiles in CASES[case]]
    q, k, v, dout = draw(400, 600, heads, groups, head_dim)
    out, lse, *grads = run(kernel, q, k, v, dout, hops)
    true_out, true_lse, *true_grads = run(reference, *(x.double() for x in (q, k, v, dout)), hops)
    unseen = true_lse.isneginf()
    assert torch.equal(lse.isneginf(), unseen) and out[unseen[0]].eq(0).all()
    assert lse.dtype == torch.float32
    assert (lse - true_lse).masked_fill(unseen, 0).abs().max() <= LSE_TOLERANCE
    assert_close(("out", "dq", "dk", "dv"), (out, *grads), (true_out, *true_grads))


def test_gradients_go_into_strided_views(kernel):
    """dk and dv of one packed arena, and heads of a wider dq, are added to in place."""
    hops = [torch.tensor(tiles) for tiles in CASES["zigzag"]]
    q, k, v, dout = draw(400, 600, 4, 2, 64)
    out, lse, *want = run(kernel, q, k, v, dout, hops)
    arena, wide = torch.ones(600, 2, 2, 64, device=DEVICE), torch.ones(400, 6, 64, device=DEVICE)
    for tiles in hops:
        kernel.backward(dout, q, k, v, out, lse, tiles, into=(wide[:, 1:5], *arena.unbind(1)))
    assert wide[:, [0, 5]].eq(1).all()
    for a, b in zip((wide[:, 1:5], *arena.unbind(1)), want, strict=True):
        torch.testing.assert_close(a - 1, b, rtol=1e-2, atol=1e-3)  # dq is added by atomics, in any order


def test_more_short_documents_than_a_grid_holds(kernel):
    """70,000 documents of two tokens: the second sees both, the first itself."""
    documents = 70_000
    q, k, v, dout = draw(2 * documents, 2 * documents, 2, 1, 64)
    start = torch.arange(documents) * 2
    zero, one = torch.zeros_like(start), torch.ones_like(start)
    tiles = torch.stack((zero, start, start + 2, start, start + 2, -one, zero, zero), dim=1)
    out, lse, *grads = run(kernel, q, k, v, dout, [tiles])
    q, k, v = (x.double().unflatten(0, (documents, 2)).requires_grad_() for x in (q, k, v))
    scores = torch.einsum("nihd,njgd->nhij", q, k) / 8
    scores = scores.masked_fill(torch.ones(2, 2, dtype=torch.bool, device=DEVICE).triu(1), -torch.inf)
    truth = torch.einsum("nhij,njgd->nihd", scores.softmax(-1), v)
    true_grads = torch.autograd.grad(truth, (q, k, v), dout.double().unflatten(0, (documents, 2)))
    wanted = [x.detach().flatten(0, 1) for x in (truth, *true_grads)]
    assert_close(("out", "dq", "dk", "dv"), (out, *grads), wanted)


def test_a_long_sequence_in_the_ring_s_pieces(kernel):
    """8,192 tokens as a rank of four sees them: its own chunks, then the others', one hop each."""
    size = 1024
    own = [causal((0, size), (0, size)), tile((size, 2 * size), (0, size)), causal((size, 2 * size), (size, 2 * size))]
    others = [[tile((0, 2 * size), (2 * n * size, (2 * n + 1) * size))] for n in (1, 2)]
    later = [tile((size, 2 * size), (6 * size, 8 * size))]
    hops = [torch.tensor(tiles) for tiles in (own, *others, later)]
    q, k, v, dout = draw(2 * size, 8 * size, 8, 2, 128)
    got = run(kernel, q, k, v, dout, hops)
    want = run(reference, *(x.double() for x in (q, k, v, dout)), hops)
    assert (got[1] - want[1]).abs().max() <= LSE_TOLERANCE
    assert_close(("out", "dq", "dk", "dv"), (got[0], *got[2:]), (want[0], *want[2:]))


@pytest.mark.parametrize(("heads_per_group", "head_dim"), [(1, 64), (4, 128)])
def test_the_self_test_passes(kernel, heads_per_group, head_dim):
    self_test.check(kernel, torch.bfloat16, DEVICE, heads_per_group, head_dim)


def test_the_reference_runs_on_the_gpu():
    self_test.check(reference, torch.float32, DEVICE, heads_per_group=2, head_dim=32)
