"""Plans: conditions on blocks against the formulas, what does not fit, what is refused, and which configs do better."""

import sys

import pytest

from conf.compose import compose
from conf.schema import Recompute, resolve
from model.kernels import capability
from parallel.setting import Setting, whole
from training import max_context, searching
from training.max_context import longest
from training.memory import memory
from training.nearest import nearest
from training.planning import default_ranks, limit_bytes, peak_bytes, plan, shortage
from training.searching import search, vary

LLAMA_8B = ["model=8b", "data.sequence_length=1M", "train.dtype=bfloat16"]
H100 = [*LLAMA_8B, "parallel.sequence=32", "cluster=h100_ib400"]
FLAT = ["parallel.layout=zigzag", "parallel.route=relay", "cluster.node_gpus=1", "cluster.node_nics=1"]
SMALL = ["model=debug", "data.sequence_length=8K", "cluster.block_bytes=1M", "parallel.layout=zigzag"]


@pytest.mark.parametrize(
    ("overrides", "forward", "backward"),
    [
        (["cluster=h100_ib400"], 6.7e3, 7.3e3),
        (["cluster=h100_ib400", "model.num_kv_heads=32"], 26.7e3, 29.3e3),
        (["cluster=a100_ib200"], 4.2e3, 4.8e3),
        (["cluster=b200_ib400"], 14.7e3, 13.3e3),
        (["cluster=b200_ib400", "cluster.nic_bytes_per_second=90e9"], 7.3e3, 6.7e3),
        (["cluster=h100_ib400", "parallel.layout=contiguous"], 3.3e3, None),
        # The tensor axis divides both sides.
        (["cluster=h100_ib400", "parallel.tensor=8", "cluster.node_gpus=8", "cluster.node_nics=8"], 6.7e3, 7.3e3),
    ],
)
def test_blocks_that_hide_their_transfer_between_nodes(overrides, forward, backward):
    """The table of smallest blocks (Llama-3-8B: one key/value head for four query heads), rounded as it is there."""
    config = compose([*LLAMA_8B, "parallel.sequence=16", *FLAT, *overrides])
    found = plan(config, 16 * config.parallel.tensor)
    needed = {one.direction: one.needed_tokens for one in found.conditions if one.link == "nic"}
    assert needed["forward"] == pytest.approx(forward, rel=0.02)
    if backward is not None:
        assert needed["backward"] == pytest.approx(backward, rel=0.02)
    assert all(one.tokens == 65536 and one.holds for one in found.conditions)


def test_blocks_inside_a_node_and_gradients_on_a_narrow_wire():
    narrow = ["parallel.route=direct", "parallel.gradient_wire=bfloat16", "parallel.layout=zigzag"]
    found = plan(compose([*LLAMA_8B, "parallel.sequence=8", "cluster=h100_ib400", *narrow]), 8)
    needed = {(one.link, one.direction): one.needed_tokens for one in found.conditions}
    assert needed.keys() == {("link", "forward"), ("link", "backward")}
    assert needed["link", "forward"] == pytest.approx(0.8e3, rel=0.02)
    assert needed["link", "backward"] == pytest.approx(0.6e3, rel=0.02)


def test_blocks_too_short_are_exposed_in_the_timing_too():
    long, short = (
        plan(compose([*H100[:1], f"data.sequence_length={length}", *H100[2:], *FLAT]), 32) for length in ("1M", "64K")
    )
    assert all(one.holds for one in long.conditions) and not any(one.holds for one in short.conditions)
    assert long.timing.causes["ring"].exposed_seconds < 0.02 * long.timing.step_seconds
    assert short.timing.causes["ring"].exposed_seconds > 0.2 * short.timing.step_seconds


def test_a_plan_holds_what_a_checkpoint_and_the_host_take():
    found = plan(compose([*H100, "train.offload=true"]), 32)
    assert found.checkpoint_bytes == 12 * 8_030_261_248
    assert found.checkpoint_seconds == pytest.approx(found.checkpoint_bytes / (4 * 5e9))
    assert found.nodes == 4
    # Input and out of each token and layer but the last, and a float32 for each head.
    assert found.host_bytes == pytest.approx(8 * 31 * 32768 * (2 * 4096 * 2 + 4 * 32), rel=0.01)
    assert found.causes["runtime"] == 2.5e9
    assert sum(found.causes.values()) == pytest.approx(found.peak_bytes)


