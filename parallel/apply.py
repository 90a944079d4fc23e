"""parallelize: tensor -> recompute -> shard, in that order, once; then the first weights."""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from conf.schema import Dtype, Recompute, TrainConfig
from model.attention import Attend
from model.transformer import Transformer, initial_rows
from parallel import ring, ulysses
from parallel.mesh import Mesh
from parallel.tensor import shard_over_tensor

KEPT = [  # under Recompute.block: the nodes that exchange
    torch.ops.longhaul.attend.default,
    torch.ops.longhaul.to_heads.default,
    torch.ops.longhaul.to_tokens.default,
]


def attend_over(mesh: Mesh, kernel: str) -> Attend:
    """The model's `attend` hook: ring attention over the sequence axis with the named kernel, inside Ulysses."""
    name = mesh.ring.name
    attend = lambda q, k, v, plan: ring.attend(q, k, v, plan, name, kernel)[0]  # noqa: E731
    return ulysses.around(attend, mesh.ulysses.name, mesh.ulysses.size)


def build_model(config: TrainConfig, mesh: Mesh, attend: Attend, device: torch.device) -> Transformer:
    """The model of `config`, parallelized over `mesh`, with its first weights. Collective over all ranks."""
    dtype = torch.float64 if config.train.dtype is Dtype.float64 else torch.float32
    with torch.device("meta"):
        model = Transformer(config.model, attend).to(dtype)
    parallelize(model, mesh, config)
    model.to_empty(device=device)
    initialise(model, config.train.seed)
    return model


def parallelize(model: Transformer, mesh: Mesh, config: TrainConfig) -> Transformer:
    """Wraps `model` in place for `mesh`; the same call for one rank and for a thousand."""
    shard_over_tensor(model, mesh, config.parallel.tensor_shards_activations and mesh.tensor.size > 1)
    recompute(model, config.train.recompute)
    shard(model, mesh, config.train.dtype)
    return model


def recompute(model: Transformer, policy: Recompute) -> None:
    """Has each layer keep less for its backward; see conf.schema.Recompute.

    Under `block`, what attention exchanged is kept, so computing a layer again never sends a byte again.
    """
    if policy is Recompute.none:
        return
    keep = {}
    if policy is Recompute.block:
        keep["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT)
    for layer in model.layers:
        # No layer draws random numbers, so none need to be restored.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **keep)


def shard(model: Transformer, mesh: Mesh, dtype: Dtype) -> None:
    """Shards parameters, gradients and optimizer state over the gradient axis with FSDP2.

    Embedding and head are units of their own: left in the root they would stay gathered for the whole step.
    Gradients are summed over data × sequence in float32 at least; the loss is already divided by the global number of
    tokens. Over the tensor axis, gradients of norms and sums of activations are in the dtype of compute.
    """
    options = {
        "mesh": _gradient_mesh(mesh),
        # Inputs are not cast: rope angles stay float32.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if dtype is Dtype.bfloat16 else None,
            reduce_dtype=torch.float32 if dtype is Dtype.bfloat16 else None,
            cast_forward_inputs=False,
        ),
    }
    if model.config.tie_embeddings:
        fully_shard([model.embed_tokens, model.lm_head], **options)
    else:
        fully_shard(model.embed_tokens, **options)
        fully_shard(model.lm_head, **options)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _gradient_mesh(mesh: Mesh) -> DeviceMesh:
    replicated = mesh.parameters["replicate"].size() > 1
    return mesh.parameters["replicate", "shard"] if replicated else mesh.parameters["shard"]


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fills each rank's shards with their part of the weights that `seed` gives, the same for every layout."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        local = parameter.to_local()
        assert tuple(shape) == tuple(local.shape), (name, shape, local.shape)
        if local.numel() == 0:
            continue
        rows = initial_rows(model.config, seed, name, parameter.shape, offset[0], offset[0] + shape[0])
        values = torch.from_numpy(rows)
        if len(shape) > 1:
            values = values[:, offset[1] : offset[1] + shape[1]]
        local.copy_(values)
