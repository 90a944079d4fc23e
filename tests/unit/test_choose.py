"""What ranks have to compute, against dense visibility; and what is chosen, where it is plain what should be."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.mask import Mask
from parallel import layout as layouts
from parallel.choose import choose
from parallel.cost import Rates, Ring, Shape, buffer_rows
from parallel.deal import deal
from parallel.layout import LAYOUTS
from parallel.proof import prove
from parallel.route import Route, tour
from parallel.schedule import BUFFER_ROWS, lay_out, meetings, needed, needed_rows, pairs, plan, tile_rows
from parallel.wire import Network
from parallel.work import work
from tests import oracle

MILLION = 1 << 20
SIZED = (
    Route(),
    Route(node_ranks=4),
    Route("direct"),
    Route("direct", depth=3),
    Route("direct", depth=2, blocks_per_hop=3),
    Route("direct", node_ranks=4),
    Route("direct", depth=2, blocks_per_hop=2, node_ranks=2),
)
LLAMA_8B = Shape(num_heads=32, num_kv_heads=8, head_dim=128)
H100 = Rates(forward_flops=600e12, backward_flops=550e12)
NODES_OF_8 = Network(8, 8, 45e9, 370e9, 10e-6)


def tables(layout, window, documents, ranks):
    """(the layout, pairs of each rank with each block from a dense mask)."""
    length = layouts.padded_length("auto", max(1, *map(sum, documents)), ranks)
    dealt = deal(layout, documents, length, ranks, Mask(window))
    seen = oracle.visible(documents, length, window).numpy()
    index = [dealt.index(rank) for rank in range(ranks)]
    dense = [
        [sum(seen[b][np.ix_(q[b], k[b])].sum() for b in range(len(documents))) for k in index] for q in index
    ]  # fmt: skip
    return dealt, np.array(dense, float)


@settings(deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 60)),
    st.lists(st.lists(st.integers(1, 25), max_size=6), min_size=1, max_size=2),
)
def test_work_is_the_visible_pairs(layout, ranks, window, documents):
    dealt, dense = tables(layout, window, documents, ranks)
    got = work(dealt, lay_out(documents, dealt.padded_length), Mask(window))
    assert np.array_equal(got, dense)
    length = dealt.padded_length
    made = [plan(dealt, Mask(window), documents, length, length, ranks, rank) for rank in range(ranks)]
    assert [int(pairs(tile_rows(table)).sum()) for table in made] == got.sum(axis=1).tolist()


@pytest.mark.parametrize("granularity", [2, 3, 4, 8])
@pytest.mark.parametrize("window", [None, 1, 5, 12, 17])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_compute_squares(layout, window, granularity):
    """Of a document over pieces that are whole squares: those in which something is visible, counted one by one."""
    ranks, length = 3, 144
    dealt = deal(layout, [(length,)], length, ranks, Mask(window))
    seen = oracle.visible([(length,)], length, window).numpy()[0]
    want = np.zeros((ranks, ranks))
    cells = [[chunk.indices() for chunk in dealt.chunks(rank)[0]] for rank in range(ranks)]
    for r, o in np.ndindex(ranks, ranks):
        for q in cells[r]:
            for k in cells[o]:
                tile = seen[np.ix_(q, k)]
                if layout == "striped" and r < o:  # a strict triangle is computed without its empty row and column
                    tile = tile[1:, :-1]
                for i in range(0, len(tile), granularity):
                    for j in range(0, tile.shape[1], granularity):
                        want[r, o] += granularity**2 * tile[i : i + granularity, j : j + granularity].any()
    got = work(dealt, lay_out([(length,)], length), Mask(window), granularity)
    assert np.array_equal(got, want)


def cut(pieces, length=MILLION, seed=0):
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, length), pieces - 1, replace=False))
    return [tuple(np.diff([0, *cuts.tolist(), length]).tolist())]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ranks", "documents"), [(256, [(MILLION,)]), (32, cut(10_000))])
def test_work_of_a_million_tokens_is_found_fast(layout, ranks, documents):
    dealt, laid = deal(layout, documents, MILLION, ranks), lay_out(documents, MILLION)
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        total = work(dealt, laid, Mask(), 128).sum()
        seconds.append(time.perf_counter() - begun)
    assert min(seconds) < 0.3 and total >= sum(n * (n + 1) // 2 for n in documents[0])


def chosen(documents, ranks, window=None, network=NODES_OF_8, max_blocks=8, rates=H100, **options):
    length = max(map(sum, documents))
    padded = layouts.padded_length("auto", length, ranks)
    return choose(documents, length, padded, ranks, Mask(window), LLAMA_8B, rates, network, max_blocks, **options)


@pytest.mark.parametrize("ranks", [2, 8, 32, 64])
def test_one_document_takes_the_zigzag_relay(ranks):
    choice = chosen([(MILLION,)], ranks)
    assert (choice.layout_name, choice.route) == ("zigzag", Route())
    assert choice.seconds == pytest.approx(choice.ideal_seconds, rel=0.01)
    assert choice.why == "zigzag relay, 1.00 x ideal"
    assert choice.ideal_seconds == pytest.approx(MILLION**2 / 2 / ranks * 4096 * (4 / 600e12 + 10 / 550e12), rel=1e-3)


def test_on_256_ranks_it_crosses_between_nodes_once():
    choice = chosen([(MILLION,)], 256)
    assert (choice.layout_name, choice.route) == ("zigzag", Route(node_ranks=8))
    assert choice.busiest_nic_seconds <= 0.5 * choice.ideal_seconds and choice.seconds < 1.01 * choice.ideal_seconds
    assert choice.why == "zigzag relay via nodes, 1.00 x ideal; zigzag relay would take 1.77 x"


def test_a_card_that_is_busy_most_of_the_time_counts_against_a_route():
    """Both are hidden behind computing, but one leaves the network to others."""
    slow = Network(8, 8, 12e9, 370e9, 10e-6)
    choice = chosen([(MILLION,)], 32, network=slow)
    assert choice.route == Route(node_ranks=8) and choice.busiest_nic_seconds < 0.5 * choice.seconds
    flat = chosen([(MILLION,)], 32, network=Network(1, 1, 12e9, 370e9, 10e-6), route="relay")
    assert flat.route == Route() and flat.busiest_nic_seconds > 0.5 * flat.seconds
    assert flat.seconds < 1.01 * choice.seconds


def test_windows_take_neighbours_only():
    choice = chosen([(MILLION,)], 32, window=4096)
    assert (choice.layout_name, choice.route.name) == ("contiguous", "direct")
    assert choice.seconds < 1.1 * choice.ideal_seconds


def test_packed_documents_are_balanced():
    documents = [(500_000, 200_000, 150_000, 100_000, 50_000, 48_576)]
    choice = chosen(documents, 32)
    assert choice.layout_name == "balanced" and choice.seconds < 1.1 * choice.ideal_seconds
    assert choice.why.startswith("balanced ") and choice.why.endswith("; zigzag relay would take 1.77 x")


@pytest.mark.parametrize("layout", ["auto", *LAYOUTS])
@pytest.mark.parametrize("route", ["auto", "relay", "direct", "gather"])
def test_what_the_user_fixed_is_kept(layout, route):
    documents = [(3000, 2500, 2000), (8192,)]
    choice = chosen(documents, 8, max_blocks=100, layout=layout, route=route)
    if layout != "auto":
        assert choice.layout_name == layout
    assert route in ("auto", choice.route.name)
    length = choice.layout.padded_length
    prove([plan(choice.layout, Mask(), documents, 8192, length, 8, rank, choice.route) for rank in range(8)])


def test_depth_and_narrow_gradients_are_kept():
    documents = [(300_000, 700_000)]
    choice = chosen(documents, 32, route="direct", depth=3)
    assert (choice.route.name, choice.route.depth) == ("direct", 3)
    assert chosen(documents, 32, route="direct", narrow=True).route.narrow
    wide, narrow = (chosen(documents, 32, layout="balanced", route="direct", depth=1, narrow=n) for n in (False, True))
    assert narrow.route.node_ranks == 0 and wide.route.narrow is False


def test_tokens_that_are_dealt_already_stay_where_they_are():
    """Another mask would have dealt them otherwise."""
    documents = cut(20, 65_536, seed=5)
    dealt = deal("balanced", documents, 65_536, 8)
    choice = chosen(documents, 8, window=100, layout="balanced", dealt=dealt)
    assert choice.layout is dealt
    assert not np.array_equal(chosen(documents, 8, window=100, layout="balanced").layout.start, dealt.start)


@pytest.mark.parametrize("max_blocks", [2, 3, 5, 8])
def test_buffers_stay_within_the_budget(max_blocks):
    """Those of real plans, on all ranks."""
    documents = cut(40, 65_536, seed=3)
    given = {"network": Network(4, 4, 45e9, 370e9), "max_blocks": max_blocks}
    for choice in (chosen(documents, 16, **given), chosen(documents, 16, **given, route="direct")):
        assert choice.buffer_rows <= max_blocks * choice.layout.local_rows
        if choice.route.name != "gather":
            shared = (choice.layout, Mask(), documents, 65_536, 65_536, 16)
            made = [plan(*shared, rank, choice.route)[0, BUFFER_ROWS] for rank in range(16)]
            assert max(made) == choice.buffer_rows


@pytest.mark.parametrize("route", SIZED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 300])
def test_buffers_are_sized_for_all_ranks_at_once(layout, route, window):
    """As in their plans; a rank to which nothing comes of some block may really need less."""
    documents, ranks = [(1500, 700, 3, 40, 900), (2000, 1000)], 8
    dealt = deal(layout, documents, 4096, ranks, Mask(window))
    laid = lay_out(documents, 4096)
    needs = needed(dealt, laid, meetings(dealt, laid), Mask(window))
    rows = needed_rows(dealt, needs, route.width(ranks))
    sized = buffer_rows(tour(route, *rows, dealt.local_rows), route, *rows, dealt.local_rows)
    shared = (dealt, Mask(window), documents, 4096, 4096, ranks)
    real = np.array([plan(*shared, rank, route)[0, BUFFER_ROWS] for rank in range(ranks)])
    assert (real <= sized).all() and (real == sized).sum() >= ranks // 2 and sized.max() <= 1.2 * real.max()


def test_a_budget_that_nothing_fits_is_refused():
    with pytest.raises(ValueError, match="max_blocks=1 is too little for any layout and route that is left"):
        chosen([(MILLION,)], 32, max_blocks=1)


def test_all_ranks_choose_the_same():
    documents = cut(300, seed=1)
    one, other = (chosen(documents, 32) for _ in range(2))
    assert (one.why, one.route, one.seconds) == (other.why, other.route, other.seconds)


@pytest.mark.parametrize("documents", [[()], [(), (1,)], [(5,)]])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_next_to_nothing_is_chosen_too(documents, ranks):
    padded = layouts.padded_length("auto", 64, ranks)
    choice = choose(documents, 64, padded, ranks, Mask(), LLAMA_8B, H100, NODES_OF_8, 8)
    assert math.isfinite(choice.seconds) and choice.layout.padded_length == padded


def test_one_rank_needs_no_network():
    choice = chosen([(1000, 24)], 1)
    assert choice.route == Route() and choice.busiest_nic_seconds == 0 and choice.buffer_rows == 0


@pytest.mark.parametrize("options", [{"layout": "spiral"}, {"route": "pigeon"}])
def test_unknown_names_are_refused(options):
    with pytest.raises(ValueError, match="is unknown: use one of auto, "):
        chosen([(100,)], 2, **options)


@pytest.mark.parametrize(("ranks", "limit"), [(32, 1.0), (256, 4.0)])
def test_choosing_takes_no_time_to_speak_of(ranks, limit):
    """Processor time, twice what a quiet machine takes: others may use the same core's other half."""
    documents = cut(200, seed=2)
    seconds = []
    for _ in range(2):
        begun = time.process_time()
        chosen(documents, ranks)
        seconds.append(time.process_time() - begun)
    assert min(seconds) < limit


