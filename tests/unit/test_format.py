"""The token shard: what is written is what is read, and nothing damaged is read at all."""

import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from data import format as shards
from data.format import BLOCK_TOKENS, DataError, ShardWriter, check_vocabulary, open_shard

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


def test_offsets_beyond_int32(tmp_path, monkeypatch):
    """C052: three documents of 1e9 tokens in a sparse file; Megatron's index of each still fits."""
    folder = write(tmp_path / "s", [[1]])
    offsets = np.arange(4, dtype=np.int64) * 1_000_000_000
    np.save(folder / "documents.npy", offsets)
    blocks = -(-3_000_000_000 // BLOCK_TOKENS)
    zeros, last = bytes(2 * BLOCK_TOKENS), bytes(2 * (3_000_000_000 - (blocks - 1) * BLOCK_TOKENS))
    crc = np.full(blocks, zlib.crc32(zeros), dtype=np.uint32)
    crc[-1] = zlib.crc32(last)
    np.save(folder / "crc.npy", crc)
    os.truncate(folder / "tokens.bin", 6_000_000_000)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"num_documents": 3, "num_tokens": 3_000_000_000}
    for name, facts in manifest["files"].items():
        facts["bytes"] = (folder / name).stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))
    shard = open_shard(folder)
    assert shard.offsets.tolist() == [0, 1_000_000_000, 2_000_000_000, 3_000_000_000]
    assert shard.read(2_999_999_990, 3_000_000_000).tolist() == [0] * 10
    shards._write_megatron_index(folder / "tokens.idx", offsets, np.dtype("<u2"))
    data = (folder / "tokens.idx").read_bytes()
    assert struct.unpack_from("<3i3q", data, 34) == (10**9, 10**9, 10**9, 0, 2 * 10**9, 4 * 10**9)
    shards._write_megatron_index(folder / "none.idx", np.array([0, 1 << 31]), np.dtype("<u2"))
    assert not (folder / "none.idx").exists()


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
        "import numpy as np, os, signal, pathlib, sys\nfrom data.format import ShardWriter\n"
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
