"""Which checkpoints of a run are kept, put aside and deleted, and under which names."""

import os
import shutil
from pathlib import Path

import pytest

from tests.unit.test_checkpoint_index import make
from training.checkpoint import choice, files
from training.checkpoint.choice import choose, make_empty, sweep, tidy
from training.checkpoint.files import CheckpointError, commit, partial_of


def steps(folder, *numbers):
    return [make(folder / f"step_{number:08d}", step=number) for number in numbers]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def leave(path):
    """What a kill leaves of a save."""
    partial_of(path).mkdir()
    (partial_of(path) / "rank_00000.bin").write_bytes(b"left")


def test_nothing_is_deleted_under_a_name_that_a_save_uses(tmp_path):
    """The sweeper deletes while the next save has begun: of the very step that a kill had interrupted."""
    one, two = steps(tmp_path, 1, 2)
    three = tmp_path / "step_00000003"
    leave(three)
    old = tidy(two, [], keep=1, keep_every=0)
    make_empty(three)
    (partial_of(three) / "rank_00000.bin").write_bytes(b"new")
    again = make(one, step=1)
    sweep(old)
    assert names(tmp_path) == ["step_00000001", "step_00000002", "step_00000003.tmp"]
    assert (partial_of(three) / "rank_00000.bin").read_bytes() == b"new" and (again / "manifest.json").exists()


@pytest.mark.parametrize("size", [None, 3, 5])
def test_what_is_not_there_as_it_was_written_is_not_committed(tmp_path, size):
    path = tmp_path / "step_00000003"
    partial_of(path).mkdir()
    if size is not None:
        (partial_of(path) / "rank_00000.bin").write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match="rank_00000.bin .*, right after it was written"):
        commit(path, "{}", {"files": {"rank_00000.bin": {"bytes": 4}}})
    assert not path.exists()


def test_names_that_are_taken_are_no_error(tmp_path):
    """What could not be deleted before is deleted now."""
    steps(tmp_path, 1)
    for left in ("step_00000001.removed-1", "step_00000001.removed-2", "step_00000007.tmp.removed-1"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "rank_00000.bin").touch()
    for other in ("step_00000001.removed-x", "step_00000001.skipped-1", "step_00000001.replaced-1", "removed-1"):
        (tmp_path / other).mkdir()
    (two,) = steps(tmp_path, 2)
    old = tidy(two, [], keep=1, keep_every=0)
    assert len(old) == 4
    sweep(old)
    assert names(tmp_path) == sorted(
        ["removed-1", "step_00000001.removed-x", "step_00000001.replaced-1", "step_00000001.skipped-1"]
        + ["step_00000002"]
    )


def test_what_cannot_be_deleted_is_said(tmp_path, monkeypatch, capsys):
    """As where a server of files keeps a name for somebody who still has it open. The rest goes."""
    _, two = steps(tmp_path, 1, 2)
    leave(tmp_path / "step_00000007")
    remove = shutil.rmtree

    def busy(path, **options):
        if not path.name.startswith("step_00000001"):
            remove(path, **options)
        elif not options.get("ignore_errors"):
            raise OSError(39, "Directory not empty")

    monkeypatch.setattr(shutil, "rmtree", busy)
    sweep(tidy(two, [], keep=1, keep_every=0))
    assert names(tmp_path) == ["step_00000001.removed-1", "step_00000002"]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "cannot delete" in said and "Directory not empty" in said


def test_once_it_counts_nothing_is_an_error(tmp_path, monkeypatch, capsys):
    _, two = steps(tmp_path, 1, 2)

    def fails(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", fails)
    assert tidy(two, [], keep=1, keep_every=0) == []
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {two} is written, but") and "Permission denied" in said
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_no_more_is_looked_into_than_is_needed(tmp_path, monkeypatch):
    """All ranks wait meanwhile; a long run keeps hundreds by keep_every."""
    paths = steps(tmp_path, *range(1, 9))
    looked, look = [], choice.quick_problem
    monkeypatch.setattr(choice, "quick_problem", lambda path: (looked.append(path), look(path))[1])
    assert tidy(paths[-1], [], keep=2, keep_every=1) == [] and looked == [paths[-2]]
    looked.clear()
    with pytest.raises(ValueError, match="would write over .*step_00000008"):
        choose(tmp_path, "never")
    assert looked == [paths[-1]]
    looked.clear()
    os.truncate(paths[3] / "rank_00000.bin", 1)
    assert [path.name for path in tidy(paths[-1], [], keep=2, keep_every=2)] == [
        f"step_0000000{step}.removed-1" for step in (5, 3, 1)
    ]
    assert paths[3] not in looked and paths[3].exists()


def test_the_name_of_the_first_one_lasts(tmp_path, monkeypatch):
    """The folder of checkpoints is new in that of the run, too."""
    flushed, flush = [], files.sync
    monkeypatch.setattr(files, "sync", lambda path: (flushed.append(path), flush(path)))
    make(tmp_path / "checkpoints" / "step_00000004")
    assert tmp_path in flushed
