"""Sequences become batches: each rank reads the slices that it holds, one step ahead of the model.

Labels are shifted on the whole sequence, before it is split: the last token of a slice has its target on
another rank. Which slices are this rank's, and what attention makes of them, is decided by `take`, handed in
by `train.py`; which sequences of a step are its data rank's, by `data.balance`.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch

from data.balance import Cost, sequences_of_step
from data.stream import IGNORE, Sequences

PIECE_TOKENS = 65_536  # of a sequence, read at once: no rank has room for a whole one just because it is striped
GAP_TOKENS = 64  # between chunks, read and thrown away sooner than read around: tiny documents of other ranks


class Chunk(Protocol):
    """Global token indices start, start + step, …, `count` of them."""

    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def step(self) -> int: ...


Documents = list[tuple[int, ...]]  # of each sequence, the lengths of its documents
Take = Callable[[Documents], tuple[Sequence[Sequence[Chunk]], Mapping[str, Any]]]


@dataclass
class Batch:
    """One micro-batch, as this rank holds it. Indices beyond a sequence's documents are padding."""

    tokens: torch.Tensor  # int64 [B, L]; padding 0
    labels: torch.Tensor  # int64 [B, L]; the next token of the same document, or -100
    positions: torch.Tensor  # int64 [B, L]; as the stream counts them; padding 0
    plan: Mapping[str, Any]  # what `take` made for attention
    valid_tokens: int  # labels of this rank that are not -100
    documents: Documents  # of the whole sequences, one tuple each

    def to(self, device: torch.device) -> Self:
        """The same batch with its tensors on `device`; the plan stays on the host for the ring."""
        tokens, labels, positions = (
            part.to(device, non_blocking=True) for part in (self.tokens, self.labels, self.positions)
        )
        return replace(self, tokens=tokens, labels=labels, positions=positions)


