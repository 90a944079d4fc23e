"""The tokenizer: SentencePiece BPE over raw text, without loss, for documents of any length.

Text is cut just before a newline, where no piece can reach across (a newline is a symbol of its own, at the
start of every piece that has one), so encoding cut by cut gives the very ids that encoding the whole document
gives, six times faster and in constant memory. What SentencePiece cannot carry (U+2581, its own sign for a
space; NUL; bytes that are no UTF-8) is written as byte pieces by hand. The ids of control pieces never come
from text.
"""

import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import sentencepiece

from data.format import DataError

CUT_CHARS = 1_000  # a cut comes before the first newline after this many characters: the fastest measured
LONGEST_CUT = 65_536  # … or here, where a line goes on and on: still lossless, though a piece may end at the cut
BATCH_CHARS = 4 << 20  # characters encoded by one call, on all threads
THREADED_CUTS = 64  # with fewer cuts, starting threads costs more than it saves
SAMPLE_CHARS = 4_096  # sentences of the trainer, which drops longer ones than it is told to expect
FILE = "<|file|>"  # before each file of a document made of files
INDENTS = (4, 8, 12, 16, 20, 24)
SPACE = "\u2581"
_RAW = re.compile("[\u2581\x00\ud800-\udfff]")

Pieces = Iterable[str | None]  # text in any portions; None starts a file


def train(sample: Iterable[str], vocab_size: int) -> bytes:
    """Trains a tokenizer of exactly `vocab_size` pieces and returns its model file.

    Args:
        sample: text in portions of at most a megabyte, best cut before a newline.

    Raises:
        ValueError: where the text supports fewer pieces, or its characters need more; names the nearest legal
            size.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(_RAW.sub(" ", text) for text in sample),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=1 << 20,
            num_threads=2,  # stored in the model file: fixed, so that equal text gives an equal file
            minloglevel=2,
            control_symbols=[FILE],
            # SentencePiece escapes spaces before it looks for symbols: one with raw spaces would never match.
            user_defined_symbols=["\n", *("\n" + SPACE * indent for indent in INDENTS), "\t", "\r"],
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
        )
    except RuntimeError as error:
        raise _size_error(vocab_size, str(error)) from None
    return model.getvalue()


def _size_error(vocab_size: int, message: str) -> Exception:
    if highest := re.search(r"too high.*<= (\d+)", message, re.DOTALL):
        limit = int(highest[1])
        return ValueError(
            f"data.vocab_size={vocab_size} is more than the training documents support: use "
            f"data.vocab_size={limit} model.vocab_size={limit} or less, or give more text"
        )
    if lowest := re.search(r"smaller than required_chars.*?(\d+) vs (\d+)", message, re.DOTALL):
        limit = int(lowest[2])
        return ValueError(
            f"data.vocab_size={vocab_size} is less than the bytes, symbols and characters of the training "
            f"documents: use data.vocab_size={limit} model.vocab_size={limit} or more"
        )
    return RuntimeError(f"SentencePiece failed to train data.vocab_size={vocab_size}: {message}")


class Tokenizer:
    """Text to ids and back.

    Attributes:
        vocab_size: V; `eos_id` ends a document, `file_id` starts a file inside one.
        piece_bytes: int64 [V], bytes of text that each id stands for; 0 for control pieces.
        fingerprint: names the pieces in their order; a hash of the file would name its settings too.
    """

    def __init__(self, model: bytes) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size: int = self._processor.vocab_size()
        self.eos_id: int = self._processor.eos_id()
        self.file_id: int = self._processor.piece_to_id(FILE)
        self._bytes, self._byte_ids = [b""] * self.vocab_size, np.zeros(256, dtype=np.int32)
        names = hashlib.sha256()
        for index in range(self.vocab_size):
            piece = self._processor.id_to_piece(index)
            names.update(
                f"{piece}\x00{self._processor.is_control(index):d}{self._processor.is_byte(index):d}\x00".encode()
            )
            if self._processor.is_byte(index):
                value = int(piece[3:5], 16)  # "<0x1F>"
                self._bytes[index], self._byte_ids[value] = bytes([value]), index
            elif not (self._processor.is_control(index) or self._processor.is_unknown(index)):
                self._bytes[index] = piece.replace(SPACE, " ").encode()
        self.piece_bytes = np.array([len(text) for text in self._bytes], dtype=np.int64)
        self.fingerprint = names.hexdigest()[:16]

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids int32 [n] of one text; no end token. Bytes may be anything, UTF-8 or not."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        parts = [ids for ids, _ in self.encode_pieces([text])]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    def encode_pieces(self, pieces: Pieces) -> Iterator[tuple[np.ndarray, int]]:
        """Ids int32 [n] of one document, batch by batch, each with its number of characters; no end token.

        The ids do not depend on how the text is portioned. Memory is that of one batch and one portion.
        """
        batch: list[str | None] = []
        size = 0
        for cut in cuts(pieces):
            batch.append(cut)
            size += len(cut or "")
            if size >= BATCH_CHARS:
                yield self._encode_batch(batch), size
                batch, size = [], 0
        if batch:
            yield self._encode_batch(batch), size

    def decode(self, ids: Iterable[int]) -> str:
        """The text; bytes that are no UTF-8 come as surrogates, as errors="surrogateescape" gives them."""
        return self.decode_bytes(ids).decode("utf-8", "surrogateescape")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The very bytes that were encoded. Control pieces stand for none."""
        return b"".join([self._bytes[index] for index in ids])

    def _encode_batch(self, batch: list[str | None]) -> np.ndarray:
        texts: list[str] = []
        slots: list[np.ndarray | int] = []  # in order: ids already known, or the index of a text
        for cut in batch:
            if cut is None:
                slots.append(np.array([self.file_id], dtype=np.int32))
            elif (cut.isascii() and "\x00" not in cut) or not _RAW.search(cut):
                slots.append(len(texts))
                texts.append(cut)
            else:
                self._split_raw(cut, texts, slots)
        threads = num_cpus() if len(texts) >= THREADED_CUTS else 1
        encoded = self._processor.encode(texts, num_threads=threads, return_type="numpy") if texts else []
        return np.concatenate([encoded[slot] if isinstance(slot, int) else slot for slot in slots])

    def _split_raw(self, text: str, texts: list[str], slots: list[np.ndarray | int]) -> None:
        start = 0
        for match in _RAW.finditer(text):
            if match.start() > start:
                slots.append(len(texts))
                texts.append(text[start : match.start()])
            char = match[0]
            # U+DC80 … U+DCFF stand for single bytes; the other surrogates, which JSON can write, for three.
            raw = char.encode("utf-8", "surrogateescape" if "\udc80" <= char <= "\udcff" else "surrogatepass")
            slots.append(self._byte_ids[list(raw)])
            start = match.end()
        if start < len(text):
            slots.append(len(texts))
            texts.append(text[start:])


