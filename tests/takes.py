"""Which tokens a rank takes of a sequence, written for the tests of data: no code of `parallel` is theirs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Tokens start, start + step, …, `count` of them."""

    start: int
    count: int
    step: int = 1


def contiguous(length, ranks, rank):
    return (Piece(rank * length // ranks, length // ranks),)


def zigzag(length, ranks, rank):
    half = length // ranks // 2
    return Piece(rank * half, half), Piece((2 * ranks - 1 - rank) * half, half)


def striped(length, ranks, rank):
    return (Piece(rank, length // ranks, ranks),)
