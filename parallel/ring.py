"""Ring attention: the one loop, forward and backward, and the opaque op that a model calls.

Key/value blocks travel among the ranks of a ring while each rank computes with those it has. What each rank computes at
each hop, and what it sends and receives meanwhile, is data (`parallel.schedule`); how it reaches the others is a value
(`parallel.collectives.Exchange`). Nothing here knows a layout, a mask or a route.

Source: arXiv:2310.01889 (ring attention), arXiv:2405.18710 §3 (memory of the travelling gradients).
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor, library
from torch.distributed.distributed_c10d import _resolve_process_group

from model.kernels import capability, flash, reference, sdpa
from model.kernels.tiles import accumulation_dtype
from parallel.collectives import Exchange, RingExchange, gather_numbers
from parallel.pool import ACCUMULATED, pool_bytes
from parallel.route import Route, peers
from parallel.schedule import AGREEMENT, BUFFER_ROWS, HEAD_GROUPS, LOCAL_LENGTH, NUM_RANKS, NUM_SEQUENCES, RANK
from parallel.traffic import Buffers, Program, begin

KERNELS: dict[str, ModuleType] = {"reference": reference, "sdpa": sdpa, "flash": flash}
BUFFERS: dict[str, Buffers] = defaultdict(Buffers)  # of each group: one pool for all layers
_GIVEN: dict[str, set[str]] = defaultdict(set)  # of each group: shapes and dtypes that all of its ranks were given


class Alone:
    """The exchange of a ring of one rank: there is nobody to reach."""

    rank = 0
    size = 1

    def start(self, sends, receives):
        raise AssertionError("a ring of one rank has nothing to exchange")

    gather = scatter_sum = start


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Tensor,
    exchange: Exchange,
    kernel: ModuleType,
    buffers: Buffers | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over all ranks' keys. Collective over the ring.

    q [B, L, H, D], k, v [B, L, G, D], contiguous; plan int64[n, 8] on the host. Returns out [B, L, H, D] and
    lse [B, H, L] in the accumulation dtype, float32 or float64; or out in `dtype`, then it adds up in the buffers.
    Keys and values travel as one message, in their own dtype and number of heads, while earlier ones are computed.
    """
    program, buffers = Program(plan), buffers or Buffers()
    traffic = begin(program, exchange, buffers, k.flatten(0, 1), v.flatten(0, 1))
    rows = q.flatten(0, 1)
    out = _accumulator(rows, buffers, dtype)
    lse = rows.new_full((rows.shape[1], rows.shape[0]), -torch.inf, dtype=out.dtype)
    for hop, tiles in enumerate(program.hops):
        traffic.before(hop)
        if len(tiles):
            block = traffic.at(hop)
            heads = block.heads(rows.shape[1])
            kernel.forward(rows[:, heads], block.k, block.v, tiles, into=(out[:, heads], lse[heads]))
        traffic.after(hop)
    return out.to(dtype or out.dtype).view(q.shape), _by_sequence(lse, len(q))


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
    buffers: Buffers | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward` given its final out and lse. Collective over the ring.

    Shapes as in `forward`. Returns (dq, dk, dv) in the accumulation dtype, or in `dtype`. Keys and values travel once
    more, and the gradients found for a block follow one exchange behind, to its owner: on the way they add up in the
    accumulation dtype. The owner's own part never travels.
    """
    program, buffers, exact = Program(plan), buffers or Buffers(), accumulation_dtype(q.dtype)
    traffic = begin(program, exchange, buffers, k.flatten(0, 1), v.flatten(0, 1), gradients=exact)
    dout, rows, out = (x.flatten(0, 1) for x in (dout, q, out))
    lse = lse.transpose(0, 1).flatten(1, 2)
    dq = _accumulator(rows, buffers, dtype)
    for hop in range(max(len(program.hops), program.num_batches)):
        traffic.before(hop)
        if hop < len(program.hops) and len(tiles := program.hops[hop]):
            block, (dk, dv) = traffic.at(hop), traffic.gradients_at(hop)
            heads = block.heads(rows.shape[1])
            given = (dout[:, heads], rows[:, heads], block.k, block.v, out[:, heads], lse[heads])
            kernel.backward(*given, tiles, into=(dq[:, heads], dk, dv))
        traffic.after(hop)
    dtype = dtype or exact
    return dq.to(dtype).view(q.shape), *(gradient.view(k.shape) for gradient in traffic.own_gradients(dtype))


def reserve(
    group_name: str,
    plans: Iterable[Tensor | np.ndarray],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    times: int = 1,
) -> int:
    """Makes the pool of a ring as large as forward and backward over these plans need it; returns its bytes.

    Before the first pass over a plan: then a pass allocates what it returns and what its kernel needs, no more. Heads
    and dtype are those of q and k as the ring sees them. Where the pool is large enough already nothing happens.
    `times`: as large again and again, for those who look at what it costs.
    """
    tables = (plan.numpy() if isinstance(plan, Tensor) else plan for plan in plans)
    sizes = pool_bytes(tables, num_heads, num_kv_heads, head_dim, dtype.itemsize)
    pool = BUFFERS[group_name]
    pool.reserve({name: times * size for name, size in sizes.items()}, device)
    return pool.num_bytes


def num_grown(group_name: str) -> int:
    """Storages of a ring's pool that passes had to make or to enlarge, as nobody had reserved them."""
    return BUFFERS[group_name].num_grown


def require_same_plan(
    plans: Tensor | Sequence[Tensor],
    group_name: str,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> None:
    """Refuses ranks whose plans were not made from the same arguments: they would wait for each other's other messages.

    Collective over the group that is named, the ring or more, and to be called whenever a plan is new: one exchange of
    8 bytes a plan. `device`: where the group's tensors live. Raises ValueError on every rank, naming those that differ
    from rank 0.
    """
    if not group_name:
        return
    agreed = [plan[1, AGREEMENT].item() for plan in ([plans] if isinstance(plans, Tensor) else plans)]
    first, *others = gather_numbers(agreed, _resolve_process_group(group_name), device)
    differing = [rank for rank, numbers in enumerate(others, start=1) if numbers != first]
    if differing:
        names = ", ".join(map(str, differing))
        raise ValueError(
            f"the plan of rank {names} differs from that of rank 0: give parallel.schedule.plan the same "
            "layout, mask, documents, lengths and route on every rank"
        )


def warm_up(group_name: str, route: Route, device: torch.device) -> None:
    """Connects the ranks of a ring that `route` lets meet. Collective over the ring, before the first hop of a run."""
    if group_name:
        exchange = _exchange(group_name)
        exchange.warm_up(peers(route, exchange.rank, exchange.size), device)


def _accumulator(rows: Tensor, buffers: Buffers, dtype: torch.dtype | None) -> Tensor:
    """Zeros [N, H, D] in the accumulation dtype: a new tensor, or from the pool where results are returned in another
    dtype."""
    exact = accumulation_dtype(rows.dtype)
    if dtype in (None, exact):
        return rows.new_zeros(rows.shape, dtype=exact)
    return buffers.take(ACCUMULATED, rows.shape, exact, rows.device).zero_()


def _by_sequence(lse: Tensor, batch: int) -> Tensor:
    """[H, B · L] -> [B, H, L]"""
    return lse.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()


@library.custom_op("longhaul::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, plan: Tensor, group_name: str, kernel: str) -> tuple[Tensor, Tensor]:
    """Attention over a sequence that the ranks of a group share.

    Returns (out [B, L, H, D] in q's dtype, lse [B, H, L] in the accumulation dtype). q [B, L, H, D], k, v [B, L, G,
    D] with G dividing H; `plan` is this rank's plan, int64[n, 8] on the host, from `parallel.schedule.plan`;
    `group_name` names the process group of the ring, "" a ring of this rank alone; `kernel` is a name that
    `model.kernels.capability.choose` returned. Differentiable in q, k, v; lse is a by-product, not differentiable.

    Collective over the group, in forward and in backward. One opaque node for torch.compile and for selective
    recompute, which can save (out, lse) and never send a byte twice.

    Raises ValueError for shapes, dtypes or a plan that do not fit together, before anything is sent. At the first call
    all ranks raise where one does; and where shapes or dtypes are new to all of them, if they differ.
    """
    exchange = _exchange(group_name)
    _check_everywhere(q, k, v, plan, exchange, kernel, group_name)
    return forward(q, k, v, plan, exchange, KERNELS[kernel], BUFFERS[group_name], q.dtype)


@library.custom_op("longhaul::attend_backward", mutates_args=())
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
    given = (dout.contiguous(), q, k, v, out, lse, plan)
    return backward(*given, _exchange(group_name), KERNELS[kernel], BUFFERS[group_name], q.dtype)


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
    return RingExchange(_resolve_process_group(group_name)) if group_name else Alone()


def _check_everywhere(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, exchange: Exchange, kernel: str, group_name: str
) -> None:
    """`_check`, and where these shapes and dtypes are new, whether all ranks were given the same."""
    refusal = None
    try:
        _check(q, k, v, plan, exchange, kernel)
    except ValueError as error:
        refusal = error
    facts = f"{kernel}: " + ", ".join(f"{x.dtype}{list(x.shape)}" for x in (q, k, v))
    alone = refusal and _GIVEN[group_name]  # the others are not at their first call, and would not answer
    if group_name and facts not in _GIVEN[group_name] and not alone:
        number = 0 if refusal else int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=7).digest(), "little")
        numbers = [one for (one,) in gather_numbers([number], _resolve_process_group(group_name), q.device)]
        others = [rank for rank, one in enumerate(numbers) if one != numbers[exchange.rank]]
        if others and refusal is None:
            names = ", ".join(map(str, others))
            raise ValueError(
                f"rank {exchange.rank} of the ring was given {facts}; rank {names} something else, or what it refuses: "
                "give all ranks q, k, v of the same shapes and dtypes, and the same kernel"
            )
        if refusal is None:
            _GIVEN[group_name].add(facts)
    if refusal is not None:
        raise refusal


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError unless q [B, L, H, D] and k, v [B, L, G, D] fit together, in one dtype on one device."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape
    if not fits or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes} do not fit together: use q [B, L, H, D] and k, v [B, L, G, D]")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"{k.shape[2]} key/value heads do not divide {q.shape[2]} query heads ({shapes})")
    kinds = [f"{x.dtype} on {x.device}" for x in (q, k, v)]
    if len(set(kinds)) > 1:
        raise ValueError(f"q, k, v differ: {', '.join(kinds)}: use one dtype and device")


def _check(q: Tensor, k: Tensor, v: Tensor, plan: Tensor, exchange: Exchange, kernel: str) -> None:
    """Everything that can be wrong before a byte is sent."""
    check_shapes(q, k, v)
    if not all(x.is_contiguous() for x in (q, k, v)):
        strides = ", ".join(str(x.stride()) for x in (q, k, v))
        raise ValueError(f"q, k, v have strides {strides}: they must be contiguous, use contiguous()")
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel} is unknown: use {' or '.join(KERNELS)}")
    _check_plan(plan, q, exchange)
    rows, groups = q.shape[0] * q.shape[1], plan[1, HEAD_GROUPS].item()
    arena_rows = rows * exchange.size // groups if groups else rows + plan[0, BUFFER_ROWS].item()
    for elements in (q.numel(), 2 * arena_rows * k.shape[2] * k.shape[3]):  # what a kernel counts its way through
        capability.refuse_large(elements, kernel, q.device.type)


def _check_plan(plan: Tensor, q: Tensor, exchange: Exchange) -> None:
    """A plan of another rank, ring or shape would compute nonsense, or leave the others waiting."""
    if plan.dtype != torch.int64 or plan.is_cuda or plan.dim() != 2 or plan.shape[1] != 8 or len(plan) < 2:
        given = f"{plan.dtype}{list(plan.shape)} on {plan.device}"
        raise ValueError(f"plan is {given}: use the table of parallel.schedule.plan, int64[n, 8] on the host")
    made_for = [plan[0, column].item() for column in (RANK, NUM_RANKS, NUM_SEQUENCES, LOCAL_LENGTH)]
    here = [exchange.rank, exchange.size, *q.shape[:2]]
    if made_for != here:
        words = "rank {} of {} with {} sequences of {} tokens"
        raise ValueError(
            f"the plan is for {words.format(*made_for)}, but this is {words.format(*here)}: "
            "make it with parallel.schedule.plan"
        )
