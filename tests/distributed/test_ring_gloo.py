"""The ring over real processes: a pairwise set of what is tested in full in one process."""

from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from model.kernels import reference, sdpa
from model.mask import Mask
from parallel import ring
from parallel.collectives import RingExchange, exchange_clock
from parallel.deal import deal
from parallel.route import Route
from parallel.schedule import NUM_HOPS, plan
from tests import cases, oracle
from tests.cases import ALL_LAYOUTS, GROUPS, MASKS, PRIME, ROUTES, TOLERANCE, Case, pairwise, random_inputs
from tests.harness import run_ranks
from tests.streams import like_nccl

WORLD_SIZES = (2, 3, 4)
KERNELS = {"sdpa": sdpa, "reference": reference}


def legal(case):
    _, ranks, route, _, nodes, *_ = case
    return bool(nodes) == ("via" in route) and (not nodes or ranks == 4)


FACTORS = (ALL_LAYOUTS, WORLD_SIZES, [*ROUTES], [*MASKS], (0, 2), GROUPS, [*TOLERANCE], [*KERNELS])
CASES = list(dict.fromkeys(Case(*values) for seed in (0, 1) for values in pairwise(FACTORS, legal, seed)))


def group_name():
    return dist.group.WORLD.group_name


def local(case):
    """(q, k, v, dout and plan of this rank, the truth for it, documents)."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    held, documents, window = cases.dealt(case.layout, ranks, case.mask)
    length = held.padded_length
    whole = cases.padded_inputs(case.groups, case.dtype, documents, length)
    table = torch.from_numpy(plan(held, Mask(window), documents, length, length, ranks, rank, case.how))
    truth = cases.truth(documents, window, case.groups)
    padded = [torch.cat([x, x.new_zeros(2, length - PRIME, *x.shape[2:])], dim=1) for x in truth]
    index, rows = torch.from_numpy(held.index(rank)), torch.arange(2)[:, None]
    return [x[rows, index] for x in whole], table, oracle.Attention(*(x[rows, index] for x in padded))


def assert_true(got, want, case):
    assert {x.dtype for x in got} == {case.dtype}
    oracle.assert_close(oracle.Attention(*got), want, TOLERANCE[case.dtype], str(case))


def attention_equals_dense(some):
    """Through the op, all cases with one pool of buffers; twice, so that each finds what the last one left in it."""
    for case in [*some, *some[::7]]:
        (q, k, v, dout), table, want = local(case)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        ring.require_same_plan(table, group_name())
        out, _ = ring.attend(q, k, v, table, group_name(), case.kernel)
        assert_true((out.detach(), *torch.autograd.grad(out, (q, k, v), dout)), want, case)
    assert exchange_clock.read_and_reset() > 0 and exchange_clock.read_and_reset() == 0
    return len(some)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_equals_dense(world_size):
    """out, dq, dk, dv on every rank, through the op (C002, C011, C031)."""
    some = [case for case in CASES if case.ranks == world_size]
    assert run_ranks(attention_equals_dense, world_size, some) == [len(some)] * world_size


def test_each_two_values_of_the_pairwise_set_meet():
    """Twice, in at most 200 cases; but for nodes, which only four ranks have, and the routes that do not know them."""
    assert len(CASES) <= 200 and all(legal(case) for case in CASES)
    met = {pair for case in CASES for pair in combinations(enumerate(case), 2)}
    for a, b in combinations(range(len(FACTORS)), 2):
        missing = {(x, y) for x in FACTORS[a] for y in FACTORS[b] if ((a, x), (b, y)) not in met}
        via = [route for route in ROUTES if "via" in route]
        apart = {(ranks, route) for ranks in (2, 3) for route in via} | {(2, 2), (3, 2)}
        apart |= {(route, 0 if route in via else 2) for route in ROUTES}
        assert missing <= apart, (missing, a, b)


def attention_by_the_rules_of_nccl(some):
    with like_nccl() as device:
        ring.warm_up(group_name(), Route("direct"), torch.device("cpu"))
        for case in some:
            (q, k, v, dout), table, want = local(case)
            kernel, exchange, buffers = KERNELS[case.kernel], RingExchange(dist.group.WORLD), ring.BUFFERS["stream"]
            before, program = device.num_works, ring.Program(table)
            out, lse = ring.forward(q, k, v, table, exchange, kernel, buffers)
            forward = device.num_works - before
            grads = ring.backward(dout, q, k, v, out.to(q.dtype), lse, table, exchange, kernel, buffers)
            assert_true((out, *grads), want, case)
            if not program.head_groups:  # one work for each exchange that has messages, forward those of keys
                exchanges = [{e for kind, e in program.messages if kind in kinds} for kinds in ((0, 1), (0, 1, 2, 3))]
                assert [forward, device.num_works - before - forward] == [len(each) for each in exchanges]
    return len(some)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_equals_dense_by_the_rules_of_nccl(world_size):
    """One work a batch, waits that return at once, buffers that hold nothing before the device's next operation."""
    some = [case for case in CASES if case.ranks == world_size]
    assert run_ranks(attention_by_the_rules_of_nccl, world_size, some) == [len(some)] * world_size


