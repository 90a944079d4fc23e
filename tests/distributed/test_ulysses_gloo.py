"""Ulysses over real processes: alone around dense attention, and around the ring."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from model.mask import Mask
from parallel import ring, ulysses
from parallel.deal import deal
from parallel.layout import LAYOUTS, global_index, padded_length, restore, split
from parallel.route import Route
from parallel.schedule import plan
from tests import oracle
from tests.harness import run_ranks

HEAD_DIM = 8
KEPT = ("to_heads", "attend", "to_tokens")  # the ops whose results recompute saves

# query heads, key/value heads, documents of two sequences of 16 tokens, window: with two ranks and with four, heads
# are shared out and copied
CASES = [
    (8, 8, [(16,), (16,)], None),
    (8, 4, [(3, 13), (16,)], None),
    (8, 2, [(16,), (5, 6)], 4),
    (8, 1, [(1, 1, 14), ()], None),
    (4, 1, [(16,), (16,)], 1),
]


def random_inputs(length, heads, groups, batch):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, length, h, HEAD_DIM) for h in (heads, groups, groups, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def dense_attend(q, k, v, seen):
    """Attention of whole sequences, whose plan is what each query sees, bool[B, T, T]. Blind rows give zero."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[3] ** 0.5
    weights = scores.masked_fill(~seen[:, None], -1e300).softmax(-1) * seen.any(-1)[:, None, :, None]
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def differentiate(attend, inputs, table):
    """(out, dq, dk, dv) of this rank."""
    *leaves, dout = inputs
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = attend(*leaves, table)
    return oracle.Attention(out.detach(), *torch.autograd.grad(out, leaves, dout))


