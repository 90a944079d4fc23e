"""NCCL's rules on top of gloo, for the functions of torch.distributed that `parallel.collectives` calls.

* A batch of sends and receives is one work, whatever is in it.
* `wait()` returns at once. It only puts what the device does next after the exchange, so what was received is there
  from the next operation on, and NaN until then.
* What is sent is what the device had computed when it was posted, and must not change until it is waited for.
* A communicator does one thing after the other, and its first batch needs all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel import collectives

PATIENCE_SECONDS = 60


class Stream(TorchDispatchMode):
    """What the device does, in order: each operation on tensors is after all that was waited for before it."""

    def __init__(self):
        super().__init__()
        self.waited: list[Work] = []
        self.num_works = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        waited, self.waited = self.waited, []
        for work in waited:
            work.arrive()
        return operation(*args, **(kwargs or {}))


class Work:
    def __init__(self, stream: Stream, done: Future, sent: Sequence[tuple], received: Sequence[tuple]):
        self.stream, self.done, self.sent, self.received = stream, done, sent, received
        stream.num_works += 1

    def wait(self) -> None:
        assert self not in self.stream.waited
        self.stream.waited.append(self)

    def arrive(self) -> None:
        self.done.result(PATIENCE_SECONDS)
        for tensor, copy in self.sent:
            assert tensor.equal(copy), "a send buffer was written before it was waited for"
        for tensor, room in self.received:
            assert tensor.isnan().all(), "a receive buffer was written before it was waited for"
            tensor.copy_(room)


@contextmanager
def like_nccl() -> Iterator[Stream]:
    """Inside, `parallel.collectives` works by NCCL's rules."""
    stream, communicator = Stream(), ThreadPoolExecutor(1)
    plain_batch, plain_gather, plain_scatter = (
        collectives.dist.batch_isend_irecv,
        collectives._all_gather,
        collectives._reduce_scatter,
    )
    begun: list[dist.ProcessGroup] = []

    def post(run: Callable[[], object], sent: Sequence[tuple], received: Sequence[tuple]) -> Work:
        for tensor, _ in received:
            tensor.fill_(torch.nan)
        return Work(stream, communicator.submit(run), sent, received)

    def batch_isend_irecv(operations: Sequence[dist.P2POp]) -> list[Work]:
        group = operations[0].group
        copies = [each.tensor.clone() for each in operations]  # a stream operation: after what was waited for
        sides = [[], []]
        for each, copy in zip(operations, copies, strict=True):
            sides[each.op is dist.irecv].append((each.tensor, copy))
        again = [
            dist.P2POp(each.op, copy, group=group, group_peer=each.group_peer, tag=each.tag)
            for each, copy in zip(operations, copies, strict=True)
        ]
        is_first = group not in begun
        begun.append(group)

        def run() -> None:
            if is_first:
                dist.barrier(group)
            for work in plain_batch(again):
                work.wait()

        return [post(run, *sides)]

    def collective(plain: Callable[..., object]) -> Callable[..., Work]:
        def call(into: Tensor, part: Tensor, group: dist.ProcessGroup, async_op: bool) -> Work:
            copy, room = part.clone(), torch.empty_like(into)
            return post(lambda: plain(room, copy, group=group), [(part, copy)], [(into, room)])

        return call

    with (
        communicator,
        mock.patch.object(collectives.dist, "batch_isend_irecv", batch_isend_irecv),
        mock.patch.object(collectives, "_all_gather", collective(plain_gather)),
        mock.patch.object(collectives, "_reduce_scatter", collective(plain_scatter)),
        stream,
    ):
        yield stream
