"""Which documents the tokens of a rank come from: `python -m data.stream explain step=N rank=R`. No torch here.

The command is the data's, its answer is not: which tokens a rank holds is `parallel`'s to say. It asks what the run
itself asks: the same stream, the same dealing of a step to data ranks, the same layout.
"""

import argparse
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice
from typing import NoReturn

from conf.compose import compose
from conf.schema import Degrees, TrainConfig, tokens_per_step
from data.balance import sequences_of_step
from data.shards import open_storage, parent
from data.stream import Sequences, Source, TokenStream
from data.tokenizer import Tokenizer
from data.verify import load_tokenizer
from parallel.layout import Chunk
from parallel.setting import Setting
from training.corpus import Leg, legs, open_corpus, open_stream, sequence_cost

TEXT_TOKENS = 16  # of each stretch, shown by --text
DONE, CONFIGURATION, INPUT_OUTPUT = 0, 3, 74  # exit codes

DESCRIPTION = """\
Prints which documents and offsets the tokens came from that one rank holds in one step, as a line a stretch: where it
is in the sequence, source, document, and where in the document; start:stop or, where a rank holds every n-th token,
start:stop:n. The config is taken to be that of the whole run: of a run that went on with another batch size, ask with
the steps that its tokens make at this one.
"""

EPILOGUE = """\
besides overrides, which are those of train.py:
  step=N     a step as train.py counts them, from 1
  rank=R     a rank, from 0
  ranks=W    ranks in all; default: data × sequence × tensor, where parallel.data=-1 counts as 1
  node=M     ranks on each node, which layout=auto looks at; default: cluster.node_gpus, or all if they are fewer

examples:
  python -m data.stream explain step=1 rank=0 experiment=laptop
  python -m data.stream explain step=300 rank=5 experiment=8b_stages --text

exit codes: 0 done, 3 something is refused, 74 data cannot be read
"""


@dataclass(frozen=True)
class Asked:
    step: int
    rank: int
    ranks: int
    node: int


@dataclass(frozen=True)
class Held:
    """Tokens start, start + step, … (count of them) of a sequence that a rank holds, all of one document."""

    start: int
    count: int
    step: int
    source: str
    document: int  # its number in the source
    first: int  # the token of the document at `start`

    def range_from(self, start: int) -> str:
        """start:stop:step, as Python writes it."""
        stop = start + (self.count - 1) * self.step + 1
        return f"{start}:{stop}" + (f":{self.step}" if self.count > 1 < self.step else "")


@dataclass(frozen=True)
class Place:
    """A rank on the axes: ranks are numbered data-major, tensor fastest (`parallel.mesh`)."""

    data: int
    ring: int
    ulysses: int
    tensor: int

    @classmethod
    def of(cls, rank: int, degrees: Degrees) -> "Place":
        rest, tensor = divmod(rank, degrees.tensor)
        data, sequence = divmod(rest, degrees.sequence)
        return cls(data, *divmod(sequence, degrees.ulysses), tensor)


@dataclass(frozen=True)
class Share:
    """Of one sequence of a micro-batch, which has `num_tokens` without padding, what a rank holds."""

    micro_batch: int
    sequence: int  # counted in its stage
    num_tokens: int
    layout: str
    parts: list[Held]


@dataclass(frozen=True)
class Found:
    """What a rank holds in a step, in the order of its batches."""

    stage: int
    place: Place
    shares: list[Share]


def explain(
    config: TrainConfig, asked: Asked, sources: Sequence[Source], stream: TokenStream, with_text: bool = False
) -> Iterator[str]:
    """The answer, line by line.

    Raises:
        ValueError: where the run has no such step or rank.
    """
    said: list[str] = []
    found, text = held_by(config, asked, stream, said.append), _Text(sources)
    names = names_of((part for share in found.shares for part in share.parts), sources)
    place, number = found.place, found.stage
    where = f"data {place.data}, ring {place.ring}, ulysses {place.ulysses}, tensor {place.tensor}"
    which = f" of stage {number}" if config.context else ""
    yield f"step {asked.step}{which}, rank {asked.rank} of {asked.ranks}: {where}"
    for share in found.shares:
        tokens = f"{sum(part.count for part in share.parts)} of {share.num_tokens} tokens"
        yield f"micro-batch {share.micro_batch}, sequence {share.sequence}: {tokens}, {share.layout} layout"
        for part in share.parts:
            document = f"{part.source} document {part.document} {names[part.source, part.document]!r}"
            yield f"  {part.range_from(part.start):<24} {document} {part.range_from(part.first)}"
            if with_text:
                yield f"  {'':<24} {text.of(part)}"
    yield from said


def held_by(
    config: TrainConfig, asked: Asked, stream: TokenStream, say: Callable[[str], None] = lambda line: None
) -> Found:
    """What a rank holds in a step. `say` is told why a layout was chosen, as the run's log says it.

    Raises:
        ValueError: where the run has no such step or rank.
    """
    if asked.ranks < 1:
        raise ValueError(f"ranks={asked.ranks} is no number of ranks: use 1 or more")
    if not 0 <= asked.rank < asked.ranks:
        raise ValueError(f"rank={asked.rank} is none of the {asked.ranks} ranks: use 0 to {asked.ranks - 1}")
    leg, first = find_step(config, asked.step, asked.ranks)
    stage, degrees, sequences = leg.config, leg.degrees, stream.stage(leg.number)
    place, setting, shares = Place.of(asked.rank, degrees), Setting(stage, degrees, asked.node, say), []
    dealt = sequences_of_step(
        sequences.documents,
        first,
        sequence_cost(stage),
        accumulation=degrees.accumulation,
        data_size=degrees.data,
        micro_batch_size=stage.train.micro_batch_size,
    )
    for micro, numbers in enumerate(dealt[:, place.data].tolist()):
        documents = [sequences.documents(n) for n in numbers]
        choices = setting.choose(documents)
        layout_name = next(iter(choices.values())).layout_name
        chunks = setting.chunks(choices, place.ring, place.ulysses)
        for n, lengths, mine in zip(numbers, documents, chunks, strict=True):
            shares.append(Share(micro, n, sum(lengths), layout_name, list(find(sequences, n, mine))))
    return Found(leg.number, place, shares)


