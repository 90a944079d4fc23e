"""How much each rank of a ring has to compute with the block of each other, in closed form. No torch here."""

import numpy as np

from model.mask import Mask, visible_pairs
from parallel.layout import Layout
from parallel.schedule import Documents, meetings


def work(layout: Layout, documents: Documents, mask: Mask, granularity: int = 1) -> np.ndarray:
    """What rank r has to compute with the block of rank o, in pairs: float64[R, R], whole numbers.

    Kernels leave out squares of `granularity` queries × keys in which nothing is visible, and compute all others in
    full: what counts are the pairs in these, where each part of a document in a chunk begins with a new square. With
    granularity=1 they are the visible pairs.
    """
    if layout.step > 1:
        return _striped_work(layout, documents, mask, granularity)
    parts, ranks = meetings(layout, documents), layout.ranks
    start, end = (layout.start[parts.chunk] + rows for rows in (parts.first, parts.last))
    rank = layout.rank[parts.chunk]
    own = np.bincount(rank, squares(end - start, end - start, 1 - mask.reach, 0, granularity), ranks)
    # Queries also see parts of their document before their own: some cut by the window, then all others in full.
    several = np.bincount(parts.document, minlength=len(documents.start))[parts.document] > 1
    order = np.lexsort((start, parts.document))
    order = order[several[order]]
    start, end, rank, document = start[order], end[order], rank[order], parts.document[order]
    index, line = np.arange(len(order)), document * (layout.padded_length + 1)  # of documents end to end
    full = np.minimum(index, np.searchsorted(line + start, line + np.maximum(0, end - mask.reach)))
    cut = np.minimum(full, np.searchsorted(line + end, line + np.maximum(1, start - mask.reach + 2)))
    rows = -(-(end - start) // granularity) * granularity
    before = np.zeros((len(index) + 1, ranks))
    before[index + 1, rank] = rows
    np.cumsum(before, axis=0, out=before)
    number = full - cut
    q, k = np.repeat(index, number), np.arange(number.sum()) + np.repeat(cut - np.cumsum(number) + number, number)
    upper = start[q] - start[k]
    pairs = squares(end[q] - start[q], end[k] - start[k], upper - mask.reach + 1, upper, granularity)
    some = np.bincount(rank[q] * ranks + rank[k], pairs, ranks * ranks).reshape(ranks, ranks)
    seen = before[:-1] - before[full]
    seen *= rows[:, None]
    total, order = np.diag(own) + some, np.argsort(rank, kind="stable")
    busy, heads = np.unique(rank[order], return_index=True)
    if len(busy):
        total[busy] += np.add.reduceat(seen[order], heads)
    return total


def _striped_work(layout: Layout, documents: Documents, mask: Mask, granularity: int) -> np.ndarray:
    """Rank r holds the tokens r, r + R, …: its query number i of a document sees the keys 0 … i of rank o where o comes
    before r, or is r, counted from the rank of the document's first token; else 0 … i - 1: in both cases a triangle.
    """
    ranks = layout.ranks
    assert layout.step == ranks and (layout.start == layout.rank).all(), "not striped"
    begins, (count, rest) = documents.start % ranks, np.divmod(documents.stop - documents.start, ranks)
    r, o = np.arange(ranks)[:, None], np.arange(ranks)
    total = np.zeros((ranks, ranks))
    for further in (0, 1):  # the window reaches one key further in the ranks just before
        reach = mask.reach // ranks + further
        if reach == 0:
            continue
        fewer, same, more = (
            squares(n, n, 1 - reach, 0, granularity) for n in (np.maximum(0, count - 1), count, count + 1)
        )
        first, second = _by_rank(begins, rest, same, more, ranks), _by_rank(begins, rest, fewer, same, ranks)
        # Rank o comes second where the document begins on one of the ranks o + 1 … r.
        upto = np.vstack([np.zeros(ranks), np.cumsum(first - second, axis=0)])
        lost = upto[r + 1, r] - upto[o + 1, r] + np.where(o > r, upto[ranks, r], 0)
        here = ((r - o) % ranks < mask.reach % ranks) == bool(further)
        total += np.where(here, first.sum(axis=0)[:, None] - lost, 0)
    return total


def _by_rank(begins: np.ndarray, rest: np.ndarray, value: np.ndarray, longer: np.ndarray, ranks: int) -> np.ndarray:
    """Sums over the documents that begin on rank a, float64[a, rank]: of `longer` on `rest` ranks from a on, of `value`
    on the others."""
    base = np.bincount(begins, value, ranks)
    more = np.bincount(begins * ranks + rest, longer - value, ranks * ranks).reshape(ranks, ranks)
    ahead = np.cumsum(more[:, ::-1], axis=1)[:, ::-1] - more  # of documents with a larger rest
    a, rank = np.arange(ranks)[:, None], np.arange(ranks)
    return base[:, None] + ahead[a, (rank - a) % ranks]


def squares(rows, columns, lower, upper, granularity: int) -> np.ndarray:
    """Pairs in the squares that a band touches in a tile, int64[…]; see `model.mask.visible_pairs`."""
    low, up = -(-(lower + 1) // granularity) - 1, (upper + granularity - 1) // granularity
    squares = visible_pairs(-(-rows // granularity), -(-columns // granularity), low, up)
    return squares * granularity**2
