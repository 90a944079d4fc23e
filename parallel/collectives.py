"""The only file that sends bytes: exchanges of the ring, of Ulysses, and the collectives of the tensor axis."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# ------------------------------------------------------------------------------
# Key/value exchanges of the ring
# ------------------------------------------------------------------------------


@dataclass
class Stopwatch:
    """Adds up the time between `start` and `stop`: host seconds on CPU, the stream's on CUDA.

    What is launched on CUDA returns at once: a pair of events brackets it there, read later.
    """

    seconds: float = 0.0
    started: float = 0.0
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def start(self, on_cuda: bool) -> None:
        if on_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.events.append((begin, end))
            begin.record()
        else:
            self.started = time.perf_counter()

    def stop(self, on_cuda: bool) -> None:
        if on_cuda:
            self.events[-1][1].record()
        else:
            self.seconds += time.perf_counter() - self.started

    def read_and_reset(self) -> float:
        """Seconds since the last reading. On CUDA waits for the last `stop`: read once a step."""
        seconds, events = self.seconds, self.events
        self.seconds, self.events = 0.0, []
        if events:
            events[-1][1].synchronize()
            seconds += sum(begin.elapsed_time(end) for begin, end in events) / 1e3
        return seconds


exchange_clock = Stopwatch()  # waiting for exchanges; NCCL's `wait()` only orders streams


class Pending(Protocol):
    """An exchange under way. Until `wait` returns, leave what is sent unchanged, what is received unread."""

    def wait(self) -> None: ...


Message = tuple[int, Tensor]  # a rank of the ring, and what is sent to it or received from it


class Exchange(Protocol):
    """How a rank reaches the others of its ring: a value, so that tests can run all ranks in one process."""

    rank: int
    size: int

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Begin all of these at once. Messages between two ranks pair up in the order given."""
        ...

    def gather(self, into: Tensor, part: Tensor) -> Pending:
        """Begin to bring every rank's part [...] into `into` [R, ...]."""
        ...

    def scatter_sum(self, into: Tensor, parts: Tensor) -> Pending:
        """Begin to bring the sum over ranks of parts[rank] into `into`; parts is [R, ...]."""
        ...


class PendingWorks:
    """The works of one batch: one per operation on gloo, one in all on NCCL; never index them."""

    def __init__(self, works: Sequence[dist.Work], peers: Sequence[int], on_cuda: bool):
        self.works = works
        self.peers = peers  # of each operation
        self.on_cuda = on_cuda

    def wait(self) -> None:
        """Return when this rank's part is done; on CUDA, when what comes next is ordered after it.

        Raises RuntimeError, naming the peer, when one is gone or does not answer in time.
        """
        exchange_clock.start(self.on_cuda)
        for number, work in enumerate(self.works):
            each = [self.peers[number]] if len(self.works) == len(self.peers) else self.peers
            with naming(each):
                work.wait()
        exchange_clock.stop(self.on_cuda)


@contextlib.contextmanager
def naming(peers: Sequence[int], group: str = "the ring") -> Iterator[None]:
    """Errors of the network say with whom this rank was exchanging."""
    try:
        yield
    except RuntimeError as error:
        names = ", ".join(map(str, sorted(set(peers))))
        kind = type(error) if isinstance(error, dist.DistError) else RuntimeError  # it decides the exit code
        raise kind(f"exchange with rank {names} of {group} failed: {error}") from error


