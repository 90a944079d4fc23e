"""The ring over real processes: a pairwise set of what is tested in full in one process."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from model.mask import Mask
from parallel import ring
from parallel.collectives import RelayExchange, exchange_clock
from parallel.layout import LAYOUTS, chunks, global_index, padded_length
from parallel.schedule import NUM_HOPS, plan
from tests import oracle
from tests.harness import run_ranks

PRIME, HEADS, HEAD_DIM = 67, 4, 8

# layout, documents of two sequences, window, key/value heads, kernel, dtype
CASES = [
    ("contiguous", [(PRIME,), (20, 1, 1, 30, 15)], None, 4, "sdpa", torch.float64),
    ("contiguous", [(PRIME,), (3, 5)], 6, 1, "reference", torch.float64),
    ("zigzag", [(20, 47), (PRIME,)], None, 2, "sdpa", torch.float64),
    ("zigzag", [(PRIME,), ()], 12, 4, "sdpa", torch.float32),
    ("striped", [(40, 2, 25), (PRIME,)], None, 1, "sdpa", torch.float32),
    ("striped", [(PRIME,), (33, 34)], 2, 2, "sdpa", torch.float64),
]


def rank_inputs(layout, documents, window, groups, dtype):
    """(q, k, v, dout and plan of this rank, the truth for it)."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    padded = padded_length(layout, PRIME, ranks)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, padded, heads, HEAD_DIM) for heads in (HEADS, groups, groups, HEADS)]
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    index = torch.from_numpy(global_index(chunks(layout, padded, ranks, rank)))
    table = torch.from_numpy(plan(layout, Mask(window), documents, PRIME, padded, ranks, rank))
    truth = oracle.dense(*whole, oracle.visible(documents, padded, window))
    return [x[:, index] for x in whole], table, oracle.Attention(*(x[:, index] for x in truth))


def group_name():
    return dist.group.WORLD.group_name


def attention_equals_dense():
    for layout, documents, window, groups, kernel, dtype in CASES:
        (q, k, v, dout), table, want = rank_inputs(layout, documents, window, groups, dtype)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out, _ = ring.attend(q, k, v, table, group_name(), kernel)
        grads = torch.autograd.grad(out, (q, k, v), dout)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        oracle.assert_close(oracle.Attention(out.detach(), *grads), want, tolerance, f"{layout} {documents} {window}")
    assert exchange_clock.read_and_reset() > 0 and exchange_clock.read_and_reset() == 0


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_dense(world_size):
    """out, dq, dk, dv on every rank, through the op (C002, C011, C031)."""
    run_ranks(attention_equals_dense, world_size)


def count_exchanges(saves):
    """Exchanges of one layer under recompute."""
    (q, k, v, dout), table, want = rank_inputs("zigzag", [(PRIME,), (20, 47)], None, 2, torch.float64)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    started = []
    plain = RelayExchange.start
    RelayExchange.start = lambda self, *args, **kwargs: (started.append(1), plain(self, *args, **kwargs))[1]

    def policy(ctx, op, *args, **kwargs):
        kept = saves and op == torch.ops.longhaul.attend.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k, v):
        return ring.attend(q * 1.0, k * 1.0, v * 1.0, table, group_name(), "sdpa")[0] * 1.0

    out = checkpoint(
        block, q, k, v, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )
    grads = torch.autograd.grad(out, (q, k, v), dout)
    oracle.assert_close(oracle.Attention(out.detach(), *grads), want, 1e-12)
    assert table[0, NUM_HOPS] == dist.get_world_size()
    return len(started)


def test_recompute_never_sends_a_byte_again():
    """Ring of 3: two exchanges forward and four backward; recompute without saving the op would add two."""
    assert run_ranks(count_exchanges, 3, True) == [6] * 3
    assert run_ranks(count_exchanges, 3, False) == [8] * 3


def turn_blocks(num_bytes, dtype):
    """Ten hops of a block round the ring; each hop both sends and receives."""
    exchange = RelayExchange(dist.group.WORLD)
    here = torch.full((num_bytes // dtype.itemsize,), float(exchange.rank), dtype=dtype)
    spare = torch.empty_like(here)
    for hop in range(1, 11):
        exchange.start([here], [spare]).wait()
        here, spare = spare, here
        assert here.eq((exchange.rank - hop) % exchange.size).all()


@pytest.mark.parametrize(("world_size", "num_bytes"), [(2, 16 << 10), (3, 16 << 10), (4, 16 << 10), (3, 64 << 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_any_size_go_round_rings_of_any_size(world_size, num_bytes, dtype):
    """C111: no order of sends and receives to deadlock on, small blocks or large, even rings or odd."""
    run_ranks(turn_blocks, world_size, num_bytes, dtype, timeout=60)


def bad_plan():
    """A plan for another length is refused on every rank before anything is sent."""
    (q, k, v, _), table, _ = rank_inputs("zigzag", [(PRIME,)] * 2, None, 2, torch.float32)
    for wrong in (q[:, :-2], q):
        with pytest.raises(ValueError, match="make it with parallel.schedule.plan"):
            other = table.clone()
            other[0, 1] += wrong is q
            ring.attend(wrong, k[:, : wrong.shape[1]], v[:, : wrong.shape[1]], other, group_name(), "sdpa")


def test_a_plan_for_something_else_is_refused():
    run_ranks(bad_plan, 2)


def test_all_layouts_are_on_the_wire():
    assert {case[0] for case in CASES} == set(LAYOUTS)
