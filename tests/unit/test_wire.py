"""The model of the network against its rules and closed forms; plans proven, and broken ones refused."""

import time
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.mask import Mask
from parallel.deal import deal
from parallel.layout import LAYOUTS, padded_length
from parallel.messages import CLEAR, EXCHANGE, KIND, PEER, RECEIVE_KEYS, SEND_KEYS, START, STOP
from parallel.proof import prove
from parallel.route import Route, tour
from parallel.schedule import (
    DEPTH,
    HEADER_ROWS,
    K_START,
    K_STOP,
    NUM_MESSAGES,
    NUM_RANKS,
    message_rows,
    plan,
    tile_rows,
)  # fmt: skip
from parallel.wire import COMPUTE, Network, play, play_gather

ROUTES = (
    Route(),
    Route(node_ranks=2),
    Route("direct"),
    Route("direct", depth=3),
    Route("direct", depth=2, blocks_per_hop=2),
    Route("direct", node_ranks=2),
    Route("direct", depth=2, blocks_per_hop=3, node_ranks=2),
    Route("gather", head_groups=2),
)
KEYS, GRADIENTS = 3.0, 5.0  # bytes of a row


def whole_tour(route, ranks, rows=10):
    """Everybody needs all of everybody's rows."""
    width = route.width(ranks)
    needs = rows * (1 - np.eye(ranks, dtype=np.int64))
    return tour(route, needs, needs.reshape(-1, width, ranks).max(axis=1), rows)


