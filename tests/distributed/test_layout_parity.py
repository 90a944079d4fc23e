"""One seed, one result: every division of the work trains to the same loss, gradient norm and weights.

The one-process run is compared with a dense float64 model that shares no code with the product (tests/dense.py); every
other (data, sequence, tensor) and layout is compared with the one-process run.
"""

import itertools
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from conf.compose import compose
from conf.schema import TrainConfig, resolve
from data.format import open_shard
from data.loader import Loader
from data.stream import Sequences, Source, Stage, TokenStream
from parallel.apply import attend_over, build_model
from parallel.mesh import build_mesh
from parallel.take import Take
from tests import dense
from tests.harness import run_ranks
from tests.shards import write_documents
from training.loop import train_step
from training.optimizer import build_optimizer, learning_rate

STEPS, SEQUENCES, LENGTH, VOCAB = 5, 8, 61, 64  # a prime length: no division of it is even
RELATIVE = 1e-9  # float64, five steps of AdamW; measured differences are below 1e-12

MODEL = {
    "model.vocab_size": VOCAB,
    "model.model_dim": 32,
    "model.num_layers": 2,
    "model.num_heads": 16,
    "model.num_kv_heads": 8,  # grouped, and divisible by every tensor axis up to 8
    "model.head_dim": 4,
    "model.ffn_dim": 48,
    "model.ffn_block_tokens": 7,
    "model.loss_block_tokens": 5,
    "data.sequence_length": LENGTH,
    "train.dtype": "float64",
    "train.steps": STEPS,
    "train.global_batch_tokens": SEQUENCES * LENGTH,
    "optimizer.learning_rate": 3e-3,
    "optimizer.warmup_steps": 2,
    "optimizer.clip_norm": 0.3,  # below the norms met, so that clipping acts
}
VARIANTS = {
    "llama": {},
    "qwen": {
        "model.qk_norm": True,
        "model.qkv_bias": True,
        "model.tie_embeddings": True,
        "model.vocab_multiple": 48,  # 96 rows: the second of two ranks has padding, the fourth of four nothing else
        "model.z_loss": 1e-2,
    },
    "windows": {
        "model.attention_pattern": "'window,full_norope'",
        "model.attention_window": 9,
        "train.recompute": "none",
    },
    "replicas": {"parallel.shard": 1, "parallel.tensor_shards_activations": False, "parallel.reduce_gradients": "each"},
}


def settings(variant: str, **more) -> TrainConfig:
    options = MODEL | VARIANTS[variant] | {key.replace("__", "."): value for key, value in more.items()}
    return compose([f"{key}={value}" for key, value in options.items()])


# layout, route, ulysses: every layout and every route, with and without Ulysses
RINGS = [
    ("zigzag", "relay", 1),
    ("striped", "gather", 1),
    ("balanced", "direct", 1),
    ("contiguous", "direct", 2),
]
MORE_RINGS = [("auto", "auto", 1), ("balanced", "gather", 2), ("striped", "relay", 2), ("grouped", "direct", 1)]


def divisions(ranks: int) -> list[tuple[int, int, int, str, str, int]]:
    """Every (data, sequence, tensor) of `ranks`, with every layout and route where there is a ring (most for 8)."""
    sizes = [size for size in (1, 2, 4, 8) if size <= ranks]
    triples = [triple for triple in itertools.product(sizes, repeat=3) if triple[0] * triple[1] * triple[2] == ranks]
    cases = []
    for number, triple in enumerate(triples):
        # Runs of eight ranks take long: each division leaves out one of the rings, another one each time.
        rings = RINGS + MORE_RINGS if ranks < 8 else RINGS[: number % 4] + RINGS[number % 4 + 1 :]
        cases += [(*triple, *ring) for ring in (rings if triple[1] > 1 else RINGS[:1])]
    return cases


def stream_of(folder: Path) -> Sequences:
    source = Source("documents", open_shard(folder), Fraction(1))
    return TokenStream([source], [Stage(LENGTH, None)], seed=3).stage(0)


def train_on(folder: Path, config: TrainConfig, ranks: int):
    """Losses and norms of each step, and the final weights, as this rank sees them."""
    degrees = resolve(config, ranks)
    mesh = build_mesh(degrees, "cpu")
    model = build_model(config, mesh, attend_over(mesh, "sdpa"), torch.device("cpu"))
    optimizer = build_optimizer(model, config.optimizer)
    loader = Loader(
        stream_of(folder),
        Take(config, mesh),
        micro_batch_size=config.train.micro_batch_size,
        accumulation=degrees.accumulation,
        data_rank=mesh.data.rank,
        data_size=mesh.data.size,
        first_sequence=0,
        num_steps=STEPS,
        cost=lambda documents: float(sum(length**2 for length in documents)),
    )
    losses, norms = [], []
    for step, batches in enumerate(loader, start=1):
        rate = learning_rate(step, config)
        result = train_step(model, optimizer, batches, mesh, config, rate, torch.device("cpu"))
        losses.append(result.loss)
        norms.append(result.gradient_norm)
    weights = {name: parameter.full_tensor().detach().numpy() for name, parameter in model.named_parameters()}
    return losses, norms, weights


