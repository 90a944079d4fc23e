"""Reading what was prepared: how fast, how much, how soon after a start, in how much memory, how evenly dealt.

Parts of `benchmarks/data.py`. Corpora are made up: random ids, real shards in a temporary folder.
"""

import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.data_part import Part
from conf.compose import compose
from data.balance import deal
from data.format import BLOCK_TOKENS, Tokens, open_shard
from data.loader import Documents, Loader
from data.stream import Sequences, Source, Stage, TokenStream, finite
from data.writer import ShardWriter
from parallel.deal import deal as lay_out
from parallel.layout import LAYOUTS
from training.estimate import flops_per_sequence
from training.explain import find

RANKS = 8
ALONE = {"micro_batch_size": 1, "accumulation": 1, "data_rank": 0, "data_size": 1}
LENGTHS = {"128k": 1 << 17, "1M": 1 << 20}
ACCUMULATION, BOUND = 4, {"128k": 1.15, "1M": 1.4}


def speed(quick: bool) -> Part:
    """Batches of one rank of eight, against copying as many bytes.

    Both go through more memory than caches hold: a batch is tokens, labels and positions, int64, from tokens of two
    bytes in the page cache; a copy is of three arrays as large, each from another place.
    """
    length, number, rounds = 1 << 20, 32 if quick else 128, 5 if quick else 15
    elements = length // RANKS
    source = np.ones(3 * elements * number, np.int64)
    rows = []
    with corpus([length] * number) as tokens:
        stream = single(tokens, length)
        for layout in ("contiguous", "zigzag", "striped"):
            loads, copies = [], []
            for _ in range(rounds + 1):  # interleaved; the first checks checksums
                loads.append(_load_seconds(stream, layout, length, number))
                copies.append(_copy_seconds(source, elements))
            load, copy = statistics.median(loads[1:]), statistics.median(copies[1:])
            rows.append(
                {
                    "layout": layout,
                    "tokens": elements,
                    "first ms": 1e3 * loads[0],
                    "load ms": 1e3 * load,
                    "copy ms": 1e3 * copy,
                    "of memcpy": copy / load,
                    "million tokens/s": elements / load / 1e6,
                }
            )
    criteria = [report.at_least("contiguous slice: loading / memcpy", rows[0]["of memcpy"], 0.5)]
    return Part("loading", rows, criteria, ["loading: a copy is of tokens, labels and positions, int64, of the slice"])


def _load_seconds(stream: Sequences, layout: str, length: int, number: int) -> float:
    """Of one batch of rank 3, on an average over so many sequences. Nothing else is done meanwhile."""
    take = taker(layout, length, 3)
    taken = take([(length,)])  # all are alike; what a plan costs is not the loader's
    given = ALONE | {"first_sequence": 0, "num_steps": number}
    begin = time.perf_counter()
    with Loader(stream, lambda documents: taken, **given) as loader:
        for _ in loader:
            pass
    return (time.perf_counter() - begin) / number


def _copy_seconds(source: np.ndarray, elements: int) -> float:
    """Of three copies, made as the loader makes its batches: in a thread of its own, the last three sets kept."""

    def copy() -> None:
        kept: deque[list[np.ndarray]] = deque(maxlen=3)
        for start in range(0, len(source), 3 * elements):
            kept.append([part.copy() for part in np.split(source[start : start + 3 * elements], 3)])

    begin = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(copy).result()
    return (time.perf_counter() - begin) * 3 * elements / len(source)


