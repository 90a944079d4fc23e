"""What a run tells: metrics.jsonl, starts.jsonl, log.txt, the console, and wandb as a mirror. Only rank 0 writes."""

import contextlib
import json
import math
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from conf.schema import Dtype, TrainConfig
from data.writer import sync
from training.continuity import Continuity
from training.metrics_files import began_at, cut, named, open_lines, recorded, unmirrored, write
from training.mirror import brief, start_wandb
from training.save_clock import duration
from training.signals import Stopped

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
REPLAYED = 1000  # rows at most that wandb is given again after a kill: some 1 MB, of which it holds back far less


class MetricsLog:
    """The log of a run that starts after `step` steps; on ranks other than 0 every method does nothing.

    config.yaml becomes this start's; the other files are appended to. Lines of metrics.jsonl beyond `step`, which a
    resumed run computes again, are moved to metrics.before-step-N.jsonl first, and compared with what it computes.
    starts.jsonl gets a line at each start, at its first step, and at its end; log.txt at each start and error. wandb
    is given again what a start that was killed may have held back.

    Args:
        warnings: on options that were changed since the checkpoint, as `config_change.check` words them.

    Raises:
        OSError: here and wherever something is written; it names the file.
    """

    def __init__(self, config: TrainConfig, rank: int, step: int, warnings: Sequence[str] = ()):
        self.active = rank == 0
        if not self.active:
            return
        folder = Path(config.run.dir, config.run.name)
        folder.mkdir(parents=True, exist_ok=True)
        began, before = began_at(folder), cut(folder, step)
        write(folder / "config.yaml", [OmegaConf.to_yaml(OmegaConf.structured(config)).encode()])
        self.steps, self.log_every = config.train.steps, config.train.log_every
        self.rows = open(folder / "metrics.jsonl", "a")
        self.starts = open_lines(folder / "starts.jsonl")
        self.text = open(folder / "log.txt", "a")
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm(total=self.steps, initial=step, unit="step", dynamic_ncols=True)
        self.clock: tuple[int, float] | None = None  # the first step logged here, and when
        self.step, self.is_ready, self.reason = step, False, ""
        (history, gaps), unsent = recorded(folder, step), unmirrored(folder, REPLAYED)
        self.continuity = Continuity(before, history, str(config.train.dtype), warnings)
        self._event("start", time=began, step=step)
        with named(folder):
            sync(folder)
        self.note(f"start after step {step}, on {socket.gethostname()}, process {os.getpid()}")
        self.wandb = start_wandb(config, folder, self.say)
        for row in unsent:
            self._mirror(row)
        if gaps:
            self.say(f"warning: metrics.jsonl lacks steps {gaps}, which the checkpoint of step {step} has behind it")
        for warning in warnings:
            self.say(f"warning: {warning}")

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None = None, *_: object) -> None:
        if not self.active:
            return
        if self.bar is not None:
            self.bar.close()
        if self.wandb is not None:
            self._to_wandb(lambda: self.wandb.finish(exit_code=0 if kind is None else 1))
        # A full disk must not take the place of the error that ends the run.
        with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
            if kind is None:
                self.end("done")
            else:
                why = _one_line(kind, error)
                self.end(kind.__name__, error=why)
                self.note(why)
        for file in (self.rows, self.starts, self.text):
            with contextlib.suppress(OSError) if kind else named(Path(file.name)):
                file.close()

    def log(self, row: dict[str, Any]) -> None:
        """Writes the metrics of one step; keys as in the README, numbers that are not finite as null.

        `time`, in unix seconds, is now unless it is given.
        """
        if not self.active:
            return
        finite = {"step": row["step"], **{key: _finite(value) for key, value in row.items()}}
        finite.setdefault("time", time.time())
        if "time" in row and "validation_seconds" in row:  # a start before made the step, and this one validated it
            finite["validated"] = time.time()
        _append(self.rows, json.dumps(finite, allow_nan=False))
        self.step = step = row["step"]
        self.ready()
        self._mirror(finite)
        text = line(row, self.steps, self._remaining_seconds(row))
        if self.bar is not None:
            short = (
                f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tok/s, MFU {100 * row['mfu_causal']:.0f} %"
            )
            self.bar.set_postfix_str(short, refresh=False)
            self.bar.update(step - self.bar.n)
        notable = "validation_loss" in row or bool(row.get("skipped"))
        if step % self.log_every == 0 or step == self.steps or notable:
            self._write(text, to_console=self.bar is None or notable)
        if (remark := self.continuity.compare(finite)) is not None:
            self.say(remark)

    def flush(self) -> None:
        """Brings the rows so far to the disk: before a checkpoint counts, so that it has all steps behind it there."""
        if self.active:
            _sync(self.rows)

    def ready(self) -> None:
        """Notes that the first step of this start is done; the first row does so, too."""
        if self.active and not self.is_ready:
            self.is_ready = True
            self._event("ready", step=self.step)

    def end(self, reason: str, **more: float | str) -> None:
        """Notes why this start ends, such as "SIGTERM"; the first reason given counts.

        `more`: what no row can say any more, such as save_seconds=1.5 after the last step.
        """
        if self.active and not self.reason:
            self.reason = reason
            self._event("end", step=self.step, reason=reason, **more)

    def _event(self, event: str, **what: Any) -> None:
        _append(self.starts, json.dumps({"event": event, "time": time.time(), **what}))
        _sync(self.starts)

    def say(self, text: str) -> None:
        """Writes a message to the console and to log.txt."""
        if self.active:
            self._write(text, to_console=True)

    def _write(self, text: str, to_console: bool) -> None:
        _append(self.text, text)
        if to_console and self.bar is not None:
            self.bar.write(text, file=sys.stderr)
        elif to_console:
            print(text, flush=True)

    def note(self, text: str) -> None:
        """Writes a line with the date to log.txt only."""
        if self.active:
            _append(self.text, f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}")

    def _remaining_seconds(self, row: dict[str, Any]) -> float:
        """By the clock since the first step logged here, so that validation and checkpoints are in it."""
        now = time.monotonic()
        if self.clock is None:
            self.clock = (row["step"], now)
        first, begin = self.clock
        done = row["step"] - first
        return (self.steps - row["step"]) * ((now - begin) / done if done else row["step_seconds"])

    def _mirror(self, row: dict[str, Any]) -> None:
        if self.wandb is not None:
            self._to_wandb(lambda: self.wandb.log(row))

    def _to_wandb(self, call: Callable[[], object]) -> None:
        """wandb is a mirror: where it fails, the run goes on without it."""
        try:
            call()
        except Exception as error:
            self.wandb = None
            self.say(f"warning: wandb stopped ({brief(error)}); metrics.jsonl has every step")


def _append(file: TextIO, line: str) -> None:
    with named(Path(file.name)):
        file.write(line + "\n")
        file.flush()


def _sync(file: TextIO) -> None:
    with named(Path(file.name)):
        file.flush()
        os.fsync(file.fileno())


def _one_line(kind: type[BaseException], error: BaseException | None) -> str:
    """The error, as it is said in one line."""
    first = next(iter(str(error or "").splitlines()), "")
    return first if kind is Stopped else ": ".join(filter(None, [kind.__name__, first]))


def line(row: dict[str, Any], steps: int, remaining_seconds: float) -> str:
    """One step for people. Waits are shares of the step."""
    seconds = max(row["step_seconds"], 1e-9)
    so_far = f" ({row['skipped_steps']} so far)" if "skipped_steps" in row else ""
    skipped = f"skipped{so_far}: " if row.get("skipped") else ""
    parts = [
        f"step {row['step']}/{steps}",
        f"{skipped}loss {row['loss']:.3f}",
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


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
