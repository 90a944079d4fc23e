"""Sequences become batches: each rank reads the slices that it holds, one step ahead of the model.

Labels are shifted on the whole sequence, before it is split: the last token of a slice has its target on
another rank. Which slices are this rank's, and what attention makes of them, is decided by `take`, handed in
by `train.py`.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch

from data.stream import IGNORE, TokenStream


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
    positions: torch.Tensor  # int64 [B, L]; from 0 at each stretch of a document; padding 0
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

    Sequence of (step s, micro-batch m, data rank d, slot b) is
    first_sequence + ((s * accumulation + m) * data_size + d) * micro_batch_size + b.

    Args:
        stream: where sequences come from; beyond the end of a finite one they are all padding, so that every
            rank takes the same number of batches.
        take: maps the documents of a micro-batch to this rank's chunks of each sequence, and the plan.
        data_rank, data_size: this rank's place on the data axis. Ranks that share a sequence differ in `take`
            only.
        num_steps: steps to yield.
        prefetch: steps to keep ready; at least 1.

    Attributes:
        wait_seconds: time that the consumer has waited for data so far.
    """

    def __init__(
        self,
        stream: TokenStream,
        take: Take,
        *,
        micro_batch_size: int,
        accumulation: int,
        data_rank: int,
        data_size: int,
        first_sequence: int,
        num_steps: int,
        prefetch: int = 2,
    ) -> None:
        self._stream, self._take = stream, take
        self._micro_batch_size, self._accumulation = micro_batch_size, accumulation
        self._data_rank, self._data_size = data_rank, data_size
        self._first_sequence, self._num_steps = first_sequence, num_steps
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
                self._ready.put([self._build(self._sequences(step, micro)) for micro in range(self._accumulation)])
                if self._stop.is_set():
                    return
            self._ready.put(None)
        except (
            BaseException
        ) as error:  # whatever it is, it belongs to the consumer: a thread that dies alone hangs the run
            self._ready.put(error)

    def _sequences(self, step: int, micro: int) -> range:
        slot = ((step * self._accumulation + micro) * self._data_size + self._data_rank) * self._micro_batch_size
        return range(self._first_sequence + slot, self._first_sequence + slot + self._micro_batch_size)

    def _build(self, sequences: range) -> Batch:
        documents = [self._stream.documents(n) for n in sequences]
        chunks, plan = self._take(documents)
        assert len(chunks) == len(sequences), f"take gave chunks for {len(chunks)} of {len(sequences)} sequences"
        shape = len(sequences), sum(chunk.count for chunk in chunks[0])
        tokens, labels, positions = (
            np.zeros(shape, np.int64),
            np.full(shape, IGNORE),
            np.zeros(shape, np.int64),
        )
        for row, n in enumerate(sequences):
            length, at = sum(documents[row]), 0
            assert sum(chunk.count for chunk in chunks[row]) == shape[1], "sequences of a batch differ in local length"
            for chunk in chunks[row]:
                # A chunk with steps reads its whole range by one read, and keeps every step-th token.
                stop = min(chunk.start + (chunk.count - 1) * chunk.step + 1, length)
                if stop > chunk.start:
                    rows = self._stream.labelled(n, chunk.start, stop)
                    held = slice(at, at + (stop - 1 - chunk.start) // chunk.step + 1)
                    tokens[row, held], labels[row, held], positions[row, held] = (part[:: chunk.step] for part in rows)
                at += chunk.count
        valid = int((labels != IGNORE).sum())
        return Batch(*map(torch.from_numpy, (tokens, labels, positions)), plan, valid, documents)
