"""Cut text encodes to the ids that the text in one piece gives, whatever the vocabulary and the text.

The truth is SentencePiece, given the whole text. Vocabularies are random here, and the windows small, so that
strings of a few hundred characters take every way through cuts.py.
"""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import cuts, vocabulary
from data.cuts import PairCutter, RuleCutter
from data.sentence_piece import SPACE, SentencePiece
from tests.models import model_of


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(cuts, "NEAR", 8)
    monkeypatch.setattr(cuts, "FARTHEST", 24)
    monkeypatch.setattr(vocabulary, "FARTHEST", 24)
    monkeypatch.setattr(cuts, "AHEAD", (4, 8, 12))
    monkeypatch.setattr(vocabulary, "CUT_CHARS", 10)


def vocabulary_of(seed, alphabet):
    """A model of random pieces in random order: some that no merge reaches, runs, symbols of many letters."""
    rng = random.Random(seed)
    letters = [letter.replace(" ", SPACE) for letter in alphabet]
    longer = sorted({"".join(rng.choices(letters, k=rng.randint(2, 6))) for _ in range(rng.randint(5, 60))})
    rng.shuffle(longer)
    symbols = [longer.pop()] if seed % 3 == 0 and len(longer) > 3 else []
    return SentencePiece(model_of([*longer, *sorted({*letters, SPACE})], symbols=symbols, prefix=seed % 5 == 0))


def texts(alphabet):
    runs = st.lists(st.tuples(st.sampled_from(alphabet), st.integers(1, 60)), min_size=1, max_size=6)
    return st.one_of(
        st.text(alphabet, min_size=1, max_size=250),
        st.builds(lambda text, times: text * times, st.text(alphabet, min_size=1, max_size=4), st.integers(1, 100)),
        runs.map(lambda runs: "".join(letter * times for letter, times in runs)),
    )


ALPHABETS = "ab", "abc ", "ab\n"  # without safe pairs for the most part; with blanks; with pieces across newlines
# 24 … 228 are vocabularies in which boundaries often depend on what comes much later.
VOCABULARIES = [
    (alphabet, vocabulary_of(seed, alphabet))
    for seed in (*range(6), 24, 68, 69, 191, 228)
    for alphabet in (ALPHABETS if seed < 6 else ALPHABETS[:1])
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(range(len(VOCABULARIES))), st.data())
def test_cut_text_equals_the_whole(number, data):
    alphabet, tokenizer = VOCABULARIES[number]
    text = data.draw(texts(alphabet))
    ids = [tokenizer.encode_batch(batch) for batch in tokenizer.batches([text], 30)]
    assert np.concatenate(ids).tolist() == tokenizer._opener.encode(text)


def random_texts(times):
    rng = random.Random(0)
    for alphabet, tokenizer in VOCABULARIES:
        for _ in range(times):
            yield tokenizer, "".join(rng.choices(alphabet, k=200))
            yield tokenizer, "".join(rng.choice(alphabet) * rng.randint(1, 40) for _ in range(6))


def wrong_cuts(pairs):
    """How many of the texts come out otherwise than whole, and how many batches there were."""
    wrong = tried = 0
    for tokenizer, text in pairs:
        batches = list(tokenizer.batches([text], 30))
        ids = np.concatenate([tokenizer.encode_batch(batch) for batch in batches])
        wrong += ids.tolist() != tokenizer._opener.encode(text)
        tried += len(batches)
    return wrong, tried


def test_boundaries_are_proved(monkeypatch):
    """Taking any boundary of a window for one of the text is not enough: the proof is what makes it so."""
    wrong, tried = wrong_cuts(random_texts(20))
    assert wrong == 0 and tried > 2000
    monkeypatch.setattr(PairCutter, "_proved", lambda *arguments: True)
    wrong, _ = wrong_cuts(random_texts(20))
    assert wrong > 3


def test_periods_without_a_safe_pair():
    """Boundaries depend on what is far before."""
    texts = [(period * 301)[:size] for period in ("a", "ab", "aab", "abb", "abaab") for size in (24, 25, 47, 100, 301)]
    wrong, tried = wrong_cuts((tokenizer, text) for _, tokenizer in VOCABULARIES for text in texts)
    assert wrong == 0 and tried > 1000


def test_a_symbol_that_the_window_cuts_short():
    """Symbols are longer than what is looked at after a boundary: one that the window ends in looks like merges."""
    pieces = "aaaba aaabba aba aaaab aa bbbba baaa abb aaa bbbbb babaaa baaab ab bbbaa abbbb aab abbabb a b".split()
    tokenizer = SentencePiece(model_of([*pieces, SPACE], symbols=["bababa"]))
    assert wrong_cuts([(tokenizer, "ab" * 56), (tokenizer, "ba" * 60), (tokenizer, "bbabaab" * 30)])[0] == 0


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(range(len(VOCABULARIES))), st.integers(1, 60), st.data())
def test_batches_do_not_depend_on_portions(number, portion, data):
    alphabet, tokenizer = VOCABULARIES[number]
    text = data.draw(texts(alphabet))
    pieces = [text[start : start + portion] for start in range(0, len(text), portion)]
    assert list(tokenizer.batches([*pieces, None, *pieces], 30)) == list(tokenizer.batches([text, None, text], 30))


def test_pairs_that_no_piece_contains_are_safe():
    tokenizer = SentencePiece(model_of(["ab", "bc", SPACE + "a", "a", "b", "c", SPACE]))
    text = "abcab a\u2581c\x00b\nz\ud800a"
    inside = {("a", "b"), ("b", "c"), (" ", "a")}
    expected = [(first, second) not in inside for first, second in zip(text, text[1:], strict=False)]
    assert tokenizer._cutter._safe(text, 1, len(text)).tolist() == expected


def test_unknown_neighbours_stay_together():
    """Without byte pieces, unknown characters that are neighbours become one token: no cut between them."""
    tokenizer = SentencePiece(model_of(["ab", "a", "b", SPACE], carries_bytes=False))
    text = "ab??" * 60 + "?" * 100 + "ba"
    ids = [tokenizer.encode_batch(batch) for batch in tokenizer.batches([text], 30)]
    assert np.concatenate(ids).tolist() == tokenizer._opener.encode(text) and len(ids) > 3
    assert not tokenizer.lossless


def test_rules_find_the_first_place_or_cut_all_the_same(monkeypatch):
    monkeypatch.setattr(RuleCutter, "LONGEST", 50)
    cutter = RuleCutter([r"(?<=\n)(?=x)", r"(?<=y)(?= )"])
    assert cutter.cut("y \nx" * 10, 0, 3) == 3
    assert cutter.cut("y \nx" * 10, 0, 4) == 5
    assert cutter.cut("a" * 60, 0, 10) == 50
    assert cutter.cut("a" * 40, 0, 10) is None
