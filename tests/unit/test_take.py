"""`parallel.take`: what the loader and the model get from it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.utils import _to_kwargs

from conf.compose import compose
from conf.schema import Layout
from parallel.layout import global_index
from parallel.schedule import AGREEMENT, BUFFER_ROWS, HEAD_GROUPS, NUM_RANKS
from parallel.take import Take


def mesh(rank: int, ranks: int, tensor: int = 1, ulysses: int = 1):
    axis = lambda rank, size: SimpleNamespace(rank=rank, size=size)  # noqa: E731
    return SimpleNamespace(
        ring=axis(rank // ulysses, ranks // ulysses),
        ulysses=axis(rank % ulysses, ulysses),
        tensor=axis(0, tensor),
        gradient=axis(rank, ranks),
    )


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("layout", list(Layout))
def test_ranks_hold_every_token_once_and_equally_many(layout, ulysses):
    """C025, C026: 61 tokens over 4 ranks whose slices the tensor axis halves once more; the tail is padding."""
    config = compose(["data.sequence_length=61", f"parallel.layout={layout}"])
    chunks = [Take(config, mesh(rank, 4, 2, ulysses))([(61,), (20, 30)]) for rank in range(4)]
    for sequence in range(2):
        held = [global_index(part[sequence]) for part, _ in chunks]
        assert {len(part) % 2 for part in held} == {0} and len({len(part) for part in held}) == 1
        assert np.sort(np.concatenate(held)).tolist() == list(range(sum(map(len, held))))
    assert {int(plan["full"][0, NUM_RANKS]) for _, plan in chunks} == {4 // ulysses}


@pytest.mark.parametrize("ulysses", [1, 2])
def test_ulysses_ranks_share_the_tokens_of_a_ring_rank_in_storage_order(ulysses):
    """C026."""
    config = compose(["data.sequence_length=64", "parallel.layout=zigzag"])
    whole = [global_index(Take(config, mesh(rank, 2))([(64,)])[0][0]) for rank in range(2)]
    parts = [
        global_index(Take(config, mesh(rank, 2 * ulysses, 1, ulysses))([(64,)])[0][0]) for rank in range(2 * ulysses)
    ]
    together = [np.concatenate(parts[r * ulysses : (r + 1) * ulysses]) for r in range(2)]
    assert [part.tolist() for part in together] == [part.tolist() for part in whole]


def test_one_plan_for_each_kind_of_attention():
    config = compose(["model.attention_pattern='window,full'", "model.attention_window=16"])
    _, plan = Take(config, mesh(0, 2))([(8192,)])
    assert plan.keys() == {"full", "window"}
    assert not torch.equal(plan["full"], plan["window"])
    windows = compose(["model.attention_pattern='window'", "model.attention_window=16"])
    assert Take(windows, mesh(0, 2))([(8192,)])[1].keys() == {"window"}


@pytest.mark.parametrize("layout", list(Layout))
def test_all_ranks_agree_whatever_auto_picks(layout):
    config = compose(["data.sequence_length=8K", f"parallel.layout={layout}", "parallel.route=auto"])
    for documents in ([(8192,)], [(100,) * 81], [(5000, 100, 3000)]):
        plans = [Take(config, mesh(rank, 4), say=lambda text: None)(documents)[1]["full"] for rank in range(4)]
        assert len({int(plan[1, AGREEMENT]) for plan in plans}) == 1


def test_auto_says_what_it_picked_and_why_once():
    said = []
    take = Take(compose(["data.sequence_length=8K"]), mesh(0, 4), say=said.append)
    for documents in ([(8192,)], [(8192,)], [(100,) * 80], [(8192,)]):
        take(documents)
    assert len(said) == 2 and "zigzag relay" in said[0] and "would take" in said[1]
    fixed = Take(compose(["parallel.layout=zigzag", "parallel.route=relay"]), mesh(0, 4), say=said.append)
    before = len(said)
    fixed([(8192,)])
    assert len(said) == before


def test_fsdp_leaves_the_plan_on_the_host():
    """FSDP's root moves tensors in tuples, lists and dicts to the device; the ring reads plans on the host."""
    _, plan = Take(compose([]), mesh(0, 1))([(8192,)])
    tokens = torch.zeros(2)
    ((moved, untouched),), _ = _to_kwargs((tokens, plan), {}, torch.device("meta"), False)
    assert moved.device.type == "meta"
    assert untouched["full"].device.type == "cpu"


@pytest.mark.parametrize("experiment", ["laptop", "8b_1m", "7b_256k"])
def test_shipped_experiments_stay_within_what_kernels_count(experiment):
    """32-bit kernels index an arena of fewer than 2^31 elements, whatever `auto` picks (the ring would refuse it)."""
    config = compose([f"experiment={experiment}"])
    length, ring = int(config.data.sequence_length), config.parallel.sequence
    take = Take(config, mesh(ring // 2, ring), node_size=min(8, ring), say=lambda text: None)
    for documents in ([(length,)], [(length // 2, length // 2)], [(length // 64,) * 64]):
        plan = take(documents)[1]["full"]
        groups = int(plan[1, HEAD_GROUPS])
        rows = length // groups if groups else length // ring + int(plan[0, BUFFER_ROWS])
        assert 2 * rows * config.model.num_kv_heads * config.model.head_dim < 1 << 31


def test_a_budget_that_cannot_hold_is_refused_before_the_first_step():
    with pytest.raises(ValueError, match="parallel.buffer_blocks=1: .* needs 2"):
        Take(compose(["parallel.layout=zigzag", "parallel.route=relay", "parallel.buffer_blocks=1"]), mesh(0, 4))
    deep = ["parallel.layout=zigzag", "parallel.route=direct", "parallel.prefetch=7", "data.sequence_length=64K"]
    with pytest.raises(ValueError, match="parallel.buffer_blocks=8: .* needs 9"):
        Take(compose(deep), mesh(0, 32))


def test_documents_that_need_more_than_the_budget_do_not_end_a_run():
    """Weeks into a run it is better to go on and to say so."""
    said = []
    take = Take(compose(["parallel.layout=zigzag", "parallel.route=relay"]), mesh(0, 4), say=said.append)
    take.setting.config.parallel.buffer_blocks = 1
    assert len(take([(8192,)])[1]["full"]) > 2
    assert "needs 2: parallel.buffer_blocks=1 is exceeded" in said[0]
