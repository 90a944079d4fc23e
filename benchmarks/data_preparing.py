"""Preparing: how fast text becomes tokens, in how much memory, whether kills and cuts change anything.

Parts of `benchmarks/data.py`. The text is the Python sources that every install has.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from sentencepiece import SentencePieceProcessor

from benchmarks import report
from benchmarks.data_part import Part
from conf.schema import DataConfig, Source
from data import build
from data.documents import Document
from data.packages import HELD_OUT_PACKAGES, PACKAGES, Packages
from data.prepare import prepare
from data.tokenizer import load

ROOT = Path(__file__).resolve().parents[1]
WORKERS = 2
QUICK_PACKAGES = ("numpy", "mpmath", "networkx")
CHUNK_CHARS = 1000  # of what SentencePiece is given alone: its fastest
REFERENCE = 20.4  # MB/s of SentencePiece alone on two cores, where what is promised was laid down
MOST_BYTES = 700e6
SAMPLE_SECONDS = 0.1
RECORD_CHARS = 100_000


def tokenize(quick: bool) -> Part:
    """Reading, encoding, checking that every byte comes back, and writing, against SentencePiece encoding alone.

    Both use two processes or threads, by turns, and the same vocabulary.
    """
    rounds, ours, alone = 1 if quick else 3, [], []
    with TemporaryDirectory() as folder:
        texts = _write_texts(Path(folder, "in"), QUICK_PACKAGES if quick else (*PACKAGES, *HELD_OUT_PACKAGES))
        for number in range(rounds):
            config = DataConfig(
                source=Source.text, name=f"round{number}", root=folder, path=str(texts), workers=WORKERS
            )
            with _timed(build, "encode_corpus") as seconds:
                corpus = prepare(config, say=lambda line: None)
            ours.append(seconds[0])
            alone.append(_sentencepiece_seconds(corpus / "tokenizer.model", texts))
        splits = json.loads((corpus / "manifest.json").read_bytes())["splits"].values()
    megabytes, tokens = (sum(split[key] for split in splits) / 1e6 for key in ("num_bytes", "num_tokens"))
    pipeline, library = megabytes / statistics.median(ours), megabytes / statistics.median(alone)
    row = {
        "MB": megabytes,
        "million tokens": tokens,
        "MB/s": pipeline,
        "million tokens/s": tokens / statistics.median(ours),
        "SentencePiece MB/s": library,
        "ratio": pipeline / library,
    }
    criteria = [report.at_least("tokenizing / SentencePiece alone", row["ratio"], 0.75)]
    notes = [f"tokenizing: medians of {rounds}, after the tokenizer is trained; processes start anew each time"]
    if library >= REFERENCE:
        criteria.append(report.at_least("tokenizing, two workers: MB/s", pipeline, 15.0))
        criteria.append(report.at_least("tokenizing, two workers: million tokens/s", row["million tokens/s"], 5.0))
    else:
        notes.append(
            f"15 MB/s and 5 million tokens/s are promised where SentencePiece alone makes {REFERENCE} MB/s: not here"
        )
    return Part("tokenizing", [row], criteria, notes)


def _write_texts(folder: Path, packages: tuple[str, ...]) -> Path:
    """A text file for each package."""
    folder.mkdir()
    for document in _documents(packages):
        with open(folder / f"{document.name}.txt", "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.writelines(piece for piece in document.pieces() if piece)
    return folder


def _documents(packages: tuple[str, ...]) -> Iterator[Document]:
    source = Packages()
    for name in packages:
        yield from source.read(name, (0, 0), Counter())


def _sentencepiece_seconds(model: Path, texts: Path) -> float:
    """Encodes chunks that are in memory already, each cut before a newline."""
    processor, seconds = SentencePieceProcessor(model_file=str(model)), 0.0
    for path in sorted(texts.iterdir()):
        text, chunks, start = path.read_text(encoding="utf-8", errors="replace"), list[str](), 0
        while start < len(text):
            stop = text.find("\n", start + CHUNK_CHARS)
            stop = len(text) if stop < 0 else stop
            chunks.append(text[start:stop])
            start = stop
        begin = time.perf_counter()
        processor.encode(chunks, num_threads=WORKERS, return_type="numpy")
        seconds += time.perf_counter() - begin
    return seconds


@contextmanager
def _timed(module: Any, name: str) -> Iterator[list[float]]:
    """Inside, the seconds of each call of a function of a module."""
    plain, seconds = getattr(module, name), list[float]()

    def call(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return plain(*arguments, **options)
        finally:
            seconds.append(time.perf_counter() - begin)

    with mock.patch.object(module, name, call):
        yield seconds


def peak(quick: bool, gigabytes: float | None = None) -> Part:
    """Memory of `python -m data.prepare` and its workers together, for one long document and for many records.

    Summed proportional set sizes: a page that processes share counts once; pages of files that are only cached do not
    count.
    """
    size = int(1e9 * (gigabytes or (0.2 if quick else 10.0)))
    rows = []
    for kind, write in {"one document": _write_document, "records": _write_records}.items():
        with TemporaryDirectory() as folder:
            path = write(Path(folder), size)
            rows.append({"input": kind, "GB": path.stat().st_size / 1e9} | _prepare_watched(Path(folder), path))
    criteria = [report.at_most(f"peak memory, {row['input']}: MB", row["peak MB"], MOST_BYTES / 1e6) for row in rows]
    return Part("memory of preparing", rows, criteria)


def _write_document(folder: Path, size: int) -> Path:
    """Source text over and over, with a line before each time that tells which it is."""
    path, number = folder / "long.txt", 0
    texts = [path.read_bytes() for path in sorted(_write_texts(folder / "in", QUICK_PACKAGES).iterdir())]
    with open(path, "wb") as file:
        while file.tell() < size:
            number += 1
            file.write(b"# copy %d\n" % number)
            file.write(texts[number % len(texts)][: size - file.tell()])
    return path


def _write_records(folder: Path, size: int) -> Path:
    """Records of a part of the text each, no two the same."""
    path, number = folder / "records.jsonl", 0
    texts = [
        path.read_text("utf-8", "replace") for path in sorted(_write_texts(folder / "in", QUICK_PACKAGES).iterdir())
    ]
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < size:
            text = texts[number % len(texts)]
            start = number * RECORD_CHARS % len(text)
            record = {"text": f"# record {number}\n{text[start : start + RECORD_CHARS]}"}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            number += 1
    return path


def _prepare_watched(folder: Path, path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "data.prepare", "data=text", f"data.path={path}", f"data.root={folder}/corpora"]
    begin, most, most_alone, processes = time.perf_counter(), 0, 0, 0
    with open(folder / "log", "w") as log:
        run = subprocess.Popen(
            [*command, f"data.workers={WORKERS}"], cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
        while run.poll() is None:
            sizes = [_proportional_bytes(process) for process in _session(run.pid)]
            most, most_alone = max(most, sum(sizes)), max([most_alone, *sizes])
            processes = max(processes, len(sizes))
            time.sleep(SAMPLE_SECONDS)
    assert run.returncode == 0, (folder / "log").read_text()[-2000:]
    seconds = time.perf_counter() - begin
    return {
        "peak MB": most / 1e6,
        "largest process MB": most_alone / 1e6,
        "processes": processes,
        "seconds": seconds,
        "MB/s with all": path.stat().st_size / 1e6 / seconds,
    }


def _session(leader: int) -> list[int]:
    """Processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended while we looked
    return found


