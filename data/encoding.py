"""The second reading of a corpus: text becomes tokens in shards, resumable at any moment.

One process reads and writes, others encode. Every few seconds what is written is put on the disk, with a state beside
it that says how far it goes in the text; whoever goes on from there writes the same bytes.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data.corpus import Changed, Corpus, Planned
from data.documents import SPLITS
from data.format import token_dtype
from data.growing import Split
from data.vocabulary import Batch, Tokenizer
from data.workers import give_back, in_order
from data.writer import put

MARK_SECONDS = 5.0  # between states
JOB_CHARS = 1 << 20  # at least, of the batches sent to a process at once
PART_CHARS = 256  # what a batch costs beside its characters, so that jobs of tiny documents end, too
STATE = "state.json"


@dataclass
class Position:
    """How far the text has become tokens: `batches` of a document, all of them where it `ended`.

    `file`, `place` and `row` are those of the document, as `Corpus.documents` takes them, and `half` which of two it
    is; `num_bytes` is of its text, `total_bytes` of all text; `lossy` documents do not come back byte for byte.
    """

    file: int = 0
    place: tuple[int, int] = (0, 0)
    row: int = 0
    half: int = 0
    batches: int = 0
    ended: bool = False
    num_bytes: int = 0
    total_bytes: int = 0
    lossy: int = 0
    restored: bool = True  # all of the document, up to here


@dataclass(frozen=True)
class Part:
    """A batch of a document, the last one or not."""

    planned: Planned
    last: bool


def encode_corpus(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    shard_tokens: int,
    facts: dict[str, Any],
    workers: int,
    own: bool,
    advance: Callable[[int], None],
) -> int:
    """Writes `folder`/{train,validation}/00000 and following, from the state in `folder`, if there is one.

    Args:
        own: the tokenizer was trained here: text that does not come back from it is our own error.
        advance: told the bytes of text that became tokens; first, those that had before.

    Returns:
        The number of documents that do not come back byte for byte.

    Raises:
        OSError: what is written stays, to go on from.
    """
    position, states = read_state(folder)
    advance(position.total_bytes)
    with ExitStack() as stack:
        splits = {
            split: stack.enter_context(Split(folder / split, tokenizer, shard_tokens, facts, states.get(split)))
            for split in SPLITS
        }
        jobs = _jobs(_parts(corpus, tokenizer, replace(position)))
        marked = time.monotonic()
        with closing(in_order(partial(encode_batches, tokenizer), jobs, workers)) as results:
            for parts, encoded in results:
                published, before = False, position.total_bytes
                for part, (ids, num_bytes, restored) in zip(parts, encoded, strict=True):
                    if own and not restored:
                        raise RuntimeError(
                            f"document {part.planned.document.name} does not come back from its tokens byte for byte: "
                            "this is an error of data.prepare, please report it"
                        )
                    published |= _write(part, ids, num_bytes, restored, splits[part.planned.split], position)
                advance(position.total_bytes - before)
                if published or time.monotonic() - marked >= MARK_SECONDS:
                    write_state(folder, position, splits)
                    give_back()
                    marked = time.monotonic()
    return position.lossy


def encode_batches(tokenizer: Tokenizer, batches: list[Batch]) -> list[tuple[np.ndarray, int, bool]]:
    """For each batch, its ids, the bytes of its text, and whether these come back from the ids."""
    dtype, encoded = token_dtype(tokenizer.vocab_size), []
    for batch in batches:
        ids = tokenizer.encode_batch(batch)
        encoded.append((ids.astype(dtype), batch.num_bytes(), tokenizer.restores(batch, ids)))
    return encoded


def read_state(folder: Path) -> tuple[Position, dict[str, Any]]:
    """Where to go on, and the states of the splits; the beginning where nothing was marked."""
    try:
        state = json.loads((folder / STATE).read_bytes())
    except FileNotFoundError:
        return Position(), {}
    position = state["position"]
    return Position(**position | {"place": tuple(position["place"])}), state["splits"]


def write_state(folder: Path, position: Position, splits: dict[str, Split]) -> None:
    """Replaces the state once everything written is on the disk."""
    marks = {split: shards.mark() for split, shards in splits.items()}
    put(folder / STATE, {"position": vars(position), "splits": marks})


def _write(part: Part, ids: np.ndarray, num_bytes: int, restored: bool, shards: Split, position: Position) -> bool:
    """Writes a part and moves the position after it; says whether a shard was published."""
    planned, document = part.planned, part.planned.document
    if position.ended or (planned.row, planned.half) != (position.row, position.half):
        position.batches, position.num_bytes, position.restored = 0, 0, True
    position.file, position.place = planned.file, document.place
    position.row, position.half = planned.row, planned.half
    position.batches += 1
    position.ended = part.last
    position.num_bytes += num_bytes
    position.total_bytes += num_bytes
    position.restored &= restored
    shards.write(ids)
    if not part.last:
        return False
    position.lossy += not position.restored
    if position.num_bytes != planned.num_bytes:
        raise Changed
    return shards.end_document(document.name, planned.num_bytes, planned.digest, document.facts)


def _parts(corpus: Corpus, tokenizer: Tokenizer, start: Position) -> Iterator[tuple[Part, Batch]]:
    """The batches that are still to be encoded, document by document."""
    done = (start.row, start.half) if start.batches else (-1, 0)
    first_batch, ended = start.batches, start.ended
    for planned in corpus.documents(start.file, start.place, start.row):
        at = (planned.row, planned.half)
        if at < done or (at == done and ended):
            continue
        skip = first_batch if at == done else 0
        batches, previous = tokenizer.batches(planned.document.pieces()), None
        for number, batch in enumerate(batches):
            if number > skip:
                yield Part(planned, last=False), previous
            previous = batch
        if previous is None or number < skip:
            raise Changed
        yield Part(planned, last=True), previous


def _jobs(parts: Iterator[tuple[Part, Batch]]) -> Iterator[tuple[list[Part], list[Batch]]]:
    """Batches that are sent together: many where documents are short."""
    infos, batches, size = list[Part](), list[Batch](), 0
    for part, batch in parts:
        infos.append(part)
        batches.append(batch)
        size += batch.num_chars + PART_CHARS
        if size >= JOB_CHARS:
            yield infos, batches
            infos, batches, size = [], [], 0
    if infos:
        yield infos, batches
