"""What becomes of documents: which are held out, and which are there already."""

import hashlib
import json
import random

import numpy as np
import pytest

from conf.schema import Unit
from data import build, scan, split
from data.shards import open_tokens
from data.tokenizer import load
from tests.corpora import FILLER, books, jsonl, run, text_config, texts


def test_held_out_by_digest(tmp_path):
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
        (tmp_path / name).write_text("".join(f"the {n}th row of {name}\n" for n in range(lines)))
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


def test_equal_documents_come_in_once(tmp_path):
    """The first of each text stays; the others are counted, and nothing is on both sides."""
    chosen = random.Random(1).choices(range(40), k=200)
    values = [f"document number {n} of a few" for n in chosen]
    folder, said = run(text_config(tmp_path, jsonl(tmp_path / "a.jsonl", values), validation_fraction=0.3))
    first = {value: f"a.jsonl:{values.index(value) + 1}" for value in values}
    assert {name: text for name, (_, text) in texts(folder).items()} == {name: text for text, name in first.items()}
    assert said[1] == f"documents: {len(first)} kept, 0 empty, {len(values) - len(first)} duplicate"
    counts = json.loads((folder / "manifest.json").read_text())["counts"]
    assert counts == {"kept": len(first), "duplicate": len(values) - len(first)}
    digests = np.concatenate([open_tokens(folder / side).digests() for side in ("train", "validation")])
    assert len(np.unique(digests, axis=0)) == len(first)


@pytest.mark.parametrize("rows", [3, 7, 50, 1000])
def test_duplicates_are_found_in_parts(tmp_path, monkeypatch, rows):
    """As a set of what was seen finds them; of a text held out by name, that one stays."""
    monkeypatch.setattr(split, "SORTED_ROWS", rows)
    monkeypatch.setattr(scan, "PORTION_ROWS", 5)
    draw = random.Random(rows)
    documents = [(draw.randrange(30), draw.random() < 0.2) for _ in range(100)]
    with open(tmp_path / scan.ROWS, "wb") as file:
        for n, held in documents:
            digest, size, chars = scan.measure(lambda n=n: iter([str(n)]))
            file.write(scan._ROW.pack(digest, size, chars, held))
    fates = np.zeros(100, dtype=np.uint8)
    split.mark_duplicates(tmp_path, fates)
    kept = {}
    for number, (n, held) in enumerate(documents):
        if n not in kept or (held and not documents[kept[n]][1]):
            kept[n] = number
    assert sorted(kept.values()) == np.flatnonzero(fates != split.DUPLICATE).tolist()


def test_digest_is_that_of_the_bytes(tmp_path):
    """blake2b of 16 bytes, whatever the text; a JSON string may hold any surrogate."""
    values = ["\u00e4\u2028", FILLER * 1_000, "c\ud800", "\udcff"]
    folder, _ = run(text_config(tmp_path, jsonl(tmp_path / "a.jsonl", values)))
    expected = [values[0].encode(), values[1].encode(), b"c\xed\xa0\x80", b"\xff"]
    found = np.concatenate([open_tokens(folder / side).digests() for side in ("train", "validation")])
    assert {row.tobytes() for row in found} == {hashlib.blake2b(data, digest_size=16).digest() for data in expected}


def test_held_out_by_name(tmp_path):
    """Patterns fit whole names, or what records call themselves; a copy of what is held out is not trained on."""
    values = [
        {"text": "one", "id": 7},
        {"text": "two", "name": "the second"},
        {"text": "four"},
        {"text": FILLER},
        {"text": "four", "url": "http://x/4"},
    ]
    path = jsonl(tmp_path / "a.jsonl", values)
    found = texts(run(text_config(tmp_path, path, validation_names="7, the * , http*"))[0])
    assert sorted(found.items()) == [
        ("a.jsonl:1", ("validation", "one")),
        ("a.jsonl:2", ("validation", "two")),
        ("a.jsonl:4", ("train", FILLER)),
        ("a.jsonl:5", ("validation", "four")),
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("book3.txt,bok*", r"data\.validation_names=bok\* fits no document: names are like book0\.txt, book1\.txt, "),
        ("BOOK*", r"data\.validation_names=BOOK\* fits no document"),
        ("*", r"data\.validation_names=\* fits all documents: leave some to train on"),
    ],
)
def test_names_that_fit_none_or_all(tmp_path, names, message):
    with pytest.raises(ValueError, match=message):
        run(text_config(tmp_path, books(tmp_path / "books"), validation_names=names))
    assert [path.name for path in (tmp_path / "corpora").iterdir()] == [".mine.lock"]


def test_the_only_document_may_be_left_of_copies(tmp_path):
    """Its end is held out, whether it is a file, a record or a folder; a file that starts in the end does so there."""
    for name in ("a", "b"):
        (tmp_path / "in" / name).mkdir(parents=True)
    (tmp_path / "in" / "a" / "1.py").write_text(FILLER)
    (tmp_path / "in" / "a" / "2.py").write_text("y = 2\n" * 3)
    folder, _ = run(
        text_config(tmp_path, tmp_path / "in", unit=Unit.folder, validation_fraction=0.0094, vocab_size=310)
    )
    found, tokens = texts(folder), open_tokens(folder / "validation")
    assert found == {"a": ("train", "a/1.py\n" + FILLER), "a (end)": ("validation", "a/2.py\n" + "y = 2\n" * 3)}
    assert tokens.read(0, 1) == load(folder).file_id
    again, _ = run(text_config(tmp_path, jsonl(tmp_path / "b.jsonl", [FILLER] * 3), name="b", validation_fraction=1e-9))
    assert texts(again) == {"b.jsonl:1": ("train", FILLER[:-1]), "b.jsonl:1 (end)": ("validation", "\n")}


def test_documents_that_changed_are_noticed(tmp_path, monkeypatch):
    """Between the first reading and the second."""
    path, settle = jsonl(tmp_path / "a.jsonl", [f"{n}: {FILLER}" for n in range(9)]), split.settle
    for change in (lambda lines: lines[:-1], lambda lines: lines + lines[:1], lambda lines: [lines[1], *lines[1:]]):
        lines = path.read_text().splitlines()
        monkeypatch.setattr(
            build,
            "settle",
            lambda *a, lines=lines, change=change: (settle(*a), path.write_text("\n".join(change(lines)) + "\n"))[0],
        )
        lines[0] = json.dumps({"text": "another document of another length"})
        path.write_text("\n".join(lines) + "\n")
        with pytest.raises(ValueError, match="the text changed while it was prepared"):
            run(text_config(tmp_path, path))
        path.write_text("\n".join(lines) + "\n")
