"""What goes over the wire: equal to the plan, to closed forms, and to what the mask shows."""

from itertools import product

import numpy as np
import pytest
import torch

from model.kernels import sdpa
from model.mask import Mask
from parallel.messages import EXCHANGE, PEER, RECEIVE_GRADIENTS, RECEIVE_KEYS, SEND_GRADIENTS, SEND_KEYS
from parallel.route import Route
from parallel.schedule import NUM_HOPS, message_rows, plan
from tests import cases
from tests.cases import ALL_LAYOUTS, HEAD_DIM, MASKS, ROUTES, random_inputs
from tests.threads import Network, ring_attention

GROUPS = 2
ROW = 2 * GROUPS * HEAD_DIM  # numbers of a row of keys and values


def run(held, documents, window, route, dtype=torch.bfloat16):
    """The log of a forward and a backward pass of a ring, and its plans."""
    network, ranks, length = Network(), held.ranks, held.padded_length
    inputs = random_inputs(length, GROUPS, dtype, batch=len(documents))
    ring_attention(inputs, held, documents, window, ranks, sdpa, network, route=route)
    made = [plan(held, Mask(window), documents, length, length, ranks, rank, route) for rank in range(ranks)]
    return network.log, made


def sent_bytes(log, ranks):
    """Bytes from each rank to each other one, int[R, R]; those received are as many."""
    sent, received = np.zeros((2, ranks, ranks), int)
    for rank, sends, receives in log:
        for peer, _, size in sends:
            sent[rank, peer] += size
        for peer, _, size in receives:
            received[peer, rank] += size
    assert np.array_equal(sent, received)
    return sent


