"""What is trained on: an endless, resumable stream of sequences whose position is a small dict.

The stream is a function of sources, seed and policies, and of nothing else: it knows of no ranks, batches or
prefetching, so a position means the same to every run. A sequence is of the source whose turn it is (`data.mixture`),
whose documents come in the order of the epoch (`data.order`) and are cut into sequences (`data.packing`), of which any
part is read when it is asked for (`data.sequences`). In each epoch of a source each of its tokens comes once, also
where a stage of another sequence length begins meanwhile.

`python -m data.stream explain step=N rank=R` prints the documents that a rank has in a step.
"""

import hashlib
import json
import re
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from data.format import Tokens
from data.mixture import Turns, by_fill, check_shares
from data.order import Epochs
from data.packing import Bins, Lane, Line
from data.sequences import IGNORE, Interleaved, Sequences, Stretch, check_documents, finite

__all__ = ["IGNORE", "Sequences", "Source", "Stage", "Stretch", "TokenStream", "finite"]


@dataclass(frozen=True)
class Source:
    """One of the corpora that a run is trained on."""

    name: str
    tokens: Tokens
    share: Fraction  # of all tokens


@dataclass(frozen=True)
class Stage:
    """A stretch of the run at one sequence length."""

    sequence_length: int
    num_sequences: int | None  # None = to the end of the run, in the last stage only
    label: str = ""  # what else may not change once it has begun: "key=value", as in `context`, without blank or comma


