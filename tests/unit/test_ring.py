"""The ring against dense float64 attention, all ranks in one process: out, dq, dk and dv, each for itself."""

from itertools import combinations, product

import pytest
import torch
from torch import library
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from model.kernels import reference, sdpa
from model.mask import Mask
from parallel import ring
from parallel.layout import LAYOUTS
from parallel.route import Route
from parallel.schedule import plan
from tests import cases, oracle
from tests.cases import (
    ALL_LAYOUTS,
    EACH_ROUTE,
    GROUPS,
    HEAD_DIM,
    MASKS,
    ROUTES,
    TOLERANCE,
    Case,
    assert_true,
    random_inputs,
    relative_errors,
)  # fmt: skip
from tests.threads import ring_attention

KERNELS = {"sdpa": sdpa, "reference": reference}
RANKS = (1, 2, 3, 4, 5, 6, 8)

# Everything else is multiplied out; these go round, seventeen of them, so that each meets each value of the rest.
VARIANTS = [*product(GROUPS, (torch.float64, torch.float32), KERNELS), (2, torch.float64, "sdpa")]


def all_cases():
    combined = [
        (layout, ranks, route, mask, nodes)
        for ranks in RANKS
        for layout in ALL_LAYOUTS
        for route, nodes in cases.routes_of(ranks)
        for mask in MASKS
    ]
    every = [Case(*combination, *VARIANTS[n % len(VARIANTS)]) for n, combination in enumerate(combined)]
    return [case for n, case in enumerate(every) if case.ranks != 6 or n % 3 == 0]  # six: for nodes of two and of three


CASES: dict[tuple[str, int], list[Case]] = {}
for each in all_cases():
    CASES.setdefault((each.layout, each.ranks), []).append(each)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("layout", "ranks"), CASES)
def test_equals_dense(layout, ranks):
    """All routes and masks, prime length, padding, ranks and rows that see nothing (C002, C011, C031)."""
    for case in CASES[layout, ranks]:
        held, documents, window = cases.dealt(layout, ranks, case.mask)
        inputs = cases.padded_inputs(case.groups, case.dtype, documents, held.padded_length)
        try:
            got = ring_attention(inputs, held, documents, window, ranks, KERNELS[case.kernel], route=case.how)
        except Exception as error:
            error.add_note(str(case))
            raise
        assert {x.dtype for x in got} == {case.dtype}
        assert_true(got, documents, window, case.groups, case.dtype, str(case))


def test_each_two_values_of_the_matrix_meet():
    """Thousands of cases; what is missing are nodes in rings that cannot be cut into several of several ranks."""
    every = [case._replace(nodes=0) for case in all_cases()]
    factors = [sorted({case[n] for case in every}, key=str) for n in range(len(Case._fields))]
    assert [len(values) for values in factors] == [len(ALL_LAYOUTS), 7, 9, 10, 1, 4, 2, 2] and len(every) > 2900
    met = {(a, b) for case in every for a, b in combinations(enumerate(case), 2)}
    apart = [
        (x, y)
        for a, b in combinations(range(len(factors)), 2)
        for x, y in product(factors[a], factors[b])
        if ((a, x), (b, y)) not in met
    ]
    assert sorted(apart) == sorted(product((1, 2, 3, 5), [route for route in ROUTES if "via" in route]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 700])
def test_chunks_of_several_kernel_blocks(layout, window):
    """Long enough for every kind of piece that the fast kernel is given."""
    length, documents = 1800, [(300, 1, 1499)]
    inputs = random_inputs(length, 1, heads=2, batch=1)
    got = ring_attention(inputs, layout, documents, window, 2, sdpa)
    oracle.assert_close(got, oracle.dense(*inputs, oracle.visible(documents, length, window)), 1e-12)


