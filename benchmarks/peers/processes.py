"""One side of a comparison as the parent sees it: processes that are started once and then asked again and again."""

import json
import os
import select
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.peers.worker import RESULTS, Request, Task

LEAVING_SECONDS = 10


class Side:
    """`count` processes of one implementation. They inherit nothing but the environment; see `worker.serve`."""

    def __init__(self, name: str, python: str | Path, script: Path, count: int, cores: int, folder: str, shape: tuple):
        """`cores`: how many all of them share, the first of this machine. `shape`: S, H, D of the problem."""
        self.name, self.shape = name, (len(RESULTS), 1, *shape)
        self.log = Path(folder, f"{name}.log")
        self.processes: list[subprocess.Popen] = []
        self.answer = Path(folder, f"{name}.answer")
        with self.answer.open("wb") as file:
            file.truncate(torch.Size(self.shape).numel() * 4)
        usable = report.cores()[:cores]
        each = max(1, len(usable) // count)
        for rank in range(count):
            own = [usable[(rank * each + n) % len(usable)] for n in range(each)]
            task = Task(folder, name, rank, count, own, *shape)
            command = [str(python), str(script), json.dumps(asdict(task))]
            with self.log.open("ab") as log:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
                    )
                )

    def measure(self, setting: str, passes: str, keep: bool = False) -> dict[str, float]:
        """{"seconds": of the slowest process, …}; what else they report is averaged.

        Raises RuntimeError with the end of their output where one fails.
        """
        line = json.dumps(asdict(Request(setting, passes, keep))) + "\n"
        with suppress(BrokenPipeError):  # its answer is then missing, too
            for process in self.processes:
                process.stdin.write(line)
                process.stdin.flush()
        numbers = []
        waiting = [process.stdout for process in self.processes]
        while waiting:  # whichever answers first: where one dies, others may wait for it for long
            for answer in select.select(waiting, [], [])[0]:
                if not (line := answer.readline()):
                    raise RuntimeError(f"{self.name} failed at {setting}, {passes}: {self._last_words()}")
                numbers.append(json.loads(line))
                waiting.remove(answer)
        averages = {key: sum(number[key] for number in numbers) / len(numbers) for key in numbers[0]}
        return averages | {"seconds": max(number["seconds"] for number in numbers)}

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(1)
        codes = ", ".join(str(process.poll()) for process in self.processes)
        said = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
        return f"exit codes {codes}\n{said}"

    def results(self) -> dict[str, Tensor]:
        """out, dq, dk, dv [1, S, H, D] of the last request with `keep`."""
        size = torch.Size(self.shape).numel()
        return dict(zip(RESULTS, torch.from_file(str(self.answer), size=size).view(self.shape), strict=True))

    def close(self) -> None:
        for process in self.processes:
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(LEAVING_SECONDS)
            except subprocess.TimeoutExpired:
                print(f"{self.name}: process {process.pid} does not leave, it is ended", file=sys.stderr)
                process.kill()
                process.wait()
            process.stdout.close()
