"""The tokenizer.json of Hugging Face: byte-level or with U+2581 for spaces, by merges or best paths.

Most of them split text by a pattern before they look for pieces, and what the pattern finds may depend on what
comes next. So text is cut only where all patterns in use split it, and only if no piece is there across:
after a lone newline that a letter follows, and before a lone space between letters. Each rule is tried on samples
when the file is read, and left out where it does not hold. A stretch of a million characters that has no such
place (and no text has one) is cut all the same: lossless, but a token may end there that otherwise would not.
"""

import itertools
import json
import os
import re
from typing import Any

import numpy as np

from data.cuts import RuleCutter
from data.sentence_piece import ENDS, FILES, SPACE
from data.vocabulary import Tokenizer, fingerprint, survives, to_bytes

RULES = {  # where to cut, and what a piece across the cut has in it
    r"(?<=\S\n)(?=[A-Za-z])": rb"\n[A-Za-z]",
    r"(?<=[A-Za-z])(?= [A-Za-z])": rb"[A-Za-z] ",
}
_BEFORE = (
    "x",
    "return foo",
    "foo;",
    "f(a) {",
    "don't",
    "it's a",
    "1234",
    "a, b.",
    "\u00e9",
    "\u6f22\u5b57",
    "  -- A",
    "\tX",
    "\u03a9 z",
)
_AFTER = ("y", "Foo", "re", "ing = 3", "s\n\ny", "t 't", "def f():\n    x", "B\u0301", "i" * 40)
_KEY = "longhaul"  # in the file: what else we know, which the library is not given
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class HuggingFace(Tokenizer):
    """A tokenizer.json to which `with_end_token` has added the end token.

    Raises:
        ValueError: where it is of a kind that this class cannot cut or decode.
        ImportError: where the library is not installed.
    """

    kind, file_name, exact = "huggingface", "tokenizer.json", False

    def __init__(self, model_bytes: bytes) -> None:
        description = _parse(model_bytes)
        _refuse(description)
        end_token = description.pop(_KEY)["end_token"]
        for token in description["added_tokens"]:
            token["special"] |= token["content"] == end_token  # so that no text becomes it
        opener, rest = json.dumps(description), json.dumps(_without_prefix(description))
        self._opener, self._tokenizer = _library(opener), _library(rest)
        special = {token["content"] for token in description["added_tokens"] if token["special"]}
        texts, byte_ids = _texts(description, self._tokenizer.get_vocab(with_added_tokens=True), special)
        rules = [
            rule
            for rule, across in RULES.items()
            if not any(re.search(across, text) for text in texts) and self._holds(rule)
        ]
        if not rules:
            raise ValueError("joins what is before and after newlines and spaces, so that no text can be cut")
        raw = _raw(description, special, carries_bytes=byte_ids is not None)
        super().__init__(model_bytes, texts, RuleCutter(rules), raw, byte_ids, prefix=opener != rest)
        self.eos_id = self._tokenizer.token_to_id(end_token)
        self.file_id = next((self._tokenizer.token_to_id(name) for name in FILES if name in special), None)
        self.fingerprint = fingerprint([json.dumps(description, sort_keys=True), end_token])
        self.lossless = survives(self)

    def _encode_texts(self, texts: list[str], opening: bool) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        if opening and self._opener is not self._tokenizer:
            encoded[0] = self._opener.encode(texts[0], add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int32) for one in encoded]

    def _holds(self, rule: str) -> bool:
        """Whether samples cut by the rule encode as they do in one piece."""

        def ids(text: str) -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=False).ids

        for before, between, after in itertools.product(_BEFORE, ("\n", " "), _AFTER):
            text = before + between + after
            for match in re.finditer(rule, text):
                if ids(text[: match.start()]) + ids(text[match.start() :]) != ids(text):
                    return False
        return True


def with_end_token(model: bytes, end_token: str | None) -> bytes:
    """The file with the token that ends documents: the one given, else the one noted before, or of a usual name.

    Raises:
        ValueError: where it has no such token.
    """
    description = _parse(model)
    names = [token["content"] for token in description["added_tokens"]]
    if end_token is None and _KEY in description:
        return model
    end_token = end_token or next((name for name in ENDS if name in names), None)
    if end_token not in names:
        raise ValueError(
            f"data.end_token={end_token or 'null'} is none of its added tokens: set it to one of {', '.join(names)}"
            if names
            else "has no added tokens, which could end documents: give another file"
        )
    return json.dumps(description | {_KEY: {"end_token": end_token}}, ensure_ascii=False).encode()


