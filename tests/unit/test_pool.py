"""The pool of a ring: what is reserved beforehand is what passes take, to the byte, whatever the route."""

from collections import defaultdict
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from model.kernels import sdpa
from model.mask import Mask
from parallel import pool, ring, ulysses
from parallel.pool import ACCUMULATED, GRADIENTS, KEYS, pool_bytes
from parallel.route import Route
from parallel.schedule import plan
from parallel.traffic import Buffers
from tests import cases
from tests.allocated import peak_bytes
from tests.cases import EACH_ROUTE, HEAD_DIM, HEADS, MASKS, ROUTES, random_inputs
from tests.threads import ring_attention

GROUPS = 4
CPU = torch.device("cpu")


class WatchedBuffers(Buffers):
    """A pool that notes how much of each storage was asked for, and holds nothing that could be of use."""

    def __init__(self):
        super().__init__()
        self.taken: dict[str, int] = defaultdict(int)

    def take(self, name, shape, dtype, device):
        taken = super().take(name, shape, dtype, device).fill_(torch.nan)
        self.taken[name] = max(self.taken[name], taken.nbytes)
        return taken


DTYPES = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float64)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("layout", cases.ALL_LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_what_is_reserved_is_what_is_taken(ranks, layout):
    """Every route, depth and mask in turn: nothing grows, and no storage is a byte larger than it must be."""
    routes = [ROUTES[name](nodes, GROUPS) for name, nodes in cases.routes_of(ranks)]
    routes += [Route("direct", depth=2, narrow=True)] if ranks > 1 else []
    for number, (mask, route) in enumerate(product(MASKS, routes)):
        if ranks > 1 and (number + len(layout)) % 4:
            continue
        held, documents, window = cases.dealt(layout, ranks, mask)
        dtype, length = DTYPES[number // 4 % 4], held.padded_length
        pools, said = [WatchedBuffers() for _ in range(ranks)], []
        for rank, room in enumerate(pools):
            table = plan(held, Mask(window), documents, length, length, ranks, rank, route)
            said.append(pool_bytes([table], HEADS, GROUPS, HEAD_DIM, dtype.itemsize))
            room.reserve(said[rank], CPU)
        inputs = random_inputs(length, GROUPS, dtype, heads=HEADS)
        how = {"route": route, "buffers": lambda rank: pools[rank], "dtype": dtype}  # noqa: B023
        got = ring_attention(inputs, held, documents, window, ranks, sdpa, **how)
        assert {x.dtype for x in got} == {dtype} and not any(x.isnan().any() for x in got)
        for rank, (room, sizes) in enumerate(zip(pools, said, strict=True)):
            assert room.taken == sizes == room.sizes(), (mask, route, dtype, rank)
            assert room.num_grown == 0 and room.num_bytes == sum(sizes.values())


@pytest.mark.parametrize("route", [*EACH_ROUTE, Route("direct", depth=2, narrow=True)])
def test_results_are_rounded_once(route):
    """What is returned in 16 bits is what was added up in float32, to the bit."""
    inputs, documents = random_inputs(64, GROUPS, torch.bfloat16, heads=HEADS), [(64,), (20, 44)]
    for ranks, way in ((1, Route()), (4, route)):
        rounded, exact = (
            ring_attention(inputs, "zigzag", documents, None, ranks, sdpa, route=way, dtype=dtype)
            for dtype in (torch.bfloat16, None)
        )
        for a, b in zip(rounded, exact, strict=True):
            assert a.dtype == torch.bfloat16 and b.dtype == torch.float32 and torch.equal(a, b.bfloat16())


def test_plans_share_what_they_need_most_of():
    """Layers with and without a window, and batches with other documents, one after the other."""
    made = [
        plan("zigzag", mask, [(64,)], 64, 64, 4, 1, route)
        for mask, route in ((Mask(), Route()), (Mask(20), Route("direct", depth=3)), (Mask(), Route("gather")))
    ]
    apart = [pool_bytes([table], HEADS, GROUPS, HEAD_DIM, 2) for table in made]
    together = pool_bytes(made, HEADS, GROUPS, HEAD_DIM, 2)
    assert together.keys() == set().union(*apart)
    assert all(size == max(sizes.get(name, 0) for sizes in apart) for name, size in together.items())


def test_of_one_long_document():
    """Closed forms: arenas of the rank's block and two of others, and where the last sums arrive."""
    rows, block = 16, 16 * 2 * GROUPS * HEAD_DIM
    table = plan("zigzag", Mask(), [(64,)], 64, 64, 4, 0, Route())
    assert pool_bytes([table], HEADS, GROUPS, HEAD_DIM, 2) == {
        ACCUMULATED: 4 * rows * HEADS * HEAD_DIM,
        KEYS: 3 * block * 2,
        GRADIENTS: 3 * block * 4,
        "arriving 0": block * 4,
    }
    alone = plan("contiguous", Mask(), [(64,)], 64, 64, 1, 0)
    assert pool_bytes([alone], HEADS, GROUPS, HEAD_DIM, 4) == {}
    assert pool_bytes([alone], HEADS, GROUPS, HEAD_DIM, 2) == {
        ACCUMULATED: 4 * 64 * HEADS * HEAD_DIM,
        GRADIENTS: 4 * 64 * 2 * GROUPS * HEAD_DIM,
    }


@pytest.fixture
def empty_pools(monkeypatch):
    monkeypatch.setattr(ring, "BUFFERS", defaultdict(Buffers))


def test_the_op_takes_what_was_reserved(empty_pools):
    table = torch.from_numpy(plan("contiguous", Mask(), [(64,)], 64, 64, 1, 0))
    given = [table], HEADS, GROUPS, HEAD_DIM, torch.bfloat16, CPU
    size = ring.reserve("", *given)
    assert size == ring.BUFFERS[""].num_bytes == ring.reserve("", *given)
    q, k, v, dout = random_inputs(64, GROUPS, torch.bfloat16, heads=HEADS, batch=1)
    out, _ = ring.attend(*(x.requires_grad_() for x in (q, k, v)), table, "", "sdpa")
    torch.autograd.grad(out, (q, k, v), dout)
    assert ring.num_grown("") == 0 and ring.BUFFERS[""].num_bytes == size
    assert ring.reserve("", *given, times=2) == 2 * size


def test_passes_that_were_not_foreseen_are_counted(empty_pools):
    small, large = (torch.from_numpy(plan("contiguous", Mask(), [(n,)], n, n, 1, 0)) for n in (16, 64))
    ring.reserve("", [small], HEADS, GROUPS, HEAD_DIM, torch.bfloat16, CPU)
    q, k, v, _ = random_inputs(64, GROUPS, torch.bfloat16, heads=HEADS, batch=1)
    for _ in range(2):
        ring.attend(q, k, v, large, "", "sdpa")
        assert ring.num_grown("") == 1


def test_what_the_op_returns_shares_no_memory_with_the_pool(empty_pools):
    """Nor with another result: a layer's outputs outlive the next layer's pass."""
    for dtype in (torch.bfloat16, torch.float32):
        table = torch.from_numpy(plan("contiguous", Mask(), [(64,)], 64, 64, 1, 0))
        q, k, v, dout = random_inputs(64, GROUPS, dtype, heads=HEADS, batch=1)
        out, lse = ring.attend(q, k, v, table, "", "sdpa")
        results = [out, lse, *ring.attend_backward(dout, q, k, v, table, out, lse, "", "sdpa")]
        storages = {x.untyped_storage().data_ptr() for x in results}
        pooled = {storage.data_ptr() for storage in ring.BUFFERS[""]._storages.values()}
        assert len(storages) == len(results) and not storages & pooled
        assert all(x.is_contiguous() for x in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "groups", "degree"), [(1, 8, 4), (2, 8, 2), (1, 2, 8), (1, 1, 2), (2, 4, 4)])
def test_what_ulysses_allocates(batch, groups, degree, dtype, monkeypatch):
    """Each exchange at its peak, beyond what it is given and what it returns."""
    monkeypatch.setattr(ulysses, "all_to_all", lambda x, group: x.clone())
    monkeypatch.setattr(ulysses, "_resolve_process_group", lambda name: SimpleNamespace(size=lambda: degree))
    length, heads = 256, 8
    draw = lambda length, heads: torch.randn(batch, length, heads, HEAD_DIM).to(dtype)  # noqa: E731
    some = heads // degree, max(1, groups // degree)
    whole = [draw(length, n) for n in (heads, groups, groups)]
    inside = [draw(degree * length, n) for n in (some[0], some[1], some[1])]
    ops = {
        "to_heads": lambda: ulysses.to_heads(*whole, "", degree),
        "to_heads_backward": lambda: ulysses.to_heads_backward(*inside, groups, "", degree),
        "to_tokens": lambda: ulysses.to_tokens(inside[0], "", degree),
        "to_tokens_backward": lambda: ulysses.to_tokens_backward(whole[0], "", degree),
    }
    want = pool.ulysses_bytes(batch * length, heads, groups, HEAD_DIM, dtype.itemsize, degree)
    for name, op in ops.items():
        results = []
        peak = peak_bytes(lambda: results.append(op()))  # noqa: B023
        returned = results[0] if isinstance(results[0], tuple) else (results[0],)
        assert peak - sum(x.nbytes for x in returned) == want[name], name
