"""What a run trains and watches with: its state on this rank, and what ranks do together between micro-batches.

Before every micro-batch all ranks say whether they were asked to stop, and how their writers of checkpoints stand. What
follows from it they do together: leave with a checkpoint, or make one count that was written in the background.
"""

import contextlib
import functools
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

import torch

from data.stream import TokenStream
from model.transformer import Transformer
from parallel.collectives import Stopwatch
from parallel.mesh import Mesh
from training.agreement import count_ranks, on_all_ranks
from training.checkpoint.checkpoints import Checkpoints
from training.goodput import measured, sentence
from training.liveness import slowest
from training.metrics import MetricsLog
from training.pace import feed_forward_clock
from training.save_clock import SaveClock
from training.signals import Stopped, StopSignals, name
from training.validation import Validation
from training.watch import Watch

PHASES = ("data", "feed-forward", "exchange wait", "validate", "save")  # of which ranks' seconds are compared
LEDGER_SECONDS = 10.0  # must be left to add up what a long run's time went into
HASTE = 1.5  # times what a save has taken must be left of the grace to begin another


class Leave(Exception):
    """All ranks have agreed to stop, and none has begun the next micro-batch."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands after `step` steps; what a checkpoint keeps besides weights and optimizer."""

    step: int = 0
    tokens: int = 0
    stage: int = 0
    sample: int = 0  # sequences of this stage that are done
    skipped: int = 0  # steps whose loss or gradient was not finite
    skipped_in_a_row: int = 0  # of them the last ones
    owed: dict[str, Any] | None = None  # the last step's row, where the run was stopped while it validated

    def entering(self, stage: int) -> "Progress":
        """The same place, as the beginning of `stage` where that is another one."""
        return self if stage == self.stage else replace(self, stage=stage, sample=0)

    def after(self, tokens: int, sequences: int, skipped: bool) -> "Progress":
        """One step further."""
        return Progress(
            self.step + 1,
            self.tokens + tokens,
            self.stage,
            self.sample + sequences,
            self.skipped + skipped,
            self.skipped_in_a_row + 1 if skipped else 0,
        )