class RingExchange:
    """Exchanges between ranks of a process group, which should be the ring's own.

    All operations of a start go in one batch, so no order of ranks can deadlock, odd ring sizes included.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> PendingWorks:
        """Post one batch of contiguous tensors. Raises RuntimeError, here or in `wait`, when a peer is gone."""
        batch, peers = [], []
        # Receives first: gloo's word that a buffer is ready would else queue behind the data that this rank sends, and
        # the two directions of a link take turns.
        for operation, messages in ((dist.irecv, receives), (dist.isend, sends)):
            seen: dict[int, int] = {}
            for peer, tensor in messages:
                tag = seen[peer] = seen.get(peer, -1) + 1
                batch.append(dist.P2POp(operation, tensor, group=self.group, group_peer=peer, tag=tag))
                peers.append(peer)
        with naming(peers):
            works = dist.batch_isend_irecv(batch)
        on_cuda = (*sends, *receives)[0][1].is_cuda
        if not on_cuda and hasattr(os, "sched_yield"):
            os.sched_yield()  # gloo's thread has to answer the peers, and may share this core with the kernel
        return PendingWorks(works, peers, on_cuda)

    def gather(self, into: Tensor, part: Tensor) -> PendingWorks:
        """Post one all-gather. Collective over the group."""
        work = _all_gather(into.view(-1), part.view(-1), group=self.group, async_op=True)
        return PendingWorks([work], range(self.size), into.is_cuda)

    def scatter_sum(self, into: Tensor, parts: Tensor) -> PendingWorks:
        """Post one reduce-scatter. Collective over the group."""
        work = _reduce_scatter(into.view(-1), parts.view(-1), group=self.group, async_op=True)
        return PendingWorks([work], range(self.size), into.is_cuda)

    def warm_up(self, peers: Sequence[int], device: torch.device) -> None:
        """Connect to `peers`, who connect to this rank. Collective: NCCL's first batch needs all ranks of a group."""
        ones = torch.ones(1, device=device)
        received = [(peer, torch.zeros(1, device=device)) for peer in peers]
        if peers:
            self.start([(peer, ones) for peer in peers], received).wait()
        assert all(tensor.item() == 1 for _, tensor in received)


def gather_numbers(numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Every rank's numbers, equally many, by rank. Collective over `group`."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = mine.new_empty((dist.get_world_size(group), len(numbers)))
    _all_gather(everyone.view(-1), mine, group=group)
    return everyone.tolist()


# ------------------------------------------------------------------------------
# The heads of Ulysses
# ------------------------------------------------------------------------------


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x [ranks, …], row i for rank i -> [ranks, …], row i from rank i; outside autograd. Collective over `group`.

    x is contiguous and has the same shape and dtype on each rank.
    """
    out = torch.empty_like(x)
    exchange_clock.start(x.is_cuda)
    with naming(range(len(x)), "the ulysses group"):
        dist.all_to_all_single(out, x, group=group)
    exchange_clock.stop(x.is_cuda)
    return out


# ------------------------------------------------------------------------------
# The tensor axis: what crosses between the regions of parallel/tensor.py
# ------------------------------------------------------------------------------


def copy_in(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x as it is; its gradient, of which each rank has a part, is summed. Collective over `group` in backward."""
    return _CopyIn.apply(x, group)


def sum_out(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' x; its gradient is the same on each. Collective over `group`."""
    return _SumOut.apply(x, group)


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, L/ranks, C] -> [B, L, C] in rank order; gradients are summed and scattered back. Collective over `group`."""
    return _GatherTokens.apply(x, group)


def scatter_sums(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, L, C] -> this rank's [B, L/ranks, C] of the sum over ranks. Collective over `group`."""
    return _ScatterSums.apply(x, group)


def all_maximum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The elementwise maximum over ranks, outside autograd. Collective over `group`."""
    return _all_reduce(x, group, dist.ReduceOp.MAX)


def all_total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The elementwise sum over ranks, outside autograd. Collective over `group`."""
    return _all_reduce(x, group, dist.ReduceOp.SUM)


def _all_reduce(x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=op, group=group)
    return out


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    parts = x.new_empty((ranks, *x.shape))
    _all_gather(parts.view(-1), x.contiguous().view(-1), group=group)
    return parts.transpose(0, 1).flatten(1, 2)


def _scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    parts = x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    out = torch.empty_like(parts[0])
    _reduce_scatter(out.view(-1), parts.view(-1), group=group)
    return out


# torch 2.13 renamed these two; 2.11 has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dout: Tensor):
        return _all_reduce(dout, ctx.group), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx, dout: Tensor):
        return dout, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx, dout: Tensor):
        return _scatter(dout, ctx.group), None


class _ScatterSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(x, group)

    @staticmethod
    def backward(ctx, dout: Tensor):
        return _gather(dout, ctx.group), None
