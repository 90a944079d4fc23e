"""What ranks of a training loop do together: skip, stop, save and give up."""

import contextlib
import gc
import json
import math
import signal
import time
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conf.compose import compose
from conf.schema import resolve
from data.format import open_shard
from data.loader import Loader
from data.stream import Source, Stage, TokenStream
from parallel.apply import attend_over, build_model
from parallel.mesh import build_mesh
from parallel.take import Take
from tests.checkpoints import tensors
from tests.harness import run_ranks
from tests.shards import write_documents
from training.checkpoint import storage
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.files import CheckpointError
from training.loop import Unstable, train
from training.metrics import MetricsLog
from training.optimizer import build_optimizer
from training.runtime import Rank
from training.save_clock import SaveClock
from training.signals import Stopped, StopSignals
from training.trainer import Progress, Trainer
from training.watch import Watch

LENGTH, STEPS = 32, 8
CONFIG = {
    "model.vocab_size": 64,
    "data.vocab_size": 64,
    "model.model_dim": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.ffn_dim": 16,
    "data.sequence_length": LENGTH,
    "train.steps": STEPS,
    "train.global_batch_tokens": 4 * LENGTH,  # so that a data rank of two has two micro-batches
    "checkpoint.every": 0,
    "validation.every": 0,
    "logging.peak_flops": 1e12,
}


class Run:
    """One rank's trainer in `folder`; `events` are called with (step, micro-batch) before each micro-batch."""

    def __init__(self, folder: Path, events=None, **changes):
        options = CONFIG | {"run.dir": folder, "run.name": "r"} | changes
        self.config = config = compose([f"{key}={value}" for key, value in options.items()])
        rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
        degrees = resolve(config, size)
        self.mesh = mesh = build_mesh(degrees, "cpu")
        self.model = build_model(config, mesh, attend_over(mesh, "sdpa"), device)
        optimizer = build_optimizer(self.model, config.optimizer)
        source = Source("documents", open_shard(folder / "documents"), Fraction(1))
        stream = TokenStream([source], [Stage(LENGTH, None)], seed=3)
        home = folder / config.run.name
        self.stop = StopSignals(config.run.grace_seconds)
        self.checkpoints = Checkpoints(home / "checkpoints", config, mesh)
        self.metrics = MetricsLog(config, rank, 0)
        self.watch = Watch(home / "heartbeat", Rank(rank, size, device), config)
        saves = SaveClock(config, size, 0.0, time.monotonic())
        self.trainer = Trainer(
            mesh, self.model, optimizer, stream, self.checkpoints, self.metrics, self.watch, self.stop, saves, 1e12,
            device, first_step=1,
        )  # fmt: skip
        before = self.trainer.before_micro_batch

        def told(phase, step, number):
            if events is not None:
                events(self, step, number)
            before(phase, step, number)

        self.trainer.before_micro_batch = told
        self.loader = Loader(
            stream.stage(0),
            Take(config, mesh),
            micro_batch_size=1,
            accumulation=degrees.accumulation,
            data_rank=mesh.data.rank,
            data_size=mesh.data.size,
            first_sequence=0,
            num_steps=STEPS,
        )

    def train(self, progress=None, validate=lambda step: {}) -> Progress:
        """All steps; `validate(step)` stands for the validation after each."""
        self.trainer.validate = lambda validation, progress: validate(progress.step)
        with self.watch, self.metrics, self.loader:
            return train(self.config, progress or Progress(), self.trainer, self.loader, None)

    def weights(self) -> dict:
        return {name: weight.full_tensor().detach().numpy().copy() for name, weight in self.model.named_parameters()}


@pytest.fixture
def folder(tmp_path) -> Path:
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(1, 64, (500,), generator=generator).tolist() for _ in range(4)]
    write_documents(tmp_path, documents, 64).rename(tmp_path / "documents")
    return tmp_path


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "r" / "metrics.jsonl").read_text().splitlines()]


def poison(rank: int, steps: range):
    """Makes one rank's loss infinite at those steps, in the last micro-batch."""

    def event(run, step, number):
        if not hasattr(run, "hook") and dist.get_rank() == rank:
            run.hook = run.model.register_forward_hook(lambda model, given, loss: loss * run.factor)
        run.factor = math.inf if step in steps and number == run.last_number else 1.0

    return event


