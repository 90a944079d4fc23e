"""The tokenizer loses nothing, whatever the text, and however it is cut."""

import random

import numpy as np
import pytest

from data import tokenizer as tokenizers
from data.format import DataError
from data.tokenizer import LONGEST_CUT, Tokenizer, cuts, load, train


def code(lines=4000, seed=0):
    """Text like Python's, with indentation, words and numbers."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnop_", k=rng.randint(1, 9))) for _ in range(300)]
    out = []
    for _ in range(lines):
        body = " ".join(rng.choices(words, k=rng.randint(0, 9)))
        out.append(" " * (4 * rng.randint(0, 5)) + f"{body} = {rng.randint(0, 9999)}  # Ω")
    return "\n".join(out)


@pytest.fixture(scope="module")
def model():
    return train(cuts([code()], 4096), 600)


@pytest.fixture(scope="module")
def tokenizer(model):
    return Tokenizer(model)


HARD = [
    "a\nb", "\n\n\n", "  a  b ", "\t", "\u00a0", "\ufb01", "\uff12", "\u200b", "e\u0301", "a\r\nb\rc", "",
    " ", "\x00", "\u2581", "a\u2581b\x00\x00c", "\ufeffbom", "😀 Ω 漢字", "\u2028\u2029\x85\x0b\x0c",
    "<unk><s></s>", "\n    \n        x", "\n" + " " * 50 + "y", "\udc80\udcff", "<|file|>",
    "a" * 5000, " " * 5000,
]  # fmt: skip


@pytest.mark.parametrize("text", HARD)
def test_text_survives(tokenizer, text):
    """C070: whitespace, ligatures, full-width and combining characters, SentencePiece's own sign."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_any_bytes_survive(tokenizer):
    rng = random.Random(1)
    for _ in range(300):
        data = bytes(rng.choices([*range(256), 10, 32, 0xE2, 0x96, 0x81], k=rng.randint(0, 200)))
        assert tokenizer.decode_bytes(tokenizer.encode(data)) == data


def test_adversarial_strings_survive(tokenizer):
    rng = random.Random(2)
    alphabet = [
        *"ab \n\t\r<>|/",
        "\u2581",
        "\x00",
        "\udc81",
        "é",
        "\u0301",
        "😀",
        "<|file|>",
        "</s>",
        "<0x0A>",
        "\n    ",
    ]
    for _ in range(500):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 40)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_lone_surrogates_of_json_become_three_bytes(tokenizer):
    assert tokenizer.decode_bytes(tokenizer.encode("a\ud800b")) == b"a\xed\xa0\x80b"


def test_text_never_becomes_a_control_piece(tokenizer):
    """C072: the names of special tokens in a document stay text."""
    text = "see </s> and <s> and <doc> and <unk> and <0x0A> and <|file|> and <pad>"
    ids = tokenizer.encode(text)
    assert not set(ids.tolist()) & {0, 1, 2, 3, tokenizer.file_id, tokenizer.eos_id}
    assert tokenizer.decode(ids) == text


def test_cut_by_cut_equals_the_whole(tokenizer):
    """Chunked ids are those that SentencePiece gives for the text in one piece."""
    text = code(3000, seed=3)
    whole = tokenizer._processor.encode(text)
    assert tokenizer.encode(text).tolist() == whole
    assert len(list(cuts([text]))) > 50


@pytest.mark.parametrize("portion", [1, 7, 997, 70_000])
def test_portions_do_not_matter(tokenizer, portion, monkeypatch):
    monkeypatch.setattr(tokenizers, "BATCH_CHARS", 5000)
    text = code(200, seed=4) + "x" * (LONGEST_CUT + 10) + "\n" + "é\u2581" * 100
    pieces = [text[start : start + portion] for start in range(0, len(text), portion)]
    batches = list(tokenizer.encode_pieces([None, "name\n", *pieces]))
    assert sum(size for _, size in batches) == len(text) + 5
    ids = np.concatenate([ids for ids, _ in batches])
    assert ids[0] == tokenizer.file_id and tokenizer.decode(ids) == "name\n" + text
    assert (ids == np.concatenate([[tokenizer.file_id], tokenizer.encode("name\n" + text)])).all()


def test_cuts_end_before_newlines_and_never_grow(tokenizer):
    text = code(500, seed=5) + "z" * 200_000
    parts = list(cuts([text]))
    assert "".join(parts) == text and max(map(len, parts)) <= LONGEST_CUT
    assert all(part.startswith("\n") for part in parts[1:-4])


def test_indent_symbols_are_alive(tokenizer):
    """A newline and its indentation are one piece, which raw spaces in the symbol would silently prevent."""
    assert len(tokenizer.encode("\n        ")) == 1
    assert tokenizer.encode("\n    x").tolist()[0] == tokenizer._processor.piece_to_id("\n\u2581\u2581\u2581\u2581")


def test_bytes_of_pieces_add_up(tokenizer):
    for text in [*HARD, code(100, seed=6)]:
        ids = tokenizer.encode(text)
        assert tokenizer.piece_bytes[ids].sum() == len(text.encode("utf-8", "surrogateescape"))
    assert tokenizer.piece_bytes[[tokenizer.eos_id, tokenizer.file_id]].tolist() == [0, 0]


def test_exactly_the_vocabulary_asked_for(model, tokenizer):
    assert tokenizer.vocab_size == 600
    assert Tokenizer(train(cuts([code()], 4096), 600)).fingerprint == tokenizer.fingerprint
    assert Tokenizer(train(cuts([code(seed=9)], 4096), 600)).fingerprint != tokenizer.fingerprint


def test_long_lines_are_learned_from():
    """C069: characters that occur only in lines of 10,000 bytes are in the vocabulary."""
    lines = ["short line"] * 200 + ["\u03a9 x" * 3000] * 20
    trained = Tokenizer(train(cuts(["\n".join(lines)], 4096), 290))
    assert len(trained.encode("\u03a9")) == 1
    Tokenizer(train(cuts(["ab " * 5000], 4096), 275))


def test_vocabulary_too_large_names_the_largest():
    with pytest.raises(
        ValueError, match=r"data\.vocab_size=8000 .*use data\.vocab_size=(\d+) model\.vocab_size="
    ) as error:
        train(["a few words, and then no more"], 8000)
    largest = int(str(error.value).split("model.vocab_size=")[1].split()[0])
    assert Tokenizer(train(["a few words, and then no more"], largest)).vocab_size == largest


def test_vocabulary_too_small_names_the_smallest():
    with pytest.raises(ValueError, match=r"data\.vocab_size=100 .* or more") as error:
        train([code(50)], 100)
    smallest = int(str(error.value).split("model.vocab_size=")[1].split()[0])
    assert Tokenizer(train([code(50)], smallest)).vocab_size == smallest


def test_load_names_what_is_wrong(tmp_path, model):
    (tmp_path / "tokenizer.model").write_bytes(model)
    assert load(tmp_path / "tokenizer.model").vocab_size == 600
    with pytest.raises(DataError, match=r"nothing\.model is missing.*data\.prepare"):
        load(tmp_path / "nothing.model")
    (tmp_path / "bad.model").write_bytes(b"no model")
    with pytest.raises(DataError, match=r"bad\.model is not a SentencePiece model"):
        load(tmp_path / "bad.model")