def by_the_rules(trip, depth, hop_seconds, network, gradients):
    """The rules of `parallel.wire`, one rank and exchange at a time: when each rank is done, how long it waited."""
    ranks, hops = hop_seconds.shape
    per_node, cards = network.ranks_per_node, min(network.ranks_per_node, network.nics_per_node)
    card = [(r // per_node, r % per_node * cards // per_node) for r in range(ranks)]
    sent = [(*message[:3], message[-1] * KEYS) for message in trip.keys.each()]
    if gradients:
        sent += [(*message[:3], message[-1] * GRADIENTS) for message in trip.gradients.each()]
    exchanges = trip.num_batches if gradients else trip.num_hops - 1

    def crosses(message):
        return message[1] // per_node != message[2] // per_node

    def seconds(message):
        same = [m for m in sent if m[0] == message[0] and crosses(m) == crosses(message)]
        place = card.__getitem__ if crosses(message) else int
        out = sum(m[3] for m in same if place(m[1]) == place(message[1]))
        into = sum(m[3] for m in same if place(m[2]) == place(message[2]))
        rate = network.nic_bytes_per_second if crosses(message) else network.link_bytes_per_second
        return network.latency_seconds + max(out, into) / rate

    took = {message: seconds(message) for message in sent}

    @cache
    def hop_begins(rank, hop):
        if hop == 0:
            return 0.0
        computed = hop_begins(rank, hop - 1) + (hop_seconds[rank, hop - 1] if hop <= hops else 0.0)
        return max(computed, exchange_ends(rank, hop - 1)) if hop <= exchanges else computed

    @cache
    def exchange_begins(rank, number):
        posted = hop_begins(rank, max(0, number - depth + 1))
        return max(posted, exchange_ends(rank, number - 1)) if number else posted

    @cache
    def exchange_ends(rank, number):
        mine = [m for m in sent if m[0] == number and rank in m[1:3]]
        passed = [max(exchange_begins(m[1], number), exchange_begins(m[2], number)) + took[m] for m in mine]
        return max([exchange_begins(rank, number), *passed])

    finish = [hop_begins(rank, max(hops, exchanges)) for rank in range(ranks)]
    return finish, [end - hop_seconds[rank].sum() for rank, end in enumerate(finish)]


@settings(deadline=None)
@given(
    st.sampled_from([route for route in ROUTES if route.name != "gather"]),
    st.sampled_from([(4, 2, 2), (4, 2, 1), (4, 4, 3), (6, 2, 2), (6, 3, 1)]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_all_ranks_at_once_are_each_by_the_rules(route, shape, gradients, seed):
    ranks, per_node, nics = shape
    trip = whole_tour(route, ranks)
    hop_seconds = np.random.default_rng(seed).exponential(1, (ranks, trip.num_hops))
    network = Network(per_node, nics, nic_bytes_per_second=50, link_bytes_per_second=200, latency_seconds=0.1)
    played = play(trip, route.depth, hop_seconds, network, KEYS, GRADIENTS if gradients else 0)
    finish, exposed = by_the_rules(trip, route.depth, hop_seconds, network, gradients)
    assert played.finish == pytest.approx(finish) and played.exposed == pytest.approx(exposed)
    assert played.makespan == max(played.finish) >= played.nic_seconds
    computed = np.zeros(ranks)
    for rank, kind, _, begin, end in played.rows():
        computed[rank] += (end - begin) * (kind == COMPUTE)
    assert computed == pytest.approx(hop_seconds.sum(axis=1))


@pytest.mark.parametrize("compute", [0.1, 1.0, 7.0, 9.0])
def test_a_relay_takes_the_larger_of_both_at_each_hop(compute):
    """Equal hops on all ranks: sum over exchanges of max(compute, transfer), the last gradients on their own."""
    ranks, rows, latency, rate = 5, 10, 0.5, 10.0
    trip, network = whole_tour(Route(), ranks, rows), Network(1, 1, rate, 1.0, latency)
    hops = np.full((ranks, ranks), compute)
    keys, gradients = rows * KEYS / rate, rows * GRADIENTS / rate
    forward = play(trip, 1, hops, network, KEYS)
    assert forward.makespan == pytest.approx((ranks - 1) * max(compute, latency + keys) + compute)
    assert forward.nic_seconds == pytest.approx((ranks - 1) * keys)
    # Exchange e has keys of hop e + 1 and gradients of hop e - 1, the own part never travels.
    sizes = [keys * (e < ranks - 1) + gradients * (e >= 2) for e in range(ranks + 1)]
    backward = play(trip, 1, hops, network, KEYS, GRADIENTS)
    want = sum(max(compute * (e < ranks), latency + size) for e, size in enumerate(sizes))
    assert backward.makespan == pytest.approx(want)


def test_depth_forgives_a_rank_that_is_late_once():
    """A rank that computes for long at one hop stops the others, unless exchanges are ahead."""
    hops = np.ones((6, 6))
    for rank in range(6):
        hops[rank, rank] = 4  # each once, at different hops
    spans = [
        play(whole_tour(Route("direct", depth), 6), depth, hops, Network(6, 6, 1e9, 1e9), KEYS).makespan
        for depth in (1, 2, 5)
    ]
    assert spans == sorted(spans, reverse=True) and spans[0] > spans[-1] == hops[0].sum()


@pytest.mark.parametrize(
    ("network", "cards", "card", "rate"),
    [
        (Network(8, 8, 45.0, 1.0), [0, 1, 2, 3, 4, 5, 6, 7], 8, 45.0),
        (Network(8, 4, 45.0, 1.0), [0, 0, 1, 1, 2, 2, 3, 3], 4, 45.0),
        (Network(1, 8, 45.0, 1.0, rings_per_node=8), [0], 1, 45.0),  # a rank reaches the card of its GPU
        (Network(1, 8, 45.0, 1.0), [0], 1, 45.0),
        (Network(2, 4, 45.0, 1.0, rings_per_node=4), [0, 1], 2, 22.5),  # two GPUs of two rings on each card
        (Network(8, 1, 45.0, 1.0), [0] * 8, 1, 45.0),
    ],
)
def test_cards_of_a_node_are_dealt_to_its_ranks(network, cards, card, rate):
    assert network.card_of(network.ranks_per_node).tolist() == cards
    assert network.card_of(2 * network.ranks_per_node)[network.ranks_per_node] == card
    assert network.card_bytes_per_second == rate


def test_other_traffic_takes_its_share_of_the_card():
    """10 s of computing with 4 s of other traffic leave 0.6 of the card."""
    trip, network = whole_tour(Route(), 2), Network(1, 1, 10.0, 1.0)
    hops = np.array([[5.0, 5.0], [5.0, 5.0]])
    quiet, busy = (play(trip, 1, hops, network, KEYS, background_seconds=s) for s in (0, 4))
    assert quiet.exchange_end[0, 0] == pytest.approx(3.0) and busy.exchange_end[0, 0] == pytest.approx(3.0 / 0.6)
    assert busy.nic_seconds == pytest.approx(7.0) and busy.makespan == 10
    inside = play(trip, 1, hops, Network(2, 2, 10.0, 10.0), KEYS, background_seconds=4)
    assert inside.exchange_end[0, 0] == pytest.approx(3.0) and inside.nic_seconds == 4


def test_gather_hides_all_but_the_first_group_and_the_last_gradients():
    """8 ranks on 4 nodes: a card brings in 3 blocks of each group of a half of the heads."""
    network = Network(2, 2, 10.0, 1e9)
    hops = np.array([[0, 20.0, 20.0]] * 8)
    forward, backward = play_gather(2, hops, network, 40.0), play_gather(2, hops, network, 40.0, 80.0)
    keys, gradients = 3 * 20 / 5, 3 * 40 / 5  # both cards of a node share 6 blocks
    assert forward.nic_seconds == pytest.approx(2 * keys / 2) and forward.makespan == pytest.approx(keys / 2 + 40)
    assert backward.makespan == pytest.approx(keys / 2 + 40 + gradients / 2)


def test_busiest_card_has_closed_forms():
    """Llama-3-8B, one causal document of 1M tokens: keys and values of 4 KiB a token, gradients of 8."""
    network = Network(8, 8, 45e9, 370e9, 10e-6)
    for ranks in (32, 256):
        block = (1 << 20) // ranks
        hops = np.zeros((ranks, ranks))
        for route, times in ((Route(), ranks - 1), (Route(node_ranks=8), ranks // 8 - 1)):
            trip = whole_tour(route, ranks, block)
            forward, backward = (play(trip, 1, hops[:, : trip.num_hops], network, 4096, g) for g in (0, 8192))
            assert forward.nic_seconds == pytest.approx(times * block * 4096 / 45e9)
            assert backward.nic_seconds == pytest.approx(times * block * 12288 / 45e9, rel=0.04)


def test_256_ranks_take_well_under_a_second():
    trip = whole_tour(Route("direct", depth=2, node_ranks=8), 256, 4096)
    hops = np.ones((256, trip.num_hops))
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        play(trip, 2, hops, Network(8, 8, 45e9, 370e9), 4096, 8192)
        seconds.append(time.perf_counter() - begun)
    assert min(seconds) < 0.5


def plans_of(layout, window, documents, length, ranks, route):
    padded = padded_length("auto", length, ranks)
    dealt = deal(layout, documents, padded, ranks, Mask(window))
    return [plan(dealt, Mask(window), documents, length, padded, ranks, rank, route) for rank in range(ranks)]


@settings(deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(ROUTES),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(1, 60)),
    st.lists(st.lists(st.integers(1, 25), max_size=6), min_size=1, max_size=2),
    st.integers(0, 9),
)
def test_plans_are_proven(layout, route, ranks, window, documents, tail):
    length = max(1, max(map(sum, documents)) + tail)
    prove(plans_of(layout, window, documents, length, ranks + ranks % max(1, route.node_ranks), route))


BROKEN = [(route, layout) for route in ROUTES if route.name != "gather" for layout in ("zigzag", "balanced")]
PACKED = [(20, 40), (3, 50, 9)]


def change(plans, rank, row, column=None, by=0):
    """The plans, with one number of one message changed, or without the message."""
    changed = [table.copy() for table in plans]
    row += HEADER_ROWS
    if column is None:
        changed[rank] = np.delete(changed[rank], row, axis=0)
        changed[rank][0, NUM_MESSAGES] -= 1
    else:
        changed[rank][row, column] += by
    return changed


@pytest.mark.parametrize(("route", "layout"), BROKEN)
def test_any_message_changed_on_one_rank_is_refused(route, layout):
    plans = plans_of(layout, None, PACKED, 67, 4, route)
    for rank, table in enumerate(plans):
        for row, message in enumerate(message_rows(table)):
            mutants = [change(plans, rank, row), change(plans, rank, row, STOP, -1)]
            if message[KIND] != CLEAR:
                mutants += [change(plans, rank, row, column, by) for column in (EXCHANGE, PEER) for by in (1, -1)]
            for mutant in mutants:
                with pytest.raises(ValueError, match="rank"):
                    prove(mutant)


@pytest.mark.parametrize("route", [route for route in ROUTES if route.name == "direct"])
@pytest.mark.parametrize("by", [1, -1])
def test_any_address_shifted_is_refused(route, by):
    plans = plans_of("balanced", None, PACKED, 67, 4, route)
    for rank, table in enumerate(plans):
        for row in range(len(message_rows(table))):
            mutant = change(plans, rank, row, START, by)
            mutant[rank][HEADER_ROWS + row, STOP] += by
            with pytest.raises(ValueError, match=r"rank \d, .* rows \[-?\d+, \d+\)"):
                prove(mutant)


def test_refusals_name_rank_exchange_and_rows():
    plans = plans_of("zigzag", None, [(64,)], 64, 4, Route("direct"))
    refusals = {}

    def on_all(kind, first, column, by, only=lambda message: True):
        changed = [table.copy() for table in plans]
        for table in changed:
            for message in message_rows(table):
                if message[KIND] in kind and message[EXCHANGE] == first and only(message):
                    message[column] += by
        return changed

    refusals["late"] = on_all((SEND_KEYS, RECEIVE_KEYS), 1, EXCHANGE, 1), r"hop 2: reads rows .* before their keys"
    refusals["at the end"] = on_all((SEND_KEYS, RECEIVE_KEYS), 2, EXCHANGE, 1), "exchange 3.*after the last exchange"
    early = [table.copy() for table in plans]
    for table in early:
        table[0, DEPTH] += 1
    refusals["posted early"] = early, r"exchange \d, posted before hop"
    refusals["cleared late"] = on_all((CLEAR,), 2, EXCHANGE, 1), r"hop 2: adds to rows .* were not cleared"
    swapped = [plans[rank] for rank in (0, 2, 1, 3)]
    refusals["out of order"] = swapped, "give those of all 4, in order"
    other = [table.copy() for table in plans]
    other[2][1, 3] += 1
    refusals["another plan"] = other, "rank 2 has another plan than rank 0"
    beyond = [table.copy() for table in plans]
    tile_rows(beyond[3])[-1, [K_START, K_STOP]] += 1000
    refusals["a tile beyond"] = beyond, r"rank 3, hop \d: a tile has rows \[10\d\d, 10\d\d\)"
    for name, (mutant, message) in refusals.items():
        with pytest.raises(ValueError, match=message):
            prove(mutant)
            pytest.fail(f"{name} was not refused")


def test_a_block_that_lands_on_another_is_refused():
    """Two blocks that are in use at the same time, in the same rows."""
    plans = plans_of("zigzag", None, [(64,)], 64, 4, Route("direct", depth=2))
    received = [row for row, message in enumerate(message_rows(plans[0])) if message[KIND] == RECEIVE_KEYS]
    first, second = (message_rows(plans[0])[row] for row in received[:2])
    mutant = change(plans, 0, received[1], START, int(first[START] - second[START]))
    mutant[0][HEADER_ROWS + received[1], STOP] = first[START] + second[STOP] - second[START]
    with pytest.raises(ValueError, match="rank 0"):
        prove(mutant)


def test_gathered_plans_have_no_messages_but_the_same_headers():
    plans = plans_of("balanced", None, PACKED, 67, 4, Route("gather", head_groups=2))
    prove(plans)
    with pytest.raises(ValueError, match="rank 1 has another plan"):
        prove([plans[0], *plans_of("balanced", None, PACKED, 67, 4, Route("gather"))[1:]])
    tile_rows(plans[1])[0, K_STOP] += 1000
    with pytest.raises(ValueError, match="rank 1, hop 1: a tile has rows"):
        prove(plans)
    assert plans[0][0, NUM_RANKS] == 4
