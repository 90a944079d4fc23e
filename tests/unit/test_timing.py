"""Step times against worked examples and closed forms, collectives against enumeration, products against torch."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import library
from torch.utils._python_dispatch import TorchDispatchMode

from conf.compose import compose
from conf.schema import Recompute, TrainConfig, resolve
from model.blocks import Blocks
from model.transformer import Transformer
from parallel import apply
from parallel.route import Route
from parallel.setting import Setting
from training.links import Group, groups
from training.ring_time import play_all
from training.step_time import COMMUNICATION, Step, recomputed_parameters
from training.timing import Timing, timing

MILLION = 1 << 20
ATTENTION, FFN = 2 * 4096 * 4096 + 2 * 4096 * 1024, 3 * 4096 * 14336  # parameters of a layer
MATMULS = 32 * (ATTENTION + FFN) + 4096 * 128256

# Llama-3-8B, one sequence of 2^20 tokens, zigzag, relay; seconds, causal MFU and tokens/s/GPU that the table gives.
H100 = ["cluster=h100_ib400"]
SDPA = [*H100, "cluster.attention_forward_flops=560e12", "cluster.attention_backward_flops=480e12"]
A100 = ["cluster=a100_ib200"]
ROWS = {
    "32 flat": (H100, 32, 1, "block", False, 59.2, 48.7, 554),
    "32 flat full": (H100, 32, 1, "full", False, 74.2, 38.8, 442),
    "4 x TP8": (H100, 4, 8, "block", False, 61.4, 46.9, 533),
    "64 flat": (H100, 64, 1, "block", False, 29.6, 48.7, 554),
    "256 flat": (H100, 256, 1, "block", False, 12.6, 28.6, 325),
    "256 two levels": (H100, 256, 1, "block", True, 7.4, 48.7, 554),
    "32 x TP8": (H100, 32, 8, "block", False, 7.7, 46.9, 533),
    "32 SDPA": (SDPA, 32, 1, "block", False, 66.2, 43.5, 495),
    "32 SDPA full": (SDPA, 32, 1, "full", False, 82.3, 35.0, 398),
    "32 A100": (A100, 32, 1, "block", False, 181, 50.3, 181),
    "32 A100 full": (A100, 32, 1, "full", False, 229, 39.9, 143),
    "64 A100": (A100, 64, 1, "block", False, 90.7, 50.3, 181),
    "256 A100 flat": (A100, 256, 1, "block", False, 25.5, 44.7, 160),
    "256 A100 two levels": (A100, 256, 1, "block", True, 22.7, 50.3, 181),
}
BARE = ["cluster.latency_seconds=0", "cluster.memory_bytes_per_second=1e30"]  # what the table leaves out


def of(overrides: list[str], ranks: int, route: Route | None = None, **more) -> Timing:
    """The timing of a config; `route` instead of the one that it would choose."""
    config = compose(overrides)
    degrees = resolve(config, ranks)
    setting = Setting(config, degrees, say=lambda text: None)
    documents = ((setting.length,),) * config.train.micro_batch_size
    choices = setting.choose(documents)
    if route is not None:
        choices = {kind: replace(choice, route=route) for kind, choice in choices.items()}
    return timing(config, degrees, setting, documents, attention=play_all(setting, documents, choices), **more)


@cache
def worked(name: str) -> tuple[TrainConfig, Timing]:
    cluster, ring, tensor, policy, two_levels, *_ = ROWS[name]
    overrides = ["model=8b", "data.sequence_length=1M", "train.dtype=bfloat16", f"train.recompute={policy}"]
    overrides += [f"parallel.sequence={ring}", f"parallel.tensor={tensor}", *cluster, *BARE]
    overrides += ["parallel.layout=zigzag", "parallel.route=relay"]
    route = Route("relay", node_ranks=8 if two_levels else 0)
    return compose(overrides), of(overrides, ring * tensor, route)


@pytest.mark.parametrize("name", ROWS)
def test_worked_examples(name):
    """All rows within 2 %. Source: the project's table of worked examples (Llama-3-8B, PERFORMANCE.md §9.7)."""
    *_, seconds, mfu, tokens = ROWS[name]
    _, time = worked(name)
    assert time.step_seconds == pytest.approx(seconds, rel=0.02)
    assert 100 * time.mfu_causal == pytest.approx(mfu, rel=0.02)
    assert time.tokens_per_second / time.ranks == pytest.approx(tokens, rel=0.02)


