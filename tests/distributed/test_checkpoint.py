"""Checkpoints: equal bits after a resume, any layout into any other, and what must be refused."""

import contextlib
import copy
import hashlib
import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from conf.compose import compose
from conf.schema import Degrees
from parallel.apply import build_model
from parallel.mesh import build_mesh
from tests.harness import run_ranks
from training.checkpoint import CheckpointError, Checkpoints
from training.optimizer import build_optimizer

ONE, TWO = (1, 1, 1, 1), (1, 2, 1, 2)  # (data, sequence, tensor, shard)
# Widths that no axis divides evenly: shards of several sizes, and ranks without a row (C083).
MODEL = {
    "model.model_dim": 6,
    "model.num_layers": 1,
    "model.head_dim": 2,
    "model.ffn_dim": 10,
    "data.vocab_size": 14,
    "model.qk_norm": True,
    "model.qkv_bias": True,
}


class Run:
    """Model, optimizer and checkpoints of one rank, whose gradients depend on weights and step alone."""

    def __init__(self, folder: Path, division=ONE, model_changes=(), **changes):
        options = MODEL | {"checkpoint.keep": 0} | {key.replace("__", "."): value for key, value in changes.items()}
        config = compose([f"{key}={value}" for key, value in options.items()])
        self.mesh = build_mesh(Degrees(*division, accumulation=1), "cpu")
        self.checkpoints = Checkpoints(folder, copy.deepcopy(config), self.mesh)
        for key, value in model_changes:  # the config that the checkpoint knows stays as it was
            setattr(config.model, key, value)
        self.model = build_model(config, self.mesh, None, torch.device("cpu"))
        self.optimizer = build_optimizer(self.model, config.optimizer)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
                local = parameter.to_local().detach()
                parameter.grad.to_local().copy_((step * local + local.square()).cos())
            self.optimizer.step()

    def save(self, step: int, **state) -> Path:
        return self.checkpoints.save(step, self.model, self.optimizer, state)

    def load(self, path: Path) -> dict:
        return self.checkpoints.load(path, self.model, self.optimizer)

    def everything(self) -> dict:
        """Weights and optimizer state, gathered, by name."""
        tensors = {}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            for key, tensor in {"weight": parameter.detach(), **state}.items():
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                tensors[f"{name}/{key}"] = whole.clone().numpy()
        return tensors


def same_bits(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[key].tobytes() == b[key].tobytes() for key in a)


def interrupted_and_not(folder):
    run = Run(folder, TWO)
    torch.manual_seed(100 + dist.get_rank())
    run.train(1, 4)
    torch.rand(3)
    run.save(4, tokens=400, cursor={"tokens": 400, "epoch": 0})
    run.train(5, 8)
    drawn, expected = torch.rand(5).tolist(), run.everything()
    resumed = Run(folder, TWO)
    torch.manual_seed(0)
    state = resumed.load(resumed.checkpoints.newest())
    resumed.train(5, 8)
    assert torch.rand(5).tolist() == drawn
    assert same_bits(resumed.everything(), expected)
    assert state == {"step": 4, "tokens": 400, "cursor": {"tokens": 400, "epoch": 0}}
    return drawn


def test_same_layout_goes_on_bit_for_bit(tmp_path):
    """C089: weights, AdamW's state, and every rank's own random numbers."""
    first, second = run_ranks(interrupted_and_not, 2, tmp_path)
    assert first != second


def save_all(folder, divisions):
    results = {}
    for division in divisions:
        run = Run(folder / "-".join(map(str, division)), division)
        run.train(1, 3)
        run.save(3, tokens=3)
        results[division] = run.everything()
    return results


def load_all(folder, pairs):
    results = {}
    for source, target in pairs:
        run = Run(folder / "-".join(map(str, source)), target)
        run.load(run.checkpoints.newest())
        loaded = run.everything()
        run.train(4, 6)
        results[source, target] = loaded, run.everything()
    return results


def num_ranks(division):
    return division[0] * division[1] * division[2]


