"""One layer's attention on a setting's ring, played: seconds of kernels, of merging and of waiting, and bytes sent. No
torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parallel.choose import GRANULARITY, Choice
from parallel.cost import Ring
from parallel.route import tour
from parallel.setting import Setting
from parallel.wire import Played

ROUNDED = 1 + 1e-9  # sums in another order differ in their last bits


@dataclass(frozen=True)
class Attention:
    """One kind of attention, played: seconds of one layer and micro-batch on the rank that ends last.

    Attributes:
        kernel: forward and backward; `merge` adds their results to those of earlier hops.
        exposed: what that rank waits; `sent` for how long its exchanges are under way.
        nic_seconds: for which the busiest card is busy with the ring alone.
        rank_bytes: that the busiest rank sends.
        balance: pairs of a rank on average over those of the busiest.
        ideal_seconds: forward and backward of the kernel, were ranks equally busy.
    """

    choice: Choice
    ring: Ring
    played: tuple[Played, Played]
    kernel: tuple[float, float]
    merge: tuple[float, float]
    exposed: tuple[float, float]
    sent: tuple[float, float]
    nic_seconds: tuple[float, float]
    rank_bytes: tuple[float, float]
    balance: float

    @property
    def ideal_seconds(self) -> float:
        return self.ring.ideal_seconds


def play_all(
    setting: Setting, documents: Sequence[Sequence[int]], choices: Mapping[str, Choice] | None = None
) -> dict[str, Attention]:
    """Each kind of attention that some layer has, by kind; as the run would choose, where `choices` says nothing."""
    choices = choices or setting.choose(documents)
    return {kind: play(setting, kind, choice, documents) for kind, choice in choices.items()}


def play(setting: Setting, kind: str, choice: Choice, documents: Sequence[Sequence[int]]) -> Attention:
    """One layer's attention of one micro-batch, forward and backward, on the setting's network."""
    ring = Ring(
        documents,
        setting.length,
        setting.padded,
        setting.ring_size,
        setting.masks[kind],
        setting.shape,
        setting.rates,
        setting.network,
        GRANULARITY,
    )
    name, route = choice.layout_name, choice.route
    ring.take(name, choice.layout)
    pairs = ring.deal(name)[1].sum(axis=1)
    forward, backward = ring.play(name, route, setting.background_seconds)
    last = [int(played.finish.argmax()) for played in (forward, backward)]
    computing = [(p.hop_end - p.hop_begin).sum(axis=0)[rank] for p, rank in zip((forward, backward), last, strict=True)]
    kernel = [float(pairs[rank] * seconds) for rank, seconds in zip(last, ring.pair_seconds, strict=True)]
    nic = [played.nic_seconds - setting.background_seconds for played in (forward, backward)]
    ends = [max(played.makespan, busy) for played, busy in zip((forward, backward), nic, strict=True)]
    sent = [(p.exchange_end - p.exchange_begin).sum(axis=0).mean() for p in (forward, backward)]
    return Attention(
        choice=choice,
        ring=ring,
        played=(forward, backward),
        kernel=tuple(kernel),
        merge=tuple(float(c - k) if c > ROUNDED * k else 0.0 for c, k in zip(computing, kernel, strict=True)),
        exposed=tuple(float(end - c) for end, c in zip(ends, computing, strict=True)),
        sent=tuple(map(float, sent)),
        nic_seconds=tuple(nic),
        rank_bytes=_sent_bytes(ring, choice),
        balance=float(pairs.mean() / pairs.max()) if pairs.max() else 1.0,
    )


def _sent_bytes(ring: Ring, choice: Choice) -> tuple[float, float]:
    """That the busiest rank sends in forward and in backward."""
    route = choice.route
    keys, gradients = ring.row_bytes(route.narrow)
    if ring.gathers(route):
        rows = (ring.ranks - 1) * ring.local_rows
        return rows * keys, rows * (keys + gradients)
    if ring.ranks == 1:
        return 0.0, 0.0
    trip = tour(route, *ring.needed_rows(choice.layout_name, route.width(ring.ranks)), ring.local_rows)
    by_rank = [np.bincount(table.source, table.rows, ring.ranks) for table in (trip.keys, trip.gradients)]
    return float(by_rank[0].max() * keys), float((by_rank[0] * keys + by_rank[1] * gradients).max())
