"""Opens tokens wherever they are: one shard, a folder of shards read as one, files of Megatron-LM; here or at a URL."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from data.format import Tokens, check_format, check_vocabulary, open_shard, parse_json
from data.megatron import open_megatron
from data.remote import Cache, Remote
from data.storage import DataError, Local, Storage, is_url, read_whole, sha256, without_login

OPENED_AT_ONCE = 8  # shards; at a URL each takes a few requests
_STRAY = re.compile(r"^[._]|\.(tmp|old|part)$")  # names of no shards: hidden, or not finished


class Shards:
    """Several tokens read as one, in order; `Tokens` says what they offer. No document lies in two of them.

    Attributes:
        parts: those that it consists of.
    """

    def __init__(self, where: str, parts: Sequence[Tokens]) -> None:
        assert parts, "no shards"
        self.where, self.parts = where, list(parts)
        sizes = [part.num_tokens for part in parts]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        starts = self._starts[:-1].tolist()
        ends = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=True)]
        self.offsets = np.concatenate([np.zeros(1, dtype=np.int64), *ends])
        self.num_tokens, self.num_documents = int(self._starts[-1]), len(self.offsets) - 1
        known = [part.num_bytes for part in parts]
        self.num_bytes = None if None in known else sum(known)
        self.vocab_size = _common(where, parts, "vocab_size")
        self.tokenizer = _common(where, parts, "tokenizer")
        self.fingerprint = sha256(" ".join(part.fingerprint for part in parts).encode())[:16]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop - 1, which may lie in several parts."""
        assert 0 <= start <= stop <= self.num_tokens, f"tokens {start} to {stop} of {self.num_tokens}"
        first = min(int(np.searchsorted(self._starts, start, side="right")), len(self.parts)) - 1
        last = max(first + 1, int(np.searchsorted(self._starts, stop, side="left")))
        read = []
        for number in range(first, last):
            origin, end = int(self._starts[number]), int(self._starts[number + 1])
            read.append(self.parts[number].read(max(start, origin) - origin, min(stop, end) - origin))
        return read[0] if len(read) == 1 else np.concatenate(read)

    def documents(self) -> Iterator[dict[str, Any]]:
        """Name, tokens, bytes and source of each document, in order."""
        for part in self.parts:
            yield from part.documents()

    def digests(self) -> np.ndarray | None:
        """uint64 [num_documents, 2], of the documents' text; None where a part does not know them."""
        digests = [part.digests() for part in self.parts]
        return None if any(digest is None for digest in digests) else np.concatenate(digests)

    def close(self) -> None:
        """Lets go of open files. Reading opens them again."""
        for part in self.parts:
            part.close()


def open_tokens(path: str | Path, *, vocab_size: int | None = None, cache: Cache | None = None) -> Tokens:
    """Opens what lies at a path or a URL.

    Args:
        path: a shard; a folder of shards; a Megatron pair PREFIX.bin and PREFIX.idx, given as PREFIX; a folder of such
            pairs. What lies in a folder comes in natural order: 1, 2, 10.
        vocab_size: of the model; tokens of another tokenizer are refused, at once or, where files do not say whose
            they are, when an id beyond it is read.
        cache: for what is fetched from a URL; without one, each reading fetches anew.

    Raises:
        DataError: where nothing is prepared there, or something is damaged or missing.
        ValueError: where the vocabulary is another, or the path that of a whole corpus.
    """
    places, fingerprints = find(path, cache)
    with ThreadPoolExecutor(OPENED_AT_ONCE) as pool:
        parts = list(pool.map(lambda place: _open(*place, vocab_size), places))
    for part, expected in zip(parts, fingerprints or [], strict=fingerprints is not None):
        if part.fingerprint != expected:
            raise DataError(
                f"{part.where} is not the shard {expected} that its corpus was made with: {places[0][0].heal}"
            )
    tokens = parts[0] if len(parts) == 1 else Shards(without_login(str(path)), parts)
    if vocab_size is not None:
        check_vocabulary(tokens, vocab_size)
    return tokens


Place = tuple[Storage, str | None]  # a shard's folder and None, or a folder and the prefix of a Megatron pair in it


