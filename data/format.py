"""The token shard: raw tokens, document index, block checksums, manifest; positioned reads and the writer.

A shard is a folder that either stands whole under its name or not at all:

    tokens.bin       little-endian uint16 (uint32 where the vocabulary needs it), documents end to end
    documents.npy    int64 [n + 1], the token where each document starts, and the number of tokens
    documents.jsonl  one line a document: name, tokens, bytes of text, and what is known of its source
    crc.npy          uint32, zlib.crc32 of each block of 65,536 tokens
    tokens.idx       the index that Megatron-LM reads, unless a document exceeds its int32 lengths
    manifest.json    written last: dtype, vocabulary, tokenizer fingerprint, totals, sizes and hashes of files
"""

import hashlib
import json
import os
import shutil
import struct
import weakref
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

FORMAT = 1
BLOCK_TOKENS = 65_536
HEAL = "run `python -m data.prepare` with this run's data settings"


class DataError(OSError):
    """Prepared data that is missing, truncated or corrupt; the message names the path and how to heal it."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype that holds ids 0 .. vocab_size - 1: uint16 up to 65,536 pieces, uint32 beyond."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class ShardWriter:
    """Writes one shard, document by document, in constant memory (8 bytes a document and 4 a block).

    Used as a context: leaving it whole renames `<folder>.tmp` to `<folder>`; leaving it by an error removes
    what was written. A process that is killed leaves only `<folder>.tmp`, which the next writer of that
    folder clears away.
    """

    def __init__(self, folder: Path, vocab_size: int, tokenizer_fingerprint: str) -> None:
        if folder.exists():
            raise FileExistsError(f"{folder} exists: a shard is never written over")
        self.folder, self.vocab_size, self.tokenizer_fingerprint = folder, vocab_size, tokenizer_fingerprint
        self.dtype = token_dtype(vocab_size)
        self.num_bytes = 0
        self._temporary = folder.with_name(folder.name + ".tmp")
        self._offsets = array("q", [0])
        self._position = 0
        self._checksums = array("L")
        self._checksum = 0
        self._digest = hashlib.sha256()

    def __enter__(self) -> Self:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        self._tokens = open(self._temporary / "tokens.bin", "wb", buffering=1 << 20)
        self._lines = open(self._temporary / "documents.jsonl", "w", encoding="utf-8")
        return self

    def write(self, tokens: np.ndarray) -> None:
        """Appends int [n] tokens to the document being written."""
        if not len(tokens):
            return
        low, high = int(tokens.min()), int(tokens.max())
        assert low >= 0 and high < self.vocab_size, f"token {low if low < 0 else high} of {self.vocab_size} pieces"
        data = memoryview(np.ascontiguousarray(tokens, dtype=self.dtype)).cast("B")
        self._tokens.write(data)
        self._digest.update(data)
        block, start = BLOCK_TOKENS * self.dtype.itemsize, 0
        while start < len(data):
            filled = self._position * self.dtype.itemsize % block
            part = data[start : start + block - filled]
            self._checksum = zlib.crc32(part, self._checksum)
            self._position += len(part) // self.dtype.itemsize
            start += len(part)
            if self._position % BLOCK_TOKENS == 0:
                self._checksums.append(self._checksum)
                self._checksum = 0

    def end_document(self, name: str, num_bytes: int, **facts: Any) -> int:
        """Closes the document being written, its end token included, and returns its number of tokens.

        Args:
            name: what people call it.
            num_bytes: UTF-8 bytes of its text, for bits per byte.
            facts: version, licence and whatever else is known of its source; JSON values.
        """
        num_tokens = self._position - self._offsets[-1]
        assert num_tokens > 0, f"document {name} has no tokens: it lacks its end token"
        self._offsets.append(self._position)
        self.num_bytes += num_bytes
        facts = {"name": name, "tokens": num_tokens, "bytes": num_bytes, **facts}
        self._lines.write(json.dumps(facts) + "\n")
        return num_tokens

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._tokens.close()
            self._lines.close()
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _finish(self) -> None:
        assert self._offsets[-1] == self._position, "the last document was not ended"
        if self._position % BLOCK_TOKENS:
            self._checksums.append(self._checksum)
        offsets = np.frombuffer(self._offsets, dtype=np.int64)
        np.save(self._temporary / "documents.npy", offsets)
        np.save(self._temporary / "crc.npy", np.array(self._checksums, dtype=np.uint32))
        _write_megatron_index(self._temporary / "tokens.idx", offsets, self.dtype)
        self._tokens.close()
        self._lines.close()
        digests = {"tokens.bin": self._digest.hexdigest()}
        manifest = {
            "format": FORMAT,
            "dtype": self.dtype.name,
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer_fingerprint,
            "num_documents": len(offsets) - 1,
            "num_tokens": self._position,
            "num_bytes": self.num_bytes,
            "block_tokens": BLOCK_TOKENS,
            "files": {
                path.name: {"bytes": path.stat().st_size, "sha256": digests.get(path.name) or _sha256(path)}
                for path in sorted(self._temporary.iterdir())
            },
        }
        write_json(self._temporary / "manifest.json", manifest)
        publish(self._temporary, self.folder)


class Shard:
    """An open shard.

    Attributes:
        offsets: int64 [num_documents + 1], where each document starts, and last the number of tokens.
        num_tokens, num_documents: totals; num_bytes: of text, for bits per byte.
        vocab_size, dtype: of the ids.
        manifest: what `manifest.json` says.
        close: closes the file; happens by itself when the shard is no longer used.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], offsets: np.ndarray, checksums: np.ndarray) -> None:
        self.folder, self.manifest, self.offsets = folder, manifest, offsets
        self.num_tokens = int(offsets[-1])
        self.num_documents = len(offsets) - 1
        self.num_bytes: int = manifest["num_bytes"]
        self.vocab_size: int = manifest["vocab_size"]
        self.dtype = token_dtype(self.vocab_size)
        self._checksums = checksums
        self._checked = np.zeros(len(checksums), dtype=bool)
        self._file = os.open(folder / "tokens.bin", os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._file)

    @property
    def fingerprint(self) -> str:
        """Names the content: equal for equal tokens, documents and tokenizer, wherever prepared."""
        files = self.manifest["files"]
        parts = [files["tokens.bin"]["sha256"], files["documents.npy"]["sha256"], self.manifest["tokenizer"]]
        return hashlib.sha256(" ".join([*parts, str(self.vocab_size)]).encode()).hexdigest()[:16]

    def documents(self) -> Iterator[dict[str, Any]]:
        """Name, tokens, bytes and source of each document, read line by line."""
        with open(self.folder / "documents.jsonl", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop - 1 as `dtype` [stop - start]; reads no others once their blocks are checked.

        A block is read whole, and its checksum compared, the first time that it is touched. Safe in several
        threads.

        Raises:
            DataError: where a block does not have its checksum, or the file ends early.
        """
        assert 0 <= start <= stop <= self.num_tokens, f"tokens {start} to {stop} of {self.num_tokens}"
        first, last = start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        if self._checked[first:last].all():
            return self._pread(start, stop)
        origin = first * BLOCK_TOKENS
        tokens = self._pread(origin, min(last * BLOCK_TOKENS, self.num_tokens))
        for block in range(first, last):
            if not self._checked[block]:
                at = (block - first) * BLOCK_TOKENS
                if zlib.crc32(memoryview(tokens[at : at + BLOCK_TOKENS])) != self._checksums[block]:
                    raise DataError(
                        f"{self.folder / 'tokens.bin'} is corrupt, tokens from {block * BLOCK_TOKENS} on do "
                        f"not have their checksum: {HEAL} and --force"
                    )
                self._checked[block] = True
        return tokens[start - origin : stop - origin]

    def _pread(self, start: int, stop: int) -> np.ndarray:
        tokens = np.empty(stop - start, dtype=self.dtype)
        view, done = memoryview(tokens).cast("B"), 0
        while done < len(view):
            count = os.preadv(self._file, [view[done:]], start * self.dtype.itemsize + done)
            if not count:
                raise DataError(f"{self.folder / 'tokens.bin'} ends before token {stop}, it was truncated: {HEAL}")
            done += count
        return tokens


def open_shard(folder: Path | str) -> Shard:
    """Opens a shard after checking its manifest, the size of each file, its dtype and its document index.

    Raises:
        DataError: naming the path, what was expected and what was found.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    for name, facts in manifest["files"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != facts["bytes"]:
            state = "is missing" if found is None else f"has {found} bytes"
            raise DataError(f"{path} {state}, its manifest expects {facts['bytes']} bytes: {HEAL}")
    dtype, num_tokens = token_dtype(manifest["vocab_size"]), manifest["num_tokens"]
    if manifest["dtype"] != dtype.name:
        raise DataError(
            f"{folder / 'manifest.json'} says dtype {manifest['dtype']}, but a vocabulary of "
            f"{manifest['vocab_size']} pieces is stored as {dtype.name}: {HEAL} and --force"
        )
    if manifest["files"]["tokens.bin"]["bytes"] != num_tokens * dtype.itemsize:
        raise DataError(
            f"{folder / 'tokens.bin'} does not hold {num_tokens} tokens of {dtype.name}: {HEAL} and --force"
        )
    offsets, checksums = _load(folder / "documents.npy"), _load(folder / "crc.npy")
    whole = len(offsets) == manifest["num_documents"] + 1 and offsets[0] == 0 and offsets[-1] == num_tokens
    if not whole or (np.diff(offsets) <= 0).any() or len(checksums) != -(-num_tokens // BLOCK_TOKENS):
        raise DataError(f"{folder / 'documents.npy'} does not fit its manifest: {HEAL} and --force")
    return Shard(folder, manifest, offsets, checksums)


def check_vocabulary(shard: Shard, vocab_size: int) -> None:
    """Refuses a model whose vocabulary is not that of the data.

    Raises:
        ValueError: naming both sizes and the legal choice.
    """
    if shard.vocab_size != vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} does not match {shard.folder}, whose tokenizer has "
            f"{shard.vocab_size} pieces: use model.vocab_size={shard.vocab_size}, or prepare data with "
            f"data.vocab_size={vocab_size} under another data.name"
        )


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def publish(temporary: Path, folder: Path) -> None:
    """Makes everything under `temporary` durable, then renames it to `folder`: whole, or not there at all."""
    for path in [*temporary.rglob("*"), temporary]:
        _sync(path)
    os.rename(temporary, folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{folder} holds no prepared data (no manifest.json): {HEAL}") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}): {HEAL} and --force") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise DataError(f"{path} has format {found!r}, this version reads {FORMAT}: {HEAL} and --force")
    return manifest


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path} is not a numpy array ({error}): {HEAL} and --force") from None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_megatron_index(path: Path, offsets: np.ndarray, dtype: np.dtype) -> None:
    """Source: NVIDIA/Megatron-LM, core/datasets/indexed_dataset.py. A document is one of its sequences."""
    lengths = np.diff(offsets)
    if len(lengths) and lengths.max() >= 1 << 31:
        return  # its int32 lengths cannot hold such a document; documents.npy can
    code = 8 if dtype.itemsize == 2 else 4  # uint16; it has no uint32, and int32 holds the same bits for every id
    with open(path, "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write((offsets[:-1] * dtype.itemsize).astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
