"""From the documents of a micro-batch to the tokens that this rank holds of it, and its plans.

Every rank of the sequence axis makes its own, from the same documents, and all come to the same choice
(`parallel.setting`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import torch

from conf.schema import Degrees, TrainConfig
from parallel import ring
from parallel.layout import Chunk
from parallel.mesh import Mesh
from parallel.route import Route
from parallel.setting import Documents, Setting, whole


class Take:
    """`take(documents)`: the chunks of each sequence that this rank holds, and a plan for each kind of attention.

    Args: as those of `Setting`.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, node_size: int = 0, say: Callable[[str], None] = print):
        self.ring, self.ulysses = mesh.ring, mesh.ulysses
        self.setting = Setting(config, _degrees(mesh), node_size, say)
        self._make = lru_cache(maxsize=16)(self._of)  # sequences inside one long document all have the same plan

    def __call__(
        self, documents: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[Chunk, ...]], Mapping[str, torch.Tensor]]:
        return self._make(tuple(map(tuple, documents)))

    @property
    def usual_route(self) -> Route:
        return self.setting.usual_route

    def reserve(self, dtype: torch.dtype, device: torch.device, times: int = 1) -> int:
        """Makes the ring's pool as large as sequences of one document each need it; its bytes. Before the first step.

        Other documents need no more on most layouts and routes; where they do, the pool grows (`ring.num_grown`).
        `times`: see `ring.reserve`.
        """
        config, shape = self.setting.config, self.setting.shape
        plans = self.setting.plans(whole(config), self.ring.rank)
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        return ring.reserve(self.ring.name, plans.values(), *heads, dtype, device, times)

    def _of(self, documents: Documents) -> tuple[list[tuple[Chunk, ...]], Mapping[str, torch.Tensor]]:
        choices = self.setting.choose(documents)
        plans = self.setting.plans(documents, self.ring.rank, choices)
        chunks = self.setting.chunks(choices, self.ring.rank, self.ulysses.rank)
        # Not a dict: FSDP moves tensors in a dict to the GPU, and a plan is read on the host.
        return chunks, MappingProxyType({kind: torch.from_numpy(plan) for kind, plan in plans.items()})


def _degrees(mesh: Mesh) -> Degrees:
    """Sizes of a mesh's axes, as far as attention asks for them."""
    sequence, gradient = mesh.ring.size * mesh.ulysses.size, mesh.gradient.size
    return Degrees(
        gradient // sequence, sequence, mesh.tensor.size, gradient, accumulation=1, ulysses=mesh.ulysses.size
    )
