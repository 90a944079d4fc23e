"""Mistakes that others have made, and some of our own, each to be made by tests/unit/test_mutants.py.

A mutant is a kernel, an exchange, a plan, or one expression of the ring's source that is replaced.
"""

import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from model.kernels import sdpa
from model.mask import Mask
from parallel import messages, ring, traffic
from parallel.route import Route
from parallel.schedule import HOP
from parallel.traffic import Buffers
from tests.threads import QueueExchange, QueuePending

LENGTH, RANKS, WINDOW, DOCUMENTS = 64, 4, 40, ((64,), (30, 34))

ROUTES = {
    "relay": Route(),
    "relay via": Route(node_ranks=2),
    "direct": Route("direct"),
    "direct, deep": Route("direct", depth=3),
    "direct via": Route("direct", depth=2, node_ranks=2),
    "gather": Route("gather"),
    "gather, each head": Route("gather", head_groups=2),
}
MESSAGES, GATHERS, EACH_HEAD = [*ROUTES][:5], [*ROUTES][5:], [*ROUTES][6:]


class FilledBuffers(Buffers):
    """A pool of memory that was used for something else before."""

    def __init__(self, value: float):
        super().__init__()
        self.value = value

    def take(self, *what: Any) -> torch.Tensor:
        return super().take(*what).fill_(self.value)


@dataclass(frozen=True)
class Mutant:
    """What differs, and on which routes it can; `source` is (where, function or class, expression, replacement)."""

    routes: list[str] = field(default_factory=lambda: [*ROUTES])
    kernel: Any = sdpa
    exchange: Any = QueueExchange
    mask: Mask = Mask(WINDOW)
    documents: tuple[tuple[int, ...], ...] = DOCUMENTS
    source: tuple[Any, str, str, str] | None = None
    memory: float = 0.0  # what buffers happen to hold; zeros hide most
    fails: str = "is off by"


def kernel_with(**replaced):
    return lambda rank: SimpleNamespace(**{"forward": sdpa.forward, "backward": sdpa.backward, **replaced})


def delta_of_the_hop(dout, q, k, v, out, lse, tiles, into):
    block_out, _ = sdpa.forward(q, k, v, tiles)
    return sdpa.backward(dout, q, k, v, block_out, lse, tiles, into=into)


def lse_of_the_hop(dout, q, k, v, out, lse, tiles, into):
    _, block_lse = sdpa.forward(q, k, v, tiles)
    return sdpa.backward(dout, q, k, v, out, block_lse, tiles, into=into)


