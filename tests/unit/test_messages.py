"""Routes refuse what they cannot do, messages keep time and find their counterpart, buffers in use share no rows."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.mask import Mask
from parallel.messages import (
    CLEAR,
    EXCHANGE,
    KIND,
    PEER,
    RECEIVE_GRADIENTS,
    RECEIVE_KEYS,
    SEND_GRADIENTS,
    SEND_KEYS,
    START,
    STOP,
    Buffer,
    allocate,
)
from parallel.route import Route, block_at, peers, tour
from parallel.schedule import (
    BUFFER_ROWS,
    DEPTH,
    NUM_BATCHES,
    NUM_HOPS,
    lay_out,
    meetings,
    message_rows,
    needed,
    needed_rows,
    plan,
)
from tests import cases
from tests.cases import ALL_LAYOUTS, MASKS, ROUTES

lives = st.tuples(st.integers(0, 12), st.integers(0, 4)).map(lambda life: (life[0], life[0] + life[1]))


def buffer(rows, keys_life, gradients_life):
    return Buffer(np.array([0]), np.array([0]), np.array([rows]), keys_life, gradients_life)


def together(a, b):
    """Whether two lives, both ends included, have a hop in common: said by their hops."""
    return bool(set(range(a[0], a[1] + 1)) & set(range(b[0], b[1] + 1)))


@settings(deadline=None)
@given(st.lists(st.builds(buffer, st.integers(1, 20), lives, lives), max_size=12), st.integers(0, 50))
def test_no_two_buffers_share_rows_while_both_are_in_use(buffers, first_row):
    rows = allocate(buffers, first_row)
    for one, other in combinations(buffers, 2):
        apart = one.address + one.rows <= other.address or other.address + other.rows <= one.address
        alive = together(one.keys_life, other.keys_life) or together(one.gradients_life, other.gradients_life)
        assert apart or not alive
    assert all(first_row <= x.address and x.address + x.rows <= first_row + rows for x in buffers)
    assert rows == max((x.address + x.rows - first_row for x in buffers), default=0) <= sum(x.rows for x in buffers)


def test_places_are_used_again():
    """A relay has two buffers; equal ones with lives of n hops in a row have n; gaps between others are filled."""
    assert allocate([buffer(8, (hop - 1, hop), (hop, hop + 1)) for hop in range(1, 32)], 100) == 16
    assert allocate([buffer(8, (hop, hop + 4), (hop, hop)) for hop in range(32)], 0) == 40
    first, second, third, small = buffer(6, (0, 1), (0, 1)), buffer(9, (0, 5), (0, 5)), buffer(4, (2, 3), (2, 3)), None
    small = buffer(2, (2, 3), (2, 3))
    assert allocate([first, second, third, small], 10) == 15
    assert [x.address for x in (first, second, third, small)] == [10, 16, 10, 14]


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_both_ends_of_each_message_agree(layout, ranks):
    """Kind, exchange, peer and rows, for all messages of a ring; what is received in one message is one range."""
    for (name, nodes), mask in product(cases.routes_of(ranks), MASKS):
        held, documents, window = cases.dealt(layout, ranks, mask)
        route = ROUTES[name](nodes, 2)
        length = held.padded_length
        plans = [plan(held, Mask(window), documents, length, length, ranks, rank, route) for rank in range(ranks)]
        sent, received = {}, {}
        for rank, table in enumerate(plans):
            rows = message_rows(table)
            assert ((rows[:, START] < rows[:, STOP]) & (rows[:, STOP] <= held.local_rows + table[0, BUFFER_ROWS])).all()
            arriving = rows[rows[:, KIND] == RECEIVE_KEYS]
            assert len(np.unique(arriving[:, [EXCHANGE, PEER]], axis=0)) == len(arriving)
            assert (arriving[:, START] >= held.local_rows).all()
            assert (rows[np.isin(rows[:, KIND], (SEND_KEYS, RECEIVE_KEYS)), EXCHANGE] < table[0, NUM_HOPS] - 1).all()
            gradients = rows[np.isin(rows[:, KIND], (SEND_GRADIENTS, RECEIVE_GRADIENTS)), EXCHANGE]
            assert (gradients > table[0, DEPTH]).all() and (gradients < table[1, NUM_BATCHES]).all()
            for kind, exchange, peer, start, stop in rows[:, :5].tolist():
                if kind in (SEND_KEYS, SEND_GRADIENTS):
                    key, ends = (kind, exchange, rank, peer), sent
                elif kind != CLEAR:
                    key, ends = (kind - 1, exchange, peer, rank), received
                else:
                    assert peer == -1
                    continue
                ends[key] = ends.get(key, 0) + stop - start
        assert sent == received, (name, mask)
        keys, gradients = (sum(n for key, n in sent.items() if key[0] == kind) for kind in (SEND_KEYS, SEND_GRADIENTS))
        assert gradients >= keys if name.startswith("relay") else gradients == keys  # a relay's last way home is extra


def tour_of(route, layout, mask, ranks):
    held, documents, window = cases.dealt(layout, ranks, mask)
    laid = lay_out(documents, held.padded_length)
    needs = needed(held, laid, meetings(held, laid), Mask(window))
    return tour(route, *needed_rows(held, needs, route.width(ranks)), held.local_rows)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_keys_are_there_in_time_and_gradients_leave_after(layout, ranks):
    """Hop h has what exchange h - 1 brings; exchange e takes what was found, or had come, by hop e - depth."""
    for (name, nodes), mask in product(cases.routes_of(ranks), MASKS):
        route = ROUTES[name](nodes, 2)
        if route.name == "gather":
            continue
        trip, width = tour_of(route, layout, mask, ranks), route.width(ranks)
        hops = [visit.hop for visit in trip.visits]
        assert hops == sorted(hops) and len({(v.nodes, v.places) for v in trip.visits}) == len(trip.visits)
        assert all(n <= route.blocks_per_hop for n in np.bincount(hops)) and trip.num_hops == 1 + max(hops, default=0)
        met = {
            (rank, block_at(rank, nodes_, places, width, ranks)): hop
            for nodes_, places, hop in trip.visits
            for rank in range(ranks)
        }
        for exchange, source, destination, block, *_ in trip.keys.each():
            assert source != destination and block != destination
            if (destination, block) in met:
                assert exchange <= met[destination, block] - 1
            if source != block:  # handed on: it had come, and was waited for, before this exchange was posted
                came = [e for e, _, d, b, *_ in trip.keys.each() if (d, b) == (source, block)]
                assert max(came) <= exchange - route.depth
        for exchange, source, _, block, *_ in trip.gradients.each():
            assert exchange >= met.get((source, block), 0) + route.depth
            adds = [e for e, _, d, b, *_ in trip.gradients.each() if (d, b) == (source, block)]
            assert all(e <= exchange - route.depth for e in adds)


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (6, 2), (6, 3), (8, 2), (8, 4)])
@pytest.mark.parametrize("name", ["relay", "direct"])
def test_a_block_crosses_once_for_each_node_that_needs_it(ranks, nodes, name):
    """Over its owner's network card, to the mate of the same place; so do its gradients, the other way round."""
    for layout, mask in product(ALL_LAYOUTS, MASKS):
        trip = tour_of(Route(name, node_ranks=nodes), layout, mask, ranks)
        for transfers, forward in ((trip.keys, True), (trip.gradients, False)):
            pieces = {}
            for _, source, destination, block, _, _, piece, of, rows in transfers.each():
                if source // nodes == destination // nodes:
                    continue
                owner, mate = (source, destination) if forward else (destination, source)
                assert block == owner and mate % nodes == owner % nodes
                pieces.setdefault((block, mate // nodes), []).append((piece, of, rows))
            for crossing in pieces.values():
                assert sorted({piece for piece, _, _ in crossing}) == sorted(piece for piece, _, _ in crossing)
                assert len({of for _, of, _ in crossing}) == 1 and len(crossing) <= crossing[0][1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8])
def test_peers_are_mutual_and_are_those_of_the_plans(ranks):
    for name, nodes in cases.routes_of(ranks):
        route = ROUTES[name](nodes, 2)
        known = [peers(route, rank, ranks) for rank in range(ranks)]
        assert all(rank in known[peer] for rank in range(ranks) for peer in known[rank])
        assert all(rank not in known[rank] for rank in range(ranks))
        held, documents, window = cases.dealt("zigzag", ranks, "causal")
        for rank in range(ranks):
            length = held.padded_length
            rows = message_rows(plan(held, Mask(window), documents, length, length, ranks, rank, route))
            assert set(rows[rows[:, KIND] != CLEAR, PEER].tolist()) <= set(known[rank])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(name="express"), "route=express is unknown: use one of relay, direct, gather"),
        (dict(name="direct", depth=0), "depth=0 must be at least 1"),
        (dict(name="direct", blocks_per_hop=0), "blocks_per_hop=0 must be at least 1"),
        (dict(name="gather", head_groups=0), "head_groups=0 must be at least 1"),
        (dict(depth=2), "route=relay has depth=1 and blocks_per_hop=1, not 2 and 1: use route=direct for more"),
        (dict(name="gather", blocks_per_hop=4), "route=gather has depth=1 and blocks_per_hop=1, not 1 and 4"),
        (dict(name="direct", head_groups=2), "route=direct moves all heads at once: head_groups=2 needs gather"),
        (dict(name="gather", node_ranks=2), "route=gather leaves nodes to its collective: use node_ranks=0, not 2"),
        (dict(narrow=True), "route=relay via 0 ranks a node adds gradients up on the way, which bfloat16"),
        (dict(name="gather", narrow=True), "use float32 on the wire, or route=direct without nodes"),
        (dict(name="direct", narrow=True, node_ranks=2), "route=direct via 2 ranks a node adds gradients up"),
    ],
)
def test_a_route_refuses_what_it_cannot_do(options, message):
    with pytest.raises(ValueError, match=message):
        Route(**options)


def test_nodes_must_divide_the_ring():
    assert [Route(node_ranks=n).width(8) for n in (0, 1, 2, 4, 8, 16)] == [8, 8, 2, 4, 8, 8]
    with pytest.raises(ValueError, match="node_ranks=3 does not divide a ring of 8 ranks"):
        plan("zigzag", Mask(), [(16,)], 16, 16, 8, 0, Route(node_ranks=3))
