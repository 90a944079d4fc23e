"""A run that is killed a hundred times, at every moment of its life, against the same run left alone.

    python benchmarks/drill.py [--quick] [--kills N] [--seed S] [--json PATH]            (or: make drill)

Four processes train a tiny model, with validation, and with saves in the background. Each life of the run is struck
once: by KILL, TERM or USR1; one rank, all ranks, the launcher, or everything; while it starts, loads, trains, saves or
validates. Then the same command is given again. Where a run completes, its losses, weights and AdamW's state are held
to those of a run that nobody struck, bit for bit; another run begins, until all blows are spent. After every life each
checkpoint is read whole. Half an hour on two quiet cores, nearly all of it to start again; --quick is a dozen blows.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from benchmarks.drill_kills import MOMENTS, SIGNALS, STEPS, TARGETS, Ended, Report, drill  # noqa: E402

KILLS, QUICK_KILLS = 120, 12


def main() -> int:
    arguments = _arguments()
    machine = report.machine()
    try:
        with tempfile.TemporaryDirectory(prefix="drill-") as folder:
            found = drill(Path(folder), arguments.kills, arguments.seed, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, OSError) as error:
        print(f"drill.py: error: {error}", file=sys.stderr)
        return 1
    print("".join(f"\n{fault}\n" for fault in found.faults))
    rows, notes, criteria = _rows(found.lives), _notes(found, arguments.seed), judge(found, arguments.kills)
    return report.finish(machine, rows, criteria, arguments.json, notes, moments=_moments(found.lives))


def _arguments() -> argparse.Namespace:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, metavar="N", help=f"blows in all: {KILLS}, with --quick {QUICK_KILLS}")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the order and the moments of the blows")
    arguments = parser.parse_args()
    arguments.kills = arguments.kills or (QUICK_KILLS if arguments.quick else KILLS)
    return arguments


def judge(found: Report, kills: int) -> list[report.Criterion]:
    """What must hold after that many blows."""
    heard = [ended for ended in found.lives if ended.code == 75]
    return [
        report.at_least("blows struck", len(found.lives), kills),
        report.at_least("runs completed", found.completed, 1),
        report.at_most("completed runs that differ from the undisturbed one", len(found.differences), 0),
        report.at_most("checkpoints damaged or lost", len(found.damaged), 0),
        report.at_most("lives that hung", len(found.hangs), 0),
        report.at_most("processes that outlived their run", len(found.orphans), 0),
        report.at_most("wrong exit codes", len(found.wrong_codes), 0),
        report.at_most("steps lost where the signal was heard", sum(ended.lost_steps for ended in heard), 0),
    ]


def _rows(lives: Sequence[Ended]) -> list[dict[str, Any]]:
    """Blows by signal and target, and by the moment that they were seen to strike."""
    rows = []
    for number in SIGNALS:
        for target in TARGETS:
            of_kind = [ended for ended in lives if (ended.strike.number, ended.strike.target) == (number, target)]
            moments = Counter(ended.moment for ended in of_kind)
            codes = Counter(ended.code for ended in of_kind)
            rows.append(
                {
                    "signal": number.name.removeprefix("SIG"),
                    "to": target,
                    "blows": len(of_kind),
                    **{moment: moments[moment] for moment in MOMENTS},
                    "exit codes": " ".join(f"{code}:{times}" for code, times in sorted(codes.items(), key=str)),
                    **_spread("steps lost", [ended.lost_steps for ended in of_kind]),
                    **_spread("s to the end", [ended.end_seconds for ended in of_kind]),
                }
            )
    return rows


def _moments(lives: Sequence[Ended]) -> list[dict[str, Any]]:
    """The same blows by moment."""
    rows = []
    for moment in MOMENTS:
        there = [ended for ended in lives if ended.moment == moment]
        rows.append(
            {
                "moment": moment,
                "blows": len(there),
                **_spread("steps lost", [ended.lost_steps for ended in there]),
                **_spread("s to the end", [ended.end_seconds for ended in there]),
            }
        )
    return rows


def _notes(found: Report, seed: int) -> list[str]:
    restarts = [ended.restart_seconds for ended in found.lives if ended.restart_seconds is not None]
    lines = [f"seed {seed}: {found.completed} runs of {STEPS} steps completed, over {len(found.lives)} blows"]
    if restarts:
        most = max(restarts)
        lines.append(f"from the start to the first step: median {median(restarts):.1f} s, at most {most:.1f} s")
    return lines


def _spread(name: str, values: Iterable[float]) -> dict[str, float | None]:
    values = list(values)
    return {f"{name}: median": median(values) if values else None, f"{name}: most": max(values, default=None)}


if __name__ == "__main__":
    sys.exit(main())
