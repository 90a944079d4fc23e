"""What the environment says, how many ranks a machine starts, and which exit code an error means."""

import os
import signal
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from conf.compose import compose
from training import agreement, launcher, runtime
from training.launcher import first_cause
from training.world import World, first_host, port_of_job, read_world

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_JOB_NODELIST": "n[01-08]",
}
BATCH_STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "n1",
}


@pytest.fixture
def no_scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty PATH; returns its only folder."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_torchrun_says_who_we_are() -> None:
    assert read_world(TORCHRUN) == World(5, 8, 1, 4, "env://", 4)


def test_torchrun_wins_over_slurm() -> None:
    """C104: torchrun inside a Slurm step."""
    assert read_world(SRUN | TORCHRUN) == World(5, 8, 1, 4, "env://", 4)
    assert read_world(BATCH_STEP | TORCHRUN) == World(5, 8, 1, 4, "env://", 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"LOCAL_RANK": None}, "LOCAL_RANK (not set)"),
        ({"MASTER_PORT": None, "WORLD_SIZE": None}, "WORLD_SIZE (not set), MASTER_PORT (not set)"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR (not set)"),
        ({"RANK": "first"}, "RANK=first"),
        ({"RANK": "8"}, "RANK=8 must be below WORLD_SIZE=8"),
    ],
)
def test_half_a_torchrun_is_refused(change: dict[str, str | None], words: str) -> None:
    environment = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(ValueError) as refusal:
        read_world(environment)
    assert words in str(refusal.value)
    assert "torchrun" in str(refusal.value)


def test_srun_says_who_we_are(no_scontrol: Path) -> None:
    """Ranks meet on the first node of the step, which can be another than the job's."""
    assert read_world(SRUN) == World(5, 8, 1, 4, "tcp://n07:24567", 4)


def test_srun_meets_where_the_script_says() -> None:
    assert read_world(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23"}).rendezvous == "tcp://10.0.0.1:23"


def test_cores_that_slurm_divided_are_not_divided_again(no_scontrol: Path) -> None:
    assert read_world(SRUN | {"SLURM_CPUS_PER_TASK": "6"}).local_size == 1


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"MASTER_ADDR": "stale", "MASTER_PORT": "29500"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"},  # a shell of salloc
        BATCH_STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},  # srun --pty bash
        BATCH_STEP | {"SLURM_NTASKS": "1"},
    ],
)
def test_no_launcher(environment: dict[str, str]) -> None:
    """C104: a process that nobody started as one of many is alone, whatever the job around it looks like."""
    assert read_world(environment) is None


@pytest.mark.parametrize("environment", [BATCH_STEP, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}])
def test_tasks_that_never_come_are_refused(environment: dict[str, str]) -> None:
    """C104: a batch step that says 4 tasks and is one process, instead of a wait for the other three."""
    with pytest.raises(ValueError, match="SLURM_NTASKS=4 and SLURM_PROCID=0 .* SLURM_STEP_NUM_TASKS.* srun"):
        read_world(environment)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("nodeA,nodeB[001,003],nodeC", "nodeA"),
        ("linux[1,2]", "linux1"),
        ("b04-[09-10]", "b04-09"),
        ("c457-[011-012]", "c457-011"),
        ("a[1-2]b[3-4]", "a1b3"),
        ("n1", "n1"),
    ],
)
def test_first_host_without_scontrol(nodelist: str, first: str, no_scontrol: Path) -> None:
    """C103, I13: zeros are kept, commas in brackets do not end a name."""
    assert first_host(nodelist) == first


def test_first_host_asks_scontrol(no_scontrol: Path) -> None:
    """C103: scontrol knows better than we do, where it answers."""
    scontrol = no_scontrol / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$1 $2 $3" = "show hostnames odd[1-2]" ] && echo real1 && echo real2\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    assert first_host("odd[1-2]") == "real1"
    assert first_host("even[2-4]") == "even2"  # scontrol fails


def test_no_nodes_are_refused() -> None:
    """C103."""
    with pytest.raises(ValueError, match="SLURM_JOB_NODELIST='' names no host: set MASTER_ADDR"):
        first_host("")


@pytest.mark.parametrize("job", [0, 1, 9_999, 10_000, 1_234_567, 2**32 - 2])
def test_ports_of_jobs(job: int) -> None:
    """C102: outside Linux's ephemeral ports (32768-60999), and different for neighbouring jobs."""
    assert 20_000 <= port_of_job(job) <= 29_999
    assert port_of_job(job) != port_of_job(job + 1)


@pytest.mark.parametrize(
    ("overrides", "devices", "ranks"),
    [
        ([], 0, 1),
        (["parallel.sequence=4"], 0, 4),
        (["parallel.data=2", "parallel.sequence=2", "parallel.tensor=2"], 0, 8),
        ([], 8, 8),
        (["parallel.sequence=2", "parallel.tensor=2"], 8, 8),
        (["parallel.sequence=3"], 8, 6),
        (["parallel.data=1", "parallel.sequence=2"], 8, 2),
    ],
)
def test_number_of_local_ranks(overrides: list[str], devices: int, ranks: int) -> None:
    assert runtime.num_local_ranks(compose(overrides), devices) == ranks


