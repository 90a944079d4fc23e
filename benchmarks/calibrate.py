"""Measures what this machine reaches, and writes conf/cluster/NAME.yaml: what `auto` and plan.py then reckon with.

    python benchmarks/calibrate.py NAME [--quick] [--overwrite] [--ranks N] [--json PATH]
    torchrun --nnodes 2 --nproc-per-node 8 … benchmarks/calibrate.py NAME          (or srun: network cards, too)
    python train.py cluster=NAME …

Without NAME the rates are printed only. On GPUs there is one rank for each. On a CPU ranks share the cores, so as many
measure at once as there are cores, at least two, each with its share of threads: --ranks N for another number. The
figures are those of one dtype and head width (--dtype, --head-dim), as a rule bfloat16 and 128 on GPUs, float32 and 64
on CPUs. What one machine cannot show of itself (links of a single GPU, network cards of a single node) is taken from
the preset of --base, and marked.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from benchmarks.calibrate_rank import Options, Rates, measure  # noqa: E402
from conf.compose import compose  # noqa: E402
from conf.schema import ClusterConfig, Dtype  # noqa: E402
from training import runtime  # noqa: E402
from training.world import read_world  # noqa: E402

FOLDER = Path(__file__).resolve().parents[1] / "conf" / "cluster"
NAME = re.compile(r"[a-z][a-z0-9_]*")
KEYS = [field.name for field in dataclasses.fields(ClusterConfig)]
COUNTS = ("node_gpus", "node_nics")
BLOCK_SHARE = 48  # of a rank's memory, for one block of the feed-forward or of logits


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    speaks = True
    try:
        world = read_world(os.environ)
        speaks = world is None or world.rank == 0
        path = place(arguments.name, arguments.overwrite) if arguments.name else None
        base = arguments.base or ("h100_ib400" if torch.cuda.is_available() else "laptop")
        presets = dataclasses.asdict(compose([f"cluster={base}"]).cluster)
        ranks = world.size if world else arguments.ranks or _usual_ranks()
        machine = report.machine() if speaks else {}
        rates = measured(ranks, Options(arguments.dtype, arguments.head_dim, arguments.disk, arguments.quick))
    except ValueError as error:
        parser.exit(3, f"calibrate.py: error: {error}\n" if speaks else "")
    if not speaks:
        return 0
    cluster, missing = complete(rates, presets, arguments.name or "this machine")
    notes = [f"{key} cannot be measured here: that of cluster={base}, {cluster[key]:.3g}" for key in missing]
    if path:
        write(path, preset(cluster, missing, machine | {"ranks": ranks, "gpu": _gpu()}, base))
        notes.append(f"{path.relative_to(FOLDER.parents[1])} is written: python train.py cluster={arguments.name} …")
    rows = [{"cluster": key, "value": _text(key, cluster[key]), "measured": key not in missing} for key in KEYS[1:]]
    return report.finish(machine | {"rates": rates}, rows, [], arguments.json, notes)


def _parser() -> argparse.ArgumentParser:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the preset to write; without, nothing is written")
    parser.add_argument("--overwrite", action="store_true", help="replace a preset of this name")
    parser.add_argument("--ranks", type=int, default=0, metavar="N", help="that measure at once (not under a launcher)")
    parser.add_argument("--dtype", choices=[str(dtype) for dtype in Dtype], default="", help="of compute")
    parser.add_argument("--head-dim", type=int, default=0, metavar="D", help="of attention")
    parser.add_argument("--disk", default=".", metavar="FOLDER", help="on the disk that checkpoints will go to")
    parser.add_argument("--base", default="", metavar="PRESET", help="for what cannot be measured here")
    return parser


def place(name: str, overwrite: bool) -> Path:
    """Where the preset goes.

    Raises:
        ValueError: where the name is no name of a preset, or one is there already.
    """
    if not NAME.fullmatch(name):
        near = (
            re.sub(r"[^a-z0-9_]+", "_", name.lower().removesuffix(".yaml")).rstrip("_").lstrip("_0123456789") or "mine"
        )
        raise ValueError(f"NAME={name} must be a lower-case word of letters, digits and _: use {near}")
    path = FOLDER / f"{name}.yaml"
    if path.exists() and not overwrite:
        raise ValueError(f"NAME={name}: conf/cluster/{name}.yaml exists: choose another, or replace it by --overwrite")
    return path


def measured(ranks: int, options: Options) -> Rates:
    """The rates by `ranks` processes of this machine at once, or by those of torchrun or srun; None: not seen here.

    Raises:
        ValueError: where the machine is too small for so many ranks.
    """
    if ranks < 1:
        raise ValueError(f"--ranks={ranks} must be positive: use 1 or more")
    config = compose([f"parallel.data={ranks}"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rates.json")
        runtime.launch(functools.partial(measure, options, str(path)), config)
        return json.loads(path.read_text()) if path.exists() else {}  # there, on rank 0


def complete(rates: Rates, presets: dict[str, Any], name: str) -> tuple[dict[str, Any], list[str]]:
    """Every key of `cluster`, and those that come from `presets` because they could not be measured."""
    missing = [key for key, value in rates.items() if value is None]
    found = {key: presets[key] if value is None else value for key, value in rates.items()}
    found |= {"name": name, "block_bytes": block_bytes(found["memory_bytes"])}
    assert set(found) == set(KEYS), set(found) ^ set(KEYS)
    return {key: found[key] for key in KEYS}, missing


def block_bytes(memory_bytes: float) -> int:
    """A power of two between 1 MiB and 1 GiB, at most a small share of a rank's memory."""
    return 1 << min(30, max(20, int(memory_bytes / BLOCK_SHARE).bit_length() - 1))


def preset(cluster: dict[str, Any], missing: list[str], machine: dict[str, Any], base: str) -> str:
    """The text of the preset, with where its figures come from."""
    lines = [
        f"# Measured {machine['date']} by {' '.join(['python', *map(shlex.quote, sys.argv)])}",
        f"# on {machine['gpu'] or machine['processor']}, {machine['cores']} cores, torch {machine['torch']}: what one "
        f"of {machine['ranks']} ranks reaches while all are at work (load before: {machine['load_average']}).",
    ]
    for key in KEYS:
        doubt = f"  # not measured: that of {base}" if key in missing else ""
        lines.append(f"{key}: {_text(key, cluster[key])}{doubt}")
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """The preset at its place, if it composes there; else what was there before."""
    before = path.read_text() if path.exists() else None
    path.write_text(text)
    try:
        compose([f"cluster={path.stem}"])
    except ValueError as error:
        path.unlink() if before is None else path.write_text(before)
        raise RuntimeError(f"what was measured is no valid preset: {error}") from error


def _text(key: str, value: Any) -> str:
    """As in the presets: 1.23e10, for YAML reads 1e10 as a word."""
    if key == "block_bytes":
        return f"{value >> 30}G" if value >= 1 << 30 else f"{value >> 20}M"
    if key in COUNTS or isinstance(value, str):
        return str(value)
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _usual_ranks() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else max(2, len(report.cores()))


def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


if __name__ == "__main__":
    sys.exit(main())