def the_rules():
    """What a ring that broke them would meet: gloo alone would let it."""
    with like_nccl() as device:
        exchange = RingExchange(dist.group.WORLD)
        peer, here, there = 1 - exchange.rank, torch.full((3,), float(exchange.rank)), torch.zeros(3)
        store = dist.distributed_c10d._get_default_store()
        if exchange.rank == 0:
            store.wait(["rank 1 has waited"])  # which did not take until there was something
        pending = exchange.start([(peer, here)], [(peer, there)])
        assert len(pending.works) == 1 and there.isnan().all(), "read before it is waited for"
        pending.wait()
        assert len(device.waited) == 1
        store.set(f"rank {exchange.rank} has waited", "")
        assert (there + 0).eq(peer).all() and not device.waited
        pending = exchange.start([(peer, here)], [(peer, there)])
        here += 1
        pending.wait()
        with pytest.raises(AssertionError, match="a send buffer was written"):
            there + 0  # noqa: B018 - the next operation


def test_the_rules_of_nccl_are_strict():
    run_ranks(the_rules, 2)


def count_exchanges(saves, route):
    """Exchanges of one layer under recompute."""
    ranks = dist.get_world_size()
    (q, k, v, dout), table, want = local(Case("zigzag", ranks, route, "causal", 0, 2, torch.float64, "sdpa"))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    started = []
    plain = {name: getattr(RingExchange, name) for name in ("start", "gather", "scatter_sum")}
    for name, method in plain.items():
        setattr(RingExchange, name, lambda *args, method=method: (started.append(1), method(*args))[1])

    def policy(ctx, op, *args, **kwargs):
        kept = saves and op == torch.ops.longhaul.attend.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k, v):
        return ring.attend(q * 1.0, k * 1.0, v * 1.0, table, group_name(), "sdpa")[0] * 1.0

    context_fn = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    out = checkpoint(block, q, k, v, use_reentrant=False, context_fn=context_fn)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    oracle.assert_close(oracle.Attention(out.detach(), *grads), want, 1e-12)
    assert table[0, NUM_HOPS] == ranks or route.startswith("gather")
    return len(started)


@pytest.mark.parametrize(
    ("route", "forward", "backward"), [("relay", 2, 4), ("direct", 2, 4), ("gather, each head", 2, 4)]
)
def test_recompute_never_sends_a_byte_again(route, forward, backward):
    """A ring of 3: the exchanges of one pass each; recompute that does not save the op adds one forward pass."""
    assert run_ranks(count_exchanges, 3, True, route) == [forward + backward] * 3
    assert run_ranks(count_exchanges, 3, False, route) == [2 * forward + backward] * 3


def turn_blocks(num_bytes, dtype):
    """Ten hops of a block round the ring; each hop both sends and receives."""
    exchange = RingExchange(dist.group.WORLD)
    here = torch.full((num_bytes // dtype.itemsize,), float(exchange.rank), dtype=dtype)
    spare = torch.empty_like(here)
    after, before = (exchange.rank + 1) % exchange.size, (exchange.rank - 1) % exchange.size
    for hop in range(1, 11):
        exchange.start([(after, here)], [(before, spare)]).wait()
        here, spare = spare, here
        assert here.eq((exchange.rank - hop) % exchange.size).all()


@pytest.mark.parametrize(("world_size", "num_bytes"), [(2, 16 << 10), (3, 16 << 10), (4, 16 << 10), (3, 64 << 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_any_size_go_round_rings_of_any_size(world_size, num_bytes, dtype):
    """C111: no order of sends and receives to deadlock on, small blocks or large, even rings or odd."""
    run_ranks(turn_blocks, world_size, num_bytes, dtype, timeout=60)


def exchange_with_everybody():
    """Several messages between two ranks pair up in order; sums and gathers of bfloat16 and float64."""
    exchange = RingExchange(dist.group.WORLD)
    others = [peer for peer in range(exchange.size) if peer != exchange.rank]
    sends = [(peer, torch.full((n + 1,), 10.0 * exchange.rank + n)) for n in range(3) for peer in others]
    receives = [(peer, torch.zeros(n + 1)) for n in range(3) for peer in reversed(others)]
    exchange.start(sends, receives).wait()
    assert all(x.eq(10 * peer + len(x) - 1).all() for peer, x in receives)
    for dtype in (torch.bfloat16, torch.float64):
        part, into = torch.full((2, 3), exchange.rank + 1.0, dtype=dtype), torch.zeros(exchange.size, 2, 3, dtype=dtype)
        exchange.gather(into, part).wait()
        assert all(into[rank].eq(rank + 1).all() for rank in range(exchange.size))
        exchange.scatter_sum(part, into).wait()
        assert part.eq(exchange.size * (exchange.rank + 1)).all()


def test_messages_between_two_ranks_pair_up_in_order():
    run_ranks(exchange_with_everybody, 3)


def bad_plan():
    """A plan for another length or rank is refused on every rank before anything is sent."""
    q, k, v, _ = random_inputs(8)
    held = deal("zigzag", [(16,)] * 2, 16, 2)
    table = torch.from_numpy(plan(held, Mask(), [(16,)] * 2, 16, 16, 2, dist.get_rank()))
    other = torch.from_numpy(plan(held, Mask(), [(16,)] * 2, 16, 16, 2, 1 - dist.get_rank()))
    for x, wrong in (((q[:, :-2], k[:, :-2], v[:, :-2]), table), ((q, k, v), other)):
        with pytest.raises(ValueError, match="make it with parallel.schedule.plan"):
            ring.attend(*(part.contiguous() for part in x), wrong, group_name(), "sdpa")


def test_a_plan_for_something_else_is_refused():
    run_ranks(bad_plan, 2)
