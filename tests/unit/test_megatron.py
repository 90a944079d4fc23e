"""Files of Megatron-LM, made here byte by byte as its code writes them: read as they are, or refused."""

import os
import struct

import numpy as np
import pytest

from data.format import BLOCK_TOKENS, DataError, check_vocabulary, open_shard
from data.shards import open_tokens
from tests.shards import write_documents

CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}


def write_pair(prefix, documents, dtype="<u2", *, magic=b"MMIDIDX\x00\x00", version=1, code=None, tail=b""):
    """Documents as lists of sequences, each a list of ids."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    size = np.dtype(dtype).itemsize
    starts = [sum(lengths[:number]) * size for number in range(len(lengths))]
    index = [sum(len(document) for document in documents[:number]) for number in range(len(documents) + 1)]
    data = magic + struct.pack("<QBQQ", version, code or CODES[dtype], len(lengths), len(index))
    data += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(starts)}q", *starts)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(prefix.name + ".idx").write_bytes(data + struct.pack(f"<{len(index)}q", *index) + tail)
    ids = np.array([token for sequence in sequences for token in sequence], dtype=dtype)
    prefix.with_name(prefix.name + ".bin").write_bytes(ids.tobytes())
    return prefix


@pytest.mark.parametrize(
    ("dtype", "read_as", "highest"),
    [
        ("u1", "uint16", 255),
        ("i1", "uint16", 127),
        ("<i2", "uint16", 32_767),
        ("<u2", "uint16", 65_535),
        ("<i4", "uint32", 128_255),
        ("<i8", "uint32", 128_255),
    ],
)
def test_each_dtype_is_read(tmp_path, dtype, read_as, highest):
    """C050: no id wraps, whatever the files hold."""
    tokens = open_tokens(write_pair(tmp_path / "text", [[[1, 2], [highest]], [[0]]], dtype))
    assert tokens.read(0, 4).dtype == read_as
    assert tokens.read(0, 4).tolist() == [1, 2, highest, 0] and tokens.read(2, 2).tolist() == []


@pytest.mark.parametrize("name", ["text_document", "text_document.idx", "text_document.bin", ""])
def test_a_document_is_all_its_sequences(tmp_path, name):
    """Those without tokens are passed by, and the others keep their numbers in the files."""
    write_pair(tmp_path / "text_document", [[[1, 2], [3]], [], [[4], [], [5, 6]], [[]], [[7]], []])
    tokens = open_tokens(f"{tmp_path}/{name}")
    assert tokens.offsets.tolist() == [0, 3, 6, 7] and tokens.offsets.dtype == np.int64
    assert [(d["name"], d["tokens"], d["bytes"]) for d in tokens.documents()] == [
        ("text_document:0", 3, None), ("text_document:2", 3, None), ("text_document:4", 1, None)
    ]  # fmt: skip
    assert tokens.read(3, 7).tolist() == [4, 5, 6, 7]
    assert tokens.num_bytes is tokens.vocab_size is tokens.tokenizer is tokens.digests() is None


def test_several_pairs_are_read_in_natural_order(tmp_path):
    """I11: shards by their numbers, without zeros in front; a cache of Megatron's beside them is passed by."""
    for number in (10, 1, 2):
        write_pair(tmp_path / f"part_{number}", [[[number]], [[number, number]]])
    (tmp_path / "cache").mkdir()
    (tmp_path / "._part_1.idx").write_bytes(b"\x00")
    tokens = open_tokens(tmp_path)
    assert tokens.read(0, 9).tolist() == [1, 1, 1, 2, 2, 2, 10, 10, 10]
    (tmp_path / "part_2.idx").unlink()
    with pytest.raises(DataError, match=r"part_2\.idx is missing"):
        open_tokens(tmp_path)


def test_no_documents_at_all(tmp_path):
    assert open_tokens(write_pair(tmp_path / "text", [[], [[]]])).offsets.tolist() == [0]


def test_our_own_index_is_one_of_theirs(tmp_path):
    """What we write beside a shard names the same documents."""
    documents = [[5, 6, 2], [7, 2], list(range(1, 90))]
    for vocab_size in (100, 70_000):
        shard = open_shard(write_documents(tmp_path / str(vocab_size), documents, vocab_size))
        theirs = open_tokens(f"{shard.where}/tokens")
        assert theirs.offsets.tolist() == shard.offsets.tolist() and theirs.dtype == shard.dtype
        assert (theirs.read(0, shard.num_tokens) == shard.read(0, shard.num_tokens)).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"magic": b"TNTIDX\x00\x00\x00"}, "is no Megatron index"),
        ({"version": 2}, "has version 2"),
        ({"code": 7}, "has dtype code 7"),
        ({"code": 99}, "has dtype code 99"),
        ({"code": 4}, "has 6 bytes, its index expects 12 .3 tokens of int32"),
        ({"tail": b"\x00" * 2}, "74 are expected of 2 sequences and a document index of 2"),
    ],
)
def test_other_files_are_refused(tmp_path, given, message):
    """C051, I08: version, dtype and size are held against what is there."""
    with pytest.raises(DataError, match=rf"text\.(idx|bin) .*{message}" if "code" in given else message):
        open_tokens(write_pair(tmp_path / "text", [[[1, 2], [3]]], **given))


