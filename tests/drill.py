"""`data.prepare` killed at random moments and run again, over and over: does the same corpus come of it?"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.corpora import snapshot

ROOT = Path(__file__).parents[1]
# Marks come so often that almost every kill is after one and before another.
COMMAND = """
import sys
from data import encoding, prepare
if __name__ == "__main__":
    encoding.MARK_SECONDS, encoding.JOB_CHARS = 0.05, 100_000
    sys.exit(prepare.main(sys.argv[1:]))
"""


@dataclass
class Report:
    """`resumed` runs went on from what a killed one left; `orphans` are processes that outlived theirs by a second."""

    kills: int = 0
    finished: int = 0
    identical: int = 0
    resumed: int = 0
    orphans: int = 0
    seconds: float = 0.0  # of a run that nobody kills


class Run:
    """A preparation in a session of its own."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        arguments = ["data=text", f"data.path={folder / 'in'}", f"data.root={folder}", "data.shard_tokens=300000"]
        arguments += ["data.vocab_size=600", "model.vocab_size=600", "data.workers=2", *overrides]
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.first = self.process.stdout.readline()

    def end(self) -> tuple[int, str]:
        """Exit code and all lines."""
        said = self.first + self.process.stdout.read()
        self.process.stdout.close()
        return self.process.wait(), said

    def alive(self) -> list[int]:
        """Processes of its session that have not ended."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                except OSError:
                    continue  # it ended while we looked
                if int(session) == self.process.pid and state != "Z":
                    found.append(int(entry.name))
        return found

    def gone(self, seconds: float = 1.0) -> bool:
        """Whether all its processes end within that time; those that do not are ended."""
        until = time.monotonic() + seconds
        while self.alive() and time.monotonic() < until:
            time.sleep(0.01)
        left = self.alive()
        for process in left:
            os.kill(process, signal.SIGKILL)
        return not left


def write_text(folder: Path, megabytes: float, seed: int = 0) -> None:
    """Text of every kind below `folder`: records, some of them twice, a long file, one line without end."""
    draw, folder = random.Random(seed), folder / "in"
    folder.mkdir(parents=True)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyzäö", k=draw.randrange(2, 9))) for _ in range(2_000)]

    def text(size: int) -> str:
        return " ".join(draw.choices(words, k=size // 6)).replace(words[0], "\n")

    share = int(megabytes * 1e6 / 4)
    (folder / "long.txt").write_text(text(share))
    (folder / "line.txt").write_text(text(share).replace("\n", "").replace(" ", ""))
    with open(folder / "records.jsonl", "w") as file:
        for _ in range(share // 2_000):
            record = json.dumps({"text": text(draw.randrange(100, 3_000)), "url": "http://x"}) + "\n"
            file.write(record * draw.choice([1, 1, 1, 2]))
    for number in range(40):
        (folder / f"file{number}.txt").write_text(text(share // 40))


def kill_drill(
    folder: Path, kills: int, *, megabytes: float = 6.0, seed: int = 0, say: Callable[[str], None] = lambda line: None
) -> Report:
    """Kills that many runs with signal 9, at moments spread over the time that one takes.

    A killed run is followed by another in the same place, until one ends by itself before its moment: what it made is
    compared, byte for byte, with what a run made that nobody killed.
    """
    draw, report = random.Random(seed), Report()
    write_text(folder, megabytes, seed)
    run = Run(folder, "data.name=whole")
    began = time.monotonic()
    code, said = run.end()
    assert code == 0, said
    report.seconds, whole = time.monotonic() - began, snapshot(folder / "whole")
    while report.kills < kills or (folder / ".killed.tmp").exists():
        run = Run(folder, "data.name=killed")
        try:
            run.process.wait(draw.uniform(0, report.seconds) if report.kills < kills else 100 * report.seconds + 60)
        except subprocess.TimeoutExpired:
            run.process.kill()
            report.kills += 1
            report.orphans += not run.gone()
        code, said = run.end()
        assert code in (0, -9), said
        report.resumed += "going on from what an earlier run left" in said
        if code == 0:
            report.finished += 1
            report.identical += snapshot(folder / "killed") == whole
            shutil.rmtree(folder / "killed")
        say(f"{report.kills} kills, {report.finished} finished, {report.identical} of them identical")
    return report
