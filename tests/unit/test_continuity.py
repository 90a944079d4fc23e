"""What is said of the first losses after a resume."""

import math
import random

import pytest

from training.continuity import Continuity


def recorded(first, losses):
    return [{"step": first + number, "loss": loss} for number, loss in enumerate(losses)]


HISTORY = recorded(1, [5.0 - 0.01 * step + 0.02 * (-1) ** step for step in range(40)])  # falls, and sways by 0.05
BEFORE = recorded(41, [4.6, 4.59, 4.61])


def said(continuity, losses, first=41):
    return [text for row in recorded(first, losses) if (text := continuity.compare(row))]


def test_equal_losses_are_one_line():
    """What was recorded before is what comes again."""
    assert said(Continuity(BEFORE, HISTORY, "float64"), [4.6, 4.59, 4.61, 4.6, 4.6]) == [
        "continues as recorded (3 steps compared, largest difference 0 %)"
    ]
    many = recorded(41, [4.0] * 100)
    (text,) = said(Continuity(many, HISTORY, "float32"), [4.0] * 100)
    assert "10 steps compared" in text
    (text,) = said(Continuity(BEFORE[:1], [], "float32"), [4.6, 4.5])
    assert "1 step compared" in text


@pytest.mark.parametrize(
    ("dtype", "rounds", "drifts"), [("float64", 1e-10, 1e-8), ("float32", 5e-5, 2e-4), ("bfloat16", 4e-3, 1.3e-2)]
)
def test_what_a_dtype_rounds_is_no_drift(dtype, rounds, drifts):
    near, far = ([row["loss"] * (1 + share) for row in BEFORE] for share in (rounds, drifts))
    (text,) = said(Continuity(BEFORE, HISTORY, dtype), near)
    assert text.startswith("continues as recorded (3 steps compared, largest difference ")
    assert text.endswith(f" %, within what {dtype} rounds)")
    texts = said(Continuity(BEFORE, HISTORY, dtype), far)
    assert texts[0].startswith("warning: loss of step 41 is ") and f"more than {dtype} rounds" in texts[0]
    assert not any("continues" in text for text in texts)


def test_the_first_drift_and_the_worst():
    first, worst = said(Continuity(BEFORE, HISTORY, "float32"), [4.6, 4.65, 4.8])
    assert first.startswith("warning: loss of step 42 is 4.65, before the resume it was 4.59 (1.3 % apart), more than ")
    assert worst == "warning: loss of step 43 is 4.8, before the resume it was 4.61 (4.1 % apart): the most of 3 steps"
    (only,) = said(Continuity(BEFORE, HISTORY, "float32"), [4.6, 4.59, 4.65])
    assert "step 43" in only


def test_a_loss_that_was_no_number_comes_again_as_none():
    before = recorded(41, [4.6, None])
    assert "continues" in said(Continuity(before, HISTORY, "float32"), [4.6, float("nan")])[0]
    first, *_ = said(Continuity(before, HISTORY, "float32"), [4.6, 4.5])
    assert "step 42 is 4.5, before the resume it was no number, more" in first


def test_of_a_step_recorded_twice_the_last_counts():
    assert "continues" in said(Continuity([*recorded(41, [9.9]), *recorded(41, [4.6])], HISTORY, "float32"), [4.6])[0]


def test_what_was_changed_on_purpose_is_the_reason():
    warnings = [
        "train.steps=160, was 80 in the checkpoint: rates differ",
        "validation.sequences=4, was 2 in the checkpoint: losses are of others",
    ]
    first, worst = said(Continuity(BEFORE, HISTORY, "float32", warnings), [4.6, 4.65, 4.8])
    assert first.startswith("loss of step 42 is 4.65, before") and first.endswith(", as train.steps was changed")
    assert "warning" not in worst and "what they were" not in first
    (jump,) = said(Continuity([], HISTORY, "float32", warnings), [9.0] * 5)
    assert "warning" not in jump and jump.endswith(", as train.steps was changed")
    both = ["optimizer.beta1=0.8, was 0.9", "optimizer.beta2=0.8, was 0.9", "a step is of 8 sequences: use X"]
    (text,) = said(Continuity(BEFORE[:1], [], "float32", both), [5.0])
    assert text.endswith(", as optimizer.beta1 and optimizer.beta2 were changed; a step is of 8 sequences")
    assert said(Continuity(BEFORE[:1], [], "float32", warnings[1:]), [5.0])[0].startswith("warning: ")


