"""All ranks of a ring in one process: a thread each, and an exchange through queues that is stricter than a network.

What is received is NaN until it is waited for, what is sent must not change until then, and what a pool of buffers
gives holds nothing yet. One rank runs at a time, the next one while it waits: thousands of small cases then cost no
more than their arithmetic, and one that cannot end says so.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.mask import Mask
from parallel import ring
from parallel.collectives import Message
from parallel.deal import deal
from parallel.layout import Layout
from parallel.route import Route
from parallel.schedule import plan
from parallel.traffic import Buffers
from tests.oracle import Attention

PATIENCE_SECONDS = 20
MOST_RANKS = 64


class Network:
    """First in, first out between each pair of ranks.

    `log` has an entry for each start: (rank, sends, receives) as (peer, shape, bytes), and for each collective:
    (rank, name, bytes of this rank's part).
    """

    def __init__(self):
        self.turn = threading.Lock()  # held by the rank that runs
        self.arrived = defaultdict(lambda: threading.Condition(self.turn))
        self.inboxes: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.log: list[tuple] = []
        self.failure: BaseException | None = None

    def put(self, source: int, destination: int, tensor: Tensor) -> None:
        self.inboxes[source, destination].append(tensor)
        self.arrived[destination].notify()

    def get(self, source: int, destination: int) -> Tensor:
        """Lets the others run until there is something."""
        inbox = self.inboxes[source, destination]
        come = self.arrived[destination].wait_for(lambda: inbox or self.failure, PATIENCE_SECONDS)
        if not inbox:
            why = "another rank failed" if come else f"{PATIENCE_SECONDS} s passed"
            raise TimeoutError(f"rank {destination} got nothing from rank {source}: {why}")
        return inbox.popleft()

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        for condition in self.arrived.values():
            condition.notify()


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class QueueExchange:
    """The exchange of one rank."""

    def __init__(self, network: Network, rank: int, size: int):
        self.network, self.rank, self.size = network, rank, size

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> "QueuePending":
        assert sends or receives, "an empty exchange"
        assert all(tensor.is_contiguous() and tensor.numel() for _, tensor in (*sends, *receives))
        copies = [tensor.clone() for _, tensor in sends]
        for (peer, _), copy in zip(sends, copies, strict=True):
            assert peer != self.rank
            self.network.put(self.rank, peer, copy)
        for _, tensor in receives:
            tensor.fill_(torch.nan)
        what = [[(peer, tuple(tensor.shape), size_of(tensor)) for peer, tensor in part] for part in (sends, receives)]
        self.network.log.append((self.rank, *what))
        return QueuePending(self, [(tensor, copy) for (_, tensor), copy in zip(sends, copies, strict=True)], receives)

    def gather(self, into: Tensor, part: Tensor) -> "QueuePending":
        self.network.log.append((self.rank, "gather", size_of(part)))
        return self._to_all(part, [part.clone()] * self.size, list(into))

    def scatter_sum(self, into: Tensor, parts: Tensor) -> "QueuePending":
        self.network.log.append((self.rank, "scatter_sum", size_of(into)))
        rooms = torch.empty_like(parts)
        pending = self._to_all(parts, list(parts.clone()), list(rooms))
        into.fill_(torch.nan)
        pending.then = lambda: torch.sum(rooms, 0, out=into)
        return pending

    def _to_all(self, source: Tensor, copies: list[Tensor], rooms: list[Tensor]) -> "QueuePending":
        """Copy number p goes to rank p; what rank p sends comes into room number p."""
        sent = [(source, source.clone())]
        for peer, copy in enumerate(copies):
            self.network.put(self.rank, peer, copy)
        for room in rooms:
            room.fill_(torch.nan)
        return QueuePending(self, sent, list(enumerate(rooms)))


class QueuePending:
    def __init__(self, exchange: QueueExchange, sent: list[tuple[Tensor, Tensor]], receives: Sequence[Message]):
        self.exchange, self.sent, self.receives = exchange, sent, receives
        self.then = lambda: None

    def wait(self) -> None:
        for peer, tensor in self.receives:
            arrived = self.exchange.network.get(peer, self.exchange.rank)
            assert arrived.shape == tensor.shape and arrived.dtype == tensor.dtype
            assert tensor.isnan().all(), "a receive buffer was written before it was waited for"
            tensor.copy_(arrived)
        for tensor, copy in self.sent:
            same = tensor.view(torch.uint8).equal(copy.view(torch.uint8))  # also where it is NaN
            assert same, "a send buffer was written before it was waited for"
        self.then()


class EmptyBuffers(Buffers):
    """A pool in which nothing is left of what was there before."""

    def take(self, name: str, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return super().take(name, shape, dtype, device).fill_(torch.nan)


def on_threads(run: Callable[[int], Any], ranks: int, network: Network) -> list[Any]:
    """`run(rank)` on a thread for each rank; the results by rank, or the error of the rank that failed first."""

    def in_turn(rank: int) -> Any:
        with network.turn:
            try:
                return run(rank)
            except BaseException as error:
                network.fail(error)

    results = list(_pool().map(in_turn, range(ranks)))
    if network.failure is not None:
        raise network.failure
    return results


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_RANKS)


def ring_attention(
    inputs: Sequence[Tensor],
    layout: str | Layout,
    documents: Sequence[Sequence[int]],
    window: int | None,
    ranks: int,
    kernel: Any,
    network: Network | None = None,
    exchange: Callable[..., Any] = QueueExchange,
    route: Route = Route(),  # noqa: B008 - frozen
    plans: Callable[[int], np.ndarray] | None = None,
    buffers: Callable[[int], Buffers] = lambda rank: EmptyBuffers(),
    dtype: torch.dtype | None = None,
) -> Attention:
    """Ring attention over `ranks` threads of global q, k, v, dout [B, T, …, D]: out, dq, dk, dv in global order.

    T is a length that the layout divides. `kernel` may be a function of the rank, `buffers` is one; `plans` makes a
    rank's plan where it is not to be the one for the other arguments (for mutants); `dtype` is that of the results.
    """
    network = network or Network()
    length = inputs[0].shape[1]
    dealt = deal(layout, documents, length, ranks, Mask(window)) if isinstance(layout, str) else layout
    index = [torch.from_numpy(dealt.index(rank)) for rank in range(ranks)]
    planned = plans or (lambda rank: plan(dealt, Mask(window), documents, length, length, ranks, rank, route))

    def run(rank: int) -> tuple[Tensor, ...]:
        q, k, v, dout = (_picked(x, index[rank]) for x in inputs)
        table = torch.from_numpy(planned(rank))
        here = exchange(network, rank, ranks) if ranks > 1 else ring.Alone()
        module = kernel(rank) if callable(kernel) else kernel
        pool = buffers(rank)
        out, lse = ring.forward(q, k, v, table, here, module, pool, dtype)
        final = out.to(q.dtype)
        return (out, *ring.backward(dout, q, k, v, final, lse, table, here, module, pool, dtype))

    parts = on_threads(run, ranks, network)
    assert not any(network.inboxes.values()), "something was sent that nobody received"
    order = torch.argsort(torch.cat(index, dim=1), dim=1)
    return Attention(*(_picked(torch.cat(column, dim=1), order) for column in zip(*parts, strict=True)))


def _picked(x: Tensor, index: Tensor) -> Tensor:
    """x [B, T, …] at index [B, n] of each sequence: [B, n, …]."""
    return torch.stack([sequence[rows] for sequence, rows in zip(x, index, strict=True)])
