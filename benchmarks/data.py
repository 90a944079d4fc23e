"""Is data prepared and read as fast, as exactly and in as little memory as promised?

    python benchmarks/data.py [--only PART] [--quick] [--gigabytes N] [--json PATH]

Preparing (`benchmarks/data_preparing.py`):
* tokenize: text into shards with two workers, against SentencePiece alone, by turns.
* peak: memory of `data.prepare` for 10 GB of text, as one document and as records (--quick: 0.2 GB; --gigabytes).
* exact: whole documents of the default corpus, encoded at once, against the same in batches.
* kills: 50 preparations killed at random moments and run again, against one that nobody killed.

Reading (`benchmarks/data_loading.py`):
* load: batches of one rank of eight, against copying as many bytes.
* bytes: what each of eight ranks reads of a sequence, from /proc/self/io, against its ranges in whole blocks.
* resume: from nothing to the first batch, at token 10^7 and at 10^8.
* memory: of a process over 100,000 steps of the loader.
* balance: packed sequences on eight data ranks, by number and dealt by cost. Counted, not timed.

Linux only. Most of the time goes into `peak`, which needs 25 GB of disk in TMPDIR.
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PARTS = {
    "data_preparing": ("tokenize", "peak", "exact", "kills"),
    "data_loading": ("load", "bytes", "resume", "memory", "balance"),
}


def main() -> int:
    # Here, not above: processes that data.prepare starts import this file again, and need nothing of it.
    report = importlib.import_module("benchmarks.report")
    parser = report.arguments(__doc__.splitlines()[0])
    names = [name for parts in PARTS.values() for name in parts]
    parser.add_argument("--only", choices=names, action="append", help="this part; may be given several times")
    parser.add_argument("--gigabytes", type=float, help="of text, for peak")
    arguments = parser.parse_args()
    machine, found = report.machine(), []
    for module, parts in PARTS.items():
        for name in parts:
            if name in (arguments.only or names):
                print(f"{name} …", file=sys.stderr, flush=True)
                measure = importlib.import_module(f"benchmarks.{module}").PARTS[name]
                found.append(measure(arguments.quick, *([arguments.gigabytes] if name == "peak" else [])))
    return report.finish(
        machine,
        [],
        [criterion for part in found for criterion in part.criteria],
        arguments.json,
        [note for part in found for note in part.notes],
        **{part.name.replace(" ", "_"): part.rows for part in found},
    )


if __name__ == "__main__":
    sys.exit(main())
