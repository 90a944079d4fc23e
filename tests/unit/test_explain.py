"""`data.stream explain`: what it says of a rank is what the rank's loader gives it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conf.compose import compose
from conf.schema import resolve, stages
from data.loader import Loader
from data.stream import Source
from data.writer import ShardWriter
from parallel.layout import global_index
from parallel.take import Take
from tests.corpora import books, run, text_config
from training.corpus import open_corpus, open_stream, sequence_cost
from training.explain import Asked, explain, find_step, held_by, main, parse

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two corpora of made-up tokens, each with a validation side."""
    root, rng = tmp_path_factory.mktemp("corpora"), np.random.default_rng(0)
    for name, mean in {"books": 300, "code": 40}.items():
        for split, number in {"train": 8000 // mean, "validation": 1}.items():
            with ShardWriter(root / name / split / "00000", 300, "made up") as writer:
                for document, length in enumerate(rng.geometric(1 / mean, number).tolist()):
                    writer.write(rng.integers(0, 300, length))
                    writer.end_document(f"{name}-{document}", num_bytes=length)
    return root


def config_of(root, *overrides):
    return compose(["model.vocab_size=300", "data.vocab_size=300", f"data.root={root}", "data.name=books", *overrides])


def axes(rank, degrees):
    """This rank's axes, counted out: ranks in order, data slowest, then ring, Ulysses, tensor."""
    ring_size = degrees.sequence // degrees.ulysses
    every = [
        (d, r, u, t)
        for d in range(degrees.data)
        for r in range(ring_size)
        for u in range(degrees.ulysses)
        for t in range(degrees.tensor)
    ]
    data, ring, ulysses, tensor = every[rank]
    axis = lambda rank, size: SimpleNamespace(rank=rank, size=size)  # noqa: E731
    return SimpleNamespace(
        data=axis(data, degrees.data),
        ring=axis(ring, ring_size),
        ulysses=axis(ulysses, degrees.ulysses),
        tensor=axis(tensor, degrees.tensor),
        gradient=axis(0, degrees.data * degrees.sequence),
    )


def batches(config, ranks, rank, step, number, first):
    """What the loader of a rank has in the step that begins with sequence `first` of a stage, by parts of train.py."""
    stage = stages(config)[number]
    degrees = resolve(stage, ranks)
    mesh = axes(rank, degrees)
    take = Take(stage, mesh, min(ranks, config.cluster.node_gpus), lambda line: None)
    sequences = open_stream(config, open_corpus(config)).stage(number)
    with Loader(
        sequences,
        take,
        micro_batch_size=stage.train.micro_batch_size,
        accumulation=degrees.accumulation,
        data_rank=mesh.data.rank,
        data_size=mesh.data.size,
        first_sequence=first,
        num_steps=1,
        cost=sequence_cost(stage),
    ) as loader:
        [found] = list(loader)
    return found, take


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ["data.sequence_length=100"]),
        (2, ["data.sequence_length=200", "train.global_batch_tokens=1600", "train.micro_batch_size=2"]),
        (4, ["data.sequence_length=250", "parallel.sequence=2", "parallel.layout=striped", "data.short=fit"]),
        (4, ["data.sequence_length=256", "parallel.sequence=4", "parallel.layout=zigzag", "data.balance=false"]),
        (8, ["data.sequence_length=512", "parallel.sequence=4", "parallel.ulysses=2", "parallel.layout=balanced"]),
        (4, ["data.sequence_length=256", "parallel.sequence=2", "parallel.tensor=2", "parallel.layout=grouped"]),
        (
            2,
            [
                "data.sequence_length=96",
                "parallel.sequence=2",
                "data.long=windows",
                "data.mixture='books:1/3,code:2/3'",
            ],
        ),
    ],
)
def test_what_is_explained_is_what_is_loaded(root, ranks, overrides):
    """Each token that a rank's loader gives it, from the document that is named; together the whole step, once."""
    config = config_of(root, *overrides)
    corpus = open_corpus(config)
    tokens = {source.name: source.tokens for source in corpus.training}
    stream = open_stream(config, corpus)
    degrees, step = resolve(config, ranks), 3
    at_once = degrees.accumulation * degrees.data * config.train.micro_batch_size
    everything = []
    for rank in range(ranks):
        found = held_by(config, Asked(step, rank, ranks, ranks), stream)
        loaded, take = batches(config, ranks, rank, step, 0, 2 * at_once)
        rows = [
            (batch.tokens[row].numpy(), global_index(chunks))
            for batch in loaded
            for row, chunks in enumerate(take(batch.documents)[0])
        ]
        assert len(rows) == len(found.shares)
        for share, (held, index) in zip(found.shares, rows, strict=True):
            place = {int(g): int(token) for g, token in zip(index, held, strict=True) if g < share.num_tokens}
            for part in share.parts:
                begin = int(tokens[part.source].offsets[part.document]) + part.first
                end = int(tokens[part.source].offsets[part.document + 1])
                assert begin + (part.count - 1) * part.step < end
                for k in range(part.count):
                    at = begin + k * part.step
                    assert place.pop(part.start + k * part.step) == tokens[part.source].read(at, at + 1)[0]
                    everything.append((share.sequence, part.start + k * part.step))
            assert not place  # nothing is held that is not explained
    lengths = [sum(stream.stage(0).documents(n)) for n in range(2 * at_once, 3 * at_once)]
    expected = [(2 * at_once + i, g) for i, length in enumerate(lengths) for g in range(length)]
    assert sorted(everything) == sorted(expected * degrees.tensor)