def own_keys_in_backward(rank):
    def backward(dout, q, k, v, out, lse, tiles, into):
        rows = len(q)
        own = rank * rows if len(k) == RANKS * rows and not tiles[:, HOP].min() else 0
        k, v = (x[own : own + rows].repeat(-(-len(x) // rows), 1, 1)[: len(x)] for x in (k, v))
        return sdpa.backward(dout, q, k, v, out, lse, tiles, into=into)

    return SimpleNamespace(forward=sdpa.forward, backward=backward)


def forgets_the_hops_before(q, k, v, tiles, into):
    out, lse = sdpa.forward(q, k, v, tiles)
    seen = ~lse.isneginf()
    into[0].copy_(torch.where(seen.T[..., None], out, into[0]))
    into[1].copy_(torch.where(seen, lse, into[1]))


def rounds_out(q, k, v, tiles, into):
    out, lse = sdpa.forward(q, k, v, tiles, into=into)
    out.copy_(out.bfloat16())
    return out, lse


def rounds_gradients(which):
    def backward(dout, q, k, v, out, lse, tiles, into):
        gradients = sdpa.backward(dout, q, k, v, out, lse, tiles, into=into)
        for _, q_start, q_stop, k_start, k_stop, *_ in tiles.tolist():
            rows = slice(q_start, q_stop) if which == [0] else slice(k_start, k_stop)
            for n in which:
                gradients[n][rows] = gradients[n][rows].bfloat16().to(gradients[n].dtype)
        return gradients

    return kernel_with(backward=backward)


class _Changed(QueuePending):
    """What arrives is replaced by `change(number of the receive, what was there before, what came)`."""

    def __init__(self, pending, change):
        super().__init__(pending.exchange, pending.sent, pending.receives)
        self.then, self.change = pending.then, change

    def wait(self):
        super().wait()
        self.change()


def restores(tensors):
    """A function that puts back what tensors hold now."""
    old = [x.clone() for x in tensors]
    return lambda: [x.copy_(before) for x, before in zip(tensors, old, strict=True)]


class WaitsForNothing(QueueExchange):
    """Computes with what the buffers held before."""

    def start(self, sends, receives):
        undo = restores([x for _, x in receives])
        return _Changed(super().start(sends, receives), undo)

    def gather(self, into, part):
        undo = restores([into])
        return _Changed(super().gather(into, part), undo)


class KeepsAStaleBuffer(QueueExchange):
    """What the second exchange of a rank brings is lost: the first one's is still there."""

    def __init__(self, *of):
        super().__init__(*of)
        self.received = []

    def start(self, sends, receives):
        return self._stale(super().start(sends, receives), [x for _, x in receives])

    def gather(self, into, part):
        return self._stale(super().gather(into, part), [into])

    def _stale(self, pending, tensors):
        def keep():
            self.received.append(torch.cat([x.flatten() for x in tensors]))
            if len(self.received) == 2:
                for x in tensors:
                    x.copy_(self.received[0].repeat(1 + x.numel() // len(self.received[0]))[: x.numel()].view(x.shape))

        return _Changed(pending, keep) if tensors else pending


class LosesTheLastSum(QueueExchange):
    """The gradients of the last group of heads never come."""

    def scatter_sum(self, into, parts):
        of_mine = [entry for entry in self.network.log if entry[:2] == (self.rank, "scatter_sum")]
        last = len(of_mine) + 1 == RANKS // 2 // into.shape[-2]
        return _Changed(super().scatter_sum(into, parts), into.zero_ if last else lambda: None)


class RoundsSums(QueueExchange):
    def scatter_sum(self, into, parts):
        return super().scatter_sum(into, parts.bfloat16().to(parts.dtype))


def in_messages(expression, replacement, **more):
    return Mutant(MESSAGES, source=(traffic, "_Messages", expression, replacement), **more)


def in_gather(expression, replacement, routes=GATHERS, **more):
    return Mutant(routes, source=(traffic, "_Gathered", expression, replacement), **more)


LOWS = {  # accumulators in bfloat16
    "bfloat16 out": Mutant(MESSAGES, kernel=kernel_with(forward=rounds_out)),
    "bfloat16 dq": Mutant(kernel=rounds_gradients([0])),
    "bfloat16 dk, dv": Mutant(kernel=rounds_gradients([1, 2])),
    "bfloat16 on the wire": in_messages("k.dtype if program.narrow else gradients", "torch.bfloat16"),
    "bfloat16 sums": Mutant(GATHERS, exchange=RoundsSums),
}
MUTANTS = LOWS | {
    "delta of the hop": Mutant(MESSAGES, kernel=kernel_with(backward=delta_of_the_hop)),
    "lse of the hop": Mutant(MESSAGES, kernel=kernel_with(backward=lse_of_the_hop)),
    "own keys in backward": Mutant(kernel=own_keys_in_backward),
    "forgets the hops before": Mutant(MESSAGES, kernel=kernel_with(forward=forgets_the_hops_before)),
    "waits for nothing": Mutant(exchange=WaitsForNothing),
    "stale buffer": Mutant(MESSAGES + EACH_HEAD, exchange=KeepsAStaleBuffer),
    "last gradients dropped": in_messages("arrived is None", "arrived is None or hop == self.num_batches - 1"),
    "last sum dropped": Mutant(GATHERS, exchange=LosesTheLastSum),
    "the last gradients only": in_messages("gradients[start:stop].add_(", "gradients[start:stop].copy_("),
    "gradients not cleared": Mutant(
        MESSAGES, source=(messages, "_clears", "in stay.buffers.values()", "in ()"), memory=0.5
    ),
    "own gradients not cleared": in_messages("self.gradients[: len(k)].zero_()", "pass", memory=0.5),
    "gathered gradients not cleared": in_gather("self.gradients[(hop - 1) % 2].zero_()", "pass", memory=0.5),
    "a buffer given away too early": Mutant(
        ["relay", "direct"],
        source=(messages, "overlap", "a[0] <= b[1] and b[0] <= a[1]", "a[0] < b[1] and b[0] < a[1]"),
        fails="is off by|a send buffer was written",  # the second is a race on a network
    ),
    "wrong group of heads": in_gather("hop - 1, self.groups", "hop % self.groups, self.groups", EACH_HEAD),
    "keys of the group after": in_gather("keys = self.keys[(hop - 1) % 2]", "keys = self.keys[hop % 2]"),
    "sums of the group after": in_gather("self.own[hop - 2]", "self.own[(hop - 1) % self.groups]", EACH_HEAD),
    "values of other heads": in_messages("self.keys[: len(k), 1] = k, v", "self.keys[: len(k), 1] = k, v.flip(1)"),
    "dk for dv": Mutant(source=(ring, "backward", "dq[:, heads], dk, dv", "dq[:, heads], dv, dk")),
    "window one too wide": Mutant(mask=Mask(WINDOW + 1)),
    "window one too narrow": Mutant(mask=Mask(WINDOW - 1)),
    "window dropped": Mutant(mask=Mask()),
    "documents dropped": Mutant(documents=((64,), (64,))),
    "a document one token longer": Mutant(documents=((64,), (31, 33))),
}


def replaced(owner, name, expression, replacement):
    """The function or class `name` of a module, compiled from its source with one expression replaced."""
    source = inspect.getsource(getattr(owner, name))
    assert source.count(expression) == 1, f"{expression!r} is {source.count(expression)} times in {name}"
    names = dict(vars(owner))
    exec(compile(source.replace(expression, replacement), f"<mutant of {name}>", "exec"), names)
    return names[name]
