"""Seconds of one training step by cause, with what of each is exposed; bytes that cross links; MFU. No torch here.

Left out: stragglers, launches of kernels, reading data, validation, checkpoints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conf.schema import Degrees, TrainConfig
from parallel.setting import Setting, whole
from training.estimate import flops_per_sequence
from training.ring_time import Attention, play_all
from training.step_time import COMMUNICATION, Cause, Step, Traffic


@dataclass(frozen=True)
class Timing:
    """What one step takes.

    Attributes:
        causes: by the names of COMPUTE and COMMUNICATION; a cause that takes no time is left out.
        traffic: by axis: ring, ulysses, tensor, shard, and replicate for gradients summed over replicas of the shards.
        flops_causal, flops_noncausal: of the step, without what is recomputed; see `training.estimate`.
        ceiling_seconds: of the same step, were attention at its kernels' rate and products at theirs all there is.
        attention: by kind.
    """

    causes: dict[str, Cause]
    traffic: dict[str, Traffic]
    tokens: int
    ranks: int
    flops_causal: float
    flops_noncausal: float
    peak_flops: float
    ceiling_seconds: float
    attention: dict[str, Attention]

    @property
    def step_seconds(self) -> float:
        return sum(cause.exposed_seconds for cause in self.causes.values())

    @property
    def exposed_seconds(self) -> float:
        """Of communication."""
        return sum(cause.exposed_seconds for name, cause in self.causes.items() if name in COMMUNICATION)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def mfu_causal(self) -> float:
        return self._mfu(self.flops_causal, self.step_seconds)

    @property
    def mfu_noncausal(self) -> float:
        return self._mfu(self.flops_noncausal, self.step_seconds)

    @property
    def mfu_ceiling(self) -> float:
        """Causal, of `ceiling_seconds`: what no schedule beats with these kernels."""
        return self._mfu(self.flops_causal, self.ceiling_seconds)

    def _mfu(self, flops: float, seconds: float) -> float:
        return flops / (seconds * self.ranks * self.peak_flops)


def timing(
    config: TrainConfig,
    degrees: Degrees,
    setting: Setting,
    documents: Sequence[Sequence[int]] | None = None,
    host_bytes: float = 0.0,
    attention: Mapping[str, Attention] | None = None,
) -> Timing:
    """Seconds by cause of one step, all of whose micro-batches have these documents (default: one a sequence).

    host_bytes: that one micro-batch keeps in the host's memory for each rank, where train.offload is set. attention:
    what `play_all` returns, where it is played already.
    """
    documents = documents or whole(config)
    attention = attention or play_all(setting, documents)
    step = Step(config, degrees, setting, attention, host_bytes)
    step.run()
    model, sequences = config.model, degrees.data * degrees.accumulation
    flops = [flops_per_sequence(model, lengths, setting.length) for lengths in documents]
    causal, noncausal = (sequences * sum(column) for column in zip(*flops, strict=True))
    return Timing(
        causes={name: cause for name, cause in step.causes().items() if cause.seconds > 0},
        traffic={name: traffic for name, traffic in step.traffic.items() if traffic.rank_bytes > 0},
        tokens=sequences * config.train.micro_batch_size * setting.length,
        ranks=degrees.world,
        flops_causal=causal,
        flops_noncausal=noncausal,
        peak_flops=config.logging.peak_flops or config.cluster.peak_flops,
        ceiling_seconds=step.ceiling_seconds(sum(map(sum, documents))),
        attention=attention,
    )
