"""The token shard: raw tokens, document index, block checksums, manifest; and reading ranges of it.

A shard is a folder that either stands whole under its name or not at all:

    tokens.bin       little-endian uint16 (uint32 where the vocabulary needs it), documents end to end
    documents.npy    int64 [n + 1], the token where each document starts, and the number of tokens
    documents.jsonl  one line a document: name, tokens, bytes of text, and what is known of its source
    digests.npy      uint64 [n, 2], blake2b (16 bytes) of each document's text before it became tokens
    crc.npy          uint32, zlib.crc32 of each block of 65,536 tokens
    tokens.idx       the index that Megatron-LM reads, unless a document exceeds its int32 lengths
    manifest.json    written last: dtype, vocabulary, tokenizer fingerprint, totals, sizes and hashes of files

data/writer.py writes them. `python -m data.format verify|inspect|cat PATH` looks into them.
"""

import hashlib
import itertools
import json
import math
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data.storage import DataError, Local, Storage, read_portions, read_whole, sha256

FORMAT = 2
BLOCK_TOKENS = 65_536
PARTS = ("tokens.bin", "documents.npy", "documents.jsonl", "digests.npy", "crc.npy")
_KEYS = {
    "dtype": str,
    "vocab_size": int,
    "tokenizer": str,
    "num_documents": int,
    "num_tokens": int,
    "num_bytes": int,
    "block_tokens": int,
    "files": dict,
}