@pytest.mark.parametrize("limit", [4, 8])
@pytest.mark.parametrize("rates", [H100, Rates(500e12, 450e12, 2.4e12), Rates(20e9, 20e9, 1e10)])
def test_what_is_never_estimated_could_not_have_won(rates, limit, monkeypatch):
    """Bounds spare most candidates; without them the answer is the same, and no estimate is below its bound."""
    cases = [(cut(count, seed=count), ranks) for count in (1, 3, 40) for ranks in (4, 6, 16)]
    ask = lambda documents, ranks: chosen(documents, ranks, rates=rates, max_blocks=limit)  # noqa: E731
    spared, plain = [ask(*case) for case in cases], Ring.least_seconds
    monkeypatch.setattr(Ring, "least_seconds", lambda *given: 0.0)
    estimate = Ring.estimate

    def watched(self, name, route, *more):
        found = estimate(self, name, route, *more)
        assert plain(self, name, route, route.blocks_per_hop) <= found.seconds
        return found

    monkeypatch.setattr(Ring, "estimate", watched)
    for case, before in zip(cases, spared, strict=True):
        after = ask(*case)
        assert (after.layout_name, after.route, after.seconds, after.why) == (
            before.layout_name,
            before.route,
            before.seconds,
            before.why,
        )


@pytest.mark.parametrize(("ranks", "limit"), [(256, 1.0), (512, 3.0)])
def test_one_document_is_planned_at_once(ranks, limit):
    """What `plan.py` waits for: processor time of the choice on so many ranks."""
    seconds = []
    for _ in range(2):
        begun = time.process_time()
        chosen([(ranks * 32768,)], ranks, rates=Rates(500e12, 450e12, 2.4e12))
        seconds.append(time.process_time() - begun)
    assert min(seconds) < limit