@pytest.mark.parametrize("kind", ["peaked", "rising", "falling", "huge"])
def test_inputs_that_force_rescaling(kind):
    """C001: running maxima that rise or fall from hop to hop, near one-hot rows, logits up to 1e4."""
    length, documents = 64, [(64,), (10, 54)]
    q, k, v, dout = random_inputs(length)
    ramp = torch.linspace(0, 1, length, dtype=torch.float64)[None, :, None, None]
    if kind == "peaked":
        q = q * 30
    elif kind == "huge":
        logits = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, dim=2)) / HEAD_DIM**0.5
        q = q * (1e4 / logits.abs().max())
    else:
        q = q.abs()
        k = k.abs() * (ramp if kind == "rising" else 1 - ramp) * 40
    want = oracle.dense(q, k, v, dout, oracle.visible(documents, length, None))
    for layout, route in product(LAYOUTS, EACH_ROUTE):
        got = ring_attention([q, k, v, dout], layout, documents, None, 4, sdpa, route=route)
        assert all(x.isfinite().all() for x in got)
        oracle.assert_close(got, want, 1e-10, f"{layout} {route}")  # a logit of size s is off by s · 1e-16


@pytest.mark.parametrize("route", EACH_ROUTE)
def test_documents_and_the_past_are_isolated_bit_for_bit(route):
    """C031, C032: one document never reaches another, and what comes later never what was before."""
    length, documents = 64, [(30, 34)]
    inputs = random_inputs(length, batch=1)
    for layout in LAYOUTS:
        run = lambda x: ring_attention(x, layout, documents, None, 4, sdpa, route=route)  # noqa: B023, E731
        before = run(inputs)
        for first, second in ((slice(0, 30), slice(30, 64)), (slice(30, 64), slice(0, 30))):
            changed = [x.clone() for x in inputs]
            for x, other in zip(changed, random_inputs(length, batch=1, seed=9), strict=True):
                x[:, first] = other[:, first] * 50
            after = run(changed)
            assert all(torch.equal(a[:, second], b[:, second]) for a, b in zip(after, before, strict=True))
            assert not any(torch.equal(a[:, first], b[:, first]) for a, b in zip(after, before, strict=True))
        for token in (1, 29, 45):
            changed = [x.clone() for x in inputs]
            for x in changed[:3]:
                x[:, token:] += 1
            assert torch.equal(run(changed).out[:, :token], before.out[:, :token])


def test_packed_equals_apart():
    """C032: documents in one sequence over several ranks, and each alone on one."""
    length, lengths = 64, (20, 44)
    inputs = random_inputs(length, batch=1)
    packed = ring_attention(inputs, "zigzag", [lengths], None, 4, sdpa)
    for start, count in ((0, 20), (20, 44)):
        part = slice(start, start + count)
        alone = ring_attention([x[:, part] for x in inputs], "contiguous", [(count,)], None, 1, sdpa)
        for a, b in zip(packed, alone, strict=True):
            torch.testing.assert_close(a[:, part], b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_error_does_not_grow_with_ranks(ranks):
    """bfloat16 inputs: what adds up over hops does so in float32, so a float32 wire costs nothing."""
    one = relative_errors(1, Route())
    for route in EACH_ROUTE if ranks < 64 else [Route(), Route("direct", depth=2, node_ranks=8)]:
        many = relative_errors(ranks, route)
        # 1e-6: the error of out, which is not cast here, is float32's own rounding
        assert all(b <= 1.05 * a + 1e-6 for a, b in zip(one, many, strict=True)), (route, one, many)


@pytest.mark.parametrize(("ranks", "growth"), [(2, 1.25), (4, 1.25), (8, 1.25), (64, 1.4)])
def test_a_bfloat16_wire_costs_little(ranks, growth):
    """Each partial gradient is rounded once, and summed in float32: of what the op returns, in bfloat16."""
    one = relative_errors(1, Route(), torch.bfloat16)
    many = relative_errors(ranks, Route("direct", narrow=True), torch.bfloat16)
    assert all(b <= growth * a for a, b in zip(one, many, strict=True)), (one, many)
    assert many[2] > 1.01 * one[2] and many[3] > 1.01 * one[3], "nothing was rounded on the wire"


def local_case(dtype=torch.float64, length=23, documents=((23,), (4, 15)), window=None):
    table = plan("contiguous", Mask(window), documents, length, length, 1, 0)
    q, k, v, dout = random_inputs(length, 2, dtype)
    return [x.requires_grad_() for x in (q, k, v)], dout, torch.from_numpy(table)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_op_on_one_rank(kernel, dtype):
    qkv, dout, table = local_case(dtype)
    out, lse = ring.attend(*qkv, table, "", kernel)
    grads = torch.autograd.grad(out, qkv, dout)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert {x.dtype for x in grads} == {dtype} and not lse.requires_grad
    want = oracle.dense(*qkv, dout, oracle.visible([(23,), (4, 15)], 23, None))
    tolerance = {**TOLERANCE, torch.bfloat16: 8e-3}[dtype]  # one rounding of the result, and of out in delta
    oracle.assert_close(oracle.Attention(out.detach(), *grads), want, tolerance)


def test_the_op_is_well_formed():
    """Schema, fake, autograd and tracing agree with what it really does."""
    qkv, _, table = local_case()
    library.opcheck(ring.attend, (*qkv, table, "", "sdpa"))
    library.opcheck(ring.attend, (*(x.detach().bfloat16() for x in qkv), table, "", "sdpa"))


def test_gradcheck():
    qkv, _, table = local_case(length=6, documents=((6,), (2, 3)))
    assert torch.autograd.gradcheck(lambda *qkv: ring.attend(*qkv, table, "", "sdpa")[0], qkv)


def test_compiles_once_for_plans_of_any_size():
    """One node in one graph; a plan of another size costs at most one more compilation, a third none."""
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=frames)
    def layer(q, k, v, table):
        return (ring.attend(q * 2, k, v, table, "", "sdpa")[0] ** 2).sum()

    counts = []
    for documents in ([(23,), (23,)], [(3, 20), (4, 15)], [(3, 5, 7), (1, 2, 3, 4)], [(1,) * 23, ()]):
        qkv, _, table = local_case(documents=documents)
        loss = layer(*qkv, table)
        grads = torch.autograd.grad(loss, qkv)
        expected = torch.autograd.grad((ring.attend(qkv[0] * 2, *qkv[1:], table, "", "sdpa")[0] ** 2).sum(), qkv)
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
        counts.append(frames.frame_count)
    assert counts[1:] == [counts[1]] * 3 and counts[1] <= 2


