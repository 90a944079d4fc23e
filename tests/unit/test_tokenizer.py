"""The tokenizer loses nothing, whatever the text, and however it is cut."""

import base64
import io
import pickle
import random

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from data import vocabulary
from data.corpus import LONGEST_SAMPLE, sentences
from data.documents import Document
from data.format import DataError
from data.sentence_piece import SentencePiece
from data.tokenizer import Batch, load, load_any, train
from tests.exactness import whole, whole_equals_chunked
from tests.models import model_of


def code(lines=4000, seed=0):
    """Text like Python's, with indentation, words and numbers."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnop_", k=rng.randint(1, 9))) for _ in range(300)]
    out = []
    for _ in range(lines):
        body = " ".join(rng.choices(words, k=rng.randint(0, 9)))
        out.append(" " * (4 * rng.randint(0, 5)) + f"{body} = {rng.randint(0, 9999)}  # Ω")
    return "\n".join(out)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request):
    return train(sentences(code(), 4096), 580, request.param)


@pytest.fixture(scope="module")
def merges():
    return train(sentences(code(), 4096), 600)


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


LONG = {  # I03, I04, I06, I07, and what has no newline, no blank, or no pair that is in no piece
    "code": code(3000, seed=3),
    "NUL, BOM, CRLF, trailing blanks": "\ufeffa\x00b\r\nc  \r\n\n\n  d\x00\x00" * 2000,
    "names of control pieces": "\u2581 </s> <s> <unk> <doc> <0x0A> <|endoftext|> <|file|>" * 1000,
    "scripts": "\tif x:\n\t\t| a | b |\n\u6f22\u5b57\u0639\u0631\U0001f468\u200d\U0001f469e\u0301\u00a0\ufb01 " * 1500,
    "no blank": "".join(random.Random(4).choices("abcdefghijklmnop", k=300_000)),
    "minified": ";".join(code(3000, seed=5).split()),
    "base64": base64.b64encode(random.Random(6).randbytes(150_000)).decode(),
    "one letter": "a" * 200_000,
    "blanks": " " * 200_000,
    "two letters": "ab" * 80_000,
    "one line of 65,536": "x" * 4_193 + "\n" + "y" * 65_536 + "\n" + "z" * 70_000,
}


@pytest.mark.parametrize("name", LONG)
def test_cut_by_cut_equals_the_whole(merges, name):
    """Ids are those that SentencePiece gives for the text in one piece, and every byte comes back."""
    document = Document(name, lambda: iter([LONG[name]]))
    report = whole_equals_chunked([document], merges, size=20_000)
    assert report.equal and report.cuts >= 2, report
    assert report.chars == len(LONG[name]) and report.tokens == len(whole(merges, LONG[name]))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from([*"ab \n\t=0", "    ", "\u2581", "\x00", "\udc81", "\u03a9"]), st.text())))
def test_any_text_cut_anywhere_equals_the_whole(merges, parts):
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "CUT_CHARS", 5)
        patch.setattr(vocabulary, "FARTHEST", 40)
        batches = list(merges.batches([text], 10))
        ids = [merges.encode_batch(batch) for batch in batches]
    assert (np.concatenate(ids).tolist() if ids else []) == whole(merges, text).tolist()
    assert all(merges.restores(batch, part) for batch, part in zip(batches, ids, strict=True))


def test_best_paths_cut_score_as_well_as_the_whole():
    """Unigram pieces: sums are rounded otherwise in long text, which may choose another of equally good paths."""
    tokenizer = train(sentences(code(), 4096), 580, "unigram")
    documents = [Document(name, lambda text=text: iter([text])) for name, text in LONG.items()]
    report = whole_equals_chunked(documents, tokenizer, size=20_000)
    assert not report.lost and report.worst_score < 1e-4 and not tokenizer.exact


@pytest.mark.parametrize("portion", [1, 7, 997, 70_000])
def test_portions_do_not_matter(tokenizer, portion, monkeypatch):
    monkeypatch.setattr(vocabulary, "PORTION_CHARS", 5000)
    text = code(200, seed=4) + "x" * 70_000 + "\n" + "\u00e9\u2581" * 100
    pieces = [text[start : start + portion] for start in range(0, len(text), portion)]
    batches = list(tokenizer.batches([None, "name\n", *pieces], 3000))
    assert batches == list(tokenizer.batches([None, "name\n" + text], 3000)) and len(batches) > 3
    assert sum(batch.num_chars for batch in batches) == len(text) + 5
    assert sum(batch.num_bytes() for batch in batches) == len(text.encode()) + 5
    ids = np.concatenate([tokenizer.encode_batch(batch) for batch in batches])
    assert ids[0] == tokenizer.file_id and tokenizer.decode(ids) == "name\n" + text
    assert (ids[1:] == tokenizer.encode("name\n" + text)).all()


def test_batches_go_on_as_if_they_began_there(merges):
    """What is left of a document after some batches has the same batches: one may go on from there."""
    text = code(8000, seed=8)
    batches = list(merges.batches([text], 10_000))
    done = sum(batch.num_chars for batch in batches[:2])
    assert [batch.parts for batch in merges.batches([text[done:]], 10_000)] == [batch.parts for batch in batches[2:]]
    assert [batch.start for batch in batches] == [True] + [False] * (len(batches) - 1)
    assert max(batch.num_chars for batch in batches[:-1]) < 10_300


def test_many_small_files_share_a_batch(merges):
    pieces = [None, "a\n", None, None, "b\n"] * 100
    batches = list(merges.batches(pieces, 300))
    assert [part for batch in batches for part in batch.parts] == pieces and len(batches) == 3
    assert list(merges.batches([])) == [] == list(merges.batches([""]))


def test_a_changed_token_is_not_restored(tokenizer):
    """The check of the round trip compares every byte: tokens of all lengths, at all places."""
    rng, lengths = random.Random(7), set()
    for text in [code(60, seed=7) + " " * 50, "\x00\u2581\udc80\ud800 x", "\n" + " " * 24 + "y"]:
        batch = Batch((None, text, None, "end"), True)
        ids = tokenizer.encode_batch(batch)
        assert tokenizer.restores(batch, ids) and not tokenizer.restores(batch, ids[:-1])
        for _ in range(100):
            wrong, place = ids.copy(), rng.randrange(len(ids))
            wrong[place] = rng.randrange(tokenizer.vocab_size)
            right = tokenizer.decode_bytes(wrong) == tokenizer.decode_bytes(ids)
            lengths.add(int(tokenizer.piece_bytes[ids[place]]))
            assert tokenizer.restores(batch, wrong) == right
    assert len(lengths) > 4
    assert tokenizer.restores(Batch((None,), True), np.array([tokenizer.file_id]))


def test_long_tokens_are_compared_to_their_end():
    letters = "".join(map(chr, range(ord("a"), ord("z") + 1)))
    pieces = [letters, letters[:-1] + "_", letters[:17], "!"]
    tokenizer = SentencePiece(model_of([*pieces, "\u2581"]))
    ids = [tokenizer._processor.piece_to_id(piece) for piece in pieces]
    for text in [[0, 3, 1], [1, 0], [2, 2, 0], [3, 2]]:
        batch = Batch(("".join(pieces[number] for number in text),), True)
        assert tokenizer.restores(batch, np.array([ids[number] for number in text], dtype=np.int32))
        swapped = [{0: 1, 1: 0}.get(number, number) for number in text]
        expected = swapped == text
        assert tokenizer.restores(batch, np.array([ids[number] for number in swapped], dtype=np.int32)) == expected


def test_pickled_tokenizers_are_the_same(tokenizer):
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.fingerprint == tokenizer.fingerprint and again.kind == tokenizer.kind and again.lossless
    text = code(50, seed=2)
    assert (again.encode(text) == tokenizer.encode(text)).all()


def test_sentences_for_training_end_before_newlines():
    text = code(500, seed=5) + "z" * 200_000
    parts = list(sentences(text, 4096))
    assert "".join(parts) == text and max(map(len, parts)) <= LONGEST_SAMPLE * 4096
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


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_exactly_the_vocabulary_asked_for(kind):
    first, again, other = (train(sentences(code(seed=seed), 4096), 580, kind) for seed in (0, 0, 9))
    assert first.vocab_size == 580 and first.kind == kind and first.lossless and first.exact == (kind == "bpe")
    assert again.model_bytes == first.model_bytes and again.fingerprint == first.fingerprint != other.fingerprint


def test_long_lines_are_learned_from():
    """C069: characters that occur only in lines of 10,000 bytes are in the vocabulary."""
    lines = ["short line"] * 200 + ["\u03a9 x" * 3000] * 20
    trained = train(sentences("\n".join(lines), 4096), 290)
    assert len(trained.encode("\u03a9")) == 1
    assert train(sentences("ab " * 5000, 4096), 275).vocab_size == 275


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_vocabulary_too_large_names_the_largest(kind):
    with pytest.raises(
        ValueError, match=r"data\.vocab_size=8000 .*use data\.vocab_size=(\d+) model\.vocab_size="
    ) as error:
        train(["a few words, and then no more"], 8000, kind)
    largest = int(str(error.value).split("model.vocab_size=")[1].split()[0])
    assert train(["a few words, and then no more"], largest, kind).vocab_size == largest


def test_vocabulary_too_small_names_the_smallest():
    with pytest.raises(ValueError, match=r"data\.vocab_size=100 .* or more") as error:
        train([code(50)], 100)
    smallest = int(str(error.value).split("model.vocab_size=")[1].split()[0])
    assert train([code(50)], smallest).vocab_size == smallest


def test_load_names_what_is_wrong(tmp_path, tokenizer):
    saved = tokenizer.save(tmp_path)
    assert saved.name == "tokenizer.model"
    assert load(tmp_path).fingerprint == load(saved).fingerprint == tokenizer.fingerprint
    with pytest.raises(DataError, match=r"nothing\.model is missing.*data\.prepare"):
        load(tmp_path / "nothing.model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty.* is missing"):
        load(tmp_path / "empty")
    (tmp_path / "bad.model").write_bytes(b"no model")
    with pytest.raises(DataError, match=r"bad\.model is no tokenizer.*--force"):
        load(tmp_path / "bad.model")


# Models that others trained


def foreign(path, kind="bpe", **settings):
    """A model of SentencePiece's own settings but for `settings`."""
    model = io.BytesIO()
    text = list(sentences(code(), 200))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=model, model_type=kind, vocab_size=500, minloglevel=2, **settings
    )
    path.write_bytes(model.getvalue())
    return path


