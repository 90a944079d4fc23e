"""Tokens that take no room: each is its own number, so that a test sees where it is from."""

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from data.stream import Source, Stage, TokenStream


class Numbered:
    """`data.format.Tokens` of documents of these lengths: token i is first + i, uint64.

    Attributes:
        reads: (start, stop) of each read, in order.
    """

    vocab_size, num_bytes, tokenizer = None, None, None

    def __init__(self, lengths: Sequence[int], first: int = 0, where: str = "numbered") -> None:
        self.where, self.first = where, first
        self.offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))])
        self.num_documents, self.num_tokens = len(lengths), int(self.offsets[-1])
        self.fingerprint = f"{where} {self.num_documents} {self.num_tokens} {first}"
        self.reads: list[tuple[int, int]] = []

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start < stop <= self.num_tokens
        self.reads.append((start, stop))
        return np.arange(self.first + start, self.first + stop, dtype=np.uint64)

    def documents(self) -> Iterator[dict]:
        for number, length in enumerate(np.diff(self.offsets).tolist()):
            yield {"name": f"document {number}", "tokens": length}

    def digests(self) -> None:
        return None

    def close(self) -> None:
        pass


def stream_of(lengths: Sequence[int], sequence_length: int, *, seed: int = 0, **policies) -> TokenStream:
    """One source, one stage without end."""
    source = Source("numbered", Numbered(lengths), Fraction(1))
    return TokenStream([source], [Stage(sequence_length, None)], seed=seed, **policies)
