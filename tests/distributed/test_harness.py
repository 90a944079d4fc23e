"""What the other distributed tests rely on: values by rank, the first failure, the end of the rest."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks


def add_up(base):
    total = torch.tensor(base + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), torch.get_num_threads()


def fail_on_one(failing, how):
    if dist.get_rank() == failing:
        if how == "exit":
            os._exit(7)
        raise ValueError("no such thing")
    dist.barrier()  # never reached by the failing rank: the others would wait here


def sleep_forever():
    time.sleep(1000)


def test_values_come_back_by_rank():
    assert run_ranks(add_up, 3, 10) == [(rank, 33, 1) for rank in range(3)]


def test_the_first_failure_is_raised_with_its_rank_and_traceback():
    begun = time.monotonic()
    with pytest.raises(ValueError, match="no such thing") as caught:
        run_ranks(fail_on_one, 3, 1, "raise")
    assert time.monotonic() - begun < 30
    (note,) = caught.value.__notes__
    assert note.startswith("on rank 1 of 3:") and "fail_on_one" in note


def test_a_rank_that_dies_silently_is_an_error():
    with pytest.raises(RuntimeError):
        run_ranks(fail_on_one, 2, 1, "exit")


def test_ranks_that_do_not_end_are_ended():
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"sleep_forever: ranks \[0, 1\] of 2"):
        run_ranks(sleep_forever, 2, timeout=3)
    assert time.monotonic() - begun < 20
