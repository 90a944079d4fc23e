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

from data.documents import TRAIN, VALIDATION, Corpus, Document, portions, relative, walk

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


def describe_packages() -> dict[str, str]:
    """What identifies each package's sources: its version, and the names and sizes of its files.

    Raises:
        ValueError: where a package is not installed.
    """
    return {name: _describe(name) for name in (*PACKAGES, *HELD_OUT_PACKAGES)}


def package_documents() -> Corpus:
    """Reads every file once, to leave out empty ones and tables.

    Raises:
        ValueError: where a package is not installed, or has no sources here (a library in a zip file).
    """
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    kept: dict[str, list[Path]] = {}
    for name in (*PACKAGES, *HELD_OUT_PACKAGES):
        root, kept[name] = _package_root(name), []
        for path in _python_files(name):
            data = path.read_bytes()
            if not data.strip():
                counts["empty"] += 1
            elif _digit_share(data) > LARGEST_DIGIT_SHARE:
                counts["tables of numbers"] += 1
            else:
                counts["kept"] += 1
                kept[name].append(path)
                sizes[name] += len(_header(path, root)) + len(data.decode("utf-8", "surrogateescape"))
        if not sizes[name]:
            raise ValueError(f"data=packages finds no sources of {name} in {root}: use data=text data.path=…")

    def documents() -> Iterator[Document]:
        for name, paths in kept.items():
            split = VALIDATION if name in HELD_OUT_PACKAGES else TRAIN
            yield Document(name, split, partial(_tree, _package_root(name), paths), _package_facts(name))

    held_out = sum(sizes[name] for name in HELD_OUT_PACKAGES)
    note = ", ".join(f"{counts[what]} {what}" for what in ("kept", "empty", "tables of numbers"))
    return Corpus(documents, sizes.total(), sizes.total() - held_out, [f"files: {note}"])


def _tree(root: Path, paths: list[Path]) -> Iterator[str | None]:
    for path in paths:
        yield None
        yield _header(path, root)
        yield from portions(path)


def _header(path: Path, root: Path) -> str:
    return f"{relative(path, root.parent)}\n"


def _package_root(name: str) -> Path:
    if name == STDLIB:
        return Path(sysconfig.get_path("stdlib"))
    found = importlib.util.find_spec(name)  # of a top-level name: finds it without importing it
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"data=packages needs {name}, which is not installed: run `make setup`, or use data=text")
    return Path(found.submodule_search_locations[0])


def _python_files(name: str) -> list[Path]:
    without = STDLIB_WITHOUT if name == STDLIB else frozenset()
    paths, _ = walk(_package_root(name), without | {"__pycache__"})
    return [path for path in paths if path.suffix == ".py" and not path.is_symlink()]


def _describe(name: str) -> str:
    files = _python_files(name)
    root, digest = _package_root(name), hashlib.sha256()
    for path in files:
        digest.update(f"{relative(path, root)}\0{path.stat().st_size}\0".encode())
    return f"{_package_facts(name)['version']}, {len(files)} files, state {digest.hexdigest()[:12]}"


def _package_facts(name: str) -> dict[str, str]:
    if name == STDLIB:
        return {"version": platform.python_version(), "licence": "PSF-2.0"}
    facts = importlib.metadata.metadata(name)
    lines = facts.get_all("Classifier") or []
    licences = [line.split(" :: ")[-1] for line in lines if line.startswith("License")]
    licence = facts.get("License-Expression") or ", ".join(licences) or facts.get("License", "unknown").split("\n")[0]
    return {"version": facts["Version"], "licence": licence}


def _digit_share(data: bytes) -> float:
    return 1 - len(data.translate(None, b"0123456789")) / len(data)