LLAMA = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}


@pytest.mark.parametrize(
    ("settings", "lossless", "exact"),
    [
        (LLAMA, True, True),
        (LLAMA | {"split_by_whitespace": False}, True, True),
        (LLAMA | {"byte_fallback": False}, False, True),
        ({}, False, False),  # nmt_nfkc, single blanks
    ],
)
def test_an_imported_model_gives_its_own_ids(tmp_path, settings, lossless, exact):
    """The space that such models put before a text comes before the document only, not before each cut."""
    tokenizer = load_any(foreign(tmp_path / "their.model", **settings))
    assert (tokenizer.lossless, tokenizer.exact, tokenizer.file_id) == (lossless, exact, None)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "their.model"))
    blanks = [] if "remove_extra_whitespaces" not in settings else ["  x", "a" * 70_000, " " * 100_000]
    for text in [code(300, seed=6), "Hello", "x\n" * 3000, *blanks]:
        batches = list(tokenizer.batches([text], 5000))
        ids = [tokenizer.encode_batch(batch) for batch in batches]
        assert np.concatenate(ids).tolist() == theirs.encode(text)
        if lossless:
            assert all(tokenizer.restores(batch, part) for batch, part in zip(batches, ids, strict=True))
            assert tokenizer.decode(np.concatenate(ids), start=True) == text


