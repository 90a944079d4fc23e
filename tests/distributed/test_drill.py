"""A short drill: a run that is struck a dozen times, and the same run left alone. `make drill` is the long one."""

import random
from collections import Counter

from benchmarks.drill import judge
from benchmarks.drill_kills import MOMENTS, SIGNALS, TARGETS, drill, strikes

KILLS = 12


def test_a_run_that_is_struck_ends_as_one_left_alone(tmp_path):
    """C076, C105: by KILL, TERM and USR1, at every moment; bit for bit, with nothing damaged, hung or left over."""
    said = []
    found = drill(tmp_path, KILLS, seed=2, say=said.append)
    assert not found.faults, "\n".join(said + found.faults)
    assert all(criterion.holds for criterion in judge(found, KILLS)), "\n".join(said)


def test_blows_are_spread_over_signals_targets_and_moments():
    chosen = Counter(strikes(120, random.Random(0)))
    assert len(chosen) == 60 and set(chosen.values()) == {2}
    few = strikes(KILLS, random.Random(0))
    assert {strike.number for strike in few} == set(SIGNALS)
    assert {strike.target for strike in few} == set(TARGETS)
    assert {strike.moment for strike in few} == set(MOMENTS)
