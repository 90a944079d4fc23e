"""A rank that dies in the middle of a hop, or has another plan, ends all ranks, with an error that names it."""

import multiprocessing
import os
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from model.kernels import sdpa
from model.mask import Mask
from parallel import ring
from parallel.layout import LAYOUTS
from parallel.route import Route
from parallel.schedule import plan
from tests.cases import random_inputs
from tests.harness import PRELOAD, run_ranks

TIMEOUT_SECONDS, KILLED, FAILED = 30, 7, 1
LOCAL = 16

ROUTES = {
    "relay": Route(),
    "direct": Route("direct"),
    "direct, deep": Route("direct", depth=3),
    "direct via": Route("direct", node_ranks=2),
    "gather": Route("gather", head_groups=2),
}


def attention(documents, route, kernel="sdpa", window=None):
    """Forward and backward of this rank's part, through the op."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    table = plan("zigzag", Mask(window), documents, LOCAL * ranks, LOCAL * ranks, ranks, rank, route)
    q, k, v, dout = random_inputs(LOCAL, batch=len(documents))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, _ = ring.attend(q, k, v, torch.from_numpy(table), dist.group.WORLD.group_name, kernel)
    return torch.autograd.grad(out, (q, k, v), dout)


def dies(passes):
    """A kernel that ends the process at its second call of a pass: exchanges are under way then."""
    calls = []

    def dying(*args, **into):
        calls.append(1)
        if len(calls) == 2:
            os._exit(KILLED)
        return getattr(sdpa, passes)(*args, **into)

    return SimpleNamespace(**{"forward": sdpa.forward, "backward": sdpa.backward, passes: dying})


def killed_at(victim, passes, route):
    ring.KERNELS["dying"] = dies(passes) if dist.get_rank() == victim else sdpa
    attention([(LOCAL * dist.get_world_size(),)] * 2, route, "dying")


def with_nothing_to_send(odd, route):
    """One rank believes that all documents are its own: it sends nothing, and is gone."""
    ranks, length = dist.get_world_size(), LOCAL * dist.get_world_size()
    attention([(LOCAL // 2,) * (2 * ranks)] if dist.get_rank() == odd else [(length,)], route)


def on_rank(folder, fn, args, rank, world_size, timeout):
    """What fails, and when, is written down before the process ends: nobody is left to ask then."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=limit)
    dist.barrier()
    try:
        fn(*args)
    except RuntimeError as error:
        (folder / f"{rank}.part").write_text(f"{time.monotonic()} {error}")
        (folder / f"{rank}.part").rename(folder / f"{rank}.txt")
        os._exit(FAILED)
    os._exit(0)


