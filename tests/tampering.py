"""Two checkpoints of one run, and ways to change them: by accident, and by one who knows how they are sealed."""

import contextlib
import hashlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conf.compose import compose
from conf.schema import resolve
from parallel.apply import build_model
from parallel.mesh import build_mesh
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.files import CheckpointError, manifest_text
from training.optimizer import build_optimizer

OLD, NEW = 10, 20
MODEL = {
    "model.model_dim": 6,
    "model.num_layers": 1,
    "model.head_dim": 2,
    "model.ffn_dim": 10,
    "model.vocab_size": 14,
    "parallel.sequence": 2,
    "checkpoint.keep": 0,
}


class Run:
    """One rank of a run whose tensors all hold `fill(step)`."""

    def __init__(self, folder: Path, **changes: Any):
        options = MODEL | {key.replace("__", "."): value for key, value in changes.items()}
        config = compose([f"{key}={value}" for key, value in options.items()])
        mesh = build_mesh(resolve(config, dist.get_world_size()), "cpu")
        self.model = build_model(config, mesh, None, torch.device("cpu"))
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.checkpoints = Checkpoints(folder, config, mesh)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # makes its state

    def tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self.model.parameters():
            for tensor in (parameter.detach(), *self.optimizer.state[parameter].values()):
                yield tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def fill(self, step: int) -> None:
        for number, tensor in enumerate(self.tensors()):
            tensor.copy_(step + number + torch.arange(tensor.numel()).reshape(tensor.shape) / 1024)

    def digest(self) -> str:
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in self.tensors())).hexdigest()

    def save(self, step: int) -> None:
        self.checkpoints.save(step, self.model, self.optimizer, {"tokens": 100 * step})
        self.checkpoints.finish()

    def resume(self, wish: str = "auto") -> tuple[Any, str]:
        """The step that was loaded, checked to be all of it, or the error's kind and words; and what was said."""
        said = io.StringIO()
        self.fill(-1)
        with contextlib.redirect_stderr(said):
            try:
                state = self.checkpoints.resume(wish, self.model, self.optimizer)
            except (CheckpointError, ValueError, PermissionError) as error:
                return (type(error).__name__, str(error)), said.getvalue()
        if state is None:
            return None, said.getvalue()
        found = self.digest()
        self.fill(state["step"])
        assert found == self.digest() and state["tokens"] == 100 * state["step"], state["step"]
        return state["step"], said.getvalue()


def save_two(folder: Path, **changes: Any) -> None:
    run = Run(folder, **changes)
    for step in (OLD, NEW):
        run.fill(step)
        run.save(step)


def snapshot(folder: Path) -> dict[str, Any]:
    """All that lies below a folder: kind, inode, time and content, by path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = os.lstat(path)
        content: Any = path.is_symlink() and os.readlink(path)
        if stat.S_ISREG(status.st_mode):
            content = path.read_bytes() if status.st_size < 1 << 30 else status.st_size
        found[str(path.relative_to(folder))] = status.st_mode, status.st_ino, status.st_mtime_ns, content
    return found


def flip(path: Path, at: float) -> None:
    """Another bit at a place between 0, the first byte, and 1, the last."""
    content = bytearray(path.read_bytes())
    content[round(at * (len(content) - 1))] ^= 16
    path.write_bytes(content)


def told(path: Path, name: str, old: str, new: str) -> None:
    """Other words in a file, once."""
    text = (path / name).read_text()
    assert text.count(old) == 1, (name, old)
    (path / name).write_text(text.replace(old, new))


def reseal(path: Path, add: dict[str, Any] | None = None, drop: str | None = None, **facts: Any) -> None:
    """Makes the manifest fit the files as they are, with other `facts`, with more or fewer files, and seals it."""
    manifest = json.loads((path / "manifest.json").read_text()) | facts
    for name, known in manifest["files"].items():
        content = (path / name).read_bytes()
        known["bytes"] = len(content)
        if "sha256" in known:
            known["sha256"] = hashlib.sha256(content).hexdigest()
    manifest["files"] |= add or {}
    if drop is not None:
        del manifest["files"][drop]
    (path / "manifest.json").write_text(manifest_text(manifest))


def lie(path: Path, change: Callable[[Any], Any]) -> None:
    """Changes the index in place, then seals it."""
    index = json.loads((path / "tensors.json").read_text())
    change(index)
    put_index(path, json.dumps(index))


def put_index(path: Path, text: str) -> None:
    """Another index, sealed."""
    (path / "tensors.json").write_text(text)
    reseal(path)
