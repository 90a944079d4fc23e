"""Checks all that prepared data says of itself against every byte of it: `python -m data.format verify PATH`."""

import hashlib
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data.format import BLOCK_TOKENS, Shard, Tokens, check_size, open_shard, read_manifest
from data.megatron import Megatron, open_megatron
from data.shards import Shards, corpus_manifest, find, open_storage, open_tokens
from data.storage import PORTION_BYTES, DataError, Local, Storage, Unreachable, read_portions, read_whole, sha256
from data.tokenizer import Tokenizer, load
from data.writer import LONGEST_MEGATRON

TOKENIZERS = ("tokenizer.model", "tokenizer.json")
READ_TOKENS = 1 << 20
NAMED_BLOCKS = 5  # of those that are corrupt

Advance = Callable[[int], None]  # called with bytes as they are read


def num_bytes(path: str) -> int:
    """Bytes that `problems` will read, for a bar of progress."""
    storage, manifest, total = open_storage(path), None, 0
    try:
        manifest = corpus_manifest(storage)
    except DataError as error:
        _tell(error)
    for place in [f"{storage.where}/{split}" for split in manifest["splits"]] if manifest else [path]:
        try:
            for folder, prefix in find(place)[0]:
                if prefix is None:
                    total += sum(facts["bytes"] for facts in read_manifest(folder)["files"].values())
                else:
                    total += folder.size(f"{prefix}.bin") or 0
        except DataError as error:
            _tell(error)  # then it is one of the problems
    return total


def problems(path: str, advance: Advance = lambda _: None) -> Iterator[str]:
    """What is wrong with a corpus, one side of it, a shard or a Megatron pair, at a path or a URL; each problem once.

    Nothing is kept in a cache: what is verified is what lies there.

    Raises:
        Unreachable: where that cannot be known.
    """
    told = set[str]()
    for problem in _problems(path, advance):
        if problem not in told:
            told.add(problem)
            yield problem


def _problems(path: str, advance: Advance) -> Iterator[str]:
    storage = open_storage(path)
    try:
        manifest = corpus_manifest(storage)
    except DataError as error:
        yield _tell(error)
        return
    splits = manifest["splits"] if manifest else {"": None}
    if not splits:
        yield f"{storage.where}/manifest.json tells of no documents"
    sides = dict[str, Tokens]()
    for split in splits:
        place = f"{storage.where}/{split}" if manifest else path
        yield from _side(place, advance)
        try:
            sides[split] = open_tokens(place)  # whether they fit each other
        except DataError as error:
            yield _tell(error)
        else:
            if manifest:
                yield from _told(sides[split], manifest, splits[split])
    if manifest:
        yield from _tokenizer(storage, manifest, sides)
        yield from _overlaps(sides)


def _tell(error: Exception) -> str:
    """What is wrong with the data; where that cannot be known, the error goes on to whoever asked."""
    if isinstance(error, Unreachable):
        raise error
    return str(error)


def load_tokenizer(storage: Storage) -> Tokenizer | None:
    """The tokenizer in a corpus, here or at a URL; None where there is none."""
    for name in TOKENIZERS:
        if storage.size(name) is not None:
            if isinstance(storage, Local):
                return load(storage.folder / name)
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / name).write_bytes(read_whole(storage, name) or b"")
                try:
                    return load(Path(folder) / name)
                except DataError as error:  # which names the copy
                    reason = error.__context__
                    if isinstance(reason, ImportError):
                        raise
                    raise DataError(f"{storage.where}/{name} is no tokenizer ({reason}): {storage.heal}") from None
    return None


def _side(path: str, advance: Advance) -> Iterator[str]:
    try:
        places = find(path)[0]
    except DataError as error:
        yield _tell(error)
        return
    for storage, prefix in places:
        try:
            if prefix is None:
                yield from _shard(open_shard(storage), advance)
            else:
                yield from _pair(open_megatron(storage, prefix), advance)
        except DataError as error:
            yield _tell(error)


def _shard(shard: Shard, advance: Advance) -> Iterator[str]:
    """Hash of each file, checksum of each block, and whether the files say the same."""
    block = BLOCK_TOKENS * shard.dtype.itemsize  # which divides a portion
    bad, highest = list[int](), 0
    for name, facts in shard.manifest["files"].items():
        check_size(shard.storage, name, shard.manifest["files"])
        digest = hashlib.sha256()
        for number, data in enumerate(read_portions(shard.storage, name, facts["bytes"])):
            digest.update(data)
            if name == "tokens.bin":
                highest = max(highest, int(np.frombuffer(data, shard.dtype).max()))
                first = number * PORTION_BYTES // block
                parts = enumerate(range(0, len(data), block), first)
                bad += [at for at, start in parts if zlib.crc32(data[start : start + block]) != shard.checksums[at]]
            advance(len(data))
        if digest.hexdigest() != facts["sha256"]:
            yield f"{shard.where}/{name} is corrupt: it does not have the hash that its manifest says"
    if bad:
        starts = ", ".join(str(number * BLOCK_TOKENS) for number in bad[:NAMED_BLOCKS])
        more = f" and {len(bad) - NAMED_BLOCKS} more" if len(bad) > NAMED_BLOCKS else ""
        yield f"{shard.where}/tokens.bin does not have its checksums in the blocks from token {starts}{more}"
    elif highest >= shard.manifest["vocab_size"]:
        yield f"{shard.where}/tokens.bin has id {highest}, beyond the {shard.vocab_size} pieces of its tokenizer"
    yield from _documents(shard)
    yield from _index(shard)


