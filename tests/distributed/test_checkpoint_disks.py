"""Checkpoints on disks that are full, read-only or closed to us; and faults as `python train.py` meets them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.shards import write_documents
from tests.tampering import NEW, OLD, Run, flip, save_two, snapshot
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.files import CheckpointError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    run_ranks(save_two, 2, folder)
    return folder


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"needs the right to mount: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def room_left(folder: Path, num_bytes: int) -> None:
    """Fills the disk up to that."""
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    status = os.statvfs(folder)
    filler.write_bytes(bytes(status.f_bavail * status.f_frsize - num_bytes))


def save_with_less_and_less_room(disk: Path, background: bool) -> dict[int, Any]:
    """What a save gives, by pages of room that there are; after each, what is there and what is resumed."""
    run, results = Run(disk / "checkpoints", checkpoint__background=background), {}
    run.fill(OLD)
    run.save(OLD)
    for pages in range(12, -1, -1):
        if dist.get_rank() == 0:
            room_left(disk, 4096 * pages)
        dist.barrier()
        run.fill(NEW)
        try:
            run.save(NEW)
            error = None
        except CheckpointError as raised:
            error = str(raised)
        dist.barrier()
        results[pages] = error, sorted(os.listdir(disk / "checkpoints")), run.resume()[0]
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(disk / "checkpoints" / f"step_{NEW:08d}", ignore_errors=True)
        dist.barrier()
    if dist.get_rank() == 0:
        (disk / "filler").unlink()
    dist.barrier()
    run.fill(NEW)
    run.save(NEW)
    results[-1] = None, sorted(os.listdir(disk / "checkpoints")), run.resume()[0]
    return results


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_fails_a_save_on_all_ranks_and_harms_nothing(background, small_disk):
    """C076, C077: at whatever file the room ends; nothing is left of it, and with room again saving goes on."""
    both = run_ranks(save_with_less_and_less_room, 2, small_disk, background)
    assert both[0] == both[1]
    failed = {pages: said for pages, (said, _, _) in both[0].items() if said is not None}
    assert 0 in failed and 12 not in failed
    assert len(failed) >= 5  # in a piece of the one rank, or of both, in the index, in the manifest
    for pages, (said, names, step) in both[0].items():
        if said is None:
            assert (names, step) == ([f"step_{OLD:08d}", f"step_{NEW:08d}"], NEW)
        else:
            assert f"cannot write {small_disk}/checkpoints/step_{NEW:08d}: " in said and "No space left" in said, said
            assert (names, step) == ([f"step_{OLD:08d}"], OLD), pages


def load_and_save(folder: Path) -> tuple[Any, str]:
    run = Run(folder)
    step = run.resume()
    with pytest.raises(CheckpointError) as caught:
        run.save(30)
    return step, str(caught.value)


def test_a_disk_that_is_read_only_is_read(two, small_disk):
    shutil.copytree(two, small_disk / "checkpoints")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    before = snapshot(small_disk)
    results = run_ranks(load_and_save, 2, small_disk / "checkpoints")
    assert snapshot(small_disk) == before
    for step, said in results:
        assert step == (NEW, "") and "Read-only file system" in said and "step_00000030: " in said


# What may not be read, below checkpoints/, and what comes of it.
FORBIDDEN: dict[str, tuple[str, Any]] = {
    "piece": (f"step_{NEW:08d}/rank_00001.bin", "rank_00001.bin"),
    "index": (f"step_{NEW:08d}/tensors.json", "tensors.json cannot be read"),
    "manifest": (f"step_{NEW:08d}/manifest.json", "manifest.json cannot be read"),
    "checkpoint": (f"step_{NEW:08d}", "manifest.json cannot be read"),
    "folder": (".", None),  # never taken for a run that has no checkpoints
}


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Without the rights of root, whom no mode keeps from reading."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def resume_as_nobody(folders: dict[str, Path]) -> dict[str, Any]:
    run = Run(folders["piece"])
    run.resume()  # imports what it needs
    results = {}
    for name, folder in folders.items():
        run.checkpoints = Checkpoints(folder, run.checkpoints.config, run.checkpoints.mesh)
        with nobody():
            resumed = run.resume()
            with pytest.raises(CheckpointError) as caught:
                run.save(30)
        results[name] = *resumed, str(caught.value)
    return results


def test_what_may_not_be_read_or_written(two):
    """Taken for damaged where it is one checkpoint; an error where it is their folder. Nothing can be saved there."""
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders cannot be entered by others
        os.chmod(place, 0o755)
        folders = {}
        for name, (closed, _) in FORBIDDEN.items():
            folders[name] = Path(place, name)
            shutil.copytree(two, folders[name])
            for path in (folders[name], *folders[name].rglob("*")):
                path.chmod(0o555 if path.is_dir() else 0o444)
            (folders[name] / closed).chmod(0)
        before = snapshot(Path(place)) if os.geteuid() == 0 else None
        first, second = run_ranks(resume_as_nobody, 2, folders)
        assert before is None or snapshot(Path(place)) == before
        for folder in folders.values():
            for path in (folder, *folder.rglob("*")):
                path.chmod(0o755)
    for name, (_, words) in FORBIDDEN.items():
        for (found, said, unsaved), speaks in ((first[name], True), (second[name], False)):
            assert "ermission denied" in unsaved and "step_00000030" in unsaved, (name, unsaved)
            if words is None:
                assert found[0] in ("PermissionError", "CheckpointError") and "ermission denied" in found[1], found
            else:
                assert found == OLD, (name, found)
                assert not speaks or (words in said and "ermission denied" in said), (name, said)


TINY = [
    "model.model_dim=32",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "model.ffn_dim=48",
    "data.name=tiny",
    "data.vocab_size=64",
    "data.sequence_length=96",
    "train.global_batch_tokens=96",
    "optimizer.warmup_steps=1",
    "checkpoint.every=2",
    "checkpoint.keep=0",
    "validation.every=0",
    "logging.peak_flops=1e12",
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with a run of four steps, runs/whole, and its data."""
    folder = tmp_path_factory.mktemp("workplace")
    corpus = folder / "corpora" / "tiny"
    corpus.mkdir(parents=True)
    for part, length in (("train", 900), ("validation", 200)):
        documents = [torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(length)).tolist()]
        write_documents(corpus, documents, 64).rename(corpus / part)
    done = start(folder, "whole", "train.steps=4")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def start(folder: Path, run: str, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "train.py"), *TINY, f"run.name={run}", *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


