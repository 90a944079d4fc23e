"""What layers keep for their backward, in the host's memory instead of the device's.

While a layer runs forward, each tensor that it keeps begins its way to the host at once, beside the computation. Its
memory on the device is free when the next layer is through. In backward a layer's tensors are asked for when the layer
after it begins, one layer ahead. The last layer's stay where they are: they are needed first.

At most two layers' tensors are on the device at a time. Parameters, rotary angles and plans never move: layers share
them, or FSDP gathers them anew. Nor do small tensors, whose copy would take longer to begin than to make.
"""

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

MIN_BYTES = 1 << 16


class Copier(Protocol):
    """How bytes travel between a device and its host. What it returns is there once `wait` was given its event."""

    def to_host(self, x: Tensor) -> tuple[Tensor, Any]:
        """Begins to copy x; returns the copy and the event of its end."""
        ...

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        """The way back of what `to_host` returned."""
        ...

    def wait(self, event: Any) -> None:
        """Has all that is computed from now on come after the event."""
        ...


class StreamCopier:
    """Pinned memory, and one CUDA stream beside that of the computation: copies end in the order in which they began.

    PyTorch keeps pinned memory for the next step, in pieces of a power of two bytes.
    """

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)

    def to_host(self, x: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        return self._copy(torch.empty(x.shape, dtype=x.dtype, pin_memory=True), x)

    def to_device(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        # Memory of the computation's stream, which has waited for the copy before it gives it back.
        return self._copy(torch.empty_like(host, device=self._device), host)

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def _copy(self, into: Tensor, source: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            return into, self._stream.record_event()


class Offload:
    """The layers of one model, in the order in which they run. Tensors below `min_bytes` stay."""

    def __init__(self, copier: Copier, min_bytes: int = MIN_BYTES):
        self._copier, self._min_bytes = copier, min_bytes
        self._running: _Stash | None = None
        self._latest: Callable[[], _Stash | None] = lambda: None  # alive as long as a backward needs it

    def around(self, layer: nn.Module, last: bool) -> Callable[..., Tensor]:
        """`layer.forward`, which keeps what it keeps on the host; `last`: where it is."""
        forward = layer.forward

        def kept_on_host(x: Tensor, angles: tuple[Tensor, Tensor], plan: Mapping[str, Tensor]) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(x, angles, plan)
            before = self._latest()
            shared = _storages([*layer.parameters(), *angles, *plan.values()])
            self._running = stash = _Stash(self._copier, None if last else self._min_bytes, shared, before)
            try:
                with saved_tensors_hooks(stash.pack, stash.unpack):
                    out = forward(x, angles, plan)
            finally:
                self._running = None
            if before is not None:
                before.leave()
            self._latest = (lambda: None) if last else weakref.ref(stash)
            return out

        return kept_on_host

    def contexts(self, kept: Collection[OpOverload]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """For torch.utils.checkpoint inside `around`: the results of the operations `kept` are not computed again.

        PyTorch's own selective contexts hold such results themselves, on the device.
        """
        results: list[Any] = []
        return _Keep(kept, self._running, results), _Replay(kept, self._running, results)


@dataclass
class _Moved:
    """A storage that left, as bytes; `on_device` until it has left, and again while backward needs it."""

    host: Tensor
    event: Any
    on_device: Tensor | None
    uses: int = 0
    uses_left: int = 0


@dataclass(frozen=True)
class _Place:
    """What autograd holds instead of a tensor: the number of its storage, and how it lies there."""

    number: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Stash:
    """What one layer keeps for one backward. `min_bytes` None: all of it stays on the device."""

    def __init__(self, copier: Copier, min_bytes: int | None, shared: set[int], before: "_Stash | None"):
        self._copier, self._min_bytes, self._shared, self._before = copier, min_bytes, shared, before
        self._moved: list[_Moved] = []
        self._numbers: dict[int, int] = {}  # by storage, while those are alive
        self._needed = False

    def pack(self, x: Tensor) -> Tensor | _Place:
        storage = x.untyped_storage()
        key = storage._cdata
        if self._min_bytes is None or storage.nbytes() < self._min_bytes or key in self._shared:
            return x
        if key not in self._numbers:
            flat = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
            self._numbers[key] = len(self._moved)
            self._moved.append(_Moved(*self._copier.to_host(flat), flat))
        number = self._numbers[key]
        self._moved[number].uses += 1
        self._moved[number].uses_left += 1
        return _Place(number, x.dtype, x.size(), x.stride(), x.storage_offset())

    def leave(self) -> None:
        """Gives back the device's memory once all is on the host: a link that keeps up has brought it there by now."""
        for moved in self._moved:
            self._copier.wait(moved.event)
            moved.on_device = None
        self._numbers.clear()

    def __del__(self) -> None:
        # A backward that ended early has asked for tensors that nobody took: their memory is not given back, to be used
        # by what is computed next, before the copies into it are through.
        for moved in self._moved:
            if moved.on_device is not None:
                self._copier.wait(moved.event)

    def fetch(self) -> None:
        for moved in self._moved:
            if moved.on_device is None:
                moved.on_device, moved.event = self._copier.to_device(moved.host)

    def unpack(self, place: Tensor | _Place) -> Tensor:
        if not self._needed:
            self._needed = True
            self.fetch()
            if self._before is not None:
                self._before.fetch()
                self._before = None
        if isinstance(place, Tensor):
            return place
        moved = self._moved[place.number]
        if moved.on_device is None:  # a second backward through the same graph
            moved.on_device, moved.event = self._copier.to_device(moved.host)
        self._copier.wait(moved.event)
        x = torch.empty(0, dtype=place.dtype, device=moved.on_device.device)
        x.set_(moved.on_device.untyped_storage(), place.offset, place.size, place.stride)
        moved.uses_left -= 1
        if not moved.uses_left:
            moved.on_device, moved.uses_left = None, moved.uses
        return x


class _Keep(TorchDispatchMode):
    """Forward: what the operations return goes into the stash."""

    def __init__(self, kept: Collection[OpOverload], stash: _Stash | None, results: list[Any]):
        super().__init__()
        self._kept, self._stash, self._results = kept, stash, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self._kept:
            self._results.append(tree_map_only(Tensor, lambda x: self._stash.pack(x.detach()), out))
        return out


class _Replay(TorchDispatchMode):
    """Computing again: the operations return what they returned, in the same order."""

    def __init__(self, kept: Collection[OpOverload], stash: _Stash | None, results: list[Any]):
        super().__init__()
        self._kept, self._stash, self._results = kept, stash, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._kept:
            return func(*args, **(kwargs or {}))
        if not self._results:
            raise RuntimeError("a layer's backward was taken twice: what its attention returned is kept for one")
        kept = self._results.pop(0)
        return tuple(map(self._stash.unpack, kept)) if isinstance(kept, tuple) else self._stash.unpack(kept)


def _storages(tensors: list[Tensor]) -> set[int]:
    """Which storages these lie in; of a DTensor this rank's part."""
    with torch.no_grad():
        local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
        return {x.untyped_storage()._cdata for x in local}
