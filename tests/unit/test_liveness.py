"""The sentence that names who holds a run up, and the line on the slowest ranks."""

import dataclasses

import pytest

from training.liveness import Beat, behind, slowest


def beat(rank: int, **changes: object) -> Beat:
    """A rank at step 12, in its second micro-batch, eight ranks a node; the sign is 2 s old."""
    usual = Beat(rank, f"n{rank // 8}", 12, 1, "step", since_seconds=40.0, age_seconds=2.0)
    return dataclasses.replace(usual, **changes)


def run(changed: dict[int, dict[str, object]], size: int = 16) -> list[Beat]:
    return [beat(rank, **changed.get(rank, {})) for rank in range(size)]


LATE = {"age_seconds": 42.0, "step": 11}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, "all 16 ranks are at step 12, in step: a collective between them does not end"),
        ({13: LATE}, "rank 13 on n1 has not been heard for 42 s, last in step 11"),
        ({0: LATE}, "rank 0 on n0 has not been heard for 42 s, last in step 11"),
        (
            {rank: LATE for rank in range(8, 16)},
            "ranks 8-15 on n1 have not been heard for 42 s, last in step 11",
        ),
        (
            {3: LATE | {"phase": "save", "step": 12}, 9: {"step": 4}},  # who is silent comes before who is slow
            "rank 3 on n0 has not been heard for 42 s, last in saving at step 12",
        ),
        (
            {13: {"step": 10, "phase": "data", "since_seconds": 603.0}},
            "rank 13 on n1 is two steps behind, in data for 605 s",
        ),
        ({13: {"step": 11, "phase": "save"}}, "rank 13 on n1 is one step behind, in saving for 42 s"),
        (
            {1: {"step": 10}, 2: {"step": 10}, 5: {"step": 10}, 9: {"step": 10}},
            "ranks 1, 2, 5 on n0 are two steps behind, in step for 42 s; "
            "rank 9 on n1 is two steps behind, in step for 42 s",
        ),
        ({4: {"step": 11}, 5: {"step": 10}}, "rank 5 on n0 is two steps behind, in step for 42 s"),
        (
            {4: {"phase": "data", "micro_batch": 0}},
            "rank 4 on n0 is behind at step 12, in data for 42 s where others are in step",
        ),
        (
            {4: {"micro_batch": 0}},
            "rank 4 on n0 is behind at step 12, in step for 42 s, at micro-batch 0 of 1",
        ),
        (
            {rank: {"phase": "validate", "micro_batch": 0} for rank in range(15)},
            "rank 15 on n1 is behind at step 12, in step for 42 s where others are in validation",
        ),
        (
            {rank: {"phase": "save", "micro_batch": 0} for rank in range(1, 16)} | {0: {"phase": "validate"}},
            "rank 0 on n0 is behind at step 12, in validation for 42 s where others are in saving",
        ),
        ({0: {"phase": "end", "age_seconds": 500.0}, 1: {"phase": "end"}}, None),
    ],
)
def test_who_is_behind(changed: dict[int, dict[str, object]], sentence: str | None) -> None:
    found = behind(run(changed))
    if sentence is None:  # ranks that have ended are not silent: the others are behind
        assert "not been heard" not in found and "ranks 2-7 on n0 are behind" in found
    else:
        assert found == sentence


def test_ranks_without_any_sign() -> None:
    assert behind(run({}, 2), missing=[5, 2, 3, 4]) == "ranks 2-5 have given no sign of life"
    assert behind([]) == "no rank has given a sign of life"


def test_the_slowest_of_each_phase() -> None:
    """Not where the ranks are alike, and not where it is a trifle."""
    phases, hosts = ["data", "step", "save", "validate"], ["n0", "n0", "n1", "n1"]
    seconds = [[1.0, 100.0, 0.001, 0.0], [1.0, 101.0, 0.001, 0.0], [1.2, 104.0, 0.009, 4.0], [9.0, 102.0, 0.0, 0.0]]
    assert slowest(phases, seconds, hosts) == ("data: rank 3 on n1 9 s, 8.2 × the median; validation: rank 2 on n1 4 s")
    assert slowest(phases, seconds[:1] * 3, hosts) == ""
    assert slowest(phases, [[0.0] * 4] * 2, hosts) == ""
    assert slowest(phases, [], []) == ""
