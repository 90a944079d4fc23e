"""Small corpora for tests: text to prepare, and what came of it."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

from conf.schema import DataConfig, Source
from data.prepare import prepare
from data.shards import open_tokens
from data.tokenizer import load

VOCAB = 300
WEATHER = ("rain", "snow", "wind")
FILLER = "".join(f"It was the {n}th night of rain, then of snow, and a windy morning.\n" for n in range(40))


def books(folder: Path, number: int = 12) -> Path:
    """A folder of `number` text files, book0.txt and following."""
    folder.mkdir(parents=True)
    for n in range(number):
        text = f"Chapter {n}\n" + "".join(f"It was the {i * n}th night of {WEATHER[i % 3]}.\n" for i in range(60))
        (folder / f"book{n}.txt").write_text(text)
    return folder


def jsonl(path: Path, values: list[Any]) -> Path:
    """A file of records, one a value: texts, or whole records."""
    records = [value if isinstance(value, dict) else {"text": value} for value in values]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def text_config(tmp_path: Path, path: Path, **options: Any) -> DataConfig:
    """Prepares the text at `path` as tmp_path/corpora/mine, in this process."""
    settings = dict(
        source=Source.text, name="mine", root=str(tmp_path / "corpora"), path=str(path), vocab_size=VOCAB, workers=1
    )
    return DataConfig(**settings | options)


def run(config: DataConfig, force: bool = False) -> tuple[Path, list[str]]:
    """The folder of the prepared corpus, and the lines that were said. Nobody waits for the disk."""
    said: list[str] = []
    with mock.patch("os.fsync"):
        return prepare(config, force, said.append), said


def texts(folder: Path) -> dict[str, tuple[str, str]]:
    """Of every document of a prepared corpus, by name: the split that it is in, and its text."""
    tokenizer, found = load(folder), {}
    for split in ("train", "validation"):
        tokens = open_tokens(folder / split)
        assert tokens.tokenizer == tokenizer.fingerprint and tokens.vocab_size == tokenizer.vocab_size
        for number, entry in enumerate(tokens.documents()):
            ids = tokens.read(int(tokens.offsets[number]), int(tokens.offsets[number + 1]))
            assert ids[-1] == tokenizer.eos_id and (ids[:-1] != tokenizer.eos_id).all()
            assert entry["name"] not in found
            found[entry["name"]] = split, tokenizer.decode(ids[:-1])
        tokens.close()
    return found


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