def fates(folder, fn, world_size, *args, timeout=TIMEOUT_SECONDS):
    """(exit code of each rank, [(time, rank, error)] in the order of time); all have ended within the timeout."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes = []
    for rank in range(world_size):
        given = (folder, fn, args, rank, world_size, timeout)
        processes.append(context.Process(target=on_rank, args=given, daemon=True))
        processes[-1].start()
    deadline = time.monotonic() + 2 * TIMEOUT_SECONDS
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    errors = []
    for rank in range(world_size):
        if (folder / f"{rank}.txt").exists():
            when, _, error = (folder / f"{rank}.txt").read_text().partition(" ")
            errors.append((float(when), rank, error))
    return codes, sorted(errors)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("world_size", "victim", "passes"), [(2, 1, "forward"), (4, 2, "forward"), (4, 1, "backward")])
def test_a_killed_rank_ends_all(world_size, victim, passes, route, tmp_path):
    """The first to notice names it; the others name it, or one that left because of it (C062)."""
    codes, errors = fates(tmp_path, killed_at, world_size, victim, passes, ROUTES[route])
    assert codes == [KILLED if rank == victim else FAILED for rank in range(world_size)]
    assert [rank for _, rank, _ in errors] and all("of the ring failed" in error for _, _, error in errors)
    (_, _, first), *_ = errors
    assert names(first, victim)
    gone = {victim}
    for _, rank, error in errors:
        assert any(names(error, other) for other in gone), (error, gone)
        gone.add(rank)


def names(error, rank):
    peers, found, _ = error.partition(" of the ring failed")
    return bool(found) and str(rank) in peers.removeprefix("exchange with rank ").split(", ")


@pytest.mark.parametrize("route", ["relay", "direct", "gather"])
def test_a_rank_that_sends_nothing_ends_all(route, tmp_path):
    """Without `require_same_plan`: it has another plan, and left."""
    codes, errors = fates(tmp_path, with_nothing_to_send, 3, 0, ROUTES[route], timeout=10)
    if route == "gather":  # everybody sends everything: all ends well, but for the numbers
        assert codes == [0, 0, 0]
        return
    assert codes == [0, FAILED, FAILED] and names(errors[0][2], 0)


def table_of(**changed):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    given = dict(layout="zigzag", mask=Mask(), documents=[(24,)], sequence_length=24, padded_length=24) | changed
    return torch.from_numpy(plan(**given, ranks=ranks, rank=rank))


def plans_that_differ(others):
    name, rank = dist.group.WORLD.group_name, dist.get_rank()
    ring.require_same_plan(table_of(), name)
    ring.require_same_plan([table_of(), table_of(mask=Mask(5))], name)
    ring.require_same_plan([], name)
    ring.require_same_plan(table_of(), "")  # a ring of this rank alone
    for changed in (
        dict(documents=[(11, 13)]),
        dict(documents=[(23,)]),
        dict(mask=Mask(5)),
        dict(layout=next(layout for layout in LAYOUTS if layout != "zigzag")),
        dict(sequence_length=25, padded_length=48),
        dict(route=Route("direct")),
        dict(route=Route("gather")),
    ):
        mine = table_of(**(changed if rank in others else {}))
        who = ", ".join(str(other) for other in range(1, dist.get_world_size()) if (other in others) != (0 in others))
        for plans in (mine, [table_of(), mine]):
            with pytest.raises(ValueError, match=f"the plan of rank {who} differs from that of rank 0"):
                ring.require_same_plan(plans, name)


@pytest.mark.parametrize(("world_size", "others"), [(2, [1]), (3, [1]), (4, [1, 3]), (3, [0])])
def test_ranks_with_other_plans_are_named_everywhere(world_size, others):
    """Before anything is sent, as a ValueError on every rank."""
    run_ranks(plans_that_differ, world_size, others)


def odd_tensors(change):
    """Rank 1's tensors, or its kernel, are not those of the others: nobody computes anything."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    table = torch.from_numpy(plan("zigzag", Mask(), [(LOCAL * ranks,)] * 2, LOCAL * ranks, LOCAL * ranks, ranks, rank))
    q, k, v, _ = random_inputs(LOCAL)
    kernel = "sdpa"
    if rank == 1 and change == "dtype":
        q, k, v = q.float(), k.float(), v.float()
    elif rank == 1 and change == "heads":
        k, v = k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)
    elif rank == 1 and change == "kernel":
        kernel = "reference"
    elif rank == 1:  # something that it refuses by itself
        q = q.transpose(1, 2).contiguous().transpose(1, 2) if change == "strides" else q[:, :-2].contiguous()
    words = "contiguous" if change == "strides" else "do not fit" if change == "length" else "was given"
    with pytest.raises(ValueError, match=words if rank == 1 else "rank 1 something else"):
        ring.attend(q, k, v, table, dist.group.WORLD.group_name, kernel)


@pytest.mark.parametrize("change", ["dtype", "heads", "kernel", "strides", "length"])
def test_other_tensors_on_one_rank_are_refused_on_all(change):
    run_ranks(odd_tensors, 3, change)