TENSOR, DATA3, BOTH, FLAT = (1, 1, 2, 1), (3, 1, 1, 3), (1, 2, 2, 2), (2, 2, 1, 4)
REPLICAS, TENSOR_REPLICAS = (2, 1, 1, 1), (2, 1, 2, 1)
SOURCES = [ONE, TENSOR, REPLICAS, DATA3, BOTH, TENSOR_REPLICAS]
PAIRS = [
    *((source, ONE) for source in SOURCES),
    *((TENSOR_REPLICAS, TWO), (DATA3, TENSOR), (BOTH, REPLICAS)),
    *((ONE, DATA3), (BOTH, DATA3)),
    *((TENSOR, FLAT), (DATA3, BOTH), (REPLICAS, TENSOR_REPLICAS)),
]


def test_every_layout_loads_into_every_other(tmp_path):
    """C083: uneven and empty shards, all axes and shard changed; three steps after the load too."""
    saved, results = {}, {}
    for ranks in (1, 2, 3, 4):
        saved |= run_ranks(save_all, ranks, tmp_path, [source for source in SOURCES if num_ranks(source) == ranks])[0]
    for ranks in (1, 2, 3, 4):
        results |= run_ranks(load_all, ranks, tmp_path, [pair for pair in PAIRS if num_ranks(pair[1]) == ranks])[0]
    ahead = results[ONE, ONE][1]
    for (source, target), (loaded, after) in results.items():
        assert same_bits(loaded, saved[source]), (source, target)
        for name, value in after.items():
            assert value == pytest.approx(ahead[name], rel=1e-5, abs=1e-7), (source, target, name)


def reseed(folder):
    run = Run(folder, (dist.get_world_size(), 1, 1, 1))
    if dist.get_world_size() == 2:
        run.save(1)
    run.load(run.checkpoints.newest())
    return torch.rand(4).tolist()


def test_random_numbers_at_another_number_of_ranks(tmp_path):
    """C089: each rank is seeded by seed, step and rank: all differ, and it is the same each time."""
    run_ranks(reseed, 2, tmp_path / "c")
    first, again = run_ranks(reseed, 3, tmp_path / "c"), run_ranks(reseed, 3, tmp_path / "c")
    assert first == again and len({tuple(drawn) for drawn in first}) == 3


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "no_metadata": (lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
    "truncated": (lambda p: os.truncate(p / "__1_0.distcp", 100), "__1_0.distcp has 100 bytes instead of"),
    "no_shard": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "flipped": (lambda p: flip(p / "__1_0.distcp"), "__1_0.distcp is not what was written"),
    "no_manifest": (lambda p: (p / "manifest.json").unlink(), "no manifest.json"),
    "torn_manifest": (lambda p: os.truncate(p / "manifest.json", 50), "manifest.json cannot be read"),
    "foreign_manifest": (lambda p: (p / "manifest.json").write_text("{}"), "not of the format"),
    "empty": (lambda p: (shutil.rmtree(p), p.mkdir()), "no manifest.json"),
    "only_metadata": (
        lambda p: [each.unlink() for each in p.iterdir() if each.name != ".metadata"],
        "no manifest.json",
    ),
    "left_as_tmp": (lambda p: p.rename(p.with_name(p.name + ".tmp")), None),
}


def save_two(folder):
    run = Run(folder, TWO)
    for step in (10, 20):
        run.train(step, step)
        run.save(step)


def find_each(folders):
    """What `newest` gives for each folder, or its error, and what it says; loading step 20 is refused."""
    found = []
    for folder in folders:
        run, said = Run(folder, TWO), io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                newest = run.checkpoints.newest()
            found.append((newest and newest.name, said.getvalue()))
        except CheckpointError as error:
            found.append((str(error), said.getvalue()))
        with pytest.raises((CheckpointError, ValueError), match="step_00000020"):
            run.load(folder / "step_00000020")
    return found


def damaged_copies(source: Path, target: Path, steps) -> list[Path]:
    for name, (damage, _) in DAMAGE.items():
        shutil.copytree(source, target / name)
        for step in steps:
            damage(target / name / f"step_{step:08d}")
    return [target / name for name in DAMAGE]


