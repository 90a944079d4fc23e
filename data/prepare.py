"""Documents → tokenizer → token shards: `python -m data.prepare [--force] OVERRIDES`, those of train.py.

A corpus grows beside its place, as `<root>/.<name>.tmp`, and is renamed once everything in it is durable: under its
name there is no corpus, or a whole one. Whoever kills this at any moment runs it again, and it goes on from there.
"""

import argparse
import contextlib
import fcntl
import heapq
import io
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from conf.schema import DataConfig, Source, parse_length
from data import documents
from data.build import BEGUN, Say, build, tidy
from data.corpus import Changed
from data.documents import SPLITS, Listing
from data.encoding import STATE
from data.format import DataError
from data.packages import Packages
from data.shards import open_tokens
from data.text import TIMES, Text
from data.tokenizer import load, load_any
from data.vocabulary import Tokenizer
from data.writer import publish, put, sync

RECIPE = 3  # counts up when the same documents and settings come to give other tokens
TRAINED = ("bpe", "unigram")  # values of data.tokenizer that are no file
FORCE = "force"  # in BEGUN, beside the inputs, where --force began it
_PORTION = 1 << 20  # rows of an index looked at at once


def prepare(config: DataConfig, force: bool = False, say: Say = print) -> Path:
    """Makes `<root>/<name>` hold the corpus that `config` describes, and returns that folder.

    What is already prepared from the same files with the same settings is kept, what was begun is finished, and what
    was damaged since is made anew. `force` begins anew, and goes on with what `force` began.

    Raises:
        ValueError: where the folder holds something else (another corpus only without `force`), or the settings do not
            fit the documents.
        OSError: where files cannot be read or written; what is finished stays, to go on from.
    """
    source, imported = _source(config), _imported(config)
    folder = Path(config.root) / config.name
    listing = source.listing()
    inputs = _inputs(config, listing, imported)
    done, line = _look(folder, inputs, force)  # nothing is written where nothing is to be done
    if not done:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(folder, say):
            done, line = _look(folder, inputs, force)  # another process may have been here meanwhile
            if not done:
                if line:
                    say(line)
                say(f"preparing {folder}: data.source={config.source}, data.tokenizer={inputs['data.tokenizer']}")
                _make(config, source, listing, inputs, imported, folder, force, say)
    if done:
        say(line)
    else:
        _report(folder, say)
    return folder


def _make(
    config: DataConfig,
    source: documents.Source,
    listing: Listing,
    inputs: dict[str, Any],
    imported: Tokenizer | None,
    folder: Path,
    force: bool,
    say: Say,
) -> None:
    """Goes on with what was begun beside `folder`, or begins, to the end; it takes the place of what is there."""
    temporary, gone = folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.gone")
    _remove(gone)
    try:
        if not _begin(temporary, gone, inputs, force, say):
            build(config, source, listing, inputs, imported, temporary, say)
        tidy(temporary)
        if folder.exists():
            folder.rename(gone)
        publish(temporary, folder)
    except ValueError as error:
        # Other text or settings are needed, with which nothing of this can go on. Shards that were written stay all
        # the same, should the cause be another, unless the text that they are of is no more.
        if isinstance(error, Changed) or not (temporary / STATE).exists():
            _discard(temporary, gone)
        raise
    except DataError as error:
        raise DataError(f"{error} (what was begun is damaged: remove {temporary} to begin anew)") from error
    except OSError as error:
        raise OSError(
            f"{error}: what is finished stays in {temporary}; run the same command again to go on from there"
        ) from error
    finally:
        _remove(gone)


