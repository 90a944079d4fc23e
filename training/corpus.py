"""The documents of a run: its sources, those held out, and the stream that stages make of them. No torch here.

Corpora of a mixture lie below `data.root`; all are in the model's vocabulary, and nothing held out is trained on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from conf import schema
from conf.schema import TrainConfig, mixture, resolve, stages, tokens_per_step, upweights
from data.format import Tokens
from data.remote import Cache
from data.shards import open_tokens
from data.storage import DataError
from data.stream import Sequences, Source, Stage, TokenStream, finite
from training.estimate import flops_per_sequence

DIGESTS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """What a run reads: one source, or those of a mixture, and of each the documents held out."""

    training: list[Source]
    held_out: list[Source]

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of each source: what ranks compare, and every machine must have alike."""
        sides = {"training": self.training, "held-out": self.held_out}
        return {f"{side} data {each.name}": each.tokens.fingerprint for side, many in sides.items() for each in many}


def open_corpus(config: TrainConfig) -> Corpus:
    """Opens the prepared documents of `data.name`, `data.mixture` or `data.path`.

    Raises:
        DataError: where they are missing or damaged, or nothing is held out.
        ValueError: where they are not in the model's vocabulary, or not of one tokenizer.
    """
    data = config.data
    if data.source is schema.Source.tokens:
        for key, path in {"data.path": data.path, "data.validation_path": data.validation_path}.items():
            if not path:
                raise ValueError(f"data.source=tokens needs {key}: a folder of shards, or a Megatron pair without .bin")
        places = {data.name: (str(data.path), str(data.validation_path), Fraction(1))}
    else:
        shares = mixture(data.mixture) or {data.name: Fraction(1)}
        root = data.root.rstrip("/") or "/"
        places = {name: (f"{root}/{name}/train", f"{root}/{name}/validation", share) for name, share in shares.items()}
    remote = any("://" in path for place in places.values() for path in place[:2])
    cache = Cache(data.cache, int(data.cache_bytes)) if remote else None

    def opened(name: str, path: str, share: Fraction) -> Source:
        tokens = open_tokens(path, vocab_size=config.model.vocab_size, cache=cache)
        if not tokens.num_tokens:
            raise DataError(f"{path} has no documents: prepare data that has some under another data.name")
        return Source(name, tokens, share)

    training = [opened(name, path, share) for name, (path, _, share) in places.items()]
    held_out = [opened(name, path, share) for name, (_, path, share) in places.items()]
    _require_one_tokenizer([*training, *held_out])
    return Corpus(training, held_out)


def _require_one_tokenizer(sources: Sequence[Source]) -> None:
    known = [(source.tokens.tokenizer, source.tokens.where) for source in sources if source.tokens.tokenizer]
    for tokenizer, where in known[1:]:
        if tokenizer != known[0][0]:
            raise ValueError(
                f"{where} is made with tokenizer {tokenizer}, {known[0][1]} with {known[0][0]}: prepare all with one, "
                "by data.tokenizer=PATH of the other's tokenizer"
            )


def require_disjoint(corpus: Corpus) -> None:
    """Refuses held-out documents that are trained on, in whichever source. Reads the digests of all documents.

    Raises:
        ValueError: naming the first such document and where it is.
    """
    for held in corpus.held_out:
        ours = held.tokens.digests()
        if ours is None:
            continue
        order = np.lexsort((ours[:, 1], ours[:, 0]))
        first = ours[order, 0]
        for source in corpus.training:
            theirs = source.tokens.digests()
            for start in range(0, 0 if theirs is None else len(theirs), DIGESTS_AT_ONCE):
                part = theirs[start : start + DIGESTS_AT_ONCE]
                for at in np.flatnonzero(np.isin(part[:, 0], first)).tolist():
                    same = np.flatnonzero((ours == part[at]).all(axis=1))
                    if len(same):
                        raise ValueError(_overlap(held, int(same[0]), source, start + at))


def _overlap(held: Source, document: int, source: Source, other: int) -> str:
    def name(tokens: Tokens, number: int) -> str:
        return next(entry["name"] for at, entry in enumerate(tokens.documents()) if at == number)

    return (
        f"document {name(held.tokens, document)!r}, held out in {held.tokens.where}, is trained on in "
        f"{source.tokens.where} as {name(source.tokens, other)!r}: hold it out in both (data.validation_names), or "
        "leave one of the two corpora out of data.mixture"
    )


def open_stream(config: TrainConfig, ranks: int, corpus: Corpus) -> TokenStream:
    """The stream of a run on so many ranks."""
    data = config.data
    return TokenStream(
        corpus.training,
        plan_stages(config, ranks),
        seed=config.train.seed,
        long=str(data.long),
        short=str(data.short),
        upweight=upweights(data.upweight),
        positions=str(data.positions),
    )


def held_out(config: TrainConfig, corpus: Corpus) -> list[tuple[Source, Sequences]]:
    """Of each source the first `validation.sequences` held-out sequences at this stage's length, or all of them."""
    length, positions, most = int(config.data.sequence_length), str(config.data.positions), config.validation.sequences
    return [(source, finite(source.tokens, length, positions, most or None)) for source in corpus.held_out]


def plan_stages(config: TrainConfig, ranks: int) -> list[Stage]:
    """The stages of `context`, or one without end.

    Raises:
        ValueError: where a stage is not a whole number of steps, or they end before `train.steps`.
    """
    if not config.context:
        return [Stage(int(config.data.sequence_length), None, _label(config))]
    planned, steps = [], 0
    for number, (stage, of_stage) in enumerate(zip(config.context, stages(config), strict=True)):
        per_step, tokens = tokens_per_step(of_stage, resolve(of_stage, ranks)), stage.tokens
        if tokens is not None and int(tokens) % per_step:
            legal = [multiple * per_step for multiple in (int(tokens) // per_step, int(tokens) // per_step + 1)]
            raise ValueError(
                f"context.{number}.tokens={tokens} is not a whole number of steps of {per_step} tokens: use "
                f"{' or '.join(str(each) for each in legal if each)}"
            )
        length = int(of_stage.data.sequence_length)
        planned.append(Stage(length, None if tokens is None else int(tokens) // length, _label(of_stage)))
        steps += 0 if tokens is None else int(tokens) // per_step
    if config.context[-1].tokens is not None and steps < config.train.steps:
        raise ValueError(
            f"the stages of context end after {steps} steps, before train.steps={config.train.steps}: use "
            f"train.steps={steps}, or leave tokens out of the last stage"
        )
    return planned


def sequence_cost(config: TrainConfig) -> Callable[[tuple[int, ...]], float] | None:
    """By which the sequences of a step are dealt to ranks, with data.balance: FLOPs of one with such documents."""
    length = int(config.data.sequence_length)
    if not config.data.balance:
        return None
    return lambda documents: flops_per_sequence(config.model, documents, length)[0]


def _label(config: TrainConfig) -> str:
    """What else of a stage may not change once it has begun."""
    return f"rope_theta={config.model.rope_theta!r}"