def test_steps_that_nobody_recorded():
    """What was not restored shows as a jump, where there is nothing to compare with."""
    assert said(Continuity([], HISTORY, "float32"), [4.6, 4.65, 4.55, 4.6, 4.6, 9.0, 9.0, 9.0]) == []
    assert said(Continuity([], HISTORY, "float32"), [9.0, 4.65, 9.0, 4.6, 4.6]) == []  # spikes
    (text,) = said(Continuity([], HISTORY, "float32"), [4.6, 4.6, 6.6, 6.7, 6.8])
    assert text.startswith("warning: losses of steps 41-45 have the median 6.6, those before the resume 4.6")
    assert "median no number" in said(Continuity([], HISTORY, "float32"), [None] * 5)[0]


def test_nothing_is_said_where_too_little_is_known():
    assert said(Continuity([], HISTORY[:9], "float32"), [50.0] * 5) == []
    assert said(Continuity([], [], "float32"), [50.0, None] * 3) == []
    assert said(Continuity([], HISTORY, "float32"), [50.0] * 4) == []


def test_constant_losses_may_round():
    steady = recorded(1, [2.0] * 40)
    assert said(Continuity([], steady, "float32"), [2.00001] * 5) == []
    assert len(said(Continuity([], steady, "float32"), [2.5] * 5)) == 1


# Of the laptop run: a spike in step 17.
LAPTOP = [
    *(9.211, 8.945, 8.852, 8.669, 8.455, 8.193, 7.936, 7.329, 6.827, 6.443, 6.12, 6.878, 7.176, 7.104, 7.405, 7.48),
    *(9.1, 7.442, 6.993, 6.618, 6.608, 6.667, 6.518, 7.016, 6.676, 6.906, 7.349, 6.737, 6.281, 6.702, 7.635, 7.585),
    *(7.002, 6.748, 6.914, 6.308, 6.206, 6.753, 6.85, 6.273, 6.761, 6.276, 6.449, 6.373, 6.682, 6.198, 6.67, 6.087),
]


def curve(kind, seed, steps=400):
    """Losses that fall from 9 to 3.7, with noise of 0.1, and what `kind` adds."""
    deal = random.Random(seed)
    spike, offset = deal.randrange(5, 40), deal.randrange(60)
    documents = [deal.gauss(0, 0.3) for _ in range(steps // 60 + 2)]
    losses = []
    for step in range(1, steps + 1):
        loss = 3 + 6 * step**-0.35 + deal.gauss(0, 0.1)
        if kind == "warm-up spike":
            loss += 2 * math.exp(-abs(step - spike) / (4 if step > spike else 3))
        if kind == "heavy tail" and deal.random() < 0.01:
            loss += 0.5 + 2 * abs(deal.gauss(0, 1))
        if kind == "long documents":  # of 60 steps each, one after the other
            loss += documents[(step + offset) // 60]
        losses.append(loss)
    return losses


@pytest.mark.parametrize(
    ("kind", "curves", "missed"),
    [
        ("noise", 4, 0.03),
        ("warm-up spike", 8, 0.05),
        ("heavy tail", 8, 0.03),
        ("long documents", 16, 0.06),
        ("laptop", 1, None),
    ],
)
def test_alarms(kind, curves, missed):
    """Wherever a run is resumed, false ones are rare; weights that were lost, and losses 30 % higher, are told."""
    alarms = high = anew = places = 0
    for losses in [LAPTOP] if kind == "laptop" else (curve(kind, seed) for seed in range(curves)):
        for at in range(10, len(losses) - 5, 3 if curves > 1 else 1):
            history, new = recorded(1, losses[max(0, at - 50) : at]), losses[at : at + 5]
            places += 1
            alarms += bool(said(Continuity([], history, "float32"), new))
            high += bool(said(Continuity([], history, "float32"), [1.3 * loss for loss in new]))
            anew += bool(said(Continuity([], history, "float32"), losses[:5]))
    assert alarms < 0.005 * places
    if missed is not None:
        assert high >= (1 - missed) * places and anew >= (1 - missed) * places


def test_small_losses_that_vary_by_half():
    """The first ten steps of a run have shown little of how losses vary."""
    deal, alarms = random.Random(0), 0
    for _ in range(400):
        losses = [max(0.0, deal.gauss(1.0, 0.3)) for _ in range(15)]
        alarms += bool(said(Continuity([], recorded(1, losses[:10]), "float32"), losses[10:]))
    assert alarms < 0.005 * 400
