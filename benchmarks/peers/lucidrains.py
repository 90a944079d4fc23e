"""`ring-attention-pytorch` for benchmarks/attention.py: two processes of one thread over gloo.

Runs in the peer's own environment. `ring_flash_attn` computes masked blocks like others, in both layouts, so that
striped is not faster by much; buckets of 256 are its fastest on a core of 128 to 4096, and its module's default is
contiguous with 512. `gathered` is `zig_zag_attn`, which is no ring: each rank gathers all keys and values, and calls
PyTorch's attention with a mask of [L, S]. The mask is made beforehand, in float32, and does not count.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ring_attention_pytorch import ring_flash_attn
from ring_attention_pytorch.zig_zag_attention import zig_zag_attn

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.worker import Request, Task, serve  # noqa: E402

STRIPED, CONTIGUOUS, GATHERED = "striped, buckets of 256", "contiguous, buckets of 512", "gathered"
BUCKETS = {STRIPED: 256, CONTIGUOUS: 512}


def start(task: Task):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=task.rendezvous, rank=task.rank, world_size=task.ranks)
    shape = (4, 1, task.length, task.heads, task.head_dim)
    size = 4 * task.length * task.heads * task.head_dim
    problem = torch.from_file(str(task.problem), size=size).view(shape)
    answer = torch.from_file(str(task.answer), shared=True, size=size).view(shape)
    indices, mask = _indices_and_mask(task)
    own = {setting: [x[:, index].contiguous() for x in problem] for setting, index in indices.items()}
    own[GATHERED] = [x.transpose(1, 2).contiguous() for x in own[GATHERED]]

    def attend(setting: str, q, k, v):
        if setting == GATHERED:
            return zig_zag_attn(q, k, v, attn_mask=mask)
        options = {"bucket_size": BUCKETS[setting], "striped_ring_attn": setting == STRIPED}
        return ring_flash_attn(q, k, v, causal=True, ring_reduce_col=True, ring_size=task.ranks, **options)

    def measure(request: Request) -> dict[str, float]:
        q, k, v, dout = own[request.setting]
        q, k, v = (x.detach().requires_grad_(request.backward) for x in (q, k, v))
        dist.barrier()
        begun = time.perf_counter()
        out = attend(request.setting, q, k, v)
        if request.backward:
            out.backward(dout)
        seconds = time.perf_counter() - begun
        if request.keep:
            for room, x in zip(answer, (out.detach(), q.grad, k.grad, v.grad), strict=True):
                room[:, indices[request.setting]] = x.transpose(1, 2) if request.setting == GATHERED else x
        return {"seconds": seconds}

    return measure


def _indices_and_mask(task: Task) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Which tokens the package deals to this rank, and the mask of `zig_zag_attn` for the keys in gathered order."""
    everything = torch.arange(task.length)
    striped = everything.view(BUCKETS[STRIPED], -1).T.reshape(-1)
    pieces = everything.chunk(2 * task.ranks)
    zigzag = torch.cat([torch.cat([pieces[rank], pieces[-1 - rank]]) for rank in range(task.ranks)])
    dealt = {STRIPED: striped, CONTIGUOUS: everything, GATHERED: zigzag}
    mine = {setting: order.chunk(task.ranks)[task.rank] for setting, order in dealt.items()}
    hidden = mine[GATHERED][:, None] < zigzag[None, :]
    return mine, torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


if __name__ == "__main__":
    serve(start)