def _remove(path: Path) -> None:
    """A folder, with all in it as far as that goes, or a link to one."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _discard(temporary: Path, gone: Path) -> None:
    """Removes what was begun. It loses its name first: a part of it must never be gone on with, should we be killed."""
    if temporary.exists():
        os.replace(temporary, gone)
        sync(gone.parent)
        _remove(gone)


def _source(config: DataConfig) -> documents.Source:
    if config.mixture:
        raise ValueError(
            f"data.mixture={config.mixture} is for training: leave it out, and prepare each corpus by its own data.name"
        )
    if config.source is Source.tokens:
        raise ValueError("data=tokens is prepared already: nothing to do; data=text or data=packages is prepared")
    if "://" in config.root:
        raise ValueError(f"data.root={config.root} is a URL: prepare into a folder here, and copy it there")
    return Text(config) if config.source is Source.text else Packages(config.validation_names)


def _imported(config: DataConfig) -> Tokenizer | None:
    """The tokenizer that the user gave; None where one is to be trained."""
    if config.tokenizer not in TRAINED:
        return load_any(config.tokenizer, config.end_token)
    if config.end_token is not None:
        raise ValueError(f"data.end_token={config.end_token} is for a data.tokenizer that is a file: leave it out")
    return None


def _inputs(config: DataConfig, listing: Listing, imported: Tokenizer | None) -> dict[str, Any]:
    """Everything that the corpus depends on, as it is compared with what an existing one was made from."""
    inputs: dict[str, Any] = {"data.source": str(config.source), "recipe": RECIPE}
    if imported is None:
        inputs |= {"data.tokenizer": config.tokenizer, "data.vocab_size": config.vocab_size}
    else:
        inputs["data.tokenizer"] = f"{Path(config.tokenizer).name} {imported.fingerprint}"
    inputs |= {"data.shard_tokens": parse_length("data.shard_tokens", config.shard_tokens)}
    inputs |= {"data.origin": config.origin, "data.licence": config.licence}
    if config.validation_names:
        inputs["data.validation_names"] = config.validation_names
    elif config.source is Source.text:
        inputs["data.validation_fraction"] = config.validation_fraction
    if config.source is Source.text:
        inputs |= {"data.unit": str(config.unit), "data.text_field": config.text_field}
    return inputs | listing.state


def _look(folder: Path, inputs: dict[str, Any], force: bool) -> tuple[bool, str]:
    """Whether nothing is left to do, else what is there may be replaced; and a line that says so, if there is any."""
    if folder.is_symlink() and not folder.exists():
        raise ValueError(
            f"{folder} is a link to {os.readlink(folder)}, which does not exist: remove the link, or choose another "
            "data.name"
        )
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        found = manifest["inputs"]
        found.items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        if not folder.exists():
            return False, ""
        raise ValueError(
            f"{folder} exists, but data.prepare did not write it (no manifest.json of a corpus): choose "
            "another data.name, or move the folder away"
        ) from None
    if force:
        return False, f"{folder} is prepared again, as --force asks"
    if found != inputs:
        differences = [
            f"{key} was {found.get(key, 'absent')}, is {inputs.get(key, 'absent')}"
            for key in dict.fromkeys([*inputs, *found])
            if found.get(key) != inputs.get(key)
        ]
        if [key for key in inputs | found if found.get(key) != inputs.get(key)] == [TIMES]:
            differences = ["only times of change of files in data.path differ, no name and no size"]
        raise ValueError(
            f"{folder} was prepared from something else ({'; '.join(differences[:3])}): choose another "
            "data.name to keep both, or replace it with --force (python -m data.prepare --force …)"
        )
    try:
        sizes = ", ".join(f"{name} {_check(folder / name, manifest):,} tokens" for name in SPLITS)
        fingerprint = load(folder).fingerprint
        if fingerprint != manifest["tokenizer"]["fingerprint"]:
            raise DataError(f"the tokenizer in {folder} is {fingerprint}, not the one that it was prepared with")
    except (DataError, KeyError, TypeError) as error:
        return False, f"damaged: {error if isinstance(error, DataError) else folder / 'manifest.json'}"
    return True, f"{folder} is already prepared ({sizes}): nothing to do; --force prepares it again"


def _check(split: Path, manifest: dict[str, Any]) -> int:
    """The number of tokens of a split all of whose shards are there and whole."""
    tokens = open_tokens(split)
    tokens.close()
    if tokens.num_tokens != manifest["splits"][split.name]["num_tokens"]:
        raise DataError(f"{split} has {tokens.num_tokens} tokens, {split.parent / 'manifest.json'} says otherwise")
    return tokens.num_tokens


def _begin(temporary: Path, gone: Path, inputs: dict[str, Any], force: bool, say: Say) -> bool:
    """Leaves what was begun from the same inputs, or else an empty folder; says whether that is whole already."""
    begun, manifest = _read(temporary / BEGUN), _read(temporary / "manifest.json")
    whole = begun is None  # removed once the manifest is there; the corpus lacks its name only
    forced = not whole and begun.pop(FORCE, False)
    if ((manifest or {}).get("inputs") if whole else begun) == inputs and (whole or forced or not force):
        anew = "; remove that folder to begin anew" if force else ""
        say(f"going on from what an earlier run left in {temporary}{anew}")
        return whole
    _discard(temporary, gone)
    temporary.mkdir()
    put(temporary / BEGUN, inputs | ({FORCE: True} if force else {}))
    return False


def _read(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


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


def _report(folder: Path, say: Say) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for split, facts in manifest["splits"].items():
        longest = _longest([folder / split / shard["name"] for shard in facts["shards"]], 5)
        names = ", ".join(f"{name} {tokens:,}" for tokens, name in longest)
        more = ", …" if facts["num_documents"] > len(longest) else ""
        plural = "" if facts["num_documents"] == 1 else "s"
        shards = f" in {len(facts['shards'])} shards" if len(facts["shards"]) > 1 else ""
        say(
            f"{folder / split}: {facts['num_documents']:,} document{plural}{shards}, {facts['num_tokens']:,} tokens, "
            f"{facts['num_bytes'] / facts['num_tokens']:.2f} bytes a token ({names}{more})"
        )


def _longest(shards: list[Path], number: int) -> list[tuple[int, str]]:
    """Tokens and names of the longest documents."""
    candidates = list[tuple[int, int, int]]()
    for index, shard in enumerate(shards):
        offsets = np.load(shard / "documents.npy", mmap_mode="r")
        for start in range(0, len(offsets) - 1, _PORTION):
            lengths = np.diff(offsets[start : start + _PORTION + 1])
            least = np.partition(lengths, -number)[-number] if len(lengths) > number else 0
            longest = [(int(lengths[at]), index, start + int(at)) for at in np.flatnonzero(lengths >= least)]
            candidates = heapq.nsmallest(number, candidates + longest, key=_by_length)
    found = []
    for tokens, index, at in candidates:
        with open(shards[index] / "documents.jsonl", "rb") as lines:
            found.append((tokens, json.loads(next(itertools.islice(lines, at, None)))["name"]))
    return found


def _by_length(document: tuple[int, int, int]) -> tuple[int, int, int]:
    """For sorting by tokens, shard and place: the longest first, of equal ones the first."""
    return -document[0], document[1], document[2]


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
  data=text data.path=PATH        a text file, records (.jsonl, .jsonl.gz, .jsonl.zst, .parquet), or a folder of them
  data.unit=folder                each folder in data.path is one document, such as a repository, with all its files
  data.text_field=text            where records have their text
  data.name=NAME                  of the folder below data.root=corpora
  data.tokenizer=bpe              or unigram: trained; or a file: SentencePiece's .model, Hugging Face's tokenizer.json
  data.vocab_size=8192            pieces of a tokenizer that is trained; model.vocab_size must be the same
  data.validation_fraction=0.05   share of the documents that is held out, by a hash of their text
  'data.validation_names="A*,B"'  instead: patterns of the names that are held out
  data.origin=… data.licence=…    for the manifest
  data.shard_tokens=1G            after which the next document opens another shard
  data.workers=0                  processes; 0 = one for each CPU. The corpus is the same whatever their number

Documents with equal text come in once. Stopped at any moment, the same command goes on from there.

exit codes: 0 prepared, 3 a setting or a document is refused, 74 files could not be read or written, 130 interrupted

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
    from conf.compose import compose  # not at the top: processes that encode import this file, and need no Hydra

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may be no UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        options = _parser().parse_intermixed_args(arguments)
        prepare(compose(options.overrides).data, force=options.force, say=lambda line: print(line, flush=True))
    except (ValueError, OSError) as error:
        print(f"data.prepare: {' '.join(str(error).split())}", file=sys.stderr)
        return 3 if isinstance(error, ValueError) else 74
    except KeyboardInterrupt:
        print("data.prepare: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