def test_a_run_goes_on_from_the_older_one(workplace):
    """C074, C116, C117: says why, does the steps again, and moves the damaged one aside where it saves in its place."""
    shutil.copytree(workplace / "runs/whole", workplace / "runs/flipped")
    checkpoints = workplace / "runs/flipped/checkpoints"
    flip(checkpoints / "step_00000004/rank_00000.bin", 0.5)
    damaged = snapshot(checkpoints / "step_00000004")
    marker = workplace / "marker"
    (checkpoints / "step_00000002" / ".metadata").write_bytes(b"cos\nmkdir\n(S'%s'\ntR." % bytes(marker))
    (workplace / "runs/flipped/config.yaml").write_text(f"model: {{_target_: os.mkdir, path: {marker}}}\n")
    done = start(workplace, "flipped", "train.steps=4")
    assert done.returncode == 0, done.stderr
    assert "skipped checkpoint" in done.stderr and "step_00000004: rank 0: rank_00000.bin is not what" in done.stderr
    assert "after step 2, to step 4" in done.stdout
    assert snapshot(checkpoints / "step_00000004.replaced-1") == damaged and not marker.exists()
    rows = [json.loads(line) for line in (workplace / "runs/flipped/metrics.jsonl").read_text().splitlines()]
    truth = [json.loads(line) for line in (workplace / "runs/whole/metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(row["step"], row["loss"]) for row in truth]


def test_no_run_starts_over_where_none_is_whole(workplace):
    """C074: input/output's exit code, one line that names both, and not a file is touched."""
    shutil.copytree(workplace / "runs/whole", workplace / "runs/broken")
    checkpoints = workplace / "runs/broken/checkpoints"
    flip(checkpoints / "step_00000004/tensors.json", 0.5)
    (checkpoints / "step_00000002/manifest.json").unlink()
    before = snapshot(checkpoints)
    done = start(workplace, "broken", "train.steps=4")
    assert done.returncode == 74, done.stderr
    *_, last = done.stderr.splitlines()
    assert "step_00000002: it has no manifest.json" in last and "step_00000004: tensors.json" in last
    assert "Traceback" not in done.stderr and snapshot(checkpoints) == before


def test_a_run_ends_where_its_disk_is_full(workplace, small_disk):
    """Input/output's exit code, and one line; the checkpoint before is the newest."""
    folder = workplace / "runs/full"
    shutil.copytree(workplace / "runs/whole", folder)
    shutil.copytree(folder / "checkpoints/step_00000002", small_disk / "step_00000002")
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").symlink_to(small_disk)
    room_left(small_disk, 1 << 17)
    done = start(workplace, "full", "train.steps=4")
    assert done.returncode == 74, done.stderr
    assert "cannot write" in done.stderr and "No space left" in done.stderr and "Traceback" not in done.stderr
    assert sorted(os.listdir(small_disk)) == ["filler", "step_00000002"]
