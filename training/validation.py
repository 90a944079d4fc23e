"""The loss on held-out documents: every token counted once, whatever the number of ranks or the batch."""

import itertools
from collections.abc import Callable, Sequence

import torch

from conf.schema import TrainConfig
from data.loader import Loader, Take
from data.stream import Sequences, Source
from model.transformer import Transformer
from parallel.collectives import all_total
from parallel.mesh import Mesh
from parallel.ring import require_same_plan


class Validation:
    """Held-out sequences in their own order; the same ones each time, apart from the training stream.

    Args:
        held_out: of each source its sequences, which have an end.
        take: as the training loader's.
    """

    def __init__(
        self, held_out: Sequence[tuple[Source, Sequences]], take: Take, config: TrainConfig, mesh: Mesh
    ) -> None:
        self._take, self._mesh, self._micro_batch_size = take, mesh, config.train.micro_batch_size
        self._held_out = held_out

    def __call__(
        self, model: Transformer, device: torch.device, before: Callable[[int], None] = lambda number: None
    ) -> dict[str, float]:
        """`validation_loss`: the mean loss of a held-out token, sources weighted by their shares of what is trained on;
        of several sources, each one's own as `validation_loss/NAME`. A source none of whose tokens has a next one is
        left out. `before` is called with the number of each micro-batch before it begins. Collective over all ranks.
        """
        numbers = itertools.count()
        model.eval()  # cross-entropy alone, without model.z_loss
        try:
            measured = {
                source.name: self._loss(sequences, model, device, lambda: before(next(numbers)))
                for source, sequences in self._held_out
            }
        finally:
            model.train()
            model.reshard()  # no backward follows that would: weights must not stay gathered over an optimizer step
        losses = {name: loss for name, loss in measured.items() if loss is not None}
        shares = {source.name: float(source.share) for source, _ in self._held_out if source.name in losses}
        mean = sum(share * losses[name] for name, share in shares.items()) / (sum(shares.values()) or 1.0)
        each = {f"validation_loss/{name}": loss for name, loss in losses.items()} if len(self._held_out) > 1 else {}
        return {"validation_loss": mean} | each

    @torch.no_grad()
    def _loss(
        self, sequences: Sequences, model: Transformer, device: torch.device, before: Callable[[], None]
    ) -> float | None:
        """The mean over one source's held-out tokens, summed in float64; None where none has a next one."""
        total = torch.zeros(2, dtype=torch.float64, device=device)
        at_once = self._micro_batch_size * self._mesh.data.size
        assert sequences.num_sequences, "held-out sequences have an end, and there are some"
        with Loader(
            sequences,
            self._take,
            micro_batch_size=self._micro_batch_size,
            accumulation=1,
            data_rank=self._mesh.data.rank,
            data_size=self._mesh.data.size,
            first_sequence=0,
            num_steps=-(-sequences.num_sequences // at_once),
        ) as loader:
            for (batch,) in loader:
                before()
                for axis in (self._mesh.sequence, self._mesh.tensor):
                    require_same_plan(list(batch.plan.values()), axis.name, device)
                local = batch.to(device)
                total[0] += model(local.tokens, local.positions, local.plan, local.labels).double()
                total[1] += batch.valid_tokens
        loss, tokens = all_total(total, self._mesh.gradient.group).tolist()
        return loss / tokens if tokens else None