def _parse(model: bytes) -> dict[str, Any]:
    try:
        description = json.loads(model)
        description["model"]["vocab"], [token["content"] for token in description["added_tokens"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"is no tokenizer.json ({type(error).__name__}: {error})") from None
    return description


def _library(description: str) -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # whoever wants several threads or processes starts them
    from tokenizers import Tokenizer as Library

    try:
        library = Library.from_str(description)
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"is a tokenizer.json that the library refuses ({error})") from None
    library.encode_special_tokens = True  # the names of special tokens in a text stay text
    library.no_truncation()
    library.no_padding()
    return library


def _steps(description: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Normalizers, pre_tokenizers or decoders, which may be none, one, or a sequence; parts of `description`."""
    step = description.get(where)
    if not step:
        return []
    return step.get(where + "s") or step.get(where.replace("_", "") + "s") or [step]


def _is_byte_level(description: dict[str, Any]) -> bool:
    return any(
        step["type"] == "ByteLevel" for where in ("pre_tokenizer", "decoder") for step in _steps(description, where)
    )


def _refuse(description: dict[str, Any]) -> None:
    model = description["model"]
    kind = model.get("type") or ("BPE" if "merges" in model else "unknown")
    if kind not in ("BPE", "Unigram"):
        raise ValueError(f"is a tokenizer.json of model {kind}, which loses text: legal are BPE and Unigram")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise ValueError(f"has model.{key}={model[key]!r}, with which text cannot be restored: give one without")


def _without_prefix(description: dict[str, Any]) -> dict[str, Any]:
    """The same, but for the space that is put before a text."""
    description = json.loads(json.dumps(description))
    for step in _steps(description, "normalizer"):
        if step["type"] == "Prepend":
            step["prepend"] = ""
    for step in _steps(description, "pre_tokenizer"):
        if step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"
        elif step["type"] == "ByteLevel":
            step["add_prefix_space"] = False
    return description


def _texts(
    description: dict[str, Any], vocabulary: dict[str, int], special: set[str]
) -> tuple[list[bytes], np.ndarray | None]:
    """What each id stands for, and int32 [256] the ids of single bytes where there are all of them."""
    texts, byte_ids = [b""] * (max(vocabulary.values()) + 1), np.full(256, -1, dtype=np.int32)
    added = {token["content"] for token in description["added_tokens"]}
    byte_level, alphabet = _is_byte_level(description), _byte_alphabet()
    model = description["model"]
    unknown = vocabulary.get(model.get("unk_token") or "", model.get("unk_id"))
    for piece, index in vocabulary.items():
        if piece in special or index == unknown:
            continue
        byte = None if byte_level else _BYTE.fullmatch(piece)
        if piece in added:
            texts[index] = to_bytes(piece)
        elif byte_level:
            texts[index] = bytes(alphabet[char] for char in piece if char in alphabet)
        else:
            texts[index] = bytes([int(byte[1], 16)]) if byte else to_bytes(piece.replace(SPACE, " "))
        if piece not in added and (byte or (byte_level and len(piece) == 1)) and len(texts[index]) == 1:
            byte_ids[texts[index][0]] = index
    return texts, byte_ids if (byte_ids >= 0).all() else None


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: printable ones as they are, others from U+0100."""
    printable = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(others)}


def _raw(description: dict[str, Any], special: set[str], carries_bytes: bool) -> re.Pattern[str] | None:
    """Characters that are written by bytes; and the insides of special names where a vocabulary would find these."""
    model, names = description["model"], set[str]()
    if isinstance(model["vocab"], list):  # best paths
        names = {piece for piece, _ in model["vocab"]} & special
    elif model.get("ignore_merges"):
        names = set(model["vocab"]) & special
    pairs = (merge if isinstance(merge, list) else merge.split(" ", 1) for merge in model.get("merges") or ())
    names |= {"".join(pair) for pair in pairs} & special
    parts = [f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in sorted(names) if len(name) > 1]
    if carries_bytes:
        parts.append("[\ud800-\udfff]" if _is_byte_level(description) else f"[{SPACE}\ud800-\udfff]")
    return re.compile("|".join(parts)) if parts else None