def test_a_save_in_the_background_needs_a_copy():
    """On GPUs in the host's memory, which can be too small for it; on CPUs in the rank's own."""
    states = 12 * 8_030_261_248
    found = plan(compose([*H100, "checkpoint.background=true"]), 32)
    assert found.host_bytes == 8 * 2**32 > states / 4  # of one of four nodes, in powers of two
    assert found.peak_bytes == plan(compose(H100), 32).peak_bytes
    small = compose([*H100, "checkpoint.background=true", "cluster.host_memory_bytes=20e9"])
    needs = plan(small, 32).memory
    assert "checkpoint.background" in shortage(small, resolve(small, 32), needs)
    on_cpu = [plan(compose([*SMALL, f"checkpoint.background={wish}"]), 1) for wish in ("true", "false")]
    assert on_cpu[0].peak_bytes - on_cpu[1].peak_bytes == on_cpu[0].checkpoint_bytes == 12 * 2_491_008


def test_a_plan_tells_how_often_to_save_and_what_is_left():
    """Young: sqrt(2 · seconds of a save · mean time between failures); about twice save / interval is lost."""
    saves = plan(compose([*H100, "run.mtbf_hours=10"]), 32).saves
    assert saves.mtbf_seconds == 36_000 and saves.save_seconds == pytest.approx(12 * 8_030_261_248 / 20e9)
    young = (2 * saves.save_seconds * 36_000) ** 0.5
    assert saves.interval_seconds == pytest.approx(young, rel=0.01)
    lost = 2 * saves.save_seconds / young + 300 / 36_000
    assert 1 - saves.expected == pytest.approx(lost, rel=0.05)
    given = plan(compose([*H100, "run.mtbf_hours=10", "checkpoint.every=1000"]), 32)
    assert given.saves.interval_seconds == pytest.approx(1000 * given.timing.step_seconds)
    assert given.saves.expected < saves.expected


def test_a_plan_warns_of_timeouts_that_end_healthy_runs():
    slow = [*H100, "timeouts.step_seconds=60", "timeouts.save_seconds=5"]
    notes = " ".join(plan(compose(slow), 32).notes)
    assert "timeouts.step_seconds=60 " in notes and "timeouts.save_seconds=5 " in notes and "first_step" not in notes
    assert "timeouts" not in " ".join(plan(compose(H100), 32).notes)


def test_ranks_are_the_product_of_the_axes():
    assert default_ranks(compose(["parallel.sequence=4", "model.num_kv_heads=2", "parallel.tensor=2"])) == 8
    assert default_ranks(compose(["parallel.sequence=4", "parallel.data=3"])) == 12


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster=h100_ib400", "train.dtype=float32"], "does not compute float32 on cuda: use train.dtype=bfloat16"),
        (["train.offload=true"], "train.offload=true needs"),
        (
            ["model=8b", "cluster=h100_ib400", "data.sequence_length=1M", "train.dtype=bfloat16"],
            "a tensor of 4294967296 elements is too large",
        ),
    ],
)
def test_refusals_are_those_of_the_run(overrides, words):
    config = compose(overrides)
    assert any(words in text for text in plan(config, 1).refusals)


def test_what_leaves_nothing_to_plan_is_an_error():
    for overrides, ranks, words in (
        (["parallel.sequence=4"], 6, "does not make 6 ranks"),
        (["cluster.block_bytes=1K"], 1, "cluster.block_bytes=1024"),
        (["parallel.sequence=4", "parallel.buffer_blocks=1", *SMALL, "parallel.route=relay"], 4, "buffer_blocks=1"),
    ):
        with pytest.raises(ValueError, match=words):
            plan(compose(overrides), ranks)


def test_what_kernels_cannot_index_is_said_so():
    config = compose(["model=8b", "data.sequence_length=4M", "parallel.sequence=8", *H100[2:3], "cluster=h100_ib400"])
    with pytest.raises(ValueError, match="parallel.sequence=8 leaves 524288 tokens to a ring rank.* 32 bits"):
        plan(config, 8)


def test_a_kernel_that_is_not_installed_here_may_be_there(monkeypatch):
    monkeypatch.setattr(capability, "flash_is_installed", lambda: False)
    given = ["model=debug", "cluster=h100_ib400", "parallel.kernel=flash"]
    found = plan(compose([*given, "train.dtype=bfloat16"]), 1)
    assert not found.refusals and found.kernel == "flash" and "not installed here" in found.notes[0]
    wide = plan(compose([*given, "train.dtype=float32"]), 1)
    assert "does not compute float32 on cuda" in wide.refusals[0] and "not installed" not in wide.refusals[0]
    assert "does not run on cpu" in plan(compose(["parallel.kernel=flash"]), 1).refusals[0]


def test_ranks_on_cpus_share_their_host():
    config = compose([*SMALL, "parallel.sequence=4"])
    peak = plan(config, 4).peak_bytes
    for share, fits in ((1.01, True), (0.99, False)):
        found = plan(vary(config, {"cluster.host_memory_bytes": share * 4 * peak}), 4)
        assert found.fits == fits
    assert "4 ranks of a node share its memory" in shortage(found.config, found.degrees, found.memory)
    apart = vary(found.config, {"cluster.node_gpus": 2})
    assert plan(apart, 4).fits