def train_poisoned(folder, axes):
    seen = {}

    def event(run, step, number):
        run.last_number = 3 if run.mesh.data.size == 1 else 1
        if number == 0:
            seen[step] = run.weights()  # before this step
        poison(1, range(3, 4))(run, step, number)

    run = Run(folder, event, **axes)
    progress = run.train()
    moments = [run.trainer.optimizer.state[parameter]["step"].item() for parameter in run.model.parameters()]
    seen[STEPS + 1] = run.weights()
    return progress, seen, set(moments)


@pytest.mark.parametrize("axis", ["parallel.data", "parallel.sequence"])
def test_a_step_that_one_rank_cannot_use_is_skipped_by_all(folder, axis):
    """C017: nobody's weights change, AdamW does not count it, and it is told as skipped."""
    results = run_ranks(train_poisoned, 2, folder, {axis: 2})
    for progress, seen, moments in results:
        assert (progress.step, progress.skipped, progress.skipped_in_a_row) == (STEPS, 1, 0)
        assert moments == {STEPS - 1}
        unchanged = {step: all((seen[step][n] == seen[step + 1][n]).all() for n in seen[step]) for step in range(1, 9)}
        assert [step for step, same in unchanged.items() if same] == [3]
    (_, first, _), (_, second, _) = results
    assert all((first[STEPS + 1][name] == second[STEPS + 1][name]).all() for name in first[1])
    assert [row["step"] for row in rows(folder) if row.get("skipped")] == [3]
    assert rows(folder)[2]["loss"] is None


def train_until_unstable(folder):
    def event(run, step, number):
        run.last_number = 1
        poison(1, range(4, 100))(run, step, number)

    run = Run(folder, event, **{"parallel.data": 2, "train.max_skipped_steps": 2, "checkpoint.every": 3})
    with pytest.raises(Unstable) as caught:
        run.train()
    return str(caught.value)


def test_too_many_in_a_row_end_the_run(folder):
    """After train.max_skipped_steps of them; what was saved before stays as it was."""
    first, second = run_ranks(train_until_unstable, 2, folder)
    assert first == second
    assert "step 6: " in first and "3 steps in a row" in first and "train.max_skipped_steps=2" in first
    assert [path.name for path in (folder / "r/checkpoints").iterdir()] == ["step_00000003"]


def train_until_stopped(folder, background, grace_seconds, at):
    def event(run, step, number):
        if dist.get_rank() == 1 and (step, number) == at:
            run.stop.requested = signal.SIGUSR1

    more = {"parallel.data": 2, "checkpoint.background": background, "run.grace_seconds": grace_seconds}
    run = Run(folder, event, **more)
    run.trainer.saves.estimate = 5.0  # seconds that a save is thought to take
    with pytest.raises(Stopped) as caught:
        run.train()
    return str(caught.value), run.weights(), gc.isenabled()


@pytest.mark.parametrize("background", [False, True])
def test_one_rank_is_asked_to_stop(folder, background):
    """C105: all stop before the same micro-batch, and what is saved is the last whole step, not the one begun."""
    results = run_ranks(train_until_stopped, 2, folder, background, 60, (5, 1))
    assert {said for said, _, _ in results} == {
        "stopped by SIGUSR1 after step 4, saved. The same command goes on from it"
    }
    assert all(enabled for _, _, enabled in results)
    saved = tensors(folder / "r/checkpoints/step_00000004")
    for _, weights, _ in results:
        assert all((saved[f"model.{name}"] == weight).all() for name, weight in weights.items())
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4]
    assert json.loads((folder / "r/starts.jsonl").read_text().splitlines()[-1])["reason"] == "SIGUSR1"


def stop_while_validating(folder):
    """Stops in the validation of step 4, and lets another begin with what was saved."""
    run = Run(folder, **{"parallel.data": 2, "validation.every": 4})

    def interrupted(step):
        run.stop.requested = signal.SIGTERM
        run.trainer.before_micro_batch("validate", step, 0)

    with pytest.raises(Stopped):
        run.train(validate=interrupted)
    state = json.loads((folder / "r/checkpoints/step_00000004/manifest.json").read_text())["state"]
    before = [row["step"] for row in rows(folder)]
    dist.barrier()
    validated = []
    progress = Progress(state["step"], state["tokens"], owed=state["owed"])
    other = Run(folder, **{"run.name": "again", "parallel.data": 2, "train.steps": 5})
    other.train(progress, lambda step: validated.append(step) or {"validation_loss": 1.0})
    return state["step"], before, validated


