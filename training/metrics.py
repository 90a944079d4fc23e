"""What a run tells: metrics.jsonl, log.txt, the console, and wandb as a mirror. Only rank 0 writes."""

import contextlib
import json
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from conf.schema import Dtype, TrainConfig, Wandb

# Dense peaks of the makers' data sheets in FLOP/s: bfloat16 (tensor cores), float32 (without TF32), float64.
DATA_SHEETS = {
    "GB200": (2500e12, 80e12, 40e12),
    "B200": (2250e12, 75e12, 37e12),
    "GH200": (989e12, 67e12, 67e12),
    "H200": (989e12, 67e12, 67e12),
    "H100 PCIe": (756e12, 51e12, 51e12),
    "H100": (989e12, 67e12, 67e12),
    "A100": (312e12, 19.5e12, 19.5e12),
    "L40S": (362e12, 91.6e12, 1.4e12),
    "L4": (121e12, 30.3e12, 0.5e12),
}


class MetricsLog:
    """The log of a run that starts after `step` steps; on ranks other than 0 every method does nothing.

    config.yaml becomes this start's; the other files are appended to. Lines of metrics.jsonl beyond `step`, which a
    resumed run computes again, are moved to metrics.before-step-N.jsonl first.
    """

    def __init__(self, config: TrainConfig, rank: int, step: int):
        self.active = rank == 0
        if not self.active:
            return
        folder = Path(config.run.dir, config.run.name)
        folder.mkdir(parents=True, exist_ok=True)
        cut(folder, step)
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
        self.steps, self.log_every = config.train.steps, config.train.log_every
        self.rows = open(folder / "metrics.jsonl", "a")
        self.text = open(folder / "log.txt", "a")
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm(total=self.steps, initial=step, unit="step", dynamic_ncols=True)
        self.clock: tuple[int, float] | None = None  # the first step logged here, and when
        self.wandb = start_wandb(config, folder, self.say)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.active:
            return
        if self.bar is not None:
            self.bar.close()
        if self.wandb is not None:
            self._mirror(lambda: self.wandb.finish(exit_code=0 if kind is None else 1))
        self.rows.close()
        self.text.close()

    def log(self, row: dict[str, Any]) -> None:
        """Writes the metrics of one step; keys as in the README, numbers that are not finite as null."""
        if not self.active:
            return
        finite = {key: value if math.isfinite(value) else None for key, value in row.items()}
        self.rows.write(json.dumps(finite, allow_nan=False) + "\n")
        self.rows.flush()
        if self.wandb is not None:
            self._mirror(lambda: self.wandb.log(finite))
        step = row["step"]
        text = line(row, self.steps, self._remaining_seconds(row))
        if self.bar is not None:
            short = (
                f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tok/s, MFU {100 * row['mfu_causal']:.0f} %"
            )
            self.bar.set_postfix_str(short, refresh=False)
            self.bar.update(step - self.bar.n)
        measured = "validation_loss" in row
        if step % self.log_every == 0 or step == self.steps or measured:
            self._write(text, to_console=self.bar is None or measured)

    def say(self, text: str) -> None:
        """Writes a message to the console and to log.txt."""
        if self.active:
            self._write(text, to_console=True)

    def _write(self, text: str, to_console: bool) -> None:
        self.text.write(text + "\n")
        self.text.flush()
        if to_console and self.bar is not None:
            self.bar.write(text, file=sys.stderr)
        elif to_console:
            print(text, flush=True)

    def _remaining_seconds(self, row: dict[str, Any]) -> float:
        """By the clock since the first step logged here, so that validation and checkpoints are in it."""
        now = time.monotonic()
        if self.clock is None:
            self.clock = (row["step"], now)
        first, begin = self.clock
        done = row["step"] - first
        return (self.steps - row["step"]) * ((now - begin) / done if done else row["step_seconds"])

    def _mirror(self, call: Callable[[], object]) -> None:
        """wandb is a mirror: where it fails, the run goes on without it."""
        try:
            call()
        except Exception as error:
            self.wandb = None
            self.say(f"warning: wandb stopped ({_brief(error)}); metrics.jsonl has every step")