def hulls(held, seen, width=1):
    """Rows of each block that each node of `width` ranks needs, int[R / width, R]: the hull in each chunk."""
    need = np.zeros((held.ranks // width, held.ranks), int)
    for node in range(held.ranks // width):
        for c, b in enumerate(held.sequence):
            keys = held.start[c] + held.step * np.arange(held.count[c])
            if held.rank[c] // width == node and width > 1:
                continue
            rows = [
                np.flatnonzero(seen[b][np.ix_(held.index(rank)[b], keys)].any(axis=0))
                for rank in range(node * width, (node + 1) * width)
                if rank != held.rank[c]
            ]
            rows = np.concatenate(rows) if rows else np.zeros(0, int)
            if len(rows):
                need[node, held.rank[c]] += held.count[c] if held.step > 1 else rows.max() - rows.min() + 1
    return need


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize(("layout", "window"), [("zigzag", None), ("striped", None), ("contiguous", 4)])
def test_a_relay_hands_on_whole_blocks(layout, window, ranks):
    """hops - 1 blocks forward and again backward, as many of gradients in float32, all but the last to a neighbour."""
    local = 12
    documents = [(local * ranks,)] * 2
    held = cases.deal(layout, documents, local * ranks, ranks, Mask(window))
    log, made = run(held, documents, window, Route())
    hops = int(made[0][0, NUM_HOPS])
    assert hops == (2 if window else ranks)
    block = 2 * local * ROW
    sent = sent_bytes(log, ranks)
    for rank in range(ranks):
        mine = [entry for entry in log if entry[0] == rank]
        # forward; backward: keys in exchanges 0 … hops - 2, gradients in 2 … hops
        assert len(mine) == (hops - 1) + (hops + 1 if hops > 2 else 2)
        assert sent[rank].sum() == (hops - 1) * block * (2 + 2 + 4)
        assert mine[0][1] == [((rank + 1) % ranks, (2 * local, 2, GROUPS, HEAD_DIM), 2 * block)]
        home = (rank - (hops - 1)) % ranks
        keys, gradients = 2 * (hops - 1) * 2 * block, 4 * block
        want = np.zeros(ranks, int)
        want[(rank + 1) % ranks] += keys + (hops - 2) * gradients
        want[home] += gradients
        assert np.array_equal(sent[rank], want)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("narrow", [False, True])
def test_direct_sends_the_rows_that_are_needed_and_no_others(layout, narrow):
    """From the mask itself: twice as keys, once back as gradients, in float32 or, narrow, in bfloat16."""
    ranks = 4
    for mask in MASKS:
        held, documents, window = cases.dealt(layout, ranks, mask)
        need = hulls(held, cases.visible(documents, window, held.padded_length).numpy())
        log, _ = run(held, documents, window, Route("direct", depth=2, narrow=narrow))
        want = need.T * ROW * (2 + 2) + need * ROW * (2 if narrow else 4)
        assert np.array_equal(sent_bytes(log, ranks), want), mask
        assert all(len({peer for peer, *_ in sends}) == len(sends) for _, sends, _ in log), "two messages to one peer"


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("name", ["relay", "direct"])
def test_between_nodes_a_block_crosses_once(layout, name):
    """By its owner's card: the hull of what the node needs (a relay: all of it), and once back, summed in float32."""
    ranks, width = 6, 2
    for mask in MASKS:
        held, documents, window = cases.dealt(layout, ranks, mask)
        seen = cases.visible(documents, window, held.padded_length).numpy()
        need = hulls(held, seen, width)
        log, _ = run(held, documents, window, Route(name, node_ranks=width))
        sent = sent_bytes(log, ranks)
        if name == "relay":  # it does not look who needs what, but whether a node so far away needs anything
            shifts = {(n - o // width) % 3 for n in range(3) for o in range(ranks) if need[n, o]}
            need = np.array(
                [[held.local_rows * ((n - o // width) % 3 in shifts) for o in range(ranks)] for n in range(3)]
            )
        want = np.zeros((ranks, ranks), int)
        for node, owner in product(range(ranks // width), range(ranks)):
            mate = node * width + owner % width
            if node != owner // width:
                want[owner, mate] += need[node, owner] * ROW * (2 + 2)
                want[mate, owner] += need[node, owner] * ROW * 4
        across = np.arange(ranks)[:, None] // width != np.arange(ranks) // width
        assert np.array_equal(sent * across, want), mask


@pytest.mark.parametrize("groups", [1, 2])
def test_a_gather_moves_each_group_of_heads_once(groups):
    """Keys forward and backward, sums of gradients in float32: bytes of this rank's part, whatever the mask."""
    held, documents, window = cases.dealt("zigzag", 3, "documents")
    log, made = run(held, documents, window, Route("gather", head_groups=groups))
    part = held.local_rows * ROW // groups
    for rank in range(3):
        gathers, later = [("gather", 2 * part)] * groups, [entry[1:] for entry in log if entry[0] == rank]
        forward, backward = later[:groups], later[groups:]
        assert forward == gathers
        assert sorted(backward) == gathers + [("scatter_sum", 4 * part)] * groups and not len(message_rows(made[rank]))


@pytest.mark.parametrize("layout", ["zigzag", "random owners"])
@pytest.mark.parametrize("ranks", [3, 6])
def test_traffic_is_what_the_plan_says(layout, ranks):
    """Every start of every rank: its peers and bytes, those of one exchange; nothing is started for an empty one."""
    for (name, nodes), mask in product(cases.routes_of(ranks), [*MASKS][ranks % 2 :: 3]):
        route = ROUTES[name](nodes, GROUPS)
        if route.name == "gather":
            continue
        held, documents, window = cases.dealt(layout, ranks, mask)
        log, made = run(held, documents, window, route)
        for rank, table in enumerate(made):
            rows = message_rows(table)
            said = []
            for kinds in ({SEND_KEYS, RECEIVE_KEYS}, {SEND_KEYS, RECEIVE_KEYS, SEND_GRADIENTS, RECEIVE_GRADIENTS}):
                for exchange in np.unique(rows[np.isin(rows[:, 0], list(kinds)), EXCHANGE]).tolist():
                    start = {side: [] for side in (SEND_KEYS, RECEIVE_KEYS)}
                    at = rows[rows[:, EXCHANGE] == exchange]
                    for kind, side, size in (
                        (SEND_KEYS, SEND_KEYS, 2),
                        (RECEIVE_KEYS, RECEIVE_KEYS, 2),
                        (SEND_GRADIENTS, SEND_KEYS, 4),
                        (RECEIVE_GRADIENTS, RECEIVE_KEYS, 4),
                    ):
                        of_kind = at[at[:, 0] == kind] if kind in kinds else at[:0]
                        for peer in np.unique(of_kind[:, PEER]).tolist():
                            spans = of_kind[of_kind[:, PEER] == peer]
                            start[side].append((peer, int((spans[:, 4] - spans[:, 3]).sum()) * ROW * size))
                    said.append((start[SEND_KEYS], start[RECEIVE_KEYS]))
            done = [
                tuple([(peer, n) for peer, _, n in side] for side in entry[1:]) for entry in log if entry[0] == rank
            ]
            assert done == said, (name, mask, rank)


def test_pairs_that_need_nothing_of_each_other_send_nothing():
    """Two documents on two ranks each: no message between the pairs; documents inside their ranks: none at all."""
    held = cases.deal("contiguous", [(64,)], 64, 4)
    log, _ = run(held, [(32, 32)], None, Route("direct"))
    assert {(rank, peer) for rank, sends, _ in log for peer, *_ in sends} == {(0, 1), (2, 3), (1, 0), (3, 2)}
    assert [rank for rank, sends, _ in log if sends] and all(sends or receives for _, sends, receives in log)
    for route in (Route(), Route("direct"), Route("direct", node_ranks=2)):
        log, made = run(held, [(16,) * 4], None, route)
        assert log == [] and {int(table[0, NUM_HOPS]) for table in made} == {1}
    log, _ = run(cases.deal("contiguous", [(64,)], 64, 4), [(64,)], 17, Route("direct"))
    assert {(rank, peer) for rank, sends, _ in log for peer, *_ in sends} == {
        pair for r in range(3) for pair in ((r, r + 1), (r + 1, r))
    }
