"""Token shards for tests, from plain lists of token ids."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.format import open_shard
from data.writer import ShardWriter


def write_documents(folder: Path, documents: list[list[int]], vocab_size: int, name: str = "shard") -> Path:
    """A shard of `documents` (their end tokens included, if any) in a new folder `name` below `folder`."""
    shard = folder / name
    with ShardWriter(shard, vocab_size, tokenizer_fingerprint="test") as writer:
        for number, document in enumerate(documents):
            writer.write(np.array(document))
            writer.end_document(f"document {number}", num_bytes=len(document))
    return shard


def describe_anew(shard: Path, **facts: Any) -> None:
    """Makes the manifest of a shard fit the files in it; what is left of the disk by sparse files is not hashed."""
    path = shard / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_bytes()) | facts
    files: Mapping[str, dict[str, Any]] = manifest["files"]
    for name, known in files.items():
        known["bytes"] = (shard / name).stat().st_size
        if known["bytes"] < 1 << 30:
            known["sha256"] = hashlib.sha256((shard / name).read_bytes()).hexdigest()
    path.write_text(json.dumps(manifest))


def describe_corpus(folder: Path, **facts: Any) -> None:
    """Writes the manifest of a corpus whose shards lie in `folder`, as `data.prepare` does."""
    splits = {}
    for side in sorted(path for path in folder.iterdir() if path.is_dir()):
        shards = {path.name: open_shard(path) for path in sorted(side.iterdir())}
        totals = {
            key: sum(getattr(shard, key) for shard in shards.values())
            for key in ("num_documents", "num_tokens", "num_bytes")
        }
        listed = [{"name": name, "fingerprint": shard.fingerprint} for name, shard in shards.items()]
        splits[side.name] = {**totals, "shards": listed}
    told = {"format": 2, "origin": None, "licence": None, "splits": splits} | facts
    (folder / "manifest.json").write_text(json.dumps(told))
