"""What a config needs and how fast it can be, before it is queued. No torch, no GPU, within a second.

python plan.py model=8b data.sequence_length=1M parallel.sequence=32 cluster=h100_ib400 train.dtype=bfloat16
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from conf.compose import compose
from conf.schema import TrainConfig, parse_length, resolve
from training import timeline
from training.corpus import legs
from training.max_context import longest
from training.nearest import MOST_RANKS, nearest
from training.plan_record import record, rows
from training.plan_table import longest_line, page, ranking, verdict
from training.planning import default_ranks, plan
from training.searching import Row, search

DONE, CONFIGURATION, INPUT_OUTPUT = 0, 3, 74  # exit codes

DESCRIPTION = """\
What a config of train.py needs and how fast it can be: memory of a rank by cause against the device's, time of a step
by cause with what is exposed, MFU, whether blocks are long enough to hide their transfer, traffic, checkpoint, and what
the run would refuse. Runs without torch or a GPU.
"""

EPILOGUE = """\
overrides are those of train.py (all of them: conf/schema.py); these matter most here:
  model=debug|125m|1b|7b|8b|70b      cluster=laptop|h100_ib400|h200_ib400|a100_ib200|b200_ib400
  data.sequence_length=1M            train.dtype=bfloat16   train.recompute=none|block|full   train.offload=true
  parallel.data= .sequence= .tensor= .ulysses= .shard=      parallel.layout= .route=

examples:
  python plan.py experiment=8b_1m
  python plan.py experiment=8b_1m --search                      the fastest config for as many ranks
  python plan.py experiment=8b_1m --ranks 64 --max-context      the longest sequence on 64 ranks
  python plan.py model=70b cluster=h100_ib400 train.dtype=bfloat16 data.sequence_length=128K --ranks 64 --search

