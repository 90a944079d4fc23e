"""What torchrun's or srun's variables say of a process. Given an environment, reads none; knows no torch."""

import contextlib
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """What a launcher says of this process; ranks meet at `rendezvous`, which is "" for one alone.

    `local_size` ranks share the cores that this one sees; `node_size` ranks are on each node, 0 where nodes differ.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int = 1
    rendezvous: str = ""
    node_size: int = 0


def read_world(env: Mapping[str, str]) -> World | None:
    """What torchrun, else srun, says of this process; None where neither started it.

    Raises:
        ValueError: naming the variables that contradict each other.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        return _torchrun_world(env)
    if env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _srun_world(env)
    if "SLURM_STEP_NUM_TASKS" not in env and "SLURM_PROCID" in env and env.get("SLURM_NTASKS", "1") != "1":
        raise ValueError(
            f"SLURM_NTASKS={env['SLURM_NTASKS']} and SLURM_PROCID={env['SLURM_PROCID']} are set, but not "
            "SLURM_STEP_NUM_TASKS: srun has not started this process, the others would never come. Start it "
            "with srun or torchrun; to run all ranks from here: env -u SLURM_PROCID python train.py"
        )
    return None


def _torchrun_world(env: Mapping[str, str]) -> World:
    cure = "start with torchrun, or unset RANK and WORLD_SIZE"
    rank, size, local_rank, _ = _numbers(env, ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"], cure)
    if not env.get("MASTER_ADDR"):
        raise ValueError(f"MASTER_ADDR (not set) should name the host of rank 0: {cure}")
    if rank >= size:
        raise ValueError(f"RANK={rank} must be below WORLD_SIZE={size}: {cure}")
    local_size = int(env.get("LOCAL_WORLD_SIZE", 1))
    return World(rank, size, local_rank, local_size, "env://", 0 if size % local_size else local_size)


def _srun_world(env: Mapping[str, str]) -> World:
    names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_JOB_ID"]
    rank, size, local_rank, job = _numbers(env, names, "start with srun")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    host = env.get("MASTER_ADDR") or first_host(nodes)
    port = env.get("MASTER_PORT") or port_of_job(job)
    # Such as "4(x2),3"; where Slurm has given each task cores of its own, they are not divided again.
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE", "1")
    on_node = int(re.split(r"[(,]", tasks)[0])
    local_size = 1 if "SLURM_CPUS_PER_TASK" in env else on_node
    return World(rank, size, local_rank, local_size, f"tcp://{host}:{port}", 0 if "," in tasks else on_node)


def _numbers(env: Mapping[str, str], names: list[str], cure: str) -> list[int]:
    wrong = [name for name in names if not env.get(name, "").isdecimal()]
    if wrong:
        found = ", ".join(f"{name}={env[name]}" if name in env else f"{name} (not set)" for name in wrong)
        raise ValueError(f"{found} in the environment should be a number: {cure}")
    return [int(env[name]) for name in names]


def port_of_job(job: int) -> int:
    """The port where a Slurm job's ranks meet: another for each job, and below the ephemeral ports."""
    return 20_000 + job % 10_000


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list like `n[01-04,7],a1`: by scontrol, or where that is missing by reading.

    Raises:
        ValueError: where the list names none.
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist)  # up to the first comma outside brackets
    if first is None:
        raise ValueError(f"SLURM_JOB_NODELIST={nodelist!r} names no host: set MASTER_ADDR to rank 0's")
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["scontrol", "show", "hostnames", nodelist]
        hosts = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        if hosts:
            return hosts[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])
