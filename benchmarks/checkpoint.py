"""Do checkpoints cost what the disk costs, and in the background no more than a copy in memory?

    python benchmarks/checkpoint.py [--quick] [--folder PATH] [--json PATH]

One rank with a real model and AdamW's state, through `Checkpoints`, checksums and all, in rounds: each round takes one
of each kind, in another order, and medians are compared.
* save: against a write and fsync of as many bytes to one file, from one buffer, and against plain DCP.
* load: against reading the files, and plain DCP, each with none of them in the page cache.
* background: how long the loop stands still, against one copy of as many bytes into memory that has been used before;
  and how much longer a loop of matmuls takes while the file is written. Loop and writer have a core each.

Linux only. Needs four times the state (1.6 GB; --quick: 0.3 GB) on the disk of TMPDIR, or of --folder.
"""

import itertools
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks import report
from conf.compose import compose
from conf.schema import Degrees
from parallel.apply import build_model
from parallel.mesh import build_mesh
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.tensors import run_tensors
from training.optimizer import build_optimizer

SAVE_SHARE, LOAD_SHARE, BLOCKED_COPIES = 0.8, 0.45, 1.5
CHUNK_BYTES = 1 << 24  # of raw writing and reading
MODEL = ["model=125m", "data.vocab_size=32000", "train.dtype=float32", "checkpoint.keep=0"]
QUICK = ["model.num_layers=4", "model.model_dim=512", "model.ffn_dim=1536"]


class State:
    """Model, optimizer and checkpoints of one rank in `folder`; `num_bytes` of all tensors."""

    def __init__(self, folder: Path, quick: bool, background: bool) -> None:
        config = compose(MODEL + (QUICK if quick else []) + [f"checkpoint.background={background}"])
        mesh = build_mesh(Degrees(1, 1, 1, 1, accumulation=1), "cpu")
        self.model = build_model(config, mesh, None, torch.device("cpu"))
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.tensors = run_tensors(self.model, self.optimizer)
        for tensor in self.tensors.values():
            getattr(tensor, "to_local", lambda tensor=tensor: tensor)().uniform_()
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.checkpoints = Checkpoints(folder, config, mesh)
        self.step = 0

    def save(self) -> Path:
        self.step += 1
        self.checkpoints.save(self.step, self.model, self.optimizer, {})
        return self.checkpoints.folder / f"step_{self.step:08d}"


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]


def forget(path: Path) -> None:
    """Takes the files at `path` out of the page cache; all files where that is allowed."""
    for each in files_of(path):
        with open(each, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def write_raw(path: Path, content: memoryview) -> None:
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(content), CHUNK_BYTES):
            file.write(content[start : start + CHUNK_BYTES])
        os.fsync(file.fileno())


def read_raw(path: Path, room: memoryview) -> None:
    for each in files_of(path):
        with open(each, "rb", buffering=0) as file:
            while file.readinto(room):
                pass


def plain_save(state: State, path: Path) -> None:
    dcp.save(state.tensors, storage_writer=dcp.FileSystemWriter(path))


def plain_load(state: State, path: Path) -> None:
    dcp.load(dict(state.tensors), storage_reader=dcp.FileSystemReader(path))