exit codes: 0 it fits; 3 it is refused or does not fit, then the nearest config that runs is named, or something else
that was asked for cannot be; 74 a file cannot be written
"""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(CONFIGURATION, f"error: {message}: python plan.py --help lists what there is\n")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks: use 1 or more")
    return int(text)


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "plan.py", description=DESCRIPTION, epilog=EPILOGUE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="key=value, as for train.py")
    made.add_argument(
        "--ranks",
        type=positive,
        metavar="N",
        help="ranks in all; default: data × sequence × tensor, where parallel.data=-1 counts as 1",
    )
    made.add_argument(
        "--documents",
        metavar="LENGTHS",
        help="lengths of the documents of each sequence, like 512K,8x64K for one and eight; default: one as long as it",
    )
    made.add_argument(
        "--search",
        action="store_true",
        help="also rank all ways to cut the ranks into data, sequence, Ulysses and tensor, with all policies of memory",
    )
    made.add_argument("--max-context", action="store_true", help="also find the longest sequence that fits")
    made.add_argument("--json", type=Path, metavar="PATH", help="write everything there; - for standard output only")
    made.add_argument(
        "--plot", type=Path, metavar="PATH", help="draw one layer's ring there, a PNG: compute against transfer"
    )
    return made


def main(arguments: Sequence[str]) -> int:
    """Prints the plan and returns the exit code."""
    options = parser().parse_intermixed_args(arguments)
    alone = options.json is not None and str(options.json) == "-"
    say = (lambda text: None) if alone else print
    result: dict[str, Any] = {}
    try:
        code = run(options, say, result)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        message = " ".join(str(error).splitlines())
        print(f"error: {message}", file=sys.stderr)
        # A plan that is good stays so where something else that was asked for fails.
        result |= {"error": message} if "fits" in result else {"fits": False, "refusals": [message]}
        code = INPUT_OUTPUT if isinstance(error, OSError) else CONFIGURATION
    text = json.dumps(result, indent=1) + "\n"
    if alone:
        print(text, end="")
    elif options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text)
    return code


def run(options: argparse.Namespace, say: Callable[[str], None], result: dict[str, Any]) -> int:
    """Fills `result` with what is found. Raises ValueError and OSError, for what may fail of a good plan at the end."""
    if options.documents is not None and options.max_context:
        raise ValueError("--max-context is about sequences of one document: leave out --documents, or --max-context")
    config = compose(options.overrides)
    ranks = default_ranks(config) if options.ranks is None else options.ranks
    steps = legs(config, ranks)
    if config.context:
        for leg in steps:
            say(f"stage {leg.number}: {leg.steps} steps, sequences of {leg.config.data.sequence_length:,}")
        longest_leg = max(steps, key=lambda leg: int(leg.config.data.sequence_length))
        config = dataclasses.replace(longest_leg.config, context=[])
        length = f"data.sequence_length={config.data.sequence_length} model.rope_theta={config.model.rope_theta:g}"
        say(f"planned is the one with the longest, as with 'context=[]' {length}\n")
    lengths = documents(options.documents, config)
    whole = (lengths,) * config.train.micro_batch_size if lengths else None
    resolve(config, ranks)
    try:
        found = plan(config, ranks, whole)
    except ValueError as error:
        if not str(error).startswith("parallel."):
            raise
        # Such as buffers beyond their budget: other axes may do.
        near = nearest(config, ranks, lengths)
        result["nearest"] = near and named(near)
        raise ValueError(f"{error}; {advice(ranks, near)}") from None
    result |= record(found)
    say(page(found))
    say(f"\n{verdict(found)}")
    if not found.fits or found.refusals:
        near = nearest(config, ranks, lengths)
        result["nearest"] = near and named(near)
        say(advice(ranks, near))
    if options.search:
        ranked = search(config, ranks, lengths)
        result["search"] = rows(ranked)
        say(f"\n{ranking(ranked)}")
    if options.max_context:
        most = longest(config, ranks)
        result["max_context"] = dataclasses.asdict(most)
        say(f"\n{longest_line(most)}")
    if options.plot is not None:
        timeline.draw(found, options.plot)
        say(f"\n{options.plot}: one layer's ring")
    return DONE if found.fits and not found.refusals else CONFIGURATION


def documents(text: str | None, config: TrainConfig) -> tuple[int, ...] | None:
    """Lengths of documents from text like 512K,8x64K; None for None."""
    if text is None:
        return None
    parts: list[tuple[int, int]] = []  # how many of which length
    for part in text.split(","):
        times, crossed, length = part.strip().partition("x")
        if not crossed:
            times, length = "1", times
        if not times.isdecimal() or not int(times):
            right = f"{length}x{times}" if length.isdecimal() and times else "8x64K"
            raise ValueError(f"--documents {part.strip()} has no plain number before its x: write it like {right}")
        parts.append((int(times), parse_length("--documents", length)))
    tokens, whole = sum(times * length for times, length in parts), int(config.data.sequence_length)
    if tokens > whole:
        raise ValueError(f"--documents {text} are {tokens} tokens, more than data.sequence_length={whole}")
    return tuple(length for times, length in parts for _ in range(times))


def named(near: Row) -> dict[str, Any]:
    """The nearest config for machines; `arguments` are its overrides, with --ranks where these do not say it."""
    return {"arguments": near.arguments, "overrides": near.overrides, "ranks": near.degrees.world}


def advice(ranks: int, near: Row | None) -> str:
    """The nearest config that runs, in words that can be pasted."""
    if near is None:
        return (
            f"no config fits and is accepted, on up to {max(ranks, MOST_RANKS)} ranks either: use a smaller model or "
            "shorter sequences"
        )
    more = f" on {near.degrees.world} ranks" if near.degrees.world != ranks else ""
    return (
        f"nearest that fits{more}: {near.arguments}   ({near.peak_bytes / 1e9:.1f} GB a rank, "
        f"{near.timing.tokens_per_second:,.0f} tokens/s)"
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:  # `| head` has seen enough
        os._exit(DONE)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(INPUT_OUTPUT)
