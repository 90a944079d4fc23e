"""What a run reads: its sources and shares, what is refused about them, and stages in whole steps."""

from fractions import Fraction

import numpy as np
import pytest

from conf.compose import compose
from data.storage import DataError
from data.writer import ShardWriter
from training.corpus import held_out, legs, open_corpus, open_stream, plan_stages, require_disjoint, sequence_cost
from training.estimate import flops_per_sequence

VOCAB = 50


def write(folder, documents, tokenizer="pieces", vocab_size=VOCAB):
    with ShardWriter(folder, vocab_size, tokenizer) as writer:
        for name, tokens in documents.items():
            writer.write(np.array(tokens))
            writer.end_document(name, num_bytes=len(tokens))


def corpus(folder, name, train, validation, **options):
    write(folder / name / "train", train, **options)
    write(folder / name / "validation", validation, **options)


def config(folder, *overrides):
    return compose(
        [f"data.root={folder}", "data.name=a", f"model.vocab_size={VOCAB}", "data.sequence_length=8", *overrides]
    )


A = {"a1": [*range(10, 20)], "a2": [*range(20, 33)]}, {"a3": [1, 2, 3]}
B = {"b1": [*range(30, 45)]}, {"b2": [4, 5, 6, 7]}


def test_one_corpus(tmp_path):
    corpus(tmp_path, "a", *A)
    found = open_corpus(config(tmp_path))
    [source], [held] = found.training, found.held_out
    assert (source.name, source.share, source.tokens.num_tokens, held.tokens.num_tokens) == ("a", 1, 23, 3)
    assert set(found.fingerprints) == {"training data a", "held-out data a"}
    require_disjoint(found)
    [(name, sequences)] = [(each.name, parts) for each, parts in held_out(config(tmp_path), found)]
    assert (name, sequences.num_sequences, sequences.documents(0)) == ("a", 1, (3,))
    for most, found_sequences in {0: 2, 1: 1, 5: 2}.items():
        made = config(tmp_path, "data.sequence_length=2", f"validation.sequences={most}")
        [(_, sequences)] = held_out(made, found)
        assert sequences.num_sequences == found_sequences and sequences.documents(found_sequences) == ()


def test_a_mixture_has_its_shares(tmp_path):
    corpus(tmp_path, "a", *A)
    corpus(tmp_path, "b", *B)
    mixed = config(tmp_path, "data.mixture='a:0.25,b:3/4'")
    found = open_corpus(mixed)
    assert [(source.name, source.share) for source in found.training] == [("a", Fraction(1, 4)), ("b", Fraction(3, 4))]
    sequences = open_stream(mixed, found).stage(0)
    names = [sequences.stretches(n)[0].source for n in range(400)]
    assert names.count("a") == 100 and names[:200].count("a") == 50


def test_tokens_that_are_there_already(tmp_path):
    corpus(tmp_path, "x", *A)
    found = open_corpus(
        config(
            tmp_path, "data=tokens", f"data.path={tmp_path}/x/train", f"data.validation_path={tmp_path}/x/validation"
        )
    )
    assert found.training[0].tokens.num_tokens == 23 and found.held_out[0].tokens.num_tokens == 3
    with pytest.raises(ValueError, match=r"data\.source=tokens needs data\.validation_path"):
        open_corpus(config(tmp_path, "data=tokens", f"data.path={tmp_path}/x/train"))


def test_what_is_missing_or_other_is_named(tmp_path):
    """C068."""
    with pytest.raises(DataError, match=r"a/train.*\(data\.name=a\)"):
        open_corpus(config(tmp_path))
    corpus(tmp_path, "a", *A)
    corpus(tmp_path, "other", *B, tokenizer="others")
    with pytest.raises(ValueError, match="made with tokenizer others.*data.tokenizer=PATH"):
        open_corpus(config(tmp_path, "data.mixture='a:0.5,other:0.5'"))
    with pytest.raises(ValueError, match="model.vocab_size=49"):
        open_corpus(config(tmp_path, "model.vocab_size=49"))
    corpus(tmp_path, "none", A[0], {})
    with pytest.raises(DataError, match="none/validation has no documents"):
        open_corpus(config(tmp_path, "data.name=none"))


def test_the_same_tokens_on_both_sides_are_refused(tmp_path):
    """Also where they have no digests of their text."""
    path = tmp_path / "tokens"
    write(path, A[0])
    (path / "documents.npy").rename(tmp_path / "elsewhere")
    pair = f"data.path={path}/tokens", f"data.validation_path={path}/tokens"
    with pytest.raises(ValueError, match="tokens is held out and trained on"):
        require_disjoint(open_corpus(config(tmp_path, "data=tokens", *pair)))