def test_a_damaged_checkpoint_is_never_the_newest(tmp_path):
    """C074, C082, I12: step 10 is taken instead, rank 0 says what is wrong with step 20, nothing is deleted."""
    run_ranks(save_two, 2, tmp_path / "whole")
    folders = damaged_copies(tmp_path / "whole", tmp_path / "damaged", [20])
    before = sorted(tmp_path.rglob("*"))
    first, second = run_ranks(find_each, 2, folders)
    assert second == [("step_00000010", "")] * len(DAMAGE)
    for (_, problem), (name, said) in zip(DAMAGE.values(), first, strict=True):
        assert name == "step_00000010"
        assert said.count("\n") == (problem is not None)
        assert problem is None or ("step_00000020: " in said and problem in said)
    assert sorted(tmp_path.rglob("*")) == before


def test_where_none_is_whole_no_run_starts_over(tmp_path):
    """C074: an error on all ranks that names each one; a save never finished is none."""
    run_ranks(save_two, 2, tmp_path / "whole")
    folders = damaged_copies(tmp_path / "whole", tmp_path / "damaged", [10, 20])
    for results in run_ranks(find_each, 2, folders):
        for (_, problem), (found, _) in zip(DAMAGE.values(), results, strict=True):
            if problem is None:
                assert found is None
            else:
                assert "step_00000010" in found and "step_00000020" in found and problem in found


def prune(folder):
    run = Run(folder, ONE, checkpoint__keep=2)
    for step in (9000, 9900, 10000):
        run.save(step)
    left = sorted(path.name for path in folder.iterdir())
    run.save(9950)  # went back to an older one: what was just written stays
    return left, sorted(path.name for path in folder.glob("step_000?????"))


