"""The comparison with the truth fails for mistakes that others have made: each is made here, not by hand."""

import pytest
import torch

from conf.compose import compose
from data.format import open_shard
from data.loader import Loader
from data.stream import finite
from model.blocks import Blocks
from model.kernels import sdpa
from model.mask import Mask
from model.transformer import Transformer
from parallel import ring
from parallel.deal import deal
from parallel.layout import padded_length
from parallel.route import Route
from parallel.schedule import HOP, plan, tile_rows
from tests import oracle
from tests.cases import TOLERANCE, random_inputs, relative_errors
from tests.mutants import DOCUMENTS, LENGTH, LOWS, MUTANTS, RANKS, ROUTES, WINDOW, FilledBuffers, Mutant, replaced
from tests.shards import write_documents
from tests.threads import Network, QueueExchange, on_threads, ring_attention

SPREAD = ("contiguous", "zigzag", "striped", "balanced")  # whatever the documents, ranks need one another


pytestmark = pytest.mark.usefixtures("one_thread")


def compared(layout, route, mutant):
    """Raises AssertionError where the ring's attention is not the truth."""
    inputs = random_inputs(LENGTH, 2, torch.float32)
    want = oracle.dense(*inputs, oracle.visible(DOCUMENTS, LENGTH, WINDOW))
    dealt = deal(layout, DOCUMENTS, LENGTH, RANKS, Mask(WINDOW))
    planned = lambda rank: plan(dealt, mutant.mask, mutant.documents, LENGTH, LENGTH, RANKS, rank, route)  # noqa: E731
    got = ring_attention(
        *(inputs, dealt, DOCUMENTS, WINDOW, RANKS, mutant.kernel),
        exchange=mutant.exchange,
        route=route,
        plans=planned,
        buffers=lambda rank: FilledBuffers(mutant.memory),
    )
    oracle.assert_close(got, want, TOLERANCE[torch.float32])


@pytest.mark.parametrize("layout", SPREAD)
@pytest.mark.parametrize("route", ROUTES)
def test_without_a_mistake_nothing_fails(layout, route):
    """And no mistake can hide: at each hop there is something to see, on every rank where the layout allows it."""
    for memory in (0.0, 0.5):
        compared(layout, ROUTES[route], Mutant(memory=memory))
    hops = [
        set(tile_rows(plan(layout, Mask(WINDOW), DOCUMENTS, LENGTH, LENGTH, RANKS, rank, ROUTES[route]))[:, HOP])
        for rank in range(RANKS)
    ]
    every = {1} if "gather" in route else set(range(RANKS))
    assert set.union(*hops) == every and (layout == "contiguous" or set.intersection(*hops) == every)


def with_source(mistake, monkeypatch):
    if mistake.source is not None:
        owner, name, *_ = mistake.source
        monkeypatch.setattr(owner, name, replaced(*mistake.source))


@pytest.mark.parametrize(("mutant", "route"), [(name, r) for name, m in MUTANTS.items() for r in m.routes])
def test_mutants_are_caught(mutant, route, monkeypatch):
    """The comparison of tests/unit/test_ring.py fails for each mistake, on each route that can make it (C011)."""
    mistake = MUTANTS[mutant]
    with_source(mistake, monkeypatch)
    for layout in SPREAD:
        with pytest.raises(AssertionError, match=mistake.fails):
            compared(layout, ROUTES[route], mistake)


@pytest.mark.parametrize("mutant", LOWS)
def test_bfloat16_accumulators_let_the_error_grow(mutant, monkeypatch):
    """The bound of tests/unit/test_ring.py on bfloat16 inputs fails too, which a tolerance of 1e-2 would not see."""
    mistake, one = LOWS[mutant], relative_errors(1, Route())
    with_source(mistake, monkeypatch)
    for route in mistake.routes:
        many = relative_errors(8, ROUTES[route], kernel=mistake.kernel, exchange=mistake.exchange)
        grown = [b > 1.05 * a + 1e-6 for a, b in zip(one, many, strict=True)]
        assert any(grown), (mutant, route, one, many)


VOCABULARY, STREAMED = 32, 61
MODEL = {
    "model.vocab_size": VOCABULARY,
    "model.model_dim": 32,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.ffn_dim": 48,
    "data.sequence_length": STREAMED,
    "train.global_batch_tokens": 2 * STREAMED,
}


def shifted(labels, tokens):
    """Labels from the tokens of one rank: the next one that it stores."""
    return torch.where(labels == -100, labels, torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], dim=1))


BATCH_MUTANTS = {
    "none": lambda batch: (batch.positions, batch.labels),
    "label shift inside the shard": lambda batch: (batch.positions, shifted(batch.labels, batch.tokens)),
    "rope by local index": lambda batch: (torch.arange(batch.tokens.shape[1]).expand_as(batch.positions), batch.labels),
    "padding has targets": lambda batch: (batch.positions, torch.where(batch.labels == -100, 0, batch.labels)),
}


def loss_over(ranks, layout, stream, mutate):
    """Sum of the tokens' losses of a micro-batch over a ring of threads, from the loader to the model's head."""
    config = compose([f"{key}={value}" for key, value in MODEL.items()]).model
    documents = [stream.documents(n) for n in range(2)]
    padded = padded_length(layout, STREAMED, ranks)
    dealt = deal(layout, documents, padded, ranks)
    network = Network()

    def run(rank):
        table = torch.from_numpy(plan(dealt, Mask(), documents, STREAMED, padded, ranks, rank))
        take = lambda documents: (dealt.chunks(rank), {"full": table})  # noqa: E731
        only = {"micro_batch_size": 2, "accumulation": 1, "data_rank": 0, "data_size": 1, "first_sequence": 0}
        with Loader(stream, take, **only, num_steps=1) as loader:
            ((batch,),) = loader
        here = QueueExchange(network, rank, ranks) if ranks > 1 else ring.Alone()
        torch.manual_seed(0)
        attend = lambda q, k, v, plan: ring.forward(q, k, v, plan, here, sdpa)[0]  # noqa: E731
        model = Transformer(config, attend, Blocks(7, 5)).double()
        positions, labels = mutate(batch)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
            return model(batch.tokens, positions, batch.plan, labels).item()

    return sum(on_threads(run, ranks, network))


@pytest.mark.parametrize("layout", SPREAD)
@pytest.mark.parametrize("mutant", BATCH_MUTANTS)
def test_mistakes_around_the_ring_change_the_loss(mutant, layout, tmp_path):
    """C021, C022: labels are shifted before they are split, and positions are those of the document."""
    rng = torch.Generator().manual_seed(0)
    lengths = (25, 1, 45, 51)
    documents = [torch.randint(VOCABULARY, (n,), generator=rng).tolist() for n in lengths]
    stream = finite(open_shard(write_documents(tmp_path, documents, VOCABULARY)), STREAMED)
    want = loss_over(1, layout, stream, BATCH_MUTANTS["none"])
    got = loss_over(4, layout, stream, BATCH_MUTANTS[mutant])
    assert want > 0 and (abs(got - want) <= 1e-12 * want) == (mutant == "none"), (got, want)
