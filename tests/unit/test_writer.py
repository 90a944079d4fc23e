"""The shard writer: what it writes, and that going on from any mark gives the same bytes."""

import hashlib
import json
import random
import struct
import zlib

import numpy as np
import pytest

from data import writer
from data.format import BLOCK_TOKENS, FORMAT, DataError, open_shard
from data.writer import ShardWriter, publish, write_json
from tests.corpora import snapshot

VOCAB = 500


def drawn(seed, number=40, longest=9_000):
    """Documents of random length, one of them of more than a block."""
    draw = np.random.default_rng(seed)
    lengths = [*draw.integers(1, longest, number - 1).tolist(), BLOCK_TOKENS + 7]
    return [draw.integers(0, VOCAB, length) for length in lengths]


def steps(documents):
    """What is done to a writer, in pieces: a function each."""
    for number, document in enumerate(documents):
        for part in np.array_split(document, 1 + number % 4):
            yield lambda w, part=part: w.write(part)
        yield lambda w, number=number: w.end_document(f"d{number}\udc80", number, bytes([number] * 16), id=number)


def test_what_is_written(tmp_path):
    """Each file, computed again from the documents, by other means."""
    documents = drawn(1)
    with ShardWriter(tmp_path / "s", VOCAB, "mark", {"origin": "here"}) as shard:
        for step in steps(documents):
            step(shard)
    files, tokens = snapshot(tmp_path / "s"), np.concatenate(documents)
    assert np.array_equal(np.frombuffer(files["tokens.bin"], "<u2"), tokens)
    ends = np.cumsum([len(document) for document in documents])
    assert np.load(tmp_path / "s" / "documents.npy").tolist() == [0, *ends.tolist()]
    assert np.load(tmp_path / "s" / "digests.npy").tobytes() == b"".join(bytes([n] * 16) for n in range(40))
    blocks = [files["tokens.bin"][at : at + 2 * BLOCK_TOKENS] for at in range(0, 2 * len(tokens), 2 * BLOCK_TOKENS)]
    assert np.load(tmp_path / "s" / "crc.npy").tolist() == [zlib.crc32(block) for block in blocks]
    entries = [json.loads(line) for line in files["documents.jsonl"].splitlines()]
    assert entries == [
        {"name": f"d{n}\udc80", "tokens": len(document), "bytes": n, "id": n} for n, document in enumerate(documents)
    ]
    manifest = json.loads(files.pop("manifest.json"))
    assert manifest.pop("files") == {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    }
    assert manifest == {
        "format": FORMAT, "dtype": "uint16", "vocab_size": VOCAB, "tokenizer": "mark", "num_documents": 40,
        "num_tokens": len(tokens), "num_bytes": sum(range(40)), "block_tokens": BLOCK_TOKENS, "megatron_index": True,
        "origin": "here", "licence": None,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_going_on_from_a_mark_gives_the_same_bytes(tmp_path, seed):
    """Marked at random moments, abandoned later without a word, gone on with by another writer."""
    draw, todo = random.Random(seed), list(steps(drawn(seed)))
    with ShardWriter(tmp_path / "whole", VOCAB, "mark") as shard:
        for step in todo:
            step(shard)
    at, state, goes_on = 0, {}, True
    while goes_on:
        shard = ShardWriter(tmp_path / "s", VOCAB, "mark", state=json.loads(json.dumps(state))).__enter__()
        marked, stop = at + draw.randrange(40), at + draw.randrange(60)
        for n in range(at, len(todo)):
            if n == marked:
                at, state = n, shard.mark()
            if n >= max(stop, marked):
                [file.close() for file in shard._files]  # as much as a killed process may have written
                break
            todo[n](shard)
        else:
            shard.__exit__(None, None, None)
            goes_on = False
    assert snapshot(tmp_path / "s") == snapshot(tmp_path / "whole")


def test_going_on_after_the_shard_was_finished(tmp_path):
    """Killed between finishing the files and saying so."""
    todo = list(steps(drawn(9, number=5)))
    with ShardWriter(tmp_path / "s", VOCAB, "mark", state={}) as shard:
        [step(shard) for step in todo[:6]]
        state = shard.mark()
        [step(shard) for step in todo[6:]]
    before = snapshot(tmp_path / "s")
    (tmp_path / "s").rename(tmp_path / "s.tmp")
    with ShardWriter(tmp_path / "s", VOCAB, "mark", state=state) as shard:
        [step(shard) for step in todo[6:]]
    assert snapshot(tmp_path / "s") == before


@pytest.mark.parametrize("name", ["tokens.bin", "documents.jsonl", "documents.npy", "digests.npy", "crc.npy"])
def test_files_shorter_than_the_mark_are_refused(tmp_path, name):
    with ShardWriter(tmp_path / "s", VOCAB, "mark", state={}) as shard:
        shard.write(np.zeros(BLOCK_TOKENS + 1, dtype=int))
        shard.end_document("a", 1)
        state = shard.mark()
    (tmp_path / "s").rename(tmp_path / "s.tmp")
    with open(tmp_path / "s.tmp" / name, "r+b") as file:
        file.truncate(8)
    with pytest.raises(DataError, match=rf"s\.tmp/{name} has 8 of the \d+ bytes that were marked$"):
        ShardWriter(tmp_path / "s", VOCAB, "mark", state=state).__enter__()


@pytest.mark.parametrize("resumable", [False, True])
def test_an_error_leaves_no_shard(tmp_path, resumable):
    with (
        pytest.raises(ZeroDivisionError),
        ShardWriter(tmp_path / "s", VOCAB, "mark", state={} if resumable else None) as shard,
    ):
        shard.write(np.array([1]))
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == (["s.tmp"] if resumable else [])


def test_a_shard_is_never_written_over(tmp_path):
    with ShardWriter(tmp_path / "s", VOCAB, "mark"):
        pass
    with pytest.raises(FileExistsError, match="never written over"):
        ShardWriter(tmp_path / "s", VOCAB, "mark")
    shard = open_shard(tmp_path / "s")
    assert (shard.num_tokens, shard.num_documents) == (0, 0)


def test_misuse_is_our_bug(tmp_path):
    def writing(name):
        return ShardWriter(tmp_path / name, VOCAB, "")

    with pytest.raises(AssertionError, match="lacks its end token"), writing("a") as shard:
        shard.end_document("x", 0)
    with (
        pytest.raises(AssertionError, match="token 500 of 500 pieces"),
        ShardWriter(tmp_path / "b", VOCAB, "") as shard,
    ):
        shard.write(np.array([3, 500]))
    with pytest.raises(AssertionError, match="token -1 of"), writing("c") as shard:
        shard.write(np.array([-1]))
    with pytest.raises(AssertionError, match="not ended"), writing("d") as shard:
        shard.write(np.array([1]))
    with pytest.raises(AssertionError, match="digest of 3 bytes"), writing("e") as shard:
        shard.write(np.array([1]))
        shard.end_document("x", 0, b"abc")
    assert not list(tmp_path.iterdir())


def test_large_vocabularies_take_four_bytes(tmp_path):
    """C050: ids above 65,535."""
    with ShardWriter(tmp_path / "s", 70_000, "mark") as shard:
        shard.write(np.array([69_999, 0, 65_536]))
        shard.end_document("a", 1)
    assert open_shard(tmp_path / "s").read(0, 3).tolist() == [69_999, 0, 65_536]
    assert (tmp_path / "s" / "tokens.bin").stat().st_size == 12


def test_a_document_without_digest_has_that_of_its_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_PORTION", 64)
    with ShardWriter(tmp_path / "s", VOCAB, "mark") as shard:
        for document in ([1] * 1000, [2], [1] * 1000):
            shard.write(np.array(document))
            shard.end_document("a", 1)
    found = np.load(tmp_path / "s" / "digests.npy")
    expected = [hashlib.blake2b(struct.pack("<H", n) * count, digest_size=16) for n, count in ((1, 1000), (2, 1))]
    assert [row.tobytes() for row in found] == [expected[n].digest() for n in (0, 1, 0)]


@pytest.mark.parametrize("documents", [[], [[1, 2, 3], [4]], [[5]] * 10])
def test_megatron_index(tmp_path, monkeypatch, documents):
    """Header, lengths, byte pointers and document numbers, as its reader takes them apart."""
    monkeypatch.setattr(writer, "_PORTION", 3)
    with ShardWriter(tmp_path / "s", VOCAB, "mark") as shard:
        for document in documents:
            shard.write(np.array(document))
            shard.end_document("a", 1)
    data, n = (tmp_path / "s" / "tokens.idx").read_bytes(), len(documents)
    assert data[:9] == b"MMIDIDX\x00\x00" and struct.unpack("<QBQQ", data[9:34]) == (1, 8, n, n + 1)
    lengths, rest = np.frombuffer(data[34 : 34 + 4 * n], "<i4"), data[34 + 4 * n :]
    pointers, numbers = np.frombuffer(rest[: 8 * n], "<i8"), np.frombuffer(rest[8 * n :], "<i8")
    assert lengths.tolist() == [len(document) for document in documents]
    assert pointers.tolist() == [2 * sum(map(len, documents[:k])) for k in range(n)]
    assert numbers.tolist() == list(range(n + 1))


def test_documents_too_long_for_megatron(tmp_path, monkeypatch):
    """C052: said where an index of int32 lengths is left out."""
    monkeypatch.setattr(writer, "LONGEST_MEGATRON", 10)
    with ShardWriter(tmp_path / "a", VOCAB, "mark", state={}) as shard:
        shard.write(np.zeros(11, dtype=int))
        shard.end_document("a", 1)
        state = shard.mark()
    (tmp_path / "a").rename(tmp_path / "s.tmp")
    (tmp_path / "s.tmp" / "manifest.json").unlink()
    with ShardWriter(tmp_path / "s", VOCAB, "mark", state=state) as shard:
        shard.write(np.zeros(3, dtype=int))
        shard.end_document("b", 1)
    told = json.loads((tmp_path / "s" / "manifest.json").read_text())["megatron_index"]
    assert told == "the longest document has 11 tokens, tokens.idx holds lengths up to 10"
    assert not (tmp_path / "s" / "tokens.idx").exists() and open_shard(tmp_path / "s").num_tokens == 14


def test_publish_replaces_a_file_but_no_folder(tmp_path):
    for value in (1, 2):
        write_json(tmp_path / "a.tmp", value)
        publish(tmp_path / "a.tmp", tmp_path / "a")
    assert json.loads((tmp_path / "a").read_text()) == 2 and not (tmp_path / "a.tmp").exists()
    for name in ("b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with pytest.raises(OSError, match="not empty"):
        publish(tmp_path / "b", tmp_path / "c")
