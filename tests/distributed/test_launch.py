"""Real processes: ranks start, meet and end together, with the right exit code and one line that says why."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("launched.py")
PATIENCE = ("timeouts.step_seconds=3", "run.heartbeat_seconds=1")
LIMIT_SECONDS = 60  # C109: how long a run may outlive a dead rank

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")


class Launched:
    """A running launched.py; `pids` are its ranks."""

    def __init__(self, folder: Path, action: str, *arguments: str, command: tuple[str, ...] = (sys.executable,)):
        self.folder = folder
        drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
        environment = {k: v for k, v in os.environ.items() if k not in drop and not k.startswith("SLURM_")}
        environment |= {"LAUNCHED": action, "PIDS": str(folder), "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [*command, str(SCRIPT), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            start_new_session=True,
        )

    @property
    def pids(self) -> list[int]:
        return [int(path.name) for path in self.folder.iterdir() if path.name.isdecimal()]

    def pid_of(self, rank: int) -> int:
        return json.loads((self.folder / "heartbeat" / f"rank_{rank:05}.json").read_text())["pid"]

    def wait_for_ranks(self, number: int) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(self.pids) < number:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"the ranks did not start: {self.process.communicate()[1]}")
            time.sleep(0.05)

    def finish(self) -> tuple[int, str, list[str]]:
        """Exit code, output, and the lines that say what went wrong; nothing of the run is left."""
        try:
            out, err = self.process.communicate(timeout=LIMIT_SECONDS)
        finally:
            self.kill()
        assert self.gone(), "ranks outlived the launcher"
        return self.process.returncode, out, err.splitlines()

    def kill(self) -> None:
        for pid in [*self.pids, self.process.pid]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)

    def gone(self) -> bool:
        deadline = time.monotonic() + 10
        while any(alive(pid) for pid in self.pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        return not any(alive(pid) for pid in self.pids)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def test_ranks_start_and_meet(tmp_path: Path) -> None:
    """Two ranks, cores shared out, from another folder than the checkout (C097)."""
    run = Launched(tmp_path, "", "parallel.sequence=2")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    code, out, errors = run.finish()
    assert (code, errors) == (0, [])
    assert out.startswith("met 2 threads ")
    assert int(out.split()[-1]) <= threads
    assert [path.name for path in tmp_path.iterdir() if not path.name.isdecimal()] == []  # C093: no run folder


@pytest.mark.parametrize(
    ("action", "code", "error"),
    [
        ("value:1", 3, "[rank 1] some.key=3 is refused"),
        ("agree", 3, "some.key=3 is refused"),
        ("everywhere", 74, "every disk is full"),
        ("kill:1", 128 + signal.SIGKILL, "[rank 1] killed by SIGKILL"),
        ("exit5:0", 5, "[rank 0] ended with exit code 5"),
    ],
)
def test_one_failure_ends_all(action: str, code: int, error: str, tmp_path: Path) -> None:
    """C109, C048: whoever fails, all are gone, and one line says why."""
    run = Launched(tmp_path, action, "parallel.sequence=2")
    found, _, errors = run.finish()
    assert (found, errors) == (code, [f"launched.py: error: {error}"])


def test_a_bug_shows_one_traceback(tmp_path: Path) -> None:
    """C109: with the rank and the step, and not buried under what the other ranks saw."""
    code, _, errors = Launched(tmp_path, "bug:1", "parallel.sequence=3").finish()
    assert code == 1
    assert errors[-1] == "launched.py: error: [rank 1] KeyError: 'lost' (at step 3)"
    assert sum(line.startswith("Traceback") for line in errors) == 1


def test_a_rank_that_leaves_early(tmp_path: Path) -> None:
    """C109: os._exit(0) in one rank is no success."""
    code, _, errors = Launched(tmp_path, "exit:1", "parallel.sequence=2").finish()
    assert code == 69
    assert errors[-1] == "launched.py: error: [rank 1] left before the others, with exit code 0"


def test_a_stall_is_named(tmp_path: Path) -> None:
    """C109: a rank that gets no data, though it lives; every rank shows where it is."""
    run = Launched(tmp_path, "stuck:1", "parallel.sequence=3", *PATIENCE)
    run.wait_for_ranks(3)
    start = time.monotonic()
    code, _, errors = run.finish()
    assert code == 69
    assert len(errors) == 1
    host = socket.gethostname().partition(".")[0]
    assert f"stalled: rank 1 on {host} is behind at step 3, in data for " in errors[0]
    assert "timeouts.step_seconds=3" in errors[0]
    heartbeat = tmp_path / "heartbeat"
    assert (heartbeat / "stalled.txt").read_text().strip() == errors[0].partition("error: ")[2]
    assert "steps" in (heartbeat / "rank_00001.stacks").read_text()  # the function of launched.py
    assert "all_reduce" in (heartbeat / "rank_00002.stacks").read_text()
    assert time.monotonic() - start < 20


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    """C109: SIGSTOP, as a machine that hangs; rank 0 is no exception. (Others: test_stall.py.)"""
    run = Launched(tmp_path, "steps", "parallel.sequence=3", *PATIENCE)
    run.wait_for_ranks(3)
    os.kill(run.pid_of(0), signal.SIGSTOP)
    start = time.monotonic()
    code, _, errors = run.finish()
    assert code == 69
    assert len(errors) == 1
    assert "stalled: rank 0 on " in errors[0] and " has not been heard for " in errors[0]
    assert time.monotonic() - start < 20


def test_a_rank_that_does_not_come_to_the_end(tmp_path: Path) -> None:
    """C109: nobody watches the phases of a run that is over."""
    code, _, errors = Launched(tmp_path, "leave:1", "parallel.sequence=2", "timeouts.step_seconds=1").finish()
    words = "other ranks have not reached the end of the run within timeouts.step_seconds=1"
    assert (code, errors) == (69, [f"launched.py: error: {words}"])


@pytest.mark.parametrize(
    ("whom", "number"),
    [
        ("launcher", signal.SIGTERM),
        ("rank 1", signal.SIGUSR1),
        ("everybody", signal.SIGTERM),
    ],
)
def test_a_signal_is_agreed_on(whom: str, number: signal.Signals, tmp_path: Path) -> None:
    """C105: whoever hears it, all ranks leave together, and say so once. "everybody" hears it twice, as from Slurm."""
    run = Launched(tmp_path, "steps", "parallel.sequence=2")
    run.wait_for_ranks(2)
    match whom:
        case "launcher":
            run.process.send_signal(number)
        case "rank 1":
            os.kill(run.pid_of(1), number)
        case "everybody":
            os.killpg(run.process.pid, number)  # helper processes included
            time.sleep(0.03)
            os.killpg(run.process.pid, number)
    code, _, errors = run.finish()
    assert code == 75
    assert [line.rpartition(" ")[0] for line in errors] == [f"launched.py: stopped by {number.name} at step"]


def test_a_signal_reaches_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    """C105: Python runs no handler while rank 0 is in a collective; the time it has runs nevertheless."""
    run = Launched(tmp_path, "stuck:1", "parallel.sequence=2", "run.grace_seconds=1")
    run.wait_for_ranks(2)
    time.sleep(0.5)
    start = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    code, _, errors = run.finish()
    assert code == 75
    assert errors == ["launched.py: no time left after SIGTERM (run.grace_seconds=1): the last whole checkpoint counts"]
    assert 1 <= time.monotonic() - start < 30


def test_the_launcher_ends_a_rank_that_does_not_leave(tmp_path: Path) -> None:
    run = Launched(tmp_path, "steps", "parallel.sequence=2", "run.grace_seconds=1")
    run.wait_for_ranks(2)
    os.kill(run.pid_of(1), signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)
    code, _, errors = run.finish()
    assert code == 75
    assert errors[1:] == ["launched.py: error: the run was asked to stop, and did not leave together: killed ranks 1"]


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    """C105."""
    run = Launched(tmp_path, "stuck:1", "parallel.sequence=2")
    run.wait_for_ranks(2)
    run.process.send_signal(signal.SIGUSR1)
    time.sleep(1.2)
    run.process.send_signal(signal.SIGTERM)
    code, _, errors = run.finish()
    assert (code, errors) == (128 + signal.SIGTERM, [])


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_a_signal_that_was_held_back(ranks: int, number: signal.Signals, tmp_path: Path) -> None:
    """C105: what srun starts as `env --block-signal=… python train.py` loses none, even while it imports torch."""
    block = ("env", "--block-signal=TERM", "--block-signal=USR1", sys.executable)
    run = Launched(tmp_path, "steps", f"parallel.sequence={ranks}", command=block)
    status = Path(f"/proc/{run.process.pid}/status")
    wait_for(lambda: int(status.read_text().partition("SigBlk:")[2].split()[0], 16) >> (number - 1) & 1)
    run.process.send_signal(number)
    code, _, errors = run.finish()
    assert (code, errors) == (75, [f"launched.py: {number.name} before the first step: nothing to save"])


def test_a_signal_while_the_ranks_start(tmp_path: Path) -> None:
    """C105: none is lost on ranks that do not listen yet."""
    run = Launched(tmp_path, "steps", "parallel.sequence=4")
    wait_for(lambda: any(children(pid) for pid in children(run.process.pid)))
    run.process.send_signal(signal.SIGTERM)
    code, _, errors = run.finish()
    assert (code, errors) == (75, ["launched.py: SIGTERM before the first step: nothing to save"])


def test_ctrl_c_ends_all_quietly(tmp_path: Path) -> None:
    run = Launched(tmp_path, "steps", "parallel.sequence=2")
    run.wait_for_ranks(2)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to the launcher and to all ranks
    code, _, errors = run.finish()
    assert (code, errors) == (128 + signal.SIGINT, [])


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    """Not even one that is stopped."""
    run = Launched(tmp_path, "steps", "parallel.sequence=2")
    run.wait_for_ranks(2)
    os.kill(run.pids[0], signal.SIGSTOP)
    run.process.kill()
    run.process.wait()
    outcome = run.gone()
    run.kill()
    run.process.communicate()
    assert outcome


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("parallel.sequnce=2", "Did you mean parallel.sequence?"),
        ("+model.nope=1", "model.nope"),
        ("parallel.tensor=3", "parallel.tensor=3 does not divide model.num_heads"),
        ("parallel.sequence=4096", "4096 ranks"),
        ("data.path=/a/b=c", "Quote values"),
    ],
)
def test_a_refused_config_is_one_line(override: str, words: str, tmp_path: Path) -> None:
    """C048, C094: before any rank is started."""
    run = Launched(tmp_path, "", override)
    code, out, errors = run.finish()
    assert (code, out, len(errors)) == (3, "", 1)
    assert words in errors[0]
    assert run.pids == []


def torchrun(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", *arguments)


def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    """The launcher's variables decide; no processes are added to its own (C104)."""
    run = Launched(tmp_path, "", "parallel.sequence=2", command=torchrun())
    code, out, _ = run.finish()
    assert code == 0
    assert out.startswith("met 2 ")
    assert len(run.pids) == 2


def test_torchrun_and_config_disagree(tmp_path: Path) -> None:
    """Refused on both ranks, said by rank 0 alone."""
    code, _, errors = Launched(tmp_path, "", "parallel.sequence=3", command=torchrun()).finish()
    assert code != 0
    assert [line for line in errors if line.startswith("launched.py: error:")] == [
        "launched.py: error: parallel.data=-1 × parallel.sequence=3 × parallel.tensor=1 does not make "
        "2 ranks: start 3 ranks, or use axes whose product is 2"
    ]
