"""The token shard: what is written is what is read, and nothing damaged is read at all."""

import gc
import hashlib
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from data.format import BLOCK_TOKENS, DataError, check_vocabulary, open_shard
from data.writer import ShardWriter
from tests.shards import describe_anew, write_documents

ROOT = Path(__file__).parents[2]


def write(folder, documents, vocab_size=1000):
    with ShardWriter(folder, vocab_size, "pieces") as writer:
        for number, tokens in enumerate(documents):
            for part in np.array_split(np.array(tokens), 3):
                writer.write(part)
            writer.end_document(f"document {number}", num_bytes=10 * len(tokens), licence="BSD")
    return folder


def test_reads_what_was_written(tmp_path):
    """C056: a stored length counts the end token; lengths, offsets and file size agree."""
    documents = [[5, 6, 2], [2], [7, 8, 9, 2]]
    shard = open_shard(write(tmp_path / "train", documents))
    assert shard.offsets.tolist() == [0, 3, 4, 8] and shard.offsets.dtype == np.int64
    assert shard.read(0, 8).tolist() == [5, 6, 2, 2, 7, 8, 9, 2]
    assert shard.read(2, 5).tolist() == [2, 2, 7]
    assert shard.read(8, 8).tolist() == []
    assert all(shard.read(stop - 1, stop) == [2] for stop in shard.offsets[1:].tolist())
    assert [(d["name"], d["tokens"], d["bytes"], d["licence"]) for d in shard.documents()] == [
        ("document 0", 3, 30, "BSD"), ("document 1", 1, 10, "BSD"), ("document 2", 4, 40, "BSD")
    ]  # fmt: skip
    assert (tmp_path / "train" / "tokens.bin").read_bytes() == struct.pack("<8H", 5, 6, 2, 2, 7, 8, 9, 2)
    assert not (tmp_path / "train.tmp").exists()


@pytest.mark.parametrize(
    ("vocab_size", "name", "ids"),
    [
        (65_536, "uint16", [50_256, 65_535]),
        (65_537, "uint32", [65_535, 65_536]),
        (128_256, "uint32", [119_546, 128_000]),
    ],
)
def test_dtype_holds_the_vocabulary(tmp_path, vocab_size, name, ids):
    """C050: no id wraps, at the border of uint16 and beyond."""
    shard = open_shard(write(tmp_path / "s", [ids], vocab_size))
    assert shard.dtype.name == name and shard.manifest["dtype"] == name
    assert shard.read(0, 2).tolist() == ids


def test_an_id_beyond_the_vocabulary_is_our_own_bug(tmp_path):
    with pytest.raises(AssertionError, match="1000 pieces"):
        write(tmp_path / "s", [[1, 1000]])
    assert not any(tmp_path.iterdir())


