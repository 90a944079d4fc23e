"""Documents: a name, and a way to read its text as often as needed; and those of a user's own text.

No corpus is ever held in memory. Every listing is sorted by path, so that all machines with the same files
see the same documents in the same order.
"""

import codecs
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from conf.schema import DataConfig

TRAIN, VALIDATION = "train", "validation"
PORTION_BYTES = 1 << 20
_PLACES = 1 << 48


@dataclass(frozen=True)
class Document:
    """`pieces()` gives the text in portions, None before each file of a document that is made of files."""

    name: str
    split: str  # TRAIN or VALIDATION
    pieces: Callable[[], Iterator[str | None]]
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Corpus:
    """`documents()` starts from the first document each time; sizes are in characters."""

    documents: Callable[[], Iterator[Document]]
    num_chars: int
    num_train_chars: int
    notes: list[str]  # what was counted, left out or split, one line each


def describe_text(config: DataConfig) -> dict[str, str]:
    """What identifies the files of `data.path`: names, sizes and times of change; nothing is read.

    Raises:
        ValueError: where `data.path` is not set or not there.
    """
    digest, num_bytes = hashlib.sha256(), 0
    root, (files, _) = _root(config), _text_files(config)
    for path in files:
        facts = path.stat()
        num_bytes += facts.st_size
        line = f"{relative(path, root)}\0{facts.st_size}\0{facts.st_mtime_ns}\0"
        digest.update(line.encode(errors="surrogateescape"))
    return {"data.path": f"{len(files)} files, {num_bytes} bytes, state {digest.hexdigest()[:12]}"}


def text_documents(config: DataConfig) -> Corpus:
    """Reads every document once, to count what is kept and what is not.

    Raises:
        ValueError: where no document with text is left, or a line of a .jsonl file is no JSON (naming both).
    """
    fraction = config.validation_fraction
    if not 0 < fraction < 1:
        raise ValueError(f"data.validation_fraction={fraction} leaves one side without documents: use for example 0.05")
    root = _root(config)
    files, counts = _text_files(config)
    bound, sizes = round(fraction * _PLACES), {TRAIN: 0, VALIDATION: 0}
    candidates: list[tuple[int, int]] = []  # size and place, as long as no document is below the bound
    highest = 0, 0  # place and size
    for name, pieces in _read_texts(root, files, counts):
        place, size = _place(name), sum(len(piece) for piece in pieces())
        sizes[VALIDATION if place < bound else TRAIN] += size
        if not sizes[VALIDATION]:
            candidates.append((size, place))
        highest = max(highest, (place, size))
    kept, total = counts.pop("kept", 0), sum(sizes.values())
    note = f"documents: {kept} kept, {counts.pop('empty', 0)} empty"
    note += "".join(f", {count} {what}" for what, count in sorted(counts.items()))
    if not kept:
        raise ValueError(f"data.path={config.path} has no document with text ({note}): give a path that has some")
    if kept == 1:
        return _split_one(config, files, total, note)
    held_out = range(bound)
    if not sizes[VALIDATION]:  # few documents: the one whose size is nearest to the share wished for
        size, place = min(candidates, key=lambda candidate: abs(candidate[0] - fraction * total))
        held_out, sizes[TRAIN] = range(place, place + 1), total - size
    elif not sizes[TRAIN]:
        held_out, sizes[TRAIN] = range(highest[0]), highest[1]
    share = f"held out: {total - sizes[TRAIN]:,} of {total:,} characters"

    def documents() -> Iterator[Document]:
        for name, pieces in _read_texts(root, files, Counter()):
            yield Document(name, VALIDATION if _place(name) in held_out else TRAIN, pieces)

    return Corpus(documents, total, sizes[TRAIN], [note, share])


