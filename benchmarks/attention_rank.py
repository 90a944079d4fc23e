"""One rank of our ring for benchmarks/attention.py: one thread, on a core of its own. Settings are layouts."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers.worker import Request, Task, serve  # noqa: E402
from model.mask import Mask  # noqa: E402
from parallel import layout as layouts  # noqa: E402
from parallel import ring, schedule  # noqa: E402
from parallel.collectives import exchange_clock  # noqa: E402

LAYOUTS = ("contiguous", "zigzag", "striped")


def start(task: Task):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=task.rendezvous, rank=task.rank, world_size=task.ranks)
    shape = (4, 1, task.length, task.heads, task.head_dim)
    size = torch.Size(shape).numel()
    problem = torch.from_file(str(task.problem), size=size).view(shape)
    answer = torch.from_file(str(task.answer), shared=True, size=size).view(shape)
    group_name = dist.group.WORLD.group_name
    own = {}
    for layout in LAYOUTS:
        index = torch.from_numpy(layouts.global_index(layouts.chunks(layout, task.length, task.ranks, task.rank)))
        place = (task.length, task.length, task.ranks, task.rank)
        plan = torch.from_numpy(schedule.plan(layout, Mask(), [(task.length,)], *place))
        own[layout] = index, plan, [x[:, index] for x in problem]

    def measure(request: Request) -> dict[str, float]:
        index, plan, (q, k, v, dout) = own[request.setting]
        q, k, v = (x.detach().requires_grad_(request.backward) for x in (q, k, v))
        dist.barrier()
        exchange_clock.read_and_reset()
        begun = time.perf_counter()
        out, _ = ring.attend(q, k, v, plan, group_name, "sdpa")
        if request.backward:
            out.backward(dout)
        measured = {"seconds": time.perf_counter() - begun, "waited": exchange_clock.read_and_reset()}
        if request.keep:
            for room, x in zip(answer, (out.detach(), q.grad, k.grad, v.grad), strict=True):
                room[:, index] = x
        return measured

    return measure


if __name__ == "__main__":
    serve(start)
