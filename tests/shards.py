"""Token shards for tests, from plain lists of token ids."""

from pathlib import Path

import numpy as np

from data.format import ShardWriter


def write_documents(folder: Path, documents: list[list[int]], vocab_size: int) -> Path:
    """A shard of `documents` (their end tokens included, if any) in a new folder below `folder`."""
    shard = folder / "shard"
    with ShardWriter(shard, vocab_size, tokenizer_fingerprint="test") as writer:
        for number, document in enumerate(documents):
            writer.write(np.array(document))
            writer.end_document(f"document {number}", num_bytes=len(document))
    return shard
