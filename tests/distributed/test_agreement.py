"""Errors and inputs that ranks must share: nobody is left waiting for a rank that gave up."""

import pytest
import torch.distributed as dist

from tests.harness import run_ranks
from training.agreement import agree, on_all_ranks, require_equal, together


class Unpicklable(OSError):
    def __init__(self, path, reason):
        super().__init__(f"{path}: {reason}")
        self.handle = lambda: None


def fails_on_rank_1():
    def work():
        if dist.get_rank() == 1:
            raise Unpicklable("shard", "ends early")
        return dist.get_rank()

    try:
        together(work)
    except Exception as error:
        return type(error).__name__, str(error), error.agreed


def test_one_ranks_error_is_raised_by_all():
    """C109's kind: an error that cannot be sent keeps its words and what it means."""
    assert run_ranks(fails_on_rank_1, 3) == [("OSError", "shard: ends early", True)] * 3


def results():
    rank = dist.get_rank()
    return together(lambda: 10 * rank), agree(lambda: rank + 5), on_all_ranks(lambda: rank)


def test_results():
    assert run_ranks(results, 2) == [(0, 5, [0, 1]), (10, 5, [0, 1])]


def different_data():
    fact = "b" if dist.get_rank() == 2 else "a"
    try:
        require_equal({"train.seed": "0", "training data": fact})
    except ValueError as error:
        return str(error)


def test_a_rank_with_other_data_is_named():
    """C058: ranks that read different documents are refused, by all."""
    for message in run_ranks(different_data, 3):
        assert "training data=b on rank 2 but a on rank 0" in message


@pytest.mark.parametrize("ranks", [1, 2])
def test_equal_facts_pass(ranks):
    assert run_ranks(equal, ranks) == [None] * ranks


def equal():
    return require_equal({"train.seed": "0"})
