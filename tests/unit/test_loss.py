"""The blockwise loss against plain cross-entropy."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from model.loss import NO_TARGET, Vocabulary, sum_of_losses


def case(tokens=10, vocab=13, width=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, tokens, width, generator=generator, dtype=dtype).mul_(3).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(0, vocab, (1, tokens), generator=generator)
    labels[0, [1, 2, 7]] = NO_TARGET
    return hidden, weight, labels


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 4, 5, 7, 10, 16])
def test_equals_cross_entropy_for_any_block(block_tokens):
    """C040: the block size is no hyperparameter; gradients too."""
    hidden, weight, labels = case()
    loss = sum_of_losses(hidden, weight, labels, block_tokens, Vocabulary()) / 7
    truth = F.cross_entropy(hidden[0] @ weight.T, labels[0], ignore_index=NO_TARGET)
    assert loss.item() == pytest.approx(truth.item(), rel=1e-13)
    got = torch.autograd.grad(loss, (hidden, weight))
    expected = torch.autograd.grad(truth, (hidden, weight))
    for grad, right in zip(got, expected, strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-12, atol=1e-12)


def test_no_target_at_all_is_zero_and_finite():
    """C039: a rank that holds only padding adds nothing, and no NaN."""
    hidden, weight, labels = case()
    loss = sum_of_losses(hidden, weight, torch.full_like(labels, NO_TARGET), 4, Vocabulary())
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any() and not weight.grad.any()


def test_huge_logits_stay_finite():
    hidden, weight, labels = case()
    loss = sum_of_losses(hidden * 1e4, weight, labels, 4, Vocabulary())
    truth = F.cross_entropy(1e4 * hidden[0] @ weight.T, labels[0], ignore_index=NO_TARGET, reduction="sum")
    assert math.isfinite(loss.item()) and loss.item() == pytest.approx(truth.item(), rel=1e-12)


def test_vocabulary_in_parts_equals_whole():
    """Two holders of a part of the rows each, combined by hand: the same loss, and partial gradients that add up."""
    import threading

    hidden, weight, labels = case(vocab=12)
    barrier, board = threading.Barrier(2), [None, None]
    results = [None, None]

    def combine(rank, how, x):
        board[rank] = x
        barrier.wait()
        out = how(board[0], board[1])
        barrier.wait()
        return out

    def work(rank):
        rows = slice(6 * rank, 6 * rank + 6)
        h, w = hidden.detach().clone().requires_grad_(), weight.detach()[rows].clone().requires_grad_()
        vocabulary = Vocabulary(6 * rank, partial(combine, rank, torch.maximum), partial(combine, rank, torch.add))
        loss = sum_of_losses(h, w, labels, 4, vocabulary)
        loss.backward()
        results[rank] = loss.detach(), h.grad, w.grad

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    truth = F.cross_entropy(hidden[0] @ weight.T, labels[0], ignore_index=NO_TARGET, reduction="sum")
    truth.backward()
    for loss, _, _ in results:
        assert loss.item() == pytest.approx(truth.item(), rel=1e-13)
    torch.testing.assert_close(results[0][1] + results[1][1], hidden.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat((results[0][2], results[1][2])), weight.grad, rtol=1e-12, atol=1e-12)


def test_sixteen_bit_gradients_keep_their_length():
    """A factor 1/387 rounded to bfloat16 would shorten every gradient below the head by 0.2 %."""
    hidden, weight, labels = case(tokens=387, vocab=50, width=64)
    short = hidden.detach().to(torch.bfloat16).requires_grad_()
    (sum_of_losses(short, weight.to(torch.bfloat16), labels, 128, Vocabulary()) / 387).backward()
    exact = hidden.detach().to(torch.bfloat16).double().requires_grad_()
    head = weight.detach().to(torch.bfloat16).double()
    (F.cross_entropy(exact[0] @ head.T, labels[0], ignore_index=NO_TARGET, reduction="sum") / 387).backward()
    length = (short.grad.double() * exact.grad).sum() / exact.grad.square().sum()
    assert length.item() == pytest.approx(1, abs=5e-4)


def test_logits_of_full_length_never_exist():
    """C114: nothing of tokens × vocabulary is allocated, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    tokens, vocab = 256, 97
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(value, torch.Tensor):
                    largest = max(largest, value.numel())
            return out

    hidden = torch.randn(1, tokens, 4, requires_grad=True)
    weight = torch.randn(vocab, 4, requires_grad=True)
    with Watch():
        sum_of_losses(hidden, weight, torch.zeros(1, tokens, dtype=torch.long), 16, Vocabulary()).backward()
    assert largest <= 16 * vocab
