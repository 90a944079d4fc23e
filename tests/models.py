"""SentencePiece models made by hand, piece by piece."""

from collections.abc import Iterable

from sentencepiece import sentencepiece_model_pb2


def model_of(
    pieces: Iterable[str],
    *,
    kind: str = "bpe",
    symbols: Iterable[str] = (),
    controls: Iterable[str] = ("<s>", "</s>"),
    prefix: bool = False,
    carries_bytes: bool = True,
) -> bytes:
    """The model file with these pieces, best first, after <unk>, `controls` and the bytes.

    Args:
        symbols: looked for in the text before anything is merged.
        prefix: a space is put before the text.
    """
    model = sentencepiece_model_pb2.ModelProto()

    def add(names: Iterable[str], type_: int) -> None:
        for rank, name in enumerate(names):
            model.pieces.add(piece=name, score=-float(rank), type=type_)

    kinds = model.SentencePiece
    add(["<unk>"], kinds.UNKNOWN)
    add(controls, kinds.CONTROL)
    if carries_bytes:
        add((f"<0x{value:02X}>" for value in range(256)), kinds.BYTE)
    add(symbols, kinds.USER_DEFINED)
    add(pieces, kinds.NORMAL)
    model.trainer_spec.model_type = {"unigram": 1, "bpe": 2, "word": 3}[kind]
    model.trainer_spec.byte_fallback = carries_bytes
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()
