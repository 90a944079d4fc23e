"""Documents → tokenizer → token shards: `python -m data.prepare [--force] OVERRIDES`, those of train.py.

A corpus is built beside its place, as `<root>/.<name>.tmp`, and renamed once everything in it is durable:
whoever kills this at any moment leaves either no corpus of that name, or a whole one.
"""

import argparse
import contextlib
import fcntl
import heapq
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tqdm import tqdm

from conf.compose import compose
from conf.schema import DataConfig, Source
from data.documents import TRAIN, VALIDATION, Corpus, Document, describe_text, text_documents
from data.format import DataError, Shard, ShardWriter, open_shard, publish, write_json
from data.packages import describe_packages, package_documents
from data.tokenizer import SAMPLE_CHARS, Tokenizer, cuts, load, train

RECIPE = 1  # counts up when the same documents and settings come to give other tokens
SAMPLE_TOTAL_CHARS = 32 << 20  # of training documents, evenly spread, that the tokenizer learns from
LINE_SECONDS = 2.0  # between lines of progress where there is no terminal

Say = Callable[[str], None]


def prepare(config: DataConfig, force: bool = False, say: Say = print) -> Path:
    """Makes `<root>/<name>` hold the corpus that `config` describes, and returns that folder.

    What is already prepared from the same files with the same settings is kept; what was damaged since is
    made anew.

    Raises:
        ValueError: where the folder holds something else (another corpus only without `force`), or the
            settings do not fit the documents.
        OSError: where files cannot be read or written.
    """
    folder = Path(config.root) / config.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    inputs = _inputs(config)
    with _only_one(folder, say):
        if folder.exists() and _is_prepared(folder, inputs, force, say):
            return folder
        say(f"preparing {folder}: data.source={config.source}, data.vocab_size={config.vocab_size}")
        temporary, old = (folder.with_name(f".{folder.name}.{word}") for word in ("tmp", "old"))
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            _build(config, inputs, temporary, say)
            if folder.exists():
                folder.rename(old)
            publish(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    _report(folder, say)
    return folder


def _inputs(config: DataConfig) -> dict[str, Any]:
    """Everything that the tokens depend on, as it is compared with what an existing corpus was made from."""
    inputs = {"data.source": str(config.source), "data.vocab_size": config.vocab_size, "recipe": RECIPE}
    if config.source is Source.text:
        return inputs | {"data.validation_fraction": config.validation_fraction} | describe_text(config)
    return inputs | describe_packages()


def _is_prepared(folder: Path, inputs: dict[str, Any], force: bool, say: Say) -> bool:
    """True where nothing is left to do; False where the corpus there may be replaced."""
    try:
        found = json.loads((folder / "manifest.json").read_bytes())["inputs"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{folder} exists, but data.prepare did not write it (no manifest.json of a corpus): choose "
            "another data.name, or move the folder away"
        ) from None
    if force:
        say(f"{folder} is prepared again, as --force asks")
        return False
    if found != inputs:
        differences = [
            f"{key} was {found.get(key, 'absent')}, is {inputs.get(key, 'absent')}"
            for key in dict.fromkeys([*inputs, *found])
            if found.get(key) != inputs.get(key)
        ]
        raise ValueError(
            f"{folder} was prepared from something else ({'; '.join(differences[:3])}): choose another "
            "data.name to keep both, or replace it with --force (python -m data.prepare --force …)"
        )
    try:
        shards = _open(folder)
        load(folder / "tokenizer.model")
    except DataError as error:
        say(f"damaged: {error}")
        return False
    sizes = ", ".join(f"{name} {shard.num_tokens:,} tokens" for name, shard in shards.items())
    say(f"{folder} is already prepared ({sizes}): nothing to do; --force prepares it again")
    return True


def _build(config: DataConfig, inputs: dict[str, Any], folder: Path, say: Say) -> None:
    corpus = text_documents(config) if config.source is Source.text else package_documents()
    for note in corpus.notes:
        say(note)
    began = time.perf_counter()
    model = train(_sample(corpus), config.vocab_size)
    (folder / "tokenizer.model").write_bytes(model)
    tokenizer = Tokenizer(model)
    say(f"tokenizer: {tokenizer.vocab_size} pieces trained in {time.perf_counter() - began:.1f} s")
    with contextlib.ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(folder / split, tokenizer.vocab_size, tokenizer.fingerprint))
            for split in (TRAIN, VALIDATION)
        }
        advance = stack.enter_context(_progress("tokenizing", corpus.num_chars, say))
        for document in corpus.documents():
            _write(document, tokenizer, writers[document.split], advance)
    write_json(
        folder / "manifest.json",
        {"inputs": inputs, "notes": corpus.notes, "tokenizer": tokenizer.fingerprint},
    )


