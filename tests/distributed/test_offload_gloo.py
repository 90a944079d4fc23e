"""Offload under FSDP, the ring, Ulysses and the tensor axis: the same gradients, and no parameter leaves."""

import pytest
import torch

from conf.compose import compose
from conf.schema import resolve
from model.mask import Mask
from parallel.apply import attend_over, initialise, lay_out
from parallel.mesh import build_mesh
from parallel.offload import Offload
from parallel.schedule import plan
from tests.harness import run_ranks

LENGTH, WIDTH, QUERIES, KEYS, HEADS, LAYERS = 32, 32, 32, 16, 4, 3
OPTIONS = [
    "model.vocab_size=40",
    f"model.model_dim={WIDTH}",
    f"model.num_heads={HEADS}",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "model.ffn_dim=96",
    f"model.num_layers={LAYERS}",
    "model.ffn_block_tokens=5",
    "train.dtype=float64",
]


class Copies:
    """Copies at once, and counts their bytes."""

    bytes = 0

    def to_host(self, x):
        self.bytes += x.numel()
        return x.clone(), None

    def to_device(self, host):
        return host.clone(), None

    def wait(self, event):
        pass


def both(policy, sequence, ulysses, tensor):
    """Bytes that left, and whether gradients with and without offload are the same to the bit."""
    config = compose(
        [
            *OPTIONS,
            f"train.recompute={policy}",
            f"parallel.sequence={sequence}",
            f"parallel.ulysses={ulysses}",
            f"parallel.tensor={tensor}",
        ]
    )
    mesh = build_mesh(resolve(config, sequence * tensor), "cpu")
    tokens = torch.arange(LENGTH)[None] * 7 % 40
    local = slice(mesh.sequence.rank * LENGTH // sequence, (mesh.sequence.rank + 1) * LENGTH // sequence)
    tiles = plan("contiguous", Mask(), [(LENGTH,)], LENGTH, LENGTH, mesh.ring.size, mesh.ring.rank)
    copies, gradients = Copies(), []
    for offload in (Offload(copies, min_bytes=1), None):
        model = lay_out(config, mesh, attend_over(mesh, "sdpa"), torch.device("cpu"), offload)
        model.to_empty(device="cpu")
        initialise(model, 0)
        given = tokens[:, local], torch.arange(LENGTH)[None, local], {"full": torch.from_numpy(tiles)}
        for _ in range(2):  # a second micro-batch: nothing is left of the first
            model(*given, (tokens[:, local] + 1) % 40).backward()
        gradients.append([parameter.grad.to_local() for parameter in model.parameters()])
    return copies.bytes, all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def kept_numbers(policy, sequence, ulysses, tensor):
    """Numbers that a layer keeps on each rank: `inner` of its tokens and heads, `outer` of those it has between
    regions."""
    outer, inner = LENGTH // sequence // tensor, LENGTH // sequence
    attention = inner * (QUERIES + HEADS) // tensor  # out and lse
    projected = inner * (QUERIES + 2 * KEYS) // tensor
    if ulysses > 1:  # q, k and v once more as they were exchanged, and out as it was exchanged back
        attention += inner * QUERIES // tensor
        attention += projected if policy == "block" else 0
    if policy == "full":
        return outer * WIDTH
    if policy == "block":
        return outer * WIDTH + attention
    # The residual stream twice with a number a row of each norm, both normalised; gathered, if not the same.
    return outer * (2 * WIDTH + 2) + inner * 2 * WIDTH + projected + attention


@pytest.mark.parametrize("policy", ["none", "block", "full"])
@pytest.mark.parametrize("axes", [(2, 1, 1), (2, 2, 1), (1, 1, 2)])
def test_the_same_gradients_and_no_parameter_leaves(policy, axes):
    for left, same in run_ranks(both, 2, policy, *axes):
        assert same
        assert left == 2 * (LAYERS - 1) * 8 * kept_numbers(policy, *axes)