@pytest.mark.parametrize("saves", [True, False])
def test_recompute_that_saves_the_op_never_runs_it_again(saves, monkeypatch):
    forwards = []
    plain = ring.forward
    monkeypatch.setattr(ring, "forward", lambda *args: (forwards.append(1), plain(*args))[1])
    qkv, dout, table = local_case()

    def policy(ctx, op, *args, **kwargs):
        kept = saves and op == torch.ops.longhaul.attend.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k, v):
        return ring.attend(q.sin(), k.sin(), v.sin(), table, "", "sdpa")[0].sin()

    context_fn = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    got = torch.autograd.grad(checkpoint(block, *qkv, use_reentrant=False, context_fn=context_fn), qkv, dout)
    assert len(forwards) == (1 if saves else 2)
    want = torch.autograd.grad(block(*qkv), qkv, dout)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_bad_input_is_refused_before_anything_is_computed():
    (q, k, v), _, table = local_case()
    made_for = lambda length, ranks: torch.from_numpy(  # noqa: E731
        plan("striped", Mask(), [(length,)] * 2, length, length, ranks, 0)
    )
    attend = lambda q=q, k=k, v=v, table=table, kernel="sdpa": ring.attend(q, k, v, table, "", kernel)  # noqa: E731
    for arguments, message in (
        ({"k": k[:, :5]}, "do not fit together: use q"),
        ({"q": q[:, :, :3]}, "2 key/value heads do not divide 3 query heads"),
        ({"v": v.float()}, "q, k, v differ: torch.float64 on cpu, .*torch.float32 on cpu"),
        ({"q": q.transpose(1, 2).contiguous().transpose(1, 2)}, r"have strides \(736, 8, 184, 1\), .* use contiguous"),
        ({"kernel": "mine"}, "kernel=mine is unknown: use reference or sdpa"),
        ({"table": table.int()}, "use the table of parallel.schedule.plan, int64"),
        ({"table": table[:1]}, r"plan is torch.int64\[1, 8\]"),
        ({"table": made_for(46, 2)}, "the plan is for rank 0 of 2"),
        ({"table": made_for(22, 1)}, "2 sequences of 22 tokens, but this is"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(**arguments)
