"""The tensor axis: which rows or columns of each weight a rank holds, and what crosses between ranks.

Query, key, value, gate and up projections are cut by rows (their outputs), output and down projections by columns, so
attention and feed-forward each need one exchange on the way in and one on the way out, put around the modules by hooks.
Embedding and head are cut by vocabulary. With `tensor_shards_activations` a rank keeps 1/tensor of the tokens between
those regions: the exchange in is an all-gather and the exchange out a reduce-scatter; otherwise nothing and an
all-reduce. Source: arXiv:1909.08053 §3, arXiv:2205.05198 §4.2.2.
"""

from functools import partial

from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from model.loss import Vocabulary
from model.transformer import Transformer
from parallel.collectives import all_maximum, all_total, copy_in, gather_tokens, scatter_sums, sum_out
from parallel.mesh import Mesh

ROWS, COLUMNS = Shard(0), Shard(1)
SHARDED = {
    "embed_tokens": ROWS,
    "lm_head": ROWS,
    "q_proj": ROWS,
    "k_proj": ROWS,
    "v_proj": ROWS,
    "gate_proj": ROWS,
    "up_proj": ROWS,
    "o_proj": COLUMNS,
    "down_proj": COLUMNS,
}  # every other parameter is a norm's, and whole on each rank


class OnShard:
    """Mixed into a module's class: in its forward, reading a parameter gives this rank's part as a plain tensor.

    The parameter itself stays a DTensor, which is what sharding, clipping and checkpoints need to know; the module's
    arithmetic sees local numbers and knows no group. A parameter is in use when FSDP has gathered it, so that it lies
    on the tensor axis alone. Where ranks see different tokens or heads, the gradient of a whole weight is a partial
    sum, and is declared so.
    """

    gradient_is_partial = False

    def __getattr__(self, name: str):
        value = super().__getattr__(name)
        if not isinstance(value, DTensor) or value.device_mesh.ndim > 1:
            return value
        partial_sum = self.gradient_is_partial and value.placements == (Replicate(),)
        return value.to_local(grad_placements=(Partial(),) if partial_sum else value.placements)


def shard_over_tensor(model: Transformer, mesh: Mesh, shards_activations: bool) -> None:
    """Lays `model`'s parameters (on any device, meta included) out on the tensor axis, in place."""
    axis, group = mesh.tensor, mesh.tensor.group
    enter, leave = (gather_tokens, scatter_sums) if shards_activations else (copy_in, sum_out)
    enter, leave = partial(enter, group=group), partial(leave, group=group)
    for name, module in model.named_modules():
        if not module._parameters:
            continue
        leaf = name.split(".")[-1]
        placement = SHARDED.get(leaf, Replicate())
        _distribute(module, mesh, placement)
        module.__class__ = type(f"OnShard{type(module).__name__}", (OnShard, type(module)), {})
        # q_norm and k_norm see this rank's heads; the other norms see this rank's tokens where those are sharded.
        module.gradient_is_partial = leaf in ("q_norm", "k_norm") or shards_activations
    if model.config.tie_embeddings:
        model.lm_head.weight = nn.Module.__getattr__(model.embed_tokens, "weight")
    if axis.size == 1:
        return
    start = axis.rank * (model.config.padded_vocab_size // axis.size)
    model.embed_tokens.start = start
    model.lm_head.vocabulary = Vocabulary(
        model.config.vocab_size, start, partial(all_maximum, group=group), partial(all_total, group=group)
    )
    model.embed_tokens.register_forward_hook(lambda module, args, out: leave(out))
    model.lm_head.register_forward_pre_hook(lambda module, args: (enter(args[0]), *args[1:]))
    for layer in model.layers:
        for region in (layer.self_attn, layer.mlp):
            region.register_forward_pre_hook(lambda module, args: (enter(args[0]), *args[1:]))
            region.register_forward_hook(lambda module, args, out: leave(out))


def _distribute(module: nn.Module, mesh: Mesh, placement: Placement) -> None:
    for name, parameter in list(module._parameters.items()):
        if parameter is None or isinstance(parameter, DTensor):
            continue
        distributed = distribute_tensor(parameter.data, mesh.parameters["tensor"], [placement], src_data_rank=None)
        module._parameters[name] = nn.Parameter(distributed)
