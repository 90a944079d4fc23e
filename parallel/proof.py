"""Proves the plans of all ranks of a ring: nothing waits forever, is read too early, overwritten, lost or added twice.

The plans are run, hop by hop, on labels of rows instead of numbers. No torch here.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from parallel import messages, schedule
from parallel.messages import CLEAR, RECEIVE_GRADIENTS, RECEIVE_KEYS, SEND_GRADIENTS, SEND_KEYS

Post = dict[tuple[int, int, int, int], tuple[np.ndarray, ...]]  # (kind, exchange, from, to): labels, sums

NOTHING = -1  # the label of a row that holds nothing, or something from earlier


def prove(plans: Sequence[np.ndarray]) -> None:
    """Refuses plans of the ranks 0, 1, … of a ring that do not go together.

    * Every message has its counterpart: of the same exchange, kind and number of rows. So nothing waits forever. Take
      the first exchange e that never ends: a rank posts it before hop e - depth + 1, having waited for earlier ones
      only, and these end. So all ranks post it, all of its messages pair up, and it ends after all.
    * Nothing is read, by a hop or by a message that hands it on, before it has arrived and been waited for. Nothing
      is overwritten while a message that has not been waited for sends it or writes there.
    * Gradients are cleared before they add up, add up with those of the same keys only, leave once, and each part that
      a hop finds is in its owner's sum at the end. A hop that reads keys of another block than its gradients are
      added to sends them astray, so this refuses a buffer that is overwritten too early as well.

    A forward pass is the same with keys alone. Raises ValueError naming rank, exchange or hop, and rows.
    """
    heads = np.stack([plan[: schedule.HEADER_ROWS] for plan in plans])
    first, more = heads[0].tolist()
    if len(plans) != first[schedule.NUM_RANKS] or (heads[:, 0, schedule.RANK] != np.arange(len(plans))).any():
        given = heads[:, 0, schedule.RANK].tolist()
        raise ValueError(f"plans of the ranks {given}: give those of all {first[schedule.NUM_RANKS]}, in order")
    heads[:, 0, [schedule.RANK, schedule.NUM_MESSAGES, schedule.BUFFER_ROWS]] = 0  # all else they have in common
    for rank in np.flatnonzero((heads != heads[0]).any(axis=(1, 2)))[:1].tolist():
        raise ValueError(f"rank {rank} has another plan than rank 0: {heads[rank].tolist()} is not {heads[0].tolist()}")
    local = first[schedule.NUM_SEQUENCES] * first[schedule.LOCAL_LENGTH]
    gathered = more[schedule.HEAD_GROUPS] > 0  # collectives of all rows, the same on all ranks: they have no messages
    exchanges, hops = more[schedule.NUM_BATCHES], first[schedule.NUM_HOPS]
    for plan in plans:
        rows = len(plans) * local if gathered else local + int(plan[0, schedule.BUFFER_ROWS])
        _check_ranges(plan, local, rows)
    if gathered:
        return
    _match(plans, hops - 1, exchanges)
    post: Post = {}
    found = np.zeros(len(plans) * local, np.uint64)
    arenas = [_Arena(plan, local, post, found) for plan in plans]
    for hop in range(max(hops, exchanges)):
        for arena in arenas:
            arena.before(hop)
            arena.compute(hop)
        for arena in arenas:
            arena.after(hop)
    for arena in arenas:
        arena.end()


def _check_ranges(plan: np.ndarray, local: int, rows: int) -> None:
    """Refuses what lies outside the rank's own rows and its buffers, or own rows where buffers are meant."""
    rank = int(plan[0, schedule.RANK])
    tiles, table = schedule.tile_rows(plan), schedule.message_rows(plan)
    for first, last, limit in ((schedule.Q_START, schedule.Q_STOP, local), (schedule.K_START, schedule.K_STOP, rows)):
        wrong = (tiles[:, first] < 0) | (tiles[:, first] >= tiles[:, last]) | (tiles[:, last] > limit)
        for tile in tiles[wrong][:1].tolist():
            _refuse(rank, f"hop {tile[schedule.HOP]}", "a tile has", slice(tile[first], tile[last]), f"of {limit}")
    least = np.where(np.isin(table[:, messages.KIND], (RECEIVE_KEYS, SEND_GRADIENTS, CLEAR)), local, 0)
    start, stop = table[:, messages.START], table[:, messages.STOP]
    for wrong in np.flatnonzero((start < least) | (start >= stop) | (stop > rows))[:1].tolist():
        where = slice(int(start[wrong]), int(stop[wrong]))
        exchange = table[wrong, messages.EXCHANGE]
        _refuse(rank, f"exchange {exchange}", "a message has", where, f"outside of [{least[wrong]}, {rows})")