def load(path: Path | str) -> Tokenizer:
    """The tokenizer of a prepared corpus, `corpora/<name>/tokenizer.model`.

    Raises:
        DataError: where the file is missing or is no SentencePiece model.
    """
    try:
        return Tokenizer(Path(path).read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path} is missing: run `python -m data.prepare` with this run's data settings") from None
    except RuntimeError as error:
        raise DataError(
            f"{path} is not a SentencePiece model ({error}): run `python -m data.prepare --force`"
        ) from None


def cuts(pieces: Pieces, size: int = CUT_CHARS) -> Iterator[str | None]:
    """The same text, cut before the first newline after `size` characters; the None that starts a file stays.

    A stretch without newline is cut after LONGEST_CUT characters. The cuts do not depend on the portions
    given.
    """
    rest = ""
    for piece in pieces:
        if piece is None:
            if rest:
                yield rest
            rest = ""
            yield None
            continue
        rest, start = rest + piece, 0
        while True:
            cut = rest.find("\n", start + size, start + LONGEST_CUT)
            if cut < 0:
                if len(rest) - start < LONGEST_CUT:
                    break
                cut = start + LONGEST_CUT
            yield rest[start:cut]
            start = cut
        rest = rest[start:]
    if rest:
        yield rest


def num_cpus() -> int:
    """CPUs that this process may use, which on a shared node are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