class TokenStream:
    """The sequences of each stage, and positions among them.

    Args:
        sources: their shares sum to 1.
        stages: one after the other; each goes on in every source where the stage before has come to.
        seed: of the order of documents.
        long: of documents longer than a sequence: consecutive = they go on in the next; windows = each window of T
            tokens is a sequence of its own, anywhere in the epoch.
        short: of shorter ones: pack = end to end, cut where a sequence ends; fit = whole, each where it fits best.
        upweight: (tokens, times): documents of so many tokens or more come so often in an epoch.
        positions: count from 0 in each document, or in each sequence.

    Attributes:
        fingerprint: names sources, order and stages.

    Raises:
        ValueError: where a source is empty or shorter than a sequence, or shares have no common denominator of use.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        stages: Sequence[Stage],
        *,
        seed: int,
        long: str = "consecutive",
        short: str = "pack",
        upweight: Sequence[tuple[int, int]] = (),
        positions: str = "document",
    ) -> None:
        assert sources and sum(source.share for source in sources) == 1, "shares are checked before"
        assert all(stage.num_sequences is not None for stage in stages[:-1]), "only the last stage may have no end"
        assert all(not stage.label or re.fullmatch("[^ ,=]+=[^ ,]+", stage.label) for stage in stages), "see Stage"
        self.sources, self.stages = list(sources), list(stages)
        self._long, self._short, self._positions = long, short, positions
        check_shares([source.share for source in sources])
        for source in sources:
            check_documents(source.tokens)
        self._epochs = [
            Epochs(np.diff(source.tokens.offsets), seed ^ number << 32, upweight)  # each has an order of its own
            for number, source in enumerate(sources)
        ]
        self._check_lengths()
        content = [[source.name, source.tokens.fingerprint, str(source.share)] for source in sources]
        self._order = {
            "sources": hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16],
            "seed": str(seed),
            "long": long,
            "short": short,
            "upweight": ",".join(f"{tokens}:{times}" for tokens, times in upweight) or "none",
            "positions": positions,
        }
        every = self._order | {"stages": ",".join(map(_described, stages))}
        self.fingerprint = hashlib.sha256(json.dumps(every).encode()).hexdigest()[:16]
        self._stage = lru_cache(maxsize=2)(self._open)  # one goes on from where the one before it has come to

    def stage(self, number: int) -> Sequences:
        """The sequences of a stage."""
        return self._stage(number)

    def _open(self, number: int) -> Interleaved:
        here = self.stages[number]
        if number:
            before = self._stage(number - 1)
            counts = before.turns.counts(self.stages[number - 1].num_sequences)
            follow = zip(before.lanes, counts, strict=True)
            lanes = [lane.follow(count, here.sequence_length) for lane, count in follow]
        else:
            lanes = [self._lane(epochs, here.sequence_length) for epochs in self._epochs]
        shares = [source.share for source in self.sources]
        return Interleaved(
            [source.name for source in self.sources],
            [source.tokens for source in self.sources],
            lanes,
            Turns(shares if len(shares) == 1 else by_fill(shares, [lane.fill for lane in lanes])),
            sequence_length=here.sequence_length,
            num_sequences=here.num_sequences,
            positions=self._positions,
        )

    def _lane(self, epochs: Epochs, sequence_length: int) -> Lane:
        if (self._long, self._short) == ("consecutive", "pack"):
            return Line(epochs, sequence_length)
        return Bins(epochs, sequence_length, long=self._long, short=self._short)

    def cursor(self, stage: int, sample: int) -> dict[str, Any]:
        """What a checkpoint keeps: the position after `sample` sequences of a stage, for any ranks or batches.

        `epoch` is that of the source that has come furthest, `tokens` is of all stages and counts padding, too.
        """
        sequences = self._stage(stage)
        counts = sequences.turns.counts(sample)
        before = sum(each.sequence_length * each.num_sequences for each in self.stages[:stage])
        return {
            "stage": stage,
            "epoch": max(lane.epoch(count) for lane, count in zip(sequences.lanes, counts, strict=True)),
            "sample": sample,
            "tokens": before + sample * self.stages[stage].sequence_length,
            "fingerprint": " ".join(f"{key}={value}" for key, value in self._consumed(stage, sample).items()),
        }

    def start(self, cursor: dict[str, Any]) -> tuple[int, int]:
        """Stage and sample to go on with after a cursor.

        The last stage may since have another end, and stages that had not begun may be any others.

        Raises:
            ValueError: where the cursor is of other data, another order, or other stages up to where it is.
        """
        if "stage" not in cursor:
            raise ValueError(
                "the checkpoint's position in the data was written by an earlier version of Longhaul, whose order was "
                "another: start another run with run.name=NAME"
            )
        stage, sample = cursor["stage"], cursor["sample"]
        self._check_order(dict(word.split("=", 1) for word in cursor["fingerprint"].split(" ")), stage, sample)
        end = self.stages[stage].num_sequences if stage < len(self.stages) else 0
        if end is not None and sample > end:
            length = self.stages[stage].sequence_length
            raise ValueError(
                f"context.{stage}.tokens={end * length}, but the checkpoint has consumed {sample * length} in that "
                f"stage: use context.{stage}.tokens={sample * length} or more"
            )
        return (stage + 1, 0) if sample == end and stage + 1 < len(self.stages) else (stage, sample)

    def _consumed(self, stage: int, sample: int) -> dict[str, str]:
        """All that decides what has been served up to a cursor, and nothing that only decides what comes after it."""
        parts = [_described(each) for each in self.stages[:stage]]
        if sample:
            parts.append(_described(replace(self.stages[stage], num_sequences=None)))
        return self._order | {"stages": ",".join(parts) or "none"}

    def _check_order(self, theirs: dict[str, str], stage: int, sample: int) -> None:
        ours = self._consumed(stage, sample) if stage < len(self.stages) else self._order | {"stages": "fewer"}
        changed = [key for key in self._order if theirs.get(key) != ours[key]]
        if "sources" in changed:
            names = ", ".join(f"{each.name}:{each.share} ({each.tokens.where})" for each in self.sources)
            raise ValueError(
                f"the checkpoint was trained on other documents ({theirs['sources']}) than {names} "
                f"({ours['sources']}): use the data.name, data.path or data.mixture that it was trained with, or start "
                "another run with run.name=NAME"
            )
        if changed:
            keys = [f"{'train' if key == 'seed' else 'data'}.{key}" for key in changed]
            now = ", ".join(f"{key}={ours[name]}" for key, name in zip(keys, changed, strict=True))
            then = " ".join(_option(key, theirs[name]) for key, name in zip(keys, changed, strict=True))
            raise ValueError(
                f"with {now} documents come in another order than the checkpoint was trained in: use {then}, or start "
                "another run with run.name=NAME"
            )
        if theirs["stages"] != ours["stages"]:
            raise ValueError(self._advice(theirs["stages"], stage, sample))

    def _advice(self, consumed: str, stage: int, sample: int) -> str:
        """For stages that were others: all that the checkpoint has been through, and then those of this run."""
        done = []
        for part in consumed.split(",") if consumed != "none" else []:
            length, _, label = part.partition("/")
            tokens, _, number = length.partition("x")
            done.append(Stage(int(tokens), int(number or sample), label))
        context = ",".join(map(_entry, [*done, *(self.stages[stage:] or self.stages[-1:])]))
        tokens = sum(each.sequence_length * (each.num_sequences or 0) for each in done)
        lengths = f"data.sequence_length={self.stages[0].sequence_length}" if len(self.stages) == 1 else "context"
        return (
            f"{lengths} is not what the checkpoint's {tokens} tokens were trained with ({consumed}). Another sequence "
            f"length begins with a stage of its own: use 'context=[{context}]', or start another run with run.name=NAME"
        )

    def _check_lengths(self) -> None:
        for source, epochs in zip(self.sources, self._epochs, strict=True):
            for number, stage in enumerate(self.stages):
                if stage.sequence_length > epochs.num_tokens:
                    key = "data" if len(self.stages) == 1 else f"context.{number}"
                    raise ValueError(
                        f"{key}.sequence_length={stage.sequence_length} is more than the {epochs.num_tokens} tokens of "
                        f"{source.tokens.where}: use {epochs.num_tokens} or less, or prepare more documents under "
                        "another data.name"
                    )


def _option(key: str, value: str) -> str:
    """As it is typed in a shell."""
    return f"'{key}=\"{value}\"'" if "," in value else f"{key}={'null' if value == 'none' else value}"


def _described(stage: Stage) -> str:
    number = "" if stage.num_sequences is None else f"x{stage.num_sequences}"
    return f"{stage.sequence_length}{number}" + (f"/{stage.label}" if stage.label else "")


def _entry(stage: Stage) -> str:
    """A stage as an entry of `context`."""
    tokens = None if stage.num_sequences is None else stage.sequence_length * stage.num_sequences
    keys = {"tokens": tokens, "sequence_length": stage.sequence_length}
    options = keys | dict([stage.label.split("=", 1)] if stage.label else [])
    return "{" + ",".join(f"{key}:{value}" for key, value in options.items() if value is not None) + "}"


if __name__ == "__main__":
    if sys.argv[1:2] != ["explain"]:
        print("usage: python -m data.stream explain step=N rank=R [OVERRIDES]", file=sys.stderr)
        sys.exit(3)
    # Which tokens a rank holds is for parallel/ to say, which data/ does not know.
    runpy.run_module("training.explain", run_name="__main__")
