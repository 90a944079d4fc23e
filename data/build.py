"""Builds a corpus in a folder of its own, step by step; each step that an earlier run finished is not done again."""

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from conf.schema import DataConfig, parse_length
from data.corpus import Changed, Corpus
from data.documents import SPLITS, TRAIN, Listing, Source
from data.encoding import STATE, encode_corpus
from data.format import FORMAT, open_shard
from data.growing import published
from data.scan import read_all
from data.split import Plan, settle
from data.tokenizer import SAMPLE_CHARS, SAMPLE_TOTAL_CHARS, load, train
from data.vocabulary import Tokenizer
from data.workers import apart, num_cpus
from data.writer import publish, put, sync

LARGE_SAMPLE = 4 << 20  # bytes: training on more takes memory that is not to stay with this process
LINE_SECONDS = 2.0  # between lines of progress where there is no terminal
FILE_NAMES = ("tokenizer.model", "tokenizer.json")  # of tokenizers of every kind
BEGUN, WORK = "begun.json", "work"  # in the folder, until it is whole: what it is made from, and what is not to stay

Say = Callable[[str], None]


def build(
    config: DataConfig,
    source: Source,
    listing: Listing,
    inputs: dict[str, Any],
    imported: Tokenizer | None,
    folder: Path,
    say: Say,
) -> None:
    """Fills `folder`, which holds BEGUN and whatever an earlier call left there, with the corpus of `config`.

    Raises:
        ValueError: where text or settings have to be others.
        OSError: where the call may be repeated, once it can go on.
    """
    workers = config.workers or num_cpus()
    work = folder / WORK
    plan = _plan(config, source, listing, work, workers, say)
    for note in plan.notes:
        say(note)
    corpus = Corpus(source, listing.names, work, plan)
    tokenizer = _tokenizer(config, corpus, imported, folder, say)
    with _progress("tokenizing", sum(plan.num_bytes.values()), say) as advance:
        lossy = encode_corpus(
            corpus,
            tokenizer,
            folder,
            shard_tokens=parse_length("data.shard_tokens", config.shard_tokens),
            facts={"origin": config.origin, "licence": config.licence},
            workers=workers,
            own=imported is None,
            advance=advance,
        )
    if source.listing().state != listing.state:  # also where it kept its length
        raise Changed
    notes = list(plan.notes)
    if lossy:
        notes.append(f"{lossy} documents do not come back byte for byte from data.tokenizer={config.tokenizer}")
        say(notes[-1])
    manifest = {
        "format": FORMAT,
        "inputs": inputs,
        "origin": config.origin,
        "licence": config.licence,
        "counts": plan.counts,
        "notes": notes,
        "tokenizer": {
            "kind": tokenizer.kind,
            "file": tokenizer.file_name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "lossless": tokenizer.lossless and not lossy,
        },
        "splits": {split: _describe(folder / split) for split in SPLITS},
    }
    put(folder / "manifest.json", manifest)
    (folder / BEGUN).unlink()  # from here on it is whole: what else is removed is needed no more
    sync(folder)


def tidy(folder: Path) -> None:
    """Removes from a whole corpus what was needed to build it."""
    if (folder / WORK).exists():
        shutil.rmtree(folder / WORK)
    for path in [folder / STATE, *folder.glob("*.tmp")]:
        path.unlink(missing_ok=True)


def _plan(config: DataConfig, source: Source, listing: Listing, work: Path, workers: int, say: Say) -> Plan:
    """What the first reading found; read again unless it came to its end."""
    planned = work / "plan.json"
    if planned.exists():
        return Plan.from_json(json.loads(planned.read_bytes()))
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    if source.held_out is None and not 0 < config.validation_fraction < 1:
        raise ValueError(
            f"data.validation_fraction={config.validation_fraction} leaves one side without documents: use for example "
            "0.05, or name documents with data.validation_names"
        )
    with _progress("reading", sum(listing.num_bytes), say) as advance:
        found = read_all(source, listing, work, workers, advance)
    plan = settle(source, listing, found, work, config.validation_fraction)
    for path in work.iterdir():
        sync(path)
    put(planned, plan.to_json())
    return plan


def _tokenizer(config: DataConfig, corpus: Corpus, imported: Tokenizer | None, folder: Path, say: Say) -> Tokenizer:
    """That of the unfinished corpus; else the user's, or one that is trained now, which it then holds."""
    if any((folder / name).exists() for name in FILE_NAMES):
        return load(folder)
    work = folder / WORK
    if imported is not None:
        path = imported.save(work)
    else:
        began = time.perf_counter()
        training = partial(train_tokenizer, corpus, config.tokenizer, config.vocab_size)
        num_bytes = min(corpus.plan.num_bytes[TRAIN], SAMPLE_TOTAL_CHARS[config.tokenizer])
        if num_bytes > LARGE_SAMPLE:
            say(f"tokenizer: learning {config.vocab_size} pieces from {num_bytes / 1e6:.0f} MB")
            path = apart(training, work)
        else:
            path = training(work)
        say(f"tokenizer: {config.vocab_size} pieces trained in {time.perf_counter() - began:.1f} s")
    publish(path, folder / path.name)
    return load(folder)


def train_tokenizer(corpus: Corpus, kind: str, vocab_size: int, folder: Path) -> Path:
    """Trains on an even sample of the training documents, and saves the tokenizer."""
    failed = list[Exception]()

    def sample() -> Iterator[str]:
        try:
            yield from corpus.sample(SAMPLE_TOTAL_CHARS[kind], SAMPLE_CHARS)
        except Exception as error:
            failed.append(error)
            raise

    try:
        return train(sample(), vocab_size, kind).save(folder)
    except RuntimeError:
        if failed:  # SentencePiece has it as text only
            raise failed[0] from None
        raise


def _describe(split: Path) -> dict[str, Any]:
    """A split's entry in the manifest."""
    totals, entries = dict.fromkeys(("num_documents", "num_tokens", "num_bytes"), 0), []
    for path in published(split):
        shard = open_shard(path)
        shard.close()
        for key in totals:
            totals[key] += getattr(shard, key)
        entries.append(
            {
                "name": path.name,
                "fingerprint": shard.fingerprint,
                "num_documents": shard.num_documents,
                "num_tokens": shard.num_tokens,
            }
        )
    return totals | {"shards": entries}


@contextlib.contextmanager
def _progress(what: str, total: int, say: Say) -> Iterator[Callable[[int], None]]:
    """A bar where standard error is a terminal, else lines; yields the function that advances it by bytes."""
    terminal, done, told = sys.stderr.isatty(), 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, told
        done += count
        bar.update(count)
        if not terminal and time.monotonic() - told >= LINE_SECONDS:
            told = time.monotonic()
            say(f"{what}: {done / 1e6:.1f} of {total / 1e6:.1f} MB")

    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=not terminal) as bar:
        yield advance
