"""Parameters and FLOPs against hand sums, published sizes and enumeration."""

import subprocess
import sys

import pytest
import torch

from conf.compose import compose
from conf.schema import ModelConfig
from model.blocks import Blocks
from model.transformer import Transformer
from training.estimate import flops_per_sequence, matmul_parameters, num_parameters


def model(**changes) -> ModelConfig:
    shape = {
        "name": "tiny",
        "vocab_size": 10,
        "model_dim": 6,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 2,
        "ffn_dim": 7,
    }
    return ModelConfig(**(shape | changes))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("extras", [{}, {"qkv_bias": True}, {"qk_norm": True}])
def test_num_parameters_equals_the_modules_own(tied, extras):
    config = model(tie_embeddings=tied, **extras)
    with torch.device("meta"):
        built = Transformer(config, attend=None, blocks=Blocks(1, 1))
    assert num_parameters(config) == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize(
    ("preset", "parameters", "matmuls"),
    [("7b", 6_738_415_616, 6.607e9), ("8b", 8_030_261_248, 7.505e9), ("70b", 70_553_706_496, None)],
)
def test_published_sizes(preset, parameters, matmuls):
    """Llama-2-7B, Llama-3-8B and Llama-3-70B as published."""
    vocab_size = 32_000 if preset == "7b" else 128_256
    config = compose([f"model={preset}", f"data.vocab_size={vocab_size}"]).model
    assert num_parameters(config) == parameters
    if matmuls is not None:
        assert matmul_parameters(config) == pytest.approx(matmuls, rel=1e-4)


def visible_pairs(documents, window):
    return sum(
        1
        for length in documents
        for query in range(length)
        for key in range(length)
        if query >= key and (window is None or query - key < window)
    )


@pytest.mark.parametrize("documents", [(16,), (5, 1, 10), (7, 9), (3, 4)])
@pytest.mark.parametrize("pattern", ["full", "full,window", "window_norope,full_norope"])
def test_causal_flops_count_visible_pairs(documents, pattern):
    window = 3 if "window" in pattern else 0
    config = model(attention_pattern=pattern, attention_window=window)
    causal, _ = flops_per_sequence(config, documents, 16)
    pairs = sum(visible_pairs(documents, 3 if kind.startswith("window") else None) for kind in config.attention_kinds())
    matrices = 2 * (6 * 8 + 6 * 4 + 6 * 4 + 8 * 6 + 3 * 6 * 7) + 10 * 6
    # A visible pair costs q·k and p·v: 2 · 2 · heads · head_dim forward, twice that backward.
    assert causal == 6 * matrices * sum(documents) + 12 * 8 * pairs


def test_noncausal_convention_ignores_documents():
    config = model()
    _, noncausal = flops_per_sequence(config, (5, 11), 16)
    assert noncausal == flops_per_sequence(config, (16,), 16)[1]
    assert noncausal == 16 * (6 * matmul_parameters(config) + 12 * 2 * 8 * 16)  # 6 N + 12 L h S a token


def test_imports_no_torch():
    code = "import sys, training.estimate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