def bytes_read(quick: bool) -> Part:
    """Bytes that each of eight ranks reads, from /proc/self/io, against its ranges rounded out to blocks of a CRC.

    Ranges of shuffled documents lie anywhere, several of them in one block: what is in a block that another range had
    read, and checked, before is read once more, by itself.
    """
    length = 250_000 if quick else 1_000_000  # no multiple of a block: sequences begin anywhere in one
    drawn = np.minimum(np.random.default_rng(0).lognormal(8.3, 1.2, 10**6).astype(int) + 1, 200_000)
    packed = drawn[: int(np.searchsorted(np.cumsum(drawn), 4 * length))].tolist()
    rows, criteria = [], []
    for name, lengths in {"one": [4 * length], "packed": packed, "shuffled": packed}.items():
        with corpus(lengths) as tokens:
            for layout in LAYOUTS:
                ranks = [
                    _bytes_of_rank(Path(tokens.where), layout, length, rank, name == "shuffled")
                    for rank in range(RANKS)
                ]
                worst = max(ranks, key=lambda found: found["read"] / found["blocks"])
                once_more = max(found["read"] / (found["blocks"] + found["ranges"]) for found in ranks)
                at_once = max(found["at once"] for found in ranks) / 1e3
                rows.append(
                    {
                        "documents": name,
                        "layout": layout,
                        "read kB": worst["read"] / 1e3,
                        "ranges kB": worst["ranges"] / 1e3,
                        "ranges in blocks kB": worst["blocks"] / 1e3,
                        "read / blocks": worst["read"] / worst["blocks"],
                        "at once kB": at_once,
                        "sequence kB": 2 * length / 1e3,
                    }
                )
                what = f"bytes, {name}, {layout}"
                if name == "shuffled":
                    criteria.append(report.at_most(f"{what}: read / (ranges in blocks + ranges)", once_more, 1.0))
                else:
                    criteria.append(report.at_most(f"{what}: read / ranges in blocks", rows[-1]["read / blocks"], 1.0))
                if layout == "striped":
                    criteria.append(report.at_most(f"{what}: kB at once", at_once, 3 * 2 * BLOCK_TOKENS / 1e3))
    return Part("bytes", rows, criteria, ["bytes: of the rank that reads most beyond its ranges, nothing read before"])


def _bytes_of_rank(folder: Path, layout: str, length: int, rank: int, shuffled: bool) -> dict[str, int]:
    """Bytes read for one sequence, of its ranges, of these in whole blocks, and the most that was read at once."""
    tokens, number = open_shard(folder), 1
    stream, sizes, read = single(tokens, length, shuffled), list[int](), tokens.read
    tokens.read = lambda start, stop: (sizes.append(stop - start), read(start, stop))[1]  # type: ignore[method-assign]
    given, take = ALONE | {"first_sequence": number, "num_steps": 1}, taker(layout, length, rank)
    [chunks], _ = take([stream.documents(number)])  # also imports what it needs, before bytes are counted
    done = _bytes_during(lambda: list(Loader(stream, take, **given)))
    blocks, ranges = set[int](), 0
    for held in find(stream, number, chunks):
        begin = int(tokens.offsets[held.document]) + held.first
        stop = begin + (held.count - 1) * held.step + 1
        stop += stop < int(tokens.offsets[held.document + 1])  # the label of the last token
        blocks.update(range(begin // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)))
        ranges += stop - begin
    whole = sum(min(BLOCK_TOKENS, tokens.num_tokens - block * BLOCK_TOKENS) for block in blocks)
    return {"read": done, "ranges": 2 * ranges, "blocks": 2 * whole, "at once": 2 * max(sizes)}


def _bytes_during(call: Callable[[], Any]) -> int:
    """Bytes that this process gets from read calls meanwhile, without those of asking."""

    def asked() -> int:
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])

    first, second = asked(), asked()
    call()
    return asked() - second - (second - first)