def find(path: str | Path, cache: Cache | None = None) -> tuple[list[Place], list[str] | None]:
    """What lies at a path, as `open_tokens` reads it, and the fingerprints of shards where a corpus tells them.

    Raises:
        DataError: where nothing is prepared there, or not all that its corpus tells of.
        ValueError: where the path is that of a whole corpus.
    """
    folder, name = parent(path)
    storage, beside = open_storage(path, cache), open_storage(folder, cache)
    where, listed = storage.where, _listed(beside, name)
    if listed and not storage.steady:  # not every store can list its folders
        return [(storage.below(shard), None) for shard in listed], list(listed.values())
    manifest = _own_manifest(storage) if listed is None else None
    if manifest is not None:
        _refuse_corpus(storage, manifest)
        return [(storage, None)], None
    prefix = re.sub(r"\.(bin|idx)$", "", name)
    if any(beside.size(prefix + end) is not None for end in (".idx", ".bin")):
        return [(beside, prefix)], None
    folders, files = storage.listing()
    if "documents.npy" in files:  # and not the Megatron pair, tokens.bin and tokens.idx, that a shard is as well
        raise DataError(f"{where} is a shard that lost its manifest.json, or has another's: {storage.heal}")
    names = natural(name for name in folders if not _STRAY.search(name))
    if listed is not None and names != list(listed):
        raise DataError(
            f"{where} holds shards {_some(names)}, its corpus was made with {_some(list(listed))}: {storage.heal}"
        )
    if any(name.endswith(".idx") for name in files):
        ours = {name[:-4] for name in files if name.endswith((".idx", ".bin")) and not _STRAY.search(name)}
        return [(open_storage(path, cache), prefix) for prefix in natural(ours)], None  # each is pinned by itself
    if not names:
        raise DataError(f"{where} holds no shard and no Megatron pair (.bin and .idx): {storage.heal}")
    return [(storage.below(name), None) for name in names], listed and list(listed.values())


def open_storage(path: str | Path, cache: Cache | None = None) -> Storage:
    """The folder at a path or a URL, which need not exist."""
    if is_url(path) and not str(path).startswith("file://"):
        return Remote(str(path), cache)
    return Local(str(path).removeprefix("file://"))


def corpus_manifest(storage: Storage) -> dict[str, Any] | None:
    """What `data.prepare` wrote of a whole corpus; None where the folder is none.

    Raises:
        DataError: where it is of another version, or no JSON.
    """
    manifest = _own_manifest(storage)
    if not _is_corpus(manifest):
        return None
    check_format(storage, manifest)
    return manifest


def _own_manifest(storage: Storage) -> Any:
    """The value of a manifest.json of ours, which says its format; None where there is none, or it is another tool's.

    Raises:
        DataError: where it is no JSON; also where it ends before it comes to that.
    """
    data = read_whole(storage, "manifest.json")
    if data is None or not (b'"format"' in data or b'{"format"'.startswith(b"".join(data.split()))):
        return None
    return parse_json(storage, data)


def _is_corpus(manifest: Any) -> bool:
    return isinstance(manifest, dict) and isinstance(manifest.get("splits"), dict)


def parent(path: str | Path) -> tuple[str, str]:
    """The folder that a path or URL lies in, and its name there."""
    path = str(path) if is_url(path) else os.path.abspath(path)
    folder, slash, name = path.rstrip("/").rpartition("/")
    return folder or slash, name


def natural(names: Iterable[str]) -> list[str]:
    """Sorted, numbers by value: 1, 2, 10. The same on every machine, in whatever order its folders list."""

    def key(name: str) -> tuple[list[str | int], str]:
        return [int(part) if number % 2 else part for number, part in enumerate(re.split("([0-9]+)", name))], name

    return sorted(names, key=key)


def _listed(corpus: Storage, split: str) -> dict[str, str] | None:
    """Name and fingerprint of each shard of a split, where its corpus tells them."""
    manifest = corpus_manifest(corpus)
    if manifest is None or split not in manifest["splits"]:
        return None
    try:
        return {str(shard["name"]): str(shard["fingerprint"]) for shard in manifest["splits"][split]["shards"]}
    except (KeyError, TypeError):
        raise DataError(f"{corpus.where}/manifest.json tells no shards of {split}: {corpus.heal}") from None


def _refuse_corpus(storage: Storage, manifest: Any) -> None:
    if _is_corpus(manifest):
        check_format(storage, manifest)
        sides = " or ".join(f"{storage.where}/{split}" for split in manifest["splits"])
        raise ValueError(f"{storage.where} is a whole corpus: give one side of it, {sides}")


def _open(storage: Storage, prefix: str | None, vocab_size: int | None) -> Tokens:
    return open_shard(storage) if prefix is None else open_megatron(storage, prefix, vocab_size)


def _common(where: str, parts: Sequence[Tokens], what: str) -> Any:
    found = {getattr(part, what): part.where for part in parts}
    if len(found) > 1:
        (one, here), (other, there), *_ = found.items()
        raise DataError(
            f"{where} holds shards of several tokenizers, {what} {one} in {here}, {other} in {there}: keep in a folder "
            "those of one tokenizer"
        )
    return next(iter(found))


def _some(names: list[str]) -> str:
    return ", ".join(names if len(names) < 6 else [*names[:3], "…", names[-1]]) or "none"
