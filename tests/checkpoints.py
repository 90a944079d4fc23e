"""What a checkpoint holds, read from its format and by none of the code that writes or loads it."""

import json
from pathlib import Path

import numpy as np


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor by its name, put together from its pieces."""
    found = {}
    for name, entry in json.loads((path / "tensors.json").read_text())["tensors"].items():
        whole = np.zeros(entry["shape"], entry["dtype"])
        for file, position, offsets, sizes in entry["pieces"]:
            piece = np.fromfile(path / file, whole.dtype, int(np.prod(sizes)), offset=position)
            whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] = piece.reshape(sizes)
        found[name] = whole
    return found


def same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Whether both hold the same names, shapes and bytes."""
    alike = a.keys() == b.keys() and all(a[name].shape == b[name].shape for name in a)
    return alike and all(a[name].tobytes() == b[name].tobytes() for name in a)
