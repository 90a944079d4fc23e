"""What the probe makes of its ranks' answers, its made-up tokens, and the search for the longest sequence."""

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks import naive
from benchmarks.max_context import LADDER, bisect
from benchmarks.probe import Job, judge
from benchmarks.probe_rank import Synthetic
from conf.compose import compose
from model.blocks import Blocks
from model.mask import Mask
from model.transformer import Transformer
from parallel import ring, schedule

JOB = Job(["model=debug"], 2, 2, None, 60.0, None, "", False)
ENDED = {"exits": [[0, 0], [1, 0]], "timed_out": False}
DIED = {"exits": [[1, -9], [0, -9]], "timed_out": False}


def result(peak, seconds, losses):
    return {"peak_bytes": peak, "built_bytes": 1, "step_seconds": seconds, "losses": losses}


def test_each_rank_has_a_peak_and_a_step_lasts_as_long_as_its_slowest_rank():
    found = [result(7, [1.0, 2.0], [3.5, 3.25]), result(8, [1.5, 0.5], [3.5, 3.25])]
    probe = judge(JOB, ENDED, found, ["", ""])
    assert (probe.peak_bytes, probe.step_seconds, probe.losses) == ([7, 8], [1.5, 2.0], [3.5, 3.25])
    assert probe.failed == ""


@pytest.mark.parametrize(
    ("found", "log"),
    [
        ({"error": "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."}, ""),
        ({"error": "_ArrayMemoryError: Unable to allocate 64 KiB"}, ""),
        ({}, "terminate called after throwing an instance of 'std::bad_alloc'"),
    ],
)
def test_a_rank_beyond_its_budget_is_a_result_and_the_others_are_of_no_interest(found, log):
    limited = dataclasses.replace(JOB, budget_bytes=1 << 20)
    probe = judge(limited, DIED, [{}, found], ["", log])
    assert probe.failed == "memory"
    assert probe.message.startswith("rank 1: ")


def test_without_a_budget_running_out_of_memory_is_an_error():
    with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL: .*can't allocate"):
        judge(JOB, DIED, [{}, {"error": "RuntimeError: can't allocate memory"}], ["", ""])


def test_errors_say_who_failed_and_what_it_printed():
    with pytest.raises(ValueError, match=r"model\.nope"):
        judge(
            JOB,
            {"exits": [[0, 1], [1, -9]], "timed_out": False},
            [{"error": "model.nope", "refused": True}, {}],
            ["", ""],
        )
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 left with exit code 1.*the last line"):
        judge(JOB, {"exits": [[0, 1], [1, -9]], "timed_out": False}, [{}, {}], ["the last line", "another"])
    with pytest.raises(TimeoutError, match=r"(?s)within 60\.0 s.*rank 1: waiting"):
        judge(JOB, {"exits": [[0, -9], [1, -9]], "timed_out": True}, [{}, {}], ["", "waiting"])


def test_made_up_tokens_are_the_same_however_they_are_cut_and_documents_end():
    stream = Synthetic([3, 5], 10, 50)
    tokens, labels, positions = stream.labelled(0, 0, 8)
    assert stream.documents(4) == (3, 5)
    assert positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert [labels[2], labels[7]] == [-100, -100]
    kept = [0, 1, 3, 4, 5, 6]
    assert labels[kept].tolist() == tokens[[index + 1 for index in kept]].tolist()
    assert tokens.min() >= 0 and tokens.max() < 50
    for part, whole in zip(stream.labelled(0, 2, 6), (tokens, labels, positions), strict=True):
        np.testing.assert_array_equal(part, whole[2:6])
    assert stream.labelled(1, 0, 8)[0].tolist() != tokens.tolist()


@pytest.mark.parametrize("longest", [1, 2, 3, 99, 100, 101, 137, 5000])
@pytest.mark.parametrize("guess", [1, 100, 3000])
def test_bisection_finds_the_longest_from_any_guess(longest, guess):
    asked = []
    found, trials = bisect(lambda count: (asked.append(count), count <= longest)[1], guess)
    assert found == longest
    assert trials == len(asked) == len(set(asked)), "asked twice"
    assert {longest, longest + 1} <= set(asked)
    assert min(asked) >= 1


def test_bisection_near_its_guess_asks_little():
    trials = [bisect(lambda count, longest=longest: count <= longest, 1000)[1] for longest in range(980, 1020)]
    assert max(trials) <= 8


def test_bisection_says_where_nothing_fits():
    with pytest.raises(RuntimeError, match="not even one"):
        bisect(lambda count: False, 300)


def test_every_rung_of_the_ladder_computes_the_same():
    """Loss and gradients in float64 are those of the product, from one set of weights."""
    model_config = compose(["model.vocab_size=64"]).model
    plan = {"full": torch.from_numpy(schedule.plan("contiguous", Mask(), [(24,)], 24, 24, 1, 0))}
    tokens, labels, positions = (torch.from_numpy(part)[None] for part in Synthetic([24], 24, 64).labelled(0, 0, 24))

    def attend(q, k, v, table):
        return ring.attend(q, k, v, table, "", "sdpa")[0]

    def gradients(rung):
        torch.manual_seed(0)
        model = Transformer(model_config, attend, Blocks(8, 8)).double()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        if rung.change:
            getattr(naive, rung.change)(model)
        loss = model(tokens, positions, plan, labels)
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    *naives, product = (gradients(rung) for rung in LADDER)
    for values in naives:
        torch.testing.assert_close(values, product, rtol=1e-10, atol=1e-12)
