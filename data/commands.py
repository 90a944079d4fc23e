"""`python -m data.format verify|inspect|cat PATH`: looks into prepared data, here or at a URL."""

import argparse
import difflib
import heapq
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
from tqdm import tqdm

from data.format import Tokens
from data.shards import Shards, corpus_manifest, open_storage, open_tokens, parent
from data.storage import is_url, without_login
from data.tokenizer import Tokenizer, load_any
from data.verify import load_tokenizer, num_bytes, problems

LONGEST = 5  # documents that inspect names
COMPARED = 100_000  # names that a mistyped one is compared with
CAT_TOKENS = 1 << 16  # decoded at once
IDS_A_LINE = 16
BAR = 40  # characters of the longest bar of the histogram


def verify(path: str) -> int:
    """Prints what is wrong with prepared data, or that nothing is, and returns the exit code."""
    found = 0
    try:
        with tqdm(total=num_bytes(path), desc="verifying", unit="B", unit_scale=True, disable=None) as bar:
            for problem in problems(path, bar.update):
                found += 1
                with tqdm.external_write_mode():
                    print(problem, flush=True)
        print(f"{without_login(path)}: {'whole' if not found else _count(found, 'problem')}", flush=True)
    except BrokenPipeError:  # whoever reads the lines has seen enough; whoever reads the exit code has not
        _discard_output()
    return 74 if found else 0


def inspect(path: str) -> None:
    """Prints totals, a histogram of lengths and the longest documents; of a corpus, those of each of its sides."""
    storage = open_storage(path)
    manifest = corpus_manifest(storage)
    if manifest:
        print(f"origin: {manifest.get('origin') or 'not said'}\nlicence: {manifest.get('licence') or 'not said'}")
        notes = manifest.get("notes")
        for note in notes if isinstance(notes, list) else []:
            print(note)
    for place in [f"{storage.where}/{split}" for split in manifest["splits"]] if manifest else [path]:
        for line in describe(without_login(place), open_tokens(place)):
            print(line)


def describe(place: str, tokens: Tokens) -> Iterator[str]:
    """The lines that `inspect` prints of one side."""
    shards = _count(len(tokens.parts) if isinstance(tokens, Shards) else 1, "shard")
    yield f"{place}: {shards}, {_count(tokens.num_documents, 'document')}, {_count(tokens.num_tokens, 'token')}"
    if tokens.num_bytes is not None:
        yield f"  text: {tokens.num_bytes:,} bytes, {tokens.num_bytes / max(1, tokens.num_tokens):.2f} a token"
    if tokens.vocab_size is not None:
        yield f"  tokenizer: {tokens.tokenizer}, {tokens.vocab_size:,} pieces"
    yield f"  fingerprint: {tokens.fingerprint}"
    yield from _histogram(np.diff(tokens.offsets))
    longest = heapq.nlargest(LONGEST, ((entry["tokens"], entry["name"]) for entry in tokens.documents()))
    yield "  longest: " + ", ".join(f"{name!r} {length:,}" for length, name in longest)


def _histogram(lengths: np.ndarray) -> Iterator[str]:
    """Documents and tokens by the power of two that their length is below."""
    powers = np.frexp(lengths.astype(np.float64))[1] - 1  # 2 ** power <= length
    counts = np.bincount(powers, minlength=1)
    tokens = np.bincount(powers, weights=lengths, minlength=1)
    yield f"  {'tokens a document':>25}  {'documents':>12}  share of tokens"
    for power in range(int(np.argmax(counts > 0)), len(counts)):
        span = "1" if not power else f"{1 << power:,} to {(2 << power) - 1:,}"
        share = tokens[power] / max(1, lengths.sum())
        yield f"  {span:>25}  {counts[power]:>12,}  {100 * share:>5.1f} % {'#' * round(BAR * share)}".rstrip()


