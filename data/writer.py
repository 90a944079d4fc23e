"""Writes token shards, the folders that `data.format` describes: document by document, resumable, durable.

A shard grows in `<folder>.tmp`, by appending only, and is renamed to `<folder>` once everything in it is on the disk.
`mark` says how far each file goes at a moment that is on the disk; a writer that is given a mark cuts the files back to
it and goes on from there, to the same bytes.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import struct
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from data.format import BLOCK_TOKENS, FORMAT, DataError, token_dtype

DIGEST_BYTES = 16  # blake2b of this size, of the text of a document
NPY_HEADER = 128  # bytes before the rows of the .npy files here: numpy leaves room for any number of rows
LONGEST_MEGATRON = (1 << 31) - 1  # tokens of a document, in an index of int32 lengths
_PORTION = 1 << 20  # rows of an index, or bytes, handled at once


class ShardWriter:
    """Writes one shard in constant memory, whatever the number of documents.

    Used as a context: leaving it whole publishes the shard; leaving it by an error removes what was written, unless
    `state` says that it is to be gone on with. A process that is killed leaves only `<folder>.tmp`.

    Args:
        folder: of the shard; must not exist.
        facts: what the manifest is to say of the text: origin, licence.
        state: of an earlier `mark`, to go on from there; {} for a beginning that may be gone on with.

    Attributes:
        num_tokens: written so far, of the document that is being written too.
        num_documents, num_bytes: of documents ended so far; bytes of their text.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        tokenizer_fingerprint: str,
        facts: dict[str, Any] | None = None,
        *,
        state: dict[str, int] | None = None,
    ) -> None:
        if folder.exists():
            raise FileExistsError(f"{folder} exists: a shard is never written over")
        self.folder, self.vocab_size, self.tokenizer_fingerprint = folder, vocab_size, tokenizer_fingerprint
        self.dtype = token_dtype(vocab_size)
        self._facts, self._resumable, state = facts or {}, state is not None, state or {}
        self._begun = bool(state)
        self.num_tokens = state.get("num_tokens", 0)
        self.num_documents = state.get("num_documents", 0)
        self.num_bytes = state.get("num_bytes", 0)
        self._start = state.get("document_start", 0)  # token where the document being written starts
        self._longest = state.get("longest_document", 0)
        self._checksum = state.get("block_checksum", 0)  # of the block that is not full yet
        self._lines_bytes = state.get("lines_bytes", 0)
        self._temporary = folder.with_name(folder.name + ".tmp")

    def __enter__(self) -> Self:
        if not self._begun:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir(parents=True)
        sizes = {
            "tokens.bin": self.num_tokens * self.dtype.itemsize,
            "documents.jsonl": self._lines_bytes,
            "documents.npy": NPY_HEADER + 8 * (self.num_documents + 1),
            "digests.npy": NPY_HEADER + DIGEST_BYTES * self.num_documents,
            "crc.npy": NPY_HEADER + 4 * (self.num_tokens // BLOCK_TOKENS),
        }
        with contextlib.ExitStack() as opened:
            self._files = [opened.enter_context(self._open(name, size)) for name, size in sizes.items()]
            opened.pop_all()
        self._tokens, self._lines, self._offsets, self._digests, self._checksums = self._files
        if not self._begun:
            for file in self._files[2:]:
                file.write(bytes(NPY_HEADER))
            self._offsets.write(bytes(8))
            for path in (self._temporary, self.folder.parent, self.folder.parent.parent):
                sync(path)  # the names: `mark` is of what is in the files
        return self

    def write(self, tokens: np.ndarray) -> None:
        """Appends int [n] tokens to the document being written."""
        if not len(tokens):
            return
        low, high = int(tokens.min()), int(tokens.max())
        assert low >= 0 and high < self.vocab_size, f"token {low if low < 0 else high} of {self.vocab_size} pieces"
        data = memoryview(np.ascontiguousarray(tokens, dtype=self.dtype)).cast("B")
        self._tokens.write(data)
        block, start = BLOCK_TOKENS * self.dtype.itemsize, 0
        while start < len(data):
            filled = self.num_tokens * self.dtype.itemsize % block
            part = data[start : start + block - filled]
            self._checksum = zlib.crc32(part, self._checksum)
            self.num_tokens += len(part) // self.dtype.itemsize
            start += len(part)
            if self.num_tokens % BLOCK_TOKENS == 0:
                self._checksums.write(struct.pack("<I", self._checksum))
                self._checksum = 0

    def end_document(self, name: str, num_bytes: int, digest: bytes = b"", **facts: Any) -> int:
        """Closes the document being written, its end token included, and returns its number of tokens.

        Args:
            name: what people call it.
            num_bytes: UTF-8 bytes of its text, for bits per byte.
            digest: blake2b of 16 bytes over its text; where there was none, its tokens are hashed.
            facts: version, licence and whatever else is known of its source; JSON values.
        """
        num_tokens = self.num_tokens - self._start
        assert num_tokens > 0, f"document {name} has no tokens: it lacks its end token"
        digest = digest or self._hash_tokens()
        assert len(digest) == DIGEST_BYTES, f"a digest of {len(digest)} bytes, not {DIGEST_BYTES}"
        self._digests.write(digest)
        self._offsets.write(struct.pack("<q", self.num_tokens))
        self._start = self.num_tokens
        self._longest = max(self._longest, num_tokens)
        self.num_documents += 1
        self.num_bytes += num_bytes
        line = json.dumps({"name": name, "tokens": num_tokens, "bytes": num_bytes, **facts}).encode() + b"\n"
        self._lines.write(line)
        self._lines_bytes += len(line)
        return num_tokens

    def mark(self) -> dict[str, int]:
        """Puts everything written on the disk, and returns the state that another writer can go on from."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        return {
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "num_bytes": self.num_bytes,
            "document_start": self._start,
            "longest_document": self._longest,
            "block_checksum": self._checksum,
            "lines_bytes": self._lines_bytes,
        }

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for file in self._files:
                with contextlib.suppress(OSError):  # of a full disk, which was told when writing failed
                    file.close()
            if not self._resumable:
                shutil.rmtree(self._temporary, ignore_errors=True)

    def _finish(self) -> None:
        assert self._start == self.num_tokens, "the last document was not ended"
        blocks = -(-self.num_tokens // BLOCK_TOKENS)
        if self.num_tokens % BLOCK_TOKENS:
            self._checksums.write(struct.pack("<I", self._checksum))
        for file, dtype, shape in (
            (self._offsets, "<i8", (self.num_documents + 1,)),
            (self._digests, "<u8", (self.num_documents, DIGEST_BYTES // 8)),
            (self._checksums, "<u4", (blocks,)),
        ):
            file.seek(0)
            file.write(_npy_header(dtype, shape))
        for file in self._files:
            file.close()
        told: bool | str = True
        if self._longest > LONGEST_MEGATRON:
            told = f"the longest document has {self._longest} tokens, tokens.idx holds lengths up to {LONGEST_MEGATRON}"
        else:
            offsets = np.load(self._temporary / "documents.npy", mmap_mode="r")
            _write_megatron_index(self._temporary / "tokens.idx", offsets, self.dtype)
        manifest = {
            "format": FORMAT,
            "dtype": self.dtype.name,
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer_fingerprint,
            "num_documents": self.num_documents,
            "num_tokens": self.num_tokens,
            "num_bytes": self.num_bytes,
            "block_tokens": BLOCK_TOKENS,
            "megatron_index": told,
            **{"origin": None, "licence": None, **self._facts},
            "files": {
                name: {"bytes": (self._temporary / name).stat().st_size, "sha256": _sha256(self._temporary / name)}
                for name in sorted(path.name for path in self._temporary.iterdir() if path.name != "manifest.json")
            },
        }
        write_json(self._temporary / "manifest.json", manifest)
        publish(self._temporary, self.folder)

    def _open(self, name: str, size: int) -> Any:
        """The file with the first `size` bytes that it has, to be appended to."""
        path = self._temporary / name
        if not self._begun:
            return open(path, "w+b", buffering=_PORTION)
        found = path.stat().st_size if path.is_file() else 0
        if found < size:
            raise DataError(f"{path} has {found} of the {size} bytes that were marked")
        file = open(path, "r+b", buffering=_PORTION)
        file.truncate(size)
        file.seek(size)
        return file

    def _hash_tokens(self) -> bytes:
        self._tokens.flush()
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        at, stop = (position * self.dtype.itemsize for position in (self._start, self.num_tokens))
        while at < stop:
            data = os.pread(self._tokens.fileno(), min(_PORTION, stop - at), at)
            digest.update(data)
            at += len(data)
        return digest.digest()


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def put(path: Path, value: Any) -> None:
    """Writes JSON so that the file is whole or not there."""
    temporary = path.with_name(path.name + ".tmp")
    write_json(temporary, value)
    publish(temporary, path)


def publish(temporary: Path, place: Path) -> None:
    """Makes everything under `temporary` durable, then renames it to `place`: whole, or not there at all.

    A file replaces one of that name; a folder does not.
    """
    for path in [*temporary.rglob("*"), temporary] if temporary.is_dir() else [temporary]:
        sync(path)
    os.replace(temporary, place)
    sync(place.parent)


def sync(path: Path) -> None:
    """Puts a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
    assert len(header.getvalue()) == NPY_HEADER, f"numpy writes {len(header.getvalue())} bytes before the rows"
    return header.getvalue()


def _write_megatron_index(path: Path, offsets: np.ndarray, dtype: np.dtype) -> None:
    """Source: NVIDIA/Megatron-LM, core/datasets/indexed_dataset.py. A document is one of its sequences."""
    code = 8 if dtype.itemsize == 2 else 4  # uint16; it has no uint32, and int32 holds the same bits for every id
    n = len(offsets) - 1
    starts = range(0, n, _PORTION)
    with open(path, "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, n, n + 1))
        for start in starts:
            file.write(np.diff(offsets[start : start + _PORTION + 1]).astype("<i4").tobytes())
        for start in starts:
            stop = min(start + _PORTION, n)
            file.write((offsets[start:stop] * dtype.itemsize).astype("<i8").tobytes())
        for start in range(0, n + 1, _PORTION):
            file.write(np.arange(start, min(start + _PORTION, n + 1), dtype="<i8").tobytes())