@pytest.mark.parametrize("cut", [1, 2, None])
@pytest.mark.parametrize("end", ["bin", "idx"])
def test_truncated_files_are_refused(tmp_path, end, cut):
    """C053, I08: by one byte, by one token, empty."""
    path = write_pair(tmp_path / "text", [[[1, 2], [3]]]).with_name(f"text.{end}")
    os.truncate(path, path.stat().st_size - cut if cut else 0)
    with pytest.raises(DataError, match=rf"text\.{end}.*(bytes|no Megatron index)"):
        open_tokens(tmp_path / "text")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [(34, "<i", "index expects 0"), (34 + 8, "<q", "end to end"), (34 + 8 + 16, "<q", "document index")],
)
def test_a_damaged_index_is_refused(tmp_path, at, value, message):
    """I08: negative lengths, pointers elsewhere, documents that begin beyond the sequences."""
    path = write_pair(tmp_path / "text", [[[1, 2], [3]]]).with_name("text.idx")
    data = bytearray(path.read_bytes())
    struct.pack_into(value, data, at, -1)
    path.write_bytes(data)
    with pytest.raises(DataError, match=message):
        open_tokens(tmp_path / "text")


def test_ids_are_checked_when_they_are_read(tmp_path):
    """C068: files do not say whose ids they hold; one that the model lacks names the document it is in."""
    prefix = write_pair(tmp_path / "text", [[[1, 2]], [], [[3, 50_256]], [[4]]])
    tokens = open_tokens(prefix, vocab_size=50_256)
    check_vocabulary(tokens, 50_256)
    assert tokens.read(0, 3).tolist() == [1, 2, 3] and tokens.read(4, 5).tolist() == [4]
    with pytest.raises(ValueError, match=r"text\.bin has id 50256 in document 2, beyond model\.vocab_size=50256"):
        tokens.read(2, 5)
    assert open_tokens(prefix, vocab_size=50_257).read(3, 4).tolist() == [50_256]
    negative = open_tokens(write_pair(tmp_path / "signed", [[[1]], [[-1]]], "<i4"))
    with pytest.raises(ValueError, match="id -1 in document 1, beyond 32 bits"):
        negative.read(0, 2)


def test_offsets_beyond_int32(tmp_path):
    """C052, I09: three documents of 1e9 tokens in a sparse file."""
    prefix = write_pair(tmp_path / "text", [[[0]]] * 3)
    size = 2 * 10**9
    data = struct.pack("<9sQBQQ3i3q4q", b"MMIDIDX\x00\x00", 1, 8, 3, 4, *[10**9] * 3, 0, size, 2 * size, 0, 1, 2, 3)
    prefix.with_name("text.idx").write_bytes(data)
    os.truncate(prefix.with_name("text.bin"), 3 * size)
    with open(prefix.with_name("text.bin"), "r+b") as file:
        file.seek(3 * size - 2)
        file.write(b"\x07\x00")
    tokens = open_tokens(prefix)
    assert tokens.offsets.tolist() == [0, 10**9, 2 * 10**9, 3 * 10**9]
    assert tokens.read(3 * 10**9 - 2, 3 * 10**9).tolist() == [0, 7]


def test_fingerprint_names_the_content(tmp_path):
    """Equal for a copy; another for other tokens, wherever in a small file, and for other documents."""
    ids = np.random.default_rng(0).integers(0, 1000, 3 * BLOCK_TOKENS).tolist()
    first = open_tokens(write_pair(tmp_path / "a", [[ids]])).fingerprint
    assert open_tokens(write_pair(tmp_path / "b", [[ids]])).fingerprint == first
    for at in (0, len(ids) // 2, len(ids) - 1):
        changed = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
        assert open_tokens(write_pair(tmp_path / f"c{at}", [[changed]])).fingerprint != first
    assert open_tokens(write_pair(tmp_path / "d", [[ids[:5]], [ids[5:]]])).fingerprint != first
