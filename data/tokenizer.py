"""The tokenizer of a corpus: trained on its documents, or a file that was trained elsewhere.

Ours is trained so that nothing is lost, and a newline is a symbol of its own, at the start of every piece that
has one: text may then be cut before any newline (cuts.py), encodes six times faster than in one piece, and in
constant memory.
"""

import io
import re
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from data.format import DataError
from data.sentence_piece import FILE, RAW, SPACE, SentencePiece, with_end
from data.vocabulary import Batch, Tokenizer

__all__ = ["Batch", "Tokenizer", "load", "load_any", "train"]

SAMPLE_CHARS = 4_096  # sentences of the trainer, which drops longer ones than it is told to expect
SAMPLE_TOTAL_CHARS = {"bpe": 32 << 20, "unigram": 12 << 20}  # of training documents; the latter takes 4 x as long
INDENTS = (4, 8, 12, 16, 20, 24)


def train(sample: Iterable[str], vocab_size: int, kind: str = "bpe") -> Tokenizer:
    """Trains a tokenizer of exactly `vocab_size` pieces.

    Args:
        sample: text in portions of at most a megabyte, best cut before a newline.
        kind: bpe or unigram.

    Raises:
        ValueError: where the text supports fewer pieces, or its characters need more; names the nearest legal
            size.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(RAW.sub(" ", text) for text in sample),
            model_writer=model,
            model_type=kind,
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
    return SentencePiece(model.getvalue())


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


def load(path: Path | str) -> Tokenizer:
    """The tokenizer of a prepared corpus: its folder, or the tokenizer.model or tokenizer.json there.

    Raises:
        DataError: where the file is missing or damaged.
    """
    path = Path(path)
    try:
        found = _file(path)
        return _open(found.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path} is missing: run `python -m data.prepare` with this run's data settings") from None
    except ImportError as error:
        raise DataError(f"{found} needs {error.name}: run `pip install {error.name}`") from None
    except ValueError as error:
        raise DataError(f"{found} {error}: run `python -m data.prepare --force`") from None
    except RuntimeError as error:
        raise DataError(f"{found} is no tokenizer ({error}): run `python -m data.prepare --force`") from None


def load_any(path: Path | str, end_token: str | None = None) -> Tokenizer:
    """A tokenizer that was trained elsewhere: a SentencePiece model, or the tokenizer.json of Hugging Face.

    Args:
        path: the file, or a folder with a tokenizer.model or else a tokenizer.json.
        end_token: ends documents; None: the one that the file names, or one of the usual names.

    Raises:
        ValueError: where there is no such file, it cannot be used, or has no such token.
    """
    path = Path(path).expanduser()
    try:
        found = _file(path)
        model = found.read_bytes()
    except OSError as error:
        raise ValueError(
            f"data.tokenizer={path} cannot be read ({error.strerror}): give bpe, unigram, a SentencePiece "
            "model, or a tokenizer.json"
        ) from None
    try:
        return _open(model, end_token)
    except RuntimeError as error:
        raise ValueError(
            f"data.tokenizer={found} is not a SentencePiece model or tokenizer.json ({error}): give one of "
            "these, or bpe or unigram"
        ) from None
    except ImportError as error:
        raise ValueError(f"data.tokenizer={found} needs {error.name}: run `pip install {error.name}`") from None
    except ValueError as error:
        raise ValueError(f"data.tokenizer={found} {error}") from None


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    model = path / SentencePiece.file_name
    return model if model.exists() or not (other := path / "tokenizer.json").exists() else other


def _open(model: bytes, end_token: str | None = None) -> Tokenizer:
    if not model:
        raise ValueError("is empty")
    if model[:64].lstrip().startswith(b"{"):
        from data.imported import HuggingFace, with_end_token  # needs an extra that few have

        return HuggingFace(with_end_token(model, end_token))
    return SentencePiece(with_end(model, end_token))
