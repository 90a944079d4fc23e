"""Preparing a corpus: what is kept, what is refused, and that nothing half made is ever seen."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from conf.schema import DataConfig, Source
from data import documents, packages, prepare
from data.format import open_shard
from data.tokenizer import load

ROOT = Path(__file__).parents[2]
VOCAB = 300
SENTENCES = "It was the night of rain, then of snow, and a windy morning of winter weather. " * 5
WEATHER = ("rain", "snow", "wind")


def text_config(tmp_path, path, **options):
    settings = dict(source=Source.text, name="mine", root=str(tmp_path / "corpora"), path=str(path), vocab_size=VOCAB)
    return DataConfig(**settings | options)


def books(folder, number=12):
    folder.mkdir(parents=True)
    for n in range(number):
        text = f"Chapter {n}\n" + "".join(f"It was the {i * n}th night of {WEATHER[i % 3]}.\n" for i in range(60))
        (folder / f"book{n}.txt").write_text(text)
    return folder


def texts(folder):
    """Name to text of every document of a prepared corpus, and the split that it is in."""
    tokenizer, found = load(folder / "tokenizer.model"), {}
    for split in ("train", "validation"):
        shard = open_shard(folder / split)
        assert shard.manifest["tokenizer"] == tokenizer.fingerprint and shard.vocab_size == tokenizer.vocab_size
        for number, entry in enumerate(shard.documents()):
            ids = shard.read(int(shard.offsets[number]), int(shard.offsets[number + 1]))
            assert ids[-1] == tokenizer.eos_id and (ids[:-1] != tokenizer.eos_id).all()
            found[entry["name"]] = split, tokenizer.decode(ids)
    return found


def run(config, force=False):
    said = []
    return prepare.prepare(config, force, said.append), said


def snapshot(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_folder_of_text(tmp_path):
    """One document a file, each in one of the two splits; prepared twice, equal to the byte."""
    source = books(tmp_path / "books")
    (source / "deep").mkdir()
    (source / "deep" / "crlf.md").write_bytes(b"one\r\n\ttwo  \r\n" + "\u2581 \xff".encode("latin-1", "replace"))
    folder, _ = run(text_config(tmp_path, source))
    found = texts(folder)
    assert {name: text for name, (_, text) in found.items()} == {
        path.relative_to(source).as_posix(): path.read_bytes().decode("utf-8", "surrogateescape")
        for path in source.rglob("*")
        if path.is_file()
    }
    assert {split for split, _ in found.values()} == {"train", "validation"}
    again, _ = run(text_config(tmp_path, source, name="again"))
    assert snapshot(again) == snapshot(folder)


def test_order_of_files_is_that_of_their_names(tmp_path, monkeypatch):
    """C058: a file system that lists in another order changes nothing."""
    folder, _ = run(text_config(tmp_path, books(tmp_path / "books")))
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda *a, **k: ((d, s[::-1], f[::-1]) for d, s, f in walk(*a, **k)))
    again, _ = run(text_config(tmp_path, tmp_path / "books", name="again"))
    assert snapshot(again) == snapshot(folder)
    names = [entry["name"] for entry in open_shard(folder / "train").documents()]
    assert names == sorted(names)


def test_held_out_by_name(tmp_path):
    """Adding documents moves none to the other side, and the share is about the one asked for."""
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"document number {n}"}) + "\n" for n in range(400)))
    first = texts(run(text_config(tmp_path, path, validation_fraction=0.2))[0])
    held_out = {name for name, (split, _) in first.items() if split == "validation"}
    assert 50 < len(held_out) < 110
    with open(path, "a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    second = texts(run(text_config(tmp_path, path, validation_fraction=0.2, name="more"))[0])
    assert {name for name, (split, _) in second.items() if split == "validation"} - {"many.jsonl:401"} == held_out


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_at_least_one_document_on_each_side(tmp_path, fraction):
    found = texts(run(text_config(tmp_path, books(tmp_path / "books"), validation_fraction=fraction))[0])
    splits = sorted(split for split, _ in found.values())
    assert splits == (["train"] * 11 + ["validation"] if fraction < 0.5 else ["train"] + ["validation"] * 11)


def test_of_few_documents_one_of_fitting_size_is_held_out(tmp_path):
    """Not the large one, which is what there is to learn from, nor one too small to measure anything."""
    sizes = {"a.txt": 200, "b.txt": 4, "c.txt": 10, "d.txt": 60}
    for name, lines in sizes.items():
        (tmp_path / name).write_text("".join(f"the {n}th line of {name}\n" for n in range(lines)))
    folder, said = run(text_config(tmp_path, tmp_path, validation_fraction=0.04))
    held_out = [name for name, (split, _) in texts(folder).items() if split == "validation"]
    assert held_out == ["c.txt"]
    assert any(line.startswith("held out: ") for line in said)


def test_one_document_has_its_end_held_out(tmp_path):
    text = "".join(f"line {n} of a long book\n" for n in range(1000))
    (tmp_path / "book.txt").write_text(text)
    folder, said = run(text_config(tmp_path, tmp_path / "book.txt", validation_fraction=0.1))
    found = texts(folder)
    assert list(found) == ["book.txt", "book.txt (end)"]
    assert found["book.txt"][1] + found["book.txt (end)"][1] == text
    assert found["book.txt (end)"][0] == "validation" and len(found["book.txt (end)"][1]) == round(len(text) * 0.1)
    assert any("one document only" in line for line in said)


BREAKS = ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_jsonl_records_end_at_newlines_only(tmp_path, end):
    """C065: Unicode's other line breaks, CRLF, blank lines, a byte-order mark, no last newline."""
    values = [f"before {mark} after, record {n}" for n, mark in enumerate(BREAKS)]
    lines = [json.dumps({"text": value}, ensure_ascii=False) for value in values]
    (tmp_path / "a.jsonl").write_bytes(("\ufeff" + (end + end).join(lines)).encode())
    found = texts(run(text_config(tmp_path, tmp_path / "a.jsonl"))[0])
    assert [text for _, text in sorted((int(name.split(":")[1]), text) for name, (_, text) in found.items())] == values


