"""Ring attention: the one loop, forward and backward, and the opaque op that a model calls.

Key/value blocks travel round a ring of ranks while each rank computes with the block it has; what each rank
computes at each hop is data (`parallel.schedule`), and so is how it reaches its neighbours
(`parallel.collectives.Exchange`). Nothing here knows a layout or a mask.

Source: arXiv:2310.01889 (ring attention), arXiv:2405.18710 §3 (memory of the travelling gradients).
"""

from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from model.kernels import reference, sdpa
from model.kernels.tiles import accumulation_dtype, empty_gradients, empty_state
from parallel.collectives import Exchange, RelayExchange
from parallel.schedule import LOCAL_LENGTH, NUM_HOPS, NUM_RANKS, NUM_SEQUENCES, RANK, hop_starts

KERNELS: dict[str, ModuleType] = {"reference": reference, "sdpa": sdpa}


class Alone:
    """The exchange of a ring of one rank: there is nobody to reach."""

    rank = 0
    size = 1

    def start(self, sends, receives, distance=1):
        raise AssertionError("a ring of one rank has nothing to exchange")


def forward(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, exchange: Exchange, kernel: ModuleType
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over all ranks' keys. Collective over the ring.

    q [B, L, H, D], k, v [B, L, G, D], plan int64[1 + n, 8] on the host. Returns out [B, L, H, D] and
    lse [B, H, L] in the accumulation dtype, float32 or float64. Keys and values travel as one message, in their own
    dtype and number of heads; the next block is on its way while this one is computed, in two buffers.
    """
    hops = _hops(plan)
    out, lse = empty_state(q)
    here = torch.stack((k, v)) if len(hops) > 1 else (k, v)
    spare = torch.empty_like(here) if len(hops) > 1 else None
    for hop, tiles in enumerate(hops):
        pending = exchange.start([here], [spare]) if hop + 1 < len(hops) else None
        kernel.forward(q, here[0], here[1], tiles, into=(out, lse))
        if pending is not None:
            pending.wait()
            here, spare = spare, here
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Tensor,
    exchange: Exchange,
    kernel: ModuleType,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward` given its final out and lse. Collective over the ring.

    Shapes as in `forward`. Returns (dq, dk, dv) in the accumulation dtype. Keys and values go round once more.
    A block's gradient follows it one slot behind, in the accumulation dtype: in slot h a rank sends on what
    it finished at hop h - 1, receives what earlier ranks found for the block of hop h, and computes its own
    part meanwhile. The last rank that a block visits sends the sum straight home, where the owner's own part
    has stayed: it never travels.
    """
    hops = _hops(plan)
    dq, dk, dv = empty_gradients(q, k)
    here = torch.stack((k, v)) if len(hops) > 1 else (k, v)
    spare = torch.empty_like(here) if len(hops) > 1 else None
    pending = exchange.start([here], [spare]) if len(hops) > 1 else None
    kernel.backward(dout, q, k, v, out, lse, hops[0], into=(dq, dk, dv))
    if pending is None:
        return dq, dk, dv
    pending.wait()
    partial, arriving, leaving = (torch.empty(here.shape, dtype=dq.dtype, device=dq.device) for _ in range(3))
    for hop, tiles in enumerate(hops[1:], start=1):
        here, spare = spare, here
        sends, receives = ([here], [spare]) if hop + 1 < len(hops) else ([], [])
        if hop > 1:
            sends, receives = [*sends, leaving], [*receives, arriving]
        pending = exchange.start(sends, receives) if sends else None
        partial.zero_()
        kernel.backward(dout, q, here[0], here[1], out, lse, tiles, into=(dq, partial[0], partial[1]))
        if pending is not None:
            pending.wait()
        if hop > 1:
            partial.add_(arriving)
        partial, leaving = leaving, partial
    exchange.start([leaving], [arriving], distance=1 - len(hops)).wait()
    return dq, dk.add_(arriving[0]), dv.add_(arriving[1])


def _hops(plan: Tensor) -> list[Tensor]:
    """The tiles of each hop."""
    starts = hop_starts(plan.numpy()).tolist()
    return [plan[start:stop] for start, stop in pairwise(starts)]


@torch.library.custom_op("longhaul::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, plan: Tensor, group_name: str, kernel: str) -> tuple[Tensor, Tensor]:
    """Attention over a sequence that the ranks of a group share.

    Returns (out [B, L, H, D] in q's dtype, lse [B, H, L] in the accumulation dtype). q [B, L, H, D], k, v [B, L, G,
    D] with G dividing H; `plan` is this rank's plan, int64[1 + n, 8] on the host, from `parallel.schedule.plan`;
    `group_name` names the process group of the ring, "" a ring of this rank alone; `kernel` is a name that
    `model.kernels.capability.choose` returned. Differentiable in q, k, v; lse is a by-product, not differentiable.

    Collective over the group, in forward and in backward. One opaque node for torch.compile and for selective
    recompute, which can save (out, lse) and never send a byte twice.

    Raises ValueError for shapes, dtypes or a plan that do not fit together, before anything is sent.
    """
    exchange = _exchange(group_name)
    _check(q, k, v, plan, exchange, kernel)
    out, lse = forward(q, k, v, plan, exchange, KERNELS[kernel])
    return out.to(q.dtype), lse


@torch.library.custom_op("longhaul::attend_backward", mutates_args=())
def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Tensor,
    out: Tensor,
    lse: Tensor,
    group_name: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend`, in the dtypes of q, k and v. Collective over the group."""
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    gradients = backward(dout, q, k, v, out, lse, plan, _exchange(group_name), KERNELS[kernel])
    return tuple(gradient.to(q.dtype, memory_format=torch.contiguous_format) for gradient in gradients)


@attend.register_fake
def _attend_fake(q, k, v, plan, group_name, kernel):
    batch, length, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, length), dtype=accumulation_dtype(q.dtype))


@attend_backward.register_fake
def _attend_backward_fake(dout, q, k, v, plan, out, lse, group_name, kernel):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx, inputs, output):
    q, k, v, plan, ctx.group_name, ctx.kernel = inputs
    out, lse = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, plan, out, lse)


def _attend_gradients(ctx, dout, _):
    if dout is None:
        return (None,) * 6
    q, k, v, plan, out, lse = ctx.saved_tensors
    gradients = attend_backward(dout, q, k, v, plan, out, lse, ctx.group_name, ctx.kernel)
    return (*gradients, None, None, None)


attend.register_autograd(_attend_gradients, setup_context=_save_for_backward)


def _exchange(group_name: str) -> Exchange:
    return RelayExchange(_resolve_process_group(group_name)) if group_name else Alone()


def _check(q: Tensor, k: Tensor, v: Tensor, plan: Tensor, exchange: Exchange, kernel: str) -> None:
    """Everything that can be wrong before a byte is sent."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape
    if not fits or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes} do not fit together: use q [B, L, H, D] and k, v [B, L, G, D]")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"{k.shape[2]} key/value heads do not divide {q.shape[2]} query heads ({shapes})")
    kinds = [f"{x.dtype} on {x.device}" for x in (q, k, v)]
    if len(set(kinds)) > 1:
        raise ValueError(f"q, k, v differ: {', '.join(kinds)}: use one dtype and device")
    strides = [x.stride() for x in (q, k, v)]
    if any(stride[3] != 1 for stride in strides):
        raise ValueError(f"q, k, v have strides {strides}: the last must be 1, use contiguous()")
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel} is unknown: use {' or '.join(KERNELS)}")
    _check_plan(plan, q, exchange)


def _check_plan(plan: Tensor, q: Tensor, exchange: Exchange) -> None:
    """A plan of another rank, ring or shape would compute nonsense, or leave the others waiting."""
    if plan.dtype != torch.int64 or plan.is_cuda or plan.dim() != 2 or plan.shape[1] != 8 or len(plan) < 1:
        given = f"{plan.dtype}{list(plan.shape)} on {plan.device}"
        raise ValueError(f"plan is {given}: use int64[1 + tiles, 8] on the host")
    made_for = [plan[0, column].item() for column in (RANK, NUM_RANKS, NUM_SEQUENCES, LOCAL_LENGTH)]
    here = [exchange.rank, exchange.size, *q.shape[:2]]
    if made_for != here:
        words = "rank {} of {} with {} sequences of {} tokens"
        raise ValueError(
            f"the plan is for {words.format(*made_for)}, but this is {words.format(*here)}: "
            "make it with parallel.schedule.plan"
        )
    assert 1 <= plan[0, NUM_HOPS] <= exchange.size
