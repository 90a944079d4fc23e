"""Several shards read as one: in the same order everywhere, none of them lost, whatever else lies beside them."""

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.format import DataError, open_shard
from data.shards import Shards, natural, open_tokens
from tests.shards import describe_corpus, write_documents
from tests.unit.test_megatron import write_pair


def write_corpus(folder, sides, vocab_size=100):
    """A corpus with, of each side, the documents of each shard."""
    for side, shards in sides.items():
        for number, documents in enumerate(shards):
            write_documents(folder / side, documents, vocab_size, name=f"{number:05}")
    describe_corpus(folder)
    return folder


@settings(max_examples=30, deadline=None)
@given(
    shards=st.lists(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), max_size=4), min_size=1, max_size=5),
    data=st.data(),
)
def test_shards_read_as_one_list(tmp_path_factory, shards, data):
    """Any range, over shards that may be empty, is that range of all documents laid end to end."""
    folder = tmp_path_factory.mktemp("shards")
    tokens = Shards("all", [open_shard(write_documents(folder, d, 100, name=str(n))) for n, d in enumerate(shards)])
    documents = [document for shard in shards for document in shard]
    line = [token for document in documents for token in document]
    assert np.diff(tokens.offsets).tolist() == [len(document) for document in documents]
    assert (tokens.num_tokens, tokens.num_documents, tokens.num_bytes) == (len(line), len(documents), len(line))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(line))] * 2)))
    assert tokens.read(start, stop).tolist() == line[start:stop]
    assert [entry["tokens"] for entry in tokens.documents()] == [len(document) for document in documents]
    assert tokens.digests().shape == (len(documents), 2)


def reversed_scandir(path, scandir=os.scandir):
    with scandir(path) as entries:
        found = list(entries)[::-1]

    class Listed(list):
        def __enter__(self):
            return self

        def __exit__(self, *given):
            pass

    return Listed(found)


@pytest.mark.parametrize("backwards", [False, True])
def test_shards_come_in_natural_order(tmp_path, monkeypatch, backwards):
    """C058, I11: 1, 2, 10, however the folder lists them; an unfinished shard and strays are passed by."""
    for name in ("10", "2", "1"):
        write_documents(tmp_path, [[int(name)]], 100, name=name)
    write_documents(tmp_path, [[99]], 100, name="3").rename(tmp_path / "3.tmp")
    (tmp_path / ".DS_Store").write_bytes(b"\x00")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    if backwards:
        monkeypatch.setattr(os, "scandir", reversed_scandir)
    tokens = open_tokens(tmp_path)
    assert tokens.read(0, 3).tolist() == [1, 2, 10] and tokens.num_tokens == 3


def test_natural_order():
    """Numbers by value wherever they stand, others by letter, equal numbers by how they are written."""
    assert natural({"b2", "b10", "a10", "a9x", "10", "9", "09", "٣"}) == [
        "09",
        "9",
        "10",
        "a9x",
        "a10",
        "b2",
        "b10",
        "٣",
    ]


def test_one_shard_alone_or_in_a_folder_is_the_same(tmp_path):
    shard = write_documents(tmp_path / "train", [[1, 2], [3]], 100)
    assert open_tokens(tmp_path / "train").fingerprint == open_tokens(shard).fingerprint
    assert open_tokens(f"{tmp_path}/train/").read(0, 3).tolist() == [1, 2, 3]
    assert open_tokens(f"file://{tmp_path}/train").read(0, 3).tolist() == [1, 2, 3]


def test_fingerprint_names_content_and_order(tmp_path):
    first, second = (open_shard(write_documents(tmp_path, [[n]], 100, name=str(n))) for n in (1, 2))
    assert Shards("a", [first, second]).fingerprint == Shards("b", [first, second]).fingerprint
    assert Shards("a", [first, second]).fingerprint != Shards("a", [second, first]).fingerprint


@pytest.mark.parametrize(
    "name",
    ["a=b,c", "[train]", "(1) copy", "two words", "~", "ä" * 100 + "x" * 40, "%20", "a::b", "-x", "{a}", "'\"$HOME"],
)
def test_any_path_will_do(tmp_path, monkeypatch, name):
    """I10: signs that mean something to a shell, to Hydra or in a URL mean nothing here; relative, through a link."""
    folder = tmp_path / name
    write_documents(folder, [[1, 2]], 100, name="00000")
    write_documents(folder, [[3]], 100, name="00001")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(name)
    for path in (folder, name, f"./{name}/", "link", folder / ".." / name):
        assert open_tokens(path).read(0, 3).tolist() == [1, 2, 3]
    monkeypatch.chdir(folder)
    assert open_tokens(".").read(0, 3).tolist() == [1, 2, 3]