@dataclass
class Trainer:
    """One for the whole run, whatever its stages. Methods are collective over `world`."""

    mesh: Mesh
    model: Transformer
    optimizer: torch.optim.Optimizer
    stream: TokenStream
    checkpoints: Checkpoints
    metrics: MetricsLog
    watch: Watch
    stop: StopSignals
    saves: SaveClock
    peak_flops: float  # of one rank
    device: torch.device
    first_step: int  # that this start takes
    pace: Stopwatch = field(init=False)  # of feed-forwards
    spent: Counter[str] = field(default_factory=Counter, init=False)  # seconds by phase since ranks were last compared
    save_is_due: bool = field(default=False, init=False)  # after this step, by rank 0's clock
    _saving_untold: bool = field(default=False, init=False)
    _saving_told: float = field(default=0.0, init=False)  # seconds
    _uncommitted: bool = field(default=False, init=False)  # a checkpoint that is written in the background
    _begun: float = field(default=0.0, init=False)  # since when

    def __post_init__(self) -> None:
        self.pace = feed_forward_clock(self.model)

    def before_micro_batch(self, phase: str, step: int, number: int) -> None:
        """Tells the watch what comes, and asks all ranks whether to go on.

        Raises:
            Leave: where any rank was asked to stop.
            CheckpointError: where any rank's writer has failed.
        """
        self.watch.enter(phase, step, number)
        self.stop.armed = True
        due = phase != "validate" and number == 0 and self.mesh.world.rank == 0 and self._due(step)
        late = self._uncommitted and time.monotonic() - self._begun > self.checkpoints.config.timeouts.save_seconds
        mine = (bool(self.stop.requested), self.checkpoints.failed or late, self.checkpoints.writing, due)
        stopped, failed, writing, due_somewhere = count_ranks(mine, self.mesh.world.group, self.device)
        self.save_is_due = self.save_is_due or due_somewhere > 0
        if failed or not writing:
            self.commit()  # a writer that hangs is waited for, until the watch ends it
        if stopped:
            raise Leave

    def _due(self, step: int) -> bool:
        return self.saves.due(step, time.monotonic(), self._uncommitted)

    def save(self, progress: Progress) -> None:
        """Writes a checkpoint, or has it written in the background."""
        self.commit()
        self.save_is_due, self._saving_untold = False, True
        self._uncommitted, self._begun = self.checkpoints.config.checkpoint.background, time.monotonic()
        with self._timed("save"):
            self.metrics.flush()  # no row up to this step may be missing after a power cut
            state = asdict(progress) | {"cursor": self.stream.cursor(progress.stage, progress.sample)}
            self.checkpoints.save(progress.step, self.model, self.optimizer, state)
        self._learn()

    def commit(self) -> None:
        """Waits for what any rank is writing in the background, and makes it count."""
        if self._uncommitted:
            self._uncommitted = False
            with self._timed("save"):
                self.checkpoints.finish()
            self._learn()

    def _learn(self) -> None:
        if self.checkpoints.last is not None:
            self.saves.saved(self.checkpoints.last)

    def validate(self, validation: Validation, progress: Progress) -> dict[str, float]:
        """What a line of metrics says of held-out documents."""
        before = functools.partial(self.before_micro_batch, "validate", progress.step)
        begin = self.watch.seconds["validate"]
        with self._timed("validate"):
            losses = validation(self.model, self.device, before)
        return losses | {"validation_seconds": self.watch.seconds["validate"] - begin}

    def leave(self, progress: Progress) -> NoReturn:
        """Saves the last whole step where what is left of the time allows it, and ends the run.

        Raises:
            Stopped: always.
        """
        self.stop.begin()
        signal = max(on_all_ranks(lambda: self.stop.requested))
        self.model.reshard()  # the step that was begun is given up: its weights may lie gathered
        self.optimizer.zero_grad(set_to_none=True)
        self.commit()
        left, needed = min(on_all_ranks(self.stop.seconds_left)), max(on_all_ranks(self._save_seconds))
        saved = self.checkpoints.last is not None and self.checkpoints.last.step == progress.step
        because = ""
        if progress.step < self.first_step:
            because = "that is where it began"
        elif progress.skipped_in_a_row:
            because = "its last steps were skipped, and the weights may be why"
        elif HASTE * needed >= left and not saved:
            because = f"that takes {needed:.0f} s, and of run.grace_seconds {left:.0f} s are left"
        elif not saved:
            self.save(progress)
            self.commit()
        self.close(name(signal))
        place = f"stopped by {name(signal)} after step {progress.step}"
        if because:
            raise Stopped(f"{place}, not saved: {because}. The same command goes on from the last checkpoint, if any")
        raise Stopped(f"{place}, saved. The same command goes on from it")

    def _save_seconds(self) -> float:
        """What a save has taken on this rank, until it counted."""
        last = self.checkpoints.last
        return self.saves.estimate if last is None else last.seconds

    def saving_seconds(self) -> float:
        """For which saves held up this rank, if one has begun since this was last asked: each is told of once."""
        if not self._saving_untold:
            return 0.0
        since, self._saving_told = self._saving_told, self.watch.seconds["save"]
        self._saving_untold = False
        return self._saving_told - since

    def close(self, reason: str) -> None:
        """Notes why the run ends, and says what its time went into. Local."""
        self.metrics.end(reason, save_seconds=self.saving_seconds())
        if self.mesh.world.rank == 0 and self.stop.seconds_left() > LEDGER_SECONDS:
            with contextlib.suppress(OSError, ValueError):  # no reason to end otherwise than the others do
                so_far = measured(self.checkpoints.folder.parent)
                self.metrics.say(sentence(so_far, so_far.expected(self.saves.mtbf)))

    def spend(self, seconds: dict[str, float]) -> None:
        """Adds to what ranks are compared by. Local."""
        self.spent.update(seconds)

    def compare_ranks(self) -> None:
        """Says which rank was slowest in which phase since the last time."""
        mine = [self.spent[phase] for phase in PHASES]
        self.spent.clear()
        hosts, seconds = zip(*on_all_ranks(lambda: (socket.gethostname(), mine)), strict=True)
        if line := slowest(PHASES, seconds, hosts):
            self.metrics.say(line)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begin = self.watch.seconds[phase]
        with self.watch.phase(phase):
            yield
        self.spent[phase] += self.watch.seconds[phase] - begin