def _documents(shard: Shard) -> Iterator[str]:
    """Lines, offsets and totals against each other; a damaged file was told by its hash already."""
    try:
        pairs = ((entry["tokens"], entry["bytes"]) for entry in shard.documents())
        known = np.fromiter(pairs, dtype=np.dtype((np.int64, 2)))
        shard.digests()
    except DataError as error:
        yield f"{shard.where} does not tell its documents ({_tell(error)})"
        return
    if not np.array_equal(known[:, 0], np.diff(shard.offsets)):
        yield f"{shard.where}/documents.jsonl has {len(known)} documents that are not those of documents.npy"
    total = int(known[:, 1].sum())
    if total != shard.num_bytes:
        yield f"{shard.where}/manifest.json says num_bytes {shard.num_bytes}, its documents have {total}"


def _index(shard: Shard) -> Iterator[str]:
    """The index for Megatron-LM, or a reason that it is not there."""
    told, longest = shard.manifest.get("megatron_index"), int(np.diff(shard.offsets).max(initial=0))
    if "tokens.idx" not in shard.manifest["files"]:
        if not isinstance(told, str) or longest <= LONGEST_MEGATRON:
            yield f"{shard.where} has no tokens.idx, and its manifest no reason for that (megatron_index is {told!r})"
        return
    try:
        found = open_megatron(shard.storage, "tokens")
    except DataError as error:
        yield _tell(error)
        return
    if told is not True:
        yield f"{shard.where}/manifest.json says of tokens.idx, which is there, {told!r}"
    if found.dtype != shard.dtype or not np.array_equal(found.offsets, shard.offsets):
        yield f"{shard.where}/tokens.idx does not have the dtype and documents of documents.npy"


def _pair(pair: Megatron, advance: Advance) -> Iterator[str]:
    for start in range(0, pair.num_tokens, READ_TOKENS):
        stop = min(start + READ_TOKENS, pair.num_tokens)
        try:
            pair.read(start, stop)
        except ValueError as error:
            yield _tell(error)
            return
        advance((stop - start) * pair.stored.itemsize)


def _told(tokens: Tokens, corpus: dict[str, Any], told: Any) -> Iterator[str]:
    """What the manifest of a corpus tells of one side, against what is there."""
    for key in ("num_documents", "num_tokens", "num_bytes"):
        if not isinstance(told, dict) or told.get(key) != getattr(tokens, key):
            yield f"{tokens.where} has {key} {getattr(tokens, key)}, which the manifest of its corpus does not say"
    for shard in tokens.parts if isinstance(tokens, Shards) else [tokens]:
        for key in ("origin", "licence"):
            if isinstance(shard, Shard) and shard.manifest.get(key) != corpus.get(key):
                yield f"{shard.where} has {key} {shard.manifest.get(key)!r}, its corpus {corpus.get(key)!r}"


def _tokenizer(storage: Storage, corpus: dict[str, Any], sides: dict[str, Tokens]) -> Iterator[str]:
    told = corpus.get("tokenizer")
    told = told if isinstance(told, dict) else {}
    try:
        data = read_whole(storage, str(told.get("file")))
        if data is not None and sha256(data) != told.get("sha256", sha256(data)):
            yield f"{storage.where}/{told['file']} does not have the hash that the manifest of its corpus says"
        tokenizer = load_tokenizer(storage)
    except DataError as error:
        yield _tell(error)
        return
    if tokenizer is None:
        yield f"{storage.where} has no tokenizer.model or tokenizer.json"
        return
    for split, tokens in sides.items():
        if (tokens.tokenizer, tokens.vocab_size) != (tokenizer.fingerprint, tokenizer.vocab_size):
            yield (
                f"{storage.where}/{split} is of tokenizer {tokens.tokenizer} with {tokens.vocab_size} pieces, but "
                f"beside it lies {tokenizer.fingerprint} with {tokenizer.vocab_size}"
            )


def _overlaps(sides: dict[str, Tokens]) -> Iterator[str]:
    """Documents that are on two sides, by the digests of their text."""
    try:
        known = [(split, tokens.digests()) for split, tokens in sides.items()]
    except DataError as error:
        _tell(error)
        return  # told with its shard
    for number, (split, digests) in enumerate(known):
        for other, others in known[:number]:
            if digests is not None and others is not None:
                common = np.intersect1d(digests.view("V16"), others.view("V16"))
                if len(common):
                    yield f"{split} and {other} have {len(common)} document{'s' if len(common) > 1 else ''} in common"