def find_step(config: TrainConfig, step: int, ranks: int) -> tuple[Leg, int]:
    """The leg of a step (from 1), and the first of the step's sequences, counted in its stage."""
    if not 1 <= step <= config.train.steps:
        raise ValueError(f"step={step} is none of train.steps={config.train.steps}: use 1 to {config.train.steps}")
    leg = next(leg for leg in legs(config, ranks) if step <= leg.step + leg.steps)
    per_step = tokens_per_step(leg.config, leg.degrees) // int(leg.config.data.sequence_length)
    return leg, (step - 1 - leg.step) * per_step


def find(sequences: Sequences, n: int, chunks: Sequence[Chunk]) -> Iterator[Held]:
    """What lies in the chunks of sequence n, in the order of the sequence; padding is not mentioned."""
    stretches = sequences.stretches(n)
    begins = list(accumulate((stretch.length for stretch in stretches), initial=0))
    for chunk in sorted(chunks, key=lambda chunk: chunk.start):
        at, end = chunk.start, min(chunk.start + (chunk.count - 1) * chunk.step + 1, begins[-1])
        while at < end:
            number = bisect_right(begins, at) - 1
            stretch, stop = stretches[number], min(end, begins[number + 1])
            count = -((at - stop) // chunk.step)
            first = stretch.first + at - begins[number]
            yield Held(at, count, chunk.step, stretch.source, stretch.document, first)
            at += count * chunk.step


def names_of(parts: Iterable[Held], sources: Sequence[Source]) -> dict[tuple[str, int], str]:
    """The names of their documents, in one pass over those of each source, which may be millions."""
    tokens, names = {source.name: source.tokens for source in sources}, {}
    wanted: dict[str, set[int]] = {}
    for part in parts:
        wanted.setdefault(part.source, set()).add(part.document)
    for source, numbers in wanted.items():
        for number, entry in enumerate(islice(tokens[source].documents(), max(numbers) + 1)):
            if number in numbers:
                names[source, number] = entry["name"]
    return names


class _Text:
    """The first tokens of a stretch, as the tokenizer beside its corpus writes them."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._tokens = {source.name: source.tokens for source in sources}
        self._tokenizer = cache(self._load)

    def of(self, held: Held) -> str:
        """On one line; ids where the corpus came without its tokenizer."""
        tokens = self._tokens[held.source]
        begin = int(tokens.offsets[held.document]) + held.first
        count = min(TEXT_TOKENS, (held.count - 1) * held.step + 1)
        ids, tokenizer = tokens.read(begin, begin + count)[:: held.step].tolist(), self._tokenizer(held.source)
        return " ".join(map(str, ids)) if tokenizer is None else repr(tokenizer.decode(ids))

    def _load(self, source: str) -> Tokenizer | None:
        where = folder = self._tokens[source].where
        for _ in range(2):  # of a side of a corpus, or of its only shard
            folder, _ = parent(folder)
            tokenizer = load_tokenizer(open_storage(folder))
            if tokenizer is not None:
                return tokenizer
        print(f"explain: ids instead of text, {where} has no tokenizer beside it", file=sys.stderr)
        return None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: see python -m data.stream explain --help")


def parse(arguments: Sequence[str]) -> tuple[TrainConfig, Asked, bool]:
    """The config, what is asked of it, and whether text is wanted.

    Raises:
        ValueError: for a number that is missing or none, or overrides that are refused.
    """
    parser = _Parser(
        prog="python -m data.stream explain",
        description=DESCRIPTION,
        epilog=EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="step, rank and overrides")
    parser.add_argument("--text", action="store_true", help="show the beginning of each stretch's text, too")
    options = parser.parse_intermixed_args(arguments)
    given: dict[str, int] = {}
    for argument in list(options.overrides):
        key, _, value = argument.partition("=")
        if key in Asked.__dataclass_fields__:
            if not value.isdecimal():
                parser.error(f"{argument} is not a number: write it like {key}=1")
            given[key] = int(value)
            options.overrides.remove(argument)
    for key in ("step", "rank"):
        if key not in given:
            parser.error(f"{key} is missing: write it like {key}=1")
    config = compose(options.overrides)
    parallel = config.parallel
    ranks = given.get("ranks", max(1, parallel.data) * parallel.sequence * parallel.tensor)
    node = given.get("node", min(ranks, config.cluster.node_gpus))
    return config, Asked(given["step"], given["rank"], ranks, node), options.text


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code; errors are one line on standard error."""
    try:
        config, asked, with_text = parse(arguments)
        corpus = open_corpus(config)
        stream = open_stream(config, corpus)
        for line in explain(config, asked, corpus.training, stream, with_text):
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # | head: enough was read, and nothing may be written any more when Python exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"explain: {' '.join(str(error).split())}", file=sys.stderr)
        return CONFIGURATION if isinstance(error, ValueError) else INPUT_OUTPUT
    return DONE


if __name__ == "__main__":
    sys.exit(main([argument for argument in sys.argv[1:] if argument != "explain"]))
