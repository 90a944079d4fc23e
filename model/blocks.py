"""How many tokens the feed-forward and the loss compute at once, and the bytes that takes.

Both go through a rank's tokens in blocks, so their intermediates do not grow with the tokens. The formulas here say to
the byte what `model/ffn.py` and `model/loss.py` allocate; what is counted per token alone, a few numbers for each token
of a block, is left out. `element_bytes` is that of the dtype of compute; sums are taken in `wide` bytes, float32 or
float64. With a tensor axis, widths and rows are those of one rank.
"""

from collections.abc import Callable
from typing import NamedTuple

from conf.schema import ModelConfig

MIN_BLOCK_TOKENS = 16  # below, a block's weights take longer to read than its tokens to compute
ALIGNED_TOKENS = 128  # blocks that fill the tiles of a GPU's matrix product


class Blocks(NamedTuple):
    """Tokens per block."""

    ffn: int
    loss: int


def blocks(model: ModelConfig, element_bytes: int, budget_bytes: int, tensor: int = 1) -> Blocks:
    """Block sizes whose intermediates fit `budget_bytes`, where `model` does not set them.

    The largest multiple of 128 tokens that fits, or where not even 128 do, as many as fit.

    Raises:
        ValueError: where a block of 16 tokens does not fit, with the smallest budget that works.
    """
    ffn_dim, vocab_rows, width = model.ffn_dim // tensor, model.padded_vocab_size // tensor, model.model_dim
    needs = {
        "ffn": lambda tokens: ffn_block_bytes(tokens, ffn_dim, width, element_bytes)["backward"],
        "loss": lambda tokens: loss_block_bytes(tokens, vocab_rows, width, element_bytes),
    }
    chosen = {"ffn": model.ffn_block_tokens, "loss": model.loss_block_tokens}
    free = {name: need for name, need in needs.items() if chosen[name] is None}
    if (smallest := max((need(MIN_BLOCK_TOKENS) for need in free.values()), default=0)) > budget_bytes:
        name = max(free, key=lambda name: free[name](MIN_BLOCK_TOKENS))
        raise ValueError(
            f"cluster.block_bytes={budget_bytes} is less than one block of {MIN_BLOCK_TOKENS} tokens takes: use "
            f"cluster.block_bytes={smallest} or more, or set model.{name}_block_tokens"
        )
    return Blocks(**{name: int(chosen[name] or _fitting(needs[name], budget_bytes)) for name in needs})


def ffn_block_bytes(tokens: int, ffn_dim: int, model_dim: int, element_bytes: int) -> dict[str, int]:
    """What a block of the feed-forward holds at once, in forward and in backward.

    Forward: gate and up. Backward: gate, up and a third, each reused in place; 16-bit weights need a fourth for the
    products that are added to their gradients' sums, of one row of a weight at least.
    """
    width = tokens * ffn_dim * element_bytes
    products = max(tokens * ffn_dim, model_dim) * element_bytes if element_bytes < _wide(element_bytes) else 0
    return {"forward": 2 * width, "backward": 3 * width + products}


def ffn_bytes(tokens: int, block_tokens: int, ffn_dim: int, model_dim: int, element_bytes: int) -> dict[str, int]:
    """All that the feed-forward allocates for `tokens` tokens at its peak, in forward and in backward.

    That is its result [tokens, C], a block, and in backward the sums of three weights' gradients. They are rounded to
    16 bits one after another when the blocks are gone, and each sum goes once it is rounded.
    """
    block = ffn_block_bytes(min(tokens, block_tokens), ffn_dim, model_dim, element_bytes)
    weight, result = ffn_dim * model_dim, tokens * model_dim * element_bytes
    rounded = weight * element_bytes if element_bytes < _wide(element_bytes) else 0
    sums = 3 * weight * _wide(element_bytes)
    return {"forward": result + block["forward"], "backward": result + sums + max(block["backward"], rounded)}


def loss_block_bytes(tokens: int, vocab_rows: int, model_dim: int, element_bytes: int) -> int:
    """What a block of the loss holds at once: its logits, which become their gradients in place.

    In 16-bit compute also their 16-bit copy; the float32 ones then make room for products that are added to the sum of
    the weight's gradient, one row of it at least.
    """
    logits = tokens * vocab_rows
    if element_bytes == _wide(element_bytes):
        return logits * element_bytes
    return _wide(element_bytes) * max(logits, -(-model_dim // 2)) + element_bytes * logits


def loss_bytes(tokens: int, block_tokens: int, vocab_rows: int, model_dim: int, element_bytes: int) -> dict[str, int]:
    """All that the loss allocates for `tokens` tokens at its peak, in forward, and then in backward.

    Forward makes the gradients of hidden states [tokens, C] and weight [V, C], the latter in wide, and holds them until
    backward scales them in place: in 16-bit compute the former through a wide copy of one block, and the latter into
    its 16-bit result.
    """
    block_tokens = min(tokens, block_tokens)
    held = tokens * model_dim * element_bytes + vocab_rows * model_dim * _wide(element_bytes)
    more = 0
    if element_bytes < _wide(element_bytes):
        more = max(block_tokens * model_dim * _wide(element_bytes), vocab_rows * model_dim * element_bytes)
    block = loss_block_bytes(block_tokens, vocab_rows, model_dim, element_bytes)
    return {"forward": held + block, "backward": held + more}


def _wide(element_bytes: int) -> int:
    return max(4, element_bytes)


def _fitting(need: Callable[[int], int], budget_bytes: int) -> int:
    """The most tokens within the budget: a multiple of ALIGNED_TOKENS from there on."""
    per_token = (need(2 * ALIGNED_TOKENS) - need(ALIGNED_TOKENS)) // ALIGNED_TOKENS
    tokens = budget_bytes // per_token
    while need(tokens) > budget_bytes:  # a row of a weight that takes more than the tokens
        tokens -= 1
    return tokens - tokens % ALIGNED_TOKENS if tokens >= ALIGNED_TOKENS else tokens
