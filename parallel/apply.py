"""parallelize: tensor -> recompute and offload -> shard, in that order, once; then the first weights."""

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
from model.blocks import blocks
from model.transformer import Transformer, initial_rows
from parallel import ring, ulysses
from parallel.mesh import Mesh
from parallel.offload import Offload, StreamCopier
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
    """The model of `config`, parallelized over `mesh`, with its first weights. Collective over all ranks.

    Raises:
        ValueError: where blocks do not fit `cluster.block_bytes`, or there is no GPU to offload from.
    """
    model = lay_out(config, mesh, attend, device)
    model.to_empty(device=device)
    initialise(model, config.train.seed)
    return model


def lay_out(
    config: TrainConfig, mesh: Mesh, attend: Attend, device: torch.device, offload: Offload | None = None
) -> Transformer:
    """`build_model` without memory: parameters are on the meta device. Raises as it does.

    `offload`: what takes the place of the one that `train.offload` asks for, with other copies than the device's.
    """
    if offload is None and config.train.offload:
        offload = Offload(_copier(config, device))
    dtype = torch.float64 if config.train.dtype is Dtype.float64 else torch.float32
    element_bytes = getattr(torch, config.train.dtype).itemsize
    sizes = blocks(config.model, element_bytes, int(config.cluster.block_bytes), mesh.tensor.size)
    with torch.device("meta"):
        model = Transformer(config.model, attend, sizes).to(dtype)
    return parallelize(model, mesh, config, offload)


def _copier(config: TrainConfig, device: torch.device) -> StreamCopier:
    if device.type != "cuda":
        less = "" if config.train.recompute is Recompute.full else ", or train.recompute=full to keep less"
        raise ValueError(
            f"train.offload=true needs a GPU: on {device.type} what layers keep is in the host's memory already. Use "
            f"train.offload=false{less}"
        )
    return StreamCopier(device)


def parallelize(model: Transformer, mesh: Mesh, config: TrainConfig, offload: Offload | None = None) -> Transformer:
    """Wraps `model` in place for `mesh`; the same call for one rank and for a thousand."""
    shard_over_tensor(model, mesh, config.parallel.tensor_shards_activations and mesh.tensor.size > 1)
    recompute(model, config.train.recompute, offload)
    shard(model, mesh, config.train.dtype)
    return model


def recompute(model: Transformer, policy: Recompute, offload: Offload | None = None) -> None:
    """Has each layer keep less for its backward; see conf.schema.Recompute. `offload` takes what it keeps to the host.

    Under `block`, what attention exchanged is kept, so computing a layer again never sends a byte again.
    """
    keep = {}
    if policy is Recompute.block:
        contexts = offload.contexts if offload else create_selective_checkpoint_contexts
        keep["context_fn"] = partial(contexts, KEPT)
    for layer in model.layers:
        if policy is not Recompute.none:
            # No layer draws random numbers, so none need to be restored.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **keep)
        if offload:
            layer.forward = offload.around(layer, last=layer is model.layers[-1])


def shard(model: Transformer, mesh: Mesh, dtype: Dtype) -> None:
    """Shards parameters, gradients and optimizer state over the gradient axis with FSDP2.

    Embedding and head are units of their own: left in the root they would stay gathered for the whole step. Tied they
    are one unit, which does.
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
