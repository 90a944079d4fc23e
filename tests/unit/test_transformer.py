"""The model's first weights and names; its arithmetic is held to a dense model in distributed/test_layout_parity.py."""

import numpy as np
import pytest
import torch

from conf.compose import compose
from model.blocks import Blocks
from model.transformer import Transformer, initial_rows

CONFIG = compose(["model.vocab_size=64", "model.qk_norm=true", "model.qkv_bias=true"]).model


def test_parameter_names_are_hugging_faces():
    """The names of transformers' Qwen2/Qwen3 checkpoints, without the leading `model.`."""
    with torch.device("meta"):
        names = {name for name, _ in Transformer(CONFIG, None, Blocks(1, 1)).named_parameters()}
    layer = {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    }
    layer |= {f"self_attn.{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")}
    expected = {f"layers.{i}.{name}" for i in range(CONFIG.num_layers) for name in layer}
    assert names == expected | {"embed_tokens.weight", "norm.weight", "lm_head.weight"}


@pytest.mark.parametrize("shape", [(1000, 128), (7, 3), (5000, 100)])
def test_any_rows_equal_those_of_the_whole(shape):
    """What a rank makes of its own rows is bit for bit what one rank makes of all."""
    name, size = "layers.0.mlp.up_proj.weight", torch.Size(shape)
    whole = initial_rows(CONFIG, 7, name, size, 0, shape[0])
    for start, stop in ((0, 1), (2, 5), (shape[0] // 2, shape[0]), (shape[0] - 1, shape[0]), (3, 3)):
        np.testing.assert_array_equal(initial_rows(CONFIG, 7, name, size, start, stop), whole[start:stop])


def test_first_weights_have_the_stated_spread():
    size = torch.Size((4000, 128))
    plain = initial_rows(CONFIG, 0, "layers.0.mlp.up_proj.weight", size, 0, 4000)
    residual = initial_rows(CONFIG, 0, "layers.1.mlp.down_proj.weight", size, 0, 4000)
    assert plain.std() == pytest.approx(0.02, rel=0.01)
    assert residual.std() == pytest.approx(0.02 / (2 * CONFIG.num_layers) ** 0.5, rel=0.01)
    assert abs(np.corrcoef(plain.ravel(), residual.ravel())[0, 1]) < 0.01
    assert (initial_rows(CONFIG, 0, "norm.weight", torch.Size((8,)), 2, 6) == 1).all()
    assert (initial_rows(CONFIG, 0, "layers.0.self_attn.q_proj.bias", torch.Size((8,)), 0, 8) == 0).all()


def test_seeds_and_names_differ():
    size = torch.Size((16, 16))
    rows = [initial_rows(CONFIG, seed, name, size, 0, 16) for seed in (0, 1) for name in ("a.weight", "b.weight")]
    assert len({row.tobytes() for row in rows}) == 4


def test_z_loss_is_of_training_only():
    """And padded rows of the head change neither."""
    losses = {}
    for name, options in {"plain": [], "z": ["model.z_loss=0.1"], "padded": ["model.vocab_multiple=48"]}.items():
        config = compose(["model.vocab_size=64", *options]).model
        model = Transformer(config, lambda q, k, v, plan: q, Blocks(3, 3))
        with torch.no_grad():
            for name_, parameter in model.named_parameters():
                rows = initial_rows(config, 1, name_, parameter.shape, 0, len(parameter))
                parameter.copy_(torch.from_numpy(rows))
        tokens = torch.arange(8)[None]
        run = lambda: model(tokens, tokens, {"full": None}, tokens + 1).item()  # noqa: B023, E731
        losses[name] = run(), model.eval() and run()
    assert losses["plain"] == losses["padded"]
    assert losses["z"][1] == losses["plain"][1] == losses["plain"][0] < losses["z"][0]
