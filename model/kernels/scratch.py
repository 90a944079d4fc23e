"""What a kernel allocates while it computes, beyond its operands and what it adds to. No torch here.

A call of `kernel.forward` or `kernel.backward` works launch by launch, and what one launch allocates is given back
before the next one: what counts is the largest. On the CPU these are the very bytes that PyTorch's allocator sees
(tests/unit/test_scratch.py); on CUDA they are what flash-attn's varlen functions allocate
(csrc/flash_attn/flash_api.cpp; PyTorch has the same ones), not measured yet, and the allocator there rounds each of
them up to 512 bytes.
"""

import numpy as np

from model.mask import HOP, K_START, K_STOP, LOWER, Q_START, Q_STOP, UPPER, is_full

CPU_KEYS = 512  # keys of a block of scores in PyTorch's CPU kernel
CPU_ROWS = ((768, 256), (192, 64), (0, 32))  # (from so many query rows on, rows of a block)
ALIGNED = 64  # bytes: of small allocations around it
REFERENCE_ROWS = 512  # `reference.ROW_BLOCK`
WINDOW_ROWS = 256  # `sdpa.ROW_BLOCK`
PADDED_ROWS = 128  # that flash 2 adds to each sequence of dq in float32


def scratch_bytes(
    kernel: str,
    device: str,
    rows: int,
    keys: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_bytes: int,
    *,
    threads: int = 1,
    sequences: int = 1,
    all_rows: int | None = None,
    all_keys: int | None = None,
    gathered: bool = False,
) -> tuple[int, int]:
    """(forward, backward): bytes at the peak of the launch of `rows` query rows × `keys` key rows.

    Heads are those of one call (a gather computes a group of them). threads: of PyTorch on the CPU. sequences: of a
    launch on CUDA. all_rows, all_keys: which the tiles of the hop touch in all: on CPU 16-bit operands are converted as
    a whole. gathered: on CUDA, whether rows and keys do not lie together and are copied.
    """
    heads = num_heads, num_kv_heads, head_dim
    if kernel == "reference":
        return _reference(rows, keys, *heads, element_bytes)
    if device == "cpu":
        return _cpu(rows, keys, *heads, element_bytes, threads, all_rows or rows, all_keys or keys)
    return _flash(rows, keys, *heads, sequences, gathered)


def of_tiles(
    kernel: str,
    device: str,
    tiles: np.ndarray,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_bytes: int,
    threads: int = 1,
) -> tuple[int, int]:
    """(forward, backward): the most that any hop of these tiles, int64[n, 8], allocates.

    On CUDA as if tiles of one kind and hop were one launch, which they are where no query row occurs twice.
    """
    most = [0, 0]
    hops = np.flatnonzero(np.diff(tiles[:, HOP])) + 1
    for of_hop in np.split(tiles, hops) if len(tiles) else ():
        touched = int(np.ptp(of_hop[:, [Q_START, Q_STOP]])), int(np.ptp(of_hop[:, [K_START, K_STOP]]))
        if kernel == "reference":  # whole tiles, some rows at a time
            launches = np.unique(of_hop[:, [Q_STOP, K_STOP]] - of_hop[:, [Q_START, K_START]], axis=0).tolist()
        else:
            launches = _cpu_launches(of_hop) if device == "cpu" else _cuda_launches(of_hop)
        for rows, keys, *more in launches:
            if device == "cpu":
                options = {"threads": threads, "all_rows": touched[0], "all_keys": touched[1]}
            else:
                options = dict(zip(("sequences", "gathered"), more, strict=False))
            sizes = (num_heads, num_kv_heads, head_dim, element_bytes)
            found = scratch_bytes(kernel, device, rows, keys, *sizes, **options)
            most = [max(pair) for pair in zip(most, found, strict=True)]
    return most[0], most[1]


def _cpu(
    rows: int,
    keys: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_bytes: int,
    threads: int,
    all_rows: int,
    all_keys: int,
) -> tuple[int, int]:
    """PyTorch's flash kernel for the CPU: results of a launch, and each thread's block of scores."""
    size = max(4, element_bytes)
    at_rows, at_keys = size * num_heads * head_dim, 2 * size * num_kv_heads * head_dim  # of one row; k and v together
    block_rows = min(rows, next(block for least, block in CPU_ROWS if rows >= least))
    scores = block_rows * min(keys, CPU_KEYS)
    block = threads * size * (scores + block_rows * (2 + head_dim)) + ALIGNED
    lse = size * rows * num_heads
    weight = lse + rows * num_heads  # of the merge, and where no key was seen
    forward = rows * at_rows + lse + max(block, weight)
    backward = rows * at_rows + keys * at_keys + threads * size * (2 * scores + block_rows) + ALIGNED
    if element_bytes < size:  # q, k, v; and dout, out
        forward += all_rows * at_rows + all_keys * at_keys
        backward += 3 * all_rows * at_rows + all_keys * at_keys
    return forward, backward


