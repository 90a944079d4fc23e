"""What one rank measures for benchmarks/calibrate.py, all ranks of the machine at once: a rank then gets no more than
it gets in training, where the others compute and send beside it.

Each rate is that of the slowest rank, in the fastest of several turns. On CUDA, events take the times.
"""

import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from conf.schema import Dtype, TrainConfig
from model.kernels import capability, self_test
from model.kernels.tiles import empty_gradients, empty_state
from model.mask import Mask
from model.norm import normalise
from parallel import schedule
from parallel.collectives import RingExchange
from parallel.ring import KERNELS
from parallel.traffic import Program
from training import runtime
from training.metrics import memory_bytes, peak_flops

Rates = dict[str, float | str | None]  # keys of `cluster`; None where this machine cannot show it


@dataclass(frozen=True)
class Options:
    """What is measured with: dtype "" is that of training on this kind of device, head_dim 0 a usual one."""

    dtype: str = ""
    head_dim: int = 0
    folder: str = "."  # on the disk that checkpoints go to
    quick: bool = False


@dataclass(frozen=True)
class Sizes:
    """Of the problems: large enough for a kernel's full speed, small enough for a few seconds in all."""

    length: int  # tokens of attention
    heads: int
    kv_heads: int
    rows: int  # tokens of matrix products and of elementwise work
    width: int
    ffn: int
    message: int  # bytes
    file: int  # bytes


CPU = Sizes(8192, 4, 2, 4096, 512, 1536, 8 << 20, 256 << 20)
CPU_QUICK = Sizes(4096, 4, 2, 2048, 512, 1536, 4 << 20, 64 << 20)
CUDA = Sizes(32768, 32, 8, 8192, 4096, 14336, 256 << 20, 4 << 30)
CUDA_QUICK = Sizes(8192, 32, 8, 8192, 4096, 14336, 64 << 20, 1 << 30)


def measure(options: Options, path: str, config: TrainConfig) -> None:
    """All rates of this machine, which rank 0 writes to `path` as JSON. Collective over all ranks."""
    with runtime.session(config) as here:
        if here.size > 1 and not here.node_size:
            raise ValueError("nodes have different numbers of ranks: start as many on each")
        rates = Bench(here, options).rates()
        if here.rank == 0:
            Path(path).write_text(json.dumps(rates))