def _match(plans: Sequence[np.ndarray], key_exchanges: int, exchanges: int) -> None:
    """Refuses a message without its counterpart."""
    tables = [schedule.message_rows(plan) for plan in plans]
    here = np.repeat(np.arange(len(plans)), [len(table) for table in tables])
    table = np.concatenate(tables)
    kind = table[:, messages.KIND]
    here, table, kind = here[kind != CLEAR], table[kind != CLEAR], kind[kind != CLEAR]
    sends, gradients = np.isin(kind, (SEND_KEYS, SEND_GRADIENTS)), np.isin(kind, (SEND_GRADIENTS, RECEIVE_GRADIENTS))
    peer, size = table[:, messages.PEER], table[:, messages.STOP] - table[:, messages.START]
    ends = np.where(sends, here, peer), np.where(sends, peer, here)
    each = np.stack([table[:, messages.EXCHANGE], gradients, *ends], axis=1)
    each, number = np.unique(each, axis=0, return_inverse=True)
    number = number.reshape(-1)
    sent, received = (np.bincount(number[side], size[side], len(each)) for side in (sends, ~sends))
    late = each[:, 0] >= np.where(each[:, 1], exchanges, key_exchanges)
    for wrong in np.flatnonzero((sent != received) | late)[:1]:
        exchange, of_gradients, source, destination = each[wrong].tolist()
        raise ValueError(
            f"rank {source}, exchange {exchange}: sends {int(sent[wrong])} rows of "
            f"{'gradients' if of_gradients else 'keys'} to rank {destination}, which receives {int(received[wrong])}"
            f"{', after the last exchange' if late[wrong] else ''}"
        )


