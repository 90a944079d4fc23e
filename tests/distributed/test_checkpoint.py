"""Checkpoints: equal bits after a resume, any layout into any other, and what must be refused."""

import contextlib
import copy
import io
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist

from conf.compose import compose
from conf.schema import Degrees
from parallel.apply import build_model
from parallel.mesh import build_mesh
from tests.harness import run_ranks
from tests.tampering import flip, reseal
from training.checkpoint import checkpoints, storage
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.commands import problems
from training.checkpoint.files import CheckpointError, finished
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
        self.checkpoints.save(step, self.model, self.optimizer, state)
        return self.checkpoints.folder / f"step_{step:08d}"

    def load(self, wish: Path | str = "auto") -> dict | None:
        return self.checkpoints.resume(str(wish), self.model, self.optimizer)

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
    state = resumed.load()
    resumed.train(5, 8)
    assert torch.rand(5).tolist() == drawn
    assert same_bits(resumed.everything(), expected)
    path, config, layout = state.pop("path"), state.pop("config"), state.pop("layout")
    assert (state.pop("warnings"), state.pop("remarks")) == ([], [])
    assert state == {"step": 4, "tokens": 400, "cursor": {"tokens": 400, "epoch": 0}}
    assert path == str(folder / "step_00000004") and config["model"]["model_dim"] == 6 and layout["sequence"] == 2
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
        run.load()
        loaded = run.everything()
        run.train(4, 6)
        results[source, target] = loaded, run.everything()
    return results


def num_ranks(division):
    return division[0] * division[1] * division[2]


# What test_reshard.py has not: copies of shards, and both axes at once.
REPLICAS, TENSOR_REPLICAS, FLAT = (2, 1, 1, 1), (2, 1, 2, 1), (2, 2, 1, 4)
SOURCES = [ONE, REPLICAS, TENSOR_REPLICAS, FLAT]
PAIRS = [
    *((source, ONE) for source in SOURCES),
    *((TENSOR_REPLICAS, TWO), (FLAT, REPLICAS)),
    *((ONE, FLAT), (REPLICAS, TENSOR_REPLICAS)),
]


def test_copies_of_shards_and_both_axes_load_into_others(tmp_path):
    """C083: uneven and empty shards; three steps after the load too."""
    saved, results = {}, {}
    for ranks in (1, 2, 4):
        saved |= run_ranks(save_all, ranks, tmp_path, [source for source in SOURCES if num_ranks(source) == ranks])[0]
    for ranks in (1, 2, 4):
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
    run.load()
    return torch.rand(4).tolist()


def test_random_numbers_at_another_number_of_ranks(tmp_path):
    """C089: each rank is seeded by seed, step and rank: all differ, and it is the same each time."""
    run_ranks(reseed, 2, tmp_path / "c")
    first, again = run_ranks(reseed, 3, tmp_path / "c"), run_ranks(reseed, 3, tmp_path / "c")
    assert first == again and len({tuple(drawn) for drawn in first}) == 3


def prune(folder):
    run = Run(folder, ONE, checkpoint__keep=2)
    for step in (9000, 9900, 10000):
        run.save(step)
    left = sorted(path.name for path in folder.iterdir())
    run.save(9950)  # newer ones, whoever put them there, do not count, and stay
    return left, sorted(path.name for path in folder.glob("step_000?????"))


