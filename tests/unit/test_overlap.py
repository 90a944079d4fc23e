"""What is under way while a hop is computed, and the memory that it lies in."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model.kernels import sdpa
from model.mask import Mask
from parallel.layout import Chunk, assemble
from parallel.messages import CLEAR, RECEIVE_KEYS, SEND_GRADIENTS, SEND_KEYS
from parallel.route import Route
from parallel.schedule import HOP, plan, tile_rows
from parallel.traffic import Block, Buffers, Program, begin
from tests import cases
from tests.cases import random_inputs
from tests.threads import Network, QueueExchange, ring_attention

CPU = torch.device("cpu")


@pytest.mark.parametrize(("ranks", "depth"), [(3, 1), (5, 1), (5, 3), (4, 3)])
def test_blocks_are_on_their_way_before_earlier_ones_are_computed(ranks, depth):
    """Exchange e is posted before hop e - depth + 1 and waited for after hop e, forward and backward, on every rank."""
    events = []

    class Recorded(QueueExchange):
        def start(self, sends, receives):
            self.number = getattr(self, "number", -1) + 1
            number = self.number
            events.append((self.rank, f"start {number}"))
            pending = super().start(sends, receives)
            return SimpleNamespace(wait=lambda: (events.append((self.rank, f"wait {number}")), pending.wait()))

    def recorded(rank):
        def compute(call):
            return lambda *args, **into: (events.append((rank, "compute")), call(*args, **into))[1]

        return SimpleNamespace(forward=compute(sdpa.forward), backward=compute(sdpa.backward))

    length = 8 * ranks
    inputs, route = random_inputs(length), Route("direct", depth=depth) if depth > 1 else Route()
    ring_attention(inputs, "zigzag", [(length,)] * 2, None, ranks, recorded, exchange=Recorded, route=route)
    keys = range(ranks - 1)
    gradients = range(1 + depth, ranks + depth)  # of hops 1 … ranks - 1
    want, first = [], 0
    for exchanges in (list(keys), sorted({*keys, *gradients})):
        names = {e: first + n for n, e in enumerate(exchanges)}
        for hop in range(max(ranks, exchanges[-1] + 1)):
            due = [e for e in exchanges if e - depth + 1 == hop or (hop == 0 and e - depth + 1 < 0)]
            want += [f"start {names[e]}" for e in due]
            want += ["compute"] * (hop < ranks)
            want += [f"wait {names[hop]}"] if hop in names else []
        first += len(exchanges)
    for rank in range(ranks):
        assert [what for who, what in events if who == rank] == want


def test_a_gather_brings_the_next_heads_while_these_are_computed():
    events = []

    class Recorded(QueueExchange):
        def _noted(self, name, pending):
            events.append((self.rank, name))
            plain = pending.wait
            pending.wait = lambda: (events.append((self.rank, f"{name} done")), plain())
            return pending

        def gather(self, into, part):
            return self._noted("keys", super().gather(into, part))

        def scatter_sum(self, into, parts):
            return self._noted("sums", super().scatter_sum(into, parts))

    def recorded(rank):
        return SimpleNamespace(
            forward=lambda *args, **into: (events.append((rank, "compute")), sdpa.forward(*args, **into)),
            backward=lambda *args, **into: (events.append((rank, "compute")), sdpa.backward(*args, **into)),
        )

    route = Route("gather", head_groups=2)
    ring_attention(random_inputs(24), "zigzag", [(24,)] * 2, None, 3, recorded, exchange=Recorded, route=route)
    forward = ["keys", "keys done", "keys", "compute", "keys done", "compute"]
    backward = [
        "keys",
        "keys done",
        "keys",
        "compute",
        "keys done",
        "sums",
        "compute",
        "sums done",
        "sums",
        "sums done",
    ]
    for rank in range(3):
        assert [what for who, what in events if who == rank] == forward + backward


def test_buffers_grow_and_are_used_again():
    pool = Buffers()
    small = pool.take("keys", (3, 2), torch.float32, CPU)
    assert small.shape == (3, 2) and small.dtype == torch.float32 and small.is_contiguous() and pool.num_bytes == 24
    as_wide = pool.take("keys", (2, 3), torch.float32, CPU)
    narrower = pool.take("keys", (5,), torch.bfloat16, CPU)
    assert small.data_ptr() == as_wide.data_ptr() == narrower.data_ptr() and pool.num_bytes == 24
    large = pool.take("keys", (2, 2), torch.float64, CPU)
    assert pool.num_bytes == 32 and large.data_ptr() == pool.take("keys", (3, 2), torch.float32, CPU).data_ptr()
    other = pool.take("gradients", (3, 2), torch.float32, CPU)
    assert pool.num_bytes == 56 and other.data_ptr() != large.data_ptr()
    pool.take("keys", (3, 2), torch.float32, torch.device("meta"))
    assert pool.num_bytes == 80
    assert pool.take("nothing", (0, 2), torch.float32, CPU).shape == (0, 2)


@pytest.mark.parametrize("route", cases.EACH_ROUTE)
def test_a_pool_does_not_grow_after_the_first_layer(route):
    """And a smaller micro-batch takes no new memory."""
    pools = [Buffers() for _ in range(4)]
    sizes = []
    for length in (64, 64, 32):
        inputs = random_inputs(length)
        ring_attention(inputs, "zigzag", [(length,)] * 2, None, 4, sdpa, route=route, buffers=lambda rank: pools[rank])
        sizes.append([each.num_bytes for each in pools])
    assert sizes[0] == sizes[1] == sizes[2] and min(sizes[0]) > 0


def test_a_program_is_what_the_plan_says():
    """Spans by kind, exchange and peer; tiles by hop, and after a gather those of hop 1 for each group of heads."""
    table = plan("zigzag", Mask(), [(16,)], 16, 16, 4, 1)
    program = Program(torch.from_numpy(table))
    assert (program.ranks, program.depth, program.local_rows, program.buffer_rows) == (4, 1, 4, 8)
    assert program.num_batches == 5 and program.head_groups == 0 and not program.narrow
    assert [len(hop) for hop in program.hops] == np.bincount(tile_rows(table)[:, HOP]).tolist()
    assert program.messages[SEND_KEYS, 0] == {2: [(0, 4)]} and program.messages[RECEIVE_KEYS, 0] == {0: [(4, 8)]}
    assert program.messages[SEND_GRADIENTS, 4] == {2: [(4, 8)]} and program.messages[CLEAR, 1] == {-1: [(4, 8)]}
    gather = Program(torch.from_numpy(plan("zigzag", Mask(), [(16,)], 16, 16, 4, 1, Route("gather", head_groups=3))))
    assert len(gather.hops) == 4 and len(gather.hops[0]) == 0 and gather.head_groups == 3 and not gather.messages
    assert all(hop is gather.hops[1] for hop in gather.hops[1:])
    assert Program(torch.from_numpy(plan("zigzag", Mask(), [(16,)], 16, 16, 4, 1, Route("direct", narrow=True)))).narrow


def test_blocks_of_some_heads_are_seen_by_theirs():
    k = torch.zeros(3, 1, 2)
    assert Block(k, k).heads(8) == slice(0, 8)
    assert [Block(k, k, group, 4).heads(8) for group in range(4)] == [slice(2 * g, 2 * g + 2) for g in range(4)]


def test_groups_of_heads_must_divide_them():
    program = Program(torch.from_numpy(plan("zigzag", Mask(), [(16,)], 16, 16, 4, 1, Route("gather", head_groups=3))))
    k = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match="head_groups=3 does not divide 2 key/value heads"):
        begin(program, QueueExchange(Network(), 1, 4), Buffers(), k, k)


def test_a_rank_that_shares_nothing_has_no_exchange():
    """Each document on its own rank: the keys are computed with where they lie."""
    held = assemble([[[Chunk(0, 8)], [Chunk(8, 8)]]], 16)
    program = Program(torch.from_numpy(plan(held, Mask(), [(8, 8)], 16, 16, 2, 0)))
    k = torch.randn(8, 2, 4)
    traffic = begin(program, None, Buffers(), k, k, torch.float32)
    assert traffic.at(0).k.data_ptr() == k.data_ptr() and traffic.gradients_at(0)[0].eq(0).all()
