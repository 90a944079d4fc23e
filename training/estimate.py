"""Arithmetic only: parameters, FLOPs and checkpoints of a model. No torch: it answers on a login node at once."""

from collections.abc import Iterable

from conf.schema import Dtype, ModelConfig, TrainConfig


def num_parameters(model: ModelConfig) -> int:
    """All parameters, padded rows of the vocabulary among them; a tied head counts once."""
    width, head = model.model_dim, model.head_dim
    vectors = 2 * width  # the two norms of a layer
    if model.qkv_bias:
        vectors += (model.num_heads + 2 * model.num_kv_heads) * head
    if model.qk_norm:
        vectors += 2 * head
    embedding = model.padded_vocab_size * width
    tables = embedding if model.tie_embeddings else 2 * embedding
    return tables + model.num_layers * (sum(layer_matrices(model)) + vectors) + width


def checkpoint_bytes(config: TrainConfig) -> int:
    """Of all ranks together: weights as the optimizer changes them, and its two moments."""
    element = 8 if config.train.dtype is Dtype.float64 else 4
    return 3 * element * num_parameters(config.model)


def checkpoint_seconds(config: TrainConfig, ranks: int) -> float:
    """To write that, all nodes at once, at `cluster.disk_bytes_per_second` each."""
    nodes = -(-ranks // config.cluster.node_gpus)
    return checkpoint_bytes(config) / (nodes * config.cluster.disk_bytes_per_second)


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that multiply every token: the layers' matrices and the head, tied or not; no embedding."""
    return model.num_layers * sum(layer_matrices(model)) + model.vocab_size * model.model_dim


def flops_per_sequence(model: ModelConfig, documents: Iterable[int], sequence_length: int) -> tuple[float, float]:
    """FLOPs of forward and backward for one sequence, by two conventions: (causal, noncausal).

    Both count 2 FLOPs per multiply-add, backward as twice forward, and nothing that is recomputed. causal:
    what the model needs. Its documents (lengths in tokens) cost 6 per parameter and token, and 12 · num_heads
    · head_dim per layer and visible pair of tokens: l(l+1)/2 pairs in a document of l tokens, fewer in a
    layer with a window. noncausal: the common convention, as if each token of the whole sequence saw each
    other.
    """
    lengths = list(documents)
    linear = 6.0 * matmul_parameters(model)
    per_pair = 12.0 * model.num_heads * model.head_dim
    visible = {"full": 0, "window": 0}
    for length in lengths:
        visible["full"] += length * (length + 1) // 2
        near = min(length, model.attention_window)
        visible["window"] += near * (near + 1) // 2 + (length - near) * near
    pairs = sum(visible[kind.removesuffix("_norope")] for kind in model.attention_kinds())
    causal = linear * sum(lengths) + per_pair * pairs
    return causal, linear * sequence_length + per_pair * model.num_layers * sequence_length**2


def layer_matrices(model: ModelConfig) -> tuple[int, int]:
    """Parameters of one layer's matrices: attention's four, the feed-forward's three."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return model.model_dim * (2 * queries + 2 * keys), 3 * model.model_dim * model.ffn_dim
