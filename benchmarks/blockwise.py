"""What do blocks cost? The feed-forward and the loss, in blocks of tokens, against the plain formulas.

    python benchmarks/blockwise.py [--quick] [--json PATH]

Forward and backward, in turns with the plain formula: processor time of one thread, the fastest of several. Of the
loss: against `F.cross_entropy` of all logits at once, at a size where these fit; what it allocates beside its results,
in blocks of float32 logits; and its error in float64 for blocks that divide the tokens or not, with padded rows, with
z-loss, and without any target. Of the feed-forward: against the plain formula of all tokens under one
`torch.utils.checkpoint`.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from model.ffn import FeedForward  # noqa: E402
from model.loss import NO_TARGET, Vocabulary, sum_of_losses  # noqa: E402
from training.tracker import peak_bytes  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16)
MAX_BLOCKS, MAX_LOSS_TIME, MAX_FFN_TIME, MAX_ERROR = 2.0, 1.10, 1.05, 1e-12
SHARE_WITHOUT_TARGET = 0.1


def main() -> int:
    arguments = report.arguments(__doc__.splitlines()[0]).parse_args()
    machine = report.machine()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    repetitions = 3 if arguments.quick else 5
    losses = [_loss(dtype, arguments.quick, repetitions) for dtype in DTYPES]
    ffns = [_feed_forward(dtype, arguments.quick, repetitions) for dtype in DTYPES]
    errors = _errors()
    error = max(row["relative error"] for row in errors)
    blocks = max(row["blocks of logits"] for row in losses)
    criteria = [
        report.at_most("loss: memory beside its results, in blocks of float32 logits", blocks, MAX_BLOCKS),
        report.at_most("loss: largest relative error in float64", error, MAX_ERROR),
        # In 16 bits the plain loss rounds its logits and sums to 16 bits, which ours does not: no equal work.
        report.at_most("loss: time against plain cross-entropy, float32", losses[0]["ours / plain"], MAX_LOSS_TIME),
        report.at_most("feed-forward: time against one checkpoint, float32", ffns[0]["ours / plain"], MAX_FFN_TIME),
    ]
    return report.finish(machine, losses, criteria, arguments.json, feed_forward=ffns, errors_of_the_loss=errors)


def _loss(dtype: torch.dtype, quick: bool, repetitions: int) -> dict[str, object]:
    tokens, vocab, width, block_tokens = (1024, 8192, 256, 128) if quick else (2048, 32_000, 512, 512)
    hidden, head, labels = _draw(tokens, vocab, width, dtype)

    def ours() -> Tensor:
        return sum_of_losses(hidden, head, labels, block_tokens, Vocabulary(vocab))

    plain = lambda: _plain_loss(hidden, head, labels, vocab)  # noqa: E731
    results = hidden.numel() * dtype.itemsize + head.numel() * 4
    extra = peak_bytes(lambda: ours()) - results
    return {
        "loss": str(dtype).removeprefix("torch."),
        "tokens": tokens,
        "vocabulary": vocab,
        "width": width,
        "block": block_tokens,
        "blocks of logits": extra / (block_tokens * vocab * 4),
        **_times(ours, plain, (hidden, head), repetitions),
    }


def _feed_forward(dtype: torch.dtype, quick: bool, repetitions: int) -> dict[str, object]:
    tokens, width, ffn_dim, block_tokens = (1024, 256, 1024, 256) if quick else (8192, 512, 2048, 1024)
    module = FeedForward(width, ffn_dim, block_tokens).to(dtype)
    x = torch.randn(1, tokens, width).to(dtype).requires_grad_()

    def plain(x: Tensor) -> Tensor:
        return module.down_proj(F.silu(module.gate_proj(x)) * module.up_proj(x))

    return {
        "feed-forward": str(dtype).removeprefix("torch."),
        "tokens": tokens,
        "width": width,
        "ffn": ffn_dim,
        "block": block_tokens,
        **_times(
            lambda: module(x),
            lambda: checkpoint(plain, x, use_reentrant=False),
            (x, *module.parameters()),
            repetitions,
            torch.randn(1, tokens, width).to(dtype),
        ),
    }


def _times(
    ours: Callable[[], Tensor],
    plain: Callable[[], Tensor],
    inputs: Sequence[Tensor],
    repetitions: int,
    dout: Tensor | None = None,
) -> dict[str, float]:
    """Seconds of forward and backward; in turns, the first of each not counted. Others at work lengthen them little."""
    fastest = [float("inf")] * 2
    for repetition in range(repetitions + 1):
        for number, run in enumerate((ours, plain)):
            begin = time.thread_time()
            torch.autograd.grad(run(), inputs, dout)
            if repetition:
                fastest[number] = min(fastest[number], time.thread_time() - begin)
    return {"seconds": fastest[0], "plain seconds": fastest[1], "ours / plain": fastest[0] / fastest[1]}


def _errors() -> list[dict[str, object]]:
    """Largest error of the loss and its two gradients in float64, relative to each one's largest number."""
    rows = []
    tokens, vocab, width = 200, 501, 32
    for name, padding, z_loss, targets in (
        ("plain", 0, 0.0, True),
        ("padded rows", 11, 0.0, True),
        ("z-loss", 11, 1e-3, True),
        ("no target", 11, 1e-3, False),
    ):
        hidden, head, labels = _draw(tokens, vocab, width, torch.float64, padding)
        if not targets:
            labels = torch.full_like(labels, NO_TARGET)
        truth = _plain_loss(hidden, head, labels, vocab, z_loss)
        want = (truth.detach(), *torch.autograd.grad(truth, (hidden, head)))
        worst = 0.0
        for block_tokens in (1, 3, 64, 199, 200, 256):
            loss = sum_of_losses(hidden, head, labels, block_tokens, Vocabulary(vocab), z_loss)
            got = (loss.detach(), *torch.autograd.grad(loss, (hidden, head)))
            for mine, right in zip(got, want, strict=True):
                scale = float(right.abs().max()) or 1.0
                worst = max(worst, float((mine - right).abs().max()) / scale)
        rows.append({"case": name, "relative error": worst})
    return rows


def _draw(tokens: int, vocab: int, width: int, dtype: torch.dtype, padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [1, T, C], a head [V + padding, C], and labels [1, T], some of them NO_TARGET."""
    hidden = torch.randn(1, tokens, width, dtype=torch.float64).to(dtype).requires_grad_()
    head = (torch.randn(vocab + padding, width, dtype=torch.float64) / width**0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (1, tokens))
    labels[torch.rand(labels.shape) < SHARE_WITHOUT_TARGET] = NO_TARGET
    return hidden, head, labels


def _plain_loss(hidden: Tensor, head: Tensor, labels: Tensor, vocab: int, z_loss: float = 0.0) -> Tensor:
    logits = hidden.flatten(0, 1) @ head[:vocab].T
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=NO_TARGET, reduction="sum")
    if z_loss:
        loss = loss + z_loss * logits[labels.flatten() != NO_TARGET].logsumexp(-1).square().sum()
    return loss


if __name__ == "__main__":
    sys.exit(main())
