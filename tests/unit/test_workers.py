"""Work in other processes."""

import multiprocessing
import os
import signal
import time
from contextlib import closing

import pytest

from data.workers import FEW_JOBS, apart, in_order, num_cpus


def slow_square(job):
    time.sleep(0.02 * (job % 3))
    return job * job, os.getpid()


def fail_at_five(job):
    if job == 5:
        raise ValueError("five")
    return job


def die_at_five(job):
    if job == 5:
        os._exit(7)
    return job


def test_results_come_in_order_and_few_are_under_way():
    asked = []

    def jobs():
        for n in range(20):
            asked.append(n)
            yield f"about {n}", n

    processes = set()
    for n, (info, (square, process)) in enumerate(in_order(slow_square, jobs(), 2)):
        assert (info, square) == (f"about {n}", n * n) and len(asked) <= n + 4
        processes.add(process)
    assert n == 19 and os.getpid() not in processes and len(processes) == 2


def test_how_few_jobs_are_done_here_may_be_said():
    found = list(in_order(slow_square, ((None, n) for n in range(2)), 2, 2))
    assert [square for _, (square, _) in found] == [0, 1] and os.getpid() not in {process for _, (_, process) in found}


@pytest.mark.parametrize(("workers", "number"), [(1, 20), (2, FEW_JOBS - 1), (2, 0)])
def test_one_process_or_few_jobs_are_done_here(workers, number):
    found = list(in_order(slow_square, ((None, n) for n in range(number)), workers))
    assert found == [(None, (n * n, os.getpid())) for n in range(number)]


def test_an_error_is_raised_here_with_its_reason():
    found = []
    with pytest.raises(ValueError, match="five"):
        for _, result in in_order(fail_at_five, ((None, n) for n in range(10)), 2):
            found.append(result)
    assert found == [0, 1, 2, 3, 4]


def test_a_process_that_dies_ends_the_work():
    with pytest.raises(OSError, match="one of 2 processes died, perhaps for want of memory"):
        list(in_order(die_at_five, ((None, n) for n in range(10)), 2))


def test_giving_up_ends_the_processes_at_once():
    began = time.monotonic()
    with closing(in_order(time.sleep, ((None, 0.1 if n == 0 else 60) for n in range(10)), 2)) as results:
        next(results)
    assert time.monotonic() - began < 20


def test_work_apart_is_done_in_another_process():
    assert apart(slow_square, 4)[0] == 16 and apart(slow_square, 4)[1] != os.getpid()
    with pytest.raises(ValueError, match="five"):
        apart(fail_at_five, 5)


def test_cpus_are_those_this_process_may_use():
    assert 1 <= num_cpus() <= os.cpu_count()


def large(job):
    return bytes(30 << 20)  # takes longer to send than to make


def test_a_process_killed_while_it_sends_is_noticed():
    """Python's pool waits for the rest of what it was sending, for ever."""
    with pytest.raises(OSError, match="one of 2 processes died"):
        for _ in in_order(large, ((None, n) for n in range(500)), 2):
            victim = multiprocessing.active_children()[0]
            os.kill(victim.pid, signal.SIGKILL)


def test_who_asks_for_results_gives_up_meanwhile():
    with pytest.raises(KeyError):
        with closing(in_order(large, ((None, n) for n in range(500)), 2)) as results:
            for _ in results:
                raise KeyError
