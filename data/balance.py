"""Which sequences of a step each data rank takes, and in which micro-batch. No torch here.

A step's sequences cost unequally: attention inside one long document is far more work than inside many short ones. All
data ranks wait for each other in every micro-batch, since each layer's weights are gathered over them, so a micro-batch
lasts as long as its slowest rank. Therefore sequences of like cost share a micro-batch: sorted by cost, each
micro-batch takes the next ones, which makes the sum of the slowest ranks' costs as small as any grouping can (exactly
so for one sequence a rank). Inside a micro-batch, and then between micro-batches, what is heavy goes to who has least
so far, so that the totals of the ranks are even, too.

The step holds the same sequences however they are dealt, so its gradient is the same up to the order of summation.
Every rank deals for itself and all must deal alike: ties go to the lower number.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np

Cost = Callable[[tuple[int, ...]], float]  # of a sequence with documents of these lengths, in any unit


def sequences_of_step(
    documents: Callable[[int], tuple[int, ...]],
    first: int,
    cost: Cost | None,
    *,
    accumulation: int,
    data_size: int,
    micro_batch_size: int,
) -> np.ndarray:
    """The sequences first, first + 1, … of one step, int64 [micro-batch, data rank, slot].

    Args:
        documents: lengths of the documents in a sequence; asked for each once, where there is a cost.
        cost: None = in their own order, slot by slot.
    """
    shape = accumulation, data_size, micro_batch_size
    numbers = np.arange(first, first + accumulation * data_size * micro_batch_size)
    if cost is None:
        return numbers.reshape(shape)
    return first + deal([cost(documents(n)) for n in numbers.tolist()], *shape)


def deal(costs: Sequence[float], accumulation: int, data_size: int, micro_batch_size: int) -> np.ndarray:
    """Deals accumulation x data_size x micro_batch_size costs: their indices, int64 [micro-batch, data rank, slot].

    Micro-batches come heaviest first, so what is too large for a machine shows at once.
    """
    assert len(costs) == accumulation * data_size * micro_batch_size, f"{len(costs)} costs for a step"
    heaviest_first = np.argsort(-np.asarray(costs, np.float64), kind="stable").reshape(accumulation, -1)
    shares = [_shares(group, costs, data_size, micro_batch_size) for group in heaviest_first.tolist()]
    loads = np.array([[sum(costs[i] for i in share) for share in group] for group in shares])
    dealt = np.empty((accumulation, data_size, micro_batch_size), np.int64)
    total = np.zeros(data_size)
    for micro in np.argsort(loads.min(axis=1) - loads.max(axis=1), kind="stable"):  # what is most uneven first
        heaviest, idlest = np.argsort(-loads[micro], kind="stable"), np.argsort(total, kind="stable")
        dealt[micro, idlest] = np.array(shares[micro])[heaviest]
        total[idlest] += loads[micro, heaviest]
    return dealt


def _shares(group: Sequence[int], costs: Sequence[float], ranks: int, size: int) -> list[list[int]]:
    """A micro-batch's indices, heaviest first, as one share of `size` for each rank: each to the lightest share."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for index in group:
        load, rank = heapq.heappop(heap)
        shares[rank].append(index)
        if len(shares[rank]) < size:
            heapq.heappush(heap, (load + costs[index], rank))
    return shares
