"""One rank of many, alone on fake tensors: what it holds is what `training.memory` says, part by part."""

import pytest
import torch
import torch.distributed as dist

from conf.compose import compose
from training import rehearse
from training.rehearse import parse

COMMON = ["model=1b", "cluster=h100_ib400", "data.vocab_size=32768", "model.num_layers=3"]
TOLERANCE = 1e-3  # left out: norms' scales, labels' masks, and other numbers of one a token
CASES = {
    "ring": "8:3 data.sequence_length=128K parallel.sequence=8",
    "all is kept": "8:3 data.sequence_length=128K parallel.sequence=8 train.recompute=none model.qk_norm=true",
    "inputs are kept": "8:3 data.sequence_length=128K parallel.sequence=8 train.recompute=full",
    "head of its own": "8:3 data.sequence_length=128K parallel.sequence=8 model.tie_embeddings=false",
    "tensor": "32:9 data.sequence_length=256K parallel.sequence=8 parallel.tensor=4",
    "tensor, activations whole": "32:9 data.sequence_length=256K parallel.sequence=8 parallel.tensor=4 "
    "parallel.tensor_shards_activations=false",
    "ulysses": "32:3 data.sequence_length=256K parallel.sequence=32 parallel.ulysses=4 train.recompute=none",
    "more ulysses than heads": "32:3 data.sequence_length=256K parallel.sequence=32 parallel.ulysses=16",
    "micro-batches": "8:3 data.sequence_length=64K parallel.sequence=8 train.global_batch_tokens=256K",
    "micro-batches, head": "8:3 data.sequence_length=64K parallel.sequence=8 train.global_batch_tokens=256K "
    "model.tie_embeddings=false",
    "micro-batches, summed each": "8:3 data.sequence_length=64K parallel.sequence=8 train.global_batch_tokens=256K "
    "parallel.reduce_gradients=each",
    "two sequences": "8:5 data.sequence_length=64K parallel.sequence=8 train.micro_batch_size=2",
    "replicas": "32:5 data.sequence_length=64K parallel.sequence=8 parallel.shard=8",
    "float32": "8:3 data.sequence_length=128K parallel.sequence=8 train.dtype=float32 parallel.kernel=reference "
    "cluster=laptop",
    "one rank": "1:0 data.sequence_length=16K",
    "direct": "8:7 data.sequence_length=128K parallel.sequence=8 parallel.layout=contiguous parallel.route=direct",
    "relay": "8:7 data.sequence_length=128K parallel.sequence=8 parallel.layout=zigzag parallel.route=relay",
    "gather": "8:2 data.sequence_length=128K parallel.sequence=8 parallel.layout=zigzag parallel.route=gather",
    "windows": "8:3 data.sequence_length=128K parallel.sequence=8 model.attention_pattern='window,full' "
    "model.attention_window=4096",
    "weights are most": "8:3 data.sequence_length=8K parallel.sequence=8",
    "attention is most": "16:3 data.sequence_length=256K parallel.sequence=16 parallel.ulysses=2 model.ffn_dim=64",
    "offload": "8:3 data.sequence_length=128K parallel.sequence=8 model.num_layers=6 train.offload=true",
    "offload of all": "8:3 data.sequence_length=128K parallel.sequence=8 model.num_layers=6 train.offload=true "
    "train.recompute=none",
}


def rehearsed(text: str, **options):
    ranks, *overrides = text.split(maxsplit=1)
    more = overrides[0].split() if overrides else []
    return rehearse.rehearse(compose([*COMMON, f"run.rehearse={ranks}", *more]), **options)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_what_was_planned(case):
    result = rehearsed(CASES[case])
    assert result.plan.peak_bytes == pytest.approx(result.peak_bytes, rel=TOLERANCE), result.at_peak[:8]
    assert sum(size for size, _ in result.at_peak) == result.peak_bytes
    assert not dist.is_initialized()


def test_the_pool_of_the_ring_is_seen():
    """Twice the pool moves the peak by as much: it lies outside the operation that a tracker cannot look into."""
    once = rehearsed(CASES["relay"])
    twice = rehearsed(CASES["relay"], pool_times=2)
    assert once.plan.causes["ring buffers"] > 1e8
    assert twice.peak_bytes - once.peak_bytes == once.plan.causes["ring buffers"]


def test_nothing_stays_from_step_to_step():
    moments = rehearsed(CASES["offload"]).moments
    assert moments["after the update"] == moments["before"]


def test_the_report_says_peak_and_plan():
    config = compose([*COMMON, "run.rehearse=8:3", "data.sequence_length=8K", "parallel.sequence=8"])
    text = rehearse.report(config)
    assert "rank 3 of 8 = data 1 × sequence 8 × tensor 1" in text and "planned" in text and "alive at the peak" in text


@pytest.mark.parametrize("text", ["8", "8:8", "a:1", "8:-1", "0:0", "8:", ":1"])
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match="run.rehearse=.*256:17"):
        parse(text)


def test_impossible_ranks_are_refused_as_the_run_would():
    with pytest.raises(ValueError, match="does not make 9 ranks"):
        rehearsed("9:3 data.sequence_length=8K parallel.sequence=8")
    assert not dist.is_initialized()
    assert torch.empty(1).numel() == 1  # no mode is left behind
