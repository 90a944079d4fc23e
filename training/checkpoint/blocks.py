"""The files of a checkpoint as bytes: blocks written and summed at once, read ahead and checked. Local, no torch.

A file is one run of bytes with a CRC-32 for each block of `BLOCK_BYTES`. zlib's CRC-32 lets go of Python's lock, as
writing and reading do, so the sums cost no time of their own where there is a second core. A CRC-32 misses one flipped
block in 2^32; it is no signature.
"""

import itertools
import os
import queue
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.checkpoint.files import CheckpointError, open_part

BLOCK_BYTES = 1 << 22
BLOCKS_AHEAD = 8  # in memory at once, of those being written or read
FLUSH_BLOCKS = 16  # after so many the disk is asked to begin: else all of it would wait for the fsync
BUFFERS_A_CALL = 512  # of those that one writev takes; the system's limit is 1024


@dataclass(frozen=True)
class Sums:
    """Bytes of a file, and the CRC-32 of each of its blocks, of which the last may be shorter."""

    bytes: int
    crc32: list[int]


def write_file(path: Path, blocks: Iterable[Sequence[memoryview]]) -> Sums:
    """Writes `blocks` end to end into the new file `path`, and fsyncs it.

    Each block is given as its parts, which must not change meanwhile; all but the last have `BLOCK_BYTES`.

    Raises:
        OSError: where it is there already, or the disk is full or fails.
    """
    sums: list[Future[int]] = []
    written = flushed = 0
    with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(1, "checkpoint sums") as pool:
        descriptor = file.fileno()
        for parts in blocks:
            sums.append(pool.submit(_crc32, parts))
            written += _write_all(descriptor, parts)
            if written - flushed >= FLUSH_BLOCKS * BLOCK_BYTES:
                _begin_writeback(descriptor, flushed, written)
                flushed = written
            if len(sums) > BLOCKS_AHEAD:
                sums[-BLOCKS_AHEAD].result()  # where a copy was made for writing, it is let go now
        os.fsync(descriptor)
        return Sums(written, [crc32.result() for crc32 in sums])


def cut(parts: Iterable[tuple[int, memoryview]]) -> Iterator[list[memoryview]]:
    """Cuts `parts`, each at its position in the file, into blocks; gaps before them are filled with zeros."""
    block: list[memoryview] = []
    filled = end = 0
    for position, part in parts:
        assert position >= end, "parts overlap, or are out of order"
        for piece in (memoryview(bytes(position - end)), part):
            while len(piece):
                head = piece[: BLOCK_BYTES - filled]
                block.append(head)
                filled, piece = filled + len(head), piece[len(head) :]
                if filled == BLOCK_BYTES:
                    yield block
                    block, filled = [], 0
        end = position + len(part)
    if block:
        yield block


def read_blocks(path: Path, sums: Sums, numbers: Iterable[int]) -> Iterator[tuple[int, np.ndarray, bool]]:
    """The blocks of a file with these numbers: number, bytes (uint8, valid until the next is asked for), and whether
    they are what was written. They are read ahead, and summed, in threads.

    Raises:
        OSError: where the file cannot be read.
        CheckpointError: where it ends too soon, or is no regular file.
    """
    free: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
    for _ in range(BLOCKS_AHEAD):
        free.put(np.empty(min(BLOCK_BYTES, sums.bytes), np.uint8))
    ahead: deque[tuple[int, np.ndarray, Future[bool]]] = deque()
    with open_part(path) as file, ThreadPoolExecutor(2, "checkpoint reader") as pool:
        descriptor = file.fileno()

        def read(number: int, buffer: np.ndarray) -> bool:
            _read_exactly(descriptor, memoryview(buffer), number * BLOCK_BYTES, path.name)
            return zlib.crc32(buffer) == sums.crc32[number]

        for number in itertools.chain(numbers, itertools.repeat(None)):
            if number is not None:
                buffer = free.get()[: min(BLOCK_BYTES, sums.bytes - number * BLOCK_BYTES)]
                ahead.append((number, buffer, pool.submit(read, number, buffer)))
                if len(ahead) < BLOCKS_AHEAD:
                    continue
            elif not ahead:
                return
            oldest, buffer, whole = ahead.popleft()
            yield oldest, buffer, whole.result()
            free.put(buffer.base if buffer.base is not None else buffer)


def _crc32(parts: Sequence[memoryview]) -> int:
    crc32 = 0
    for part in parts:
        crc32 = zlib.crc32(part, crc32)
    return crc32


def _write_all(descriptor: int, parts: Sequence[memoryview]) -> int:
    """Writes all of `parts` where the file stands, and returns their bytes."""
    total, waiting = sum(map(len, parts)), deque(parts)
    while waiting:
        written = os.writev(descriptor, list(itertools.islice(waiting, BUFFERS_A_CALL)))
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.popleft())
        if written:
            waiting[0] = waiting[0][written:]
    return total


def _begin_writeback(descriptor: int, start: int, stop: int) -> None:
    """Linux starts to write dirty pages that one says not to need; they stay in the cache until they are clean."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)


def _read_exactly(descriptor: int, buffer: memoryview, position: int, name: str) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], position + done)
        if not count:
            raise CheckpointError(f"{name} ends at byte {position + done}")
        done += count