def test_held_out_documents_are_not_trained_on(tmp_path):
    """By content, whatever their names, in whichever corpus of the mixture."""
    corpus(tmp_path, "a", *A)
    corpus(tmp_path, "b", {"b1": [*range(30, 45)], "again": [1, 2, 3]}, B[1])
    require_disjoint(open_corpus(config(tmp_path, "data.name=b")))
    with pytest.raises(
        ValueError, match=r"document 'a3', held out in .*a/validation, is trained on in .*b/train as 'again'"
    ):
        require_disjoint(open_corpus(config(tmp_path, "data.mixture='a:0.5,b:0.5'")))


STAGES = "context=[{tokens:64,sequence_length:8},{tokens:96,sequence_length:16,rope_theta:1e6},{sequence_length:32}]"


def steps(found):
    return [(leg.number, leg.step, leg.sample, leg.steps) for leg in found]


def test_stages_in_sequences(tmp_path):
    planned = plan_stages(config(tmp_path, STAGES))
    assert [(stage.sequence_length, stage.num_sequences) for stage in planned] == [(8, 8), (16, 6), (32, None)]
    assert planned[0].label == planned[2].label != planned[1].label
    assert [stage.num_sequences for stage in plan_stages(config(tmp_path))] == [None]
    with pytest.raises(ValueError, match=r"context\.0\.tokens=60 is not .* sequences of 8 tokens: use 56 or 64"):
        plan_stages(config(tmp_path, "context=[{tokens:60,sequence_length:8}]"))


def test_legs_of_a_run(tmp_path):
    """From where it stands to train.steps, whatever the batch was before."""
    whole = config(tmp_path, STAGES, "train.global_batch_tokens=32", "train.steps=9")
    assert steps(legs(whole, 1)) == [(0, 0, 0, 2), (1, 2, 0, 3), (2, 5, 0, 4)]
    assert steps(legs(whole, 1, step=3, stage=1, sample=2)) == [(1, 3, 2, 2), (2, 5, 0, 4)]
    assert steps(legs(whole, 1, step=2, stage=0, sample=8)) == [(1, 2, 0, 3), (2, 5, 0, 4)]
    assert steps(legs(whole, 1, 2, 0, 8, owing=True)) == [(0, 2, 8, 0), (1, 2, 0, 3), (2, 5, 0, 4)]
    # A smaller batch came before: 7 steps of 8 tokens, and one of them is left.
    small = config(tmp_path, STAGES, "train.global_batch_tokens=16", "train.steps=20", "parallel.sequence=1")
    assert steps(legs(config(tmp_path, STAGES, "train.steps=9"), 1, step=7, sample=7)) == [(0, 7, 7, 1), (1, 8, 0, 1)]
    with pytest.raises(ValueError, match="stage 2 of context, sequences of 32: train.global_batch_tokens=16"):
        legs(small, 1)
    assert steps(legs(config(tmp_path), 1, step=90)) == [(0, 90, 0, 10)]
    assert legs(config(tmp_path), 1, step=100) == []


def test_stages_that_are_not_reached_may_be_any(tmp_path):
    """One stops at a border to go on with other ranks: what lies beyond, or before, need not fit these."""
    stages = config(tmp_path, STAGES, "train.global_batch_tokens=16", "train.steps=10")
    assert steps(legs(stages, 1)) == [(0, 0, 0, 4), (1, 4, 0, 6)]
    assert steps(legs(config(tmp_path, STAGES, "train.steps=12"), 3, step=10, stage=2)) == [(2, 10, 0, 2)]


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ((STAGES, "train.global_batch_tokens=48"), {}, r"\.0\.tokens=64 is not .* steps of 48 tokens: use 48 or 96"),
        (
            (STAGES, "train.global_batch_tokens=48"),
            {"step": 1, "sample": 1},
            r"\.0\.tokens=64; 8 of them are done, the rest is not .* of 48 tokens: use 56 or 104",
        ),
        ((STAGES, "train.global_batch_tokens=20"), {}, "stage 0 of context, sequences of 8: .*=20 is not a multiple"),
        (
            ("context=[{tokens:64,sequence_length:8}]",),
            {},
            r"after 8 steps, before train\.steps=100: use train.steps=8",
        ),
    ],
)
def test_stages_that_cannot_be(tmp_path, overrides, options, message):
    with pytest.raises(ValueError, match=message):
        legs(config(tmp_path, *overrides), 1, **options)


def test_cost_of_a_sequence_is_its_flops(tmp_path):
    made = config(tmp_path)
    cost = sequence_cost(made)
    assert cost((5, 3)) == flops_per_sequence(made.model, [5, 3], 8)[0] < cost((8,))
    assert sequence_cost(config(tmp_path, "data.balance=false")) is None
