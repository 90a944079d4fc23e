"""Files as blocks: written whole and summed, read ahead, and each block that was changed found."""

import os
import threading
import zlib

import pytest

from training.checkpoint import blocks
from training.checkpoint.blocks import cut, read_blocks, write_file
from training.checkpoint.files import CheckpointError


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 10)
    monkeypatch.setattr(blocks, "FLUSH_BLOCKS", 3)


CONTENT = bytes(range(1, 251))
# (position, length) of the parts: gaps, edges of blocks, parts of several blocks, none
PLACES = {
    "one": [(0, 10)],
    "over edges": [(0, 7), (7, 6), (13, 37)],
    "gaps": [(3, 4), (20, 1), (39, 2), (64, 100)],
    "many": [(3 * at, 2) for at in range(70)],
    "nothing": [],
}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("most", [1 << 20, 4])
def test_a_file_holds_its_parts_and_their_sums(tmp_path, monkeypatch, places, most):
    """Also where the system writes but a part of what it is given."""
    monkeypatch.setattr(blocks, "BUFFERS_A_CALL", 3)
    monkeypatch.setattr(os, "writev", lambda file, parts: os.write(file, b"".join(parts)[:most]))
    expected = bytearray(max((at + size for at, size in places), default=0))
    for at, size in places:
        expected[at : at + size] = CONTENT[at : at + size]
    sums = write_file(tmp_path / "f", cut((at, memoryview(CONTENT)[at : at + size]) for at, size in places))
    assert (tmp_path / "f").read_bytes() == expected and sums.bytes == len(expected)
    assert sums.crc32 == [zlib.crc32(expected[at : at + 10]) for at in range(0, len(expected), 10)]


def test_a_file_is_never_written_over(tmp_path):
    (tmp_path / "f").write_bytes(b"there before")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "f", [])
    assert (tmp_path / "f").read_bytes() == b"there before"


@pytest.fixture
def written(tmp_path):
    return tmp_path / "f", write_file(tmp_path / "f", cut([(0, memoryview(CONTENT)[:245])]))


@pytest.mark.parametrize("numbers", [range(25), [24], [0, 7, 8, 24], []])
def test_blocks_are_read_in_order(written, numbers):
    path, sums = written
    found = [(number, block.tobytes(), whole) for number, block, whole in read_blocks(path, sums, numbers)]
    assert found == [(number, CONTENT[10 * number : min(10 * number + 10, 245)], True) for number in numbers]


def test_each_flipped_bit_is_found_in_its_block(written):
    path, sums = written
    for at in range(245):
        changed = bytearray(CONTENT[:245])
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        assert [n for n, _, whole in read_blocks(path, sums, range(25)) if not whole] == [at // 10]


def test_what_cannot_be_read_is_said_and_leaves_no_thread(written, tmp_path):
    path, sums = written
    before = threading.active_count()
    os.truncate(path, 101)
    with pytest.raises(CheckpointError, match="f ends at byte 101"):
        list(read_blocks(path, sums, range(25)))
    next(read_blocks(path, sums, range(10)))  # whoever reads stops early
    assert threading.active_count() == before


def test_neither_links_nor_pipes_are_opened(written, tmp_path):
    """C116: a pipe would hold up the reader for ever."""
    path, sums = written
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            list(read_blocks(tmp_path / name, sums, [0]))