def test_offsets_beyond_int32(tmp_path):
    """C052, I09: three documents of 1e9 tokens in a sparse file; no offset wraps, and the last tokens are read."""
    folder = write(tmp_path / "s", [[1]])
    np.save(folder / "documents.npy", np.arange(4, dtype=np.int64) * 1_000_000_000)
    blocks = -(-3_000_000_000 // BLOCK_TOKENS)
    zeros, last = bytes(2 * BLOCK_TOKENS), bytes(2 * (3_000_000_000 - (blocks - 1) * BLOCK_TOKENS))
    crc = np.full(blocks, zlib.crc32(zeros), dtype=np.uint32)
    crc[-1] = zlib.crc32(last)
    np.save(folder / "crc.npy", crc)
    os.truncate(folder / "tokens.bin", 6_000_000_000)
    describe_anew(folder, num_documents=3, num_tokens=3_000_000_000)
    shard = open_shard(folder)
    assert shard.offsets.tolist() == [0, 1_000_000_000, 2_000_000_000, 3_000_000_000]
    assert shard.read(2_999_999_990, 3_000_000_000).tolist() == [0] * 10


def test_a_million_documents_of_one_token(tmp_path):
    """I09: their index is an array, and opening them takes no loop over documents."""
    folder = write(tmp_path / "s", [[1]])
    np.save(folder / "documents.npy", np.arange(1_000_001, dtype=np.int64))
    tokens = np.arange(1_000_000) % 1000
    (folder / "tokens.bin").write_bytes(tokens.astype("<u2").tobytes())
    parts = [tokens[start : start + BLOCK_TOKENS] for start in range(0, len(tokens), BLOCK_TOKENS)]
    np.save(folder / "crc.npy", np.array([zlib.crc32(part.astype("<u2").tobytes()) for part in parts], np.uint32))
    describe_anew(folder, num_documents=1_000_000, num_tokens=1_000_000)
    shard = open_shard(folder)
    assert shard.num_documents == 1_000_000 and shard.offsets.dtype == np.int64
    assert (shard.read(999_000, 1_000_000) == tokens[-1000:]).all()


def test_megatron_index(tmp_path):
    """Header, lengths, byte pointers and document index where Megatron-LM's reader looks for them."""
    data = (write(tmp_path / "s", [[5, 6, 2], [7, 2]]) / "tokens.idx").read_bytes()
    assert struct.unpack_from("<9sQBQQ", data) == (b"MMIDIDX\x00\x00", 1, 8, 2, 3)
    assert struct.unpack_from("<2i2q3q", data, 34) == (3, 2, 0, 6, 0, 1, 2)
    assert len(data) == 34 + 2 * 4 + 2 * 8 + 3 * 8
    wide = (write(tmp_path / "w", [[5, 6]], vocab_size=70_000) / "tokens.idx").read_bytes()
    assert wide[17] == 4


@pytest.mark.parametrize("cut", [1, 2, None])
def test_truncated_file_is_refused(tmp_path, cut):
    """C053: one byte, one token, or everything missing: path, expected and found size are named."""
    path = write(tmp_path / "s", [list(range(1, 701))]) / "tokens.bin"
    os.truncate(path, 1400 - cut if cut else 0)
    with pytest.raises(DataError, match=rf"s/tokens\.bin has {1400 - cut if cut else 0} bytes.*1400.*data\.prepare"):
        open_shard(path.parent)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "holds no prepared data"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "has format"),
        (lambda folder: (folder / "crc.npy").unlink(), "crc.npy is missing"),
    ],
)
def test_missing_parts_are_named(tmp_path, spoil, message):
    folder = write(tmp_path / "s", [[1, 2]])
    spoil(folder)
    with pytest.raises(DataError, match=message):
        open_shard(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_tokens", 5),
        ("num_documents", 1),
        ("num_documents", -1),
        ("num_bytes", 1 << 63),
        ("vocab_size", "1000"),
        ("vocab_size", 70_000),
        ("num_bytes", None),
        ("tokenizer", 7),
        ("block_tokens", 4096),
        ("files", []),
        ("files", {"tokens.bin": {"bytes": 8, "sha256": "0"}}),
        ("format", 1),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path, key, value):
    """Each number that a manifest says is held against the files, each of its keys is there and of its type."""
    path = write(tmp_path / "s", [[1, 2], [3, 4]]) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {key: value}))
    with pytest.raises(DataError, match=r"s/(manifest\.json|tokens\.bin|documents\.npy).*data\.prepare"):
        open_shard(path.parent)


@pytest.mark.parametrize("name", ["documents.npy", "crc.npy", "digests.npy", "documents.jsonl"])
def test_a_flipped_byte_is_found_in_each_file(tmp_path, name):
    folder = write(tmp_path / "s", [[1, 2], [3, 4]])
    data = bytearray((folder / name).read_bytes())
    data[12 if name == "documents.jsonl" else -3] ^= 1  # a letter of a name: still JSON
    (folder / name).write_bytes(data)
    with pytest.raises(DataError, match=rf"s/{name} is corrupt.*data\.prepare"):
        shard = open_shard(folder)
        shard.digests()
        list(shard.documents())


@pytest.mark.parametrize(
    "line",
    [
        "null",
        "[" * 100_000,
        '{"tokens": 2, "bytes": 2}',
        '{"name": 7, "tokens": 2, "bytes": 2}',
        '{"name": "a", "tokens": "2", "bytes": 2}',
        '{"name": "a", "tokens": NaN, "bytes": 2}',
        '{"name": "a", "tokens": true, "bytes": 2}',
        '{"name": "a", "tokens": -2, "bytes": 2}',
        '{"name": "a", "tokens": 2, "bytes": null}',
        f'{{"name": "a", "tokens": 2, "bytes": {1 << 63}}}',
    ],
)
def test_a_line_that_tells_no_document(tmp_path, line):
    """Whatever JSON it is, and although the hash of its file is right."""
    folder = write(tmp_path / "s", [[1, 2]])
    (folder / "documents.jsonl").write_text(line + "\n")
    describe_anew(folder)
    with pytest.raises(DataError, match=r"s/documents\.jsonl is corrupt, line 1 does not tell name.*data\.prepare"):
        list(open_shard(folder).documents())