class _Arena:
    """The rows of one rank. Labels of keys are the own rows of all ranks, numbered end to end.

    A sum of gradients is one of random numbers, one for each rank and hop, modulo 2^64: sums are equal where all their
    parts are (or by a chance of one in 2^64).
    """

    def __init__(self, plan: np.ndarray, local: int, post: Post, found: np.ndarray):
        head, more = plan[: schedule.HEADER_ROWS].tolist()
        self.rank, self.depth, self.local = head[schedule.RANK], head[schedule.DEPTH], local
        self.exchanges, self.posted = more[schedule.NUM_BATCHES], 0
        self.post, self.found = post, found
        rows = local + head[schedule.BUFFER_ROWS]
        self.keys, self.of = np.full((2, rows), NOTHING)  # labels of the keys; of the keys that gradients belong to
        self.keys[:local] = self.of[:local] = self.rank * local + np.arange(local)
        self.sums, self.open = np.zeros(rows, np.uint64), np.arange(rows) < local  # whether they may be added to
        self.keys_leave, self.keys_come, self.gradients_leave = np.zeros((3, rows), np.int16)  # messages under way
        self.tiles = [plan[start:stop] for start, stop in pairwise(schedule.hop_starts(plan).tolist())]
        self.weights = np.random.default_rng(self.rank).integers(1, 1 << 63, len(self.tiles), np.uint64)
        self.spans: dict[tuple[int, int], dict[int, list[slice]]] = {}
        for kind, exchange, peer, start, stop in schedule.message_rows(plan)[:, :5].tolist():
            self.spans.setdefault((kind, exchange), {}).setdefault(peer, []).append(slice(start, stop))

    def of_all(self, kind: int, number: int) -> list[slice]:
        return [rows for spans in self.spans.get((kind, number), {}).values() for rows in spans]

    def before(self, hop: int) -> None:
        """Posts what is due, then clears."""
        while self.posted < min(hop + self.depth, self.exchanges):
            self._post(self.posted, f"exchange {self.posted}, posted before hop {hop}")
            self.posted += 1
        for rows in self.of_all(CLEAR, hop):
            self._check(f"hop {hop}", "clears", rows, self.gradients_leave[rows] > 0, "while a message sends them")
            kept = self.open[rows] & (self.sums[rows] > 0)
            self._check(f"hop {hop}", "clears", rows, kept, "with gradients that were not sent")
            self.open[rows], self.sums[rows], self.of[rows] = True, 0, NOTHING

    def compute(self, hop: int) -> None:
        """Reads keys, and adds what is found for them."""
        if hop >= len(self.tiles):
            return
        tiles = self.tiles[hop]
        for rows in _union(tiles[:, schedule.K_START], tiles[:, schedule.K_STOP]):
            self._check(f"hop {hop}", "reads", rows, self.keys[rows] == NOTHING, "before their keys have arrived")
            self._add(f"hop {hop}", rows, self.keys[rows], self.weights[hop])
            np.add.at(self.found, self.keys[rows], self.weights[hop])

    def after(self, hop: int) -> None:
        """Waits for the exchange of the same number."""
        for rows in self.of_all(SEND_KEYS, hop):
            self.keys_leave[rows] -= 1
        for rows in self.of_all(SEND_GRADIENTS, hop):
            self.gradients_leave[rows] -= 1
        for peer, (rows,) in self.spans.get((RECEIVE_KEYS, hop), {}).items():
            (self.keys[rows],) = self.post.pop((SEND_KEYS, hop, peer, self.rank))
            self.keys_come[rows] = 0
        for peer, spans in self.spans.get((RECEIVE_GRADIENTS, hop), {}).items():
            labels, sums = self.post.pop((SEND_GRADIENTS, hop, peer, self.rank))
            begin = 0
            for rows in spans:
                part = slice(begin, begin + rows.stop - rows.start)
                self._add(f"exchange {hop} with rank {peer}", rows, labels[part], sums[part])
                begin = part.stop

    def end(self) -> None:
        kept = self.open & (self.sums > 0)
        kept[: self.local] = False
        self._check("the end", "keeps", slice(0, len(kept)), kept, "with gradients that were not sent")
        own = slice(self.rank * self.local, (self.rank + 1) * self.local)
        wrong = self.sums[: self.local] != self.found[own]
        self._check("the end", "has", slice(0, self.local), wrong, "whose gradients lack a part, or have one twice")

    def _post(self, number: int, when: str) -> None:
        for peer, spans in self.spans.get((SEND_KEYS, number), {}).items():
            for rows in spans:
                self._check(when, "sends", rows, self.keys[rows] == NOTHING, "before their keys have arrived")
                self.keys_leave[rows] += 1
            self.post[SEND_KEYS, number, self.rank, peer] = (np.concatenate([self.keys[rows] for rows in spans]),)
        for spans in self.spans.get((RECEIVE_KEYS, number), {}).values():
            rows = spans[0]
            if len(spans) > 1:
                _refuse(self.rank, when, "receives keys in", spans[1], "apart from the rest of their message")
            used = (self.keys_leave[rows] > 0) | (self.keys_come[rows] > 0)
            self._check(when, "overwrites", rows, used, "while a message sends or writes their keys")
            self.keys[rows], self.keys_come[rows] = NOTHING, 1
        for peer, spans in self.spans.get((SEND_GRADIENTS, number), {}).items():
            for rows in spans:
                self._check(when, "sends", rows, ~self.open[rows], "whose gradients were sent before, or never cleared")
                self.open[rows] = False
                self.gradients_leave[rows] += 1
            parts = [np.concatenate([column[rows] for rows in spans]) for column in (self.of, self.sums)]
            self.post[SEND_GRADIENTS, number, self.rank, peer] = tuple(parts)

    def _add(self, when: str, rows: slice, labels: np.ndarray, sums: np.ndarray | np.uint64) -> None:
        """Gradients for the keys `labels` are added at `rows`."""
        self._check(when, "adds to", rows, ~self.open[rows], "whose gradients were not cleared, or are sent already")
        others = (self.of[rows] != labels) & (self.of[rows] != NOTHING) & (labels != NOTHING)
        self._check(when, "adds to", rows, others, "whose gradients belong to other keys")
        self.of[rows] = np.maximum(self.of[rows], labels)
        self.sums[rows] += sums

    def _check(self, when: str, what: str, rows: slice, wrong: np.ndarray, why: str) -> None:
        if wrong.any():
            first = int(wrong.argmax())
            last = first + int(np.r_[wrong[first:], False].argmin())
            _refuse(self.rank, when, what, slice(rows.start + first, rows.start + last), why)


def _union(start: np.ndarray, stop: np.ndarray) -> list[slice]:
    """Ranges that cover the same rows together, each once."""
    if not len(start):
        return []
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(stop[order])
    head = np.flatnonzero(np.r_[True, start[1:] > reach[:-1]])
    tail = np.r_[head[1:], len(start)] - 1
    return [slice(*ends) for ends in zip(start[head].tolist(), reach[tail].tolist(), strict=True)]


def _refuse(rank: int, when: str, what: str, rows: slice, why: str) -> None:
    raise ValueError(f"rank {rank}, {when}: {what} rows [{rows.start}, {rows.stop}) {why}")
