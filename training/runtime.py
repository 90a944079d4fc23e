"""How ranks start, meet and end. The one file that reads the environment.

A run is `launch(run, config)`. Ranks of torchrun or srun are taken as they are; where neither started us, the
local ranks are processes of our own, which see torchrun's variables and cannot tell the difference. A rank
opens a `session`. What ends a rank early becomes one line and one exit code, and ends all others.
"""

import contextlib
import functools
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.rendezvous import rendezvous
from torch.testing._internal.distributed.fake_pg import FakeStore

from conf.schema import TrainConfig, explain, register, resolve
from training.launcher import PEER, say, start_ranks
from training.signals import REQUEUE, SAY_SECONDS, Stopped, StopSignals, within
from training.world import World, read_world

BUG, USAGE, CONFIGURATION, INPUT_OUTPUT = 1, 2, 3, 74  # USAGE is what argparse exits with
RANKS_PER_CORE = 8  # a preset for a cluster, started on a laptop by mistake, must not bring the laptop down
PRELOAD = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "hydra",
]
GLOO_FAILURES = re.compile(
    r"gloo|connection (closed|reset) by peer|broken pipe|timed out waiting|application timeout", re.IGNORECASE
)

Run = Callable[[TrainConfig], Any]


def num_local_ranks(config: TrainConfig, num_devices: int | None = None) -> int:
    """How many ranks to start on this machine; `num_devices` GPUs (0 = on the CPU, None = look).

    Raises:
        ValueError: where the machine is too small for them.
    """
    if num_devices is None:
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parallel, cores = config.parallel, os.cpu_count() or 1
    inner = parallel.sequence * parallel.tensor
    size = inner * (parallel.data if parallel.data > 0 else max(1, num_devices // inner))
    limit = num_devices or RANKS_PER_CORE * cores
    if size > limit:
        machine = f"{num_devices} GPUs" if num_devices else f"{cores} CPU cores, enough for {limit} ranks"
        on_cpu = ", or run it on the CPU (CUDA_VISIBLE_DEVICES=)" if num_devices else ""
        raise ValueError(
            f"parallel.data={parallel.data} × parallel.sequence={parallel.sequence} × parallel.tensor="
            f"{parallel.tensor} needs {size} ranks, this machine has {machine}: use axes with a product of "
            f"{limit} or less, or start it on more machines (slurm/train.sbatch, torchrun){on_cpu}"
        )
    return size


def enter(main: Callable[[DictConfig], Any]) -> None:
    """A script's last line: composes the config of the command line, and calls `main` with it.

    Where that fails, ends the process, what went wrong having been said in one line by rank 0.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it cannot compose: line and code are ours
    register()
    number = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    rank = int(number) if number.isdecimal() else 0

    @functools.wraps(main)
    def checked(cfg: DictConfig) -> None:
        with exit_codes(rank, shared=True):  # in here, too: Hydra adds a line of its own to errors, not to exits
            main(cfg)

    try:
        with exit_codes(rank, shared=True):
            folder = str(Path(__file__).parents[1] / "conf")
            hydra.main(version_base=None, config_path=folder, config_name="train")(checked)()
    except SystemExit as leaving:
        _leave(leaving)
        raise


def launch(run: Run, config: TrainConfig) -> None:
    """Runs `run(config)` on every rank, and returns where all of them succeeded.

    `run` must be a module's own function: where the ranks are our own processes, it is sent to them by name.

    Raises:
        ValueError: before anything starts, where the ranks cannot be what the config says.
        SystemExit: with the exit code of the run, what went wrong having been said.
    """
    world = read_world(os.environ)
    size = num_local_ranks(config) if world is None else world.size
    resolve(config, size)
    if world is None and size > 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        rank = functools.partial(_local_rank, run, config, size, store.port)
        code = start_ranks(rank, size, PRELOAD, config.run.grace_seconds)
        if code:
            sys.exit(code)
    else:
        _run_rank(run, config, world.rank if world else 0, size)


def _local_rank(run: Run, config: TrainConfig, size: int, port: int, rank: int) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the launcher holds the store: no race for a port
    )
    # All ranks are here: gloo need not ask what the machine's name resolves to, which a VPN can make wrong.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    _run_rank(run, config, rank, size)


def _run_rank(run: Run, config: TrainConfig, rank: int, size: int) -> None:
    try:
        with exit_codes(rank):
            run(config)
    except SystemExit as leaving:
        if size > 1:
            _leave(leaving)
        raise


def _leave(leaving: SystemExit) -> None:
    """Ends the process after a failure: an orderly end would wait for threads and collectives that never finish."""
    if leaving.code:
        sys.stdout.flush()
        sys.stderr.flush()
        code = leaving.code if isinstance(leaving.code, int) else BUG
        os._exit(CONFIGURATION if code == USAGE else code)


@dataclass(frozen=True)
class Rank:
    """This process within a session."""

    rank: int
    size: int
    device: torch.device
    node_size: int = 0  # ranks on each node; 0 where nodes differ
    stop: StopSignals = field(default_factory=StopSignals)

    def say(self, message: str) -> None:
        """Prints on rank 0."""
        if self.rank == 0:
            print(message, flush=True)

    def flight_record(self) -> bytes:
        """NCCL's last collectives, as the JSON of torch's flight recorder; empty where there is no NCCL."""
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
        return dump() if dump and self.device.type == "cuda" else b""


@contextlib.contextmanager
def session(config: TrainConfig) -> Iterator[Rank]:
    """The default process group, and a device. Collective over all ranks, which leave together, also by `Stopped`.

    After any other failure there is no last barrier: the others would wait for who is gone.

    Raises:
        ValueError: where a machine has more ranks than devices.
        dist.DistError: where the ranks do not meet within `timeouts.start_seconds`.
    """
    world = read_world(os.environ) or World(0, 1, 0)
    with StopSignals(config.run.grace_seconds, functools.partial(_last_words, world.rank)) as stop:
        device = pick_device(world)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            _record_flights(Path(config.run.dir, config.run.name))
        if world.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // world.local_size))
        _meet(world, device, config)
        stopped = None
        try:
            try:
                yield Rank(world.rank, world.size, device, world.node_size, stop)
            except Stopped as error:  # agreed: nobody is gone
                stopped = error
                stop.begin()  # a peer that did not hear of it would be waited for, else
            _leave_together(world, config)
        except BaseException:
            if world.size == 1:
                dist.destroy_process_group()
            raise
        dist.destroy_process_group()
        if stopped is not None:
            raise stopped


def _leave_together(world: World, config: TrainConfig) -> None:
    """The last barrier, within `timeouts.step_seconds`: nothing else watches it, and the group waits much longer."""
    limit = config.timeouts.step_seconds

    def end_process() -> None:
        text = f"other ranks have not reached the end of the run within timeouts.step_seconds={limit}"
        within(SAY_SECONDS, lambda: say(text, world.rank or None))
        os._exit(PEER)

    timer = threading.Timer(limit + _turn(world.rank), end_process)
    timer.daemon = True
    timer.start()
    try:
        dist.barrier()
    finally:
        timer.cancel()


def _meet(world: World, device: torch.device, config: TrainConfig) -> None:
    """Waits for all ranks, and makes the default process group of them."""
    start = timedelta(seconds=config.timeouts.start_seconds)
    longest = timedelta(seconds=config.timeouts.longest())
    try:
        if world.rendezvous:
            store, _, _ = next(rendezvous(world.rendezvous, world.rank, world.size, timeout=start))
            # The agent's store lets everybody in at once, and the groups below would wait with their own timeout.
            if store.add("met", 1) == world.size:
                store.set("all met", "")
            store.wait(["all met"], start)
            store.set_timeout(longest)
        else:
            store = dist.HashStore()
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("world", store),
            rank=world.rank,
            world_size=world.size,
            timeout=longest,
            device_id=device if device.type == "cuda" else None,
        )
    except dist.DistError as error:
        error.add_note(f"{world.size} ranks did not meet at {world.rendezvous}: see MASTER_ADDR, MASTER_PORT")
        raise


def _record_flights(folder: Path) -> None:
    """Has NCCL keep its last collectives, and write them into the run's folder where one of them times out.

    The recorder has had two names for each setting; the environment's own values stay.
    """
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        os.environ.setdefault(name, "2000")
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        os.environ.setdefault(name, str((folder / "heartbeat" / "nccl_rank_").absolute()))  # the number is added
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


@contextlib.contextmanager
def alone(rank: int, size: int) -> Iterator[torch.device]:
    """A process group in which this process is `rank` of `size` and the others are not there: what they would send is
    whatever the memory holds, and nothing waits for them."""
    device = pick_device(World(0, 1, 0))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def pick_device(world: World) -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # srun can show each task its own GPU only, which then is number 0 for all of them.
    index = 0 if count == 1 and world.rendezvous.startswith("tcp://") else world.local_rank
    if index >= count:
        raise ValueError(f"local rank {index} has no GPU, the machine shows {count}: start {count} ranks on it")
    return torch.device("cuda", index)


@contextlib.contextmanager
def started() -> Iterator[None]:
    """Once training has started, a ValueError is our bug and keeps its traceback: it is no longer the user's input."""
    try:
        yield
    except ValueError as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def exit_code(error: BaseException) -> int:
    """What this error means to whoever started us; a class can bring a code of its own as `exit_code`."""
    if hasattr(error, "exit_code"):
        return error.exit_code
    if isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError | ValueError):
        return CONFIGURATION
    if isinstance(error, OSError):
        return INPUT_OUTPUT
    from_gloo = isinstance(error, RuntimeError) and GLOO_FAILURES.search(str(error))
    return PEER if from_gloo or isinstance(error, dist.DistError) else BUG


@contextlib.contextmanager
def exit_codes(rank: int, shared: bool = False) -> Iterator[None]:
    """Turns what is raised inside into one line on stderr and SystemExit; a bug keeps its traceback.

    Rank 0 speaks at once. The others wait a moment: an error that all met has then been said, and whoever
    started us is ending us. So does everybody who only saw a peer go, for the peer has the cause to tell.
    `shared`: all ranks surely meet the same errors here, rank 0 alone speaks. `-X dev` keeps tracebacks.
    """
    try:
        yield
    except SystemExit:
        raise
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except Stopped as stopped:  # all ranks have left the session together, and their peers with them
        if rank == 0:
            say(str(stopped), error=False)
        raise SystemExit(REQUEUE) from None
    except BaseException as error:
        code = exit_code(error)
        if rank or code == PEER:
            time.sleep(_turn(rank) or 1)
        if rank == 0 or not (shared or getattr(error, "agreed", False)):
            if code == BUG or sys.flags.dev_mode:
                traceback.print_exception(error)
            say(_one_line(error, code), rank or None)
        raise SystemExit(code) from None


def _turn(rank: int) -> float:
    """Seconds after rank 0 at which a rank says what all of them may have met: by then it can have been ended."""
    return 1 + 0.25 * (rank % 8) if rank else 0.0


def _last_words(rank: int, message: str) -> None:
    """Says why a signal ends this process. Rank 0 speaks for all: whoever stops a run signals all its ranks."""
    if rank == 0:
        say(message, error=False)


def _one_line(error: BaseException, code: int) -> str:
    if isinstance(error, HydraException | OmegaConfBaseException):
        text = explain(error)
    elif code in (BUG, PEER):
        what = "a peer died or stalled" if code == PEER else type(error).__name__
        text = f"{what}: {str(error).partition(chr(10))[0]}"  # torch adds its C++ stack on further lines
    else:
        text = " ".join(str(error).splitlines())
    return text + "".join(f" ({note})" for note in getattr(error, "__notes__", []))