class Tokens(Protocol):
    """Documents as tokens, end to end: one shard, several of them, or files of Megatron-LM.

    Attributes:
        where: path or URL, for messages.
        offsets: int64 [num_documents + 1], where each document starts, and last the number of tokens.
        num_tokens, num_documents: totals; num_bytes: of text, for bits per byte; None where that is unknown.
        vocab_size: pieces of the tokenizer; None where that is unknown, and ids are checked when they are read.
        tokenizer: its fingerprint; None where that is unknown.
        fingerprint: names the content.
    """

    where: str
    offsets: np.ndarray
    num_tokens: int
    num_documents: int
    num_bytes: int | None
    vocab_size: int | None
    tokenizer: str | None
    fingerprint: str

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop - 1, uint16 or uint32 [stop - start]. Safe in several threads.

        Raises:
            DataError: where they are not what was written.
        """
        ...

    def documents(self) -> Iterator[dict[str, Any]]:
        """Name, tokens, bytes and what else is known of each document, in order."""
        ...

    def digests(self) -> np.ndarray | None:
        """uint64 [num_documents, 2], of the documents' text; None where they are unknown."""
        ...

    def close(self) -> None:
        """Lets go of open files. Reading opens them again."""
        ...


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype that holds ids 0 .. vocab_size - 1: uint16 up to 65,536 pieces, uint32 beyond."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Shard:
    """An open shard: `Tokens` says what it offers.

    Attributes:
        dtype: of the ids.
        manifest: what `manifest.json` says.
        checksums: uint32, of each block.
        storage: the folder.
    """

    def __init__(self, storage: Storage, manifest: dict[str, Any], offsets: np.ndarray, checksums: np.ndarray) -> None:
        self.storage, self.manifest, self.offsets, self.checksums = storage, manifest, offsets, checksums
        self.where = storage.where
        self.num_tokens = int(offsets[-1])
        self.num_documents = len(offsets) - 1
        self.num_bytes: int | None = manifest["num_bytes"]
        self.vocab_size: int | None = manifest["vocab_size"]
        self.tokenizer: str | None = manifest["tokenizer"]
        self.dtype = token_dtype(manifest["vocab_size"])
        self.fingerprint = _fingerprint(manifest)
        self._number = next(_numbers)
        self._checked = np.zeros(len(checksums), dtype=bool)  # stays False where bytes may be fetched anew

    def documents(self) -> Iterator[dict[str, Any]]:
        """Name, tokens, bytes and source of each document, read line by line.

        Raises:
            DataError: at the end, where the lines are not those that were written.
        """
        facts, digest, rest, count = self.manifest["files"]["documents.jsonl"], hashlib.sha256(), b"", 0
        for data in read_portions(self.storage, "documents.jsonl", facts["bytes"]):
            digest.update(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                entry, count = _entry(line), count + 1
                if entry is None:
                    self.storage.forget("documents.jsonl", 0, facts["bytes"])
                    raise DataError(
                        f"{self.where}/documents.jsonl is corrupt, line {count} does not tell name, tokens and bytes "
                        f"of a document: {self.storage.heal}"
                    )
                yield entry
        if rest or digest.hexdigest() != facts["sha256"]:
            self.storage.forget("documents.jsonl", 0, facts["bytes"])
            raise _corrupt(self.storage, "documents.jsonl")
        if count != self.num_documents:
            raise DataError(
                f"{self.where}/documents.jsonl tells {count} documents of {self.num_documents}: {self.storage.heal}"
            )

    def digests(self) -> np.ndarray:
        """uint64 [num_documents, 2], of the documents' text."""
        return _array(self.storage, "digests.npy", self.manifest["files"], "<u8", (self.num_documents, 2))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop - 1 as `dtype` [stop - start]; reads no others once their blocks are checked.

        A block is read whole, and its checksum compared, the first time that it is touched, or whenever it is where
        the shard is remote. The last one of these is kept for whoever reads on from there.

        Raises:
            DataError: where a block does not have its checksum, or the file ends early.
        """
        assert 0 <= start <= stop <= self.num_tokens, f"tokens {start} to {stop} of {self.num_tokens}"
        kept, block, head = _kept
        if kept == self._number and block == start // BLOCK_TOKENS:
            origin = block * BLOCK_TOKENS
            head = head[start - origin : stop - origin]
        else:
            head = head[:0]
        begin = start + len(head)
        if begin == stop:
            return head.astype(self.dtype)
        first, last = begin // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        low = begin if self._checked[first] else first * BLOCK_TOKENS
        high = stop if self._checked[last - 1] else min(last * BLOCK_TOKENS, self.num_tokens)
        keep = not self._checked[last - 1]
        tokens = self._fetch(low, high)
        if keep:
            _keep(self._number, last - 1, tokens[max(0, (last - 1) * BLOCK_TOKENS - low) :])
        tail = tokens[begin - low : stop - low]
        return np.concatenate([head, tail]) if len(head) else tail

    def close(self) -> None:
        """Lets go of open files. Reading opens them again."""
        self.storage.close()

    def _fetch(self, low: int, high: int) -> np.ndarray:
        """Tokens low .. high - 1, which hold whole every block that is not checked yet."""
        tokens, size = np.empty(high - low, dtype=self.dtype), self.dtype.itemsize
        for _ in range(1 if self.storage.steady else 2):
            self.storage.read_into("tokens.bin", low * size, memoryview(tokens.view(np.uint8)))
            bad = self._bad_block(low, tokens)
            if bad is None:
                return tokens
            self.storage.forget("tokens.bin", low * size, high * size)
        raise DataError(
            f"{self.where}/tokens.bin is corrupt, tokens from {bad * BLOCK_TOKENS} on do not have their checksum: "
            f"{self.storage.heal}"
        )

    def _bad_block(self, low: int, tokens: np.ndarray) -> int | None:
        """The first block that does not have its checksum."""
        for block in range(low // BLOCK_TOKENS, -(-(low + len(tokens)) // BLOCK_TOKENS)):
            if not self._checked[block]:
                at = block * BLOCK_TOKENS - low
                if zlib.crc32(tokens[at : at + BLOCK_TOKENS]) != self.checksums[block]:
                    return block
                self._checked[block] = self.storage.steady
        return None


# The block read whole last, in this process: of which shard, which one, its tokens. Replaced as one, so without lock.
_kept: tuple[int, int, np.ndarray] = -1, -1, np.zeros(0, dtype="<u2")
_numbers = itertools.count()  # one for each shard that is opened


def _keep(shard: int, block: int, tokens: np.ndarray) -> None:
    global _kept
    _kept = shard, block, tokens.copy()


def open_shard(folder: Path | str | Storage) -> Shard:
    """Opens a shard after checking its manifest, the size of each file, its dtype and its document index.

    Raises:
        DataError: naming the path, what was expected and what was found.
    """
    storage = Local(folder) if isinstance(folder, Path | str) else folder
    where, manifest = storage.where, read_manifest(storage)
    files, num_tokens = manifest["files"], manifest["num_tokens"]
    for name in files if storage.steady else ["tokens.bin"]:  # elsewhere each is a request
        check_size(storage, name, files)
    dtype = token_dtype(manifest["vocab_size"])
    if manifest["dtype"] != dtype.name:
        raise DataError(
            f"{where}/manifest.json says dtype {manifest['dtype']}, but a vocabulary of "
            f"{manifest['vocab_size']} pieces is stored as {dtype.name}: {storage.heal}"
        )
    if files["tokens.bin"]["bytes"] != num_tokens * dtype.itemsize:
        raise DataError(f"{where}/tokens.bin does not hold {num_tokens} tokens of {dtype.name}: {storage.heal}")
    offsets = _array(storage, "documents.npy", files, "<i8", (manifest["num_documents"] + 1,))
    checksums = _array(storage, "crc.npy", files, "<u4", (-(-num_tokens // BLOCK_TOKENS),))
    if offsets[0] != 0 or offsets[-1] != num_tokens or (np.diff(offsets) <= 0).any():
        raise DataError(f"{where}/documents.npy does not fit its manifest: {storage.heal}")
    return Shard(storage, manifest, offsets, checksums)


def check_vocabulary(tokens: Tokens, vocab_size: int) -> None:
    """Refuses a model whose vocabulary is not that of the data. Where that is unknown, ids are checked when read.

    Raises:
        ValueError: naming both sizes and the legal choice.
    """
    if tokens.vocab_size is not None and tokens.vocab_size != vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} does not match {tokens.where}, whose tokenizer has "
            f"{tokens.vocab_size} pieces: use model.vocab_size={tokens.vocab_size}, or prepare data with "
            f"data.vocab_size={vocab_size} under another data.name"
        )


def read_manifest(storage: Storage) -> dict[str, Any]:
    """The manifest of a shard, each key there and of its type.

    Raises:
        DataError: where it is not.
    """
    path, data = f"{storage.where}/manifest.json", read_whole(storage, "manifest.json")
    if data is None:
        raise DataError(f"{storage.where} holds no prepared data (no manifest.json): {storage.heal}")
    manifest = parse_json(storage, data)
    check_format(storage, manifest)
    wrong = [key for key, kind in _KEYS.items() if type(manifest.get(key)) is not kind]
    wrong += [key for key, kind in _KEYS.items() if kind is int and key not in wrong and not _is_count(manifest[key])]
    files = manifest["files"] if "files" not in wrong else {}
    wrong += [name for name in PARTS if name not in files]
    wrong += [name for name, facts in files.items() if not _is_file(name, facts)]
    if wrong or manifest["block_tokens"] != BLOCK_TOKENS:
        found = f"no valid {wrong[0]}" if wrong else f"block_tokens {manifest['block_tokens']}, not {BLOCK_TOKENS}"
        raise DataError(f"{path} has {found}: {storage.heal}")
    storage.pin(sha256(data), {name: facts["bytes"] for name, facts in files.items()})
    return manifest


def check_format(storage: Storage, manifest: Any) -> None:
    """Refuses a manifest of another version; DataError."""
    found = manifest.get("format") if isinstance(manifest, dict) else manifest
    if not isinstance(manifest, dict) or found != FORMAT:
        raise DataError(
            f"{storage.where}/manifest.json has format {found!r}, this version reads {FORMAT}: {storage.heal}"
        )


def parse_json(storage: Storage, data: bytes) -> Any:
    """The value of a manifest; DataError where it is no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{storage.where}/manifest.json is not JSON ({error}): {storage.heal}") from None


def _is_file(name: str, facts: Any) -> bool:
    fits = isinstance(facts, dict) and _is_count(facts.get("bytes")) and isinstance(facts.get("sha256"), str)
    return fits and "/" not in name


def _is_count(value: Any) -> bool:
    """Of tokens, bytes or documents, as int64 holds it."""
    return type(value) is int and 0 <= value < 1 << 63


def _entry(line: bytes) -> dict[str, Any] | None:
    """What a line of documents.jsonl tells; None where it lacks what each of them has."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    told = isinstance(entry, dict) and isinstance(entry.get("name"), str)
    return entry if told and _is_count(entry.get("tokens")) and _is_count(entry.get("bytes")) else None


def _fingerprint(manifest: dict[str, Any]) -> str:
    """Names the content: equal for equal tokens, documents and tokenizer, wherever prepared."""
    files = manifest["files"]
    parts = [files["tokens.bin"]["sha256"], files["documents.npy"]["sha256"], manifest["tokenizer"]]
    return sha256(" ".join([*parts, str(manifest["vocab_size"])]).encode())[:16]


def check_size(storage: Storage, name: str, files: dict[str, Any]) -> None:
    """Compares the size of a file with the one in `files` of its manifest; DataError."""
    found, expected = storage.size(name), files[name]["bytes"]
    if found != expected:
        state = "is missing" if found is None else f"has {found} bytes"
        raise DataError(f"{storage.where}/{name} {state}, its manifest expects {expected} bytes: {storage.heal}")


def _array(storage: Storage, name: str, files: dict[str, Any], dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array of a .npy file, whose bytes have the manifest's hash and which is the one expected."""
    for _ in range(1 if storage.steady else 2):
        data = bytearray(files[name]["bytes"])
        storage.read_into(name, 0, memoryview(data))
        if sha256(data) == files[name]["sha256"]:
            break
        storage.forget(name, 0, len(data))
    else:
        raise _corrupt(storage, name)
    # Not by numpy.load: it parses with `ast`, which in threads fails now and then (CPython issue 106905).
    start = 10 + int.from_bytes(data[8:10], "little")
    told = {"descr": dtype, "fortran_order": False, "shape": shape}
    if data[:8] != b"\x93NUMPY\x01\x00" or data[10:start].decode("latin-1").replace(", }", "}").strip() != str(told):
        raise DataError(f"{storage.where}/{name} is no array {dtype} of {list(shape)}: {storage.heal}")
    if len(data) - start != np.dtype(dtype).itemsize * math.prod(shape):
        raise DataError(f"{storage.where}/{name} does not hold {list(shape)} numbers: {storage.heal}")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def _corrupt(storage: Storage, name: str) -> DataError:
    return DataError(
        f"{storage.where}/{name} is corrupt, it does not have the hash that its manifest says: {storage.heal}"
    )


if __name__ == "__main__":
    from data.commands import main  # which imports this file again, under its name

    sys.exit(main(sys.argv[1:]))