def test_a_read_only_folder_is_read(tmp_path):
    """I10: nothing is written beside the data."""
    shard = write_documents(tmp_path, [[1, 2]], 100)
    before = sorted(path.name for path in shard.iterdir())
    shard.chmod(0o555)
    assert open_tokens(shard).read(0, 2).tolist() == [1, 2] and sorted(p.name for p in shard.iterdir()) == before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda side: os.rename(side / "00001", side / "00001.tmp"), "holds shards 00000, 00002, its corpus was made"),
        (lambda side: os.rename(side / "00002", side / "00003"), "00000, 00001, 00003, its corpus was made with 00000"),
        (lambda side: write_documents(side, [[1]], 100, name="00003"), "00003, its corpus was made with 00000"),
        (lambda side: (os.rename(side / "00000", side / "x"), os.rename(side / "00001", side / "00000"),
                       os.rename(side / "x", side / "00001")), "00000 is not the shard"),
        (lambda side: (side / "00001" / "manifest.json").unlink(), "00001 holds no prepared data"),
        (lambda side: (side.parent / "manifest.json").write_text("{"), "manifest.json is not JSON"),
        (lambda side: (side.parent / "manifest.json").write_text(json.dumps({"format": 2, "splits": {"train": {}}})),
         "no shards of train"),
    ],
)  # fmt: skip
def test_a_corpus_that_lost_a_shard_is_refused(tmp_path, spoil, message):
    """A shard gone, added, exchanged or unfinished is an error, and not less or other data."""
    folder = write_corpus(tmp_path / "books", {"train": [[[1]], [[2]], [[3]]]})
    assert open_tokens(folder / "train").read(0, 3).tolist() == [1, 2, 3]
    spoil(folder / "train")
    with pytest.raises(DataError, match=message):
        open_tokens(folder / "train")


def test_what_is_no_data_is_named(tmp_path):
    folder = write_corpus(tmp_path / "books", {"train": [[[1]]], "validation": [[[2]]]})
    with pytest.raises(ValueError, match=r"whole corpus: give one side of it, \S+/train or \S+/validation"):
        open_tokens(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no shard and no Megatron pair.*data\.prepare"):
        open_tokens(tmp_path / "empty")
    with pytest.raises(DataError, match=r"nothing is no folder.*data\.prepare"):
        open_tokens(tmp_path / "nothing")


@pytest.mark.parametrize("spoil", [lambda path: path.unlink(), lambda path: path.write_text('{"formal": 2}')])
def test_a_shard_without_its_manifest_is_no_megatron_pair(tmp_path, spoil):
    """Although tokens.bin and tokens.idx are one: nothing would be left to check them with."""
    shard = write_documents(tmp_path, [[1, 2]], 100)
    spoil(shard / "manifest.json")
    with pytest.raises(DataError, match=r"shard is a shard that lost its manifest\.json"):
        open_tokens(shard)


@pytest.mark.parametrize(
    "text", ['{"splits": {"text": 1}, "license": "x"}', "[]", '{"audio": "a.wav"}\n{"audio": "b.wav"}\n']
)
def test_a_manifest_of_another_tool_is_none_of_ours(tmp_path, text):
    """Beside a Megatron pair, or shards in a folder."""
    write_pair(tmp_path / "theirs" / "text", [[[1]]])
    write_documents(tmp_path / "ours", [[2]], 100)
    for folder in ("theirs", "ours"):
        (tmp_path / folder / "manifest.json").write_text(text)
    assert open_tokens(tmp_path / "theirs" / "text").read(0, 1).tolist() == [1]
    assert open_tokens(tmp_path / "theirs").read(0, 1).tolist() == [1]
    assert open_tokens(tmp_path / "ours").read(0, 1).tolist() == [2]


def test_shards_of_other_tokenizers_do_not_mix(tmp_path):
    """C068."""
    write_documents(tmp_path, [[1]], 100, name="0")
    write_documents(tmp_path, [[1]], 200, name="1")
    with pytest.raises(DataError, match=r"several tokenizers, vocab_size 100 in \S+/0, 200 in \S+/1"):
        open_tokens(tmp_path)


def test_vocabulary_is_checked_at_opening(tmp_path):
    """C068."""
    write_documents(tmp_path, [[1]], 100)
    assert open_tokens(tmp_path, vocab_size=100).vocab_size == 100
    with pytest.raises(ValueError, match=r"model\.vocab_size=128 .* use model\.vocab_size=100"):
        open_tokens(tmp_path, vocab_size=128)
