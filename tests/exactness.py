"""Whole documents, encoded by the library in one call, against the same text cut into batches and cuts."""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from data.documents import Document
from data.tokenizer import Tokenizer
from data.vocabulary import to_bytes


@dataclass
class Report:
    """`differences` counts places where only one of the two has a token's end; `where` tells the first."""

    documents: int = 0
    chars: int = 0
    tokens: int = 0
    cuts: int = 0
    differences: int = 0
    lost: int = 0
    whole_seconds: float = 0.0
    cut_seconds: float = 0.0
    worst_score: float = 0.0
    where: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not self.differences and not self.lost


def whole_equals_chunked(documents: Iterable[Document], tokenizer: Tokenizer, size: int = 1 << 20) -> Report:
    """Encodes each document's text as one string (needs about 45 bytes of memory a character), and in batches.

    Files are joined without what marks them, which would only make it easier: it ends whatever is before.

    Args:
        documents: with a name, and pieces() of text.
        size: characters of a batch.

    Returns:
        Report: differences and losses, and where. `worst_score` is of best paths (unigram), where equally good
        ones may differ: by how much a document scores less cut than whole, in parts of its score.
    """
    report = Report()
    for document in documents:
        text = "".join(piece for piece in document.pieces() if piece)
        began = time.perf_counter()
        expected = whole(tokenizer, text)
        between = time.perf_counter()
        batches = list(tokenizer.batches([text], size))
        parts = [tokenizer.encode_batch(batch) for batch in batches]
        report.cut_seconds += time.perf_counter() - between
        report.whole_seconds += between - began
        found = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
        report.documents += 1
        report.chars += len(text)
        report.tokens += len(expected)
        report.cuts += sum(1 for batch in batches for part in batch.parts for _ in tokenizer._fine_cuts(part, False))
        if not np.array_equal(found, expected):
            ends = [np.cumsum(tokenizer.piece_bytes[ids]) for ids in (found, expected)]
            different = np.setxor1d(*ends)
            report.differences += max(1, len(different))
            report.where.append(f"{document.name}: byte {different[0] if len(different) else 'of other pieces'}")
            if tokenizer.kind == "unigram":
                scores = np.array([tokenizer._processor.get_score(index) for index in range(tokenizer.vocab_size)])
                better, worse = scores[expected].sum(), scores[found].sum()
                report.worst_score = max(report.worst_score, float((better - worse) / abs(better)))
        if tokenizer.decode_bytes(found, start=True) != to_bytes(text):
            report.lost += 1
            report.where.append(f"{document.name}: bytes")
    return report


def whole(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Ids of one text by SentencePiece alone; what it cannot carry is looked up byte by byte."""
    processor, ids, opener = tokenizer._processor, [], tokenizer._opener
    for number, part in enumerate(re.split("([\u2581\x00\ud800-\udfff])", text)):
        if number % 2:
            ids += [processor.piece_to_id(f"<0x{byte:02X}>") for byte in to_bytes(part)]
        elif part:
            ids += (processor if number else opener).encode(part)
    return np.array(ids, dtype=np.int32)