def test_figures_of_other_rates_are_no_mfu():
    for given in (["parallel.kernel=reference"], ["cluster=h100_ib400", "train.dtype=float32"]):
        found = plan(compose([*SMALL[:2], *given]), 1)
        assert set(found.mfu.values()) == {None} and "times are not to be trusted" in found.notes[-1]
    found = plan(compose(SMALL), 1)
    assert None not in found.mfu.values() and not found.notes


def test_packed_documents_have_no_condition_on_blocks_and_no_noncausal_mfu():
    config = compose([*SMALL, "parallel.sequence=4"])
    packed = plan(config, 4, ((1024,) * 8,))
    assert plan(config, 4).conditions and not packed.conditions
    assert packed.mfu["noncausal"] is None and packed.mfu["causal"] > 0


# --- other configs ---------------------------------------------------------------------------------------------------


def test_a_search_tries_every_legal_way_and_keeps_what_fits():
    """8 ranks, 4 query and 2 key/value heads: tensor 1 or 2, every divisor as sequence, Ulysses up to 4 heads."""
    config = compose([*SMALL, "cluster.memory_bytes=64e6", "parallel.buffer_blocks=16"])
    found = search(config, 8)
    ways = [
        (tensor, sequence, ulysses)
        for tensor in (1, 2)
        for sequence in (1, 2, 4, 8)
        if 8 // tensor % sequence == 0
        for ulysses in (1, 2, 4)
        if sequence % ulysses == 0 and 4 // tensor % ulysses == 0
    ]
    assert found.tried == 3 * len(ways)
    assert 0 < len(found.rows) < found.tried
    assert len(found.rows) + sum(found.fell_out.values()) == found.tried
    for row in found.rows[:: max(1, len(found.rows) // 6)]:
        assert row.peak_bytes <= 64e6
        assert resolve(row.config, 8) == row.degrees
        again = plan(row.config, 8)
        assert again.peak_bytes == row.peak_bytes
        assert again.timing.step_seconds == pytest.approx(row.timing.step_seconds)
        assert compose([*SMALL, "cluster.memory_bytes=64e6", "parallel.buffer_blocks=16", *row.overrides.split()]) == (
            row.config
        )
    speeds = [float(f"{row.timing.tokens_per_second:.4g}") for row in found.rows]
    assert speeds == sorted(speeds, reverse=True)


def test_large_rings_are_looked_at_roughly_and_then_as_they_would_run(monkeypatch):
    monkeypatch.setattr(searching, "LARGE_RING", 1)
    config = compose([option for option in SMALL if "layout" not in option])
    found = search(config, 4)
    assert all(row.config.parallel.layout == "auto" and row.config.parallel.route == "auto" for row in found.rows)
    best = found.rows[0]
    assert plan(best.config, 4).timing.step_seconds == pytest.approx(best.timing.step_seconds)


def test_what_is_pasted_makes_as_many_ranks():
    """parallel.data=-1 counts as one without --ranks."""
    for row in search(compose([*SMALL, "parallel.buffer_blocks=16"]), 4).rows:
        given = row.arguments.split()
        ranks = int(given[given.index("--ranks") + 1]) if "--ranks" in given else default_ranks(row.config)
        assert ranks == 4


def test_the_nearest_config_runs_as_it_is_pasted(monkeypatch):
    """Rings too large to ask `auto` about are given layout and route."""
    monkeypatch.setattr(sys.modules["training.nearest"], "LARGE_RING", 2)
    given = ["model=debug", "data.sequence_length=8K", "cluster.block_bytes=1M", "parallel.sequence=4"]
    config = compose([*given, "train.recompute=none", "model.num_layers=8"])
    limit = 0.9 * plan(config, 4).peak_bytes
    found = nearest(vary(config, {"cluster.memory_bytes": limit}), 4)
    again = plan(
        vary(compose([*given, "train.recompute=none", "model.num_layers=8"]), found.changes), found.degrees.world
    )
    assert again.peak_bytes == found.peak_bytes <= limit
    assert again.timing.step_seconds == pytest.approx(found.timing.step_seconds)
    if found.degrees.sequence == 4:
        assert found.changes["parallel.route"] == "relay"


def test_what_is_refused_has_a_nearest_too():
    wide = compose(["model=debug", "cluster=h100_ib400", "train.dtype=float32"])
    assert plan(wide, 1).fits and nearest(wide, 1).changes == {"train.dtype": "bfloat16"}
    assert nearest(compose([*SMALL, "train.offload=true"]), 1).changes == {"train.offload": False}


def test_the_nearest_config_differs_least():
    config = compose([*SMALL, "train.recompute=none", "parallel.sequence=2", "model.num_layers=8"])
    none, block, full = (plan(vary(config, {"train.recompute": policy}), 2).peak_bytes for policy in Recompute)
    assert full <= block < none
    tight = vary(config, {"cluster.memory_bytes": (block + none) / 2})
    found = nearest(tight, 2)
    assert found.changes == {"train.recompute": "block"} and found.distance == 1
    tighter = vary(config, {"cluster.memory_bytes": 0.7 * full})
    more = nearest(tighter, 2)
    assert more.degrees.world > 2 and more.peak_bytes <= tighter.cluster.memory_bytes
    assert nearest(vary(config, {"cluster.memory_bytes": 1e3}), 2) is None


@pytest.mark.parametrize("recompute", ["none", "block", "full"])
def test_the_longest_sequence_fits_and_one_unit_more_does_not(recompute):
    config = compose([*SMALL, f"train.recompute={recompute}", "parallel.sequence=4", "cluster.memory_bytes=256e6"])
    found = longest(config, 4)
    assert found.tokens % found.unit == 0 and found.unit == 4 * 128
    for tokens, fits in ((found.tokens, True), (found.tokens + found.unit, False)):
        longer = vary(config, {"data.sequence_length": tokens})
        degrees = resolve(longer, 4)
        plans = Setting(longer, degrees, say=lambda text: None).plans(whole(longer), 0)
        assert (peak_bytes(longer, memory(longer, degrees, plans)) <= limit_bytes(longer)) == fits
    assert found.reason.startswith("memory: a rank needs")


def test_auto_is_looked_at_route_by_route():
    """With `auto` 2,686,976 tokens fit, some lengths above do not, and then longer ones do."""
    config = compose(["experiment=8b_1m"])
    found = longest(config, 32)
    assert found.tokens >= 3_112_960 and found.pinned
    given = found.arguments.split()
    assert plan(compose(["experiment=8b_1m", *given]), 32).fits
    for pins in (
        ["parallel.layout=zigzag", "parallel.route=relay"],
        ["parallel.layout=zigzag", "parallel.route=direct"],
    ):
        longer = compose(["experiment=8b_1m", *pins, f"data.sequence_length={found.tokens + found.unit}"])
        assert not plan(longer, 32).fits


def test_the_longest_sequence_is_bisected_where_the_host_ends_it(monkeypatch):
    config = compose([*SMALL, "parallel.sequence=4", "parallel.route=relay", "cluster.host_memory_bytes=1e9"])
    asked = []
    ask = max_context._Probe._ask
    monkeypatch.setattr(max_context._Probe, "_ask", lambda self, units: asked.append(units) or ask(self, units))
    found = longest(config, 4)
    assert found.reason.startswith("host memory") and not found.pinned
    assert len(asked) < 40 and len(set(asked)) == len(asked)
    longer = vary(config, {"data.sequence_length": found.tokens + found.unit})
    assert not plan(longer, 4).fits and plan(vary(config, {"data.sequence_length": found.tokens}), 4).fits


def test_the_longest_sequence_keeps_the_number_of_micro_batches():
    config = compose([*SMALL, "parallel.sequence=2", "train.global_batch_tokens=24K", "cluster.memory_bytes=128e6"])
    alone = compose([*SMALL, "parallel.sequence=2", "cluster.memory_bytes=128e6"])
    assert 0 < longest(config, 2).tokens <= longest(alone, 2).tokens


def test_nothing_fits_a_memory_that_weights_fill():
    with pytest.raises(ValueError, match="128 tokens a rank, does not fit"):
        longest(compose([*SMALL, "cluster.memory_bytes=1e6"]), 1)


def test_context_grows_with_the_ranks():
    """The law of ring attention: R ranks hold R times the sequence, but for what does not grow with it."""
    deep = [*SMALL, "model.num_layers=8", "parallel.route=relay", "cluster.memory_bytes=512e6"]
    two, eight = (longest(compose([*deep, f"parallel.sequence={ranks}"]), ranks).tokens for ranks in (2, 8))
    assert eight / two == pytest.approx(4, rel=0.05)


def test_memory_is_that_of_the_rank_that_needs_most():
    """Direct routes bring other ranks other rows: of all 16 the largest, within a hundredth."""
    config = compose([*SMALL[:3], "parallel.sequence=16", "parallel.route=direct", "parallel.layout=contiguous"])
    degrees = resolve(config, 16)
    setting = Setting(config, degrees, say=lambda text: None)
    each = [memory(config, degrees, setting.plans(whole(config), rank)).peak_bytes for rank in range(16)]
    assert min(each) < max(each)
    assert plan(config, 16).peak_bytes == pytest.approx(max(each), rel=0.01)
