"""What a ring sends under each policy of recompute: as much as the planner says, to the byte."""

import pytest
import torch

from conf.compose import compose
from conf.schema import resolve
from parallel import ring
from parallel.apply import attend_over, build_model
from parallel.collectives import RingExchange
from parallel.mesh import build_mesh
from parallel.setting import Setting
from parallel.take import Take
from tests.harness import run_ranks
from training.timing import timing

RANKS, LENGTH = 3, 96
OPTIONS = [
    f"parallel.sequence={RANKS}",
    f"data.sequence_length={LENGTH}",
    "data.vocab_size=40",
    "model.model_dim=32",
    "model.head_dim=8",
    "model.ffn_dim=96",
    "parallel.layout=zigzag",
]


def sent(policy, route):
    """Bytes that this rank sent in a step, and storages that the ring's pool lacked."""
    config = compose([*OPTIONS, f"train.recompute={policy}", f"parallel.route={route}"])
    mesh, device = build_mesh(resolve(config, RANKS), "cpu"), torch.device("cpu")
    take = Take(config, mesh, RANKS, lambda _: None)
    take.reserve(torch.float32, device)
    chunks, plan = take(((LENGTH,),))
    model = build_model(config, mesh, attend_over(mesh, "sdpa"), device)
    count = []
    plain = RingExchange.start

    def start(self, sends, receives):
        count.append(sum(tensor.numel() * tensor.itemsize for _, tensor in sends))
        return plain(self, sends, receives)

    RingExchange.start = start
    tokens = torch.arange(sum(chunk.count for chunk in chunks[0]))[None] % 40
    model(tokens, tokens, plan, tokens).backward()
    return sum(count), ring.num_grown(mesh.ring.name)


@pytest.mark.parametrize("route", ["relay", "direct"])
def test_a_ring_sends_what_was_planned_and_only_full_sends_it_again(route):
    measured, planned = {}, {}
    for policy in ("none", "block", "full"):
        ranks = run_ranks(sent, RANKS, policy, route)
        assert [grown for _, grown in ranks] == [0] * RANKS
        measured[policy] = max(size for size, _ in ranks)
        config = compose([*OPTIONS, f"train.recompute={policy}", f"parallel.route={route}"])
        degrees = resolve(config, RANKS)
        setting = Setting(config, degrees, RANKS, lambda _: None)
        planned[policy] = timing(config, degrees, setting).traffic["ring"].rank_bytes
    forward = 2 * (RANKS - 1) * LENGTH // RANKS * 2 * 2 * 8 * 4  # layers, hops, tokens, k and v, heads, width, bytes
    assert measured["block"] == measured["none"]
    assert measured["full"] == measured["none"] + forward
    assert measured == planned
