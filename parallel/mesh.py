"""The only file that makes process groups (training/runtime.py starts the default one).

Ranks are numbered data-major, tensor fastest: rank = (data · sequence_size + sequence) · tensor_size + tensor, so that
tensor peers are neighbours, then ring peers. Weights are sharded over `gradient` = data × sequence, in whole or
(`parallel.shard`) in groups of neighbours with replicas between the groups.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from conf.schema import Degrees


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, seen from this rank."""

    group: dist.ProcessGroup | None  # None: Ulysses or the ring of a rank alone
    rank: int
    size: int

    @property
    def name(self) -> str:
        """The group's name for the ops that exchange over it, "" for a rank alone."""
        return self.group.group_name if self.size > 1 else ""


@dataclass(frozen=True)
class Mesh:
    """Axes of this rank; `parameters` is the DeviceMesh (replicate, shard, tensor) on which parameters are laid out."""

    data: Axis
    sequence: Axis  # ulysses × ring, ulysses fastest
    ulysses: Axis
    ring: Axis
    tensor: Axis
    gradient: Axis
    world: Axis
    parameters: DeviceMesh


def build_mesh(degrees: Degrees, device_type: str, timeout_seconds: float = 600) -> Mesh:
    """Groups of all axes. Collective over all ranks, of which there are `degrees.world`.

    A collective of any group that waits longer than `timeout_seconds` fails: a new group does not inherit that.
    """
    timeout = timedelta(seconds=timeout_seconds)
    replicas = degrees.data * degrees.sequence // degrees.shard
    shape = (replicas, degrees.shard, degrees.tensor)
    parameters = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard", "tensor"))
    for group in parameters.get_all_groups():
        if dist.get_backend(group) != "fake":  # a rehearsal's, where nobody waits
            _set_pg_timeout(timeout, group)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert world_size == degrees.world, (world_size, degrees)

    def axis(peers: list[list[int]], needed: bool = True) -> Axis:
        if not needed:
            return Axis(None, 0, 1)
        group, _ = dist.new_subgroups_by_enumeration(peers, timeout=timeout)
        mine = next(ranks for ranks in peers if rank in ranks)
        return Axis(group, mine.index(rank), len(mine))

    grid = [
        [
            [(d * degrees.sequence + s) * degrees.tensor + t for t in range(degrees.tensor)]
            for s in range(degrees.sequence)
        ]
        for d in range(degrees.data)
    ]
    columns = range(degrees.tensor)
    rows, width = range(degrees.sequence), degrees.ulysses
    starts = rows[::width]
    return Mesh(
        data=axis([[plane[s][t] for plane in grid] for s in rows for t in columns]),
        sequence=axis([[row[t] for row in plane] for plane in grid for t in columns]),
        ulysses=axis(
            [[plane[s + i][t] for i in range(width)] for plane in grid for s in starts for t in columns], width > 1
        ),
        # The ring has a group of its own: what it posts never queues behind another axis's collective.
        ring=axis(
            [[plane[s][t] for s in rows[i::width]] for plane in grid for i in range(width) for t in columns],
            width < degrees.sequence,
        ),
        tensor=Axis(parameters.get_group("tensor"), parameters.get_local_rank("tensor"), degrees.tensor),
        gradient=axis([[row[t] for plane in grid for row in plane] for t in columns]),
        world=Axis(dist.group.WORLD, rank, world_size),
        parameters=parameters,
    )