def train_all(folder: Path, variant: str, cases: list[tuple[int, int, int, str, str, int]], ranks: int):
    """Runs in each rank: all cases one after another. What every rank saw must agree, so all are returned."""
    torch.manual_seed(0)
    results = {}
    for case in cases:
        data, sequence, tensor, layout, route, ulysses = case
        config = settings(
            variant,
            parallel__data=data,
            parallel__sequence=sequence,
            parallel__tensor=tensor,
            parallel__layout=layout,
            parallel__route=route,
            parallel__ulysses=ulysses,
            # The one-process run takes a step in eight micro-batches; these take it in two, or in one to save time.
            train__micro_batch_size=max(1, SEQUENCES // data // (2 if ranks < 8 else 1)),
        )
        results[case] = train_on(folder, config, ranks)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 90, 7, 33, 2, 150, 61, 12, 1, 44, 300, 5]
    documents = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return write_documents(tmp_path_factory.mktemp("shard"), documents, VOCAB)


@pytest.fixture(scope="module")
def alone(folder):
    """The one-process run of each variant."""
    return {variant: run_ranks(train_on, 1, folder, settings(variant), 1)[0] for variant in VARIANTS}


def assert_same(got, expected) -> None:
    losses, norms, weights = got
    assert losses == pytest.approx(expected[0], rel=RELATIVE)
    assert norms == pytest.approx(expected[1], rel=RELATIVE)
    assert weights.keys() == expected[2].keys()
    for name, weight in weights.items():
        scale = abs(expected[2][name]).max()
        assert abs(weight - expected[2][name]).max() <= RELATIVE * scale, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_process_equals_dense_truth(variant, folder, alone, first_weights):
    """Five steps of a dense model, plain cross-entropy and AdamW written from its formula (C036, C040, C045)."""
    config = settings(variant)
    stream = stream_of(folder)
    w = {name: torch.from_numpy(value).clone().requires_grad_() for name, value in first_weights[variant].items()}
    losses, norms, state = [], [], {}
    for step in range(1, STEPS + 1):
        sequences = range((step - 1) * SEQUENCES, step * SEQUENCES)
        read = [(stream.labelled(n, 0, LENGTH), stream.documents(n)) for n in sequences]
        valid = sum(int((labels != -100).sum()) for (_, labels, _), _ in read)
        total = sum(
            dense.sum_of_losses(w, config.model, torch.from_numpy(tokens), torch.from_numpy(labels), documents)
            for (tokens, labels, _), documents in read
        )
        gradients = dict(zip(w, torch.autograd.grad(total / valid, list(w.values())), strict=True))
        norm = torch.sqrt(sum(gradient.square().sum() for gradient in gradients.values()))
        factor = min(1.0, config.optimizer.clip_norm / float(norm))
        clipped = {name: gradient * factor for name, gradient in gradients.items()}
        dense.adamw(w, clipped, state, step, learning_rate(step, config), config.optimizer)
        losses.append(float(total.detach()) / valid)
        norms.append(float(norm))
    assert max(norms) > config.optimizer.clip_norm
    assert_same(alone[variant], (losses, norms, {name: value.detach().numpy() for name, value in w.items()}))


@pytest.fixture(scope="module")
def first_weights():
    return {variant: run_ranks(initial, 1, variant)[0] for variant in VARIANTS}


def initial(variant: str):
    config = settings(variant)
    mesh = build_mesh(resolve(config, 1), "cpu")
    model = build_model(config, mesh, attend_over(mesh, "sdpa"), torch.device("cpu"))
    return {name: parameter.full_tensor().detach().numpy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_division_equals_one_process(ranks, folder, alone):
    """C015, C016, C037, C039, C045: no axis scales a loss, loses a gradient, or counts a norm twice."""
    cases = divisions(ranks)
    results = run_ranks(train_all, ranks, folder, "llama", cases, ranks, timeout=400)
    for case in cases:
        for rank in range(ranks):
            assert_same(results[rank][case], alone["llama"])


@pytest.mark.parametrize("variant", ["qwen", "windows", "replicas"])
def test_variants_divide_too(variant, folder, alone):
    """C046: tied weights stay tied; windows end the ring early; replicas and whole activations change nothing."""
    cases = [
        (1, 2, 2, "zigzag", "relay", 1),
        (1, 1, 4, "zigzag", "relay", 1),
        (2, 2, 1, "striped", "relay", 1),
        (1, 4, 1, "contiguous", "direct", 1),
        (1, 4, 1, "balanced", "direct", 2),
        (1, 4, 1, "auto", "auto", 1),
    ]
    results = run_ranks(train_all, 4, folder, variant, cases, 4, timeout=300)
    for case in cases:
        for rank in range(4):
            assert_same(results[rank][case], alone[variant])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_three_ranks_and_six_heads(folder, kv_heads):
    """I14: sizes that are no powers of two, on rings of three and two, and three data ranks."""
    sizes = {"model__num_heads": 6, "model__num_kv_heads": kv_heads, "train__global_batch_tokens": 6 * LENGTH}
    [truth] = run_ranks(train_on, 1, folder, settings("llama", **sizes), 1)
    for axes, ranks in (({"parallel__sequence": 3}, 3), ({"parallel__data": 3}, 3), ({"parallel__sequence": 2}, 2)):
        for got in run_ranks(train_on, ranks, folder, settings("llama", **sizes, **axes), ranks):
            assert_same(got, truth)