class Loader:
    """Iterates over steps; each is a list of `accumulation` batches. Reads ahead in a thread of its own.

    A step s takes the accumulation x data_size x micro_batch_size sequences that follow those of step s - 1, from
    `first_sequence` on. Without `cost`, slot b of data rank d in micro-batch m is number
    (m * data_size + d) * micro_batch_size + b of them; with it they are dealt as `data.balance` says.

    Args:
        sequences: where they come from; beyond the end of finite ones all is padding, so that every rank takes
            the same number of batches. Arrays that they return become the batches'.
        take: maps the documents of a micro-batch to this rank's chunks of each sequence, and the plan.
        data_rank, data_size: this rank's place on the data axis. Ranks that share a sequence differ in `take`
            only.
        num_steps: steps to yield.
        cost: of a sequence, by its documents, the same function on all ranks; None = deal by number.
        prefetch: steps to keep ready; at least 1.

    Attributes:
        sequences_per_step: over all data ranks and micro-batches.
        wait_seconds: time that the consumer has waited for data so far.
    """

    def __init__(
        self,
        sequences: Sequences,
        take: Take,
        *,
        micro_batch_size: int,
        accumulation: int,
        data_rank: int,
        data_size: int,
        first_sequence: int,
        num_steps: int,
        cost: Cost | None = None,
        prefetch: int = 2,
    ) -> None:
        assert 0 <= data_rank < data_size, f"data rank {data_rank} of {data_size}"
        self._sequences, self._take, self._cost = sequences, take, cost
        self._sizes = {"accumulation": accumulation, "data_size": data_size, "micro_batch_size": micro_batch_size}
        self.sequences_per_step = accumulation * data_size * micro_batch_size
        self._data_rank, self._first_sequence, self._num_steps = data_rank, first_sequence, num_steps
        self.wait_seconds = 0.0
        self._ready: queue.Queue[list[Batch] | BaseException | None] = queue.Queue(max(1, prefetch))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The next step's batches.

        Raises:
            Whatever the reading thread met, DataError above all.
        """
        if self._stop.is_set():
            raise StopIteration
        began = time.perf_counter()
        step = self._ready.get()
        self.wait_seconds += time.perf_counter() - began
        if isinstance(step, list):
            return step
        self.close()
        if step is None:
            raise StopIteration
        raise step

    def close(self) -> None:
        """Ends the reading thread and returns once it is gone. May be called twice."""
        self._stop.set()
        while self._thread.is_alive():
            while not self._ready.empty():  # makes room for the thread's last put
                self._ready.get_nowait()
            self._thread.join(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _work(self) -> None:
        try:
            for step in range(self._num_steps):
                documents = cache(self._sequences.documents)  # dealing and building ask for the same ones
                dealt = sequences_of_step(
                    documents, self._first_sequence + step * self.sequences_per_step, self._cost, **self._sizes
                )
                self._ready.put([self._build(numbers, documents) for numbers in dealt[:, self._data_rank].tolist()])
                if self._stop.is_set():
                    return
            self._ready.put(None)
        except (
            BaseException
        ) as error:  # whatever it is, it belongs to the consumer: a thread that dies alone hangs the run
            self._ready.put(error)

    def _build(self, numbers: Sequence[int], documents_of: Callable[[int], tuple[int, ...]]) -> Batch:
        documents = [documents_of(n) for n in numbers]
        chunks, plan = self._take(documents)
        assert len(chunks) == len(numbers), f"take gave chunks for {len(chunks)} of {len(numbers)} sequences"
        rows = [self._row(n, *held) for n, *held in zip(numbers, chunks, map(sum, documents), strict=True)]
        assert len({len(row[0]) for row in rows}) == 1, "sequences of a batch differ in local length"
        parts = [part[0][None] if len(part) == 1 else np.stack(part) for part in zip(*rows, strict=True)]
        valid = int(np.count_nonzero(parts[1] != IGNORE))
        return Batch(*map(torch.from_numpy, parts), plan, valid, documents)

    def _row(self, n: int, chunks: Sequence[Chunk], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, labels and positions of the chunks of sequence n, whose documents have `length` tokens; int64 [L]."""
        local = sum(chunk.count for chunk in chunks)
        ranges = reads(chunks, length)
        if len(ranges) == 1 and ranges[0][2] == [(slice(0, local), slice(0, local, 1))]:
            return self._sequences.labelled(n, *ranges[0][:2])  # nothing to gather: no copy
        row = np.zeros(local, np.int64), np.full(local, IGNORE), np.zeros(local, np.int64)
        for start, stop, parts in ranges:
            for whole, held in zip(self._sequences.labelled(n, start, stop), row, strict=True):
                for at, inside in parts:
                    held[at] = whole[inside]
        return row


def reads(chunks: Sequence[Chunk], length: int) -> list[tuple[int, int, list[tuple[slice, slice]]]]:
    """Ranges of a sequence of `length` tokens to read for a rank's chunks, in order.

    Each is (start, stop, parts) with parts of (where they belong among the tokens that the rank holds, which tokens
    of the range those are). A chunk without steps is read at once, since the rank has room for it; one with steps in
    ranges of PIECE_TOKENS at most; chunks less than GAP_TOKENS apart share such a range.
    """
    pieces = []  # (start, stop, step, where the first token belongs)
    at = 0
    for chunk in chunks:
        count = max(0, min(chunk.count, -((chunk.start - length) // chunk.step)))  # without padding
        most = max(1, PIECE_TOKENS // chunk.step if chunk.step > 1 else count)
        for done in range(0, count, most):
            start = chunk.start + done * chunk.step
            stop = start + (min(most, count - done) - 1) * chunk.step + 1
            pieces.append((start, stop, chunk.step, at + done))
        at += chunk.count
    ranges: list[tuple[int, int, list[tuple[slice, slice]]]] = []
    for start, stop, step, at in sorted(pieces):
        joins = ranges and start - ranges[-1][1] < GAP_TOKENS and stop - ranges[-1][0] <= PIECE_TOKENS
        first, last, parts = ranges.pop() if joins else (start, start, [])
        held = slice(at, at + (stop - start - 1) // step + 1)
        parts.append((held, slice(start - first, stop - first, step)))
        ranges.append((first, max(stop, last), parts))
    return ranges
