"""Tokens that Megatron-LM's preprocessing made: a pair of files PREFIX.bin, PREFIX.idx, read as they are.

Its format says neither whose ids these are nor what they must sum up to: files of a wrong size are found, and ids that
the model does not have, but not a changed id. Source: NVIDIA/Megatron-LM, core/datasets/indexed_dataset.py.
"""

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from data.storage import DataError, Storage, read_whole, sha256

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, sequences, entries of the document index
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
SAMPLES = 16  # stretches of PREFIX.bin whose bytes the fingerprint covers
SAMPLE_BYTES = 1 << 16


class Megatron:
    """An open pair; `data.format.Tokens` says what it offers. Documents without tokens are passed by.

    Attributes:
        stored, dtype: of ids in the file, and as `read` returns them.
        limit: ids must be below it, where it is not None.
    """

    num_bytes = vocab_size = tokenizer = None  # which its files do not say

    def __init__(
        self, storage: Storage, prefix: str, stored: np.dtype, bounds: np.ndarray, fingerprint: str, limit: int | None
    ) -> None:
        self.storage, self.prefix, self.stored, self.fingerprint = storage, prefix, stored, fingerprint
        self.where = f"{storage.where}/{prefix}"
        self.offsets = np.unique(bounds)
        self._numbers = np.flatnonzero(np.diff(bounds))  # of documents, in the files
        self.num_tokens, self.num_documents = int(self.offsets[-1]), len(self.offsets) - 1
        self.dtype = np.dtype("<u2") if stored.itemsize <= 2 else np.dtype("<u4")
        self.limit = limit

    def documents(self) -> Iterator[dict[str, Any]]:
        """Name (its number in the files), tokens and bytes (unknown) of each document."""
        for number, start, stop in zip(self._numbers, self.offsets, self.offsets[1:], strict=False):
            yield {"name": f"{self.prefix}:{number}", "tokens": int(stop - start), "bytes": None}

    def digests(self) -> None:
        """Unknown."""
        return None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop - 1 as `dtype` [stop - start].

        Raises:
            DataError: where the file ends early.
            ValueError: where an id is none of the model's.
        """
        assert 0 <= start <= stop <= self.num_tokens, f"tokens {start} to {stop} of {self.num_tokens}"
        ids = np.empty(stop - start, dtype=self.stored)
        if not len(ids):
            return ids.astype(self.dtype)
        self.storage.read_into(f"{self.prefix}.bin", start * self.stored.itemsize, memoryview(ids.view(np.uint8)))
        low, high = int(ids.min()), int(ids.max())
        limit = 1 << 32 if self.limit is None else self.limit
        if low < 0 or high >= limit:
            at = start + int(np.argmax((ids < 0) | (ids >= limit)))
            document = self._numbers[np.searchsorted(self.offsets, at, side="right") - 1]
            bound = "32 bits" if self.limit is None else f"model.vocab_size={limit}"
            raise ValueError(
                f"{self.where}.bin has id {ids[at - start]} in document {document}, beyond {bound}: use the "
                "model.vocab_size of the tokenizer that these files were made with"
            )
        return ids.view(self.dtype) if ids.itemsize == self.dtype.itemsize else ids.astype(self.dtype)

    def close(self) -> None:
        """Lets go of open files. Reading opens them again."""
        self.storage.close()


def open_megatron(storage: Storage, prefix: str, limit: int | None = None) -> Megatron:
    """Opens PREFIX.bin and PREFIX.idx in a folder.

    Args:
        storage: the folder; it is pinned to this pair, so that another pair in it needs one of its own.
        limit: the model's vocabulary: ids must be below it.

    Raises:
        DataError: where one is missing, or they do not fit each other.
    """
    path = f"{storage.where}/{prefix}.idx"
    size, data = storage.size(f"{prefix}.bin"), read_whole(storage, f"{prefix}.idx")
    if data is None or size is None:
        raise DataError(f"{storage.where}/{prefix}.{'idx' if data is None else 'bin'} is missing: copy both files")
    stored, lengths, pointers, documents = parse_index(path, data)
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    if size != total * stored.itemsize:
        raise DataError(
            f"{storage.where}/{prefix}.bin has {size} bytes, its index expects {total * stored.itemsize} "
            f"({total} tokens of {stored.name}): copy both files again"
        )
    if (lengths < 0).any() or (pointers != (ends - lengths) * stored.itemsize).any():
        raise DataError(f"{path} has sequences that do not lie end to end, which are not read: write these files anew")
    if documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
        raise DataError(f"{path} has a document index that does not fit its {len(lengths)} sequences: copy it again")
    bounds = np.concatenate([[0], ends])[documents]
    fingerprint = _fingerprint(storage, f"{prefix}.bin", size, data)  # of what lies there now, in no cache yet
    storage.pin(fingerprint, {f"{prefix}.bin": size})
    return Megatron(storage, prefix, stored, bounds, fingerprint, limit)


def parse_index(path: str, data: bytes) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """What a .idx file says: dtype of ids, length and byte pointer of each sequence, first sequence of each document.

    Raises:
        DataError: where it is no such file, or of another version, dtype or size.
    """
    if len(data) < HEADER.size or data[:9] != MAGIC:
        raise DataError(f"{path} is no Megatron index: it begins with {bytes(data[:9])!r}, not {MAGIC!r}")
    _, version, code, num_sequences, num_documents = HEADER.unpack_from(data)
    if version != 1:
        raise DataError(f"{path} has version {version}, only 1 is read: write these files anew")
    if code not in DTYPES or DTYPES[code] in ("<f8", "<f4"):
        raise DataError(f"{path} has dtype code {code}, which is none of whole numbers: 1 to 5 or 8")
    expected = HEADER.size + num_sequences * 12 + num_documents * 8
    if len(data) != expected or not num_documents:
        raise DataError(
            f"{path} has {len(data)} bytes, {expected} are expected of {num_sequences} sequences and a document index "
            f"of {num_documents}: it was truncated, or holds modes of several media, which are not read"
        )
    lengths = np.frombuffer(data, dtype="<i4", count=num_sequences, offset=HEADER.size)
    pointers = np.frombuffer(data, dtype="<i8", count=num_sequences, offset=HEADER.size + num_sequences * 4)
    documents = np.frombuffer(data, dtype="<i8", count=num_documents, offset=HEADER.size + num_sequences * 12)
    return np.dtype(DTYPES[code]), lengths, pointers, documents


def _fingerprint(storage: Storage, name: str, size: int, index: bytes) -> str:
    """Names the content: of the index all, of the tokens some stretches, as reading all of them takes long."""
    parts = [sha256(index)]
    last = max(0, size - SAMPLE_BYTES)
    for start in sorted({last * sample // (SAMPLES - 1) for sample in range(SAMPLES)}):
        data = bytearray(min(SAMPLE_BYTES, size - start))
        storage.read_into(name, start, memoryview(data))
        parts.append(sha256(data))
    return sha256(" ".join(parts).encode())[:16]