def test_keeps_the_newest_and_what_others_made(tmp_path):
    """C079, I12: foreign files."""
    for name in ("step_best", "step_00010000.tmp2", "step_00010001.tmp", "step_7", "step_00000001"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_notes.txt").touch()
    (left, back), = run_ranks(prune, 1, tmp_path)  # fmt: skip
    assert left == sorted(
        ["step_00009900", "step_00010000", "step_00010000.tmp2", "step_00010001.tmp"]
        + ["step_00000001", "step_7", "step_best", "step_notes.txt"]
    )
    assert back == ["step_00000001", "step_00009950", "step_00010000"]


def save_again(folder):
    run = Run(folder)
    path = run.save(5, tokens=1)
    (folder / "step_00000005.tmp").mkdir()
    (folder / "step_00000005.tmp" / "__9_0.distcp").write_text("left by a kill")
    run.save(5, tokens=2)
    kept = json.loads((folder / "step_00000005.replaced-1" / "manifest.json").read_text())
    return (
        kept["state"]["tokens"],
        run.load(path)["tokens"],
        sorted(os.listdir(path)),
        len(os.listdir(folder)),
    )


def test_saving_a_step_again_keeps_the_old_one(tmp_path):
    assert run_ranks(save_again, 1, tmp_path) == [(1, 2, [".metadata", "__0_0.distcp", "manifest.json"], 2)]


def refusals(folder):
    """The message with which each other model is refused."""
    run = Run(folder / "a")
    run.train(1, 1)
    path = run.save(1)
    others = {
        "wider": {"model__ffn_dim": 12},
        "longer rope": {"model__rope_theta": 5e5},
        "more layers": {"model_changes": [("num_layers", 2)]},
        "fewer layers": {"model_changes": [("num_layers", 0)]},
        "other shape": {"model_changes": [("ffn_dim", 12)]},
        "other dtype": {"train__dtype": "float64"},
    }
    messages = {}
    for name, changes in others.items():
        other = Run(folder / "a", **changes)
        before = {key: value.copy() for key, value in other.everything().items()}
        with pytest.raises(ValueError) as caught:
            other.load(path)
        messages[name] = str(caught.value)
        after = other.everything()
        assert all(same_bits({"": before[key]}, {"": after[key]}) for key in before), name
    same = Run(folder / "a", model__ffn_block_tokens=3, model__init_std=0.5, model__name="renamed")
    same.load(path)
    for name, wrong in {"absent": folder / "nowhere", "run folder": folder / "a"}.items():
        with pytest.raises(ValueError) as caught:
            run.load(wrong)
        messages[name] = str(caught.value)
    messages["no optimizer"] = without_optimizer(run, path)
    return messages


def without_optimizer(run, path):
    """A checkpoint that holds weights only."""
    weights = {f"model.{name}": parameter.detach() for name, parameter in run.model.named_parameters()}
    target = path.with_name("step_00000002")
    dcp.save(weights, storage_writer=dcp.FileSystemWriter(target))
    seal(path, target)
    with pytest.raises(ValueError) as caught:
        run.load(target)
    return str(caught.value)


def seal(path: Path, target: Path) -> None:
    """Gives `target` the manifest of `path`, with sizes and hashes of its own files."""
    manifest = json.loads((path / "manifest.json").read_text())
    files = {}
    for file in target.iterdir():
        if file.name != "manifest.json":
            content = file.read_bytes()
            files[file.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (target / "manifest.json").write_text(json.dumps(manifest | {"files": files}))


def test_what_does_not_fit_is_refused(tmp_path):
    """C082: another shape or dtype, names that one side lacks, no optimizer state; both sides are named."""
    (said,) = run_ranks(refusals, 1, tmp_path)
    assert "model.ffn_dim=12" in said["wider"] and "ffn_dim=10" in said["wider"]
    assert "model.rope_theta=500000.0" in said["longer rope"] and "10000.0" in said["longer rope"]
    assert "layers.1" in said["more layers"] and "missing in the checkpoint" in said["more layers"]
    assert "layers.0" in said["fewer layers"] and "unknown in the run" in said["fewer layers"]
    assert "float32[10, 6] in the checkpoint, float32[12, 6] in the run" in said["other shape"]
    assert "float32[6] in the checkpoint, float64[6] in the run" in said["other dtype"]
    assert "exp_avg" in said["no optimizer"] and "missing in the checkpoint" in said["no optimizer"]
    assert all(len(message) < 3000 and message.count("; ") <= 10 for message in said.values())
    assert "nowhere is no checkpoint" in said["absent"]
    assert "did you mean" in said["run folder"] and "step_00000001" in said["run folder"]


class Marker:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def malicious(folder):
    run = Run(folder / "c")
    path = run.save(1)
    shutil.copy(path / "__0_0.distcp", folder / "spare")
    for name, content in {
        "code": pickle.dumps(Marker(folder / "marker")),
        "state": pickle.dumps({"state_dict_metadata": Marker(folder / "marker")}),
        "garbage": b"not a pickle",
    }.items():
        target = folder / "c" / f"step_0000000{len(name)}"
        shutil.copytree(path, target)
        (target / ".metadata").write_bytes(content)
        seal(path, target)  # the attacker knows how to hash
        with pytest.raises(CheckpointError, match="metadata cannot be read"):
            Run(folder / "c").load(target)


def test_loading_runs_no_code(tmp_path):
    """C116"""
    run_ranks(malicious, 1, tmp_path)
    assert not (tmp_path / "marker").exists()


def failing_disk(folder):
    run = Run(folder, TWO, checkpoint__keep=1)
    run.train(1, 1)
    run.save(1)
    write = dcp.FileSystemWriter.write_data

    def full(*_):
        raise OSError(28, "No space left on device")

    if run.mesh.world.rank == 1:
        dcp.FileSystemWriter.write_data = full
    with pytest.raises(CheckpointError) as caught:
        run.save(2)
    dcp.FileSystemWriter.write_data = write
    newest = run.checkpoints.newest().name
    with pytest.raises(OSError):
        Checkpoints(folder / "step_00000001" / "manifest.json", run.checkpoints.config, run.mesh).save(
            3, run.model, run.optimizer, {}
        )
    return str(caught.value), newest


def test_a_save_that_fails_on_one_rank_fails_on_all_and_harms_nothing(tmp_path):
    """C076"""
    first, second = run_ranks(failing_disk, 2, tmp_path)
    assert first == second
    assert "rank 1" in first[0] and "No space left" in first[0] and "Traceback" not in first[0]
    assert first[1] == "step_00000001"
