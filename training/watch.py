"""Signs of life: what each rank is doing, in the run's folder, and the end of a run that is stuck.

python -m training.watch RUN_FOLDER     who is where in a run, and who holds it up; only reads
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from conf.schema import TrainConfig
from training.launcher import PEER, say
from training.liveness import Beat, behind
from training.signals import SAY_SECONDS, within

if TYPE_CHECKING:
    from training.runtime import Rank  # imports torch: the command does without

TIMEOUTS = {
    "start": "start_seconds",
    "first_step": "first_step_seconds",
    "step": "step_seconds",
    "data": "step_seconds",
    "save": "save_seconds",
    "validate": "validate_seconds",
}
FOLDER = "heartbeat"  # in the run's
END = "end"  # the phase after the last one, which nothing limits
SIGN_BYTES = 512  # always the same, so that a newer sign covers the older one
SIGNS_PER_TIMEOUT, OVERDUE = 4, 3  # a rank that misses three signs is silent, before a phase is too long
OVERSLEPT_SECONDS = 1.0  # a thread that wakes up later than this was stopped, with its process
LAST_SECONDS = 5.0  # for each thing that is written down at the end: the file server may be what is stuck
KILL_SECONDS = 30  # for all of that


class Watch:
    """Watches this rank from two threads: one writes signs of life, one ends the process where a phase takes too long.

    To be made and entered by every rank, once they have met; no collective. While it is entered, the main thread says
    with `enter` what it does. This rank's last sign is `<folder>/rank_00013.json`. `start_id`: the same on all ranks,
    and another one at each start: ranks of the start before, on a node that was cut off, may still write here.

    Where a phase takes longer than its limit in `timeouts`, the rank writes the stacks of its threads into
    `<folder>/rank_00013.stacks`; the first rank to get there says who holds the run up, and writes that into
    `<folder>/stalled-<start_id>.txt`, which has all others write their stacks, too; then the process ends, with exit
    code 69. So every rank that waits for a dead or stopped one finds out by itself, whichever that is. Time for which
    this whole process was stopped does not count. A file system that does not answer delays this by seconds.

    Raises:
        OSError: where `folder` cannot be written to.
    """

    def __init__(self, folder: Path, rank: "Rank", config: TrainConfig, start_id: str = ""):
        self._folder, self._rank, self._timeouts, self._start_id = folder, rank, config.timeouts, start_id
        self._path, self._stalled = folder / f"rank_{rank.rank:05}", report_path(folder, start_id)
        shortest = min(dataclasses.asdict(config.timeouts).values())
        self._sign_seconds = min(config.run.heartbeat_seconds, shortest / SIGNS_PER_TIMEOUT)
        self._seconds = dict.fromkeys([*TIMEOUTS, END], 0.0)
        self._lost = 0.0  # seconds for which the process was stopped
        self._now = ("start", 0, 0, time.monotonic(), 0.0)  # phase, step, micro-batch, since when, lost until then
        self._ended, self._ending = threading.Event(), threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._signer = threading.Thread(target=self._keep_signing, name="signs", daemon=True)
        folder.mkdir(parents=True, exist_ok=True)
        if rank.rank == 0:
            for report in folder.glob("stalled*.txt"):
                report.unlink(missing_ok=True)
        for kind in (".stacks", ".nccl"):
            self._path.with_suffix(kind).unlink(missing_ok=True)
        self._sign()

    def __enter__(self) -> Self:
        self._watcher.start()
        self._signer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.enter(END)
        self._ended.set()
        self._watcher.join()
        self._signer.join(LAST_SECONDS)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent in each phase so far, the present one included; they only grow."""
        phase, *_, since, lost = self._now
        return self._seconds | {phase: self._seconds[phase] + self._elapsed(since, lost)}

    def enter(self, phase: str, step: int | None = None, micro_batch: int | None = None) -> None:
        """This rank now begins `phase`, whose time starts anew: one of start, first_step, step, data, save, validate.

        `step`: that it works at, None = the same as before. `micro_batch`: of the step, or of the validation.
        """
        before, last_step, _, since, lost = self._now
        now, lost_now = time.monotonic(), self._lost
        self._seconds[before] += max(0.0, now - since - (lost_now - lost))
        self._now = (phase, last_step if step is None else step, micro_batch or 0, now, lost_now)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enters `name`, and at the end the phase before."""
        before, step, micro_batch, *_ = self._now
        self.enter(name)
        yield
        self.enter(before, step, micro_batch)

    def where(self) -> str:
        """Step, micro-batch and phase, in words."""
        phase, step, micro_batch, *_ = self._now
        return f"step {step}, micro-batch {micro_batch}, in {phase}"

    def _elapsed(self, since: float, lost: float) -> float:
        return max(0.0, time.monotonic() - since - (self._lost - lost))

    def _watch(self) -> None:
        """Reads clocks only, so that nothing holds it up."""
        seconds = 0.0
        asleep = time.monotonic()
        while not self._ended.wait(seconds):
            late = time.monotonic() - asleep - seconds
            if late > OVERSLEPT_SECONDS:
                self._lost += late
            phase, *_, since, lost = self._now
            left = self._limit(phase) - self._elapsed(since, lost)
            if left <= 0:
                self._end_process()
            seconds = min(self._sign_seconds, left)
            asleep = time.monotonic()

    def _keep_signing(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(self._sign_seconds)
            with contextlib.suppress(OSError):  # a full disk need not end a run
                self._sign()
            if not ended and self._is_reported():
                self._end_process()

    def _limit(self, phase: str) -> float:
        return getattr(self._timeouts, TIMEOUTS[phase]) if phase in TIMEOUTS else math.inf

    def _sign(self) -> float:
        """Writes a sign of life over the last one; returns the time of that, by the file system's clock."""
        phase, step, micro_batch, since, lost = self._now
        sign = {
            "rank": self._rank.rank,
            "host": socket.gethostname().partition(".")[0],
            "pid": os.getpid(),
            "step": step,
            "micro_batch": micro_batch,
            "phase": phase,
            "since_seconds": round(self._elapsed(since, lost), 1),
            "late_seconds": OVERDUE * self._sign_seconds,
            "start_id": self._start_id,
        }
        # Opened anew each time, for NFS sends on close what was written. No fsync: it would wait for a checkpoint's.
        file = os.open(self._path.with_suffix(".json"), os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(file, f"{json.dumps(sign):<{SIGN_BYTES - 1}}\n".encode(), 0)
            return os.fstat(file).st_mtime
        finally:
            os.close(file)

    def _is_reported(self) -> bool:
        """Whether a rank of this start has reported a stall."""
        return os.path.exists(self._stalled)

    def _end_process(self) -> None:
        """Writes and says what is known, and ends the process. Nothing in here waits for a file or a lock for ever."""
        self._ending.acquire()  # and keeps it: of two threads that come here, the first is enough
        # The kernel's own deadline: NCCL's recorder is asked with the interpreter's lock held, which stops all of this.
        signal.alarm(math.ceil(KILL_SECONDS + self._sign_seconds))
        try:
            within(LAST_SECONDS, self._write_stacks)
            if not within(2 * LAST_SECONDS, self._report):  # reads the signs of all ranks
                text = f"stalled at {self.where()}: {self._folder} does not answer"
                within(SAY_SECONDS, lambda: say(text, self._rank.rank))
            within(LAST_SECONDS, self._record)
            time.sleep(self._sign_seconds + 1)  # whoever started us ends all ranks with the first: all have their say
        finally:
            os._exit(PEER)

    def _write_stacks(self) -> None:
        with contextlib.suppress(OSError), open(self._path.with_suffix(".stacks"), "w") as stacks:
            faulthandler.dump_traceback(stacks, all_threads=True)

    def _report(self) -> None:
        """Says who holds the run up, unless another rank does."""
        phase, *_, since, lost = self._now
        try:
            report = open(self._stalled, "x")
        except OSError:
            if self._is_reported():
                return
            report = open(os.devnull, "w")  # all ranks say it, then
        with report:
            key = f"timeouts.{TIMEOUTS.get(phase, END)}"
            limit = f"{key}={self._limit(phase)}, passed on rank {self._rank.rank} in {phase}"
            text = f"stalled: {self._who()} ({limit}); stacks of all threads: {self._folder}/rank_*.stacks"
            with contextlib.suppress(OSError):
                report.write(text + "\n")
                report.flush()
            say(text)

    def _who(self) -> str:
        with contextlib.suppress(OSError):
            beats = read_beats(self._folder, now=self._sign(), start_id=self._start_id)
            return behind(beats, missing=sorted(set(range(self._rank.size)) - {beat.rank for beat in beats}))
        return f"the signs of life in {self._folder} cannot be read"

    def _record(self) -> None:
        record = self._rank.flight_record()
        if record:
            with contextlib.suppress(OSError):
                self._path.with_suffix(".nccl").write_bytes(record)


def report_path(folder: Path, start_id: str) -> Path:
    """Where the first rank that notices a stall says who it is."""
    return folder / (f"stalled-{start_id}.txt" if start_id else "stalled.txt")


def read_beats(folder: Path, now: float, start_id: str | None = None) -> list[Beat]:
    """The last signs of life in `folder`, by rank, of one start of the run (None = that of the newest sign).

    `now` is a time of the file system's clock: those of the machines may differ. What is no sign of life is left out.

    Raises:
        OSError: where the folder cannot be read.
    """
    found = []
    for path in folder.iterdir():
        if re.fullmatch(r"rank_\d+\.json", path.name):
            with contextlib.suppress(ValueError, TypeError, KeyError, FileNotFoundError), open(path, "rb") as file:
                sign, written = json.loads(file.read(SIGN_BYTES)), os.fstat(file.fileno()).st_mtime
                del sign["pid"]
                found.append((written, Beat(**sign, age_seconds=max(0.0, now - written))))
    if found and start_id is None:
        start_id = max(found, key=lambda entry: entry[0])[1].start_id
    return sorted((beat for _, beat in found if beat.start_id == start_id), key=lambda beat: beat.rank)


def table(beats: Sequence[Beat]) -> str:
    """One line a rank."""
    lines = [f"{'rank':>5}  {'node':<16} {'step':>8} {'micro-batch':>11}  {'phase':<10} {'for':>8} {'heard':>10}"]
    for beat in beats:
        late = "  late" if beat.is_late else ""
        lines.append(
            f"{beat.rank:>5}  {beat.host:<16} {beat.step:>8} {beat.micro_batch:>11}  {beat.phase:<10} "
            f"{beat.seconds:>6.0f} s {beat.age_seconds:>4.0f} s ago{late}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0, or 3 where the folder holds no signs of life."""
    parser = argparse.ArgumentParser(prog="python -m training.watch", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="such as runs/laptop")
    folder = parser.parse_args(arguments).folder
    inner = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    try:
        beats = read_beats(inner, time.time())
    except OSError as error:
        say(f"{inner}: {error.strerror}")
        return 3
    if not beats:
        say(f"{inner} holds no signs of life (rank_*.json): give the folder of a run, such as runs/laptop")
        return 3
    print(table(beats))
    print(summary(inner, beats))
    return 0


def summary(folder: Path, beats: Sequence[Beat]) -> str:
    """What to make of the table."""
    if all(beat.phase == END for beat in beats):
        return "all ranks have ended"
    with contextlib.suppress(OSError):
        return report_path(folder, beats[0].start_id).read_text().strip()
    steps = {beat.step for beat in beats}
    if any(beat.is_late for beat in beats) or len(steps) > 1:
        return behind(beats)
    return f"all {len(beats)} ranks are heard, at step {steps.pop()}"


if __name__ == "__main__":
    sys.exit(main())
