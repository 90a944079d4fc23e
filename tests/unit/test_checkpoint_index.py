"""`tensors.json`: what it says is believed only where it can be so."""

import json
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from training.checkpoint import blocks, index, storage
from training.checkpoint.blocks import cut, write_file
from training.checkpoint.files import FORMAT, CheckpointError, commit, manifest_text, partial_of
from training.checkpoint.index import Entry, Index, Piece, open_checkpoint
from training.checkpoint.memory import HostMemory
from training.checkpoint.storage import Reader


def make(path, tensors=None, step=4):
    """A checkpoint of one rank, whose numbers are 0, 1, 2 …: a tensor in two pieces, and one without a dim."""
    content = memoryview(np.arange(16, dtype="<f4").view(np.uint8))
    pieces = [Piece("rank_00000.bin", 0, (0, 0), (2, 3)), Piece("rank_00000.bin", 24, (2, 0), (1, 3))]
    scalar = Entry("float32", (), [Piece("rank_00000.bin", 60, (), ())])
    tensors = tensors or {"model.a": Entry("float32", (3, 3), pieces), "optimizer.a.step": scalar}
    partial_of(path).mkdir(parents=True)
    sums = write_file(partial_of(path) / "rank_00000.bin", cut([(0, content)]))
    layout = {"ranks": 1, "data": 1, "sequence": 1, "tensor": 1, "shard": 1}
    manifest = {"format": FORMAT, "step": step, "state": {"step": step}, "layout": layout, "versions": {}, "config": {}}
    files = {"rank_00000.bin": {"bytes": sums.bytes}}
    commit(path, Index(tensors, {"rank_00000.bin": sums}).text(), manifest | {"files": files})
    return path


def test_what_is_written_is_read(tmp_path):
    manifest, index = open_checkpoint(make(tmp_path / "step_00000004"))
    assert manifest["step"] == 4 and manifest["layout"]["ranks"] == 1
    assert index.files["rank_00000.bin"].bytes == 64
    assert str(index.tensors["model.a"]) == "float32[3, 3]" and str(index.tensors["optimizer.a.step"]) == "float32[]"
    assert [piece.position for piece in index.tensors["model.a"].pieces] == [0, 24]
    assert index.in_block("rank_00000.bin", 0) == ["model.a", "optimizer.a.step"]


def tensor(**changes):
    """A change of the first tensor."""
    return lambda told: told["tensors"]["model.a"].update(changes)


def pieces(*boxes):
    return tensor(pieces=[["rank_00000.bin", *box] for box in boxes])


LIES = {
    "beyond the file": (pieces((0, [0, 0], [2, 3]), (56, [2, 0], [1, 3])), "not inside of rank_00000.bin"),
    "before the file": (pieces((-4, [0, 0], [2, 3]), (24, [2, 0], [1, 3])), "not inside of rank_00000.bin"),
    "position no number": (pieces((True, [0, 0], [2, 3]), (24, [2, 0], [1, 3])), "not inside of rank_00000.bin"),
    "beyond the tensor": (pieces((0, [0, 0], [2, 3]), (24, [2, 1], [1, 3])), "not inside of float32[3, 3]"),
    "negative": (pieces((0, [0, 0], [2, 3]), (24, [3, 0], [-1, 3])), "no shape"),
    "other dims": (pieces((0, [0], [9])), "not inside of float32[3, 3]"),
    "fewer dims": (pieces((0, [], [])), "not inside of float32[3, 3]"),
    "more sizes": (pieces((0, [0, 0], [3, 3, 1])), "not inside of float32[3, 3]"),
    "not all": (pieces((0, [0, 0], [2, 3])), "are not all of float32[3, 3]"),
    "twice": (pieces((0, [0, 0], [2, 3]), (24, [1, 0], [1, 3])), "pieces of model.a overlap at [1, 0]"),
    "same bytes": (pieces((0, [0, 0], [2, 3]), (20, [2, 0], [1, 3])), "shares bytes of rank_00000.bin"),
    "absurd shape": (tensor(shape=[1 << 40, 3]), "are not all of"),
    "overflowing shape": (tensor(shape=[1 << 70, 3]), "no shape"),
    "endless shape": (tensor(shape=[1] * 100), "no shape"),
    "float shape": (tensor(shape=[3.0, 3]), "no shape"),
    "no shape": (tensor(shape=None), "no shape"),
    "dtype": (tensor(dtype="object"), "of dtype 'object'"),
    "dtype no word": (tensor(dtype=["float32"]), "not of our format"),
    "wider dtype": (tensor(dtype="float64"), "model.a"),
    "outside": (tensor(pieces=[["../secret", 0, [0, 0], [3, 3]]]), "'../secret', which is no file"),
    "name that draws": (lambda told: told["tensors"].update({"a\x1b[2J": {}}), "called 'a\\x1b[2J'"),
    "more sums": (lambda told: told["files"]["rank_00000.bin"].update(crc32="0" * 16), "2 sums for 64 bytes"),
    "other size": (lambda told: told["files"]["rank_00000.bin"].update(bytes=1 << 50), "has 1125899906842624 bytes"),
    "no sums": (lambda told: told["files"].clear(), "no sums of rank_00000.bin"),
    "other file": (lambda told: told["files"].update({"/etc/passwd": {"bytes": 1, "crc32": ""}}), "'/etc/passwd'"),
    "sums no digits": (lambda told: told["files"]["rank_00000.bin"].update(crc32="wxyz" * 2), "not of our format"),
    "other blocks": (lambda told: told.update(block_bytes=1), "blocks of 1 bytes"),
    "no tensors": (lambda told: told.pop("tensors"), "not of our format"),
    "tensors a list": (lambda told: told.update(tensors=[]), "not of our format"),
}


