"""tokenizer.json of Hugging Face: the library's ids, whatever is cut, and no control token from text."""

import json
import pickle
import random
import sys

import numpy as np
import pytest
import tokenizers as library
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from data import imported
from data.tokenizer import load, load_any

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<unk>", "<s>", "</s>"]
END = "<|endoftext|>"


def prose(lines=1500, seed=0):
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 8))) for _ in range(200)]
    out = []
    for _ in range(lines):
        line = " ".join(
            rng.choices([*words, "don't", "12345", "x = f(y);", "\u6f22\u5b57", "\u00e9t\u00e9"], k=rng.randint(0, 12))
        )
        out.append(rng.choice(["", "", "    ", "\t"]) + line + rng.choice(["", "", " ", "."]))
    return "\n".join(out)


def byte_level(split=None, prefix=False):
    built = library.Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split is None)
    pattern = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    built.pre_tokenizer = pre_tokenizers.Sequence([*pattern, level])
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(
        [prose()],
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=[END], show_progress=False),
    )
    return built


def llama_2():
    """Without any pattern: merges over the whole text, with U+2581 for spaces, and bytes."""
    built = library.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    built.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    names = [*SPECIAL, *(f"<0x{value:02X}>" for value in range(256))]
    built.train_from_iterator([prose()], trainers.BpeTrainer(vocab_size=700, special_tokens=names, show_progress=False))
    built.pre_tokenizer = None
    built.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    described = json.loads(built.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in SPECIAL]
    return library.Tokenizer.from_str(json.dumps(described))


def best_paths():
    built = library.Tokenizer(models.Unigram())
    built.pre_tokenizer, built.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=600, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    built.train_from_iterator(prose().split("\n"), trainer)
    return built


KINDS = {
    "gpt2": byte_level,
    "llama3": lambda: byte_level(LLAMA_3),
    "prefixed": lambda: byte_level(prefix=True),
    "llama2": llama_2,
    "unigram": best_paths,
}


@pytest.fixture(scope="module", params=KINDS)
def files(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "tokenizer.json"
    KINDS[request.param]().save(str(path))
    return request.param, path


def test_ids_are_the_librarys_and_text_comes_back(files):
    kind, path = files
    tokenizer, theirs = load_any(path), library.Tokenizer.from_file(str(path))
    assert tokenizer.lossless == (kind in ("gpt2", "llama3", "llama2")) and tokenizer.kind == "huggingface"
    for text in [prose(800, seed=1), "Hello world", "\n\nx", "e" * 20_000, "\u6f22 \u5b57" * 2000, ""]:
        batches = list(tokenizer.batches([text], 4000))
        ids = [tokenizer.encode_batch(batch) for batch in batches]
        assert [index for part in ids for index in part.tolist()] == theirs.encode(text, add_special_tokens=False).ids
        if tokenizer.lossless:
            assert all(tokenizer.restores(batch, part) for batch, part in zip(batches, ids, strict=True))
            assert tokenizer.decode(np.concatenate([[], *ids]), start=True) == text
    assert len(list(tokenizer.batches([prose(8000, seed=1)], 20_000))) > 3


def test_text_never_becomes_a_special_token(files):
    """C072, where the library itself would find them in the text."""
    tokenizer = load_any(files[1])
    special = {tokenizer.eos_id, *(tokenizer._tokenizer.token_to_id(name) for name in SPECIAL[1:])}
    for text in (f"see </s> and <s> and {END} and <0x0A>", "</s>", END, "a</s>b", "<s>"):
        ids = tokenizer.encode(text)
        assert not set(ids.tolist()) & special and len(ids) > 1
        assert tokenizer.decode(ids, start=True) == text or not tokenizer.lossless


def test_merges_that_build_the_name_of_a_special_token(tmp_path):
    """C072: the library gives its id to what merges build, even where it does not look for names."""
    built = library.Tokenizer(models.BPE(unk_token="<unk>"))
    built.pre_tokenizer, built.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    built.train_from_iterator([f"{a}</s>{b} {a}</s>" for a in "abcdefgh" for b in "ijklmn"] + [prose(50)], trainer)
    described = json.loads(built.to_str())
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in described["model"]["merges"]]
    assert "</s>" in map("".join, merges)
    for form in (merges, [" ".join(pair) for pair in merges]):  # as they were written first
        described["model"]["merges"] = form
        (tmp_path / "tokenizer.json").write_text(json.dumps(described))
        tokenizer = load_any(tmp_path)
        for text in ("</s>", "see </s> there", "a</s>b"):
            ids = tokenizer.encode(text)
            assert tokenizer.eos_id not in ids and tokenizer.decode(ids, start=True) == text


