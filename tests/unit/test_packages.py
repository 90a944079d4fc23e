"""The Python packages of this machine, as documents."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conf.schema import DataConfig, Source
from data import build, documents, packages
from data.shards import open_tokens
from data.tokenizer import load
from tests.corpora import run

ROOT = Path(__file__).parents[2]


def test_packages(tmp_path, monkeypatch):
    """One document a package, a mark and a path before each file; networkx is held out of all."""
    monkeypatch.setattr(packages, "PACKAGES", ("mpmath",))
    config = DataConfig(source=Source.packages, name="p", root=str(tmp_path), vocab_size=1000, workers=2)
    seen = []
    train = build.train
    monkeypatch.setattr(build, "train", lambda sample, *a: train(map(lambda t: seen.append(t) or t, sample), *a))
    folder, _ = run(config)
    assert "networkx" not in "".join(seen) and "mpf" in "".join(seen)
    tokenizer, shard = load(folder), open_tokens(folder / "train")
    assert [entry["name"] for entry in shard.documents()] == ["mpmath"]
    assert [entry["name"] for entry in open_tokens(folder / "validation").documents()] == ["networkx"]
    [entry] = shard.documents()
    assert entry["version"] and "BSD" in entry["licence"]
    ids = shard.read(0, shard.num_tokens)
    assert ids[0] == tokenizer.file_id and (ids == tokenizer.eos_id).sum() == 1
    root = packages.package_root("mpmath")
    first = [tokenizer.decode(part) for part in np.split(ids[:-1], np.flatnonzero(ids == tokenizer.file_id))[1:]]
    names = [text.split("\n", 1)[0] for text in first]
    assert names == sorted(names) and len(names) > 50 and names[0] == "mpmath/__init__.py"
    for name, text in zip(names, first, strict=True):
        assert text.split("\n", 1)[1] == (root.parent / name).read_bytes().decode()
    assert entry["bytes"] == sum(len(text.encode()) for text in first) == shard.num_bytes
    assert "already prepared" in run(config)[1][0]


def test_packages_are_long_and_found_without_import():
    """At least three training documents of over a million tokens, at under 4.2 bytes each."""
    code = (
        "import sys\nfrom data.packages import Packages\nPackages().listing()\n"
        "assert not {'torch', 'sympy', 'networkx'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sizes = packages.Packages().listing().num_bytes[:-1]
    assert sum(size > 4_200_000 for size in sizes) >= 3
    parts = {part for path in packages.python_files("stdlib") for part in path.split("/")}
    assert not parts & {"test", "idlelib", "encodings", "site-packages", "lib2to3"} and "asyncio" in parts


def test_tables_of_numbers_are_left_out():
    assert packages.digit_share(b"X = [" + b"123456, " * 100) > packages.LARGEST_DIGIT_SHARE
    assert packages.digit_share(Path(documents.__file__).read_bytes()) < packages.LARGEST_DIGIT_SHARE


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(packages, "PACKAGES", ("torch", "nosuchpackage"))
    with pytest.raises(ValueError, match=r"needs nosuchpackage, .*make setup.*data=text"):
        packages.Packages().listing()


def test_other_packages_may_be_held_out(tmp_path):
    assert packages.Packages("mpmath").held_out == ("mpmath",)
    assert packages.Packages(None).held_out == packages.HELD_OUT_PACKAGES == ("networkx",)