def cat(path: str, which: str, start: int, count: int | None, ids: bool, tokenizer: str | None) -> None:
    """Writes the text of a document, or the ids of its tokens, to standard output.

    Raises:
        ValueError: where there is no such document, no such token in it, or no tokenizer.
    """
    tokens = open_tokens(path)
    number = _find_document(tokens, which)
    origin, end = tokens.offsets[number : number + 2].tolist()
    if not 0 <= start <= end - origin or (count is not None and count < 0):
        asked = f"--start {start}" + ("" if count is None else f" --count {count}")
        raise ValueError(f"{asked}: document {number} has tokens 0 to {end - origin - 1}")
    stop = end if count is None else min(end, origin + start + count)
    decoder = None if ids else load_any(tokenizer) if tokenizer else _tokenizer_above(path)
    for first in range(origin + start, stop, CAT_TOKENS):
        part = tokens.read(first, min(first + CAT_TOKENS, stop))
        if decoder is not None:
            sys.stdout.buffer.write(decoder.decode_bytes(part, start=first == origin))
        else:
            for at in range(0, len(part), IDS_A_LINE):
                print(*part[at : at + IDS_A_LINE].tolist())
    sys.stdout.flush()


def _find_document(tokens: Tokens, which: str) -> int:
    """A document by its number from 0, or by its name."""
    if not tokens.num_documents:
        raise ValueError(f"{tokens.where} has no documents")
    if which.removeprefix("-").isdecimal():
        if not 0 <= int(which) < tokens.num_documents:
            raise ValueError(f"--document {which}: {tokens.where} has documents 0 to {tokens.num_documents - 1}")
        return int(which)
    names = list[str]()
    for number, entry in enumerate(tokens.documents()):
        if entry["name"] == which:
            return number
        if number < COMPARED:
            names.append(entry["name"])
    near = difflib.get_close_matches(which, names, 1, cutoff=0.0)
    raise ValueError(f"--document {which}: {tokens.where} has no document of that name; the nearest is {near[0]!r}")


def _tokenizer_above(path: str) -> Tokenizer:
    """That of the corpus which a side, a shard or the index of a shard lies in."""
    folder = path
    for _ in range(3):
        folder, _ = parent(folder)
        tokenizer = load_tokenizer(open_storage(folder))
        if tokenizer is not None:
            return tokenizer
    raise ValueError(f"{path} has no tokenizer beside it: give one by --tokenizer FILE, or show numbers by --ids")


def _discard_output() -> None:
    """Nobody reads it any more: what is still to be written goes nowhere, and does not fail when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: see python -m data.format --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m data.format",
        description="Looks into prepared data: a corpus (corpora/NAME), one side of it (corpora/NAME/train), a shard,\n"
        "a Megatron pair (PREFIX of .bin and .idx) or a folder of them. PATH may be a URL of fsspec.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""exit codes: 0 done, 3 an argument is refused, 74 the data is missing or damaged

examples:
  python -m data.format verify corpora/packages
  python -m data.format inspect corpora/packages/train
  python -m data.format cat corpora/packages/train --document numpy --start 1000 --count 200""",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, told in (
        ("verify", "read everything: sizes, hashes, checksums, ids, and whether files say the same"),
        ("inspect", "totals, a histogram of the documents' lengths, the longest documents"),
        ("cat", "the text of a document"),
    ):
        command = commands.add_parser(name, help=told, description=told)
        command.add_argument("path", metavar="PATH")
    command.add_argument("--document", default="0", metavar="N|NAME", help="its number from 0, or its name (default 0)")
    command.add_argument("--start", type=int, default=0, metavar="TOKEN", help="of the document (default 0)")
    command.add_argument("--count", type=int, metavar="TOKENS", help="that many (default: to the document's end)")
    command.add_argument("--ids", action="store_true", help="show ids instead of text")
    command.add_argument(
        "--tokenizer", metavar="FILE", help="that of the tokens, where it does not lie in their corpus"
    )
    return parser


def _require_there(path: str) -> None:
    if not is_url(path) and not any(Path(path + end).exists() for end in ("", ".idx", ".bin")):
        raise ValueError(f"{path} does not exist: give a corpus, a side of it, a shard, or a Megatron pair")


def main(arguments: list[str]) -> int:
    """Runs a command and returns its exit code; errors are one line on standard error."""
    try:
        options = _parser().parse_args(arguments)
        _require_there(options.path)
        if options.command == "verify":
            return verify(options.path)
        if options.command == "inspect":
            inspect(options.path)
        else:
            cat(options.path, options.document, options.start, options.count, options.ids, options.tokenizer)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough
        _discard_output()
    except (ValueError, OSError) as error:
        print(f"data.format: {without_login(' '.join(str(error).split()))}", file=sys.stderr)
        return 3 if isinstance(error, ValueError) else 74
    except KeyboardInterrupt:
        return 130
    return 0
