"""Whose turn it is: the source of each sequence of a stage, exactly by shares, found at once for any sequence."""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

MOST_TURNS = 1 << 20  # of one period; a table of it is kept
ROUNDED = 1 << 16  # turns of a period where shares of tokens have no small common denominator


class Turns:
    """Sequences of several sources in turn, by shares.

    Of the first n sequences source s has fewer than one more or less than n * share[s] for every n: with k sources
    less than 1 - 1 / (2k - 2). So of any stretch of sequences, wherever it begins, it has its share to within one
    sequence with two sources, and to within less than two with more (one is not possible for three and more).

    Args:
        shares: of sequences, exact, summing to 1, each above 0.
    """

    def __init__(self, shares: Sequence[Fraction]) -> None:
        assert sum(shares) == 1 and min(shares) > 0, f"shares {shares}"
        period = math.lcm(*(share.denominator for share in shares))
        assert period <= MOST_TURNS, f"{period} turns: `check_shares` comes first"
        self._counts = tuple(int(share * period) for share in shares)
        self._sources, self._before = _period(self._counts)

    def turn(self, n: int) -> tuple[int, int]:
        """The source of sequence n, and which of that source's sequences it is."""
        periods, at = divmod(n, len(self._sources))
        source = int(self._sources[at])
        return source, periods * self._counts[source] + int(self._before[at])

    def counts(self, n: int) -> list[int]:
        """How many of the first n sequences are of each source."""
        periods, at = divmod(n, len(self._sources))
        part = np.bincount(self._sources[:at], minlength=len(self._counts))
        return [periods * count + int(more) for count, more in zip(self._counts, part, strict=True)]


@lru_cache(maxsize=8)
def _period(counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The source of each turn of one period, and how many turns of that source came before it; int64.

    A source may take a turn once it would not be too early for its share; of those it goes to the one that would be
    too late soonest. All numbers are multiples of 1 / (period * slack), so nothing is rounded.

    Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980).
    """
    period, slack = sum(counts), max(2 * len(counts) - 2, 1)
    taken, sources, before = [0] * len(counts), np.empty(period, np.int64), np.empty(period, np.int64)
    for at in range(period):
        chosen, soonest, of = -1, 0, 1
        for source, count in enumerate(counts):
            behind = slack * (count * (at + 1) - period * taken[source])
            if behind >= period or len(counts) == 1:
                late = (slack - 1) * period - behind  # over its count: how many turns it can still wait
                if chosen < 0 or late * of < soonest * count:
                    chosen, soonest, of = source, late, count
        assert chosen >= 0, "one of the sources is always due"
        sources[at], before[at] = chosen, taken[chosen]
        taken[chosen] += 1
    return sources, before


def check_shares(shares: Sequence[Fraction]) -> None:
    """Refuses shares whose turns would not fit a table.

    Raises:
        ValueError: naming the common denominator and shares near by that do.
    """
    period = math.lcm(*(share.denominator for share in shares))
    if period > MOST_TURNS:
        near = ", ".join(str(share) for share in rounded(shares, 10_000))
        raise ValueError(
            f"data.mixture: the shares {', '.join(map(str, shares))} have the common denominator {period}, the most is "
            f"{MOST_TURNS}: use for example {near}"
        )


def by_fill(shares: Sequence[Fraction], fills: Sequence[Fraction]) -> list[Fraction]:
    """Shares of sequences with which the *tokens* have their shares, where only a part of each sequence is filled.

    Exact where all fills are equal, else rounded to 1 / 65536 (never to none).
    """
    if len(set(fills)) == 1:
        return list(shares)
    sequences = [share / fill for share, fill in zip(shares, fills, strict=True)]
    total = sum(sequences)
    return rounded([part / total for part in sequences], ROUNDED)


def rounded(shares: Sequence[Fraction], denominator: int) -> list[Fraction]:
    """Shares of this denominator that sum to 1, each above 0, by largest remainders."""
    whole = [max(1, int(share * denominator)) for share in shares]
    missing = denominator - sum(whole)
    order = sorted(range(len(shares)), key=lambda source: (whole[source] - shares[source] * denominator, source))
    for source in order[: max(missing, 0)]:
        whole[source] += 1
    whole[whole.index(max(whole))] += min(missing, 0)  # those that had none got one
    return [Fraction(count, denominator) for count in whole]
