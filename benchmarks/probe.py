"""A few real steps of a configuration in processes of their own: what they cost each rank in memory and time.

    found = probe(["model=debug", "data.sequence_length=8K", "parallel.sequence=2"], ranks=2)
    found.peak_bytes, found.step_seconds, found.losses

Every rank composes the config and uses the product's own parts, wired as `train.py` does; tokens are made up. Linux
only. A server, started once per process of the caller, has imported everything; each rank is a fork of it that never
ran anything before (`benchmarks/probe_rank.py`). Whatever ends the caller or the server ends the ranks.

What counts as a rank's memory is resident memory of its own, above a baseline:

* The baseline is taken after imports, groups, and one step of a small model of the same kind, whose memory is given
  back first. It holds what a process has once, whatever it trains: code, threads, gloo's and MKL's buffers.
* Model, optimizer and the batch are made above the baseline. The peak is that of the steps (VmHWM, which the kernel
  keeps; it is reset after the model is built), not of the drawing of first weights.
* Pages of files (libraries' code that is met for the first time) are not counted, pages of malloc are, also those that
  it holds but nobody uses. By its settings here that is next to nothing: a block of 64 KiB or more is mapped for itself
  and unmapped when it is freed. Fresh pages cost time, so measure seconds with `tight_malloc=False`.
* A budget limits something else: RLIMIT_DATA counts what is mapped and private, touched or not, and makes the
  allocation fail that would go beyond. PyTorch then raises, like CUDA's out of memory. It holds from the baseline on,
  so building the model has to keep to it, too. Page tables and the kernel's socket buffers count in neither.
"""

import atexit
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OWN_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
TIGHT_MALLOC = {  # every block of a page or more is the kernel's again once it is freed
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}
OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|bad_alloc|MemoryError|not enough memory|out of memory"
    r"|can't start new thread|could not create a (primitive|memory)",
    re.IGNORECASE,
)
GRACE_SECONDS = 20.0  # beyond the timeout, in which the server itself must have answered
LOG_LINES = 15  # of each rank that failed, in the error


@dataclass
class Job:
    """What the ranks are asked to do; see `probe`."""

    overrides: list[str]
    ranks: int
    steps: int
    budget_bytes: int | None
    timeout_seconds: float
    documents: list[int] | None
    change: str
    hold_states: bool
    folder: str = ""


@dataclass
class Probe:
    """What the ranks found; empty lists where they failed.

    Attributes:
        peak_bytes: of each rank, the most memory during the steps, above the baseline.
        built_bytes: of each rank, what lay above the baseline before the first step: weights and the batch.
        step_seconds: of each step, the slowest rank's.
        losses: of each step, the mean over its tokens.
        failed: "" or "memory": a rank needed more than the budget.
        message: what failed, where something did.
    """

    peak_bytes: list[int] = field(default_factory=list)
    built_bytes: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    failed: str = ""
    message: str = ""


