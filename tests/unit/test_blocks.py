"""Block sizes, and the bytes that the feed-forward and the loss allocate against what the formulas say they do."""

import pytest
import torch

from conf.compose import compose
from model import blocks as sizes
from model.blocks import Blocks, blocks
from model.ffn import FeedForward
from model.loss import Vocabulary, sum_of_losses
from training.tracker import Tracker, peak_bytes

WIDTH, TOKENS = 32, 96
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("ffn_dim", [96, 8])
@pytest.mark.parametrize("block_tokens", [1, 16, 40, 96, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_feed_forward_allocates_what_the_formula_says(dtype, block_tokens, ffn_dim):
    """To the byte, tails and blocks longer than the sequence included."""
    module = FeedForward(WIDTH, ffn_dim, block_tokens).to(dtype)
    x = torch.randn(1, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    said = sizes.ffn_bytes(TOKENS, block_tokens, ffn_dim, WIDTH, dtype.itemsize)
    with torch.no_grad():
        assert peak_bytes(lambda: module(x)) == said["forward"]
    out, dout = module(x), torch.randn(1, TOKENS, WIDTH, dtype=dtype)
    inputs = [x, *module.parameters()]
    assert peak_bytes(lambda: torch.autograd.grad(out, inputs, dout)) == said["backward"]


@pytest.mark.parametrize("vocab", [3000, 8])
@pytest.mark.parametrize("block_tokens", [1, 16, 40, 96, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_allocates_what_the_formula_says(dtype, block_tokens, vocab):
    """But for a few numbers for each token of a block, and the scalars."""
    hidden = torch.randn(1, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.zeros(1, TOKENS, dtype=torch.long)
    said = sizes.loss_bytes(TOKENS, block_tokens, vocab, WIDTH, dtype.itemsize)
    held = []
    run = lambda: held.append(sum_of_losses(hidden, weight, labels, block_tokens, Vocabulary(vocab), 0.1))  # noqa: E731
    with Tracker() as tracker:
        run()
        forward, tracker.peak_bytes = tracker.peak_bytes, tracker.live_bytes
        torch.autograd.grad(held.pop(), (hidden, weight))
        backward = tracker.peak_bytes
    assert 0 <= forward - said["forward"] <= 16 + 100 * min(block_tokens, TOKENS)
    assert 0 <= backward - said["backward"] <= 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_of_the_loss_takes_at_most_two_of_float32_logits(dtype):
    tokens, vocab, element = 16, 3000, max(4, dtype.itemsize)
    assert sizes.loss_block_bytes(tokens, vocab, WIDTH, dtype.itemsize) <= 1.5 * tokens * vocab * element


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_of_the_feed_forward_takes_at_most_four_of_its_width(dtype):
    tokens, ffn_dim = 16, 96
    said = sizes.ffn_block_bytes(tokens, ffn_dim, WIDTH, dtype.itemsize)
    assert said["backward"] <= 4 * tokens * ffn_dim * dtype.itemsize


MODEL = compose(["model=8b"]).model


def test_blocks_fill_the_budget_in_multiples_of_128():
    for budget in (1 << 28, 1 << 30, 3_333_333_333):
        for tensor in (1, 8):
            chosen = blocks(MODEL, 2, budget, tensor)
            ffn = lambda tokens: 4 * 2 * tokens * 14336 // tensor  # noqa: B023, E731
            loss = lambda tokens: 6 * tokens * 128256 // tensor  # noqa: B023, E731
            for tokens, need in ((chosen.ffn, ffn), (chosen.loss, loss)):
                assert tokens % 128 == 0 and need(tokens) <= budget < need(tokens + 128)


def test_a_budget_of_less_than_128_tokens_gives_fewer():
    assert blocks(MODEL, 2, 6 * 128256 * 77, 1).loss == 77


def test_a_budget_of_less_than_one_block_is_refused():
    """With the smallest that works, which does."""
    with pytest.raises(ValueError, match=r"cluster\.block_bytes=100000 .*use cluster\.block_bytes=(\d+)") as refusal:
        blocks(MODEL, 2, 100_000)
    smallest = int(str(refusal.value).split("use cluster.block_bytes=")[1].split()[0])
    assert min(blocks(MODEL, 2, smallest)) == sizes.MIN_BLOCK_TOKENS
    with pytest.raises(ValueError, match="block_bytes"):
        blocks(MODEL, 2, smallest - 1)


def test_block_sizes_that_are_set_are_taken():
    model = compose(["model=8b", "model.ffn_block_tokens=3", "model.loss_block_tokens=2K"]).model
    assert blocks(model, 2, 1) == Blocks(3, 2048)
    half = compose(["model=8b", "model.loss_block_tokens=5"]).model
    assert blocks(half, 2, 1 << 30) == Blocks(blocks(MODEL, 2, 1 << 30).ffn, 5)
