"""Does the planner know what a rank of a real cluster will hold? Twelve true configurations, planned and rehearsed.

    python benchmarks/rehearsal.py [--quick] [--json PATH]

A rehearsal (`training.rehearse`) runs the program itself, two steps as one rank of many: on a CPU with tensors that
have no numbers, whose bytes are counted as they come and go; on a GPU for real. What kernels take inside of one
operation is the same formula on both sides where there is no GPU.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from conf.compose import compose  # noqa: E402
from conf.schema import TrainConfig  # noqa: E402
from training.rehearse import rehearse  # noqa: E402

BOUND = 0.03
CONFIGURATIONS = {  # ranks:rank, then what differs
    "8b 128K, ring 8": "8:3 model=8b data.sequence_length=128K parallel.sequence=8",
    "8b 128K, ring 8, full": "8:0 model=8b data.sequence_length=128K parallel.sequence=8 train.recompute=full",
    "8b 128K, ring 8, data 4, 4 micro-batches": "32:9 model=8b data.sequence_length=128K parallel.sequence=8 "
    "train.global_batch_tokens=2M",
    "8b 128K, ring 4, tensor 2, none": "8:5 model=8b data.sequence_length=128K parallel.sequence=4 parallel.tensor=2 "
    "train.recompute=none",
    "8b 1M, ring 32": "32:17 model=8b data.sequence_length=1M parallel.sequence=32",
    "8b 1M, ring 32, full": "32:31 model=8b data.sequence_length=1M parallel.sequence=32 train.recompute=full",
    "8b 1M, ring 32, tensor 8": "256:17 model=8b data.sequence_length=1M parallel.sequence=32 parallel.tensor=8",
    "8b 1M, ring 8 in ulysses 8": "64:11 model=8b data.sequence_length=1M parallel.sequence=64 parallel.ulysses=8",
    "8b 1M, ring 256": "256:200 model=8b data.sequence_length=1M parallel.sequence=256",
    "70b 128K, ring 8, tensor 8": "64:40 model=70b data.sequence_length=128K parallel.sequence=8 parallel.tensor=8",
    "70b 1M, ring 64, tensor 8": "512:300 model=70b data.sequence_length=1M parallel.sequence=64 parallel.tensor=8",
    "70b 1M, ring 64 in ulysses 8": "512:7 model=70b data.sequence_length=1M parallel.sequence=512 parallel.ulysses=8",
}
COMMON = ["data=text", "data.vocab_size=128256", "cluster=h100_ib400", "train.dtype=bfloat16"]


def main() -> int:
    arguments = report.arguments(__doc__.splitlines()[0]).parse_args()
    machine = report.machine()
    names = list(CONFIGURATIONS)[::6] if arguments.quick else list(CONFIGURATIONS)
    rows = []
    for name in names:
        rehearsed, *overrides = CONFIGURATIONS[name].split()
        rows.append({"configuration": name} | judge(compose([*COMMON, f"run.rehearse={rehearsed}", *overrides])))
        print(f"{name}: {rows[-1]['planned GB']:.2f} GB planned, {rows[-1]['rehearsed GB']:.2f} rehearsed", flush=True)
    worst = max(abs(row["ratio"] - 1) for row in rows)
    criteria = [report.at_most(f"planned peak against the rehearsed one, worst of {len(rows)}", worst, BOUND)]
    return report.finish(machine, rows, criteria, arguments.json)


def judge(config: TrainConfig) -> dict[str, Any]:
    """A row of the table."""
    rehearsal = rehearse(config)
    plan = rehearsal.plan
    return {
        "planned GB": plan.peak_bytes / 1e9,
        "rehearsed GB": rehearsal.peak_bytes / 1e9,
        "ratio": plan.peak_bytes / rehearsal.peak_bytes,
        "when": plan.moment,
        "device": rehearsal.device,
        "rehearsed in s": sum(rehearsal.step_seconds),
    }


if __name__ == "__main__":
    sys.exit(main())