def test_keeps_the_newest_and_what_others_made(tmp_path):
    """C079, I12: foreign files; what a kill left of a save of ours goes."""
    for name in ("step_best", "step_00010000.tmp2", "step_00010001.tmp", "step_7", "step_00000001"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_notes.txt").touch()
    (tmp_path / "step_00008000.tmp").mkdir()
    (tmp_path / "step_00008000.tmp" / "rank_00003.bin").touch()
    (left, back), = run_ranks(prune, 1, tmp_path)  # fmt: skip
    assert left == sorted(
        ["step_00009900", "step_00010000", "step_00010000.tmp2", "step_00010001.tmp"]
        + ["step_00000001", "step_7", "step_best", "step_notes.txt"]
    )
    assert back == ["step_00000001", "step_00009900", "step_00009950", "step_00010000"]


def keep_some(folder, background):
    run = Run(folder, ONE, checkpoint__keep=2, checkpoint__keep_every=20, checkpoint__background=background)
    for step in range(10, 80, 10):
        run.save(step)
    run.checkpoints.finish()


@pytest.mark.parametrize("background", [False, True])
def test_keeps_every_so_many_steps(tmp_path, background):
    """C079"""
    run_ranks(keep_some, 1, tmp_path, background)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_000000{step}" for step in (20, 40, 60, 70)]


def save_again(folder):
    run = Run(folder)
    path = run.save(5, tokens=1)
    (folder / "step_00000005.tmp").mkdir()
    (folder / "step_00000005.tmp" / "rank_00009.bin").write_text("left by a kill")
    run.save(5, tokens=2)
    other = Run(folder, model__ffn_dim=12)
    with pytest.raises(AssertionError, match="tensors have changed"):
        run.checkpoints.save(6, other.model, other.optimizer, {})
    shutil.rmtree(folder / "step_00000006.tmp")
    kept = json.loads((folder / "step_00000005.replaced-1" / "manifest.json").read_text())
    return (
        kept["state"]["tokens"],
        run.load(path)["tokens"],
        sorted(os.listdir(path)),
        len(os.listdir(folder)),
    )


def test_saving_a_step_again_keeps_the_old_one(tmp_path):
    files = ["manifest.json", "rank_00000.bin", "tensors.json"]
    assert run_ranks(save_again, 1, tmp_path) == [(1, 2, files, 2)]


def gone_back(folder):
    """What is there, and loads, after each save of a run that has gone on from an older checkpoint."""
    run = Run(folder, checkpoint__keep=2, checkpoint__keep_every=10)
    for step in (10, 20, 30):
        run.save(step)
    flip(folder / "step_00000020" / "rank_00000.bin", 0.5)
    away = (folder / "step_00000030" / "rank_00000.bin").rename(folder / "away")  # as of a file server that is slow
    run, seen, said = Run(folder, checkpoint__keep=2), [], io.StringIO()
    with contextlib.redirect_stderr(said):
        assert run.load()["step"] == 10
        for step in (12, 14, 16):
            run.save(step)
            seen.append(sorted(path.name for path in folder.glob("step_*")))
    away.rename(folder / "step_00000030.skipped-1" / "rank_00000.bin")
    return seen, said.getvalue(), run.load()["step"]


def test_checkpoints_that_a_run_went_back_behind_count_no_more(tmp_path):
    """C074, C079: the good ones stay, not those that only have the right sizes; what was given up stays so."""
    ((seen, said, step),) = run_ranks(gone_back, 1, tmp_path)
    aside = ["step_00000020.skipped-1", "step_00000030.skipped-1"]
    assert seen == [[f"step_{n:08d}" for n in kept] + aside for kept in ((10, 12), (12, 14), (14, 16))]
    assert step == 16 and said.count("skipped checkpoint") == 2 and said.count("it is now step_000000") == 2


def wishes(folder):
    """What is resumed, or refused, for each wish; `b` began at a checkpoint of `a`."""
    for step in (1, 2):
        Run(folder / "a").save(step)
    a, b = Run(folder / "a"), Run(folder / "b")
    said, output = {}, io.StringIO()
    with contextlib.redirect_stdout(output):
        said["fresh"] = b.load("never"), b.load("auto")
        said["began"] = b.load(folder / "a" / "step_00000001")["path"]
        b.save(7)
        said["goes on"] = b.load(folder / "a" / "step_00000001")["path"]
        said["named"] = a.load(folder / "a" / "step_00000002")["path"]
        for name, wish in {"never": "never", "older": folder / "a" / "step_00000001"}.items():
            with pytest.raises(ValueError) as caught:
                a.load(wish)
            said[name] = str(caught.value)
        flip(folder / "a" / "step_00000002" / "rank_00000.bin", 0.5)
        with pytest.raises(CheckpointError) as caught:
            a.load(folder / "a" / "step_00000002")
        said["damaged"] = str(caught.value)
    return said, output.getvalue()


def test_what_a_run_starts_from(tmp_path):
    """I12: never over newer checkpoints, and never from another one than the one that was named."""
    ((said, output),) = run_ranks(wishes, 1, tmp_path)
    assert said["fresh"] == (None, None)
    assert said["began"] == str(tmp_path / "a" / "step_00000001") and said["named"].endswith("step_00000002")
    assert said["goes on"] == str(tmp_path / "b" / "step_00000007")
    assert output.count("\n") == 1 and "began at" in output and said["goes on"] in output
    assert "would write over" in said["never"] and "step_00000002" in said["never"]
    assert "would write over" in said["older"] and "step_00000002" in said["older"]
    assert "step_00000002 is damaged: rank 0: rank_00000.bin is not what was written" in said["damaged"]


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
    messages["no optimizer"] = without_optimizer(path)
    return messages


def without_optimizer(path):
    """A checkpoint that holds weights only."""
    target = path.parents[1] / "weights_only"
    shutil.copytree(path, target)
    index = json.loads((target / "tensors.json").read_text())
    index["tensors"] = {name: entry for name, entry in index["tensors"].items() if name.startswith("model.")}
    (target / "tensors.json").write_text(json.dumps(index))
    reseal(target)
    with pytest.raises(ValueError) as caught:
        Run(path.parents[1] / "without").load(target)
    return str(caught.value)


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


def failing_disk(folder, background):
    run = Run(folder, TWO, checkpoint__keep=1, checkpoint__background=background)
    run.train(1, 1)
    run.save(1)
    run.checkpoints.finish()
    write = storage.write_file

    def full(*_):
        raise OSError(28, "No space left on device")

    if run.mesh.world.rank == 1:
        storage.write_file = full
    with pytest.raises(CheckpointError) as caught:
        run.save(2)
        while run.checkpoints.writing:
            time.sleep(0.001)
        assert run.checkpoints.failed == (run.mesh.world.rank == 1)
        run.checkpoints.finish()
    assert not run.checkpoints.failed and run.checkpoints.finish() is None
    storage.write_file = write
    left, newest = sorted(os.listdir(folder)), Path(run.load()["path"]).name
    other = Checkpoints(folder / "step_00000001" / "manifest.json", run.checkpoints.config, run.mesh)
    with pytest.raises(CheckpointError, match="cannot write"):
        other.save(3, run.model, run.optimizer, {})
    run.save(4)
    run.checkpoints.finish()
    return (
        str(caught.value),
        caught.value.agreed,
        left,
        newest,
        sorted(path.name for path in folder.glob("step_????????")),
    )


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_harms_nothing(tmp_path, background):
    """C076: what was written of it goes, or a full disk would stay full."""
    first, second = run_ranks(failing_disk, 2, tmp_path, background)
    assert first == second
    message, agreed, left, newest, after = first
    assert "rank 1" in message and "No space left" in message and "Traceback" not in message
    assert message.count("cannot write") == 1 and agreed
    assert (left, newest, after) == (["step_00000001"], "step_00000001", ["step_00000004"])


def saved_while_training(folder):
    """All tensors as they were at each save; they are written over as soon as it returns."""
    run, expected, plan, plans = Run(folder, TWO, checkpoint__background=True), {}, checkpoints.dcp.save, []
    checkpoints.dcp.save = lambda *args, **options: (plans.append(True), plan(*args, **options))
    for step in (1, 2):
        run.train(step, step)
        state = {"tokens": step, "cursor": {"seen": [step]}}
        expected[step], begin = run.everything(), time.perf_counter()
        run.checkpoints.save(step, run.model, run.optimizer, state)
        for parameter in run.model.parameters():
            for tensor in (parameter, *run.optimizer.state[parameter].values()):
                getattr(tensor.detach(), "to_local", lambda tensor=tensor: tensor)().fill_(99)
        state["cursor"]["seen"].append(99)
        while run.checkpoints.writing:
            time.sleep(0.001)
        time.sleep(0.2)
        run.checkpoints.finish()
        record = run.checkpoints.last  # nobody was held up while the loop went on
        assert record.write_seconds < record.seconds < time.perf_counter() - begin - 0.2
        assert record.blocked_seconds < time.perf_counter() - begin - 0.2
        again = Run(folder, TWO)
        loaded = again.load()
        assert same_bits(again.everything(), expected[step]), step
        assert (loaded["tokens"], loaded["cursor"]) == (step, {"seen": [step]})
        run.load()
    checkpoints.dcp.save = plan
    return run.checkpoints.last.step, len(plans)


def test_a_background_save_has_the_values_of_its_step(tmp_path):
    """C075: weights, AdamW's state, its step, and the state of the run, though they change at once."""
    assert run_ranks(saved_while_training, 2, tmp_path) == [(2, 1)] * 2  # one plan for both


def slow_writer(folder):
    """What is on the disk, and whether a writer is at work, after each of two saves and the end."""
    run, write = Run(folder, TWO, checkpoint__background=True), storage.write_file
    waiting, most = [], 0

    def slow(*arguments):
        nonlocal most
        waiting.append(True)
        most = max(most, len(waiting))
        time.sleep(0.4 if run.mesh.world.rank else 0.1)
        waiting.pop()
        return write(*arguments)

    storage.write_file = slow
    seen = []
    for step in (1, 2):
        run.save(step)
        seen.append((run.checkpoints.writing, sorted(path.name for path in folder.glob("step_????????"))))
        dist.barrier()  # both have looked
    path = run.checkpoints.finish()
    record = run.checkpoints.last
    storage.write_file = write
    return seen, most, path.name, sorted(os.listdir(folder)), record


def test_a_second_save_waits_for_the_first_and_the_end_for_both(tmp_path):
    """C077: never two at once; what `finish` returns is on the disk, whichever rank's writer is slow."""
    for rank, (seen, most, last, left, record) in enumerate(run_ranks(slow_writer, 2, tmp_path)):
        assert seen == [(True, []), (True, ["step_00000001"])] and most == 1
        assert last == "step_00000002" and left == ["step_00000001", "step_00000002"]
        assert record.step == 2 and record.bytes > 1000
        assert min(record.blocked_seconds, record.seconds) > 0.3 and record.write_seconds > (0.4 if rank else 0.1)


def killed_while_saving(folder, seconds):
    """Saves without end, slowly, until it kills itself."""
    run = Run(folder, ONE, checkpoint__keep=1, checkpoint__background=True)
    for name in ("fsync", "rename", "writev"):
        wait(name)
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    state = run.load() or {"step": 0}
    for step in range(state["step"] + 1, 1000):
        run.save(step)


def wait(name):
    """The function of `os` takes a while, before and after."""
    function = getattr(os, name)

    def slow(*arguments):
        time.sleep(0.004)
        result = function(*arguments)
        time.sleep(0.004)
        return result

    setattr(os, name, slow)


def test_killed_at_any_moment_the_newest_is_whole(tmp_path):
    """C076: 20 kills, keep = 1, in the background: what is called a checkpoint is one, and there always is one."""
    run_ranks(save_one, 1, tmp_path)
    random, newest = Random(0), 1
    for _ in range(20):
        with pytest.raises(RuntimeError, match="died without a word"):
            run_ranks(killed_while_saving, 1, tmp_path, random.uniform(0.02, 0.3))
        found = finished(tmp_path)
        assert found and all(not list(problems(path)) for path in found)
        assert int(found[-1].name.removeprefix("step_")) >= newest
        newest = int(found[-1].name.removeprefix("step_"))
    assert newest > 5  # most lives came to save


def save_one(folder):
    Run(folder).save(1)
