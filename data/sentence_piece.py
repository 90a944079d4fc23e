"""SentencePiece models, ours and others'. What SentencePiece cannot carry (U+2581, its own sign for a space; NUL;
bytes that are no UTF-8) is written as byte pieces by hand. The ids of control pieces never come from text.
"""

import re
from collections.abc import Iterator

import numpy as np
import sentencepiece

from data.cuts import PairCutter
from data.vocabulary import Tokenizer, fingerprint, survives, to_bytes, without_surrogates

FILE = "<|file|>"  # before each file of a document made of files
FILES = FILE, "<|file_sep|>", "<file_sep>", "<|file_separator|>"  # as others call it
ENDS = (
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
FEW_TEXTS = 50  # are encoded one by one: a list of them starts a thread, which takes as long as some 50 KB of text
SPACE = "\u2581"
RAW = re.compile("[\u2581\x00\ud800-\udfff]")

# Fields of SentencePiece's files, which are protocol buffers. Of a field given twice the last one counts, so that
# bytes at the end of a file change it.
_TRAINER, _NORMALIZER, _END_PIECE = 2, 3, 47
_WITHOUT_PREFIX = bytes([_NORMALIZER << 3 | 2, 2, 3 << 3, 0])
_KINDS = {1: "unigram", 2: "bpe"}
_NORMALIZERS = "identity", "nfkc", "nmt_nfkc"


class SentencePiece(Tokenizer):
    """A SentencePiece model by merges or by best paths.

    Raises:
        RuntimeError: where the bytes are no model.
        ValueError: where it is one that cannot be cut, or has no piece that ends documents.
    """

    file_name = "tokenizer.model"

    def __init__(self, model_bytes: bytes) -> None:
        self._opener = self._processor = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
        self.kind, prefix, normalizer = _settings(model_bytes)
        if prefix:  # a space before the document, and none before the other cuts
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model_bytes + _WITHOUT_PREFIX)
        texts, pieces, lines = [], [], [f"{self.kind} {normalizer} {prefix}"]
        byte_ids = np.full(256, -1, dtype=np.int32)
        for index in range(self._processor.vocab_size()):
            piece, text = self._processor.id_to_piece(index), b""
            control, byte = self._processor.is_control(index), self._processor.is_byte(index)
            lines.append(f"{piece}\x00{control:d}{byte:d}")
            if byte:
                value = int(piece[3:5], 16)  # "<0x1F>"
                text, byte_ids[value] = bytes([value]), index
            elif self._processor.is_unused(index):
                raise ValueError(f"piece {index} ({piece!r}) is marked as unused: give a model with all in use")
            elif not (control or self._processor.is_unknown(index)):
                pieces.append(piece.replace(SPACE, " "))
                text = to_bytes(pieces[-1])
            texts.append(text)
        has_bytes, changes = bool((byte_ids >= 0).all()), normalizer != "identity"
        known = None if has_bytes else {piece for piece in pieces if len(piece) == 1}
        cutter = PairCutter(pieces, self._ends, merges=self.kind == "bpe", plain=changes, known=known)
        raw = (RAW, byte_ids) if has_bytes else (None, None)
        super().__init__(model_bytes, texts, cutter, *raw, prefix)
        self.exact, self.fingerprint = self.kind == "bpe" and not changes, fingerprint(lines)
        self.eos_id = self._processor.eos_id()
        if self.eos_id < 0:
            raise ValueError("names no piece that ends documents: set data.end_token to one of its control pieces")
        self.file_id = next((index for name in FILES if (index := self._control(name)) is not None), None)
        self.lossless = survives(self)

    def _encode_texts(self, texts: list[str], opening: bool) -> list[np.ndarray]:
        if len(texts) < FEW_TEXTS:
            encoded = [self._processor.encode(text, return_type="numpy") for text in texts]
        else:
            encoded = self._processor.encode(texts, num_threads=1, return_type="numpy")
        if opening and self._opener is not self._processor:
            encoded[0] = self._opener.encode(texts[:1], num_threads=1, return_type="numpy")[0]
        return encoded

    def _has_raw(self, text: str) -> bool:
        """What the pattern finds, several times as fast in text without any."""
        if text.isascii():
            return "\x00" in text
        return SPACE in text or "\x00" in text or without_surrogates(text) is not text

    def _ends(self, text: str, opening: bool) -> list[int]:
        processor = self._opener if opening else self._processor
        # Raw characters are no part of a token, whatever stands for them.
        offsets = processor.encode(RAW.sub("\x00", text), return_type="offset_mapping")["offsets"]
        return sorted({end for _, end in offsets if end > 0})

    def _control(self, name: str) -> int | None:
        """The id of a control piece, which no text becomes."""
        index = self._processor.piece_to_id(name)
        return index if self._processor.is_control(index) else None


def with_end(model: bytes, end_token: str | None) -> bytes:
    """The model with a piece that ends documents: the one given, else its own, else one of the usual names.

    Raises:
        RuntimeError: where the bytes are no model.
        ValueError: where the piece is none of its control pieces.
    """
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    controls = [processor.id_to_piece(index) for index in range(processor.vocab_size()) if processor.is_control(index)]
    if end_token is None:
        if processor.eos_id() >= 0:
            return model
        end_token = next((name for name in ENDS if name in controls), None)
    if end_token not in controls:
        raise ValueError(
            f"data.end_token={end_token or 'null'} is no control piece of it: set it to one of {', '.join(controls)}"
            if controls
            else "has no control piece, which could end documents: give another model"
        )
    piece = end_token.encode()
    field = _varint(_END_PIECE << 3 | 2) + _varint(len(piece)) + piece
    changed = model + _varint(_TRAINER << 3 | 2) + _varint(len(field)) + field
    return model if processor.eos_id() == processor.piece_to_id(end_token) else changed


def _settings(model: bytes) -> tuple[str, bool, str]:
    """Kind, whether a space comes before the text, and the normalizer ("identity" only if it changes nothing)."""
    parts = dict.fromkeys((_TRAINER, _NORMALIZER), b"")
    for number, value in _fields(model):
        if number in parts and isinstance(value, bytes):
            parts[number] += value
    trainer, normalizer = (dict(_fields(parts[number])) for number in (_TRAINER, _NORMALIZER))
    kind = _KINDS.get(trainer.get(3, 1))
    if kind is None:
        raise ValueError("is a SentencePiece model of words or characters: give one of model_type bpe or unigram")
    if trainer.get(24, 0) or not normalizer.get(5, 1):
        raise ValueError("treats spaces otherwise than SentencePiece does by default, which cannot be cut")
    name = normalizer.get(1, b"").decode()
    changes, squeezes = bool(normalizer.get(2, b"")), bool(normalizer.get(4, 1))
    if changes and name not in _NORMALIZERS:
        raise ValueError(f"normalizes text by {name!r}, which cannot be cut: legal are {', '.join(_NORMALIZERS)}")
    described = "identity" if not (changes or squeezes) else f"{name} {squeezes:d}"
    return kind, bool(normalizer.get(3, 1)), described


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a protocol buffer's fields."""
    at = 0

    def number() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return value

    while at < len(data):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or number()
        yield key >> 3, data[at : at + size]
        at += size


def _varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + _varint(value >> 7) if value > 127 else bytes([value])