def _reference(
    rows: int, keys: int, num_heads: int, num_kv_heads: int, head_dim: int, element_bytes: int
) -> tuple[int, int]:
    """Blocks of scores, those of the block before among them."""
    size, block_rows = max(4, element_bytes), min(rows, REFERENCE_ROWS)
    scores, at_rows = size * num_heads * block_rows * keys, size * num_heads * head_dim * block_rows
    hidden = block_rows * keys + 8 * (block_rows + keys)
    forward = 3 * scores + hidden + at_rows + size * num_heads * block_rows
    backward = 5 * scores + hidden
    if element_bytes < size:  # converted, twice: these and those of the block before
        both = 4 * size * num_kv_heads * head_dim * keys
        forward, backward = forward + both + 2 * at_rows, backward + both + 4 * at_rows
    return forward, backward


def _flash(
    rows: int, keys: int, num_heads: int, num_kv_heads: int, head_dim: int, sequences: int, gathered: bool
) -> tuple[int, int]:
    """Flash 2 on CUDA, in 16 bits: results in 16 bits, merged in float32; dq adds up in float32, dk and dv are made for
    each query head before those of a group are summed."""
    at_rows, at_keys = 2 * rows * num_heads * head_dim, 2 * keys * num_kv_heads * head_dim  # one tensor
    lse = 4 * rows * num_heads
    forward = at_rows + 2 * at_rows + lse  # out, and converted
    if gathered:  # q, k, v for the call; then the state before, for the merge
        forward = max(2 * at_rows + 2 * at_keys + lse, 4 * at_rows + 3 * lse + rows * num_heads, forward)
    padded = rows + PADDED_ROWS * sequences
    accumulated = 4 * padded * num_heads * (1 + -(-head_dim // 32) * 32)  # the sums of dout · out too
    expanded = 4 * keys * num_heads * head_dim if num_heads > num_kv_heads else 0
    backward = at_rows + 2 * at_keys + accumulated + expanded + lse
    if gathered:
        backward += 3 * at_rows + 2 * at_keys
    return forward, backward


def _cpu_launches(tiles: np.ndarray) -> list[tuple[int, int]]:
    """(rows, keys) of the largest piece of each tile; see `model.kernels.sdpa.pieces`."""
    rows, keys = tiles[:, Q_STOP] - tiles[:, Q_START], tiles[:, K_STOP] - tiles[:, K_START]
    lower, upper = tiles[:, LOWER], tiles[:, UPPER]
    window = lower > 1 - rows
    at_once = np.where(is_full(rows, keys, lower, upper), keys, np.maximum(upper, keys - upper))
    middle = np.minimum(keys, np.maximum(upper - lower + 1, 3 * WINDOW_ROWS))
    sizes = np.stack((np.where(window, np.minimum(rows, WINDOW_ROWS), rows), np.where(window, middle, at_once)), axis=1)
    return [(int(rows), int(keys)) for rows, keys in np.unique(sizes, axis=0).tolist()]


def _cuda_launches(tiles: np.ndarray) -> list[tuple[int, int, int, bool]]:
    """(rows, keys, sequences, whether they are gathered): what tiles show in full, and their triangles."""
    rows, keys, upper = tiles[:, Q_STOP] - tiles[:, Q_START], tiles[:, K_STOP] - tiles[:, K_START], tiles[:, UPPER]
    full = is_full(rows, keys, tiles[:, LOWER], upper)
    found = []
    for chosen in (full, ~full):
        if not chosen.any():
            continue
        order = np.lexsort((tiles[chosen, K_START], tiles[chosen, Q_START]))
        part = tiles[chosen][order]
        apart = (part[1:, [Q_START, K_START]] != part[:-1, [Q_STOP, K_STOP]]).any()
        once = np.unique(part[:, [Q_START, Q_STOP]], axis=0)
        number = int((once[:, 1] - once[:, 0]).sum())
        found.append((number, int(keys[chosen].sum()), len(once), bool(apart)))
    return found
