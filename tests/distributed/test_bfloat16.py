"""Training in bfloat16: float32 master weights, and gradients that are noisy but not biased, for every parameter."""

import numpy as np
import pytest
import torch

from conf.compose import compose
from conf.schema import resolve
from data.loader import Batch
from model.loss import NO_TARGET
from model.mask import Mask
from model.transformer import Embedding
from parallel.apply import attend_over, build_model
from parallel.mesh import build_mesh
from parallel.schedule import plan
from tests.harness import run_ranks
from training.loop import train_step
from training.optimizer import build_optimizer

LENGTH, VOCAB, SEQUENCES = 1024, 48, 4
NOISE, BIAS = (
    0.02,
    0.01,
)  # measured: up to 0.010 and 0.006; relative L2 error, and how far the gradient's length along the truth may be from 1
OPTIONS = {
    "model.vocab_size": VOCAB,
    "model.qk_norm": True,
    "model.qkv_bias": True,
    "data.sequence_length": LENGTH,
    "train.global_batch_tokens": LENGTH * SEQUENCES,
    "optimizer.clip_norm": 0,
}


def gradients(dtype: str, micro_batch_size: int) -> tuple[float, dict[str, np.ndarray], set[str]]:
    """Gradient norm and gradients of one step, and the dtypes of what the optimizer holds."""
    options = OPTIONS | {"train.dtype": dtype, "train.micro_batch_size": micro_batch_size}
    config = compose([f"{key}={value}" for key, value in options.items()])
    degrees = resolve(config, 1)
    mesh = build_mesh(degrees, "cpu")
    model = build_model(config, mesh, attend_over(mesh, "sdpa"), torch.device("cpu"))
    optimizer = build_optimizer(model, config.optimizer)
    seen = {}
    optimizer.register_step_pre_hook(
        lambda *_: seen.update(
            (name, p.grad.to_local().double().numpy().copy()) for name, p in model.named_parameters()
        )
    )
    result = train_step(model, optimizer, batches(config, degrees), mesh, config, 1e-3, torch.device("cpu"))
    kept = {str(tensor.dtype) for state in optimizer.state.values() for tensor in state.values()}
    return result.gradient_norm, seen, kept | {str(parameter.dtype) for parameter in model.parameters()}


def batches(config, degrees) -> list[Batch]:
    """Skewed text: token 0 is a third of all, so that its gradient is a sum of more than a thousand terms."""
    generator = torch.Generator().manual_seed(4)
    shape = (SEQUENCES, LENGTH + 1)
    line = torch.randint(0, VOCAB, shape, generator=generator) * (torch.rand(shape, generator=generator) > 1 / 3)
    labels = line[:, 1:].clone()
    labels[:, 300:700] = NO_TARGET  # 624 targets a sequence: 1 / tokens is no power of two
    size = config.train.micro_batch_size
    table = torch.from_numpy(plan("zigzag", Mask(), [(LENGTH,)] * size, LENGTH, LENGTH, 1, 0))
    parts = zip(line[:, :-1].split(size), labels.split(size), strict=True)
    positions = torch.arange(LENGTH).expand(size, -1)
    return [
        Batch(tokens, target, positions, {"full": table}, int((target >= 0).sum()), [(LENGTH,)] * size)
        for tokens, target in parts
    ]


def both(micro_batch_size: int):
    return gradients("bfloat16", micro_batch_size), gradients("float64", micro_batch_size)


@pytest.mark.parametrize("micro_batch_size", [4, 1])
def test_gradients_are_noisy_but_not_biased(micro_batch_size):
    """C014: nothing that sums over tokens or micro-batches does so in 16 bits."""
    (norm, got, kept), (true_norm, truth, _) = run_ranks(both, 1, micro_batch_size)[0]
    assert kept == {"torch.float32"}
    assert norm == pytest.approx(true_norm, rel=BIAS)
    for name, expected in truth.items():
        error = np.linalg.norm(got[name] - expected) / np.linalg.norm(expected)
        length = (got[name] * expected).sum() / np.square(expected).sum()
        assert error < NOISE, (name, error)
        assert abs(length - 1) < BIAS, (name, length)


def lookup_gradient() -> float:
    table = Embedding(3, 1, dtype=torch.bfloat16)
    table(torch.zeros(1, 4096, dtype=torch.long)).sum().backward()
    return table.weight.grad[0].item()


def test_a_token_seen_4096_times_counts_4096():
    assert run_ranks(lookup_gradient, 1)[0] == 4096
