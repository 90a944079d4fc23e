"""Text of a user: files, records and folders; what is kept of them, and what is counted."""

import gzip
import io
import json
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from conf.schema import Unit
from data import documents, records
from data.documents import portions, span
from data.records import read_records
from data.shards import open_tokens
from data.text import Text
from tests.corpora import FILLER, books, jsonl, run, snapshot, text_config, texts
from tests.drill import ROOT


def read(tmp_path, name, place=(0, 0), **options):
    """Name, text and place of each document of a file."""
    counts = Counter()
    source = Text(text_config(tmp_path, tmp_path, **options))
    return [
        (d.name, "".join(p for p in d.pieces() if p is not None), d.place) for d in source.read(name, place, counts)
    ]


BREAKS = ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_jsonl_records_end_at_newlines_only(tmp_path, end):
    """C065, I01, I03: Unicode's other line breaks, CRLF, blank lines, a byte-order mark, no last newline."""
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
    """C067, I05."""
    records = [
        {"text": ""},
        {"text": "  \n"},
        {"text": FILLER},
        {"text": "more: " + FILLER},
        {},
        {"text": None},
        {"text": 5},
        [1],
        None,
        {"text": "a"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    folder, said = run(text_config(tmp_path, tmp_path / "a.jsonl", vocab_size=300))
    assert 'documents: 3 kept, 2 empty, 0 duplicate, 5 bad (no string "text")' in said
    assert sorted(texts(folder)) == ["a.jsonl:10", "a.jsonl:3", "a.jsonl:4"]
    for split in ("train", "validation"):
        assert (np.diff(open_tokens(folder / split).offsets) > 1).all()


def test_what_is_passed_by_is_counted(tmp_path):
    source = books(tmp_path / "books")
    (source / "photo.png").write_bytes(b"\x89PNG\x00\x00")
    (source / "empty.txt").write_text(" \n")
    (source / ".git").mkdir()
    (source / "link").symlink_to(tmp_path, target_is_directory=True)
    _, said = run(text_config(tmp_path, source))
    assert "documents: 12 kept, 1 empty, 0 duplicate, 1 binary, 1 hidden, 1 links to folders" in said


def packed(data, suffix):
    """`data` as a file with that suffix holds it, in several parts where it may."""
    half = data.index(b"\n", len(data) // 2) + 5
    if suffix == ".jsonl.gz":
        return gzip.compress(data[:half]) + gzip.compress(data[half:])
    if suffix == ".jsonl.zst":
        pack = zstandard.ZstdCompressor().compress
        return pack(data[:half]) + pack(data[half:])
    if suffix == ".parquet":
        table = pyarrow.Table.from_pylist([json.loads(line) for line in data.splitlines()])
        pyarrow.parquet.write_table(table, buffer := io.BytesIO(), row_group_size=70)
        return buffer.getvalue()
    return data


SUFFIXES = [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_records_of_every_kind(tmp_path, suffix):
    """The same documents and facts from each, all of them or from any place on."""
    values = [{"text": f"record {n} {chr(n + 300)}", "id": str(n), "url": f"http://x/{n}"} for n in range(400)]
    values[0] |= dict.fromkeys(("name", "license", "source"))
    values[3] |= {"name": "three", "license": "CC0-1.0", "source": "web", "id": "x" * 2_000}
    data = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values).encode()
    (tmp_path / f"a{suffix}").write_bytes(packed(data, suffix))
    found = read(tmp_path, f"a{suffix}")
    assert [text for _, text, _ in found] == [value["text"] for value in values]
    assert [name for name, _, _ in found] == [f"a{suffix}:{n}" for n in range(1, 401)]
    for at in (0, 1, 69, 70, 71, 200, 399):
        assert read(tmp_path, f"a{suffix}", found[at][2]) == found[at:]
    documents = list(Text(text_config(tmp_path, tmp_path)).read(f"a{suffix}", (0, 0), Counter()))
    assert documents[3].facts == {"title": "three", "url": "http://x/3", "source": "web", "licence": "CC0-1.0"}
    assert documents[3].labels == ("three", "http://x/3") and documents[4].labels == ("4", "http://x/4")


def test_facts_are_kept_beside_the_tokens(tmp_path):
    values = [{"body": f"{n}: {FILLER}", "source": "mail", "licence": "CC0-1.0", "text": 5} for n in range(3)]
    config = text_config(tmp_path, jsonl(tmp_path / "a.jsonl", values), text_field="body", origin="ours", licence="MIT")
    folder, _ = run(config)
    for split in ("train", "validation"):
        for entry in open_tokens(folder / split).documents():
            assert entry["source"] == "mail" and entry["licence"] == "CC0-1.0" and entry["bytes"] == len(FILLER) + 3
        shard = json.loads((folder / split / "00000" / "manifest.json").read_text())
        assert (shard["origin"], shard["licence"], shard["format"], shard["megatron_index"]) == ("ours", "MIT", 2, True)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["origin"], manifest["licence"]) == ("ours", "MIT")


@pytest.mark.parametrize(
    ("suffix", "cut", "message"),
    [
        (".jsonl.gz", 30, "is packed badly"),
        (".jsonl.zst", 3, "ends within a frame, it was cut"),
        (".parquet", 30, "is not a whole .parquet file"),
    ],
)
def test_files_that_were_cut_are_refused(tmp_path, suffix, cut, message):
    """Not read up to where they end, as if that were all."""
    data = "".join(json.dumps({"text": f"record {n}"}) + "\n" for n in range(400)).encode()
    (tmp_path / f"a{suffix}").write_bytes(packed(data, suffix)[:-cut])
    with pytest.raises(ValueError, match=rf"a\{suffix} {message}"):
        run(text_config(tmp_path, tmp_path / f"a{suffix}"))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_bytes_that_are_not_packed_are_refused(tmp_path, suffix):
    (tmp_path / f"a{suffix}").write_bytes(b'{"text": "plain"}\n')
    with pytest.raises(ValueError, match=rf"a\{suffix} is packed badly"):
        run(text_config(tmp_path, tmp_path))


@pytest.mark.parametrize(("suffix", "package"), [(".jsonl.zst", "zstandard"), (".parquet", "pyarrow")])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, suffix, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / f"a{suffix}").write_bytes(b"x")
    with pytest.raises(ValueError, match=rf"a\{suffix} .*pip install {package}"):
        Text(text_config(tmp_path, tmp_path)).listing()


def test_a_missing_column_is_named(tmp_path):
    table = pyarrow.Table.from_pylist([{"content": "a", "n": 1}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"has no column 'text': set data.text_field to one of content$"):
        run(text_config(tmp_path, tmp_path))
    with pytest.raises(
        ValueError, match=r"has no column 'n' of text, it is of int64: set data.text_field to one of co"
    ):
        run(text_config(tmp_path, tmp_path, text_field="n"))
    table = pyarrow.Table.from_pylist([{"content": b"a", "n": 1}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"has no column 'content' of text, it is of binary: write it again with"):
        run(text_config(tmp_path, tmp_path, text_field="content"))


@pytest.mark.parametrize("field", ["text", "n"])
def test_a_missing_field_is_named(tmp_path, field):
    path = jsonl(tmp_path / "a.jsonl", [{"content": "a", "n": 1, "title": "b"}])
    with pytest.raises(ValueError, match=rf"data\.text_field={field} is none of .*set it to one of content, title"):
        run(text_config(tmp_path, path, text_field=field))


@pytest.mark.parametrize("unit", [Unit.file, Unit.folder])
def test_a_file_that_begins_blank_is_text(tmp_path, unit):
    """However long it is blank; one that is so to its end is empty."""
    source = books(tmp_path / "in" / "a", 3).parent
    (source / "a" / "late.txt").write_text(" " * 10_000 + "late")
    (source / "a" / "never.txt").write_text(" \n" * 10_000)
    folder, said = run(text_config(tmp_path, source, unit=unit, vocab_size=310, validation_fraction=0.2))
    assert "late" in "".join(text for _, text in texts(folder).values())
    assert any("1 empty, 4 kept" in line or "4 kept, 1 empty" in line for line in said)


def test_names_that_are_no_utf8(tmp_path):
    """They are documents like others, and messages with them can be written."""
    name = os.fsdecode(b"caf\xe9.txt")
    (books(tmp_path / "in", 4) / name).write_text(FILLER * 20)
    arguments = ["data=text", f"data.path={tmp_path / 'in'}", f"data.root={tmp_path}", "data.vocab_size=300"]
    done = subprocess.run(
        [sys.executable, "-m", "data.prepare", *arguments, "model.vocab_size=300", "data.workers=1"],
        cwd=ROOT,
        capture_output=True,
        env=os.environ | {"PYTHONUTF8": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert b"caf\\udce9.txt" in done.stdout and texts(tmp_path / "text")[name][1] == FILLER * 20


def test_text_and_prepared_data_in_one_place_are_refused(tmp_path):
    source = books(tmp_path / "in", 3)
    with pytest.raises(ValueError, match=r"data\.path=\S+ is data\.root=\S+, where prepared data lies"):
        run(text_config(tmp_path, source, root=str(source)))
    for path in (source, source / "book0.txt"):
        with pytest.raises(ValueError, match=r"lies where the prepared data is to be, data\.root=\S+ data\.name=in:"):
            run(text_config(tmp_path, path, root=str(tmp_path), name="in"))
    assert len(texts(run(text_config(tmp_path, source, root=str(tmp_path)))[0])) == 3


def test_a_path_from_home(tmp_path, monkeypatch):
    """Also of a tokenizer."""
    source = books(tmp_path / "in", 3)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder, _ = run(text_config(tmp_path, "~/in"))
    tokenizer = f"~/{(folder / 'tokenizer.model').relative_to(tmp_path)}"
    again, _ = run(text_config(tmp_path, "~/in", name="again", tokenizer=tokenizer))
    assert set(texts(again)) == {path.name for path in source.iterdir()}


def test_a_folder_may_hold_all_kinds(tmp_path):
    """Sorted by name, text and records alike; what is no text is counted."""
    source = books(tmp_path / "in", 2)
    data = json.dumps({"text": FILLER}).encode() + b"\n" + json.dumps({"text": FILLER + "!"}).encode() + b"\n"
    for suffix in SUFFIXES:
        changed = data.replace(b"windy", suffix.encode())
        (source / ("z" + suffix)).write_bytes(packed(changed, suffix) if suffix != ".jsonl" else changed)
    (source / "B.JSONL").write_bytes(data)
    found = texts(run(text_config(tmp_path, source, vocab_size=330))[0])
    names = [f"z{suffix}:{n}" for suffix in SUFFIXES for n in (1, 2)]
    assert sorted(found) == sorted(["book0.txt", "book1.txt", "B.JSONL:1", "B.JSONL:2", *names])
    assert found["z.parquet:2"][1] == FILLER.replace("windy", ".parquet") + "!"


def test_folders_as_documents(tmp_path):
    """Each folder is one document: its files by path, a mark and a line with the path before each."""
    source = tmp_path / "in"
    for name in (
        "b/x.py",
        "b/sub/y.md",
        "b/.git/config",
        "b/empty.py",
        "a/z.jsonl",
        "a/bin",
        "c/blank.txt",
        "loose.txt",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"{name}: {FILLER}")
    (source / "a/bin").write_bytes(b"\x00")
    (source / "b/empty.py").write_text("")
    (source / "c/blank.txt").write_text(" \n")
    folder, said = run(text_config(tmp_path, source, unit=Unit.folder, vocab_size=330))
    expected = {
        "a": f"a/z.jsonl\na/z.jsonl: {FILLER}",
        "b": f"b/sub/y.md\nb/sub/y.md: {FILLER}b/x.py\nb/x.py: {FILLER}",
    }
    assert {name: text for name, (_, text) in texts(folder).items()} == expected
    assert "documents: 2 kept, 1 empty, 0 duplicate, 1 beside the folders, 1 hidden" in said
    assert "files: 1 binary, 2 empty, 3 kept" in said
    ids = {entry["name"]: entry for side in ("train", "validation") for entry in open_tokens(folder / side).documents()}
    assert ids["b"]["files"] == 2 and ids["b"]["bytes"] == len(expected["b"])


def test_folder_as_unit_needs_folders(tmp_path):
    (tmp_path / "a.txt").write_text(FILLER)
    with pytest.raises(ValueError, match=r"data\.unit=folder .*a\.txt, which is a file"):
        run(text_config(tmp_path, tmp_path / "a.txt", unit=Unit.folder))
    with pytest.raises(ValueError, match="has no folder with files in it"):
        run(text_config(tmp_path, tmp_path, unit=Unit.folder))


def test_order_of_files_is_that_of_their_names(tmp_path, monkeypatch):
    """C058: a file system that lists in another order changes nothing."""
    folder, _ = run(text_config(tmp_path, books(tmp_path / "books")))
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda *a, **k: ((d, s[::-1], f[::-1]) for d, s, f in walk(*a, **k)))
    again, _ = run(text_config(tmp_path, tmp_path / "books", name="again"))
    assert snapshot(again) == snapshot(folder)
    names = [entry["name"] for entry in open_tokens(folder / "train").documents()]
    assert names == sorted(names)


PATHS = ["a=b", "a,b", "a b", "[c]", "(d)", "~", "\u00e4\U0001f600", "x" * 200]


@pytest.mark.parametrize("name", PATHS)
def test_paths_of_every_kind(tmp_path, name):
    """I10: also by a link, from where we are, and with a slash at the end."""
    source = books(tmp_path / name, 3)
    (tmp_path / "link").symlink_to(source)
    names = {f"book{n}.txt" for n in range(3)}
    for number, path in enumerate([f"{source}/", str(tmp_path / "link"), os.path.relpath(source)]):
        assert set(texts(run(text_config(tmp_path, path, name=f"{name} {number}"[-250:]))[0])) == names


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffbyte-order mark", "no last newline", "a\r\nb\rc  \n\n\n", "NUL is far " + "x" * 9_000 + "\x00",
        "</s> <s> <unk> <doc> <0x0A> <|endoftext|> <|file|> \u2581", "x", "\tif a:\n\t\treturn \u00a0\ufb01 e\u0301",
        "| a | b |\n|---|---|\n", "\u4e2d\u6587 \u0645\u0631\u062d\u0628\u0627 \U0001f468\u200d\U0001f469",
        "y" * 4_193, "z" * 65_536, "w" * 300_000,
    ],
)  # fmt: skip
def test_text_comes_back(tmp_path, text):
    """I03, I04, I06, I07, as a file and as a record."""
    source = books(tmp_path / "in", 3)
    (source / "t.txt").write_bytes(text.encode())
    jsonl(source / "t.jsonl", [text + "!"])
    found = texts(run(text_config(tmp_path, source, vocab_size=340, validation_names="book1.txt"))[0])
    assert found["t.txt"][1] == text and found["t.jsonl:1"][1] == text + "!"


def test_span_is_what_slicing_gives(monkeypatch):
    """Of all pieces joined; a file's mark is in the span that its first character is in."""
    pieces = [None, "abc", "d", None, "", "efghij", None, "k"]
    whole = "".join(piece or "" for piece in pieces)
    for start in range(len(whole)):
        for stop in range(start + 1, len(whole) + 1):
            found = list(span(lambda: iter(pieces), start, stop))
            assert "".join(piece or "" for piece in found) == whole[start:stop]
            assert found.count(None) == sum(start <= at < stop for at in (0, 4, 10))


def test_portions_of_a_file_do_not_change_its_text(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PORTION_BYTES", 3)
    data = "\u00e4\u4e2d\U0001f600".encode() * 5 + b"\xf0\x9f\x98 \xff\xe4"
    (tmp_path / "a.txt").write_bytes(data)
    assert "".join(portions(tmp_path / "a.txt")).encode("utf-8", "surrogateescape") == data
    assert "".join(documents.slices("abcdefgh")) == "abcdefgh"


def test_unpacking_takes_no_more_than_a_portion(tmp_path):
    """A gigabyte of one character, packed, is unpacked bit by bit."""
    packer = zstandard.ZstdCompressor().compressobj()
    with open(tmp_path / "a.jsonl.zst", "wb") as file:
        file.write(packer.compress(b'{"text": "first"}\n'))
        for _ in range(64):
            file.write(packer.compress(b" " * (1 << 20)))
        file.write(packer.compress(b'\n{"text": "last"}\n') + packer.flush())
    found = [d.name for d in read_records(tmp_path / "a.jsonl.zst", "a", "text", (0, 0), Counter())]
    assert found == ["a:1", "a:3"] and records.is_records("x.JSONL.ZST") and not records.is_records("x.json")