def test_lines_are_as_many_as_documents(tmp_path):
    folder = write(tmp_path / "s", [[1, 2]])
    (folder / "documents.jsonl").write_text("")
    describe_anew(folder)
    with pytest.raises(DataError, match=r"s/documents\.jsonl tells 0 documents of 1: .*data\.prepare"):
        list(open_shard(folder).documents())


def test_digests_are_those_of_the_text(tmp_path):
    """Two numbers a document, little-endian, of the 16 bytes that the writer was given."""
    texts = [b"one", b"two", b"one"]
    with ShardWriter(tmp_path / "s", 10, "pieces") as writer:
        for text in texts:
            writer.write(np.array([1]))
            writer.end_document("d", len(text), digest=hashlib.blake2b(text, digest_size=16).digest())
    digests = open_shard(tmp_path / "s").digests()
    assert digests.shape == (3, 2) and digests.dtype == np.uint64
    assert [row.astype("<u8").tobytes() for row in digests] == [
        hashlib.blake2b(text, digest_size=16).digest() for text in texts
    ]


@pytest.mark.parametrize("places", [[(0, 3), (3, 9)], [(5, 70_000), (70_000, 70_001), (70_001, 200_000)]])
def test_pieces_in_turn_read_no_block_twice(tmp_path, monkeypatch, places):
    """Whoever reads on from where the last reading ended finds its block, which was read whole for its checksum."""
    tokens = np.random.default_rng(4).integers(0, 1000, 4 * BLOCK_TOKENS)
    shard = open_shard(write(tmp_path / "s", [tokens]))
    read, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: read.append(preadv(*given)) or read[-1])
    for start, stop in places:
        assert (shard.read(start, stop) == tokens[start:stop]).all()
    blocks = -(-places[-1][1] // BLOCK_TOKENS) - places[0][0] // BLOCK_TOKENS
    assert sum(read) == blocks * BLOCK_TOKENS * 2
    read.clear()
    assert (shard.read(100, 200) == tokens[100:200]).all() and sum(read) <= 200  # once checked, no more


def test_what_a_reader_changes_is_its_own(tmp_path):
    """An array that was read is not the one that the next reading gets."""
    shard = open_shard(write(tmp_path / "s", [[1, 2, 3]]))
    for _ in range(3):
        read = shard.read(0, 3)
        assert read.tolist() == [1, 2, 3]
        read[:] = 9


def test_reading_in_threads(tmp_path):
    tokens = np.random.default_rng(5).integers(0, 1000, 5 * BLOCK_TOKENS)
    shard = open_shard(write(tmp_path / "s", [tokens]))
    ranges = np.sort(np.random.default_rng(6).integers(0, len(tokens) + 1, (400, 2)), axis=1).tolist()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda place: (shard.read(*place) == tokens[slice(*place)]).all(), ranges))


def test_more_shards_than_files_may_be_open(tmp_path, monkeypatch):
    """A shard holds no file open for itself; those used longest ago are closed, and opened again."""
    monkeypatch.setattr("data.storage.MOST_OPEN", 2)
    shards = [open_shard(write_documents(tmp_path, [[n, n + 1]], 10, name=str(n))) for n in range(5)]
    for _ in range(2):
        assert [shard.read(0, 2).tolist() for shard in shards] == [[n, n + 1] for n in range(5)]
    held = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if alive(number)]
    assert sum(str(tmp_path) in path for path in held) == 2
    for shard in shards:
        shard.close()
    held = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if alive(number)]
    assert not any(str(tmp_path) in path for path in held)
    assert shards[3].read(0, 2).tolist() == [3, 4]


def test_many_shards_on_a_system_that_allows_few_open_files(tmp_path):
    """256 a process, as macOS does."""
    first = write_documents(tmp_path, [[1, 2]], 10, name="0")
    shards = [open_shard(shutil.copytree(first, tmp_path / str(n))) for n in range(1, 280)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert all(shard.read(0, 2).tolist() == [1, 2] for shard in shards)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_shards_that_are_let_go_while_others_are_read(tmp_path):
    """Whatever the garbage collector clears away, at any moment of a reading, holds up no reading."""
    folders = [write_documents(tmp_path, [[n]], 10, name=str(n)) for n in range(8)]

    def reads(number):
        for _ in range(60):
            shard = open_shard(folders[number % 8])
            shard.itself = shard  # which only the garbage collector finds
            assert shard.read(0, 1).tolist() == [number % 8]
        return True

    before, threshold = len(os.listdir("/proc/self/fd")), gc.get_threshold()
    gc.set_threshold(3)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(reads, range(16), timeout=60))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def alive(number):
    return os.path.islink(f"/proc/self/fd/{number}")


