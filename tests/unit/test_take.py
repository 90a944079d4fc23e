"""`train.taker`: what the loader and the model get from it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.utils import _to_kwargs

from conf.compose import compose
from conf.schema import Layout
from parallel.layout import global_index
from train import taker


def mesh(rank: int, ranks: int, tensor: int = 1):
    return SimpleNamespace(sequence=SimpleNamespace(rank=rank, size=ranks), tensor=SimpleNamespace(size=tensor))


@pytest.mark.parametrize("layout", list(Layout))
def test_ranks_hold_every_token_once_and_equally_many(layout):
    """C025: 61 tokens over 4 ranks whose slices the tensor axis halves once more; the tail is padding."""
    config = compose(["data.sequence_length=61", f"parallel.layout={layout}"])
    chunks = [taker(config, mesh(rank, 4, tensor=2))([(61,)])[0][0] for rank in range(4)]
    held = [global_index(part) for part in chunks]
    assert {len(part) % 2 for part in held} == {0} and len({len(part) for part in held}) == 1
    assert np.sort(np.concatenate(held)).tolist() == list(range(sum(map(len, held))))


def test_one_plan_for_each_kind_of_attention():
    config = compose(["model.attention_pattern='window,full'", "model.attention_window=16"])
    _, plan = taker(config, mesh(0, 2))([(8192,)])
    assert plan.keys() == {"full", "window"}
    assert not torch.equal(plan["full"], plan["window"])


def test_fsdp_leaves_the_plan_on_the_host():
    """FSDP's root moves tensors in tuples, lists and dicts to the device; the ring reads plans on the host."""
    _, plan = taker(compose([]), mesh(0, 1))([(8192,)])
    tokens = torch.zeros(2)
    ((moved, untouched),), _ = _to_kwargs((tokens, plan), {}, torch.device("meta"), False)
    assert moved.device.type == "meta"
    assert untouched["full"].device.type == "cpu"
