"""`tensors.json`: where each tensor's pieces lie, and the sums of the files' blocks. Local, no torch.

It is JSON, read as data, and believed only where it fits itself and the files: pieces inside files of the manifest,
side by side there and in their tensor, and all of the tensor there.
"""

import hashlib
import json
import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import add, gt
from pathlib import Path
from typing import Any, NamedTuple

from training.checkpoint.blocks import BLOCK_BYTES, Sums
from training.checkpoint.files import INDEX, CheckpointError, checked_manifest, read_whole

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2} | {
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
MOST_DIMS = 16


class Piece(NamedTuple):  # there may be a million: it is made faster than a dataclass
    """A box of a tensor, row-major, at `position` of `file`."""

    file: str
    position: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor: `dtype` is a key of DTYPE_BYTES; `pieces` are boxes that together are all of it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def piece_bytes(self, piece: Piece) -> int:
        return math.prod(piece.sizes) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Index:
    """All tensors of a checkpoint by name, and its files' sums by name."""

    tensors: dict[str, Entry]
    files: dict[str, Sums]

    def text(self) -> str:
        """As it is written. A sum is eight hexadecimal digits, those of a file stand end to end."""
        files = {
            name: {"bytes": sums.bytes, "crc32": "".join(f"{crc32:08x}" for crc32 in sums.crc32)}
            for name, sums in sorted(self.files.items())
        }
        tensors = {
            name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "pieces": [(piece.file, piece.position, piece.offsets, piece.sizes) for piece in entry.pieces],
            }
            for name, entry in self.tensors.items()
        }
        return json.dumps({"block_bytes": BLOCK_BYTES, "files": files, "tensors": tensors})

    def in_block(self, file: str, number: int) -> list[str]:
        """Names of the tensors that have bytes in a block of a file."""
        start = number * BLOCK_BYTES
        return [
            name
            for name, entry in self.tensors.items()
            if any(
                piece.file == file
                and piece.position < start + BLOCK_BYTES
                and piece.position + entry.piece_bytes(piece) > start
                for piece in entry.pieces
            )
        ]

    def damage(self, file: str, number: int) -> str:
        """What to say of a block that is not what was written."""
        start = number * BLOCK_BYTES
        names = self.in_block(file, number)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        stop = min(start + BLOCK_BYTES, self.files[file].bytes) - 1
        return (
            f"{file} is not what was written: CRC-32 of bytes {start} to {stop} differs, in "
            f"{', '.join(names[:3]) or 'no tensor'}{more}"
        )


def read_index(path: Path, manifest: dict[str, Any]) -> Index:
    """The index of the checkpoint `path`, whose manifest this is and has been compared with the files' sizes.

    Raises:
        CheckpointError: where it is not what was written, or says what cannot be.
    """
    try:
        content = read_whole(path / INDEX)
        if hashlib.sha256(content).hexdigest() != manifest["files"][INDEX]["sha256"]:
            raise CheckpointError(f"{INDEX} is not what was written (SHA-256 differs)")
        told = json.loads(content)
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{INDEX} cannot be read: {error}") from None
    sizes = {name: facts["bytes"] for name, facts in manifest["files"].items() if name != INDEX}
    try:
        if told["block_bytes"] != BLOCK_BYTES:
            raise _Lie(f"blocks of {told['block_bytes']!r} bytes, not {BLOCK_BYTES}")
        files = {name: _sums(name, facts, sizes) for name, facts in told["files"].items()}
        if missing := sizes.keys() - files.keys():
            raise _Lie(f"no sums of {min(missing)}")
        taken: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
        return Index({name: _entry(name, facts, sizes, taken) for name, facts in told["tensors"].items()}, files)
    except _Lie as lie:
        raise CheckpointError(f"{INDEX} tells what cannot be: {lie}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{INDEX} is not of our format: {type(error).__name__}: {error}") from None


