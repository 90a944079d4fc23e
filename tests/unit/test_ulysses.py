"""Ulysses without processes: the ranks are threads, and the all-to-all meets at a barrier."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import library
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from parallel import ulysses
from parallel.layout import chunks, global_index, split
from tests import oracle

BATCH, LOCAL, HEAD_DIM = 2, 3, 8
KEPT = [torch.ops.longhaul.to_heads.default, torch.ops.longhaul.to_tokens.default]

# degree, query heads, key/value heads: fewer, as many and more ranks than key/value heads, one head a rank, one in all
SPLITS = [(2, 4, 4), (2, 4, 2), (2, 2, 1), (4, 4, 4), (4, 8, 2), (4, 4, 1), (3, 6, 3), (3, 6, 6), (3, 3, 1), (8, 8, 2)]


class Switch:
    """The all-to-all of ranks that are threads; a group is (size, rank). Logs the bytes that each rank sends."""

    def __init__(self, size):
        self.boxes = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)
        self.log = []

    def all_to_all(self, x, group):
        assert x.is_contiguous()
        rank = group.rank
        self.boxes[rank] = x.clone()
        self.log.append((rank, x.numel() * x.element_size()))
        self.barrier.wait()
        out = torch.stack([box[rank] for box in self.boxes])
        self.barrier.wait()
        return out


@pytest.fixture
def on_ranks(monkeypatch):
    """on_ranks(run, size): run(group_name, rank) on a thread for each rank; the results by rank, and the switch."""

    def start(run, size):
        switch = Switch(size)
        monkeypatch.setattr(ulysses, "all_to_all", switch.all_to_all)
        monkeypatch.setattr(ulysses, "_resolve_process_group", lambda name: Rank(int(name), size))
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda rank: run(str(rank), rank), range(size))), switch

    return start


@pytest.fixture
def echo(monkeypatch):
    """One rank alone, which hears from each peer what it sent it; the list of what was sent."""
    sent = []
    monkeypatch.setattr(ulysses, "all_to_all", lambda x, group: (sent.append(x.shape), x.clone())[1])
    monkeypatch.setattr(ulysses, "_resolve_process_group", lambda name: Rank(0, int(name)))
    return sent


class Rank(SimpleNamespace):
    def __init__(self, rank, ranks):
        super().__init__(rank=rank, size=lambda: ranks)


def random_inputs(length, heads, groups, dtype=torch.float64, batch=BATCH):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, length, h, HEAD_DIM) for h in (heads, groups, groups, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def causal(q, k, v, plan=None):
    """Attention of whole, ordered sequences."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[3] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def slices(inputs, rank):
    return [x[:, rank * LOCAL : (rank + 1) * LOCAL] for x in inputs]


@pytest.mark.parametrize(
    ("heads", "groups", "degree", "legal"),
    [
        (8, 2, 3, "2 or 4"),  # no divisor of the query heads
        (8, 2, 16, "8"),  # more ranks than query heads
        (12, 6, 4, "3 or 6"),  # rank 1's query heads would belong to key/value heads 1 and 2, of which 4 ranks have 1.5
        (8, 2, 0, "1"),
    ],
)
def test_a_degree_that_does_not_fit_is_refused_with_the_nearest_that_does(heads, groups, degree, legal):
    with pytest.raises(ValueError, match=rf"parallel.ulysses={degree} .* {heads} query .* {groups} .* use {legal}$"):
        ulysses.check_ulysses(heads, groups, degree)
    for nearest in legal.split(" or "):
        ulysses.check_ulysses(heads, groups, int(nearest))


@pytest.mark.parametrize(("degree", "heads", "groups"), [*SPLITS, (1, 5, 1), (2, 12, 6), (6, 12, 6), (12, 12, 6)])
def test_degrees_that_fit(degree, heads, groups):
    ulysses.check_ulysses(heads, groups, degree)


