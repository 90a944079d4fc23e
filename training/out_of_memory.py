"""What a rank leaves behind where memory runs out: what was asked for, what was held, and the plan beside it."""

import contextlib
import gc
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from conf.schema import TrainConfig

MOST_EVENTS = 200_000  # allocations that are recorded: some hundred bytes each, more where their stacks are deep
MOST_SHAPES = 40  # of tensors that are listed


@contextlib.contextmanager
def report_out_of_memory(
    config: TrainConfig,
    folder: Path,
    rank: int,
    plan_lines: Callable[[], list[str]],
    where: Callable[[], str] = lambda: "",
) -> Iterator[None]:
    """Where memory runs out inside, writes `folder`/memory/rank_00013.txt and names it in a note to the error.

    With `run.memory_history`, allocations are recorded meanwhile, and end up in rank_00013.pickle, for
    https://pytorch.org/memory_viz. The error goes on, whatever becomes of the report.

    Args:
        folder: of the run.
        plan_lines: what was planned for this rank.
        where: step and phase, as far as known.

    Raises:
        ValueError: where `run.memory_history` is asked for, and there is no CUDA.
    """
    recording = config.run.memory_history
    if recording:
        if not torch.cuda.is_available():
            raise ValueError("run.memory_history=true records what CUDA allocates, and there is none: use false")
        torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
    try:
        yield
    except BaseException as error:
        if (cause := out_of_memory(error)) is not None:
            error.add_note(
                _leave_report(folder / "memory" / f"rank_{rank:05d}.txt", cause, plan_lines, where, recording)
            )
        raise
    finally:
        if recording:
            torch.cuda.memory._record_memory_history(enabled=None)


def out_of_memory(error: BaseException) -> BaseException | None:
    """The error itself, or the first that led to it, which says that memory has run out; None where none does."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        on_cpu = isinstance(link, RuntimeError) and "DefaultCPUAllocator" in str(link)
        if on_cpu or isinstance(link, (torch.OutOfMemoryError, MemoryError)):
            return link
        link = link.__cause__ or link.__context__
    return None


def _leave_report(
    path: Path,
    error: BaseException,
    plan_lines: Callable[[], list[str]],
    where: Callable[[], str],
    recording: bool,
) -> str:
    """Writes section after section, so that where one fails, for there is no memory, the others are there."""
    sections: list[tuple[str, Callable[[], list[str]]]] = [
        ("asked for", lambda: [f"{type(error).__name__}: {error}"]),
        ("where", lambda: [where() or "not known", time.strftime("%Y-%m-%d %H:%M:%S")]),
        ("planned", plan_lines),
        ("held", _held),
        ("largest tensors that Python knows of (not those that only autograd keeps)", largest_tensors),
        (
            "allocator",
            lambda: torch.cuda.memory_summary().splitlines() if torch.cuda.is_initialized() else ["the C library's"],
        ),
    ]
    if recording:
        sections.append(("recorded", lambda: [_dump(path.with_suffix(".pickle"))]))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            for title, lines in sections:
                file.write(f"## {title}\n")
                try:
                    file.writelines(f"{line}\n" for line in lines())
                except Exception as failure:
                    file.write(f"(no answer: {type(failure).__name__}: {failure})\n")
                file.write("\n")
                file.flush()
    except OSError as failure:
        return f"no report on the memory that ran out: {failure}"
    return f"what was held when memory ran out: {path}"


def _held() -> list[str]:
    """Bytes of this process by now, and at most."""
    if torch.cuda.is_initialized():
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        held = {
            "of the device, all": total,
            "of the device, free": free,
            "by others than PyTorch": total - free - stats.get("reserved_bytes.all.current", 0),
            "tensors, now": stats.get("allocated_bytes.all.current", 0),
            "tensors, at most": stats.get("allocated_bytes.all.peak", 0),
            "allocator's, now": stats.get("reserved_bytes.all.current", 0),
            "of these in pieces that nothing fits": stats.get("inactive_split_bytes.all.current", 0),
        }
        return [f"{name:40}{size / 1e9:10.3f} GB" for name, size in held.items()]
    status, machine = Path("/proc/self/status"), Path("/proc/meminfo")
    if not status.exists():
        return [f"{'process, at most':40}{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss} (kB, or bytes on macOS)"]
    wanted = {
        "VmRSS": "process, now",
        "VmHWM": "process, at most",
        "VmSize": "addresses, now",
        "MemTotal": "machine, all",
        "MemAvailable": "machine, available",
    }
    found = re.findall(r"^(\w+):\s+(\d+) kB", status.read_text() + machine.read_text(), re.MULTILINE)
    held = [f"{wanted[name]:40}{int(size) * 1024 / 1e9:10.3f} GB" for name, size in found if name in wanted]
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return held + ([f"{'addresses, limit':40}{soft / 1e9:10.3f} GB"] if soft != resource.RLIM_INFINITY else [])


def largest_tensors() -> list[str]:
    """Tensors by shape, most bytes first, each storage once."""
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    seen: set[int] = set()
    for thing in gc.get_objects():
        # By the type: asking some lazy objects for their class makes them load what they stand for.
        if not issubclass(type(thing), torch.Tensor) or hasattr(thing, "_local_tensor"):
            continue  # of a DTensor the local one is listed
        try:
            storage = thing.untyped_storage()
            if thing.device.type == "meta" or not storage.nbytes() or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
        except (RuntimeError, NotImplementedError):
            continue  # tensors of tracers have no storage
        name = f"{str(thing.dtype).removeprefix('torch.')}{list(thing.shape)} on {thing.device}"
        sizes[name] += storage.nbytes()
        counts[name] += 1
    listed = [f"{size / 1e9:10.3f} GB  {counts[name]:5} × {name}" for name, size in sizes.most_common(MOST_SHAPES)]
    return [*listed, f"{sum(sizes.values()) / 1e9:10.3f} GB  {sum(counts.values()):5} in all"]


def _dump(path: Path) -> str:
    torch.cuda.memory._dump_snapshot(str(path))
    return f"{path}: open it in https://pytorch.org/memory_viz"
