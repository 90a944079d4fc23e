"""What ranks must agree on: results, errors and inputs. Collective over all ranks, on the default process group.

An error that one rank meets alone would leave the others waiting; here all of them raise it, and rank 0 alone says it.
For what is read from a file system or a clock, not for long work: the others wait inside a collective.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from parallel.collectives import all_total

T = TypeVar("T")


def on_all_ranks(function: Callable[[], T]) -> list[T]:
    """Every rank's result of `function`, by rank; where it raises anywhere, all raise the first rank's error."""
    try:
        mine: tuple[T | None, Exception | None] = (function(), None)
    except Exception as error:
        mine = (None, _portable(error))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    for rank, (_, error) in enumerate(gathered):
        if error is not None:
            raise mine[1] if rank == dist.get_rank() else error  # one's own still has its traceback
    return [result for result, _ in gathered]


def agree(function: Callable[[], T]) -> T:
    """`function()` as rank 0 sees it: its result or its error, on every rank."""
    return on_all_ranks(lambda: function() if dist.get_rank() == 0 else None)[0]


def together(function: Callable[[], T]) -> T:
    """`function()` on every rank, which keeps its own result; where it raises anywhere, all raise the first error."""
    results: list[T] = []
    on_all_ranks(lambda: results.append(function()))
    return results[0]


def count_ranks(facts: Sequence[bool], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Of each fact, on how many ranks it holds: one all-reduce of small numbers. Collective over `group`."""
    return [
        int(number) for number in all_total(torch.tensor(facts, dtype=torch.float64, device=device), group).tolist()
    ]


def require_equal(facts: dict[str, str]) -> None:
    """Refuses ranks that were started with different things: ring peers would attend to each other's other tokens.

    Raises:
        ValueError: naming the fact, both values, and the first rank whose value differs from rank 0's.
    """
    first, *others = on_all_ranks(lambda: facts)
    for rank, theirs in enumerate(others, start=1):
        for name, value in first.items():
            if theirs[name] != value:
                error = ValueError(
                    f"{name}={theirs[name]} on rank {rank} but {value} on rank 0: give every rank the same command "
                    "line, and the same prepared data on every machine"
                )
                raise _portable(error)


def _portable(error: Exception) -> Exception:
    """The error itself where it survives pickling, else one of the same exit code with the same words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        kind = next((kind for kind in (ValueError, OSError) if isinstance(error, kind)), RuntimeError)
        portable = kind(str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}")
        portable.__cause__ = error  # stays here, with its traceback: pickling leaves it out
        error = portable
    error.agreed = True  # type: ignore[attr-defined]  # every rank raises it: rank 0 alone prints it
    return error