def test_steps_go_on_through_the_stages(root):
    """Stages of 4 and 2 steps: step 5 is the first of the second stage, step 7 of the third."""
    context = "context=[{tokens:1600,sequence_length:100},{tokens:1600,sequence_length:400},{sequence_length:200}]"
    config = config_of(root, context, "train.micro_batch_size=2", "train.steps=9", "optimizer.warmup_steps=1")
    legs = [find_step(config, step, 2) for step in range(1, 10)]
    found = [(leg.number, first) for leg, first in legs]
    assert found == [(0, 0), (0, 4), (0, 8), (0, 12), (1, 0), (2, 0), (2, 4), (2, 8), (2, 12)]
    stream = open_stream(config, open_corpus(config))
    said = list(explain(config, Asked(5, 1, 2, 2), open_corpus(config).training, stream))
    assert said[0].startswith("step 5 of stage 1, rank 1 of 2: data 1")


def test_lines_name_document_and_offsets():
    class Named:
        where, num_tokens = "made up", 10
        offsets = np.array([0, 4, 10])

        def documents(self):
            yield {"name": "first"}
            yield {"name": "second one"}

    line = SimpleNamespace(
        num_sequences=None,
        documents=lambda n: (3, 5),
        stretches=lambda n: [
            SimpleNamespace(source="books", document=1, first=2, length=3),
            SimpleNamespace(source="books", document=0, first=0, length=5),
        ],
    )
    config = compose(["data.sequence_length=8", "parallel.sequence=2", "parallel.layout=striped", "train.steps=5"])
    stream = SimpleNamespace(stage=lambda number: line)
    said = list(explain(config, Asked(2, 1, 2, 2), [Source("books", Named(), 1)], stream))
    assert said[:2] == [
        "step 2, rank 1 of 2: data 0, ring 1, ulysses 0, tensor 0",
        "micro-batch 0, sequence 1: 4 of 8 tokens, striped layout",
    ]
    assert [line.split() for line in said[2:4]] == [
        "1:2 books document 1 'second one' 3:4".split(),
        "3:8:2 books document 0 'first' 0:5:2".split(),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rank=0"], "step is missing"),
        (["step=1"], "rank is missing"),
        (["step=x", "rank=0"], "step=x is not a number"),
        (["step=0", "rank=0"], "step=0 is none of train.steps=100: use 1 to 100"),
        (["step=101", "rank=0"], "step=101 is none of"),
        (["step=1", "rank=2", "ranks=2"], "rank=2 is none of the 2 ranks: use 0 to 1"),
        (["step=1", "rank=0", "trian.steps=1"], "Did you mean train.steps"),
        (["step=1", "rank=0", "--frobnicate"], "--frobnicate"),
    ],
)
def test_what_cannot_be_explained_is_refused(root, capsys, arguments, message):
    given = ["model.vocab_size=300", "data.vocab_size=300", f"data.root={root}", "data.name=books", "train.steps=100"]
    given += ["data.sequence_length=64", "optimizer.warmup_steps=1"]
    assert main(given + arguments) == 3
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out


def test_missing_data_is_an_input_error(tmp_path, capsys):
    assert main(["step=1", "rank=0", f"data.root={tmp_path}", "data.name=none"]) == 74
    assert "data.prepare" in capsys.readouterr().err


def test_ranks_are_those_of_the_axes():
    assert parse(["step=7", "rank=3", "parallel.sequence=2", "parallel.data=3"])[1] == Asked(7, 3, 6, 6)
    assert parse(["step=7", "rank=3", "ranks=16", "cluster=h100_ib400"])[1] == Asked(7, 3, 16, 8)
    assert parse(["step=7", "rank=3", "ranks=16", "node=4"])[1].node == 4


def test_the_command_shows_text(tmp_path):
    """A prepared corpus, from the command line: text of the named book, and nothing that needs torch."""
    run(text_config(tmp_path, books(tmp_path / "in")))
    command = [sys.executable, "-m", "data.stream", "explain", "step=2", "rank=0", "--text"]
    command += [
        f"data.root={tmp_path}/corpora",
        "data=text",
        "data.name=mine",
        "data.vocab_size=300",
        "model.vocab_size=300",
        "data.sequence_length=64",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "step 2, rank 0 of 1: data 0, ring 0, ulysses 0, tensor 0"
    assert "book" in lines[2] and "It was the" in "".join(lines)
    assert subprocess.run([*command[:4], "--help"], cwd=ROOT, capture_output=True).returncode == 0
    code = "import sys, training.explain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
