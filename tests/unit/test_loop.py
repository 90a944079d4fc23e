"""A step's loss is a mean over its tokens, however they lie in micro-batches and on ranks."""

import pytest
import torch
from torch import nn

from conf.compose import compose
from data.loader import Batch
from training.loop import accumulate


class Sums(nn.Module):
    """Its loss is a weight of 1 times the batch's tokens, which stand for the sum of their losses."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, tokens, positions, plan, labels):
        return self.weight * tokens.sum()

    def set_is_last_backward(self, last):
        pass

    def set_requires_gradient_sync(self, sync):
        pass


def batch(loss: float, tokens: int) -> Batch:
    part = torch.tensor([[loss]], dtype=torch.float64)
    return Batch(part, torch.full((1, 1), -100), torch.zeros(1, 1, dtype=torch.int64), {}, tokens, [(1,)])


@pytest.mark.parametrize(
    ("ranks", "mean"),
    [
        ([[(2, 1), (90, 9)]], 9.2),  # not 6, the mean of means
        ([[(2, 1)], [(90, 9)]], 9.2),
        ([[(12, 4)], [(0, 0)]], 3.0),
        ([[(12, 4), (0, 0)]], 3.0),
    ],
)
def test_every_token_weighs_the_same(ranks, mean):
    """C036, C037, C039, I15: sums of losses and gradients over ranks, divided by all tokens of the step."""
    config, cpu = compose([]), torch.device("cpu")
    tokens = float(sum(count for parts in ranks for _, count in parts))
    models = [Sums() for _ in ranks]
    losses = [
        accumulate(model, [batch(*part) for part in parts], tokens, config, cpu)
        for model, parts in zip(models, ranks, strict=True)
    ]
    assert float(sum(losses)) == pytest.approx(mean, rel=1e-15)
    assert sum(float(model.weight.grad) for model in models) == pytest.approx(mean, rel=1e-15)