def test_a_validation_that_was_interrupted_is_made_up_for(folder):
    """Its step's row waits for it, so that no row is there twice, and none without what it should have."""
    for step, before, validated in run_ranks(stop_while_validating, 2, folder):
        assert (step, before) == (4, [1, 2, 3])
        assert validated[0] == 4
    first = json.loads((folder / "again/metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 4 and first["validation_loss"] == 1.0 and first["loss"] > 0


def test_no_time_is_left_to_save(folder):
    """Then the run leaves on its last checkpoint, and says so."""
    for said, _, _ in run_ranks(train_until_stopped, 2, folder, False, 6, (5, 0)):
        assert "after step 4, not saved: that takes 5 s, and of run.grace_seconds" in said
    assert not list((folder / "r").glob("checkpoints/*"))


def train_with_failing_writer(folder):
    write = storage.write_file

    def full(*arguments):
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return write(*arguments)

    run = Run(folder, **{"parallel.data": 2, "checkpoint.background": True, "checkpoint.every": 3})
    storage.write_file = full
    try:
        with pytest.raises(CheckpointError) as caught:
            run.train()
    finally:
        storage.write_file = write
    return str(caught.value)


def test_an_error_of_one_writer_ends_the_run(folder):
    """C077: soon after it happened, on all ranks, and nothing that is not whole is left with a checkpoint's name."""
    first, second = run_ranks(train_with_failing_writer, 2, folder)
    assert first == second and "rank 1" in first and "No space left" in first
    assert len(rows(folder)) < STEPS
    assert not list((folder / "r").glob("checkpoints/step_????????"))


def train_and_watch_garbage(folder):
    seen = []
    run = Run(folder, lambda run, step, number: seen.append(gc.isenabled()), **{"parallel.data": 2})
    run.train()
    return seen, gc.isenabled(), gc.get_freeze_count()


def test_garbage_is_looked_for_between_steps_only(folder):
    for seen, after, frozen in run_ranks(train_and_watch_garbage, 2, folder):
        assert seen and not any(seen) and after and not frozen


def train_with_a_slow_rank(folder):
    run = Run(folder, **{"parallel.data": 2, "logging.ranks_every": 4})
    if dist.get_rank() == 1:
        mlp = run.model.layers[0].mlp
        forward = mlp.forward
        mlp.forward = lambda x: (time.sleep(0.05), forward(x))[1]
    run.train()


def test_the_slow_rank_is_named(folder):
    """Where all wait for it in sharding's own collectives, and so need equally long for a step."""
    run_ranks(train_with_a_slow_rank, 2, folder)
    said = [line for line in (folder / "r/log.txt").read_text().splitlines() if "feed-forward" in line]
    assert len(said) == 2 and all("feed-forward: rank 1 on " in line for line in said), said


def train_with_late_writer(folder):
    """When the save of step 1, which rank 1 is long about, came to count."""
    write, counted = storage.write_file, []

    def slow(*arguments):
        time.sleep(2.5 * (dist.get_rank() == 1))
        return write(*arguments)

    def event(run, step, number):
        time.sleep(0.1)
        if run.checkpoints.last is not None and not counted:
            counted.append(step)

    more = {"parallel.data": 2, "checkpoint.background": True, "timeouts.save_seconds": 1}
    run = Run(folder, event, **more)
    run.trainer.watch.phase = lambda name: contextlib.nullcontext()  # else the watch would end the processes
    run.trainer.save_is_due = True
    storage.write_file = slow
    try:
        run.train()
    finally:
        storage.write_file = write
    return counted[0]


def test_a_writer_that_hangs_is_noticed(folder):
    """All wait for it, under the eyes of the watch, once it has taken longer than a save may."""
    first, second = run_ranks(train_with_late_writer, 2, folder)
    assert first == second < STEPS
