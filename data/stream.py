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
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
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
    label: str = ""  # what else may not change once it has begun, as "key=value" of `context`


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
            "seed": seed,
            "long": long,
            "short": short,
            "upweight": [[tokens, times] for tokens, times in upweight],
            "positions": positions,
        }
        every = self._order | {"stages": list(map(_listed, stages))}
        self.fingerprint = hashlib.sha256(json.dumps(every).encode()).hexdigest()[:16]
        self._turns = cache(self._find_turns)
        self._opened: tuple[int, Interleaved] | None = None

    def stage(self, number: int) -> Sequences:
        """The sequences of a stage. Only the last one asked for is kept; what is kept for those before it, is let go
        once it goes on from where they have come to.
        """
        return self._open(number)

    def _open(self, number: int) -> Interleaved:
        if self._opened is None or self._opened[0] != number:
            here = self.stages[number]
            if number:
                before = self._open(number - 1).lanes
                counts = self._turns(number - 1).counts(self.stages[number - 1].num_sequences)
                lanes = [lane.follow(count, here.sequence_length) for lane, count in zip(before, counts, strict=True)]
            else:
                lanes = self._whole_lanes(number)
            sequences = Interleaved(
                [source.name for source in self.sources],
                [source.tokens for source in self.sources],
                lanes,
                self._turns(number),
                sequence_length=here.sequence_length,
                num_sequences=here.num_sequences,
                positions=self._positions,
            )
            self._opened = number, sequences
        return self._opened[1]

    def _whole_lanes(self, number: int) -> list[Lane]:
        """Of each source, at the length of a stage, as if it began with a new epoch. Nothing is dealt for them yet."""
        length = self.stages[number].sequence_length
        if (self._long, self._short) == ("consecutive", "pack"):
            return [Line(epochs, length) for epochs in self._epochs]
        return [Bins(epochs, length, long=self._long, short=self._short) for epochs in self._epochs]

    def _find_turns(self, number: int) -> Turns:
        shares = [source.share for source in self.sources]
        if len(shares) == 1:
            return Turns(shares)
        return Turns(by_fill(shares, [lane.fill for lane in self._whole_lanes(number)]))

    def cursor(self, stage: int, sample: int) -> dict[str, Any]:
        """What a checkpoint keeps: the position after `sample` sequences of a stage, for any ranks or batches.

        `tokens` is of all stages and counts padding, too.
        """
        before = sum(each.sequence_length * each.num_sequences for each in self.stages[:stage])
        return {
            "stage": stage,
            "epoch": self._epoch(stage, sample),
            "sample": sample,
            "tokens": before + sample * self.stages[stage].sequence_length,
            "fingerprint": self._consumed(stage, sample),
        }

    def _epoch(self, stage: int, sample: int) -> int:
        """That of the source that has come furthest, found by counting: no epoch is dealt for it.

        Where documents are dealt to sequences anew in a later stage, an epoch that stages share takes a few sequences
        more or less than counted, and this one number comes so much too late or too early.
        """
        epochs = [Fraction(0) for _ in self.sources]
        for number, here in enumerate(self.stages[: stage + 1]):
            counts = self._turns(number).counts(here.num_sequences if number < stage else sample)
            for source, lane in enumerate(self._whole_lanes(number)):
                epochs[source] += counts[source] / lane.per_epoch
        return int(max(epochs))

    def start(self, cursor: dict[str, Any]) -> tuple[int, int]:
        """Stage and sample to go on with after a cursor.

        The last stage may since have another end, and stages that had not begun may be any others.

        Raises:
            ValueError: where the cursor is of other data, another order, or other stages up to where it is.
        """
        if not isinstance(cursor.get("fingerprint"), dict):
            raise ValueError(
                "the checkpoint's position in the data was written by an earlier version of Longhaul, in a form that "
                "is not read any more: start another run with run.name=NAME"
            )
        stage, sample = cursor["stage"], cursor["sample"]
        self._check_order(cursor["fingerprint"], stage, sample)
        end = self.stages[stage].num_sequences if stage < len(self.stages) else 0
        if end is not None and sample > end:
            length = self.stages[stage].sequence_length
            raise ValueError(
                f"context.{stage}.tokens={end * length}, but the checkpoint has consumed {sample * length} in that "
                f"stage: use context.{stage}.tokens={sample * length} or more"
            )
        return (stage + 1, 0) if sample == end and stage + 1 < len(self.stages) else (stage, sample)

    def _consumed(self, stage: int, sample: int) -> dict[str, Any]:
        """All that decides what has been served up to a cursor, and nothing that only decides what comes after it."""
        begun = [replace(self.stages[stage], num_sequences=None)] if sample else []
        return self._order | {"stages": list(map(_listed, [*self.stages[:stage], *begun]))}

    def _check_order(self, theirs: dict[str, Any], stage: int, sample: int) -> None:
        ours = self._consumed(stage, sample) if stage < len(self.stages) else self._order | {"stages": None}
        changed = [key for key in self._order if theirs.get(key) != ours[key]]
        if "sources" in changed:
            names = ", ".join(f"{each.name}:{each.share} ({each.tokens.where})" for each in self.sources)
            raise ValueError(
                f"the checkpoint was trained on other documents ({theirs['sources']}) than {names} "
                f"({ours['sources']}): use the data.name, data.path or data.mixture that it was trained with, or start "
                "another run with run.name=NAME"
            )
        if changed:
            now, then = (
                [f"{'train' if key == 'seed' else 'data'}.{key}={_value(side[key])}" for key in changed]
                for side in (ours, theirs)
            )
            order = ["documents come in another order"] if changed != ["positions"] else []
            positions = ["tokens have other positions"] if "positions" in changed else []
            use = " ".join(f"'{each}'" if '"' in each else each for each in then)  # as it is typed in a shell
            raise ValueError(
                f"with {', '.join(now)} {' and '.join(order + positions)} than the checkpoint was trained with: use "
                f"{use}, or start another run with run.name=NAME"
            )
        if theirs["stages"] != ours["stages"]:
            raise ValueError(self._advice(theirs["stages"], stage, sample))

    def _advice(self, consumed: list[list[Any]], stage: int, sample: int) -> str:
        """For stages that were others: all that the checkpoint has been through, and then those of this run."""
        done = [Stage(length, sample if number is None else number, label) for length, number, label in consumed]
        tokens = sum(each.sequence_length * (each.num_sequences or 0) for each in done)
        trained, coming = _context(done), self.stages[stage:] or self.stages[-1:]
        present = coming[0]
        if sample and replace(present, num_sequences=sample) == done[-1]:  # it goes on, and is one stage with it
            done.pop()
            if present.num_sequences is not None and present.num_sequences < sample:
                coming = [replace(present, num_sequences=sample), *coming[1:]]
        lengths = f"data.sequence_length={self.stages[0].sequence_length}" if len(self.stages) == 1 else "context"
        return (
            f"{lengths} is not what the checkpoint's {tokens} tokens were trained with ({trained}). Another sequence "
            f"length begins with a stage of its own: use 'context={_context([*done, *coming])}', or start another run "
            "with run.name=NAME"
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


def _value(value: Any) -> str:
    """Of an option of the order, as an override has it."""
    if isinstance(value, list):  # of `upweight`
        pairs = ",".join(f"{tokens}:{times}" for tokens, times in value) or "null"
        return f'"{pairs}"' if len(value) > 1 else pairs
    return str(value)


def _listed(stage: Stage) -> list[Any]:
    """A stage in a fingerprint, which JSON does not change."""
    return [stage.sequence_length, stage.num_sequences, stage.label]


def _context(stages: Sequence[Stage]) -> str:
    """Stages as they are given in `context`."""
    entries = []
    for stage in stages:
        tokens = [] if stage.num_sequences is None else [f"tokens:{stage.sequence_length * stage.num_sequences}"]
        label = [stage.label.replace("=", ":", 1)] if stage.label else []
        entries.append("{" + ",".join([*tokens, f"sequence_length:{stage.sequence_length}", *label]) + "}")
    return f"[{','.join(entries)}]"


if __name__ == "__main__":
    if sys.argv[1:2] != ["explain"]:
        print("usage: python -m data.stream explain step=N rank=R [OVERRIDES]", file=sys.stderr)
        sys.exit(3)
    # Which tokens a rank holds is for parallel/ to say, which data/ does not know.
    runpy.run_module("training.explain", run_name="__main__")
