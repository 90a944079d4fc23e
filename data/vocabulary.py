"""What every tokenizer is to the rest: batches of text in, ids out, and the very bytes back.

Cutting a document into batches and encoding a batch are separate, so that one process may read while others
encode. The ids of a document are those of its batches, one after the other, wherever it was cut: cuts.py.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.cuts import FARTHEST, Cutter

BATCH_CHARS = 2 << 20  # of a batch: work enough to be worth sending to another process, and little to hold
CUT_CHARS = 1_000  # a text is encoded in cuts of about this length: the fastest measured
PORTION_CHARS = 1 << 20  # the longest portion looked at in one piece: a line of a gigabyte is none

_MASKS = np.array([(1 << 8 * length) - 1 for length in range(9)], dtype="<u8")  # the first bytes of eight

Pieces = Iterable[str | None]  # text in any portions; None starts a file


@dataclass(frozen=True, slots=True)
class Batch:
    """A part of a document: texts, and None where a file starts; `start`: no text of the document is before it."""

    parts: tuple[str | None, ...]
    start: bool

    @property
    def num_chars(self) -> int:
        return sum(len(part) for part in self.parts if part is not None)

    def num_bytes(self) -> int:
        return sum(len(to_bytes(part)) for part in self.parts if part is not None)


class Tokenizer(ABC):
    """Text to ids and back. Pickles as its file, and starts no threads.

    Attributes:
        kind: bpe, unigram or huggingface.
        file_name, model_bytes: the file that `load` reads, and its content.
        vocab_size: V; `eos_id` ends a document, `file_id` starts a file inside one; None: nothing marks it.
        piece_bytes: int64 [V], bytes of text that each id stands for; 0 for control pieces.
        fingerprint: names the pieces in their order, and what else the ids of a text depend on.
        lossless: decoding gives back every byte, whatever the text.
        exact: the ids of a document do not depend on where it is cut; else all but those at few of the cuts.
    """

    kind: str
    file_name: str
    eos_id: int
    file_id: int | None
    lossless: bool
    exact: bool
    fingerprint: str

    def __init__(
        self,
        model_bytes: bytes,
        texts: Sequence[bytes],
        cutter: Cutter,
        raw: re.Pattern[str] | None,
        byte_ids: np.ndarray | None,
        prefix: bool,
    ) -> None:
        """
        Args:
            texts: what each id stands for.
            raw: text that the library must not see; or places, without width, whose sides it must see apart.
            byte_ids: int32 [256], by which raw text is written; None: the vocabulary has not all of them.
            prefix: encoding a document puts a space before its text.
        """
        self.model_bytes, self.vocab_size, self._cutter = model_bytes, len(texts), cutter
        self._raw, self._byte_ids, self._prefix = raw, byte_ids, prefix
        self.piece_bytes = np.array([len(text) for text in texts], dtype=np.int64)
        self._texts = np.empty(len(texts), dtype=object)
        self._texts[:] = texts
        width = -(-max(map(len, texts)) // 8) * 8
        self._words = np.frombuffer(b"".join(text.ljust(width, b"\0") for text in texts), "<u8").reshape(len(texts), -1)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model_bytes,)

    def save(self, folder: Path) -> Path:
        path = folder / self.file_name
        path.write_bytes(self.model_bytes)
        return path

    def batches(self, pieces: Pieces, size: int = BATCH_CHARS) -> Iterator[Batch]:
        """One document in batches of `size` characters and a few more, up to a place where it may be cut.

        The last one of a file or of the document may be larger by FARTHEST. They depend on the text only, not on
        its portions. Memory is that of a batch and a portion.
        """
        parts: list[str | None] = []
        count, text, start = 0, "", True
        for piece in _small(pieces):
            if piece is None:
                parts += [text, None] if text else [None]
                count, text = count + len(text) + 1, ""
                if count >= size:
                    yield Batch(tuple(parts), start)
                    start = start and not any(parts)
                    parts, count = [], 0
                continue
            text += piece
            while len(text) >= size - count + FARTHEST:
                cut = self._cutter.cut(text, 0, size - count, opening=start and not any(parts))
                if cut is None:
                    break
                yield Batch((*parts, text[:cut]), start)
                parts, count, text, start = [], 0, text[cut:], False
        if text or parts:
            yield Batch((*parts, text) if text else tuple(parts), start)

    def encode_batch(self, batch: Batch) -> np.ndarray:
        """Ids int32 [n] of one batch, on one thread."""
        texts: list[str] = []
        slots: list[np.ndarray | int] = []  # in order: ids already known, or the index of a text
        opening, opened = batch.start, False
        for part in batch.parts:
            if part is None:
                slots += [] if self.file_id is None else [np.array([self.file_id], dtype=np.int32)]
                continue
            part = part if self._byte_ids is not None else without_surrogates(part)
            raw = self._raw is not None and self._has_raw(part)
            opened |= opening and not (raw and self._raw.match(part))
            for cut in self._fine_cuts(part, opening):
                if raw:
                    self._split_raw(cut, texts, slots)
                else:
                    slots.append(len(texts))
                    texts.append(cut)
            opening = False
        encoded = self._encode_texts(texts, opened) if texts else []
        parts = [encoded[slot] if isinstance(slot, int) else slot for slot in slots]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    @abstractmethod
    def _encode_texts(self, texts: list[str], opening: bool) -> list[np.ndarray]:
        """Ids int32 [n] of each text; `opening`: the first opens a document."""

    def _has_raw(self, text: str) -> bool:
        return bool(self._raw.search(text))

    def _split_raw(self, text: str, texts: list[str], slots: list[np.ndarray | int]) -> None:
        start = 0
        for match in self._raw.finditer(text):
            if match.start() > start:
                slots.append(len(texts))
                texts.append(text[start : match.start()])
            if match[0]:
                slots.append(self._byte_ids[np.frombuffer(to_bytes(match[0]), np.uint8)])
            start = match.end()
        if start < len(text):
            slots.append(len(texts))
            texts.append(text[start:])

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids int32 [n] of one text; no end token. Bytes may be anything, UTF-8 or not."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        parts = [self.encode_batch(batch) for batch in self.batches([text])]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    def decode(self, ids: Iterable[int], start: bool = False) -> str:
        """The text; bytes that are no UTF-8 come as surrogates, as errors="surrogateescape" gives them."""
        return self.decode_bytes(ids, start).decode("utf-8", "surrogateescape")

    def decode_bytes(self, ids: Iterable[int], start: bool = False) -> bytes:
        """The very bytes that were encoded. Control pieces stand for none.

        Args:
            start: the ids begin a document, where some tokenizers put a space before the text.
        """
        array = np.asarray(ids if isinstance(ids, np.ndarray | Sequence) else list(ids), dtype=np.int64)
        text = b"".join(self._texts[array].tolist())
        return text.removeprefix(b" ") if start and self._prefix else text

    def restores(self, batch: Batch, ids: np.ndarray) -> bool:
        """Whether decoding gives back every byte of the batch; several times as fast as decoding and comparing."""
        text = b"".join([to_bytes(part) for part in batch.parts if part])
        if self._prefix and batch.start and self.decode_bytes(ids[self.piece_bytes[ids] > 0][:1]).startswith(b" "):
            text = b" " + text
        lengths = self.piece_bytes[ids]
        ends = np.cumsum(lengths)
        if (int(ends[-1]) if len(ends) else 0) != len(text):
            return False
        # The eight bytes at every place of the text, as numbers, of which a token's share is compared.
        words = np.ndarray(len(text) + 1, "<u8", text + bytes(8), strides=(1,))
        places = ends - lengths
        for number in range(self._words.shape[1]):
            if number:
                rest = np.flatnonzero(lengths > 8)
                ids, lengths, places = ids[rest], lengths[rest] - 8, places[rest] + 8
            if ((words[places] & _MASKS[np.minimum(lengths, 8)]) != self._words[ids, number]).any():
                return False
        return True

    def _fine_cuts(self, text: str, opening: bool) -> Iterator[str]:
        """The text in cuts of about CUT_CHARS, each of which encodes to its part of the text's ids."""
        start, cutter = 0, self._cutter
        while len(text) - start > CUT_CHARS:
            cut = cutter.cut(text, start, start + CUT_CHARS, opening)
            if cut is None:
                break
            yield text[start:cut]
            start = cut
        if start < len(text):
            yield text[start:] if start else text


