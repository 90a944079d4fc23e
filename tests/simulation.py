"""All ranks' plans followed by the numbers of tokens, with whole numbers for gradients: no keys, no kernel, no tensor.

It knows what the columns of a plan mean and when exchanges are posted and waited for, and nothing else.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from parallel.layout import Layout
from parallel.messages import CLEAR, RECEIVE_GRADIENTS, RECEIVE_KEYS, SEND_GRADIENTS, SEND_KEYS
from parallel.schedule import (
    BUFFER_ROWS,
    DEPTH,
    HEAD_GROUPS,
    K_START,
    K_STOP,
    LOWER,
    NUM_BATCHES,
    NUM_HOPS,
    Q_START,
    Q_STOP,
    UPPER,
    hop_starts,
    message_rows,
)  # fmt: skip

NOTHING, ON_ITS_WAY = -1, -2


class Followed(NamedTuple):
    """How often each pair was shown, int[B, T, T] by query and key; what each key's gradient came to, int[B, T]."""

    shown: np.ndarray
    gradient: np.ndarray


def follow(plans: Sequence[np.ndarray], layout: Layout, weight: np.ndarray) -> Followed:
    """What the ranks' plans do together. A visible pair adds weight[b, query], int[B, T], to its key's gradient."""
    batch, length = layout.num_sequences, layout.padded_length
    tokens = [(layout.index(rank) + length * np.arange(batch)[:, None]).reshape(-1) for rank in range(layout.ranks)]
    shown = np.zeros((batch * length, length), np.int64)
    if plans[0][1, HEAD_GROUPS]:
        everyone = np.concatenate(tokens)
        gradients = np.zeros((layout.ranks, len(everyone)), np.int64)
        for plan, own, gradient in zip(plans, tokens, gradients, strict=True):
            none, tiles, *more = _tiles_by_hop(plan)  # those of hop 1 are for each group of heads
            assert not any(map(len, (none, *more)))
            _compute(tiles, own, everyone, gradient, shown, weight)
        found, order = gradients.sum(axis=0), everyone
    else:
        ranks = [_Rank(plan, own) for plan, own in zip(plans, tokens, strict=True)]
        wires: dict[tuple, list[np.ndarray]] = defaultdict(list)
        for hop in range(max(plans[0][0, NUM_HOPS], plans[0][1, NUM_BATCHES])):
            for number, rank in enumerate(ranks):
                rank.before(hop, number, wires)
                if hop < len(rank.hops):
                    _compute(rank.hops[hop], rank.tokens, rank.keys, rank.gradients, shown, weight)
            for number, rank in enumerate(ranks):
                rank.after(hop, number, wires)
        assert not any(wires.values()), "something was sent that nobody received"
        found = np.concatenate([rank.gradients[: layout.local_rows] for rank in ranks])
        order = np.concatenate(tokens)
    gradient = np.empty(batch * length, np.int64)
    gradient[order] = found
    return Followed(shown.reshape(batch, length, length), gradient.reshape(batch, length))


class _Rank:
    """One rank's arena: which token's key is in each row, and the sum of its gradient; garbage where it is unknown."""

    def __init__(self, plan: np.ndarray, tokens: np.ndarray):
        rows = len(tokens) + plan[0, BUFFER_ROWS]
        self.tokens, self.depth, self.posted = tokens, plan[0, DEPTH], 0
        self.num_batches, self.num_hops = plan[1, NUM_BATCHES], plan[0, NUM_HOPS]
        self.keys = np.full(rows, NOTHING)
        self.keys[: len(tokens)] = tokens
        self.gradients = np.full(rows, -(10**12))
        self.gradients[: len(tokens)] = 0
        self.hops = _tiles_by_hop(plan)
        self.messages = defaultdict(list)
        for kind, exchange, peer, start, stop in message_rows(plan)[:, :5].tolist():
            assert 0 <= start < stop <= rows
            self.messages[kind, exchange].append((peer, slice(start, stop)))

    def before(self, hop: int, me: int, wires: dict) -> None:
        while self.posted < min(hop + self.depth, self.num_batches):
            e = self.posted
            for peer, rows in self.messages[SEND_KEYS, e]:
                assert self.keys[rows].min() >= 0, "keys are handed on before they came"
                assert e < self.num_hops - 1, "keys travel after the last hop"
                wires["keys", e, me, peer].append(self.keys[rows].copy())
            for peer, rows in self.messages[SEND_GRADIENTS, e]:
                wires["gradients", e, me, peer].append(self.gradients[rows].copy())
            for _, rows in self.messages[RECEIVE_KEYS, e]:
                self.keys[rows] = ON_ITS_WAY
            self.posted += 1
        for _, rows in self.messages[CLEAR, hop]:
            self.gradients[rows] = 0

    def after(self, hop: int, me: int, wires: dict) -> None:
        for what, kind in (("keys", RECEIVE_KEYS), ("gradients", RECEIVE_GRADIENTS)):
            left: dict[int, np.ndarray] = {}  # of what came from each peer
            for peer, rows in self.messages[kind, hop]:
                if peer not in left:
                    left[peer] = np.concatenate(wires.pop((what, hop, peer, me)))
                part, left[peer] = np.split(left[peer], [rows.stop - rows.start])
                if kind == RECEIVE_KEYS:
                    self.keys[rows] = part
                else:
                    self.gradients[rows] += part
            assert not any(map(len, left.values())), "a message is longer than where it goes"


def _tiles_by_hop(plan: np.ndarray) -> list[np.ndarray]:
    return [plan[start:stop] for start, stop in pairwise(hop_starts(plan).tolist())]


def _compute(
    tiles: np.ndarray, own: np.ndarray, keys: np.ndarray, gradients: np.ndarray, shown: np.ndarray, weight: np.ndarray
) -> None:
    length = weight.shape[1]
    for tile in tiles.tolist():
        queries, rows = own[tile[Q_START] : tile[Q_STOP]], slice(tile[K_START], tile[K_STOP])
        seen_keys = keys[rows]
        assert len(seen_keys) == tile[K_STOP] - tile[K_START] and seen_keys.min() >= 0, f"tile {tile} has no keys"
        assert len(set((queries // length).tolist() + (seen_keys // length).tolist())) == 1, "two sequences"
        i, j = np.ogrid[: len(queries), : len(seen_keys)]
        band = (j >= i + tile[LOWER]) & (j <= i + tile[UPPER])
        assert band.any(axis=1).all() and band.any(axis=0).all(), f"tile {tile} is not trimmed"
        shown[np.ix_(queries, seen_keys % length)] += band
        gradients[rows] += band.T @ weight.reshape(-1)[queries]