class Bench:
    """One rank's part of all measurements."""

    def __init__(self, here: runtime.Rank, options: Options):
        self.here, self.device, self.on_cuda = here, here.device, here.device.type == "cuda"
        quick = options.quick
        self.sizes = (CUDA_QUICK if quick else CUDA) if self.on_cuda else (CPU_QUICK if quick else CPU)
        self.repetitions = 3 if quick else 7
        self.head_dim = options.head_dim or (128 if self.on_cuda else 64)
        self.dtype = Dtype(options.dtype or ("bfloat16" if self.on_cuda else "float32"))
        self.folder = options.folder
        self.node = here.node_size or here.size
        self.exchange = RingExchange(dist.group.WORLD)

    def rates(self) -> Rates:
        """Every key of `cluster` but its name and `block_bytes`; the same on all ranks."""
        rates: Rates = {"device": self.device.type, "node_gpus": self._most_ranks(), "node_nics": num_nics()}
        rates |= self._said("memory sizes", self._sizes)
        rates |= self._said("attention", self._attention)
        rates |= self._said("matrix products", self._linear)
        rates |= self._said("elementwise work", self._memory)
        rates |= self._said("messages between ranks", self._links)
        rates |= self._said("copies to and from the host", self._host)
        rates |= self._said("disk", self._disk)
        return rates

    def _said(self, what: str, run: Callable[[], Rates]) -> Rates:
        begun = time.perf_counter()
        rates = run()
        found = ", ".join(f"{key} {'-' if value is None else f'{value:.3g}'}" for key, value in rates.items())
        self.here.say(f"{what:<28} {time.perf_counter() - begun:5.1f} s   {found}")
        return rates

    def _most_ranks(self) -> int:
        """Ranks of one node: its GPUs, or as many processes as train.py starts on this many cores."""
        if self.on_cuda:
            return max(self.node, torch.cuda.device_count())
        return runtime.RANKS_PER_CORE * (os.cpu_count() or 1)

    # Time

    def _seconds(self, run: Callable[[], object]) -> float:
        """Of the slowest rank, in its fastest turn; all begin each turn together. The first turn warms up."""
        best = math.inf
        for repetition in range(self.repetitions + 1):
            dist.barrier()
            spent = self._timed(run)
            best = min(best, spent) if repetition else math.inf
        return max(self._everyone(best))

    def _timed(self, run: Callable[[], object]) -> float:
        if not self.on_cuda:
            begun = time.perf_counter()
            run()
            return time.perf_counter() - begun
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _everyone(self, value: float) -> list[float]:
        values: list[float] = [0.0] * self.here.size
        dist.all_gather_object(values, value)
        return values

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(getattr(torch, self.dtype))

    # Computing

    def _attention(self) -> Rates:
        """A causal document by the kernel that training would take: 4 and 10 FLOPs per head width and visible pair."""
        sizes, dim = self.sizes, self.head_dim
        name = capability.choose("auto", self.device.type, self.dtype, head_dim=dim)
        kernel, length = KERNELS[name], sizes.length
        self_test.check(kernel, getattr(torch, self.dtype), self.device, sizes.heads // sizes.kv_heads, dim)
        plan = torch.from_numpy(schedule.plan("contiguous", Mask(), [(length,)], length, length, 1, 0))
        (tiles,) = Program(plan).hops
        q, dout = (self._random(length, sizes.heads, dim) for _ in range(2))
        k, v = (self._random(length, sizes.kv_heads, dim) for _ in range(2))
        state, gradients = empty_state(q), empty_gradients(q, k)
        out, lse = (x.clone() for x in kernel.forward(q, k, v, tiles))
        out = out.to(q.dtype)
        forward = self._seconds(lambda: kernel.forward(q, k, v, tiles, into=state))
        backward = self._seconds(lambda: kernel.backward(dout, q, k, v, out, lse, tiles, into=gradients))
        pairs = sizes.heads * dim * length * (length + 1) / 2
        return {"attention_forward_flops": 4 * pairs / forward, "attention_backward_flops": 10 * pairs / backward}

    def _linear(self) -> Rates:
        """The three products of a linear layer's forward and backward; and the peak of which MFU is a share."""
        sizes = self.sizes
        x, dout = self._random(sizes.rows, sizes.width), self._random(sizes.rows, sizes.ffn)
        weight = self._random(sizes.ffn, sizes.width)
        seconds = self._seconds(lambda: (x @ weight.T, dout @ weight, dout.T @ x))
        reached = 6.0 * sizes.rows * sizes.width * sizes.ffn / seconds
        peak = min(self._everyone(peak_flops(self.device, self.dtype)))
        return {"linear_flops": reached, "peak_flops": max(peak, reached)}

    def _memory(self) -> Rates:
        """A norm, a residual and a gate, as a layer does them; each operation reads and writes its tensors once."""
        rows, width = 4 * self.sizes.rows, self.sizes.width
        x, residual = (self._random(rows, width) for _ in range(2))
        weight = self._random(width)

        def run() -> None:
            normed, _ = normalise(x, weight, 1e-5)  # 1 read, 1 written
            added = normed + residual  # 2, 1
            silu = F.silu(added)  # 1, 1
            torch.mul(silu, residual)  # 2, 1

        return {"memory_bytes_per_second": 10.0 * x.nbytes / self._seconds(run)}

    # Moving

    def _links(self) -> Rates:
        """Each rank sends to the next one of its node, and to its like of the next node, while it receives as much."""
        size, node, message = self.here.size, self.node, self.sizes.message
        nodes = size // node
        rates: Rates = {"link_bytes_per_second": None, "nic_bytes_per_second": None, "latency_seconds": None}
        if node > 1:
            rates["link_bytes_per_second"] = message / self._exchange(message, 1, node)
            rates["latency_seconds"] = self._exchange(4, 1, node)
        if nodes > 1:
            seconds = self._exchange(message, node, size)
            rates["nic_bytes_per_second"] = node * message / seconds / num_nics()
            rates["latency_seconds"] = self._exchange(4, node, size)
        return rates

    def _exchange(self, num_bytes: int, step: int, ring: int) -> float:
        """Seconds in which `num_bytes` go `step` ranks on and come from as far back, in rings of `ring` ranks."""
        base = self.here.rank // ring * ring
        after, before = (base + (self.here.rank - base + way * step) % ring for way in (1, -1))
        sent, received = (torch.zeros(num_bytes // 4, device=self.device) for _ in range(2))
        times = 1 if num_bytes > 4096 else 20
        # On CUDA `wait` orders the stream only, so the events around it see the transfer.
        turn = lambda: [self.exchange.start([(after, sent)], [(before, received)]).wait() for _ in range(times)]  # noqa: E731
        return self._seconds(turn) / times

    def _host(self) -> Rates:
        """The slower direction of a copy between pinned host memory and the device; on a CPU, a copy in memory."""
        there = torch.zeros(self.sizes.message // 4, device=self.device)
        here = torch.zeros(there.shape, pin_memory=self.on_cuda)
        copies = (lambda: here.copy_(there, non_blocking=True), lambda: there.copy_(here, non_blocking=True))
        return {"host_bytes_per_second": there.nbytes / max(self._seconds(copy) for copy in copies)}

    def _disk(self) -> Rates:
        """All ranks of a node write at once, each a file of its own, and wait until it is durable."""
        share = memoryview(bytes(min(16 << 20, self.sizes.file // self.node)))
        times = max(1, self.sizes.file // self.node // len(share))

        def write() -> None:
            with tempfile.TemporaryFile(dir=self.folder, buffering=0) as file:
                for _ in range(times):
                    file.write(share)
                os.fsync(file.fileno())

        dist.barrier()
        begun = time.perf_counter()
        write()
        return {
            "disk_bytes_per_second": self.node * times * len(share) / max(self._everyone(time.perf_counter() - begun))
        }

    def _sizes(self) -> Rates:
        """Called before the large tensors are made, when libraries and channels have taken what they take."""
        small = torch.ones(64, 64, device=self.device, requires_grad=True)
        (small @ small).sum().backward()
        if self.here.size > 1:
            self._exchange(4, 1, self.here.size)
        host = host_memory_bytes()
        if self.on_cuda:
            free, total = torch.cuda.mem_get_info()
            taken = max(self._everyone(total - free - torch.cuda.memory_reserved()))
            return {"memory_bytes": float(total), "runtime_bytes": float(taken), "host_memory_bytes": host}
        taken = max(self._everyone(resident_bytes()))
        return {"memory_bytes": host / self.node, "runtime_bytes": taken, "host_memory_bytes": host}


def num_nics() -> int:
    """InfiniBand cards of this machine, at least one."""
    folder = Path("/sys/class/infiniband")
    return max(1, len(list(folder.iterdir()))) if folder.is_dir() else 1


def host_memory_bytes() -> float:
    """Of this machine, or what its control group allows where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # a file that is not there, or says "max"
            total = min(total, int(Path(limit).read_text()))
    return float(total)


def resident_bytes() -> float:
    """What this process holds now; where the system does not tell, the most it ever held."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    return float(memory_bytes(torch.device("cpu")))