def to_bytes(text: str) -> bytes:
    """UTF-8. U+DC80 … U+DCFF stand for single bytes; the other surrogates, which JSON can write, for three."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return _with_surrogates(text)


def _with_surrogates(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # only JSON gives such text
        return b"".join(
            part.encode("utf-8", "surrogateescape" if "\udc80" <= part <= "\udcff" else "surrogatepass")
            for part in _runs(text)
        )


def without_surrogates(text: str) -> str:
    """The text itself where it has none; else with the sign for bytes that are no UTF-8 in their place."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\ufffd", text)


def _runs(text: str) -> Iterator[str]:
    """Surrogates one by one, and the text between them."""
    start = 0
    for index, char in enumerate(text):
        if "\ud800" <= char <= "\udfff":
            if start < index:
                yield text[start:index]
            yield char
            start = index + 1
    yield text[start:]


def _small(pieces: Pieces) -> Iterator[str | None]:
    for piece in pieces:
        if piece is None or len(piece) <= PORTION_CHARS:
            yield piece
        else:
            yield from (piece[start : start + PORTION_CHARS] for start in range(0, len(piece), PORTION_CHARS))


def fingerprint(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]


PROBES = (
    *("a\nb", "\n\n\n", "  a  b ", "\t", "\u00a0", "\ufb01", "\uff12", "\u200b", "e\u0301", "a\r\nb\rc", "\x00"),
    *("\u2581", "\ufeffbom", "\U0001f600 \u03a9 \u6f22\u5b57", "\u2028\u2029\x85\x0b\x0c", "x" * 100, " " * 100),
    *(
        "<unk><s></s><0x0A>",
        "\n    \n        y",
        "\udc80\udcff",
        "def f(x):\n\treturn x  # \u0416, \u0639\u0631\u0628\u064a",
    ),
)


def survives(tokenizer: Tokenizer) -> bool:
    """Whether text that tokenizers are known to lose comes back."""
    batches = [Batch((text,), True) for text in PROBES]
    return all(tokenizer.restores(batch, tokenizer.encode_batch(batch)) for batch in batches)
