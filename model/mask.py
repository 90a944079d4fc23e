"""Who may attend to whom, and how that looks between two runs of tokens. No torch here.

A query at global position p sees a key at position s of the same document iff `0 <= p - s < window`. Take two
runs of tokens of one document, both with the same step between neighbours: whatever the step, the visible
pairs are a *band*

    row i sees column j  iff  i + lower <= j <= i + upper

so layouts never need masks of their own, and nothing here is ever as large as tokens × tokens. All functions
work on numbers and, element by element, on int64 arrays: a plan has up to millions of bands.

Source: arXiv:2311.09431 (striped attention: the strict triangle), generalised to bands.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

HOP, Q_START, Q_STOP, K_START, K_STOP, LOWER, UPPER = range(7)  # columns of a tile in a plan, int64[num_tiles, 8]
UNBOUNDED = 1 << 60  # an offset no band reaches; far from int64's end, so that sums of a few of them stay exact


@dataclass(frozen=True)
class Mask:
    """Causal attention inside each document, optionally over a sliding window.

    `window` counts the token itself: 1 sees only itself, None sees the whole past. Raises ValueError for a
    window < 1.
    """

    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window={self.window} sees nothing: use at least 1 (the token itself), or None for no window"
            )

    @property
    def reach(self) -> int:
        """Number of positions a query can look back on, itself included."""
        return UNBOUNDED if self.window is None else self.window


class Trimmed(NamedTuple):
    """The visible part of a tile, its band relative to its own corner. Empty: row_start == row_stop."""

    row_start: np.ndarray
    row_stop: np.ndarray
    column_start: np.ndarray
    column_stop: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


def band(mask: Mask, query_start, key_start, step):
    """Band `(lower, upper)` between queries at query_start + i·step and keys at key_start + j·step.

    From 0 <= (query_start - key_start) + step·(i - j) < window, solved for j.
    """
    offset = query_start - key_start
    upper = offset // step
    lower = -((mask.reach - 1 - offset) // step)  # ceil((offset - reach + 1) / step)
    return lower, upper


def trim(rows, columns, lower, upper) -> Trimmed:
    """Cut a tile of rows × columns to what its band touches.

    Afterwards every row has a visible column and every column a row that sees it; a band that hides nothing
    is `(-(rows - 1), columns - 1)` exactly. Nothing visible: all ranges are empty.
    """
    row_start = np.maximum(0, -upper)
    row_stop = np.minimum(rows, columns - lower)
    column_start = np.maximum(0, lower)
    column_stop = np.minimum(columns, rows + upper)
    visible = (lower <= upper) & (row_start < row_stop) & (column_start < column_stop)
    row_stop = np.where(visible, row_stop, row_start)
    column_stop = np.where(visible, column_stop, column_start)
    shift = row_start - column_start
    lower = np.maximum(lower + shift, row_start - row_stop + 1)
    upper = np.minimum(upper + shift, column_stop - column_start - 1)
    return Trimmed(row_start, row_stop, column_start, column_stop, lower, upper)


def is_full(rows, columns, lower, upper):
    """Whether the band hides nothing of a tile."""
    return (lower <= 1 - rows) & (upper >= columns - 1)


def visible_pairs(rows, columns, lower, upper):
    """Number of visible pairs of a tile, in closed form."""
    return np.where(lower <= upper, _pairs_up_to(rows, columns, upper) - _pairs_up_to(rows, columns, lower - 1), 0)


def _pairs_up_to(rows, columns, upper):
    """Pairs with 0 <= i < rows, 0 <= j < columns, j <= i + upper: a growing triangle, then full rows."""
    first = np.clip(-upper, 0, rows)  # rows before it see nothing
    full = np.clip(columns - upper - 1, first, rows)  # rows from it on see every column
    shortest, growing = first + upper + 1, full - first
    return growing * shortest + growing * (growing - 1) // 2 + (rows - full) * columns