def open_checkpoint(path: Path) -> tuple[dict[str, Any], Index]:
    """Manifest and index of the checkpoint `path`, once its files have the sizes that they tell.

    Raises:
        CheckpointError: where they have not, or either of them is not what was written.
    """
    manifest = checked_manifest(path)
    return manifest, read_index(path, manifest)


class _Lie(Exception):
    """What an index says that cannot be."""


def _sums(name: str, told: dict[str, Any], sizes: dict[str, int]) -> Sums:
    size, digits = told["bytes"], told["crc32"]
    if name not in sizes or size != sizes[name]:
        raise _Lie(f"{name!r} has {size!r} bytes, in the manifest {sizes.get(name, 'it is missing')}")
    if len(digits) != 8 * -(-size // BLOCK_BYTES):
        raise _Lie(f"{name} has {len(digits) // 8} sums for {size} bytes")
    return Sums(size, [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)])


def _entry(name: str, told: dict[str, Any], sizes: dict[str, int], taken: dict[str, list[tuple[int, int]]]) -> Entry:
    """A tensor as it is told; `taken` are the ranges of each file that other pieces have, and gets its own."""
    if not name.isprintable():
        raise _Lie(f"a tensor is called {name!r}")
    dtype, shape = told["dtype"], _natural(told["shape"])
    if dtype not in DTYPE_BYTES:
        raise _Lie(f"{name} is of dtype {dtype!r}")
    pieces = [
        Piece(file, position, _natural(offsets), _natural(extent)) for file, position, offsets, extent in told["pieces"]
    ]
    entry = Entry(dtype, shape, pieces)
    total = 0
    for piece in pieces:
        same_dims = len(piece.offsets) == len(piece.sizes) == len(shape)
        if not same_dims or any(map(gt, map(add, piece.offsets, piece.sizes), shape)):
            raise _Lie(f"a piece of {name}, {list(piece.sizes)} at {list(piece.offsets)}, is not inside of {entry}")
        if piece.file not in sizes:
            raise _Lie(f"a piece of {name} is in {piece.file!r}, which is no file of this checkpoint")
        start, count = piece.position, entry.piece_bytes(piece)
        if type(start) is not int or start < 0 or start + count > sizes[piece.file]:
            raise _Lie(f"a piece of {name}, {count} bytes at {start!r}, is not inside of {piece.file}")
        total += count
        if count:
            _take(taken[piece.file], start, start + count, name, piece.file)
    if total != entry.num_elements * DTYPE_BYTES[dtype]:
        raise _Lie(f"the pieces of {name} are not all of {entry}")
    if (overlap := _overlap(shape, pieces)) is not None:
        raise _Lie(f"pieces of {name} overlap at {list(overlap.offsets)}")
    return entry


def _natural(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list) or len(numbers) > MOST_DIMS:
        raise _Lie(f"{str(numbers)[:40]} is no shape")
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 62:
            raise _Lie(f"{str(numbers)[:40]} is no shape")
    return tuple(numbers)


def _take(ranges: list[tuple[int, int]], start: int, stop: int, name: str, file: str) -> None:
    """Adds a range of bytes to those that are taken, sorted; refuses it where it meets another."""
    at = bisect_left(ranges, (start, stop))
    if (at and ranges[at - 1][1] > start) or (at < len(ranges) and ranges[at][0] < stop):
        raise _Lie(f"{name} shares bytes of {file} with another tensor")
    insort(ranges, (start, stop))


def _overlap(shape: tuple[int, ...], pieces: list[Piece]) -> Piece | None:
    """The first piece that shares an element with another one; a sweep along the dim that is cut most often."""
    if len(pieces) < 2:
        return None
    if not shape:
        return pieces[1]
    dim = max(range(len(shape)), key=lambda dim: len({piece.offsets[dim] for piece in pieces}))
    active: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.offsets[dim]):
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > piece.offsets[dim]]
        for other in active:
            sides = zip(piece.offsets, piece.sizes, other.offsets, other.sizes, strict=True)
            if all(a < b + n and b < a + m for a, m, b, n in sides):
                return piece
        active.append(piece)
    return None
