"""All ranks of a ring in one process: a thread each, and an exchange through queues that is as strict as a
network.

What is received is NaN until it is waited for, and what is sent must not change until then.
"""

import queue
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from model.mask import Mask
from parallel import ring
from parallel.layout import chunks, global_index
from parallel.schedule import plan
from tests.oracle import Attention

PATIENCE_SECONDS = 20


class Network:
    """First in, first out between each pair of ranks; logs each exchange: (rank, distance, shapes, bytes)."""

    def __init__(self):
        self.queues = defaultdict(queue.Queue)
        self.log: list[tuple[int, int, list[torch.Size], int]] = []


class QueueExchange:
    """The exchange of one rank."""

    def __init__(self, network: Network, rank: int, size: int):
        self.network = network
        self.rank = rank
        self.size = size

    def start(self, sends: Sequence[Tensor], receives: Sequence[Tensor], distance: int = 1) -> "QueuePending":
        assert all(tensor.is_contiguous() for tensor in (*sends, *receives))
        to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        copies = [tensor.clone() for tensor in sends]
        for copy in copies:
            self.network.queues[self.rank, to].put(copy)
        for tensor in receives:
            tensor.fill_(torch.nan)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in sends)
        self.network.log.append((self.rank, distance, [tensor.shape for tensor in sends], num_bytes))
        return QueuePending(self.network.queues[source, self.rank], list(zip(sends, copies, strict=True)), receives)


class QueuePending:
    def __init__(self, inbox: queue.Queue, sent: list[tuple[Tensor, Tensor]], receives: Sequence[Tensor]):
        self.inbox = inbox
        self.sent = sent
        self.receives = receives

    def wait(self) -> None:
        for tensor in self.receives:
            arrived = self.inbox.get(timeout=PATIENCE_SECONDS)
            assert arrived.shape == tensor.shape and arrived.dtype == tensor.dtype
            assert tensor.isnan().all(), "a receive buffer was written before it was waited for"
            tensor.copy_(arrived)
        for tensor, copy in self.sent:
            assert torch.equal(tensor, copy), "a send buffer was written before it was waited for"


def on_threads(run: Callable[[int], Any], ranks: int) -> list[Any]:
    """`run(rank)` on a thread for each rank; the results by rank, or the first rank's error."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def ring_attention(
    inputs: Sequence[Tensor],
    layout: str,
    documents: Sequence[Sequence[int]],
    window: int | None,
    ranks: int,
    kernel: Any,
    network: Network | None = None,
    exchange: Callable[..., Any] = QueueExchange,
    planned_window: int | None = -1,
) -> Attention:
    """Ring attention over `ranks` threads of global q, k, v, dout [B, T, …, D]: out, dq, dk, dv in global
    order.

    T is a length that the layout divides. `kernel` may be a function of the rank, `planned_window` differ
    from `window` (for mutants).
    """
    network = network or Network()
    length = inputs[0].shape[1]
    mask = Mask(window if planned_window == -1 else planned_window)
    index = [torch.from_numpy(global_index(chunks(layout, length, ranks, rank))) for rank in range(ranks)]

    def run(rank: int) -> tuple[Tensor, ...]:
        q, k, v, dout = (x[:, index[rank]] for x in inputs)
        table = torch.from_numpy(plan(layout, mask, documents, length, length, ranks, rank))
        here = exchange(network, rank, ranks) if ranks > 1 else ring.Alone()
        module = kernel(rank) if callable(kernel) else kernel
        out, lse = ring.forward(q, k, v, table, here, module)
        final = out.to(q.dtype)
        return (out, *ring.backward(dout, q, k, v, final, lse, table, here, module))

    parts = on_threads(run, ranks)
    order = torch.argsort(torch.cat(index))
    assert all(inbox.empty() for inbox in network.queues.values()), "something was sent that nobody received"
    return Attention(*(torch.cat(column, dim=1)[:, order] for column in zip(*parts, strict=True)))
