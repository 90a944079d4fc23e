"""`python -m training.checkpoint verify|list|show`: what it prints, and its exit codes."""

import os

import pytest

from tests.unit.test_checkpoint_index import make
from training.checkpoint.commands import main


@pytest.fixture
def run_folder(tmp_path):
    for step in (10, 20):
        make(tmp_path / "run" / "checkpoints" / f"step_{step:08d}", step=step)
    return tmp_path / "run"


def paths(run_folder):
    newest = run_folder / "checkpoints" / "step_00000020"
    return {"checkpoint": newest, "their folder": newest.parent, "run": run_folder}


@pytest.mark.parametrize("kind", ["checkpoint", "their folder", "run"])
def test_what_is_whole_is_said_to_be(run_folder, capsys, kind):
    path = paths(run_folder)[kind]
    assert main(["verify", str(path)]) == 0
    said = capsys.readouterr().out
    assert said.count(": whole") == (1 if kind == "checkpoint" else 2)
    assert main(["list", str(path)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "size", "age", "whole", "by", "sizes", "layout"]
    assert [row.split()[0] for row in rows] == (["20"] if kind == "checkpoint" else ["10", "20"])
    assert all(" yes " in row and row.endswith("ranks 1, data 1, sequence 1, tensor 1, shard 1") for row in rows)
    assert main(["show", str(path)]) == 0
    said = capsys.readouterr().out
    assert "step       20\n" in said and "parameters 9 float32\n" in said and "optimizer  1 float32\n" in said


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_damage_is_named(run_folder, capsys):
    """Block, file and tensors; and the other checkpoint is read all the same."""
    newest = run_folder / "checkpoints" / "step_00000020"
    flip(newest / "rank_00000.bin", 33)
    assert main(["verify", str(run_folder)]) == 1
    whole, damaged = capsys.readouterr().out.splitlines()
    assert whole.endswith("step_00000010: whole")
    assert damaged == (
        f"{newest}: rank_00000.bin is not what was written: CRC-32 of bytes 0 to 63 differs, in model.a, "
        "optimizer.a.step"
    )
    os.truncate(newest / "rank_00000.bin", 3)
    assert main(["verify", str(newest)]) == 1
    assert capsys.readouterr().out == f"{newest}: rank_00000.bin has 3 bytes instead of 64\n"
    assert main(["list", str(run_folder)]) == 0
    assert "no: rank_00000.bin has 3 bytes instead of 64" in capsys.readouterr().out
    assert main(["show", str(newest)]) == 74
    assert capsys.readouterr().err.count("\n") == 1


WRONG = {
    "nothing there": (["verify", "{}/nowhere"], "nowhere does not exist: give a checkpoint"),
    "no checkpoint": (["list", "{}"], "holds no checkpoint"),
    "no command": ([], "required"),
    "other command": (["repair", "{}"], "invalid choice"),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG.values(), ids=WRONG)
def test_wrong_usage_is_one_line(tmp_path, capsys, arguments, said):
    assert main([argument.format(tmp_path) for argument in arguments]) == 3
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("training.checkpoint: ")