def _place(name: str) -> int:
    """A point below _PLACES that depends on the name only, so that adding documents moves no other."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:6], "big")


def _split_one(config: DataConfig, files: list[Path], total: int, note: str) -> Corpus:
    """The end of the only document is held out, as a document of its own."""
    if total < 2:
        raise ValueError(f"data.path={config.path} has one character: nothing can be held out, give more text")
    cut = min(max(1, round(total * (1 - config.validation_fraction))), total - 1)

    def documents() -> Iterator[Document]:
        for name, pieces in _read_texts(_root(config), files, Counter()):
            yield Document(name, TRAIN, partial(_span, pieces, 0, cut))
            yield Document(f"{name} (end)", VALIDATION, partial(_span, pieces, cut, total))

    split = f"one document only: its last {total - cut} of {total} characters are held out"
    return Corpus(documents, total, cut, [note, split])


def _span(pieces: Callable[[], Iterator[str]], start: int, stop: int) -> Iterator[str]:
    for piece in pieces():
        yield piece[max(0, start) : max(0, stop)]
        start, stop = start - len(piece), stop - len(piece)


def _root(config: DataConfig) -> Path:
    if not config.path:
        raise ValueError("data.source=text needs data.path: a text file, a .jsonl file, or a folder of them")
    root = Path(config.path)
    if not root.exists():
        raise ValueError(
            f"data.path={config.path} does not exist: give a text file, a .jsonl file, or a folder of them"
        )
    return root


def _text_files(config: DataConfig) -> tuple[list[Path], Counter[str]]:
    """The files below data.path; those prepared by us, which may lie there too, are none of them."""
    root = _root(config)
    return walk(root, frozenset(), Path(config.root).resolve()) if root.is_dir() else ([root], Counter())


def _read_texts(
    root: Path, files: list[Path], counts: Counter[str]
) -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
    """Name and portions of each document that has text; counts those kept, the empty ones, and the unread."""
    for path in files:
        name = relative(path, root if root.is_dir() else root.parent)
        if path.suffix.lower() == ".jsonl":
            yield from _records(path, name, counts)
        elif b"\x00" in _head(path):
            counts["binary"] += 1
        elif any(not portion.isspace() for portion in portions(path)):
            counts["kept"] += 1
            yield name, partial(portions, path)
        else:
            counts["empty"] += 1


def _records(path: Path, name: str, counts: Counter[str]) -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
    with open(path, "rb") as lines:  # as bytes, whose lines end at \n only: JSON may hold other line breaks
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8").removeprefix("\ufeff") if number == 1 else line.decode("utf-8")
                record = json.loads(text) if text.strip() else None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number} is not JSON ({error}): mend or remove this line") from None
            if not line.strip():
                continue
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                counts['bad (no string "text")'] += 1
            elif not text or text.isspace():
                counts["empty"] += 1
            else:
                counts["kept"] += 1
                yield f"{name}:{number}", partial(iter, [text])


# Files


def walk(root: Path, without: frozenset[str], besides: Path | None = None) -> tuple[list[Path], Counter[str]]:
    """Regular files below a folder, sorted by path, and what was passed by. Hidden names are left out."""
    paths, counts = list[Path](), Counter[str]()

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=fail):
        here = Path(folder)
        links = [name for name in folders if (here / name).is_symlink()]
        hidden = [name for name in folders + names if name.startswith(".")]
        folders[:] = [name for name in folders if name not in {*links, *hidden, *without}]
        if besides:
            folders[:] = [name for name in folders if (here / name).resolve() != besides]
        files = [here / name for name in names if not name.startswith(".")]
        paths += [path for path in files if path.is_file()]
        counts.update({"links to folders": len(links), "hidden": len(hidden)})
    return sorted(paths, key=str), +counts


def relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(8192)


def portions(path: Path) -> Iterator[str]:
    """The text of a file, bytes that are no UTF-8 as surrogates, with the line ends that it has."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    with open(path, "rb") as file:
        while data := file.read(PORTION_BYTES):
            if text := decoder.decode(data):
                yield text
    if text := decoder.decode(b"", final=True):
        yield text