@pytest.mark.parametrize("name", ROWS)
def test_worked_examples_in_closed_form(name):
    """The formulas of §9.5, with what this code base does otherwise than that table, all of it named:

    * products repeated in backward: gate and up, under block and full also attention's four, where the table repeats
      every one, the head's too;
    * an owner's gradients never travel, so N - 1 messages of them do, where the table has N;
    * TP: 11 collectives a layer and four of embedding and head, where the table has 14 a layer;
    * a layer's weights, which come into each node meanwhile, take their share of every card.
    """
    _, ring, tensor, policy, two_levels, *_ = ROWS[name]
    config, time = worked(name)
    rates, tokens, full = config.cluster, MILLION // ring, policy == "full"
    nic = rates.nic_bytes_per_second * (8 if two_levels else 1)  # a block enters a node once, over one card of eight
    forward_hop = 2 * tokens**2 * 4096 / tensor / rates.attention_forward_flops
    backward_hop = 5 * tokens**2 * 4096 / tensor / rates.attention_backward_flops
    keys, gradients = (2 * tokens * 1024 / tensor * size / nic for size in (2, 4))
    weights = 2 * (ATTENTION + FFN) / (8 * rates.nic_bytes_per_second)
    slower = [  # by which the ring is, if that is spread over the pass
        1 / (1 - weights / max(ring * hop, (ring - 1) * message + weights))
        for hop, message in ((forward_hop, keys), (backward_hop, keys + gradients))
    ]
    forward = (ring - 1) * max(forward_hop, keys * slower[0]) + forward_hop
    backward = (ring - 1) * max(backward_hop, (keys + gradients) * slower[1]) + backward_hop + gradients
    again = 32 * (ATTENTION + 2 * FFN // 3)
    products = (6 * MATMULS + 2 * again) * tokens / tensor / rates.linear_flops
    one = 2 * tokens * 4096 * (tensor - 1) / tensor / rates.link_bytes_per_second
    expected = 32 * ((1 + full) * forward + backward) + products + (32 * 11 + 4) * one
    # Left: weights at a pass's beginning; a relay's first hops of a node, and the last gradients home, over NVLink.
    assert time.step_seconds == pytest.approx(expected, rel=0.006)
    table = expected + 2 * (MATMULS - again) * tokens / tensor / rates.linear_flops + (32 * 3 - 4) * one
    assert table == pytest.approx(ROWS[name][5], rel=0.02)


@pytest.mark.parametrize("policy", list(Recompute))
def test_products_that_run_again(policy):
    """Counted in a step of the real model: 6 a parameter and token, and 2 for what recompute repeats."""
    config = compose(["model=debug", "model.num_layers=2", "data.vocab_size=64", f"train.recompute={policy}"]).model
    model = Transformer(config, lambda q, k, v, plan: attention(q, k, v), Blocks(16, 16))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    apply.recompute(model, policy)
    tokens = torch.randint(0, 64, (1, 48))
    with Products() as counted:
        model(tokens, torch.arange(48)[None], {"full": torch.zeros(2, 8)}, tokens).backward()
    parameters = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name)
    again = 2 * recomputed_parameters(config, policy)
    assert counted.flops == 48 * (6 * parameters + 2 * again)


