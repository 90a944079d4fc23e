"""What a run saves: tensors by name, which are weights, AdamW's state, every rank's random state; and facts. Local."""

import hashlib
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import TrainConfig
from parallel.mesh import Mesh
from training.checkpoint.files import FORMAT, CheckpointError
from training.checkpoint.index import Entry, Index
from training.checkpoint.storage import dtype_name


def run_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of a run by its name in a checkpoint: parameters, all the state a model has, and AdamW's.

    State that the optimizer has not made yet is made here, with the values it would start from.
    """
    tensors = {}
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        assert id(parameter) in trained, f"{name} is frozen, or its shards are gathered just now"
        value = parameter.detach()
        tensors[f"model.{name}"] = value
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=value.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(value), torch.zeros_like(value)
        tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in state.items()}
    return tensors


def random_states(mesh: Mesh) -> dict[str, Tensor]:
    """This rank's random states by the key they are saved under: every rank has its own."""
    states = {f"random.cpu.{mesh.world.rank}": torch.get_rng_state()}
    if mesh.parameters.device_type == "cuda":
        states[f"random.cuda.{mesh.world.rank}"] = torch.cuda.get_rng_state()
    return states


def restore_random(states: dict[str, Tensor]) -> None:
    """Sets the random states of `random_states`. Raises CheckpointError where one is none."""
    for key, value in states.items():
        try:
            (torch.cuda if key.startswith("random.cuda.") else torch).set_rng_state(value)
        except RuntimeError as error:
            raise CheckpointError(f"{key} is no state of a random number generator: {error}") from None


def require_fitting(index: Index, tensors: dict[str, Tensor], path: Path) -> None:
    """Refuses a checkpoint whose tensors are not exactly those wanted, by name, shape and dtype."""
    saved = {name: str(entry) for name, entry in index.tensors.items() if not name.startswith("random.")}
    wanted = {name: description(tensor) for name, tensor in tensors.items()}
    differences = [
        f"{name}: {saved.get(name, 'missing')} in the checkpoint, {wanted.get(name, 'unknown')} in the run"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if differences:
        more = f"; and {len(differences) - 10} more" if len(differences) > 10 else ""
        raise ValueError(f"{path} does not fit this run: {'; '.join(differences[:10])}{more}")


def description(tensor: Tensor) -> str:
    """Dtype and shape, as an index says it."""
    return str(Entry(dtype_name(tensor.dtype), tuple(tensor.shape), []))


def manifest_of(step: int, state: dict[str, Any], config: TrainConfig, mesh: Mesh) -> dict[str, Any]:
    """All that is known of a checkpoint before it is written, as JSON has it; nothing in it changes with the run."""
    manifest = {
        "format": FORMAT,
        "step": step,
        "state": {"step": step, **state},
        "layout": layout_of(mesh),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "config": asdict(config),
    }
    return json.loads(json.dumps(manifest))


def layout_of(mesh: Mesh) -> dict[str, int]:
    """Ranks by axis."""
    axes = {"data": mesh.data.size, "sequence": mesh.sequence.size, "tensor": mesh.tensor.size}
    return {"ranks": mesh.world.size, **axes, "shard": mesh.parameters["shard"].size()}


def seed(config: TrainConfig, mesh: Mesh, step: int) -> None:
    """Seeds this rank's random numbers from (train.seed, step, rank): where a run starts, or changes its ranks."""
    digest = hashlib.sha256(f"{config.train.seed} {step} {mesh.world.rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "little"))
