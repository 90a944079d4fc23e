"""Real processes: ranks start, meet and end together, with the right exit code and one line that says why."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("launched.py")
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

    def wait_for_ranks(self, number: int) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(self.pids) < number:
            assert time.monotonic() < deadline, "the ranks did not start"
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


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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


def test_a_stall_ends_at_the_timeout(tmp_path: Path) -> None:
    code, _, errors = Launched(tmp_path, "stall:1", "parallel.sequence=2", "run.timeout_seconds=4").finish()
    assert code == 69
    assert len(errors) == 1
    assert "a peer died or stalled: " in errors[0] and "4000ms" in errors[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_all_quietly(number: signal.Signals, tmp_path: Path) -> None:
    run = Launched(tmp_path, "stall:1", "parallel.sequence=2")
    run.wait_for_ranks(2)
    if number == signal.SIGINT:
        os.killpg(run.process.pid, number)  # as a terminal does: to the launcher and to all ranks
    else:
        run.process.send_signal(number)
    code, _, errors = run.finish()
    assert (code, errors) == (128 + number, [])


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    run = Launched(tmp_path, "stall:1", "parallel.sequence=2")
    run.wait_for_ranks(2)
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
