"""What one pass over a plan keeps in the ring's pool, storage by storage, before there is any. No torch here.

`parallel.traffic` takes these storages, by these names and of these sizes, whatever the route: tests hold one against
the other. So a pool that is made of all plans of a run is large enough for each of its passes, and no larger.
"""

from collections.abc import Iterable

import numpy as np

from parallel.messages import EXCHANGE, KIND, PEER, RECEIVE_GRADIENTS, SEND_GRADIENTS, SEND_KEYS, START, STOP
from parallel.schedule import (
    BUFFER_ROWS,
    DEPTH,
    HEAD_GROUPS,
    LOCAL_LENGTH,
    NARROW,
    NUM_MESSAGES,
    NUM_RANKS,
    NUM_SEQUENCES,
    message_rows,
)  # fmt: skip

KEYS, GRADIENTS = "keys", "gradients"  # the arena: the rank's own rows, then buffers
OWN_KEYS, OWN_GRADIENTS = "own keys", "own gradients"  # of a gather: this rank's part, by groups of heads
ACCUMULATED = "out, dq"  # forward adds up the one, backward the other, never both at once


def leaving(kind: int, place: int) -> str:
    """Where messages are packed that cannot be sent as they lie in the arena."""
    return f"leaving {kind} {place}"


def arriving(place: int) -> str:
    """Where gradients arrive before they are added."""
    return f"arriving {place}"


def pool_bytes(
    plans: Iterable[np.ndarray], num_heads: int, num_kv_heads: int, head_dim: int, element_bytes: int
) -> dict[str, int]:
    """Bytes of each storage that forward and backward passes over these plans of one rank take, by its name.

    Heads are those that the ring sees: of one rank, inside of tensor and Ulysses ranks. element_bytes: of q, k and v.
    Plans share storages: of each name there is one, as large as the largest. What is computed in 16 bits is added up
    here in float32; where results have the dtype in which they are added up, they are new tensors, and none of these.
    """
    sizes: dict[str, int] = {}
    for plan in plans:
        for name, size in _of_plan(plan, num_heads, num_kv_heads, head_dim, element_bytes).items():
            sizes[name] = max(size, sizes.get(name, 0))
    return sizes


def ulysses_bytes(
    tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, element_bytes: int, degree: int
) -> dict[str, int]:
    """Bytes that each exchange of Ulysses allocates at its peak beyond its operands and results, by the op's name.

    Of `tokens` tokens of a rank, all of their num_heads and num_kv_heads. What is sent is packed, what arrives is
    unpacked: one message at a time is there beside the results. They are in no pool.
    """
    if degree == 1:
        return {}
    row = tokens * head_dim * element_bytes  # of one head
    copied = max(num_kv_heads, degree)  # key/value heads as they are sent: fewer than ranks are sent several times
    out, keys = num_heads * row, 2 * copied * row
    summed = 0
    if copied > num_kv_heads:  # gradients of the copies add up, in 16 bits once all are float32 (CUDA needs no copy)
        summed = num_kv_heads * row
        if element_bytes < 4:
            summed = 4 * tokens * head_dim * (copied + num_kv_heads) - num_kv_heads * row
        summed = max(summed, keys - 2 * num_kv_heads * row)  # of the message as much is no result
    both = {"to_tokens": out, "to_tokens_backward": out}
    return {"to_heads": out + keys, "to_heads_backward": out + keys + summed} | both


def _of_plan(plan: np.ndarray, num_heads: int, num_kv_heads: int, head_dim: int, element_bytes: int) -> dict[str, int]:
    rows, groups = int(plan[0, NUM_SEQUENCES] * plan[0, LOCAL_LENGTH]), int(plan[1, HEAD_GROUPS])
    keys = 2 * num_kv_heads * head_dim * element_bytes  # of one row
    gradients = 2 * num_kv_heads * head_dim * max(4, element_bytes)
    sizes = {ACCUMULATED: 4 * rows * num_heads * head_dim} if element_bytes < 4 else {}
    if groups:
        gathered = 2 * rows * int(plan[0, NUM_RANKS])  # two groups of heads at a time
        sizes |= {KEYS: gathered * (keys // groups), OWN_KEYS: rows * keys}
        sizes |= {GRADIENTS: gathered * (gradients // groups), OWN_GRADIENTS: rows * gradients}
    elif plan[0, NUM_MESSAGES]:
        arena = rows + int(plan[0, BUFFER_ROWS])
        sizes |= {KEYS: arena * keys, GRADIENTS: arena * gradients}
        sizes |= _of_messages(plan, keys, gradients)
    elif element_bytes < 4:  # a rank that nobody gives anything has its own gradients to add up
        sizes[GRADIENTS] = rows * gradients
    return sizes


def _of_messages(plan: np.ndarray, key_bytes: int, gradient_bytes: int) -> dict[str, int]:
    """Storages beside the arena, for rows of key_bytes and gradient_bytes: each for one exchange at a time."""
    table, depth = message_rows(plan), int(plan[0, DEPTH])
    wire_bytes = key_bytes if plan[1, NARROW] else gradient_bytes
    messages, of, spans = np.unique(table[:, [KIND, EXCHANGE, PEER]], axis=0, return_inverse=True, return_counts=True)
    rows = np.bincount(of.reshape(-1), table[:, STOP] - table[:, START], len(messages)).astype(np.int64)
    kind, exchange, _ = messages.T
    several = spans > 1  # what lies in one piece is sent as it lies, where it has the dtype of the wire
    packed = several | (wire_bytes != gradient_bytes)
    sizes: dict[str, int] = {}
    for name, chosen, row_bytes in (
        (lambda place: leaving(SEND_KEYS, place), (kind == SEND_KEYS) & several, key_bytes),
        (lambda place: leaving(SEND_GRADIENTS, place), (kind == SEND_GRADIENTS) & packed, wire_bytes),
        (arriving, kind == RECEIVE_GRADIENTS, wire_bytes),
    ):
        together = np.bincount(exchange[chosen], rows[chosen]).astype(np.int64)  # rows of each exchange
        for number in np.flatnonzero(together).tolist():
            place = name(number % depth)
            sizes[place] = max(int(together[number]) * row_bytes, sizes.get(place, 0))
    return sizes
