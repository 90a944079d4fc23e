"""The configurations of benchmarks/plan_accuracy.py: each of a kind of its own, a few seconds long, at least 150 MB.

All have heads of 64: a CPU's kernel reaches other rates with other widths, and rates are measured for one.
"""

from dataclasses import dataclass

HEAD_DIM = 64


@dataclass(frozen=True)
class Case:
    """`overrides` of train.py, on so many ranks; documents None = one as long as the sequence."""

    name: str
    ranks: int
    overrides: tuple[str, ...]
    documents: list[int] | None = None


def case(
    name: str,
    ranks: int = 1,
    *overrides: str,
    width: int = 512,
    layers: int = 2,
    heads: int = 8,
    kv_heads: int = 4,
    ffn: int = 1536,
    vocab: int = 4096,
    length: str = "4K",
    recompute: str = "block",
    documents: list[int] | None = None,
) -> Case:
    """A decoder of this shape."""
    shape = {
        "model_dim": width,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "ffn_dim": ffn,
        "vocab_size": vocab,
    }
    words = [f"model.{key}={value}" for key, value in shape.items()]
    words += [f"data.sequence_length={length}", f"train.recompute={recompute}", *overrides]
    return Case(name, ranks, tuple(words), documents)


PACKED = [4096, 1024, 1024, 512, 512, 256, 256, 256, 128, 64, 64]
RING2, RING4 = "parallel.sequence=2", "parallel.sequence=4"
ZIGZAG, RELAY, DIRECT = "parallel.layout=zigzag", "parallel.route=relay", "parallel.route=direct"
WHOLE = "parallel.tensor_shards_activations=false"
PADDED = "model.vocab_multiple=1024", "model.z_loss=1e-4"
SMALL = {"width": 256, "heads": 4, "kv_heads": 2, "ffn": 768, "vocab": 2048}

CASES = [
    # One rank: shapes, policies, dtypes, blocks.
    case("block"),
    case("none", recompute="none"),
    case("full", recompute="full"),
    case("bfloat16, block", 1, "train.dtype=bfloat16", length="8K", layers=1),
    case("bfloat16, none", 1, "train.dtype=bfloat16", recompute="none"),
    case("float64, none", 1, "train.dtype=float64", recompute="none", layers=1),
    case("tied, large vocabulary", 1, "model.tie_embeddings=true", vocab=16384, layers=1),
    case("larger vocabulary, padded", 1, *PADDED, width=256, heads=4, vocab=32000),
    case("wide, no groups", width=768, heads=12, kv_heads=12, ffn=2048, layers=1, recompute="none"),
    case("deep and narrow, one key head", **SMALL | {"kv_heads": 1}, layers=6, recompute="none"),
    case("deep and narrow, full", **SMALL, layers=3, length="8K", recompute="full"),
    case("micro-batch of 3", 1, "train.micro_batch_size=3", length="2K", recompute="none"),
    case("2 micro-batches", 1, "train.global_batch_tokens=8192"),
    case("small blocks", 1, "cluster.block_bytes=4M", length="8K", layers=1),
    case("blocks by tokens", 1, "model.ffn_block_tokens=4096", "model.loss_block_tokens=4096", layers=1),
    case("window", 1, "model.attention_pattern=window", "model.attention_window=512", **SMALL, length="16K"),
    case("biases and norms of heads", 1, "model.qkv_bias=true", "model.qk_norm=true", recompute="none"),
    case("packed documents", 1, length="8K", documents=PACKED),
    # Two ranks: layouts, routes, axes.
    case("ring 2, zigzag relay", 2, RING2, ZIGZAG, RELAY, length="8K"),
    case("ring 2, contiguous direct, none", 2, RING2, "parallel.layout=contiguous", DIRECT, recompute="none"),
    case("ring 2, striped relay, full", 2, RING2, "parallel.layout=striped", RELAY, recompute="full", length="8K"),
    case("ring 2, zigzag gather", 2, RING2, ZIGZAG, "parallel.route=gather", length="8K"),
    case("ring 2, auto, bfloat16, none", 2, RING2, "train.dtype=bfloat16", recompute="none", length="8K"),
    case(
        "ring 2, packed, balanced direct", 2, RING2, "parallel.layout=balanced", DIRECT, length="8K", documents=PACKED
    ),
    case("tensor 2", 2, "parallel.tensor=2"),
    case("tensor 2, whole activations, none", 2, "parallel.tensor=2", WHOLE, recompute="none"),
    case("ulysses 2", 2, RING2, "parallel.ulysses=2", length="8K"),
    case("data 2", 2, "parallel.data=2"),
    case("data 2, whole states, none", 2, "parallel.data=2", "parallel.shard=1", recompute="none"),
    # Four ranks, which share two cores: memory only.
    case("ring 4, zigzag", 4, RING4, ZIGZAG, **SMALL, length="32K", layers=1),
    case(
        "ring 4, balanced direct, none",
        4,
        RING4,
        "parallel.layout=balanced",
        DIRECT,
        **SMALL,
        length="16K",
        recompute="none",
    ),
    case("ring 2 x ulysses 2", 4, RING4, "parallel.ulysses=2", **SMALL, length="16K", recompute="none"),
    case("ring 2 x tensor 2", 4, RING2, "parallel.tensor=2", length="8K"),
    case("data 2 x ring 2, float64", 4, RING2, "parallel.data=2", "train.dtype=float64", layers=1),
]

QUICK = [
    one
    for one in CASES
    if one.name in ("block", "none", "bfloat16, none", "ring 2, zigzag relay", "tensor 2", "ring 2 x ulysses 2")
]