def test_what_json_can_hold_beside_unicode(files):
    tokenizer = load_any(files[1])
    ids = tokenizer.encode("a\udc80\ud800\u2581\x00b")
    if tokenizer.lossless:
        assert tokenizer.decode_bytes(ids, start=True) == b"a\x80\xed\xa0\x80\xe2\x96\x81\x00b"
    assert len(ids) and ids.max() < tokenizer.vocab_size


def test_it_is_saved_with_its_end_token(files, tmp_path):
    """A corpus keeps the choice: loading it needs no setting."""
    kind, path = files
    tokenizer = load_any(path, None if kind != "llama2" else "<s>")
    tokenizer.save(tmp_path)
    again = load(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint and again.eos_id == tokenizer.eos_id
    assert pickle.loads(pickle.dumps(again)).eos_id == tokenizer.eos_id
    assert (again.encode(prose(20)) == tokenizer.encode(prose(20))).all()
    with pytest.raises(ValueError, match=r"data\.end_token=<nope> is none of its added tokens: set it to one of <"):
        load_any(path, "<nope>")


def test_rules_that_do_not_hold_are_left_out(tmp_path):
    """A vocabulary with pieces across a newline or a space is not cut there; one that has both is refused."""
    pieces = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz \n")}
    described = json.loads(
        library.Tokenizer(models.BPE(pieces | {"a b": 28, "a ": 29}, [("a", " "), ("a ", "b")])).to_str()
    )
    described["added_tokens"] = [
        {"id": 40, "content": END, "special": False, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
    ]  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(described))
    tokenizer = load_any(path)
    text = "xa b\nxa b\nc" * 500
    ids = [tokenizer.encode_batch(batch) for batch in tokenizer.batches([text], 100)]
    assert np.concatenate(ids).tolist() == library.Tokenizer.from_file(str(path)).encode(text).ids
    assert tokenizer._cutter._rules.pattern == list(imported.RULES)[0]
    described["model"]["vocab"]["\na"] = 30
    path.write_text(json.dumps(described))
    with pytest.raises(ValueError, match="no text can be cut"):
        load_any(path)


def test_a_pattern_that_looks_ahead_fails_the_samples(tmp_path):
    """The last letter of a word is split off where a space follows: cut before the space, the word stays whole."""
    alphabet = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    built = library.Tokenizer(models.BPE(alphabet | {"fo": 256, "foo": 257}, [("f", "o"), ("fo", "o")]))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(r"[a-z]+(?=[a-z] )|\S+|\s+"), "isolated")
    built.pre_tokenizer, built.decoder = pre_tokenizers.Sequence([split, level]), decoders.ByteLevel()
    built.add_special_tokens([END])
    built.save(str(tmp_path / "tokenizer.json"))
    assert load_any(tmp_path)._cutter._rules.pattern == list(imported.RULES)[0]


def test_files_of_other_kinds_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    library.Tokenizer(models.WordPiece({"<unk>": 0}, unk_token="<unk>")).save(str(path))
    with pytest.raises(ValueError, match=r"data\.tokenizer=.*(WordPiece|added tokens)"):
        load_any(path)
    built = byte_level()
    described = json.loads(built.to_str())
    for key, value in {"dropout": 0.1, "end_of_word_suffix": "</w>"}.items():
        path.write_text(json.dumps(described | {"model": described["model"] | {key: value}}))
        with pytest.raises(ValueError, match=rf"model\.{key}="):
            load_any(path)
    built.save(str(path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs tokenizers: run `pip install tokenizers`"):
        load_any(path)
