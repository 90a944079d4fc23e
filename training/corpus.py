"""The documents of a run: its sources, those held out, and the stream that stages make of them. No torch here.

Corpora of a mixture lie below `data.root`; all are in the model's vocabulary, and nothing held out is trained on.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from conf import schema
from conf.schema import Degrees, TrainConfig, mixture, resolve, stages, tokens_per_step, upweights
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
        places = {
            name: (f"{root}/{name}/train", f"{root}/{name}/validation", share)
            for name, share in sorted(shares.items())  # in whichever order they are given, the stream is the same
        }
    remote = any("://" in path for place in places.values() for path in place[:2])
    cache = Cache(data.cache, int(data.cache_bytes)) if remote else None

    def opened(name: str, path: str, share: Fraction) -> Source:
        try:
            tokens = open_tokens(path, vocab_size=config.model.vocab_size, cache=cache)
        except DataError as error:
            raise DataError(f"{error} (data.name={name})") from None
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

    Where tokens come without digests of their text, as Megatron's do, only all of them together are compared.

    Raises:
        ValueError: naming the first such document and where it is.
    """
    for held, source in itertools.product(corpus.held_out, corpus.training):
        if held.tokens.fingerprint == source.tokens.fingerprint:
            raise ValueError(f"{held.tokens.where} is held out and trained on: give other documents to one of the two")
    known = [(held, digests) for held in corpus.held_out if (digests := held.tokens.digests()) is not None]
    firsts = np.unique(np.concatenate([digests[:, 0] for _, digests in known])) if known else np.zeros(0, np.uint64)
    for source in corpus.training if known else []:
        theirs = source.tokens.digests()
        for start in range(0, 0 if theirs is None else len(theirs), DIGESTS_AT_ONCE):
            part = theirs[start : start + DIGESTS_AT_ONCE]
            near = firsts[np.searchsorted(firsts, part[:, 0]).clip(max=len(firsts) - 1)]
            for at in np.flatnonzero(near == part[:, 0]).tolist():
                for held, ours in known:
                    same = np.flatnonzero((ours == part[at]).all(axis=1))
                    if len(same):
                        raise ValueError(_overlap(held, int(same[0]), source, start + at))


def _overlap(held: Source, document: int, source: Source, other: int) -> str:
    def name(tokens: Tokens, number: int) -> str:
        return next(itertools.islice(tokens.documents(), number, None))["name"]

    return (
        f"document {name(held.tokens, document)!r}, held out in {held.tokens.where}, is trained on in "
        f"{source.tokens.where} as {name(source.tokens, other)!r}: hold it out in both (data.validation_names), or "
        "leave one of the two corpora out of data.mixture"
    )


def open_stream(config: TrainConfig, corpus: Corpus) -> TokenStream:
    """The stream of a run, the same on any number of ranks."""
    data = config.data
    return TokenStream(
        corpus.training,
        plan_stages(config),
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


def plan_stages(config: TrainConfig) -> list[Stage]:
    """The stages of `context`, or one without end.

    Raises:
        ValueError: where a stage is not a whole number of sequences.
    """
    if not config.context:
        return [Stage(int(config.data.sequence_length), None, _label(config))]
    planned = []
    for number, (stage, of_stage) in enumerate(zip(config.context, stages(config), strict=True)):
        tokens, length = stage.tokens, int(of_stage.data.sequence_length)
        if tokens is not None and int(tokens) % length:
            legal = [multiple * length for multiple in (int(tokens) // length, int(tokens) // length + 1) if multiple]
            raise ValueError(
                f"context.{number}.tokens={tokens} is not a whole number of sequences of {length} tokens: use "
                f"{' or '.join(map(str, legal))}"
            )
        planned.append(Stage(length, None if tokens is None else int(tokens) // length, _label(of_stage)))
    return planned


@dataclass(frozen=True)
class Leg:
    """What a run does of one stage, from where it stands.

    Attributes:
        number: of the stage.
        config, degrees: of the stage.
        step: of the run, after which it begins.
        sample: sequences of the stage that are done by then.
        steps: of this leg.
    """

    number: int
    config: TrainConfig
    degrees: Degrees
    step: int
    sample: int
    steps: int


def legs(
    config: TrainConfig, ranks: int, step: int = 0, stage: int = 0, sample: int = 0, owing: bool = False
) -> list[Leg]:
    """From where a run stands to `train.steps`, stage by stage. What lies before or beyond is not asked for.

    `owing`: begins with `stage` also where that has no steps left, for its last one was not validated.

    Raises:
        ValueError: where the rest of a stage is not a whole number of steps, or stages end before `train.steps`.
    """
    found = []
    for number, planned in list(enumerate(plan_stages(config)))[stage:]:
        owed = owing and number == stage
        if step == config.train.steps and not owed:
            break
        of_stage, done = stages(config)[number], sample if number == stage else 0
        degrees = _resolve(of_stage, ranks, number if config.context else None)
        steps = config.train.steps - step
        if planned.num_sequences is not None:
            steps = min(steps, _steps_left(planned, done, steps, tokens_per_step(of_stage, degrees), number))
        if steps or owed:
            found.append(Leg(number, of_stage, degrees, step, done, steps))
        step += steps
    if step < config.train.steps:
        raise ValueError(
            f"the stages of context end after {step} steps, before train.steps={config.train.steps}: use "
            f"train.steps={step}, or leave tokens out of the last stage"
        )
    return found


def _steps_left(stage: Stage, done: int, wanted: int, per_step: int, number: int) -> int:
    """Steps to the end of a stage of which `done` sequences are done, at `per_step` tokens each."""
    consumed, tokens = done * stage.sequence_length, int(stage.num_sequences or 0) * stage.sequence_length
    steps, over = divmod(tokens - consumed, per_step)
    if over and wanted > steps:
        legal = [consumed + multiple * per_step for multiple in (steps, steps + 1) if consumed + multiple]
        rest = f"; {consumed} of them are done, the rest" if consumed else ""
        raise ValueError(
            f"context.{number}.tokens={tokens}{rest} is not a whole number of steps of {per_step} tokens: use "
            f"{' or '.join(map(str, legal))}, or another train.global_batch_tokens"
        )
    return steps


def _resolve(config: TrainConfig, ranks: int, number: int | None) -> Degrees:
    try:
        return resolve(config, ranks)
    except ValueError as error:
        if number is None:
            raise
        raise ValueError(f"stage {number} of context, sequences of {config.data.sequence_length}: {error}") from None


def sequence_cost(config: TrainConfig) -> Callable[[tuple[int, ...]], float] | None:
    """By which the sequences of a step are dealt to ranks, with data.balance: FLOPs of one with such documents."""
    length = int(config.data.sequence_length)
    if not config.data.balance:
        return None
    return lambda documents: flops_per_sequence(config.model, documents, length)[0]


def _label(config: TrainConfig) -> str:
    """What else of a stage may not change once it has begun."""
    return f"rope_theta={config.model.rope_theta!r}"