def _proportional_bytes(process: int) -> int:
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def exact(quick: bool) -> Part:
    """Tokens of whole documents, encoded at once, against the same in batches, and the bytes that come back."""
    from tests.exactness import whole_equals_chunked  # tests' own: here only

    packages = QUICK_PACKAGES if quick else (*PACKAGES, *HELD_OUT_PACKAGES)
    with TemporaryDirectory() as folder:
        texts = _write_texts(Path(folder, "in"), packages)
        config = DataConfig(source=Source.text, name="exact", root=folder, path=str(texts), workers=WORKERS)
        found = whole_equals_chunked(_documents(packages), load(prepare(config, say=lambda line: None)))
    row = {
        "documents": found.documents,
        "million characters": found.chars / 1e6,
        "million tokens": found.tokens / 1e6,
        "cuts": found.cuts,
        "tokens that differ": found.differences,
        "documents with lost bytes": found.lost,
        "whole s": found.whole_seconds,
        "in batches s": found.cut_seconds,
    }
    criteria = [
        report.at_most("tokens of whole documents that differ in batches", found.differences, 0),
        report.at_most("documents that do not come back byte for byte", found.lost, 0),
    ]
    return Part("exactness", [row], criteria, found.where)


def kills(quick: bool) -> Part:
    """Preparations killed at random moments and run again, against one that nobody killed."""
    from tests.drill import kill_drill  # tests' own: here only

    number = 3 if quick else 50
    with TemporaryDirectory() as folder:
        found = kill_drill(Path(folder), number)
    row = {
        "kills": found.kills,
        "finished": found.finished,
        "identical": found.identical,
        "resumed": found.resumed,
        "orphans": found.orphans,
    }
    criteria = [
        report.at_most("corpora that a kill changed", found.finished - found.identical, 0),
        report.at_least("kills", found.kills, number),
        report.at_most("processes that outlived a killed one", found.orphans, 0),
    ]
    return Part("kills", [row], criteria)


PARTS: dict[str, Callable[[bool], Part]] = {"tokenize": tokenize, "peak": peak, "exact": exact, "kills": kills}