def ulysses_equals_dense():
    degree, rank = dist.get_world_size(), dist.get_rank()
    attend = ulysses.around(dense_attend, dist.group.WORLD.group_name, degree)
    for heads, groups, documents, window in CASES:
        whole = random_inputs(16, heads, groups, batch=2)
        seen = oracle.visible(documents, 16, window)
        mine = slice(rank * 16 // degree, (rank + 1) * 16 // degree)
        got = differentiate(attend, [x[:, mine] for x in whole], seen)
        want = oracle.Attention(*(x[:, mine] for x in oracle.dense(*whole, seen)))
        oracle.assert_close(got, want, 1e-12, f"{heads} heads, {groups} groups, {degree} ranks")


@pytest.mark.parametrize("world_size", [2, 4])
def test_equals_dense(world_size):
    """out, dq, dk, dv (C028: 8 query heads, 2 key/value heads, 4 ranks; and fewer, as many, and 8)."""
    run_ranks(ulysses_equals_dense, world_size)


class Place:
    """This rank's place among ulysses × ring: with `ulysses_is_inner` the ulysses peers are neighbours."""

    def __init__(self, degree, ulysses_is_inner):
        world, rank = dist.get_world_size(), dist.get_rank()
        self.degree, self.rings = degree, world // degree
        shape = (self.rings, degree) if ulysses_is_inner else (degree, self.rings)
        grid = np.arange(world).reshape(shape)
        grid = grid if ulysses_is_inner else grid.T
        self.ring_rank, self.ulysses_rank = np.argwhere(grid == rank)[0].tolist()
        groups = [dist.new_subgroups_by_enumeration(peers.tolist())[0] for peers in (grid, grid.T)]
        self.ulysses_name, self.ring_name = (group.group_name for group in groups)

    def attend(self, kernel):
        """Ulysses around the ring."""
        name = self.ring_name if self.rings > 1 else ""
        around_ring = lambda q, k, v, table: ring.attend(q, k, v, table, name, kernel)[0]  # noqa: E731
        return ulysses.around(around_ring, self.ulysses_name, self.degree)

    def index(self, laid):
        """Global index of each of this rank's tokens, int64[B, L]."""
        local = laid.local_length // self.degree
        mine = slice(self.ulysses_rank * local, (self.ulysses_rank + 1) * local)
        parts = [split(chunks, mine.start, mine.stop) for chunks in laid.chunks(self.ring_rank)]
        return torch.from_numpy(np.stack([global_index(part) for part in parts]))


def around_the_ring(ulysses_is_inner, length, cases):
    """For each case: this rank's index, its rank on the ring and within ulysses, out, dq, dk, dv."""
    place = Place(2, ulysses_is_inner)
    results = []
    for layout, heads, groups, documents, window, kernel, route in cases:
        padded = padded_length(layout, length, place.rings, multiple=place.degree)
        index = place.index(deal(layout, documents, padded, place.rings))
        given = (layout, Mask(window), documents, length, padded, place.rings, place.ring_rank, Route(route))
        table = torch.from_numpy(plan(*given))
        whole = random_inputs(padded, heads, groups, batch=len(documents))
        mine = [torch.stack([x[b, index[b]] for b in range(len(x))]) for x in whole]
        got = differentiate(place.attend(kernel), mine, table)
        results.append((index.numpy(), place.ring_rank, place.ulysses_rank, *(x.numpy() for x in got)))
    return results


@pytest.mark.parametrize("ulysses_is_inner", [True, False])
@pytest.mark.parametrize("length", [16, 67])
def test_around_the_ring_equals_dense(length, ulysses_is_inner):
    """C026: ulysses 2 × ring 2, all layouts and routes, either order of the mesh: out, dq, dk, dv, every token back."""
    cases = [
        (layout, *rest)
        for layout in LAYOUTS
        for rest in (
            (4, 2, [(length,)], None, "sdpa", "relay"),
            (4, 1, [(5, length - 5), (length,)], None, "sdpa", "direct"),
            (8, 4, [(length,), (3, 7)], 5, "reference", "gather"),
        )
    ]
    by_rank = run_ranks(around_the_ring, 4, ulysses_is_inner, length, cases)
    for case, *parts in zip(cases, *by_rank, strict=True):
        layout, heads, groups, documents, window, *_ = case
        padded = sum(part[0].shape[1] for part in parts)
        order = np.argsort(np.concatenate([part[0] for part in parts], axis=1), axis=1)
        columns = [np.concatenate(column, axis=1) for column in list(zip(*parts, strict=True))[3:]]
        ordered = [np.stack([x[b, order[b]] for b in range(len(x))]) for x in columns]
        got = oracle.Attention(*map(torch.from_numpy, ordered))
        whole = random_inputs(padded, heads, groups, batch=len(documents))
        want = oracle.dense(*whole, oracle.visible(documents, padded, window))
        oracle.assert_close(got, want, 1e-12, str(case))
        shares = [np.concatenate([p[3] for p in sorted(parts, key=lambda p: p[2]) if p[1] == r], 1) for r in range(2)]
        assert np.array_equal(restore(shares, deal(layout, documents, padded, 2)), ordered[0])


def count_exchanges(kept):
    """Bytes of each all-to-all of one layer whose recompute saves what the ops `kept` return."""
    place, documents = Place(2, True), [(16,), (7, 9)]
    index = place.index(deal("zigzag", documents, 16, 2))
    table = torch.from_numpy(plan("zigzag", Mask(), documents, 16, 16, 2, place.ring_rank))
    whole = random_inputs(16, 4, 1, batch=2)
    *leaves, dout = (torch.stack([x[b, index[b]] for b in range(2)]) for x in whole)
    leaves = [x.requires_grad_() for x in leaves]
    weight = torch.eye(HEAD_DIM, dtype=torch.float64, requires_grad=True)
    sent, plain = [], ulysses.all_to_all
    ulysses.all_to_all = lambda x, group: (sent.append(x.nbytes), plain(x, group))[1]

    def layer(q, k, v):
        return place.attend("sdpa")(q @ weight, k @ weight, v @ weight, table) @ weight

    context = partial(create_selective_checkpoint_contexts, [getattr(torch.ops.longhaul, op).default for op in kept])
    out = checkpoint(layer, *leaves, use_reentrant=False, preserve_rng_state=False, context_fn=context)
    grads = torch.autograd.grad(out, leaves, dout)
    truth = oracle.dense(*whole, oracle.visible(documents, 16, None))
    want = oracle.Attention(*(torch.stack([x[b, index[b]] for b in range(2)]) for x in truth))
    oracle.assert_close(oracle.Attention(out.detach(), *grads), want, 1e-12)
    return sent


def test_recompute_sends_nothing_again():
    """Two all-to-alls forward and two backward; without saving what the ops return, two more forward."""
    token = 2 * 4 * HEAD_DIM * 8  # bytes of one head of this rank's tokens
    qkv, out = token * (4 + 2 * 2), token * 4
    assert run_ranks(count_exchanges, 4, KEPT) == [[qkv, out, out, qkv]] * 4
    assert run_ranks(count_exchanges, 4, ("attend",)) == [[qkv, out, qkv, out, out, qkv]] * 4


def compiled_equals_plain():
    """The graph has no break, and is compiled once."""
    counter = CompileCounterWithBackend("aot_eager")
    degree, rank = dist.get_world_size(), dist.get_rank()
    attend = ulysses.around(dense_attend, dist.group.WORLD.group_name, degree)
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    mine = slice(rank * 16 // degree, (rank + 1) * 16 // degree)
    for window in (None, 3):
        seen = oracle.visible([(16,), (4, 12)], 16, window)
        inputs = [x[:, mine] for x in random_inputs(16, 4, 1, batch=2)]
        got, want = (differentiate(each, inputs, seen) for each in (compiled, attend))
        oracle.assert_close(got, want, 1e-12)
    assert counter.frame_count == 1


def test_compiles_whole_and_once():
    run_ranks(compiled_equals_plain, 2)


def sends_other_dtypes(dtype):
    """Rows go where they belong, in any dtype that a model computes in."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = torch.arange(ranks, dtype=dtype)[:, None].expand(-1, 3).contiguous() + 10 * rank
    want = 10 * torch.arange(ranks, dtype=dtype)[:, None].expand(-1, 3) + rank
    assert torch.equal(ulysses.all_to_all(x, dist.group.WORLD), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_to_all(dtype):
    run_ranks(sends_other_dtypes, 3, dtype)
