"""Which options may differ from the checkpoint's, and what is said where they do."""

import dataclasses
import json
import re

import pytest

from conf.compose import compose
from conf.schema import TrainConfig, keys
from training.config_change import CLASSES, FORBIDDEN, FREE, WARNED, check, class_of, shown


def saved_of(*overrides):
    """As a manifest has it, through JSON."""
    return json.loads(json.dumps(dataclasses.asdict(compose(list(overrides)))))


def test_every_option_is_in_exactly_one_class():
    """A new option has to be thought about: it is in none until somebody writes it down."""
    sections = [entry.name for entry in dataclasses.fields(TrainConfig) if dataclasses.is_dataclass(entry.type)]
    options = [key for key in keys() if key not in sections]
    listed = [*FREE, *WARNED, *FORBIDDEN]
    whole = [key.removesuffix(".*") for key in listed if key.endswith(".*")]
    assert len(listed) == len(set(listed)) == len(CLASSES)
    for key in options:
        assert (key in listed) + (key.split(".")[0] in whole) == 1, key
        assert class_of(key) is not None
    assert not {key for key in listed if not key.endswith(".*")} - set(options)  # none that is gone
    assert set(whole) <= set(sections)


def test_no_change_and_free_changes_are_silent():
    assert check(saved_of(), compose([])) == []
    config = compose(["parallel.sequence=2", "run.name=other", "timeouts.step_seconds=5", "cluster=h100_ib400"])
    assert [text for text in check(saved_of(), config) if not text.startswith("train.dtype")] == []


def test_warned_changes_name_both_values():
    """Another schedule is a choice, but never a silent one."""
    config = compose(["optimizer.learning_rate=1e-4", "optimizer.schedule=wsd", "optimizer.decay_steps=5"])
    warnings = check(saved_of(), config)
    assert len(warnings) == 3
    assert "optimizer.learning_rate=0.0001, was 0.0003 in the checkpoint: the learning rate jumps" in warnings[1]
    assert any(text.startswith("optimizer.schedule=wsd, was cosine in the checkpoint: ") for text in warnings)


def test_forbidden_changes_are_listed_together_with_the_way_out():
    config = compose(["model.norm_eps=1e-3", "model.rope_theta=500", "optimizer.beta1=0.5"])
    saved = saved_of("model.attention_pattern='full,full_norope'")
    with pytest.raises(ValueError, match="another model") as error:
        check(saved, config)
    text = str(error.value)
    assert "model.norm_eps=0.001, but 1e-05 in the checkpoint" in text
    kept = "'model.attention_pattern=\"full,full_norope\"' model.norm_eps=1e-05 model.rope_theta=10000.0"
    assert f"use {kept}, or start another run with run.name=NAME" in text


def test_another_name_does_not_help_where_a_path_is_given():
    with pytest.raises(ValueError, match="or start another run with run.name=NAME run.resume=auto$"):
        check(saved_of(), compose(["model.rope_theta=500", "run.resume=runs/a/checkpoints/step_00000004"]))


def test_options_of_another_version():
    """An older checkpoint lacks an option, a newer one has more: said where they are set to do something."""
    older = saved_of()
    del older["model"]["z_loss"], older["model"]["qk_norm"], older["timeouts"]
    assert check(older, compose([])) == []
    assert check(older, compose(["model.z_loss=0.1"])) == [
        "model.z_loss=0.1, which the checkpoint's version did not know"
    ]
    newer = saved_of()
    newer["model"] |= {"sinks": 0}
    newer["run"]["colour"] = "red"
    newer["magic"] = {"spell": "x"}
    assert check(newer, compose([])) == ["magic.spell=x in the checkpoint, which this version does not know"]


def test_options_of_a_model_of_another_version_are_refused():
    """What only one side knows makes another function of the same weights."""
    saved = saved_of()
    del saved["model"]["qk_norm"]
    saved["model"]["softcap"] = 30.0
    with pytest.raises(ValueError, match="another model") as error:
        check(saved, compose(["model.qk_norm=true"]))
    assert "model.qk_norm=true, which the checkpoint's version did not know" in str(error.value)
    assert "model.softcap=30.0 in the checkpoint, which this version does not know" in str(error.value)
    assert "use model.qk_norm=false and the version that wrote it, or start" in str(error.value)
    del saved["model"]["softcap"]
    with pytest.raises(ValueError, match="use model.qk_norm=false, or start"):
        check(saved, compose(["model.qk_norm=true"]))
    saved["model"] |= {"qk_norm": False, "softcap": 30.0}
    with pytest.raises(ValueError, match="use the version that wrote it, or start"):
        check(saved, compose([]))


@pytest.mark.parametrize(
    ("before", "after", "layouts", "expected"),
    [
        ([], [], (2, 2), None),
        ([], [], (2, 4), "a step is of 4 sequences, was of 2 in the checkpoint: use train.global_batch_tokens=16384"),
        ([], ["train.global_batch_tokens=16384"], (2, 4), None),
        ([], ["train.micro_batch_size=2"], (2, 1), None),
        (["train.global_batch_tokens=32768"], ["train.global_batch_tokens=32768"], (4, 1), None),
        (
            ["train.global_batch_tokens=32768"],
            [],
            (4, 1),
            "train.global_batch_tokens=8192, was 32768 in the checkpoint: each step is of another number of tokens",
        ),
    ],
)
def test_tokens_of_a_step_where_the_ranks_make_them(before, after, layouts, expected):
    """C084: with other ranks a batch that nobody set changes its size."""
    then, now = ({"data": size} for size in layouts)
    length = "data.sequence_length=8192"
    warnings = check(saved_of(length, *before), compose([length, *after]), then, now)
    assert warnings == [] if expected is None else len(warnings) == 1 and warnings[0].startswith(expected)


def test_values_of_a_file_cannot_draw_on_the_terminal():
    saved = saved_of() | {"data": saved_of()["data"] | {"new": "\x1b[2Jgone" + "x" * 1000}}
    (text,) = check(saved, compose([]))
    assert "\x1b" not in text and len(text) < 200
    assert re.fullmatch("null true 1e-08", " ".join(map(shown, (None, True, 1e-8))))