def line(row: dict[str, Any], steps: int, remaining_seconds: float) -> str:
    """One step for people. Waits are shares of the step."""
    seconds = max(row["step_seconds"], 1e-9)
    parts = [
        f"step {row['step']}/{steps}",
        f"loss {row['loss']:.3f}",
        f"grad {row['gradient_norm']:.2f}",
        f"lr {row['learning_rate']:.1e}",
        f"{row['tokens_per_second']:,.0f} tok/s",
        f"MFU {100 * row['mfu_causal']:.0f} % causal / {100 * row['mfu_noncausal']:.0f} %",
        f"waits: exchange {100 * row['exchange_wait_seconds'] / seconds:.0f} % "
        f"data {100 * row['data_wait_seconds'] / seconds:.1f} %",
        f"ETA {duration(remaining_seconds)}",
    ]
    if "validation_loss" in row:
        parts.insert(2, f"held-out loss {row['validation_loss']:.3f}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """2d03h, 1h05m, 2m10s or 9s."""
    whole = round(seconds)
    days, hours, minutes = whole // 86_400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def cut(folder: Path, step: int) -> None:
    """Moves the lines of metrics.jsonl beyond `step` to metrics.before-step-N.jsonl, where N is `step`.

    A last line that a kill tore apart goes too. The lines moved are on the disk before metrics.jsonl is
    replaced.
    """
    path = folder / "metrics.jsonl"
    if not path.exists():
        return
    kept, moved = folder / "metrics.jsonl.tmp", folder / f"metrics.before-step-{step}.jsonl"
    beyond = 0
    with open(path, "rb") as rows, open(kept, "wb") as keep, open(moved, "ab") as move:
        for row in rows:
            match = re.match(rb'\{"step": (\d+),.*\}\n', row)
            if match is not None and int(match[1]) <= step:
                keep.write(row)
            else:
                move.write(row if row.endswith(b"\n") else row + b"\n")
                beyond += 1
        for file in (move, keep):
            file.flush()
            os.fsync(file.fileno())
    if beyond:
        kept.replace(path)
    else:
        kept.unlink()
        if moved.stat().st_size == 0:
            moved.unlink()


def start_wandb(config: TrainConfig, folder: Path, say: Callable[[str], None]) -> Any:
    """The wandb run that mirrors this run, or None. A resumed run goes on in it: its id is in wandb/run_id.

    Offline where online fails; without wandb where that fails too. Every wait is bounded: nobody else may
    hang on it.
    """
    mode = config.logging.wandb
    if mode is Wandb.disabled:
        return None
    try:
        import wandb  # here, so that other ranks never load it
    except ImportError as error:
        say(f"warning: no wandb ({_brief(error)}); metrics.jsonl has every step")
        return None
    attempts = ["online", "offline"] if mode is Wandb.online else ["offline"]
    for attempt, fallback in zip(attempts, [*attempts[1:], "not at all"], strict=True):
        try:
            run = wandb.init(
                project=config.logging.wandb_project,
                name=config.run.name,
                id=_wandb_id(folder / "wandb" / "run_id"),
                dir=folder,
                resume="allow",
                mode=attempt,
                config=asdict(config),
                settings=wandb.Settings(
                    init_timeout=30, login_timeout=20, finish_timeout=30, console="off", silent=True
                ),
            )
            # wandb's own step never goes back, and drops what a resumed run computes again.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            return run
        except Exception as error:
            say(f"warning: wandb does not start {attempt} ({_brief(error)}): mirroring {fallback}")
            with contextlib.suppress(Exception):
                wandb.teardown()  # its service would refuse the run's id to the next attempt
    return None


def _wandb_id(path: Path) -> str:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(os.urandom(8).hex() + "\n")
    return path.read_text().strip()


def _brief(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def memory_bytes(device: torch.device) -> int:
    """The most memory this rank has used so far: on CUDA what tensors took, on CPU what the process held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_flops(device: torch.device, dtype: Dtype) -> float:
    """FLOP/s of one rank for MFU: the card's data sheet; where there is none, a matmul timed now."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        column = {Dtype.bfloat16: 0, Dtype.float32: 1, Dtype.float64: 2}[dtype]
        for card, peaks in DATA_SHEETS.items():
            if set(card.split()) <= set(re.split(r"[\s-]", name)):
                return peaks[column]
    a = torch.ones(1024, 1024, dtype=getattr(torch, dtype.value), device=device)
    best, end = math.inf, time.perf_counter() + 0.2
    while time.perf_counter() < end or best == math.inf:
        begin = time.perf_counter()
        (a @ a).sum().item()  # waits for the result on any device
        best = min(best, time.perf_counter() - begin)
    return 2 * 1024**3 / best