def test_files_without_a_piece_for_them_follow_each_other(tmp_path):
    tokenizer = load_any(foreign(tmp_path / "their.model", **LLAMA))
    batch = Batch((None, "a.py\nx = 1\n", None, "b.py\n"), True)
    ids = tokenizer.encode_batch(batch)
    assert tokenizer.decode(ids, start=True) == "a.py\nx = 1\nb.py\n" and tokenizer.restores(batch, ids)
    late = list(tokenizer.batches([None, None, "", None, "Hello"], 2))  # whose text opens the document all the same
    assert len(late) > 1 and tokenizer.encode_batch(late[-1]).tolist() == tokenizer.encode("Hello").tolist()


def test_the_token_that_ends_documents(tmp_path):
    """The model's own, else a usual name, else the one that data.end_token names: never one that text becomes."""
    (tmp_path / "own.model").write_bytes(model_of(["a", "\u2581"]))
    assert load_any(tmp_path / "own.model").eos_id == 2
    (tmp_path / "usual.model").write_bytes(model_of(["a", "\u2581"], controls=["<|x|>", "<|endoftext|>"]))
    usual = load_any(tmp_path / "usual.model")
    assert usual.eos_id == 2
    usual.save(tmp_path)
    assert load(tmp_path).eos_id == 2 and load_any(tmp_path).fingerprint == usual.fingerprint
    assert load_any(tmp_path / "usual.model", "<|x|>").eos_id == 1
    (tmp_path / "none.model").write_bytes(model_of(["a", "\u2581"], controls=["<|x|>"]))
    with pytest.raises(ValueError, match=r"none\.model data\.end_token=null is no control piece.*<\|x\|>"):
        load_any(tmp_path / "none.model")
    with pytest.raises(ValueError, match=r"data\.end_token=a is no control piece"):
        load_any(tmp_path / "own.model", "a")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"normalization_rule_name": "nmt_nfkc_cf"}, r"nmt_nfkc_cf.*legal are identity"),
        ({"treat_whitespace_as_suffix": True}, "spaces otherwise"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=rf"data\.tokenizer=.*their\.model .*{message}"):
        load_any(foreign(tmp_path / "their.model", **settings))


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.tokenizer=.*gone.*cannot be read.*give bpe, unigram"):
        load_any(tmp_path / "gone")
    (tmp_path / "bad.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"bad\.model is not a SentencePiece model"):
        load_any(tmp_path / "bad.model")
    (tmp_path / "word.model").write_bytes(model_of(["a", "\u2581"], kind="word"))
    with pytest.raises(ValueError, match="words or characters"):
        load_any(tmp_path / "word.model")
    (tmp_path / "bad.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"bad\.json is no tokenizer\.json"):
        load_any(tmp_path / "bad.json")
    (tmp_path / "null.json").write_bytes(b'{"model": {"vocab": {}}, "added_tokens": null}')
    with pytest.raises(ValueError, match=r"null\.json is no tokenizer\.json"):
        load_any(tmp_path / "null.json")
    with pytest.raises(DataError, match=r"null\.json is no tokenizer\.json \(TypeError: .*\): run .*--force"):
        load(tmp_path / "null.json")
    (tmp_path / "empty.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.model is empty"):
        load_any(tmp_path / "empty.model")


def test_bytes_of_text_that_is_no_utf8():
    """As the rule says, whatever way is fastest."""
    for text, data in {
        "caf\udce9 \u00e9": b"caf\xe9 \xc3\xa9",
        "a\ud800\udce9\u00e9": b"a\xed\xa0\x80\xe9\xc3\xa9",
    }.items():
        assert vocabulary.to_bytes(text) == data
