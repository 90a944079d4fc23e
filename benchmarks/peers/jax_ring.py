"""`ringattention` (JAX) for benchmarks/attention.py: two XLA host devices in one process that has two cores.

Runs in the peer's own environment. The package holds the sequence in contiguous pieces and takes as many key/value as
query heads. It leaves the chunks, of queries and of keys, to be tuned: 256 is its fastest on two cores of 64 to 2048,
unequal ones included; LWM, its authors' own model, sets 1024, which takes more than twice as long. Checkpoint policy
and `prevent_cse` make no difference.
"""

import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.worker import PASSES, Request, Task, serve  # noqa: E402

CHUNKS = {"chunks of 256": 256, "chunks of 512": 512}
DEVICES = 2

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["JAX_PLATFORMS"] = "cpu"


def start(task: Task):
    # Imported here: only now is the process bound to its cores, and XLA starts as many threads as it has.
    import jax
    import numpy as np
    from jax.experimental.shard_map import shard_map
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from ringattention import ringattention

    split = PartitionSpec(None, "sequence")
    mesh = Mesh(np.array(jax.devices()), ("sequence",))
    assert mesh.size == DEVICES

    def compiled(chunk: int):
        blocks = {
            "causal_block_size": 1,
            "query_chunk_size": chunk,
            "key_chunk_size": chunk,
            "deterministic": True,
            "dropout_rng": None,
            "attn_pdrop": 0.0,
            "dtype": np.float32,
            "policy": jax.checkpoint_policies.nothing_saveable,
            "precision": None,
            "prevent_cse": True,
        }

        def on_device(q, k, v):
            return ringattention(q, k, v, None, None, None, "sequence", True, blocks)

        ring = shard_map(on_device, mesh=mesh, in_specs=(split,) * 3, out_specs=split, check_rep=False)

        def both(q, k, v, dout):
            out, gradients = jax.vjp(ring, q, k, v)
            return out, *gradients(dout)

        return {PASSES[0]: jax.jit(lambda q, k, v, dout: (ring(q, k, v),)), PASSES[1]: jax.jit(both)}

    run = {setting: compiled(chunk) for setting, chunk in CHUNKS.items()}
    shape = (4, 1, task.length, task.heads, task.head_dim)
    inputs = [
        jax.device_put(x, NamedSharding(mesh, split)) for x in np.fromfile(task.problem, np.float32).reshape(shape)
    ]

    def measure(request: Request) -> dict[str, float]:
        begun = time.perf_counter()
        results = jax.block_until_ready(run[request.setting][request.passes](*inputs))
        seconds = time.perf_counter() - begun
        if request.keep:
            np.stack([np.asarray(x) for x in results]).tofile(task.answer)
        return {"seconds": seconds}

    return measure


if __name__ == "__main__":
    serve(start)