def _sample(corpus: Corpus) -> Iterator[str]:
    """Portions of the training documents, evenly spread over all of them."""
    share = min(1.0, SAMPLE_TOTAL_CHARS / max(1, corpus.num_train_chars))
    due = 1.0  # the first portion is in
    for document in corpus.documents():
        if document.split == TRAIN:
            for cut in cuts(document.pieces(), SAMPLE_CHARS):
                if cut and due >= 1.0:
                    due -= 1.0
                    yield cut
                due += share if cut else 0.0


def _write(document: Document, tokenizer: Tokenizer, writer: ShardWriter, advance: Callable[[int], None]) -> None:
    num_bytes = 0
    for ids, num_chars in tokenizer.encode_pieces(document.pieces()):
        writer.write(ids)
        num_bytes += int(tokenizer.piece_bytes[ids].sum())
        advance(num_chars)
    writer.write(np.array([tokenizer.eos_id]))
    writer.end_document(document.name, num_bytes, **document.facts)


@contextlib.contextmanager
def _only_one(folder: Path, say: Say) -> Iterator[None]:
    """Lets one process at a time prepare this corpus; others wait for it. One that is killed lets go."""
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is preparing {folder}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _progress(what: str, total: int, say: Say) -> Iterator[Callable[[int], None]]:
    """A bar where standard error is a terminal, else lines; yields the function that advances it."""
    terminal, done, told = sys.stderr.isatty(), 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, told
        done += count
        bar.update(count)
        if not terminal and time.monotonic() - told >= LINE_SECONDS:
            told = time.monotonic()
            say(f"{what}: {done / 1e6:.1f} of {total / 1e6:.1f} million characters")

    with tqdm(total=total, desc=what, unit="char", unit_scale=True, disable=not terminal) as bar:
        yield advance


def _open(folder: Path) -> dict[str, Shard]:
    return {split: open_shard(folder / split) for split in (TRAIN, VALIDATION)}


def _report(folder: Path, say: Say) -> None:
    for split, shard in _open(folder).items():
        longest = heapq.nlargest(5, ((entry["tokens"], entry["name"]) for entry in shard.documents()))
        names = ", ".join(f"{name} {tokens:,}" for tokens, name in longest)
        more = ", …" if shard.num_documents > len(longest) else ""
        plural = "" if shard.num_documents == 1 else "s"
        say(
            f"{folder / split}: {shard.num_documents} document{plural}, {shard.num_tokens:,} tokens, "
            f"{shard.num_bytes / shard.num_tokens:.2f} bytes a token ({names}{more})"
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: see python -m data.prepare --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m data.prepare",
        description="Trains a tokenizer and writes the token shards of a corpus to <data.root>/<data.name>.\n"
        "Nothing is done where it is already prepared from the same files with the same settings.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""overrides that matter here (all of train.py's are understood):
  data=packages                   the Python packages of this machine (default)
  data=text data.path=PATH        a text file, a .jsonl file of {"text": …}, or a folder of them
  data.name=NAME                  of the folder below data.root=corpora
  data.vocab_size=8192            pieces of the tokenizer; the model's model.vocab_size must be the same
  data.validation_fraction=0.05   data=text: share of the documents that is held out

exit codes: 0 prepared, 3 a setting or a document is refused, 74 files could not be read or written

examples:
  python -m data.prepare
  python -m data.prepare data=text data.path=books data.name=books
  python -m data.prepare data=text data.path=notes.txt data.vocab_size=1024 model.vocab_size=1024""",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a corpus of this name that was made from something else"
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDES", help="key=value, as for train.py")
    return parser


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code; errors are one line on standard error."""
    try:
        options = _parser().parse_intermixed_args(arguments)
        prepare(compose(options.overrides).data, force=options.force, say=lambda line: print(line, flush=True))
    except (ValueError, OSError) as error:
        print(f"data.prepare: {' '.join(str(error).split())}", file=sys.stderr)
        return 3 if isinstance(error, ValueError) else 74
    except KeyboardInterrupt:
        print("data.prepare: interrupted; nothing was left under the corpus's name", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
