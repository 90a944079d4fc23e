"""How fast a rank computes, seen apart from how long it waits for others."""

from model.transformer import Transformer
from parallel.collectives import Stopwatch


def feed_forward_clock(model: Transformer) -> Stopwatch:
    """Counts, from now on, what `model`'s feed-forwards take in forward.

    There all ranks have equally much to do, and none waits for another: sharding has gathered the weights by then, the
    tensor axis the tokens. In the rest of a step the fast ranks wait for the slow ones, and all seem equally slow.
    """
    clock = Stopwatch()
    for layer in model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, given: clock.start(given[0].is_cuda))
        # Before the hook in which the tensor axis sums up what its ranks have.
        layer.mlp.register_forward_hook(lambda module, given, out: clock.stop(out.is_cuda), prepend=True)
    return clock
