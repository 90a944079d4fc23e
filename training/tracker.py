"""Counts the bytes of all tensors that are alive, on any device, real or fake.

A tensor counts from the operation that made it until its storage is gone, wherever else it is looked at from; FSDP's
storages, which are resized in place, count with the size that they have. What a kernel takes inside of one operation,
and what an allocator keeps in reserve, is not seen.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tracker(TorchDispatchMode):
    """Counts while it is entered.

    Args:
        fake: the mode whose tensors count; None counts real ones. DTensor reasons about shapes with fake tensors of
            its own, which never count. Inside `fake` numbers that a program reads off a tensor are 1.

    Attributes:
        live_bytes: now.
        peak_bytes: the most so far; set it to 0 to begin again.
        at_peak: bytes by (operation, dtype, shape) that were alive then, where `watch` is set.
        watch: whether to keep `at_peak`, which costs time.
        paused: nothing that is made meanwhile counts.
        inside: bytes that an operation takes while it runs, and that cannot be seen, by operation.
        calls: how often each operation was called, by its name.
    """

    def __init__(self, fake: FakeTensorMode | None = None):
        super().__init__()
        self.fake = fake
        self.live_bytes = self.peak_bytes = 0
        self.watch = self.paused = False
        self.inside: dict[Any, int] = {}
        self.calls: Counter[str] = Counter()
        self.at_peak: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
        self._live: dict[int, tuple[weakref.ref, int, tuple[str, str, tuple[int, ...]]]] = {}
        self._rising = False

    def __enter__(self) -> "Tracker":
        self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = self._resize(storage, size)
            if storage._cdata in self._live:
                self._count(storage, self._live[storage._cdata][2])
            return result

        torch.UntypedStorage.resize_ = resize_  # no operation: a dispatch mode does not see it
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come by on their own
        self.calls[function.name().split("::")[1].split(".")[0]] += 1
        if self.fake is not None and function is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        result = function(*args, **(kwargs or {}))
        if self.paused:
            return result
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and self._is_ours(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata in self._live or storage._cdata not in given:
                    made = (str(function), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                    self._count(storage, made)
        self._rise(self.inside.get(function, 0))
        return result

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode is self.fake
        return self.fake is None and tensor.device.type != "meta"

    def _count(self, storage: torch.UntypedStorage, made: tuple[str, str, tuple[int, ...]]) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is not None and known[1] == size:
            return
        if known is None:
            reference = weakref.ref(storage, lambda _: self._gone(key))
        else:
            reference, made = known[0], known[2]
            if size < known[1]:
                self._before_falling()
        self._live[key] = reference, size, made
        self.live_bytes += size - (known[1] if known else 0)
        self._rise()

    def _rise(self, more: int = 0) -> None:
        if self.live_bytes + more > self.peak_bytes:
            self.peak_bytes, self._rising = self.live_bytes + more, True
            if more and self.watch:
                self._before_falling()
                self.at_peak[("inside of kernels", "", ())] += more

    def _gone(self, key: int) -> None:
        self._before_falling()
        _, size, _ = self._live.pop(key)
        self.live_bytes -= size

    def _before_falling(self) -> None:
        if self._rising and self.watch:
            self.at_peak = Counter()
            for _, size, made in self._live.values():
                self.at_peak[made] += size
        self._rising = False


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that `run` has made at a time."""
    with Tracker() as tracker:
        run()
    return tracker.peak_bytes
