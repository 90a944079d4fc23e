"""One split of a corpus as it grows, shard by shard."""

import os
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np

from data.format import DataError
from data.vocabulary import Tokenizer
from data.writer import ShardWriter

_NAME = re.compile(r"(\d{5,})(\.tmp)?")  # of shards; of what else systems leave in folders nothing is touched


class Split:
    """The shards of one split, each opened for the first document that is to be in it.

    Args:
        folder: of the split.
        shard_tokens: after which the next document opens another shard.
        facts: for the shards' manifests.
        state: of an earlier `mark`; what was written since then is taken back.

    Raises:
        DataError: where a shard that was published before the mark is missing.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, shard_tokens: int, facts: dict[str, Any], state: dict[str, Any] | None
    ) -> None:
        self._folder, self._tokenizer, self._shard_tokens, self._facts = folder, tokenizer, shard_tokens, facts
        self._number, self._writer, self._stack = 0, None, ExitStack()
        self._written = state["written"] if state else None
        if state:
            self._number = state["shard"]
        for number, path in _shards(folder):
            if number > self._number or (number == self._number and not self._written):
                shutil.rmtree(path)
        for number in range(self._number):
            if not self._path(number).is_dir():
                raise DataError(f"{self._path(number)} is missing, which was finished")
        if self._written and self._path(self._number).exists():  # it was published after the mark
            os.rename(self._path(self._number), self._path(self._number, ".tmp"))

    def write(self, tokens: np.ndarray) -> None:
        """Appends int [n] tokens to the document being written."""
        self._open().write(tokens)

    def end_document(self, name: str, num_bytes: int, digest: bytes, facts: dict[str, Any]) -> bool:
        """Closes the document, and says whether its shard was published."""
        writer = self._open()
        writer.write(np.array([self._tokenizer.eos_id]))
        writer.end_document(name, num_bytes, digest, **facts)
        if writer.num_tokens < self._shard_tokens:
            return False
        self.close()
        self._number += 1
        return True

    def mark(self) -> dict[str, Any]:
        """Puts everything on the disk, and returns the state to go on from."""
        written = self._writer.mark() if self._writer else self._written
        return {"shard": self._number, "written": written}

    def close(self) -> None:
        """Publishes the shard that is open, if any."""
        if self._written:
            self._open()
        self._writer = None
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._stack.__exit__(kind, error, trace)

    def _open(self) -> ShardWriter:
        if self._writer is None:
            fingerprint, state = self._tokenizer.fingerprint, self._written or {}
            writer = ShardWriter(
                self._path(self._number), self._tokenizer.vocab_size, fingerprint, self._facts, state=state
            )
            self._written, self._writer = None, self._stack.enter_context(writer)
        return self._writer

    def _path(self, number: int, end: str = "") -> Path:
        return self._folder / f"{number:05d}{end}"


def published(folder: Path) -> list[Path]:
    """The finished shards of a split, in order."""
    return [path for _, path in sorted(_shards(folder)) if path.suffix != ".tmp"]


def _shards(folder: Path) -> list[tuple[int, Path]]:
    """Number and folder of each shard, those that are being written too."""
    if not folder.is_dir():
        return []
    return [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
