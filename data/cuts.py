"""Where a text may be cut so that encoding part by part gives the ids that encoding the whole gives.

A pair of characters that no piece of the vocabulary contains is never inside a token: no merge reaches across
it, and merges on one side do not depend on the other side. The text may be cut there, and almost every text
has such a pair every few characters. The proofs for the rest, where a stretch such as a long run of one
character has none, with E(s) for the tokens of s by merges (the best piece first, the leftmost of equal ones):

1. If E(s) has a boundary at p, no merge ever crosses p, so the merges on each side are those of that side
   alone: E(s) = E(s[:p]) + E(s[p:]). The same holds for any part of s between two boundaries.
2. E(u) + E(v) = E(uv) if and only if E(ab) has the boundary between a and b, the last token of E(u) and the
   first of E(v): up to the first merge across, both sides go as they would alone, and such a merge takes
   only a part of a and a part of b, so that it comes, or does not come, in ab as in uv.
3. With pieces of at most L characters, E of a text that goes on after s has a boundary q among the last L
   positions of s, and begins with E(s[:q]) by 1. So a p that is a boundary of E(s[:q]) for each of these q
   is one of the whole text, however it goes on.

Symbols that SentencePiece looks for before it merges (the longest from left to right) change none of this: no
boundary is inside one, from a boundary on they are found as from the start of a text, and p is at least L
characters from the end of s, where one may look shorter than it is.

Best paths (unigram) split at safe pairs as well, up to rounding; in a stretch without one they are cut at a
boundary far before the end of a long window, which costs a piece at most.
"""

import re
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

NEAR = 256  # characters in which a newline is looked for before any other pair: finding one is fastest
FARTHEST = 65_536  # characters in which a pair is looked for; beyond it, boundaries are proved
AHEAD = (1_024, 8_192, 32_768)  # characters after a boundary that is to be proved: the fewest that suffice
_SPAN = 1 << 21  # above all code points

Ends = Callable[[str, bool], list[int]]  # where the tokens of a text (that opens a document) end, ascending


class Cutter(Protocol):
    def cut(self, text: str, start: int, least: int, opening: bool = False) -> int | None:
        """A place for a cut at or after `least`, near it; None where the text as it is has none.

        Text that goes on must be there for FARTHEST characters after `least`: then more of it changes no
        answer but None. `start` is a cut before; `opening`: the text begins a document.
        """


class PairCutter:
    """Cuts at pairs that no piece contains, and at boundaries that are proved where there are none."""

    def __init__(
        self,
        pieces: Iterable[str],
        ends: Ends,
        merges: bool,
        plain: bool = False,
        known: Iterable[str] | None = None,
    ) -> None:
        """
        Args:
            pieces: all that a token may consist of, with spaces as in the text.
            ends: of the tokens of a text that starts at a cut, and of one that opens a document.
            merges: the tokens come from merges, else from best paths.
            plain: cut between visible ASCII characters only, which no normalization of SentencePiece's joins.
            known: single characters that are pieces, where unknown ones that are neighbours become one token.
        """
        pairs, longest = set[int](), 1
        for piece in pieces:
            longest = max(longest, len(piece))
            pairs.update(ord(first) * _SPAN + ord(second) for first, second in zip(piece, piece[1:], strict=False))
        self._pairs = np.array(sorted(pairs) or [0], dtype=np.int64)  # 0: two NULs, which are no text of a piece
        self._known = None if known is None else np.array(sorted(map(ord, known)), dtype=np.int64)
        self._plain, self._ends, self._merges, self._longest = plain, ends, merges, longest
        self._newlines = not plain and known is None and not (self._pairs % _SPAN == ord("\n")).any()

    def cut(self, text: str, start: int, least: int, opening: bool = False) -> int | None:
        if self._newlines and (near := text.find("\n", least, least + NEAR)) >= 0:
            return near
        found = self._first(text, least, least + FARTHEST)
        if found is not None or len(text) <= least + FARTHEST:
            return found
        return self._walk(text, start, least, opening)

    def _safe(self, text: str, start: int, stop: int) -> np.ndarray:
        """bool [stop − start]: whether each position may be cut at; 1 <= start, stop <= len(text)."""
        codes = np.frombuffer(text[start - 1 : stop].encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.int64)
        before, after = codes[:-1], codes[1:]
        keys = before * _SPAN + after
        places = np.searchsorted(self._pairs, keys)
        safe = self._pairs[np.minimum(places, len(self._pairs) - 1)] != keys
        if self._plain:
            safe &= (before > 32) & (before < 127) & (after > 32) & (after < 127)
        if self._known is not None:
            safe &= np.isin(before, self._known) | np.isin(after, self._known)
        return safe

    def _first(self, text: str, start: int, stop: int) -> int | None:
        stop, size = min(stop, len(text)), 64
        while start < stop:
            safe = self._safe(text, start, min(start + size, stop))
            if len(places := np.flatnonzero(safe)):
                return start + int(places[0])
            start, size = start + size, size * 8
        return None

    def _last(self, text: str, start: int, stop: int) -> int:
        """The last position in start+1 … stop−1 that may be cut at, else `start`."""
        size = 64
        while stop > start + 1:
            low = max(start + 1, stop - size)
            if len(places := np.flatnonzero(self._safe(text, low, stop))):
                return low + int(places[-1])
            stop, size = low, min(size * 8, FARTHEST)
        return start

    def _walk(self, text: str, start: int, least: int, opening: bool) -> int | None:
        """From the last safe pair before `least` from boundary to boundary, until one is at `least` or after."""
        here, size = self._last(text, start, least), FARTHEST
        while here < least:
            stop = here + size
            if stop > len(text):
                return None
            boundary = self._boundary(text, here, stop, opening and here == 0)
            if boundary is not None:
                here, size = boundary, FARTHEST
            elif (found := self._first(text, least, here + 2 * size)) is not None:
                return found
            else:
                size *= 2
        return here

    def _boundary(self, text: str, start: int, stop: int, opening: bool) -> int | None:
        """A boundary between start and stop of the tokens of text[start:], however it goes on after stop."""
        ends = [start + end for end in self._ends(text[start:stop], opening)]
        for ahead in AHEAD:
            inside = [end for end in ends if end <= stop - max(ahead, self._longest)]
            if not inside:
                return None
            before, boundary = inside[-2] if len(inside) > 1 else start, inside[-1]
            if not self._merges or self._proved(text, before, boundary, stop, opening and before == 0):
                return boundary
        return None

    def _proved(self, text: str, before: int, boundary: int, stop: int, opening: bool) -> bool:
        """By 2 and 3 above. `before`: where the token that ends at `boundary` starts."""
        lasts = range(max(boundary + 1, stop - self._longest + 1), stop + 1)
        firsts = {boundary + self._ends(text[boundary:last], False)[0] for last in lasts}
        return all(boundary - before in self._ends(text[before:end], opening) for end in firsts)


class RuleCutter:
    """Cuts where a rule (a pattern of no width) finds a place; where none does, after a million characters."""

    LONGEST = 1 << 20

    def __init__(self, rules: Iterable[str]) -> None:
        self._rules = re.compile("|".join(rules))

    def cut(self, text: str, start: int, least: int, opening: bool = False) -> int | None:
        longest = max(start + self.LONGEST, least)
        if match := self._rules.search(text, least, longest):
            return match.start()
        return longest if longest < len(text) else None
