"""The longest sequence at a fixed memory of each rank: the table of the Ring Attention paper, on this machine.

    python benchmarks/max_context.py [--quick] [--json PATH] [--plot PATH]

Source: arXiv:2310.01889 table 3. From rung to rung of the ladder one part more is what Longhaul has in its place:

    vanilla                   attention by its scores, feed-forward and cross-entropy over all tokens at once
    memory-efficient          attention by tiles
    + blockwise feed-forward  and its hidden states in blocks of tokens
    + blockwise loss          and the logits, too: this is Longhaul on one rank
    ring of 2, 4, 8           the same on more ranks; the limit is each rank's

A limit is RLIMIT_DATA, set at 64 MiB above the baseline (`benchmarks/probe.py`); what does not fit makes PyTorch's
allocation fail. Weights and the optimizer's states lie in the baseline, and every rank has all of them
(parallel.shard=1): a ring gains nothing here by sharding states, which it also does unless it is told not to. Gradients
and the blocks' buffers are within the limit, and so are the ring's, which are reserved before the step. Everything is
in float32, and kept as autograd keeps it (train.recompute=none).

What a ring holds and one rank does not, its buffers of keys, values and their gradients, grows with the width of keys
and values: 16 here, a tenth of the model's, and one pool serves all layers, as in large models. The first length is
foretold from measured peaks, then moved away from ever faster and bisected, to 8 tokens of each rank. `repeats` says
that the longest passed and the next failed a second time.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import max_context_plot, report  # noqa: E402
from benchmarks.probe import Probe, probe  # noqa: E402

LIMIT_BYTES = 64 << 20
WIDTH, FFN_WIDTH, LAYERS, VOCABULARY = 160, 4 * 160, 8, 2048
MODEL = [
    f"model.model_dim={WIDTH}",
    f"model.ffn_dim={FFN_WIDTH}",
    f"model.num_layers={LAYERS}",
    f"model.vocab_size={VOCABULARY}",
    "model.num_heads=4",
    "model.num_kv_heads=1",
    "model.head_dim=16",
    "model.ffn_block_tokens=128",
    "model.loss_block_tokens=64",
    "train.recompute=none",
    "train.dtype=float32",
    "parallel.kernel=sdpa",
    "parallel.shard=1",
]
UNIT, QUICK_UNIT = 8, 16  # tokens of each rank to which the longest sequence is found
RINGS, QUICK_RINGS = (2, 4, 8), (2, 4)
SHORT, LONG, SECANTS = 256, 512, 2  # tokens of the first two lengths, whose peaks foretell a third, and it a fourth
RING_SHARE = 0.97  # of what one rank holds, the first guess for each rank of a ring
STEPS, TIMEOUT_SECONDS = 1, 300
RING_BOUND, RUNG_BOUND = 0.95, 1.1


@dataclass(frozen=True)
class Variant:
    name: str
    ranks: int
    change: str = ""  # a function of benchmarks/naive.py

    def run(self, tokens: int, limited: bool = True) -> Probe:
        return probe(
            [*MODEL, f"data.sequence_length={tokens}", f"parallel.sequence={self.ranks}"],
            self.ranks,
            steps=STEPS,
            budget_bytes=LIMIT_BYTES if limited else None,
            timeout_seconds=TIMEOUT_SECONDS,
            change=self.change and f"benchmarks.naive:{self.change}",
            hold_states=True,
        )


LADDER = (
    Variant("vanilla", 1, "vanilla"),
    Variant("memory-efficient", 1, "memory_efficient"),
    Variant("+ blockwise feed-forward", 1, "blockwise_feed_forward"),
    Variant("+ blockwise loss", 1),
)


@dataclass(frozen=True)
class Longest:
    """What was found of a variant: `tokens` is the longest sequence that fits, a multiple of unit × ranks."""

    variant: Variant
    tokens: int
    trials: int
    step_seconds: float
    repeats: bool | None
    seconds: float


def main() -> int:
    parser = report.arguments(__doc__.splitlines()[0])
    report.add_plot(parser)
    arguments = parser.parse_args()
    plot = report.plot_path(arguments)
    machine = report.machine()
    unit, rings = (QUICK_UNIT, QUICK_RINGS) if arguments.quick else (UNIT, RINGS)
    found = [longest(variant, _foretold(variant), unit, not arguments.quick) for variant in LADDER]
    for ranks in rings:
        guess = int(RING_SHARE * found[len(LADDER) - 1].tokens) * ranks
        found.append(longest(Variant(f"ring of {ranks}", ranks), guess, unit, not arguments.quick))
    rows = [_row(one, found) for one in found]
    if plot:
        max_context_plot.draw(rows, LIMIT_BYTES, plot)
    notes = [
        f"limit {LIMIT_BYTES >> 20} MiB of each rank above weights and optimizer states; {LAYERS} layers, "
        f"width {WIDTH}, feed-forward {FFN_WIDTH}, vocabulary {VOCABULARY}, 4 heads of 16 with 1 of keys and values, "
        f"float32; to {unit} tokens of each rank"
    ]
    return report.finish(machine, rows, judge(rows), arguments.json, notes)


def judge(rows: list[dict[str, Any]]) -> list[report.Criterion]:
    """Criteria of a table: each rung above the one before, and rings as many times longer as they have ranks."""
    tokens = {row["variant"]: row["tokens"] for row in rows}
    rungs = [tokens[variant.name] for variant in LADDER]
    name = "smallest growth from one rung of the ladder to the next"
    criteria = [report.at_least(name, min(b / a for a, b in zip(rungs, rungs[1:], strict=False)), RUNG_BOUND)]
    for ranks in RINGS:
        name = f"ring of {ranks} / ({ranks} x one rank, blockwise)"
        if f"ring of {ranks}" in tokens:
            criteria.append(report.at_least(name, tokens[f"ring of {ranks}"] / (ranks * rungs[-1]), RING_BOUND))
        else:
            criteria.append(report.not_judged(name, RING_BOUND, "not measured by --quick"))
    return criteria


def longest(variant: Variant, guess: int, unit: int, twice: bool) -> Longest:
    """The longest sequence of this variant within the limit."""
    begun, passed = time.perf_counter(), {}

    def fits(count: int) -> bool:
        tokens = count * unit * variant.ranks
        found = variant.run(tokens)
        passed[count] = found.step_seconds[-1] if not found.failed else None
        print(f"{variant.name}: {tokens} tokens {'too many' if found.failed else 'fit'}", flush=True)
        return not found.failed

    count, trials = bisect(fits, guess // (unit * variant.ranks))
    seconds = passed[count]
    repeats = fits(count) and not fits(count + 1) if twice else None
    return Longest(variant, count * unit * variant.ranks, trials, seconds, repeats, time.perf_counter() - begun)


def bisect(fits: Callable[[int], bool], guess: int) -> tuple[int, int]:
    """The largest count that fits, and how often was asked. `fits` is True up to it, and False beyond.

    Asks about the guess first, then ever farther from it, from 1 % on, until the answer turns; then in between.

    Raises:
        RuntimeError: where not even 1 fits.
    """
    low, high, trials = 0, None, 0
    count, stride = max(1, guess), max(1, guess // 100)
    while high is None or high - low > 1:
        trials += 1
        if fits(count):
            low = count
        else:
            high = count
        if high is None:
            count = low + stride
        elif low == 0:
            count = max(1, high - stride)
        else:
            count = (low + high) // 2
        stride *= 2
        if high == 1:
            raise RuntimeError("not even one unit of tokens fits")
    return low, trials


def _foretold(variant: Variant) -> int:
    """Where a line through the peaks of two lengths meets the limit: of two short ones, then of the last two."""
    points = [(tokens, _peak(variant, tokens)) for tokens in (SHORT, LONG)]
    for _ in range(SECANTS):
        tokens = _meets(*points[-2:])
        if tokens in dict(points):
            break
        points.append((tokens, _peak(variant, tokens)))
    return _meets(*points[-2:])


def _meets(short: tuple[int, int], long: tuple[int, int]) -> int:
    slope = (long[1] - short[1]) / (long[0] - short[0])
    return max(SHORT, round(long[0] + (LIMIT_BYTES - long[1]) / slope))


def _peak(variant: Variant, tokens: int) -> int:
    return max(variant.run(tokens, limited=False).peak_bytes)


def _row(one: Longest, found: list[Longest]) -> dict[str, Any]:
    first, single = found[0], found[len(LADDER) - 1]
    return {
        "variant": one.variant.name,
        "ranks": one.variant.ranks,
        "tokens": one.tokens,
        "tokens per rank": one.tokens // one.variant.ranks,
        "x vanilla": one.tokens / first.tokens,
        "x one rank": one.tokens / single.tokens,
        "step s": one.step_seconds,
        "trials": one.trials,
        "repeats": one.repeats,
        "search s": one.seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