def resume(quick: bool) -> Part:
    """From nothing to the first batch, at token 10^7 and at 10^8 of the run."""
    length, rounds = 8192, 7 if quick else 25
    rng = np.random.default_rng(0)
    rows, criteria = [], []
    for num_tokens in (20_000_000,) if quick else (20_000_000, 200_000_000):
        drawn = rng.lognormal(7.5, 1.2, num_tokens // 1000).astype(int) + 1
        with corpus(drawn[: int(np.searchsorted(np.cumsum(drawn), num_tokens))].tolist()) as tokens:
            for long, short in (("consecutive", "pack"), ("windows", "fit")):
                seconds: dict[int, list[float]] = {10**7: [], 10**8: []}
                for _ in range(rounds + 1):  # interleaved; the first warms the page cache
                    for at, taken in seconds.items():
                        taken.append(_resume_seconds(Path(tokens.where), at // length, length, long, short))
                early, late = (statistics.median(taken[1:]) for taken in seconds.values())
                what = f"{long}, {short}, {num_tokens // 10**6}M tokens an epoch"
                rows.append(
                    {"stream": what, "at 10^7 ms": 1e3 * early, "at 10^8 ms": 1e3 * late, "ratio": late / early}
                )
                criteria.append(report.at_most(f"resume, {what}: 10^8 / 10^7", late / early, 1.2))
    return Part("resume", rows, criteria, ["resume: open, stream, cursor, first batch of 8,192 tokens"])


def _resume_seconds(folder: Path, sample: int, length: int, long: str, short: str) -> float:
    def opened() -> TokenStream:
        source = Source("made up", open_shard(folder), Fraction(1))
        return TokenStream([source], [Stage(length, None)], seed=0, long=long, short=short)

    cursor = opened().cursor(0, sample)
    begin = time.perf_counter()
    stream = opened()
    stage, first = stream.start(cursor)
    with Loader(
        stream.stage(stage), taker("contiguous", length, 0, 1), **ALONE, first_sequence=first, num_steps=1
    ) as loader:
        next(loader)
    return time.perf_counter() - begin


def memory(quick: bool) -> Part:
    """Memory of a process over many loader steps, whatever an epoch begins or a sequence is made of."""
    length, steps = 512, 10_000 if quick else 100_000
    lengths = (np.random.default_rng(0).lognormal(6.5, 1.2, 3000).astype(int) + 1).tolist()
    model = compose([]).model
    rows = []
    with corpus(lengths) as tokens:
        given = {"micro_batch_size": 1, "accumulation": 2, "data_rank": 0, "data_size": 2, "first_sequence": 0}
        cost = lambda documents: flops_per_sequence(model, documents, length)[0]  # noqa: E731
        sequences = single(tokens, length, shuffled=True)
        held: list[float] = []
        begin = time.perf_counter()
        with Loader(sequences, taker("striped", length, 1, 2), **given, num_steps=steps, cost=cost) as loader:
            for number, _ in enumerate(loader, 1):
                if number % (steps // 100) == 0:
                    held.append(_anonymous_bytes())
        seconds = time.perf_counter() - begin
    settled = held[len(held) // 10 :]  # after a tenth of the steps
    apart = (max(settled) - min(settled)) / 2 / statistics.mean(settled)
    rows.append(
        {
            "steps": steps,
            "epochs": steps * 4 * length / sum(lengths),
            "MB after 10 %": settled[0] / 1e6,
            "MB at the end": settled[-1] / 1e6,
            "± %": 100 * apart,
            "steps/s": steps / seconds,
        }
    )
    criteria = [report.at_most(f"memory over {steps} steps, ± %", 100 * apart, 2.0)]
    return Part("memory", rows, criteria, ["memory: anonymous pages of the whole process, torch's own among them"])


def _anonymous_bytes() -> int:
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def balance(quick: bool) -> Part:
    """Steps of 32 packed sequences on 8 data ranks, by number and dealt by cost, in FLOPs of the 8b model."""
    model = compose(["model=8b"]).model
    rows, criteria = [], []
    for size, length in LENGTHS.items():
        for name in ("long", "mixed", "web"):
            for accumulation in (1, 2, ACCUMULATION, 8):
                shape = accumulation, RANKS, 1
                steps = max(4, (1 if quick else 4) * (32 if size == "128k" else 8) // accumulation)
                line = _packed(_draw(name, np.random.default_rng(0)), length, steps * accumulation * RANKS)
                costs = np.array([flops_per_sequence(model, documents, length)[0] for documents in line])
                each = costs.reshape(steps, -1)
                ideal = float(costs.sum()) / RANKS
                ways = {
                    "by number": [step.reshape(shape) for step in each],
                    "dealt": [step[deal(step.tolist(), *shape)] for step in each],
                }
                row: dict[str, Any] = {"length": size, "documents": name, "a rank": accumulation, "steps": steps}
                for way, shares in ways.items():
                    # Totals: ranks wait for each other once a step; in lockstep: in each micro-batch, as FSDP does.
                    row[f"total {way}"] = sum(float(s.sum(axis=(0, 2)).max()) for s in shares) / ideal
                    row[f"lockstep {way}"] = sum(float(s.sum(axis=2).max(axis=1).sum()) for s in shares) / ideal
                rows.append(row)
                if accumulation == ACCUMULATION:
                    what = f"balance, {size}, {name}, {accumulation} sequences a rank"
                    criteria.append(report.at_most(f"{what}: total", row["total dealt"], BOUND[size]))
                    criteria.append(report.at_most(f"{what}: lockstep", row["lockstep dealt"], BOUND[size]))
    notes = [
        f"balance: judged at {ACCUMULATION} sequences a rank: {32 * LENGTHS[size] / 2**20:g}M tokens a step at {size}"
        for size in LENGTHS
    ]
    return Part("balance", rows, criteria, notes)


def _draw(name: str, random: np.random.Generator) -> Callable[[], float]:
    """Lengths of documents, as `benchmarks/balance.py` has them."""
    between = lambda low, high: np.exp(random.uniform(np.log(low), np.log(high)))  # noqa: E731
    return {
        "long": lambda: between(1 << 16, 1 << 19),
        "mixed": lambda: between(1 << 16, 1 << 18) if random.random() < 0.05 else random.lognormal(8.3, 1.2),
        "web": lambda: random.lognormal(5.8, 1.5),
    }[name]


def _packed(draw: Callable[[], float], length: int, number: int) -> list[tuple[int, ...]]:
    """Documents laid end to end and cut where a sequence ends."""
    ends = [0]
    while ends[-1] < number * length:
        ends.append(ends[-1] + max(1, int(draw())))
    cuts = np.union1d(np.minimum(ends, number * length), np.arange(number + 1) * length)
    parts = np.split(np.diff(cuts), np.searchsorted(cuts[:-1], np.arange(1, number) * length))
    return [tuple(part.tolist()) for part in parts]


@contextmanager
def corpus(lengths: Sequence[int]) -> Iterator[Tokens]:
    """A shard of made-up documents of these lengths."""
    with TemporaryDirectory() as folder:
        rng = np.random.default_rng(1)
        with ShardWriter(Path(folder, "shard"), 32_768, "made up") as writer:
            for number, length in enumerate(lengths):
                writer.write(rng.integers(0, 32_768, length, dtype=np.uint16))
                writer.end_document(str(number), num_bytes=length)
        tokens = open_shard(Path(folder, "shard"))
        yield tokens
        tokens.close()


def single(tokens: Tokens, length: int, shuffled: bool = False) -> Sequences:
    """The sequences of one source in the default order, or that in which documents are stored."""
    if not shuffled:
        return finite(tokens, length)
    return TokenStream([Source("made up", tokens, Fraction(1))], [Stage(length, None)], seed=0).stage(0)


def taker(layout: str, length: int, rank: int, ranks: int = RANKS) -> Callable[[Documents], tuple[Any, Any]]:
    """`take` without plans, of a rank of a ring."""
    return lambda documents: (lay_out(layout, documents, length, ranks).chunks(rank), {})


PARTS: dict[str, Callable[[bool], Part]] = {
    "load": speed,
    "bytes": bytes_read,
    "resume": resume,
    "memory": memory,
    "balance": balance,
}