@pytest.mark.parametrize(
    ("overrides", "devices", "words"),
    [
        (["parallel.sequence=8"], 4, "8 ranks, this machine has 4 GPUs"),
        (["parallel.data=3", "parallel.sequence=2"], 4, "6 ranks, this machine has 4 GPUs"),
        (["parallel.sequence=65536"], 0, "65536 ranks, this machine has"),
    ],
)
def test_more_ranks_than_the_machine_holds(overrides: list[str], devices: int, words: str) -> None:
    with pytest.raises(ValueError) as refusal:
        runtime.num_local_ranks(compose(overrides), devices)
    assert words in str(refusal.value)
    assert "parallel.sequence" in str(refusal.value)


@pytest.mark.parametrize(
    ("world", "devices", "index"),
    [
        (World(5, 8, 1, 4, "env://", 4), 4, 1),
        (World(5, 8, 1, 4, "tcp://n1:20007"), 4, 1),
        (World(5, 8, 1, 4, "tcp://n1:20007"), 1, 0),  # srun --gpus-per-task=1
        (World(0, 1, 0), 1, 0),
    ],
)
def test_device_of_a_rank(world: World, devices: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert runtime.pick_device(world) == torch.device("cuda", index)


def test_two_ranks_never_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="local rank 1 has no GPU"):
        runtime.pick_device(World(1, 2, 1, 2, "env://"))


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([], 0),
        ([0, 0], 0),
        ([0, 69], 69),
        ([69, 3, 0], 3),
        ([69, 69], 69),
        ([74, 3], 74),
        ([-9, 69], 137),
        ([69, -11], 139),
    ],
)
def test_first_cause(codes: list[int], code: int) -> None:
    """A peer's death is a consequence: it is the run's exit code only where there is no other."""
    assert first_cause(codes) == code


def test_a_signal_meets_a_rank_that_has_just_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server has reaped it, and its exit is not known here yet."""
    monkeypatch.setattr(launcher, "STOPPED_SECONDS", 0.1)
    gone = subprocess.Popen(["true"])
    gone.wait()
    sentinel, never = os.pipe()
    heard, write_end = os.pipe()
    os.write(write_end, bytes([signal.SIGTERM]))
    rank = SimpleNamespace(pid=gone.pid, sentinel=sentinel)
    assert launcher._wait([rank], heard, grace_seconds=0) == ([], signal.SIGTERM, 0)
    for descriptor in (sentinel, never, heard, write_end):
        os.close(descriptor)


class Unstable(RuntimeError):
    exit_code = 70
    agreed = True


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("refused"), 3),
        (OSError("disk full"), 74),
        (FileNotFoundError(2, "No such file"), 74),
        (RuntimeError("shapes differ"), 1),
        (KeyError("x"), 1),
        (AssertionError(), 1),
        (dist.DistBackendError("NCCL"), 69),
        (RuntimeError("[x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:63201"), 69),
        (RuntimeError("[x/gloo/y.cc:78] Timed out waiting 5000ms for recv operation to complete"), 69),
        (Unstable(), 70),
    ],
)
def test_exit_code_of_an_error(error: Exception, code: int) -> None:
    assert runtime.exit_code(error) == code


def test_one_line_for_what_a_user_gave(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving, runtime.exit_codes(0):
        raise ValueError("a=1 is refused:\nuse 2")
    assert leaving.value.code == 3
    assert capsys.readouterr().err.endswith(": error: a=1 is refused: use 2\n")


def test_other_ranks_keep_quiet_about_what_all_met(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving, runtime.exit_codes(1, shared=True):
        raise ValueError("refused")
    assert leaving.value.code == 3
    assert capsys.readouterr().err == ""


def test_other_ranks_keep_quiet_about_what_all_raise(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving, runtime.exit_codes(1):
        raise Unstable("loss nan")
    assert leaving.value.code == 70
    assert capsys.readouterr().err == ""


def test_a_bug_keeps_its_traceback_and_its_notes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving, runtime.exit_codes(1):
        error = KeyError("lost")
        error.add_note("at step 3")
        raise error
    assert leaving.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].endswith("error: [rank 1] KeyError: 'lost' (at step 3)")


def test_exits_pass_through() -> None:
    with pytest.raises(SystemExit) as leaving, runtime.exit_codes(1):
        raise SystemExit(75)
    assert leaving.value.code == 75


def test_a_session_of_one() -> None:
    """A single rank has a process group too, and gives it back, whatever happens inside."""
    config = compose([])
    with runtime.session(config) as rank:
        assert (rank.rank, rank.size, dist.get_world_size()) == (0, 1, 1)
        assert agreement.agree(lambda: "yes") == "yes"
    with pytest.raises(ZeroDivisionError), runtime.session(config):
        raise ZeroDivisionError
    assert not dist.is_initialized()