@library.custom_op("longhaul_test::attention", mutates_args=())
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Stands in for attention: it keeps nothing and multiplies nothing."""
    return q.clone()


def _attention_backward(ctx, dout):
    shared = dout.unflatten(2, (ctx.kv_heads, -1)).sum(3)
    return dout, shared, shared.clone()


def _attention_context(ctx, inputs, output):
    ctx.kv_heads = inputs[1].shape[2]


attention.register_autograd(_attention_backward, setup_context=_attention_context)


class Products(TorchDispatchMode):
    """FLOPs of all matrix products."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "bmm", "baddbmm_"):
            left, right = args[-2:]
            self.flops += 2 * left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


# --- exchanges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "stride"), [(2, 1), (4, 1), (8, 1), (4, 2), (2, 4), (2, 8), (16, 1), (4, 4)])
def test_collectives_by_enumeration(size, stride):
    """16 ranks on two nodes of 8 with 4 cards: what each node lacks comes in once, an all-to-all pair by pair."""
    cluster = compose(["cluster=h100_ib400", "cluster.node_nics=4", "cluster.latency_seconds=0"]).cluster
    members = [[start + i * stride for i in range(size)] for start in range(16) if start // stride % size == 0]
    assert sorted(sum(members, [])) == list(range(16))
    group = Group(size, stride, 8, cluster)
    gathered = group.gather(1.0 * size)  # one byte a member
    into_node = sum(sum(r >= 8 for r in ranks) for ranks in members if any(r < 8 for r in ranks))
    assert gathered.nic_bytes == pytest.approx(into_node / 4)
    assert gathered.rank_bytes == pytest.approx(size - 1)
    exchanged = group.exchange(1.0 * size)
    pairs = sum((a < 8) != (b < 8) for ranks in members for a in ranks for b in ranks) / 2
    assert exchanged.nic_bytes == pytest.approx(pairs / 4)
    assert group.crosses == (into_node > 0)
    assert group.reduce(3.0).rank_bytes == 2 * group.gather(3.0).rank_bytes


def test_groups_lie_as_the_mesh_lays_them():
    config = compose(["parallel.sequence=4", "parallel.tensor=2", "parallel.ulysses=2", "parallel.shard=4"])
    made = groups(resolve(config, 16), config.cluster)
    sizes = {name: (group.size, group.stride) for name, group in made.items()}
    assert sizes == {"tensor": (2, 1), "ulysses": (2, 2), "shard": (4, 2), "replicate": (2, 8)}


RING = ["model=8b", "data.sequence_length=64K", "parallel.sequence=16", "cluster=h100_ib400", "train.dtype=bfloat16"]
RELAY = ["parallel.layout=zigzag", "parallel.route=relay"]


def test_full_sends_one_forward_ring_more_and_block_none():
    """Bytes of §9.4: N - 1 blocks of keys and values forward; those and the gradients of N - 1 backward."""
    sent = {
        policy: of([*RING, *RELAY, f"train.recompute={policy}"], 16, Route()).traffic["ring"].rank_bytes
        for policy in Recompute
    }
    block = 2 * (65536 // 16) * 1024
    assert sent["none"] == sent["block"] == pytest.approx(32 * 15 * block * (2 + 2 + 4))
    assert sent["full"] - sent["block"] == pytest.approx(32 * 15 * block * 2)


def test_weights_cross_each_card_once_a_node():
    """8B over 64 GPUs: 62 GB a rank with gradients in float32, of which a card of eight brings an eighth."""
    time = of(["model=8b", "data.sequence_length=1M", "parallel.sequence=64", *H100, "train.dtype=bfloat16"], 64)
    parameters = 8_030_261_248
    assert time.traffic["shard"].rank_bytes == pytest.approx(parameters * (2 + 2 + 4) * 63 / 64, rel=1e-4)
    assert time.traffic["shard"].nic_bytes == pytest.approx(parameters * (2 + 2 + 4) * 7 / 8 / 8, rel=1e-4)


def test_gradients_of_replicas_are_traffic_of_their_own():
    """States sharded over 8 of 64 GPUs: gradients, 1/8 of them on each rank, are then summed over 8 replicas."""
    sharded = ["model=8b", "data.sequence_length=1M", "parallel.sequence=64", *H100, "train.dtype=bfloat16"]
    time = of([*sharded, "parallel.shard=8"], 64)
    parameters = 8_030_261_248
    assert time.traffic["shard"].rank_bytes == pytest.approx(parameters * (2 + 2 + 4) * 7 / 8, rel=1e-4)
    assert time.traffic["replicate"].rank_bytes == pytest.approx(2 * parameters / 8 * 4 * 7 / 8, rel=1e-4)
    assert time.traffic["shard"].nic_bytes == 0 < time.traffic["replicate"].nic_bytes
    assert "replicate" not in of(sharded, 64).traffic


def test_backward_hides_weights_from_the_last_layer_to_the_first():
    """A last layer that computes for long hides one before it in backward; in forward it hides nothing but the head."""
    overrides = [*RING, *RELAY, "model.num_layers=2", "cluster.node_gpus=1", "cluster.node_nics=1"]
    config = compose(overrides)
    degrees = resolve(config, 16)
    setting = Setting(config, degrees, say=lambda text: None)
    exposed = []
    for backward in ((0.0, 1e3), (1e3, 0.0)):
        step = Step(config, degrees, setting, play_all(setting, ((65536,),)), 0.0)
        step._shard([(0.0, seconds) for seconds in backward])
        exposed.append(step.exposed["shard"])
    # Under the last: weights of the first, gradients of the last. Under the first: its own embedding's, and those too.
    parameters = (ATTENTION + FFN) * (2 + 4) - 128256 * 4096 * 2 - (ATTENTION + FFN) * 4
    assert exposed[1] - exposed[0] == pytest.approx(parameters * 15 / 16 / 45e9, rel=0.1)


def test_ulysses_sends_what_its_heads_need():
    """§9.4: 4 bce (h + h_kv) (u - 1)/u forward and backward, for b·c tokens of a rank, per layer."""
    overrides = ["model=8b", "data.sequence_length=64K", "parallel.sequence=8", "parallel.ulysses=4", *H100]
    time = of([*overrides, "train.dtype=bfloat16", "train.recompute=block"], 8)
    assert time.traffic["ulysses"].rank_bytes == pytest.approx(32 * 4 * 8192 * 2 * (4096 + 1024) * 3 / 4)
    more_copies = of([*overrides[:3], "parallel.ulysses=8", "model.num_kv_heads=4", *H100, "train.dtype=bfloat16"], 8)
    assert more_copies.traffic["ulysses"].rank_bytes == pytest.approx(32 * 4 * 8192 * 2 * (4096 + 1024) * 7 / 8)


def test_tensor_collectives_move_a_share_of_the_activations():
    """8 (t - 1)/t bche a layer without recompute, and four more for embedding and head; three scalars a token."""
    overrides = ["model=8b", "data.sequence_length=64K", "parallel.sequence=2", "parallel.tensor=4", *H100]
    none = of([*overrides, "train.dtype=bfloat16", "train.recompute=none"], 8).traffic["tensor"].rank_bytes
    block = of([*overrides, "train.dtype=bfloat16", "train.recompute=block"], 8).traffic["tensor"].rank_bytes
    one = 32768 * 4096 * 2 * 3 / 4
    scalars = 32768 * 3 * 4 * 2 * 3 / 4
    assert none == pytest.approx((32 * 8 + 4) * one + scalars, rel=1e-3)
    assert block - none == pytest.approx(32 * 3 * one)


# --- the step as a whole ---------------------------------------------------------------------------------------------


def test_causes_add_up_and_mfu_is_flops_over_peak():
    time = of([*RING, *RELAY], 16)
    assert time.step_seconds == pytest.approx(sum(cause.exposed_seconds for cause in time.causes.values()))
    assert all(0 <= cause.exposed_seconds <= cause.seconds * (1 + 1e-9) + 1e-3 for cause in time.causes.values())
    assert time.flops_causal == pytest.approx(6 * MATMULS * 65536 + 12 * 32 * 4096 * 65536 * 65537 / 2)
    assert time.mfu_causal == pytest.approx(time.flops_causal / (time.step_seconds * 16 * 989e12))
    assert time.mfu_noncausal > time.mfu_causal
    assert time.mfu_ceiling > time.mfu_causal
    kernels = 12 * 32 * 4096 * 65536 * 65537 / 2 / 12 * (4 / 600e12 + 10 / 550e12) / 16
    assert time.ceiling_seconds == pytest.approx(kernels + 6 * MATMULS * 65536 / 16 / 650e12, rel=0.005)


def test_one_rank_has_nothing_to_exchange():
    time = of(["model=debug", "data.sequence_length=8K", "parallel.sequence=1"], 1)
    assert {name for name in time.causes if name in COMMUNICATION} <= {"shard"}
    assert not time.traffic


def test_micro_batches_repeat_all_but_the_optimizer_and_sums_of_gradients():
    once = of([*RING, *RELAY], 16)
    thrice = of([*RING, *RELAY, "train.global_batch_tokens=192K"], 16)
    each = of([*RING, *RELAY, "train.global_batch_tokens=192K", "parallel.reduce_gradients=each"], 16)
    for name in once.causes.keys() - {"optimizer", "shard"}:
        assert thrice.causes[name].seconds == pytest.approx(3 * once.causes[name].seconds)
    assert thrice.causes["optimizer"] == once.causes["optimizer"]
    assert thrice.traffic["shard"].rank_bytes == pytest.approx(once.traffic["shard"].rank_bytes * (3 * 4 + 4) / 8)
    assert each.traffic["shard"].rank_bytes == pytest.approx(3 * once.traffic["shard"].rank_bytes)
    assert thrice.tokens == 3 * once.tokens


def test_weights_are_exposed_where_nothing_hides_them():
    cpu = of(["model=debug", "parallel.sequence=4", "data.sequence_length=8K"], 4).causes["shard"]
    assert cpu.exposed_seconds == cpu.seconds
    gpu = of(["model=8b", "data.sequence_length=1M", "parallel.sequence=32", *H100, "train.dtype=bfloat16"], 32)
    assert gpu.causes["shard"].exposed_seconds < 0.1 * gpu.causes["shard"].seconds
    short = of(["model=8b", "data.sequence_length=8K", "parallel.sequence=32", *H100, "train.dtype=bfloat16"], 32)
    assert short.causes["shard"].exposed_seconds > 0.3 * short.causes["shard"].seconds


def test_offload_is_exposed_once_the_bus_is_slower_than_the_layers():
    overrides = [*RING, *RELAY, "train.offload=true"]
    hidden = of(overrides, 16, host_bytes=1e9).causes["offload"]
    assert hidden.seconds == pytest.approx(2e9 / 50e9)  # host_bytes are those of all layers but the last
    assert hidden.exposed_seconds == 0
    layers = of([*RING, *RELAY], 16)
    huge = of(overrides, 16, host_bytes=1e13).causes["offload"]
    computed = layers.step_seconds - layers.causes["head"].seconds - layers.causes["optimizer"].seconds
    computed *= 31 / 32  # what the last layer keeps never leaves
    assert huge.exposed_seconds == pytest.approx(huge.seconds - computed, rel=0.01)


def test_contiguous_ranks_wait_for_the_busiest():
    """N/(2N - 1) of the work of the busiest rank, on average."""
    config = compose([*RING, "parallel.layout=contiguous", "parallel.route=relay"])
    setting = Setting(config, resolve(config, 16), say=lambda text: None)
    contiguous = play_all(setting, ((65536,),))["full"]
    assert contiguous.balance == pytest.approx(16 / 31, rel=0.02)
