"""wandb as a mirror of metrics.jsonl: where it fails, the run goes on without it."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conf.schema import TrainConfig, Wandb


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
        say(f"warning: no wandb ({brief(error)}); metrics.jsonl has every step")
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
            say(f"warning: wandb does not start {attempt} ({brief(error)}): mirroring {fallback}")
            with contextlib.suppress(Exception):
                wandb.teardown()  # its service would refuse the run's id to the next attempt
    return None


def _wandb_id(path: Path) -> str:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(os.urandom(8).hex() + "\n")
    return path.read_text().strip()


def brief(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