def probe(
    overrides: Sequence[str],
    ranks: int,
    steps: int = 2,
    budget_bytes: int | None = None,
    timeout_seconds: float = 600,
    *,
    documents: Sequence[int] | None = None,
    change: str = "",
    hold_states: bool = False,
    tight_malloc: bool = True,
) -> Probe:
    """Runs `steps` train steps of the config of `overrides` on `ranks` processes, each with one thread.

    Args:
        budget_bytes: memory that each rank may take above its baseline; None = as much as the machine has.
        documents: lengths of the documents of each sequence; None = one as long as the sequence.
        change: "module:function", called with the model once it is built: for variants that the product does not have.
        hold_states: hold weights and the optimizer's states in the baseline: what is left is what a step takes for its
            tokens, and its gradients. The model then takes a step on few tokens first.
        tight_malloc: hand every freed block back at once; see above.

    Raises:
        ValueError: what the product refuses, for example a config.
        TimeoutError: where the ranks take longer than `timeout_seconds`.
        RuntimeError: where a rank fails otherwise, with the end of what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="probe-") as folder:
        job = Job(
            list(overrides),
            ranks,
            steps,
            budget_bytes,
            timeout_seconds,
            list(documents) if documents is not None else None,
            change,
            hold_states,
            folder,
        )
        answer = _server(tight_malloc).ask(job)
        found = [_read(Path(folder, f"rank{rank}.json")) for rank in range(ranks)]
        logs = [_tail(Path(folder, f"rank{rank}.log")) for rank in range(ranks)]
    return judge(job, answer, found, logs)


def judge(job: Job, answer: dict[str, Any], found: Sequence[dict[str, Any]], logs: Sequence[str]) -> Probe:
    """The result of a job, from the ranks' exit codes (in the order in which they left), results and logs.

    Raises: as `probe`.
    """
    if all("losses" in one for one in found):
        return Probe(
            peak_bytes=[one["peak_bytes"] for one in found],
            built_bytes=[one["built_bytes"] for one in found],
            step_seconds=[max(times) for times in zip(*(one["step_seconds"] for one in found), strict=True)],
            losses=found[0]["losses"],
        )
    if job.budget_bytes is not None:
        for rank, (one, log) in enumerate(zip(found, logs, strict=True)):
            message = one.get("error") or log
            if OUT_OF_MEMORY.search(message):
                line = next(line for line in message.splitlines() if OUT_OF_MEMORY.search(line))
                return Probe(failed="memory", message=f"rank {rank}: {line.strip()}")
    what = f"{job.ranks} ranks with {' '.join(job.overrides)}"
    if answer["timed_out"]:
        said = "\n".join(f"rank {rank}: {log or 'nothing'}" for rank, log in enumerate(logs))
        raise TimeoutError(f"{what} did not end within {job.timeout_seconds} s; they said\n{said}")
    rank, code = next((pair for pair in answer["exits"] if pair[1]), (0, 0))
    if found[rank].get("refused"):
        raise ValueError(found[rank]["error"])
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
    raise RuntimeError(f"{what}: rank {rank} {how}: {found[rank].get('error', '')}\n{logs[rank]}")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(lines[-LOG_LINES:])


class _Server:
    """The process that ranks are forked from, seen by the caller."""

    def __init__(self, tight_malloc: bool):
        if not sys.platform.startswith("linux"):
            raise RuntimeError(f"memory is read from /proc, which {sys.platform} has not: run this on Linux")
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "SLURM_"))}
        mine |= OWN_THREADS | (TIGHT_MALLOC if tight_malloc else {}) | {"CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.probe_rank"],
            cwd=ROOT,
            env=mine,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the caller, which closes the pipe
        )

    def ask(self, job: Job) -> dict[str, Any]:
        """Has the server run `job`. On any failure the server is ended, and its ranks with it."""
        try:
            self.process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            self.process.stdin.flush()
            line = self._line(time.monotonic() + job.timeout_seconds + GRACE_SECONDS)
        except BaseException:
            self.close()
            raise
        if not line:
            self.close()
            raise RuntimeError(f"the server of the probe died with exit code {self.process.returncode}")
        return json.loads(line)

    def _line(self, deadline: float) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError("the server of the probe does not answer")
        return self.process.stdout.readline()

    def close(self) -> None:
        self.process.kill()  # the kernel then kills its ranks
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


_SERVERS: dict[bool, _Server] = {}


def _server(tight_malloc: bool) -> _Server:
    server = _SERVERS.get(tight_malloc)
    if server is None or server.process.poll() is not None:
        server = _SERVERS[tight_malloc] = _Server(tight_malloc)
    return server


def close() -> None:
    """Ends the servers; the next probe starts another."""
    for server in _SERVERS.values():
        if server.process.poll() is None:
            server.close()
    _SERVERS.clear()


atexit.register(close)