def rewrite(path, content):
    """Changes the index as one does who knows how to hash."""
    (path / "tensors.json").write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    digest = index.hashlib.sha256(content).hexdigest()
    manifest["files"]["tensors.json"] = {"bytes": len(content), "sha256": digest}
    (path / "manifest.json").write_text(manifest_text(manifest))


@pytest.mark.parametrize(("lie", "said"), LIES.values(), ids=LIES)
def test_a_lie_is_refused(tmp_path, lie, said):
    """C082, C116"""
    path = make(tmp_path / "step_00000004")
    told = json.loads((path / "tensors.json").read_text())
    lie(told)
    rewrite(path, json.dumps(told).encode())
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert said in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) < 300


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"block_bytes": 4194304}'])
def test_what_is_no_index_is_refused(tmp_path, content):
    path = make(tmp_path / "step_00000004")
    rewrite(path, content)
    with pytest.raises(CheckpointError, match="tensors.json"):
        open_checkpoint(path)


def test_many_ranks_cost_no_square(tmp_path):
    """Four thousand ranks have a row each of a tensor that is wider than high."""
    pieces = [Piece("rank_00000.bin", 0, (row, 0), (1, 10_000)) for row in range(4000)]
    begin = time.process_time()
    assert index._overlap((4000, 10_000), pieces) is None
    assert time.process_time() - begin < 2  # seconds; all pairs take ten
    assert index._overlap((4000, 10_000), [*pieces, pieces[7]]) == pieces[7]


def test_gaps_hold_no_old_memory(monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda size, dtype, **_: torch.full((size,), 255, dtype=dtype))
    image = HostMemory("cpu").copy([(0, torch.ones(3)), (64, torch.ones(1))], 68)
    assert image[12:64].tolist() == [0] * 52 and image[64:].view(torch.float32).tolist() == [1]


@st.composite
def boxes(draw):
    """A shape, where it is cut along each dim, the box that is read, and the bytes of a block."""
    shape = draw(st.lists(st.integers(1, 5), max_size=3))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    first = [draw(st.integers(0, size - 1)) for size in shape]
    count = [draw(st.integers(1, size - at)) for size, at in zip(shape, first, strict=True)]
    return shape, cuts, first, count, draw(st.sampled_from([1, 3, 8, 64]))


class Target:
    """A planner's part in reading: targets by number."""

    def __init__(self, targets):
        self.targets = targets

    def resolve_tensor(self, item):
        return self.targets[item.dest_index.index]


@settings(deadline=None)  # threads are started in each
@given(boxes())
def test_any_box_of_any_pieces_is_read(tmp_path_factory, drawn):
    """Pieces of a tensor in a grid; of each what the box shares with it. Against numpy's slices."""
    shape, cuts, first, count, block = drawn
    whole, path = np.arange(math.prod(shape), dtype="<f8").reshape(shape), tmp_path_factory.mktemp("read")
    found, parts, placed, items = np.full(shape, -1.0), [], [], []
    targets = [torch.from_numpy(found)]
    for at in np.ndindex(*[len(edges) - 1 for edges in cuts]):
        low = [edges[i] for edges, i in zip(cuts, at, strict=True)]
        high = [edges[i + 1] for edges, i in zip(cuts, at, strict=True)]
        content = np.ascontiguousarray(whole[tuple(map(slice, low, high))])
        position = 8 + (placed[-1][0] + len(placed[-1][1]) if placed else 0)
        placed.append((position, memoryview(content.reshape(-1).view(np.uint8))))
        sizes = tuple(b - a for a, b in zip(low, high, strict=True))
        parts.append(Piece("rank_00000.bin", position, tuple(low), sizes))
        start = [max(a, b) for a, b in zip(low, first, strict=True)]
        stop = [min(a, b + n) for a, b, n in zip(high, first, count, strict=True)]
        if all(a < b for a, b in zip(start, stop, strict=True)):
            targets.append(targets[0][tuple(map(slice, start, stop))])
            inside = torch.Size(a - b for a, b in zip(start, low, strict=True))
            index = MetadataIndex("a", torch.Size(start), len(targets) - 1)
            size = torch.Size(b - a for a, b in zip(start, stop, strict=True))
            there = MetadataIndex("a", torch.Size(low))
            items.append(ReadItem(LoadItemType.TENSOR, index, torch.Size(start), there, inside, size))
    with pytest.MonkeyPatch.context() as patch:
        for module in (blocks, storage):
            patch.setattr(module, "BLOCK_BYTES", block)
        sums = write_file(path / "rank_00000.bin", cut(placed))
        index = Index({"a": Entry("float64", tuple(shape), parts)}, {"rank_00000.bin": sums})
        Reader(path, index, 0).read_data(LoadPlan(items), Target(targets))
    expected = np.full(shape, -1.0)
    box = tuple(slice(at, at + number) for at, number in zip(first, count, strict=True))
    expected[box] = whole[box]
    assert found.tobytes() == expected.tobytes()