def test_dtype_of_the_manifest_is_checked(tmp_path):
    """C051: both dtypes are named."""
    path = write(tmp_path / "s", [[1, 2, 3, 4]]) / "manifest.json"
    path.write_text(path.read_text().replace('"uint16"', '"int32"'))
    with pytest.raises(DataError, match=r"int32.*uint16"):
        open_shard(path.parent)


def test_corrupt_block_is_refused_and_others_are_read(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 1000, 2 * BLOCK_TOKENS + 100)
    folder = write(tmp_path / "s", [tokens])
    assert np.load(folder / "crc.npy").tolist() == [
        zlib.crc32(tokens[start : start + BLOCK_TOKENS].astype("<u2").tobytes())
        for start in (0, BLOCK_TOKENS, 2 * BLOCK_TOKENS)
    ]
    with open(folder / "tokens.bin", "r+b") as file:
        file.seek(2 * BLOCK_TOKENS + 10)
        file.write(b"\xff")
    shard = open_shard(folder)
    assert (shard.read(0, BLOCK_TOKENS) == tokens[:BLOCK_TOKENS]).all()
    assert (shard.read(2 * BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS + 100) == tokens[2 * BLOCK_TOKENS + 1 :]).all()
    with pytest.raises(DataError, match=rf"corrupt.* {BLOCK_TOKENS} "):
        shard.read(BLOCK_TOKENS - 1, BLOCK_TOKENS + 1)


def test_any_range_reads_the_same_before_and_after_its_check(tmp_path):
    tokens = np.random.default_rng(1).integers(0, 70_000, 3 * BLOCK_TOKENS + 7)
    folder = write(tmp_path / "s", [tokens], vocab_size=70_000)
    for start, stop in np.sort(np.random.default_rng(2).integers(0, len(tokens) + 1, (20, 2)), axis=1):
        shard = open_shard(folder)
        for _ in range(2):
            assert (shard.read(int(start), int(stop)) == tokens[start:stop]).all()


def test_a_failed_writer_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), ShardWriter(tmp_path / "s", 10, "pieces") as writer:
        writer.write(np.array([1, 2]))
        raise KeyError
    assert not any(tmp_path.iterdir())


def test_a_killed_writer_leaves_nothing_under_the_name(tmp_path):
    """C053: killed halfway, nothing loads; writing again heals."""
    code = (
        "import numpy as np, os, signal, pathlib, sys\nfrom data.writer import ShardWriter\n"
        "w = ShardWriter(pathlib.Path(sys.argv[1]), 10, 'pieces').__enter__()\n"
        "w.write(np.ones(2_000_000, dtype=int)); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], cwd=ROOT)
    assert done.returncode == -9 and [path.name for path in tmp_path.iterdir()] == ["s.tmp"]
    with pytest.raises(DataError, match="holds no prepared data"):
        open_shard(tmp_path / "s")
    assert open_shard(write(tmp_path / "s", [[1, 2]])).num_tokens == 2
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_shard_is_never_written_over(tmp_path):
    write(tmp_path / "s", [[1, 2]])
    with pytest.raises(FileExistsError):
        write(tmp_path / "s", [[3]])
    assert open_shard(tmp_path / "s").read(0, 2).tolist() == [1, 2]


def test_fingerprint_names_the_content(tmp_path):
    first = open_shard(write(tmp_path / "a", [[1, 2], [3]])).fingerprint
    assert open_shard(write(tmp_path / "b", [[1, 2], [3]])).fingerprint == first
    others = [[[1], [2, 3]], [[1, 2], [4]]]
    assert all(open_shard(write(tmp_path / f"{i}", d)).fingerprint != first for i, d in enumerate(others))
    assert open_shard(write(tmp_path / "v", [[1, 2], [3]], vocab_size=1001)).fingerprint != first


@pytest.mark.parametrize("vocab_size", [500, 1001])
def test_vocabulary_of_the_model_must_be_that_of_the_data(tmp_path, vocab_size):
    """C068: both sizes and the legal choice."""
    shard = open_shard(write(tmp_path / "s", [[1]]))
    check_vocabulary(shard, 1000)
    with pytest.raises(ValueError, match=rf"model\.vocab_size={vocab_size} .*use model\.vocab_size=1000"):
        check_vocabulary(shard, vocab_size)