def in_the_foreground(folder: Path, quick: bool, rounds: int) -> dict[str, list[float]]:
    """Seconds of each kind, by round. Before each the disk is at rest, and the page cache holds nothing of it."""
    state = State(folder / "ours", quick, background=False)
    content = memoryview(torch.randint(256, (state.num_bytes,), dtype=torch.uint8).numpy())
    room = memoryview(bytearray(CHUNK_BYTES))
    raw, plain = folder / "raw", folder / "plain"
    saves = {
        "raw write": lambda: write_raw(raw, content),
        "save": state.save,
        "plain DCP save": lambda: plain_save(state, plain),
    }
    ours = state.checkpoints
    loads = {
        "raw read": lambda: read_raw(raw, room),
        "load": lambda: ours.resume("auto", state.model, state.optimizer),
        "plain DCP load": lambda: plain_load(state, plain),
    }
    orders = itertools.cycle(itertools.permutations(range(3)))
    seconds: dict[str, list[float]] = {name: [] for name in [*saves, *loads]}
    for number in range(rounds + 1):  # the first warms up
        for path in (raw, plain, folder / "ours"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        os.sync()
        for kinds in (saves, loads):
            names = list(kinds)
            for at in next(orders):
                forget(folder)
                took = timed(kinds[names[at]])
                if number:
                    seconds[names[at]].append(took)
    return seconds


def pin_writer(core: int) -> None:
    """The threads of a save run on `core`; those of the loop stay where they are."""
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint") and thread.native_id:
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(thread.native_id, {core})


def in_the_background(folder: Path, quick: bool, rounds: int) -> dict[str, list[float]]:
    """Seconds of a copy, of standing still, of the writer, and of a step of matmuls without and with a writer."""
    cores = report.cores()
    state = State(folder / "background", quick, background=True)
    source = torch.randint(256, (state.num_bytes,), dtype=torch.uint8)
    target, matrix = torch.zeros_like(source), torch.rand(512, 512)
    names = ("copy", "blocked", "of it saving", "writer", "step alone", "step meanwhile")
    seconds: dict[str, list[float]] = {name: [] for name in names}

    def step() -> None:
        for _ in range(4):
            matrix @ matrix

    os.sched_setaffinity(0, {cores[0]})
    for number in range(rounds + 1):
        found = {"copy": timed(lambda: target.copy_(source)), "of it saving": timed(state.save)}
        pin_writer(cores[-1])
        meanwhile = []
        while state.checkpoints.writing:
            meanwhile.append(timed(step))
            pin_writer(cores[-1])
        state.checkpoints.finish()
        record = state.checkpoints.last
        assert record is not None
        time.sleep(0.2)  # the disk comes to rest
        alone = [timed(step) for _ in range(max(20, len(meanwhile)))]
        found |= {"blocked": record.blocked_seconds, "writer": record.write_seconds}
        found["step alone"] = statistics.mean(alone)
        if meanwhile:  # the writer may be done before the first step
            found["step meanwhile"] = statistics.mean(meanwhile)
        if number:
            for name, took in found.items():
                seconds[name].append(took)
        shutil.rmtree(folder / "background")
        os.sync()
    os.sched_setaffinity(0, cores)
    return seconds


def table(seconds: dict[str, list[float]], num_bytes: int, references: dict[str, str]) -> list[dict[str, Any]]:
    medians = {name: statistics.median(took) for name, took in seconds.items() if took}
    return [
        {
            "what": name,
            "seconds": round(median, 5),
            "fastest": round(min(seconds[name]), 5),
            "slowest": round(max(seconds[name]), 5),
            "GB/s": round(num_bytes / median / 1e9, 3) if "step" not in name else None,
            "against": references.get(name, "-"),
            "times": round(median / medians[references[name]], 3) if name in references else None,
        }
        for name, median in medians.items()
    ]


def main() -> int:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to write; its disk is measured")
    arguments = parser.parse_args()
    machine, rounds = report.machine(), 5 if arguments.quick else 9
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="checkpoint-") as name:
        foreground = in_the_foreground(Path(name), arguments.quick, rounds)
        background = in_the_background(Path(name), arguments.quick, rounds)
        num_bytes = State(Path(name), arguments.quick, background=False).num_bytes
    dist.destroy_process_group()
    on_disk = {"save": "raw write", "plain DCP save": "raw write", "load": "raw read", "plain DCP load": "raw read"}
    rows = table(foreground, num_bytes, on_disk)
    meanwhile = table(
        background, num_bytes, {"blocked": "copy", "of it saving": "copy", "step meanwhile": "step alone"}
    )
    median = {name: statistics.median(took) for name, took in (foreground | background).items() if took}
    criteria = [
        report.at_least("save: share of a raw fsynced write", median["raw write"] / median["save"], SAVE_SHARE),
        report.at_least("load: share of a raw cold read", median["raw read"] / median["load"], LOAD_SHARE),
    ]
    blocked = "background: time blocked / one copy of the state"
    if machine["cores"] < 2:
        criteria.append(report.not_judged(blocked, BLOCKED_COPIES, "loop and writer need a core each"))
    else:
        criteria.append(report.at_most(blocked, median["blocked"] / median["copy"], BLOCKED_COPIES))
    notes = [
        f"state: {num_bytes / 1e9:.3f} GB; {rounds} rounds, medians; deleting older checkpoints is left out",
        "blocked: saving and committing, where the writer is done by then; checksums are in every save and load",
    ]
    return report.finish(machine, rows, criteria, arguments.json, notes, background=meanwhile)


if __name__ == "__main__":
    sys.exit(main())
