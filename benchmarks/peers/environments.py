"""Peers and how to install them: each into a virtual environment of its own under benchmarks/.peers/, on demand."""

import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1] / ".peers"  # ignored by git: `install` puts a .gitignore there


@dataclass(frozen=True)
class Peer:
    """A package that computes the same as the ring.

    Attributes:
        name, version: on the Python package index.
        needs: what must be installed beside it, as pip takes it.
        script: what measures it, beside this file.
        processes: how many it takes to use two cores.
        settings: what its script can be asked to measure, and how many times faster ours must be, forward and
            backward; None where that is only shown.
        python_below: the first Python for which its dependencies have no wheels, where there is one.
    """

    name: str
    version: str
    needs: tuple[str, ...]
    script: str
    processes: int
    settings: dict[str, float | None]
    python_below: tuple[int, int] | None = None

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    @property
    def shown(self) -> str:
        """The folder as it is printed."""
        return str(self.folder.relative_to(ROOT.parents[1]))

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


PEERS = (
    Peer(
        name="ringattention",
        version="0.1.2",
        # Its import needs a jax that still has jax.lib.xla_bridge, and that jax older neighbours.
        needs=("jax==0.4.30", "jaxlib==0.4.30", "flax==0.8.5", "scipy<1.14", "numpy<2", "einops"),
        script="jax_ring.py",
        processes=1,
        settings={"chunks of 256": 1.5, "chunks of 512": 1.9},
        python_below=(3, 13),
    ),
    Peer(
        name="ring-attention-pytorch",
        version="0.5.20",
        needs=(f"torch=={torch.__version__.partition('+')[0]}",),  # the version that ours and SDPA run on
        script="lucidrains.py",
        processes=2,
        settings={"striped, buckets of 256": 4.0, "contiguous, buckets of 512": 4.5, "gathered": None},
    ),
)


def install(peer: Peer) -> None:
    """Make sure that the peer's environment is there and holds these versions; says so where it takes time.

    Raises RuntimeError with pip's last lines and what to do instead.
    """
    requirements = [f"{peer.name}=={peer.version}", *peer.needs]
    stamp, wanted = peer.folder / "installed.txt", "\n".join([platform.python_version(), *requirements])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    without = f"leave it out: --peers {' '.join(other.name for other in PEERS if other is not peer)}"
    if peer.python_below and sys.version_info[:2] >= peer.python_below:
        newest = ".".join(map(str, (peer.python_below[0], peer.python_below[1] - 1)))
        raise RuntimeError(
            f"{peer.title} needs packages that have no wheels for Python {platform.python_version()}: use Python "
            f"{newest}, or {without}"
        )
    ROOT.mkdir(exist_ok=True)
    (ROOT / ".gitignore").write_text("*\n")
    print(f"Installing {peer.title} into {peer.shown} (0.7 to 0.9 GB; with CUDA several)…", file=sys.stderr, flush=True)
    begun = time.monotonic()
    shutil.rmtree(peer.folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(peer.folder)], peer, without)
    pip = [str(peer.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *requirements], peer, without)
    stamp.write_text(wanted)
    print(f"{peer.title} is installed: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


def _run(command: list[str], peer: Peer, without: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise RuntimeError(f"{peer.title} cannot be installed:\n{said}\nTry again with a network, or {without}")
