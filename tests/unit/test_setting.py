"""`parallel.setting`: what a planner and the ranks of a run both ask."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from conf.compose import compose
from conf.schema import resolve
from parallel.schedule import LOCAL_LENGTH, NUM_RANKS
from parallel.setting import Setting
from parallel.take import Take


def mesh(rank, degrees):
    axis = lambda rank, size: SimpleNamespace(rank=rank, size=size, name="")  # noqa: E731
    place = rank % degrees.sequence
    return SimpleNamespace(
        ring=axis(place // degrees.ulysses, degrees.sequence // degrees.ulysses),
        ulysses=axis(place % degrees.ulysses, degrees.ulysses),
        tensor=axis(0, degrees.tensor),
        gradient=axis(rank, degrees.data * degrees.sequence),
    )


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("documents", [[(8192,)], [(100,) * 81], [(5000, 3192)]])
def test_the_planner_and_the_ranks_find_the_same(documents, ulysses):
    overrides = ["parallel.sequence=8", f"parallel.ulysses={ulysses}", "data.sequence_length=8K"]
    config = compose([*overrides, "model.attention_pattern='window,full'", "model.attention_window=256"])
    degrees = resolve(config, 16)
    setting = Setting(config, degrees, say=lambda text: None)
    assert setting.ring_size == 8 // ulysses and setting.local_length == setting.padded // 8
    choices = setting.choose(documents)
    assert choices.keys() == {"full", "window"} and choices["full"].layout is choices["window"].layout
    for rank in (0, 5):
        _, plans = Take(config, mesh(rank, degrees), say=lambda text: None)(documents)
        for kind, table in setting.plans(documents, rank // ulysses).items():
            assert np.array_equal(plans[kind].numpy(), table)
            assert table[0, NUM_RANKS] == setting.ring_size
            assert table[0, LOCAL_LENGTH] == setting.local_length * ulysses


def test_what_was_chosen_once_is_known():
    """The longest document, which is tried before the first step, is also what a planner asks for."""
    setting = Setting(compose(["parallel.sequence=4"]), resolve(compose(["parallel.sequence=4"]), 4), say=print)
    found = setting.choose([(setting.length,)])
    assert setting.choose([(setting.length,)])["full"] is found["full"]
    assert setting._pick_first.cache_info().misses == 1


def test_no_torch_is_imported():
    code = "import sys, parallel.setting, parallel.pool, model.kernels.scratch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