@pytest.mark.parametrize(
    "line",
    [b'{"text": "cut', b'{"text": "a"} x', b"text", b'{"text": "\xff"}', b"[" * 100_000, b"{'text': 'a'}"],
)
def test_a_bad_line_is_an_error_with_its_place(tmp_path, line):
    """C065: never dropped in silence."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2 is not JSON"):
        run(text_config(tmp_path, tmp_path / "a.jsonl"))
    assert not (tmp_path / "corpora" / "mine").exists()


def test_empty_and_bad_records_are_counted(tmp_path):
    """C067."""
    records = [
        {"text": ""},
        {"text": "  \n"},
        {"text": SENTENCES},
        {"text": "more: " + SENTENCES},
        {},
        {"text": None},
        {"text": 5},
        [1],
        None,
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    folder, said = run(text_config(tmp_path, tmp_path / "a.jsonl", vocab_size=300))
    assert 'documents: 2 kept, 2 empty, 5 bad (no string "text")' in said
    assert sorted(texts(folder)) == ["a.jsonl:3", "a.jsonl:4"]
    for split in ("train", "validation"):
        assert (np.diff(open_shard(folder / split).offsets) > 1).all()


def test_what_is_passed_by_is_counted(tmp_path):
    source = books(tmp_path / "books")
    (source / "photo.png").write_bytes(b"\x89PNG\x00\x00")
    (source / "empty.txt").write_text(" \n")
    (source / ".git").mkdir()
    (source / "link").symlink_to(tmp_path, target_is_directory=True)
    _, said = run(text_config(tmp_path, source))
    assert "documents: 12 kept, 1 empty, 1 binary, 1 hidden, 1 links to folders" in said


def test_prepared_data_inside_the_text_folder_is_not_text(tmp_path):
    books(tmp_path / "books")
    config = text_config(tmp_path, tmp_path)
    folder, _ = run(config)
    assert len(texts(folder)) == 12
    assert "already prepared" in run(config)[1][0]


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\x00\x01"])
def test_a_corpus_without_text_is_refused(tmp_path, content):
    """C067."""
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.path=.*a\.txt has no document with text"):
        run(text_config(tmp_path, tmp_path / "a.txt"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": None}, r"needs data\.path"),
        ({"path": "/no/such/place"}, r"data\.path=/no/such/place does not exist"),
        (
            {"vocab_size": 100_000},
            r"data\.vocab_size=100000 .*use data\.vocab_size=\d+ model\.vocab_size=\d+ or less",
        ),
        ({"validation_fraction": 0.0}, r"data\.validation_fraction=0\.0"),
    ],
)
def test_settings_that_cannot_be(tmp_path, options, message):
    config = text_config(tmp_path, books(tmp_path / "books"))
    with pytest.raises(ValueError, match=message):
        run(dataclasses.replace(config, **options))
    assert not (tmp_path / "corpora" / "mine").exists()


def test_prepared_data_is_kept(tmp_path):
    config = text_config(tmp_path, books(tmp_path / "books"))
    folder, _ = run(config)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    _, said = run(config)
    assert len(said) == 1 and "already prepared" in said[0] and "--force" in said[0]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 310}, r"data\.vocab_size was 300, is 310"),
        ({"validation_fraction": 0.5}, r"data\.validation_fraction was 0\.05, is 0\.5"),
    ],
)
def test_other_settings_do_not_overwrite(tmp_path, options, message):
    source = books(tmp_path / "books")
    folder, _ = run(text_config(tmp_path, source))
    before = snapshot(folder)
    with pytest.raises(ValueError, match=message + r".*another data\.name.*--force"):
        run(text_config(tmp_path, source, **options))
    assert snapshot(folder) == before
    run(text_config(tmp_path, source, **options), force=True)
    assert snapshot(folder) != before
    assert sorted(path.name for path in folder.parent.iterdir()) == [".mine.lock", "mine"]


def test_changed_files_do_not_overwrite(tmp_path):
    config = text_config(tmp_path, books(tmp_path / "books"))
    folder, _ = run(config)
    before = snapshot(folder)
    (tmp_path / "books" / "new.txt").write_text("one more")
    with pytest.raises(ValueError, match=r"data\.path was 12 files.*is 13 files"):
        run(config)
    assert snapshot(folder) == before


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_of_somebody_else_is_never_touched(tmp_path, force):
    config = text_config(tmp_path, books(tmp_path / "books"))
    foreign = tmp_path / "corpora" / "mine" / "train"
    foreign.mkdir(parents=True)
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"mine exists, but data\.prepare did not write it.*another data\.name"):
        run(config, force)
    assert (foreign / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("name", ["train/tokens.bin", "validation/manifest.json", "tokenizer.model"])
def test_damaged_data_is_prepared_again(tmp_path, name):
    """C053: running again heals."""
    config = text_config(tmp_path, books(tmp_path / "books"))
    folder, _ = run(config)
    before = snapshot(folder)
    with open(folder / name, "r+b") as file:
        file.truncate((folder / name).stat().st_size - 5)
    _, said = run(config)
    assert said[0].startswith("damaged: ") and name in said[0]
    assert snapshot(folder) == before


def test_a_killed_preparation_leaves_nothing_under_the_name(tmp_path):
    """C053: killed between two documents; the next run clears up and prepares."""
    config = text_config(tmp_path, books(tmp_path / "books"))
    code = (
        "import os\nfrom conf.schema import DataConfig, Source\nfrom data import format, prepare\n"
        "format.ShardWriter.end_document = lambda *a, **k: os.kill(os.getpid(), 9)\n"
        f"prepare.prepare(DataConfig(source=Source.text, name='mine', root={config.root!r}, "
        f"path={config.path!r}, vocab_size={VOCAB}))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == -9
    assert sorted(path.name for path in (tmp_path / "corpora").iterdir()) == [".mine.lock", ".mine.tmp"]
    folder, _ = run(config)
    assert len(texts(folder)) == 12
    assert sorted(path.name for path in folder.parent.iterdir()) == [".mine.lock", "mine"]


def test_two_at_once_prepare_it_once(tmp_path):
    config = text_config(tmp_path, books(tmp_path / "books", number=40))
    said = []
    threads = [threading.Thread(target=prepare.prepare, args=(config, False, said.append)) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sum(line.startswith("preparing") for line in said) == 1
    assert sum("already prepared" in line for line in said) == 2


def test_packages(tmp_path, monkeypatch):
    """One document a package, a mark and a path before each file; networkx is held out of all."""
    monkeypatch.setattr(packages, "PACKAGES", ("mpmath",))
    config = DataConfig(source=Source.packages, name="p", root=str(tmp_path), vocab_size=1000)
    seen = []
    monkeypatch.setattr(
        prepare,
        "train",
        lambda sample, size, train=prepare.train: train(map(lambda t: seen.append(t) or t, sample), size),
    )
    folder, _ = run(config)
    assert "networkx" not in "".join(seen) and "mpf" in "".join(seen)
    tokenizer, shard = load(folder / "tokenizer.model"), open_shard(folder / "train")
    assert [entry["name"] for entry in shard.documents()] == ["mpmath"]
    assert [entry["name"] for entry in open_shard(folder / "validation").documents()] == ["networkx"]
    [entry] = shard.documents()
    assert entry["version"] and "BSD" in entry["licence"]
    ids = shard.read(0, shard.num_tokens)
    assert ids[0] == tokenizer.file_id and (ids == tokenizer.eos_id).sum() == 1
    files = tokenizer.decode(ids).split("mpmath/")
    assert files[1].startswith("__init__.py\n__version__")
    root = packages._package_root("mpmath")
    first = [tokenizer.decode(part) for part in np.split(ids[:-1], np.flatnonzero(ids == tokenizer.file_id))[1:]]
    names = [text.split("\n", 1)[0] for text in first]
    assert names == sorted(names) and len(names) > 50
    for name, text in zip(names, first, strict=True):
        assert text.split("\n", 1)[1] == (root.parent / name).read_bytes().decode()
    assert entry["bytes"] == sum(len(text.encode()) for text in first) == shard.num_bytes
    assert "already prepared" in run(config)[1][0]


def test_packages_are_long_and_found_without_import():
    """At least three training documents of over a million tokens, at under 4.2 bytes each."""
    code = (
        "import sys\nfrom data.packages import describe_packages\ndescribe_packages()\n"
        "assert not {'torch', 'sympy', 'networkx'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sizes = [sum(path.stat().st_size for path in packages._python_files(name)) for name in packages.PACKAGES]
    assert sum(size > 4_200_000 for size in sizes) >= 3
    parts = {
        part
        for path in packages._python_files("stdlib")
        for part in path.relative_to(packages._package_root("stdlib")).parts
    }
    assert not parts & {"test", "idlelib", "encodings", "site-packages", "lib2to3"} and "asyncio" in parts


def test_tables_of_numbers_are_left_out():
    assert packages._digit_share(b"X = [" + b"123456, " * 100) > packages.LARGEST_DIGIT_SHARE
    assert packages._digit_share(Path(documents.__file__).read_bytes()) < packages.LARGEST_DIGIT_SHARE


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(packages, "PACKAGES", ("torch", "nosuchpackage"))
    with pytest.raises(ValueError, match=r"needs nosuchpackage, .*make setup.*data=text"):
        packages.describe_packages()


def test_sample_is_spread_evenly(monkeypatch):
    monkeypatch.setattr(prepare, "SAMPLE_TOTAL_CHARS", 100_000)
    lines = "".join(f"{n:09d}\n" for n in range(100_000))  # a million characters
    corpus = documents.Corpus(
        lambda: iter([documents.Document("a", documents.TRAIN, lambda: iter([None, lines])),
                      documents.Document("b", documents.VALIDATION, lambda: iter(["never"]))]),
        len(lines), len(lines), [])  # fmt: skip
    sample = list(prepare._sample(corpus))
    assert 90_000 < sum(map(len, sample)) < 120_000 and "never" not in sample
    places = np.diff([int(text.split()[1]) for text in sample])
    assert places.max() < 1.5 * places.min()


def command(tmp_path, *arguments):
    return prepare.main([f"data.root={tmp_path / 'corpora'}", *arguments])


def test_command(tmp_path, capsys):
    source = books(tmp_path / "books")
    arguments = ["data=text", f"data.path={source}", "data.vocab_size=300", "model.vocab_size=300"]
    assert command(tmp_path, *arguments) == 0
    assert "train: " in capsys.readouterr().out
    assert command(tmp_path, *arguments) == 0 and "already prepared" in capsys.readouterr().out
    assert command(tmp_path, "--force", *arguments) == 0 and "prepared again" in capsys.readouterr().out
    assert (tmp_path / "corpora" / "text" / "tokenizer.model").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["data=text"], 3, "data.path"),
        (["data.pth=x"], 3, "Did you mean data.path?"),
        (["--fast"], 3, "--help"),
        (["data=text", "data.path=/root", "data.root=/proc/none"], 74, "/proc/none"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, arguments, code, message):
    assert command(tmp_path, *arguments) == code
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_help_answers(capsys):
    with pytest.raises(SystemExit) as end:
        prepare.main(["--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert all(word in shown for word in ("data.path=", "data.name=", "--force", "exit codes", "data.vocab_size="))
