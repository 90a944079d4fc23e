"""The loss on held-out documents: every token counted once, whatever the number of ranks or the batch."""

import torch

from conf.schema import TrainConfig
from data.format import Shard
from data.loader import Loader, Take
from data.stream import TokenStream
from model.transformer import Transformer
from parallel.collectives import all_total
from parallel.mesh import Mesh
from parallel.ring import require_same_plan


class _FirstSequences:
    """A stream that ends after `count` sequences: what a batch asks for beyond them has no documents."""

    def __init__(self, stream: TokenStream, count: int):
        self._stream, self._count = stream, count

    def documents(self, n: int) -> tuple[int, ...]:
        return self._stream.documents(n) if n < self._count else ()

    def labelled(self, n: int, start: int, stop: int):
        return self._stream.labelled(n, start, stop)


class Validation:
    """Held-out sequences in their own order; the same ones each time, apart from the training stream.

    Args:
        shard: held-out documents.
        take: as the training loader's.
    """

    def __init__(self, shard: Shard, take: Take, config: TrainConfig, mesh: Mesh):
        self._stream = TokenStream(shard, int(config.data.sequence_length), shuffle=False, epochs=1)
        self._take, self._mesh, self._micro_batch_size = take, mesh, config.train.micro_batch_size
        available = self._stream.num_sequences
        self.num_sequences = min(available, config.validation.sequences or available)

    @torch.no_grad()
    def __call__(self, model: Transformer, device: torch.device) -> float:
        """Mean loss per held-out token, summed in float64. Collective over all ranks."""
        total = torch.zeros(2, dtype=torch.float64, device=device)
        sequences = self._micro_batch_size * self._mesh.data.size
        model.eval()  # cross-entropy alone, without model.z_loss
        with Loader(
            _FirstSequences(self._stream, self.num_sequences),
            self._take,
            micro_batch_size=self._micro_batch_size,
            accumulation=1,
            data_rank=self._mesh.data.rank,
            data_size=self._mesh.data.size,
            first_sequence=0,
            num_steps=-(-self.num_sequences // sequences),
        ) as loader:
            for (batch,) in loader:
                for axis in (self._mesh.sequence, self._mesh.tensor):
                    require_same_plan(list(batch.plan.values()), axis.name, device)
                local = batch.to(device)
                total[0] += model(local.tokens, local.positions, local.plan, local.labels).double()
                total[1] += batch.valid_tokens
        loss, tokens = all_total(total, self._mesh.gradient.group).tolist()
        model.train()
        model.reshard()  # no backward follows that would: weights must not stay gathered over an optimizer step
        return loss / tokens if tokens else 0.0
