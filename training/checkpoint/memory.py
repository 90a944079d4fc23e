"""Pieces of tensors in memory: copied before they are written, filled with what is read. Local."""

from dataclasses import dataclass

import torch
from torch import Tensor

Placed = list[tuple[int, Tensor]]  # pieces, each at its position in the file, in order


class HostMemory:
    """Room for a copy of a rank's file, kept from one save to the next: fresh memory costs more than the copy."""

    def __init__(self, device_type: str) -> None:
        self._pinned, self._room = device_type == "cuda", torch.empty(0, dtype=torch.uint8)

    def copy(self, placed: Placed, num_bytes: int) -> Tensor:
        """The file as it will be, uint8 [num_bytes], once it is complete.

        Gaps hold zeros, or what an earlier file had there: nothing that is not the run's reaches the disk.
        """
        if self._room.numel() < num_bytes:
            self._room = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        for position, tensor in placed:
            target = self._room[position : position + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=True)
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        return self._room[:num_bytes]


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; of one on the host that is contiguous without a copy."""
    return memoryview(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())


@dataclass
class Wanted:
    """Bytes `start` to `stop` of a file, from the first to the last element of a box of a piece, and where they go.

    `strides` are the piece's, in elements. `direct`: the bytes are those of `target`, as they are.
    """

    start: int
    stop: int
    strides: tuple[int, ...]
    target: Tensor
    direct: bool
    room: Tensor | None = None

    def take(self, content: Tensor, start: int, stop: int) -> None:
        """Takes what it wants of a block, which holds bytes `start` to `stop`; at the last one fills the target."""
        if self.room is None:
            self.room = (
                self.target.view(-1).view(torch.uint8)
                if self.direct
                else torch.empty(self.stop - self.start, dtype=torch.uint8)
            )
        low, high = max(start, self.start), min(stop, self.stop)
        self.room[low - self.start : high - self.start].copy_(content[low - start : high - start])
        if high == self.stop:
            if not self.direct:
                box = self.room.view(self.target.dtype).as_strided(self.target.shape, self.strides)
                self.target.copy_(box)
            self.room = None