def test_each_rank_gets_the_key_value_head_of_its_query_heads(on_ranks):
    """C028: 8 query heads and 2 key/value heads over 4 ranks."""

    def run(name, rank):
        q = torch.arange(8.0)[None, None, :, None].expand(1, LOCAL, 8, HEAD_DIM)
        k = torch.arange(2.0)[None, None, :, None].expand(1, LOCAL, 2, HEAD_DIM)
        held = ulysses.to_heads(q, k, k + 10, name, 4)
        assert all(x.eq(x[:, :1, :, :1]).all() for x in held)
        return [x[0, 0, :, 0].tolist() for x in held]

    results, _ = on_ranks(run, 4)
    assert results == [[[0, 1], [0], [10]], [[2, 3], [0], [10]], [[4, 5], [1], [11]], [[6, 7], [1], [11]]]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("degree", "heads", "groups"), SPLITS)
def test_every_token_arrives_in_storage_order_and_comes_back(on_ranks, degree, heads, groups, batch):
    whole = random_inputs(degree * LOCAL, heads, groups, batch=batch)

    def run(name, rank):
        q, k, v, _ = slices(whole, rank)
        held = ulysses.to_heads(q, k, v, name, degree)
        mine = range(rank * heads // degree, (rank + 1) * heads // degree)
        used = sorted({head // (heads // groups) for head in mine})
        want = [whole[0][:, :, list(mine)], whole[1][:, :, used], whole[2][:, :, used]]
        assert all(torch.equal(got, x) and got.is_contiguous() for got, x in zip(held, want, strict=True))
        assert torch.equal(ulysses.to_tokens(held[0], name, degree), q)

    on_ranks(run, degree)


@pytest.mark.parametrize(("degree", "heads", "groups"), SPLITS)
def test_equals_dense(on_ranks, degree, heads, groups):
    """out, dq, dk, dv of all ranks, and one message each way, forward and backward."""
    whole = random_inputs(degree * LOCAL, heads, groups)

    def run(name, rank):
        q, k, v, dout = slices(whole, rank)
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        out = ulysses.around(causal, name, degree)(q, k, v, None)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    parts, switch = on_ranks(run, degree)
    got = oracle.Attention(*(torch.cat(column, dim=1) for column in zip(*parts, strict=True)))
    documents = [(degree * LOCAL,)] * BATCH
    oracle.assert_close(got, oracle.dense(*whole, oracle.visible(documents, degree * LOCAL, None)), 1e-12)
    assert all(x.is_contiguous() for part in parts for x in part)
    token = BATCH * LOCAL * HEAD_DIM * 8
    qkv, out = token * (heads + 2 * max(groups, degree)), token * heads
    for rank in range(degree):
        assert [size for sender, size in switch.log if sender == rank] == [qkv, out, out, qkv]


def test_gradients_of_a_copied_head_are_summed_in_float32_and_rounded_once(on_ranks):
    """256 + 1 + 1 + 1 is 256 when each sum is rounded to bfloat16, and 260 when the total is."""
    shares = [256.0, 1.0, 1.0, 1.0]

    def run(name, rank):
        q, k, v = (torch.zeros(1, LOCAL, h, HEAD_DIM, dtype=torch.bfloat16).requires_grad_() for h in (4, 1, 1))
        held = ulysses.to_heads(q, k, v, name, 4)
        return torch.autograd.grad(held, (q, k, v), [torch.full_like(x, shares[rank]) for x in held])

    results, _ = on_ranks(run, 4)
    for dq, dk, dv in results:
        assert dq.dtype == dk.dtype == dv.dtype == torch.bfloat16
        assert dk.eq(260).all() and dv.eq(260).all()
        assert dq[0, 0, :, 0].tolist() == shares  # each query head has one owner


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ulysses_is_inner", [True, False])
def test_the_slices_of_the_ring_ranks_shares_are_a_permutation(layout, ulysses_is_inner):
    """C026: ulysses 2 × ring 3, in either order of the mesh: unshard(shard(x)) == x, to the bit."""
    degree, rings, length = 2, 3, 48
    local = length // (degree * rings)
    parts = {}
    for rank in range(degree * rings):
        ring_rank, ulysses_rank = divmod(rank, degree) if ulysses_is_inner else divmod(rank, rings)[::-1]
        share = chunks(layout, length, rings, ring_rank)
        mine = split(share, ulysses_rank * local, (ulysses_rank + 1) * local)
        assert sum(chunk.count for chunk in mine) == local
        parts[ring_rank, ulysses_rank] = global_index(mine)
    x = np.random.default_rng(0).standard_normal(length)
    index = np.concatenate(list(parts.values()))
    back = np.empty(length)
    back[index] = np.concatenate([x[part] for part in parts.values()])
    assert np.array_equal(back, x)
    for ring_rank in range(rings):
        stored = np.concatenate([parts[ring_rank, ulysses_rank] for ulysses_rank in range(degree)])
        assert np.array_equal(stored, global_index(chunks(layout, length, rings, ring_rank)))


@pytest.mark.parametrize(("degree", "heads", "groups"), [(2, 4, 4), (2, 4, 1), (4, 4, 4), (4, 8, 2)])
@pytest.mark.parametrize("length", [1, LOCAL])
def test_the_ops_keep_the_rules_of_custom_ops(echo, degree, heads, groups, length):
    for dtype, batch in ((torch.float64, 1), (torch.bfloat16, 2)):
        q, k, v, _ = (x.requires_grad_() for x in random_inputs(length, heads, groups, dtype, batch))
        library.opcheck(ulysses.to_heads, (q, k, v, str(degree), degree))
        held = [x.detach() for x in ulysses.to_heads(q, k, v, str(degree), degree)]
        library.opcheck(ulysses.to_heads_backward, (*held, groups, str(degree), degree))
        library.opcheck(ulysses.to_tokens, (held[0].requires_grad_(), str(degree), degree))
        library.opcheck(ulysses.to_tokens_backward, (q.detach(), str(degree), degree))


def test_compiles_once_and_whole(echo):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    attend = ulysses.around(lambda q, k, v, plan: q * k.sum(2, keepdim=True) + v.sum() * plan.sum(), "2", 2)
    compiled = torch.compile(lambda q, k, v, plan: attend(q * 2, k, v, plan) * 3, backend=counter, fullgraph=True)
    for step in range(3):
        q, k, v, dout = random_inputs(LOCAL, 4, 1)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        plan = torch.full((2 + step, 8), float(step), dtype=torch.float64)
        torch._dynamo.mark_dynamic(plan, 0)
        out = compiled(*leaves, plan)
        want = attend(q * 2, k, v, plan) * 3
        grads, want_grads = (torch.autograd.grad(x, leaves, dout) for x in (out, want))
        torch.testing.assert_close((out, *grads), (want, *want_grads))
    assert counter.frame_count == 1


@pytest.mark.parametrize(("kept", "sends"), [(KEPT, 4), ([], 6)])
def test_recompute_sends_nothing_again(echo, kept, sends):
    """Two exchanges forward and two backward; without saving the ops' results, two more forward."""
    weight = torch.ones(HEAD_DIM, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    attend = ulysses.around(causal, "2", 2)
    q, k, v, dout = random_inputs(LOCAL, 4, 2)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def layer(q, k, v):
        return attend(q @ weight, k @ weight, v @ weight, None) @ weight

    def context():
        return create_selective_checkpoint_contexts(kept)

    want = torch.autograd.grad(layer(*leaves), [*leaves, weight], dout)
    echo.clear()
    out = checkpoint(layer, *leaves, use_reentrant=False, preserve_rng_state=False, context_fn=context)
    got = torch.autograd.grad(out, [*leaves, weight], dout)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len(echo) == sends


def test_one_rank_needs_no_exchange():
    assert ulysses.around(causal, "", 1) is causal


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), "do not fit together"),
        (lambda q, k, v: (q, k[:, :2], v), "do not fit together"),
        (lambda q, k, v: (q, k[:, :2], v[:, :2]), "do not fit together"),
        (lambda q, k, v: (q, k[..., :4], v[..., :4]), "do not fit together"),
        (lambda q, k, v: (q[:, :, :3], k, v), "2 key/value heads do not divide 3 query heads"),
        (lambda q, k, v: (q, k.float(), v), "use one dtype and device"),
        (lambda q, k, v: (q[:, :, :2], k, v), "parallel.ulysses=4 .* use 2"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(echo, change, message):
    q, k, v, _ = random_inputs(LOCAL, 4, 2)
    with pytest.raises(ValueError, match=message):
        ulysses.around(causal, "4", 4)(*change(q, k, v), None)
    with pytest.raises(ValueError, match="degree=2, but the group has 4 ranks"):
        ulysses.around(causal, "4", 2)(q, k, v, None)
    assert not echo
