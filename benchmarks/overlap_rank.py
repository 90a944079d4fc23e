"""The two ranks of `benchmarks/overlap.py`: processes that wait on a pipe for what to do next, and time it."""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import namespaces, report
from model.mask import Mask
from parallel import ring, schedule
from parallel.collectives import Exchange, RingExchange
from parallel.traffic import Buffers

RANKS, HEADS, HEAD_DIM, DTYPE, LAYOUT, KERNEL = 2, 8, 64, torch.float32, "zigzag", "sdpa"
IDLE_SECONDS = 0.010  # in which the token bucket of the slowest link is full again, all others are


class Ranks:
    """Both ranks, seen from the process that starts them. Leaving the context ends them, and with them their link."""

    def __init__(self, folder: str):
        self.rendezvous = f"file://{folder}/rendezvous"
        self.processes: list[multiprocessing.Process] = []
        self.connections: list[Connection] = []

    def __enter__(self) -> "Ranks":
        if len(report.cores()) < RANKS:
            raise namespaces.Unavailable(f"needs a core for each of {RANKS} ranks, has {len(report.cores())}")
        try:
            context = multiprocessing.get_context("spawn")
            for rank in range(RANKS):
                here, there = context.Pipe()
                process = context.Process(target=_serve, args=(rank, there), daemon=True)
                process.start()
                there.close()  # so that a rank that dies is an EOFError here
                self.processes.append(process)
                self.connections.append(here)
            namespaces.link(self.ask("enter"))
            self.ask("join", self.rendezvous)
            for what in ("compute", "step"):  # what is slow once
                self.ask(what, 64, HEADS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def ask(self, what: str, *arguments: Any) -> list[Any]:
        """Let both ranks run the method `what`; their results. Raises what a rank raised."""
        for connection in self.connections:
            connection.send((what, arguments))
        replies = []
        for rank, connection in enumerate(self.connections):
            try:
                replies.append(connection.recv())
            except EOFError:
                raise RuntimeError(f"rank {rank} died while it ran {what}") from None
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies

    def slower(self, what: str, *arguments: Any) -> tuple[float, ...]:
        """Like `ask` for a method that returns times; of each the longer one."""
        return tuple(max(times) for times in zip(*self.ask(what, *arguments), strict=True))


def _serve(rank: int, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which then ends this
    here = Rank(rank)
    while True:
        try:
            what, arguments = connection.recv()
        except EOFError:
            return
        try:
            reply = getattr(here, what)(*arguments)
        except namespaces.Unavailable as error:
            reply = error
        except Exception:
            reply = RuntimeError(f"rank {rank}: {traceback.format_exc()}")
        connection.send(reply)


class Nothing:
    """An exchange that moves nothing, and keeps what it was to move and when it was waited for.

    The ring finds its own keys where its peer's would be, ordinary numbers, so that it computes as fast as with those.
    """

    size = RANKS

    def __init__(self, rank: int):
        self.rank = rank
        self.batches: list[tuple[list[int], list[int]]] = []  # bytes of what is sent, and of what is received
        self.copying: list[float] = []  # seconds that are not the ring's
        self.waits: list[float] = []

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> "Nothing":
        begun = time.perf_counter()
        self.batches.append(tuple([x.nbytes for _, x in messages] for messages in (sends, receives)))
        for (_, sent), (_, received) in zip(sends, receives, strict=True):
            received.copy_(sent)
        self.copying.append(time.perf_counter() - begun)
        return self

    def wait(self) -> None:
        self.waits.append(time.perf_counter())

    def hops(self, begun: float, ended: float) -> tuple[float, float]:
        """Seconds of the hop that the first exchange would hide behind, and of what follows."""
        return self.waits[0] - begun - self.copying[0], ended - self.waits[0] - sum(self.copying[1:])


class Rank:
    def __init__(self, rank: int):
        self.rank = rank
        self.loaded: tuple[int, int] | None = None
        self.batches: list[tuple[list[int], list[int]]] = []
        self.buffers = Buffers()

    def enter(self) -> int:
        """Into a network namespace of its own; returns the process id by which others find it."""
        namespaces.enter()
        return os.getpid()

    def join(self, rendezvous: str) -> None:
        """Over the link to the other rank. Collective."""
        namespaces.address(self.rank)
        os.environ["GLOO_SOCKET_IFNAME"] = namespaces.INTERFACE
        os.sched_setaffinity(0, {report.cores()[self.rank]})
        # Each packet wakes the thread that sends and receives: it is to wait for a turn, not to interrupt the kernel.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=rendezvous, rank=self.rank, world_size=RANKS)
        self.exchange = RingExchange(dist.group.WORLD)

    def shape(self, gigabits: float) -> None:
        namespaces.shape(gigabits * 1e9)

    def compute(self, block: int, kv_heads: int) -> tuple[float, float, float, float]:
        """Seconds without a peer: of the hop during which its keys would come, and of the rest; backward likewise."""
        self._load(block, kv_heads)
        forward, backward = Nothing(self.rank), Nothing(self.rank)
        begun, half, ended = self._run(forward, backward)
        self.batches = forward.batches + backward.batches
        assert len(self.batches) == 3, f"{len(self.batches)} batches: the prediction knows of three"
        return (*forward.hops(begun, half), *backward.hops(half, ended))

    def transfer(self, pauses: Sequence[float]) -> tuple[float, ...]:
        """Seconds of the ring's three batches, as `compute` has seen them, then of one at the link's steady rate.

        pauses: for how long the ring computes before the second and the third with none under way. A link that rests
        saves up some bytes, which it then sends at once; after IDLE_SECONDS it has all, and sends the same as before
        in the same time.
        """
        self._idle()
        times = [self._send(self.batches[0])]
        steady = self._send(self.batches[0])
        for batch, pause in zip(self.batches[1:], pauses, strict=True):
            if pause >= IDLE_SECONDS and batch == self.batches[0]:
                times.append(times[0])
            else:
                time.sleep(min(pause, IDLE_SECONDS))
                times.append(self._send(batch))
        return (*times, steady)

    def _send(self, batch: tuple[list[int], list[int]]) -> float:
        """Seconds of one exchange of messages of these sizes."""
        outgoing, incoming = ([torch.zeros(size, dtype=torch.uint8) for size in sizes] for sizes in batch)
        begun = time.perf_counter()
        # gloo tells the peer that it is ready to receive by the stream that it sends on: so before it sends.
        works = [dist.irecv(x, 1 - self.rank, tag=tag) for tag, x in enumerate(incoming)]
        works += [dist.isend(x, 1 - self.rank, tag=tag) for tag, x in enumerate(outgoing)]
        for work in works:
            work.wait()
        return time.perf_counter() - begun

    def step(self, block: int, kv_heads: int) -> tuple[float, float]:
        """Seconds until the end of the forward, and of the backward pass. Checks that its bytes went over the link."""
        self._load(block, kv_heads)
        sent = namespaces.sent_bytes()
        begun, half, ended = self._run(self.exchange, self.exchange)
        dist.barrier()  # what a socket still holds has left, too
        sent, expected = namespaces.sent_bytes() - sent, sum(sum(sizes) for sizes, _ in self.batches)
        if not expected <= sent <= 1.2 * expected + 1e5:
            raise RuntimeError(f"{sent} bytes went over {namespaces.INTERFACE}, of {expected} that the ring sent")
        return half - begun, ended - begun

    def _run(self, forward: Exchange, backward: Exchange) -> tuple[float, float, float]:
        """Forward and backward over these exchanges: when they began, when backward did, when it ended."""
        kernel, (q, k, v, dout) = ring.KERNELS[KERNEL], self.inputs
        self._idle()
        begun = time.perf_counter()
        out, lse = ring.forward(q, k, v, self.plan, forward, kernel, self.buffers)
        half = time.perf_counter()
        ring.backward(dout, q, k, v, out, lse, self.plan, backward, kernel, self.buffers)
        return begun, half, time.perf_counter()

    def _load(self, block: int, kv_heads: int) -> None:
        if self.loaded == (block, kv_heads):
            return
        self.loaded = (block, kv_heads)
        length = RANKS * block
        plan = schedule.plan(LAYOUT, Mask(), [(length,)], length, length, RANKS, self.rank)
        self.plan = torch.from_numpy(plan)
        heads = (HEADS, kv_heads, kv_heads, HEADS)
        self.inputs = [torch.randn(1, block, count, HEAD_DIM, dtype=DTYPE) for count in heads]

    def _idle(self) -> None:
        dist.barrier()
        time.sleep(IDLE_SECONDS)
