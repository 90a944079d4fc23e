"""The blockwise loss against plain cross-entropy."""

import math
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from model.loss import NO_TARGET, Vocabulary, sum_of_losses

VOCAB, PADDING = 13, 5


def case(tokens=10, vocab=VOCAB, width=6, dtype=torch.float64, padding=0):
    """Hidden states, a head whose last `padding` rows are no tokens, and labels, seven of ten of them valid."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, tokens, width, generator=generator, dtype=dtype).mul_(3).requires_grad_()
    weight = torch.randn(vocab + padding, width, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(0, vocab, (1, tokens), generator=generator)
    labels[0, [1, 2, 7]] = NO_TARGET
    return hidden, weight, labels


def plain(hidden, weight, labels, vocab=VOCAB, z_loss=0.0):
    """The sum of the losses, all logits at once; padded rows are left away."""
    logits = hidden.flatten(0, -2) @ weight[:vocab].T
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=NO_TARGET, reduction="sum")
    return loss + z_loss * logits.logsumexp(-1).square()[labels.flatten() != NO_TARGET].sum()


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("padding", [0, PADDING])
@pytest.mark.parametrize("block_tokens", [1, 2, 3, 4, 5, 7, 10, 16])
def test_equals_cross_entropy_for_any_block(block_tokens, padding, z_loss):
    """C040: the block size is no hyperparameter; gradients too."""
    hidden, weight, labels = case(padding=padding)
    loss = sum_of_losses(hidden, weight, labels, block_tokens, Vocabulary(VOCAB), z_loss) / 7
    truth = plain(hidden, weight, labels, z_loss=z_loss) / 7
    assert loss.item() == pytest.approx(truth.item(), rel=1e-13)
    got = torch.autograd.grad(loss, (hidden, weight))
    expected = torch.autograd.grad(truth, (hidden, weight))
    for grad, right in zip(got, expected, strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-12, atol=1e-12)
    assert not got[1][VOCAB:].any()


def test_padded_rows_change_nothing_however_large():
    """A padded row may hold anything that is a number; neither its logits nor its gradients are seen."""
    hidden, weight, labels = case(padding=PADDING)
    loud = torch.cat((weight.detach()[:VOCAB], torch.full((PADDING, 6), 1e9, dtype=torch.float64))).requires_grad_()
    quiet, loss = (sum_of_losses(hidden, w, labels, 4, Vocabulary(VOCAB), 0.1) for w in (weight, loud))
    assert loss.item() == quiet.item()
    (dhidden, dweight), (calm, _) = (torch.autograd.grad(x, (hidden, w)) for x, w in ((loss, loud), (quiet, weight)))
    assert torch.equal(dhidden, calm) and not dweight[VOCAB:].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_target_at_all_is_zero_and_finite(dtype):
    """C039: a rank that holds only padding adds nothing, and no NaN."""
    hidden, weight, labels = (x.detach() for x in case(padding=PADDING))
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    loss = sum_of_losses(hidden, weight, torch.full_like(labels, NO_TARGET), 4, Vocabulary(VOCAB), 0.1)
    loss.backward()
    assert loss.item() == 0
    assert (hidden.grad == 0).all() and (weight.grad == 0).all()


def test_huge_logits_stay_finite():
    hidden, weight, labels = case()
    loss = sum_of_losses(hidden * 1e4, weight, labels, 4, Vocabulary(VOCAB))
    truth = plain(1e4 * hidden, weight, labels)
    assert math.isfinite(loss.item()) and loss.item() == pytest.approx(truth.item(), rel=1e-12)


# Rows of the head that each holder has, tokens that exist: without padding, a rank's part of it, a rank all padding.
SHARDS = {"whole": (2, 12, 12), "partly padding": (2, 12, 11), "wholly padding": (3, 12, 7)}


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("name", SHARDS)
def test_vocabulary_in_parts_equals_whole(name, z_loss):
    """Holders of a part of the rows each, combined by hand: the same loss, and partial gradients that add up."""
    ranks, rows, vocab = SHARDS[name]
    hidden, weight, labels = case(vocab=vocab, padding=rows - vocab)
    share = rows // ranks
    barrier, board, results, scalars = threading.Barrier(ranks), [None] * ranks, [None] * ranks, [0] * ranks

    def combine(rank, how, x):
        board[rank] = x
        scalars[rank] += x.numel()
        barrier.wait()
        out = how(torch.stack(board))
        barrier.wait()
        return out

    def work(rank):
        here = slice(share * rank, share * (rank + 1))
        h, w = hidden.detach().clone().requires_grad_(), weight.detach()[here].clone().requires_grad_()
        maximum, total = partial(combine, rank, lambda x: x.amax(0)), partial(combine, rank, lambda x: x.sum(0))
        loss = sum_of_losses(h, w, labels, 4, Vocabulary(vocab, here.start, maximum, total), z_loss)
        loss.backward()
        results[rank] = loss.detach(), h.grad, w.grad

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    truth = plain(hidden, weight, labels, vocab, z_loss)
    truth.backward()
    losses, dhiddens, dweights = zip(*results, strict=True)
    for loss in losses:
        assert loss.item() == pytest.approx(truth.item(), rel=1e-13)
    torch.testing.assert_close(sum(dhiddens), hidden.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(dweights), weight.grad, rtol=1e-12, atol=1e-12)
    assert scalars == [3 * labels.numel()] * ranks


@pytest.mark.parametrize("block_tokens", [1, 7, 128, 400])
def test_sixteen_bit_gradients_keep_their_length(block_tokens):
    """A factor 1/387 rounded to bfloat16 would shorten every gradient below the head by 0.2 %, and so would a sum of
    the weight's gradients in bfloat16."""
    hidden, weight, labels = case(tokens=387, vocab=50, width=64)
    short, head = (x.detach().to(torch.bfloat16).requires_grad_() for x in (hidden, weight))
    (sum_of_losses(short, head, labels, block_tokens, Vocabulary(50)) / 387).backward()
    exact, truth = (x.detach().double().requires_grad_() for x in (short, head))
    (plain(exact, truth, labels, 50) / 387).backward()
    for got, right in ((short.grad, exact.grad), (head.grad, truth.grad)):
        length = (got.double() * right).sum() / right.square().sum()
        assert length.item() == pytest.approx(1, abs=5e-4)


def test_backward_is_taken_once():
    """The gradients are scaled where they lie: a second backward would find them scaled."""
    hidden, weight, labels = case()
    loss = sum_of_losses(hidden, weight, labels, 4, Vocabulary(VOCAB))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call it again"):
        loss.backward()


def test_without_gradients_none_are_made():
    """Validation costs one matrix product, not three."""
    from torch.utils.flop_counter import FlopCounterMode

    hidden, weight, labels = case()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        sum_of_losses(hidden, weight, labels, 4, Vocabulary(VOCAB))
    assert counter.get_total_flops() == 2 * hidden.numel() * VOCAB


@pytest.mark.parametrize("label", [5, 6, 1000, -1])
def test_a_label_outside_the_vocabulary_makes_an_infinite_loss(label):
    """Not a finite wrong one: the step then ends the run. Rows 5 and 6 are padding."""
    hidden, weight = torch.randn(1, 3, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    labels = torch.tensor([[0, label, NO_TARGET]])
    assert sum_of_losses(hidden, weight, labels, 2, Vocabulary(5)).item() == torch.inf


def test_second_derivatives_are_refused():
    hidden = torch.randn(1, 3, 4, requires_grad=True)
    loss = sum_of_losses(hidden, torch.randn(7, 4), torch.tensor([[0, 1, 2]]), 2, Vocabulary(7))
    (gradient,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
