"""The ring against dense float64 attention, all ranks in one process; and the mistakes it must catch."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from model.kernels import reference, sdpa
from model.mask import Mask
from parallel import ring
from parallel.layout import LAYOUTS, chunks, global_index, padded_length
from parallel.schedule import NUM_HOPS, plan
from tests import oracle
from tests.threads import Network, QueueExchange, ring_attention

PRIME, HEADS, HEAD_DIM = 67, 4, 8
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
}  # of the largest value: rounding of a few hundred terms

# name -> (documents of two sequences as a function of (length, local length), window); a sum below the length
# is padding
MASKS = {
    "causal": (lambda t, n: [(t,), (t,)], None),
    "documents": (lambda t, n: [(20, 1, 1, 30, t - 52), (5, 9, t - 14)], None),
    "borders": (lambda t, n: [(n,) * (t // n) + ((t % n,) if t % n else ()), (t,)], None),
    "padding": (lambda t, n: [(30, 11), ()], None),
    "window-1": (lambda t, n: [(t,), (t - 3,)], 1),
    "window<n": (lambda t, n: [(t,), (40, t - 40)], 5),
    "window=n": (lambda t, n: [(t,), (40, t - 40)], "n"),
    "window>n": (lambda t, n: [(t,), (2, 50, t - 52)], "n+7"),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Ranks are threads already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_inputs(length, groups=2, dtype=torch.float64, seed=0, heads=HEADS, batch=2):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(batch, length, h, HEAD_DIM, generator=generator, dtype=torch.float64)
        for h in (heads, groups, groups, heads)
    )
    return [x.to(dtype) for x in (q, k, v, dout)]


def case(layout, ranks, mask):
    """(padded length, documents, window) of a named mask."""
    padded = padded_length(layout, PRIME, ranks)
    local = padded // ranks
    documents, window = MASKS[mask]
    if isinstance(window, str):
        window = local + (7 if window.endswith("+7") else 0)
    return padded, documents(PRIME, local), window


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_dense(layout, ranks, mask):
    """out, dq, dk, dv: 4, 2, 1 key/value heads, prime length, padding, rows that see nothing (C002, C011)."""
    padded, documents, window = case(layout, ranks, mask)
    seen = oracle.visible(documents, padded, window)
    for groups, kernel, dtype in (
        (1, sdpa, torch.float64),
        (2, sdpa, torch.float64),
        (4, sdpa, torch.float32),
        (2, reference, torch.float64),
    ):
        inputs = random_inputs(padded, groups, dtype)
        got = ring_attention(inputs, layout, documents, window, ranks, kernel)
        assert all(x.dtype == dtype for x in got)
        context = f"{kernel.__name__}, {groups} groups"
        oracle.assert_close(got, oracle.dense(*inputs, seen), TOLERANCE[dtype], context)
        for x in got:  # padding sees nothing and is seen by nobody
            assert all(x[n, sum(lengths) :].eq(0).all() for n, lengths in enumerate(documents))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 700])
def test_chunks_of_several_kernel_blocks(layout, window):
    """Long enough for every kind of piece that the fast kernel is given."""
    length, documents = 1800, [(300, 1, 1499)]
    inputs = random_inputs(length, 1, heads=2, batch=1)
    got = ring_attention(inputs, layout, documents, window, 2, sdpa)
    oracle.assert_close(got, oracle.dense(*inputs, oracle.visible(documents, length, window)), 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inputs_kind", ["peaked", "rising", "falling", "huge"])
def test_inputs_that_force_rescaling(layout, inputs_kind):
    """C001: running maxima that rise or fall from hop to hop, near one-hot rows, logits up to 1e4."""
    length = 64
    q, k, v, dout = random_inputs(length)
    ramp = torch.linspace(0, 1, length, dtype=torch.float64)[None, :, None, None]
    if inputs_kind == "peaked":
        q = q * 30
    elif inputs_kind == "huge":
        q = q * (1e4 / (q[:, :, :, None] * k[:, :, None, :1]).sum(-1).abs().max() * HEAD_DIM**0.5)
    else:
        q = q.abs()
        k = k.abs() * (ramp if inputs_kind == "rising" else 1 - ramp) * 40
    documents = [(length,), (10, 54)]
    got = ring_attention([q, k, v, dout], layout, documents, None, 4, sdpa)
    assert all(x.isfinite().all() for x in got)
    # a logit of size s carries an error of s · 1e-16 into its weight
    want = oracle.dense(q, k, v, dout, oracle.visible(documents, length, None))
    oracle.assert_close(got, want, 1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_and_the_past_are_isolated_bit_for_bit(layout):
    """C031, C032: one document never reaches another, and what comes later never what was before."""
    length, documents = 64, [(30, 34)]
    inputs = random_inputs(length, batch=1)
    run = lambda x: ring_attention(x, layout, documents, None, 4, sdpa)  # noqa: E731
    before = run(inputs)
    for first, second in ((slice(0, 30), slice(30, 64)), (slice(30, 64), slice(0, 30))):
        changed = [x.clone() for x in inputs]
        for x, other in zip(changed, random_inputs(length, batch=1, seed=9), strict=True):
            x[:, first] = other[:, first] * 50
        after = run(changed)
        assert all(torch.equal(a[:, second], b[:, second]) for a, b in zip(after, before, strict=True))
        assert not torch.equal(after.out[:, first], before.out[:, first])
    for token in (1, 29, 45):
        changed = [x.clone() for x in inputs]
        for x in changed[:3]:
            x[:, token:] += 1
        assert torch.equal(run(changed).out[:, :token], before.out[:, :token])


def test_error_does_not_grow_with_ranks():
    """bfloat16 inputs against float64 on the same inputs: what adds up over hops does so in float32."""
    length = 256
    inputs = random_inputs(length, 2, torch.bfloat16, batch=1)
    want = oracle.dense(*inputs, oracle.visible([(length,)], length, None))
    error = {}
    for ranks in (1, 8):
        got = ring_attention(inputs, "zigzag", [(length,)], None, ranks, sdpa)
        error[ranks] = [((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]
    assert all(many <= 1.05 * one + 1e-6 for one, many in zip(error[1], error[8], strict=True)), error


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize(("layout", "window"), [("zigzag", None), ("striped", None), ("contiguous", 4)])
def test_traffic_is_what_the_plan_says(layout, window, ranks):
    """Messages and bytes of each rank: grouped heads, K and V in one, gradients one hop behind and home."""
    local, groups = 12, 1
    length = local * ranks
    network = Network()
    inputs = random_inputs(length, groups, torch.bfloat16)
    ring_attention(inputs, layout, [(length,)] * 2, window, ranks, sdpa, network)
    hops = int(plan(layout, Mask(window), [(length,)] * 2, length, length, ranks, 0)[0, NUM_HOPS])
    assert hops == (2 if window else ranks)
    block = 2 * 2 * local * groups * HEAD_DIM  # K and V of two sequences, in numbers
    for rank in range(ranks):
        sent = [entry for entry in network.log if entry[0] == rank]
        # forward; backward: keys in slots 0 … hops - 2, gradients in 2 … hops - 1, and once more to get home
        assert len(sent) == (hops - 1) + (hops + 1 if hops > 2 else 2)
        assert sum(entry[3] for entry in sent) == (hops - 1) * block * (2 + 2 + 4)
        assert sent[0][2] == [(2, 2, local, groups, HEAD_DIM)]
        assert [entry[1] for entry in sent] == [1] * (len(sent) - 1) + [1 - hops]


def test_the_next_block_is_on_its_way_before_this_one_is_computed():
    events = []

    class Recorded(QueueExchange):
        def start(self, sends, receives, distance=1):
            events.append((self.rank, "start"))
            pending = super().start(sends, receives, distance)
            return SimpleNamespace(wait=lambda: (events.append((self.rank, "wait")), pending.wait()))

    def recorded(rank):
        def compute(call):
            return lambda *args, **into: (events.append((rank, "compute")), call(*args, **into))[1]

        return SimpleNamespace(forward=compute(sdpa.forward), backward=compute(sdpa.backward))

    ring_attention(random_inputs(24), "zigzag", [(24,)] * 2, None, 3, recorded, exchange=Recorded)
    hop = ["start", "compute", "wait"]
    for rank in range(3):
        assert [what for who, what in events if who == rank] == hop * 2 + ["compute"] + hop * 3 + [
            "start",
            "wait",
        ]


def mutant_kernel(**replaced):
    return SimpleNamespace(**{"forward": sdpa.forward, "backward": sdpa.backward, **replaced})


def per_hop_delta(rank):
    def backward(dout, q, k, v, out, lse, tiles, into):
        block_out, _ = sdpa.forward(q, k, v, tiles)
        return sdpa.backward(dout, q, k, v, block_out, lse, tiles, into=into)

    return mutant_kernel(backward=backward)


def per_hop_lse(rank):
    def backward(dout, q, k, v, out, lse, tiles, into):
        _, block_lse = sdpa.forward(q, k, v, tiles)
        return sdpa.backward(dout, q, k, v, out, block_lse, tiles, into=into)

    return mutant_kernel(backward=backward)


def local_keys_in_backward(rank):
    own = []

    def backward(dout, q, k, v, out, lse, tiles, into):
        own.append((k.clone(), v.clone()))
        return sdpa.backward(dout, q, *own[0], out, lse, tiles, into=into)

    return mutant_kernel(backward=backward)


def low_precision_output(rank):
    def forward(q, k, v, tiles, into):
        out, lse = sdpa.forward(q, k, v, tiles, into=into)
        return out.copy_(out.bfloat16()), lse

    return mutant_kernel(forward=forward)


def low_precision_dq(rank):
    def backward(dout, q, k, v, out, lse, tiles, into):
        grads = sdpa.backward(dout, q, k, v, out, lse, tiles, into=into)
        grads[0].copy_(grads[0].bfloat16())
        return grads

    return mutant_kernel(backward=backward)


class LosesTheLastGradientHop(QueueExchange):
    def start(self, sends, receives, distance=1):
        pending = super().start(sends, receives, distance)
        if distance < 0:  # dk and dv on their way home
            return SimpleNamespace(wait=lambda: (pending.wait(), [x.zero_() for x in receives]))
        return pending


class KeepsAStaleBuffer(QueueExchange):
    """At the second exchange the block of the first is still there."""

    def start(self, sends, receives, distance=1):
        number = sum(entry[0] == self.rank for entry in self.network.log)
        stale = sends[0].clone()
        pending = super().start(sends, receives, distance)
        return SimpleNamespace(wait=lambda: (pending.wait(), number == 1 and receives[0].copy_(stale)))


class RoundsGradientsOnTheWire(QueueExchange):
    def start(self, sends, receives, distance=1):
        return super().start([x.bfloat16().to(x.dtype) for x in sends], receives, distance)


MUTANTS = {
    "delta of the hop": {"kernel": per_hop_delta},
    "lse of the hop": {"kernel": per_hop_lse},
    "local keys in backward": {"kernel": local_keys_in_backward},
    "bfloat16 out": {"kernel": low_precision_output},
    "bfloat16 dq": {"kernel": low_precision_dq},
    "dropped last gradient hop": {"exchange": LosesTheLastGradientHop},
    "stale buffer": {"exchange": KeepsAStaleBuffer},
    "bfloat16 on the wire": {"exchange": RoundsGradientsOnTheWire},
    "window one too wide": {"planned_window": 21},
    "window one too narrow": {"planned_window": 19},
    "window dropped": {"planned_window": None},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant, layout):
    """The comparison of `test_equals_dense` in float32 fails for each mistake others have made (C011)."""
    length, window = 64, 20
    inputs = random_inputs(length, 2, torch.float32)
    documents = [(length,), (30, 34)]
    want = oracle.dense(*inputs, oracle.visible(documents, length, window))
    arguments = (inputs, layout, documents, window, 4)
    oracle.assert_close(ring_attention(*arguments, sdpa), want, TOLERANCE[torch.float32])
    mutated = ring_attention(*arguments, **{"kernel": sdpa, **MUTANTS[mutant]})
    with pytest.raises(AssertionError, match="is off by"):
        oracle.assert_close(mutated, want, TOLERANCE[torch.float32])


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
    torch.library.opcheck(ring.attend, (*qkv, table, "", "sdpa"))
    torch.library.opcheck(ring.attend, (*(x.detach().bfloat16() for x in qkv), table, "", "sdpa"))


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
    attend = lambda q=q, k=k, v=v, table=table, kernel="sdpa": ring.attend(q, k, v, table, "", kernel)  # noqa: E731
    for arguments, message in (
        ({"k": k[:, :5]}, "do not fit together: use q"),
        ({"q": q[:, :, :3]}, "2 key/value heads do not divide 3 query heads"),
        ({"v": v.float()}, "q, k, v differ: torch.float64 on cpu, .*torch.float32 on cpu"),
        ({"q": q.transpose(2, 3).contiguous().transpose(2, 3)}, "the last must be 1"),
        ({"kernel": "flash"}, "kernel=flash is unknown: use reference or sdpa"),
        ({"table": table.int()}, "use int64"),
        (
            {"table": torch.from_numpy(plan("striped", Mask(), [(46,)] * 2, 46, 46, 2, 0))},
            "the plan is for rank 0 of 2",
        ),
        (
            {"table": torch.from_numpy(plan("striped", Mask(), [(22,)] * 2, 22, 22, 1, 0))},
            "2 sequences of 22 tokens, but this is",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            attend(**arguments)


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


def test_the_index_that_tests_use_is_the_layouts():
    """The oracle's global order comes from the layout, so one case is written by hand."""
    assert global_index(chunks("zigzag", 8, 2, 0)).tolist() == [0, 1, 6, 7]
