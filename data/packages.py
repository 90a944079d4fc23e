"""Documents from the Python packages on this machine: one per package tree, its files sorted by path.

Packages are found, never imported. networkx is held out: it shares 0.2 % of its lines with the others.
"""

import hashlib
import importlib.metadata
import importlib.util
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from data.documents import Document, Listing, tree, walk
from data.text import patterns

STDLIB = "stdlib"
PACKAGES = ("torch", "sympy", "numpy", STDLIB, "mpmath")
HELD_OUT_PACKAGES = ("networkx",)
# Tests are not on every machine; encodings and idlelib are tables; lib2to3 left the library in 3.13.
STDLIB_WITHOUT = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "idlelib",
        "encodings",
        "lib2to3",
        "turtledemo",
        "site-packages",
        "dist-packages",
    }
)
LARGEST_DIGIT_SHARE = 0.2  # a file with more digits than this is a table that some program wrote


class Packages:
    """Raises: ValueError where a package is not installed, or has no sources here (a library in a zip file)."""

    def __init__(self, validation_names: str | None = None) -> None:
        self.held_out = patterns(validation_names) or HELD_OUT_PACKAGES

    def listing(self) -> Listing:
        """A package's state is its version, and the names and sizes of its files."""
        names, sizes, state = [*PACKAGES, *HELD_OUT_PACKAGES], list[int](), dict[str, str]()
        for name in names:
            files, root, digest = python_files(name), package_root(name), hashlib.sha256()
            sizes.append(0)
            for path in files:
                size = (root / path).stat().st_size
                sizes[-1] += size
                digest.update(f"{path}\0{size}\0".encode())
            version = package_facts(name)["version"]
            state[name] = f"{version}, {len(files)} files, state {digest.hexdigest()[:12]}"
        return Listing("data=packages", names, sizes, Counter(), state)

    def read(self, name: str, place: tuple[int, int], counts: Counter[str]) -> Iterator[Document]:
        """As `Source.read`; reads each file, to leave out empty ones and tables."""
        root, kept = package_root(name), list[str]()
        for path in python_files(name):
            data = (root / path).read_bytes()
            table = bool(data) and digit_share(data) > LARGEST_DIGIT_SHARE
            kind = "empty" if not data.strip() else "tables of numbers" if table else "kept"
            counts[f"files {kind}"] += 1
            kept += [path] if kind == "kept" else []
        if not kept:
            raise ValueError(f"data=packages finds no sources of {name} in {root}: use data=text data.path=…")
        yield Document(name, partial(tree, root, kept, root.name), package_facts(name))

    def advice(self, listing: Listing) -> str:
        return "use data=text data.path=…"


def package_root(name: str) -> Path:
    """Where a package's files are. Raises: ValueError where it is not installed."""
    if name == STDLIB:
        return Path(sysconfig.get_path("stdlib"))
    found = importlib.util.find_spec(name)  # of a top-level name: finds it without importing it
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"data=packages needs {name}, which is not installed: run `make setup`, or use data=text")
    return Path(found.submodule_search_locations[0])


def python_files(name: str) -> list[str]:
    """The source files of a package, by their paths below its root."""
    without, root = STDLIB_WITHOUT if name == STDLIB else frozenset(), package_root(name)
    paths, _ = walk(root, without | {"__pycache__"})
    return [path for path in paths if path.endswith(".py") and not (root / path).is_symlink()]


def package_facts(name: str) -> dict[str, str]:
    """Version and licence."""
    if name == STDLIB:
        return {"version": platform.python_version(), "licence": "PSF-2.0"}
    facts = importlib.metadata.metadata(name)
    lines = facts.get_all("Classifier") or []
    licences = [line.split(" :: ")[-1] for line in lines if line.startswith("License")]
    licence = facts.get("License-Expression") or ", ".join(licences) or facts.get("License", "unknown").split("\n")[0]
    return {"version": facts["Version"], "licence": licence}


def digit_share(data: bytes) -> float:
    """How much of it is digits."""
    return 1 - len(data.translate(None, b"0123456789")) / len(data)
