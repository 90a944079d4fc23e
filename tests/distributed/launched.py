"""A script as train.py is one, for test_launch.py: LAUNCHED says what its ranks do instead of training."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from conf.schema import TrainConfig, load
from training import agreement, launcher, runtime
from training.signals import Stopped, name
from training.watch import Watch


class Unpicklable(ValueError):
    def __init__(self, key: str, value: int):
        super().__init__(f"{key}={value} is refused")


# Less to import before the ranks are forked, and less to wait for at the end: a run takes half as long.
runtime.PRELOAD[:] = ["hydra", "training.runtime"]
launcher.STOPPED_SECONDS = 2.0


def refuse() -> None:
    raise Unpicklable("some.key", 3)


def run(config: TrainConfig) -> None:
    action, _, victim = os.environ.get("LAUNCHED", "").partition(":")
    with runtime.session(config) as rank:
        total = torch.ones(())
        dist.all_reduce(total)
        rank.say(f"met {total.item():.0f} threads {torch.get_num_threads()}")
        if action in ("steps", "stuck"):
            steps(rank, config, victim if action == "stuck" else "")
        if "PIDS" in os.environ:
            Path(os.environ["PIDS"], str(os.getpid())).touch()
        if action == "agree":
            rank.say(f"agreed {agreement.agree(lambda: rank.rank + 41)}")
            agreement.agree(refuse)
        if action == "leave":
            if victim == str(rank.rank):
                time.sleep(60)
            return
        if action == "everywhere":
            raise OSError("every disk is full")
        if victim == str(rank.rank):
            act(action)
        if action:
            dist.all_reduce(total)  # those who are left wait here
            time.sleep(60)


def steps(rank: runtime.Rank, config: TrainConfig, victim: str) -> None:
    """Steps until a rank is asked to stop; `victim` never gets data for the third."""
    folder = Path(os.environ["PIDS"])
    with Watch(folder / "heartbeat", rank, config) as watch:
        rank.stop.armed = True
        for step in range(1, 10_000):
            watch.enter("data", step)
            if step == 3:
                (folder / str(os.getpid())).touch()
                if victim == str(rank.rank):
                    time.sleep(60)
            watch.enter("step", step)
            asked = torch.tensor([rank.stop.requested])
            dist.all_reduce(asked, dist.ReduceOp.MAX)
            if asked.item():
                raise Stopped(f"stopped by {name(int(asked))} at step {step}")
            time.sleep(0.05)


def act(action: str) -> None:
    match action:
        case "value":
            raise ValueError("some.key=3 is refused")
        case "bug":
            error = KeyError("lost")
            error.add_note("at step 3")
            raise error
        case "exit":
            os._exit(0)
        case "exit5":
            sys.exit(5)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stall":
            time.sleep(60)


def main(cfg: DictConfig) -> None:
    runtime.launch(run, load(cfg))


if __name__ == "__main__":
    runtime.enter(main)
