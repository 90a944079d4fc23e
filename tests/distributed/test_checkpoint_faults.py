"""Faults injected into the files of checkpoints, and what comes of each: a table, asserted through `resume` and `save`.

Two steps are saved by two ranks; the newer one is damaged. Nothing that fails may delete or change a file: all files
are compared before and after.
"""

import itertools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.tampering import NEW, OLD, Run, flip, lie, put_index, reseal, save_two, snapshot, told
from training.checkpoint.checkpoints import Checkpoints


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\0")


def swap(path: Path) -> None:
    (path / "rank_00000.bin").rename(path / "spare")
    (path / "rank_00001.bin").rename(path / "rank_00000.bin")
    (path / "spare").rename(path / "rank_00001.bin")


def older(path: Path, name: str) -> None:
    """The file of the older checkpoint in place of the newer one's."""
    shutil.copy(path.with_name(f"step_{OLD:08d}") / name, path / name)


def link_out(path: Path) -> None:
    """A file as it was written, but behind a link that leaves the folder."""
    outside = path.parent / "outside.bin"
    (path / "rank_00001.bin").rename(outside)
    (path / "rank_00001.bin").symlink_to(outside)


def replace_by(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / "rank_00001.bin").unlink()
        make(path / "rank_00001.bin")

    return damage


def first(index: dict[str, Any]) -> dict[str, Any]:
    """A tensor of two dims in more than one piece."""
    return next(e for e in index["tensors"].values() if len(e["pieces"]) > 1 and len(e["shape"]) == 2)


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


SUM, CRC, LIE = "is not what was written", "CRC-32 of bytes 0 to", "tells what cannot be|is not of our format"

# Damage to the newer checkpoint, and the words with which it is skipped for the older one, or other ones; None: it is
# taken as it is.
FAULTS: dict[str, tuple[Callable[[Path], Any], str | None]] = {
    "whole": (lambda p: None, None),
    # flipped
    "piece, first byte": (lambda p: flip(p / "rank_00000.bin", 0), f"rank_00000.bin {SUM}: {CRC}"),
    "piece, middle": (lambda p: flip(p / "rank_00001.bin", 0.5), f"rank_00001.bin {SUM}: {CRC}"),
    "piece, last byte": (lambda p: flip(p / "rank_00001.bin", 1), f"rank_00001.bin {SUM}: {CRC}"),
    "index": (lambda p: flip(p / "tensors.json", 0.5), f"tensors.json {SUM}"),
    "manifest": (lambda p: flip(p / "manifest.json", 0.5), "manifest.json"),
    "a digit of the manifest": (
        lambda p: told(p, "manifest.json", '"tokens": 2', '"tokens": 3'),
        "manifest.json " + SUM,
    ),
    # of another size
    "piece, one byte less": (
        lambda p: os.truncate(p / "rank_00001.bin", 100),
        "rank_00001.bin has 100 bytes instead of",
    ),
    "piece, nothing left": (lambda p: os.truncate(p / "rank_00000.bin", 0), "rank_00000.bin has 0 bytes instead of"),
    "piece, one byte more": (lambda p: append(p / "rank_00000.bin"), "rank_00000.bin has"),
    "index, half": (lambda p: os.truncate(p / "tensors.json", 200), "tensors.json has 200 bytes instead of"),
    "manifest, half": (lambda p: os.truncate(p / "manifest.json", 200), "manifest.json cannot be read"),
    "manifest, nothing left": (lambda p: os.truncate(p / "manifest.json", 0), "manifest.json cannot be read"),
    # not there, or something else
    "no piece": (lambda p: (p / "rank_00001.bin").unlink(), "rank_00001.bin is missing"),
    "no index": (lambda p: (p / "tensors.json").unlink(), "tensors.json is missing"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "no manifest.json, its writing was never finished"),
    "empty folder": (lambda p: (shutil.rmtree(p), p.mkdir()), "no manifest.json"),
    "pieces swapped": (swap, "rank_0000"),
    "older piece": (lambda p: older(p, "rank_00001.bin"), f"rank_00001.bin {SUM}"),
    "older index": (lambda p: older(p, "tensors.json"), f"tensors.json {SUM}"),
    "older manifest": (lambda p: older(p, "manifest.json"), "unlike its folder's name"),
    "link out of the folder": (link_out, "rank_00001.bin is no regular file"),
    "link to nothing": (replace_by(lambda p: p.symlink_to("nowhere")), "rank_00001.bin is no regular file"),
    "pipe": (replace_by(os.mkfifo), "rank_00001.bin is no regular file"),
    "folder": (replace_by(Path.mkdir), "rank_00001.bin is no regular file"),
    "index is a link": (
        lambda p: ((p / "tensors.json").rename(p.parent / "t"), (p / "tensors.json").symlink_to(p.parent / "t")),
        "tensors.json is no regular file",
    ),
    "manifest is a link": (
        lambda p: ((p / "manifest.json").rename(p.parent / "m"), (p / "manifest.json").symlink_to(p.parent / "m")),
        "manifest.json",
    ),
    "manifest is a pipe": (
        lambda p: ((p / "manifest.json").unlink(), os.mkfifo(p / "manifest.json")),
        "manifest.json is no regular file",
    ),
    # beside it
    "more files": (
        lambda p: [
            (p / name).write_bytes(b"?") for name in ("rank_00002.bin", ".metadata", "notes.txt", "__0_0.distcp")
        ],
        None,
    ),
    "more folders": (lambda p: [(p.parent / name).mkdir() for name in ("step_best", "step_30", "step_x")], None),
    "a file as a newer one": (lambda p: (p.parent / "step_00000030").write_text("?"), None),
    "a link to nothing as a newer one": (lambda p: (p.parent / "step_00000030").symlink_to("nowhere"), None),
    "a newer one never finished": (lambda p: shutil.copytree(p, p.with_name("step_00000030.tmp")), None),
    # of another version
    "format 1": (lambda p: told(p, "manifest.json", "checkpoint 2", "checkpoint 1"), "but of 'longhaul checkpoint 1'"),
    "format 3": (lambda p: reseal(p, format="longhaul checkpoint 3"), "but of 'longhaul checkpoint 3'"),
    "no format": (lambda p: (p / "manifest.json").write_text("[]"), "not of the format"),
    "manifest nested": (lambda p: (p / "manifest.json").write_text(nested(100_000)), "manifest.json cannot be read"),
    "manifest in latin-1": (
        lambda p: (p / "manifest.json").write_bytes(b'{"a": "\xe9"}'),
        "manifest.json cannot be read",
    ),
    # lies, sealed by one who knows how
    "manifest: file above": (
        lambda p: reseal(p, add={"../outside.bin": {"bytes": 1}}),
        "'../outside.bin', which is no file",
    ),
    "manifest: file of /": (lambda p: reseal(p, add={"/etc/passwd": {"bytes": 1}}), "'/etc/passwd', which is no file"),
    "manifest: negative": (lambda p: reseal(p, add={"rank_00001.bin": {"bytes": -1}}), "which is no file of a"),
    "manifest: text for a size": (lambda p: reseal(p, add={"rank_00001.bin": {"bytes": "1"}}), "which is no file of a"),
    "manifest: no index": (lambda p: reseal(p, drop="tensors.json"), "names no tensors.json"),
    "manifest: file unknown": (lambda p: reseal(p, drop="rank_00001.bin"), "rank_00001.bin"),
    "manifest: of another step": (
        lambda p: reseal(p, step=10, state={"step": 10, "tokens": 1000}),
        "unlike its folder",
    ),
    "manifest: of two steps": (lambda p: reseal(p, state={"step": 10, "tokens": 1000}), "its state of another"),
    "manifest: huge": (lambda p: os.truncate(p / "manifest.json", 1 << 36), "has 68719476736 bytes"),
    "manifest: no state": (lambda p: reseal(p, state=None), "no state that is a dict"),
    "manifest: step of text": (lambda p: reseal(p, step="20"), "no step that is a int"),
    "manifest: no ranks": (lambda p: reseal(p, layout={"data": 2}), "of which layout"),
    "index: beyond the file": (lambda p: lie(p, lambda i: first(i)["pieces"][0].__setitem__(1, 1 << 40)), LIE),
    "index: before the file": (lambda p: lie(p, lambda i: first(i)["pieces"][0].__setitem__(1, -64)), LIE),
    "index: between bytes": (lambda p: lie(p, lambda i: first(i)["pieces"][0].__setitem__(1, 0.5)), LIE),
    "index: negative size": (lambda p: lie(p, lambda i: first(i)["pieces"][0][3].__setitem__(0, -1)), LIE),
    "index: negative offset": (lambda p: lie(p, lambda i: first(i)["pieces"][1][2].__setitem__(0, -1)), LIE),
    "index: beyond the tensor": (lambda p: lie(p, lambda i: first(i)["pieces"][1][2].__setitem__(1, 1)), LIE),
    "index: same bytes twice": (
        lambda p: lie(p, lambda i: first(i)["pieces"][1].__setitem__(slice(0, 2), first(i)["pieces"][0][:2])),
        LIE,
    ),
    "index: same part twice": (
        lambda p: lie(p, lambda i: first(i)["pieces"][1].__setitem__(2, first(i)["pieces"][0][2])),
        LIE,
    ),
    "index: a part missing": (lambda p: lie(p, lambda i: first(i)["pieces"].pop()), LIE),
    "index: file above": (lambda p: lie(p, lambda i: first(i)["pieces"][0].__setitem__(0, "../x")), LIE),
    "index: file of /": (lambda p: lie(p, lambda i: first(i)["pieces"][0].__setitem__(0, "/etc/passwd")), LIE),
    "index: sums of a file above": (
        lambda p: lie(p, lambda i: i["files"].__setitem__("../x", {"bytes": 0, "crc32": ""})),
        LIE,
    ),
    "index: huge": (lambda p: lie(p, lambda i: first(i).__setitem__("shape", [1 << 40, 1 << 40])), LIE),
    "index: beyond numbers": (lambda p: lie(p, lambda i: first(i).__setitem__("shape", [1 << 70, 1])), LIE),
    "index: many dims": (lambda p: lie(p, lambda i: first(i).__setitem__("shape", [1] * 1000)), LIE),
    "index: other dims": (lambda p: lie(p, lambda i: first(i)["shape"].append(1)), LIE),
    "index: infinite": (lambda p: lie(p, lambda i: first(i)["shape"].__setitem__(0, float("inf"))), LIE),
    "index: true for a number": (lambda p: lie(p, lambda i: first(i)["pieces"][0].__setitem__(1, False)), LIE),
    "index: unknown dtype": (lambda p: lie(p, lambda i: first(i).__setitem__("dtype", "object")), LIE),
    "index: dtype is no text": (lambda p: lie(p, lambda i: first(i).__setitem__("dtype", ["float32"])), LIE),
    "index: other blocks": (lambda p: lie(p, lambda i: i.__setitem__("block_bytes", 0)), LIE),
    "index: no sums": (lambda p: lie(p, lambda i: i["files"].pop("rank_00001.bin")), LIE),
    "index: fewer sums": (
        lambda p: lie(p, lambda i: i["files"]["rank_00001.bin"].__setitem__("crc32", "")),
        LIE,
    ),
    "index: sums of text": (
        lambda p: lie(p, lambda i: i["files"]["rank_00001.bin"].__setitem__("crc32", "?" * 8)),
        LIE,
    ),
    "index: another size": (
        lambda p: lie(p, lambda i: i["files"]["rank_00001.bin"].__setitem__("bytes", 1)),
        LIE,
    ),
    "index: no tensors": (lambda p: lie(p, lambda i: i.pop("tensors")), LIE),
    "index: a list": (lambda p: put_index(p, "[]"), LIE),
    "index: nested": (lambda p: put_index(p, nested(100_000)), "tensors.json cannot be read"),
    "index: a name that draws": (
        lambda p: lie(p, lambda i: i["tensors"].__setitem__("\x1b[2J", first(i))),
        "a tensor is called '\\x1b[2J'",
    ),
}


def damaged_copies(source: Path, target: Path, faults: dict[str, Callable[[Path], Any]]) -> dict[str, Path]:
    """A copy of the two checkpoints for each fault, the newer one damaged by it."""
    folders = {}
    for number, (name, damage) in enumerate(faults.items()):
        folders[name] = target / str(number) / "checkpoints"
        shutil.copytree(source, folders[name])
        damage(folders[name] / f"step_{NEW:08d}")
    return folders


def resume_each(folders: dict[str, Path], wish: str | None = None) -> dict[str, tuple[Any, str]]:
    """The newest of each, or the one that is called `wish`."""
    run = Run(Path("unused"))
    results = {}
    for name, folder in folders.items():
        run.checkpoints = Checkpoints(folder, run.checkpoints.config, run.checkpoints.mesh)
        results[name] = run.resume(str(folder / wish) if wish else "auto")
    return results


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    run_ranks(save_two, 2, folder)
    return folder


def test_every_fault_has_its_outcome(two, tmp_path):
    """C074, C082, I12: the older one is taken where the newer one is damaged, which is named with what is wrong."""
    folders = damaged_copies(two, tmp_path, {name: damage for name, (damage, _) in FAULTS.items()})
    before = snapshot(tmp_path)
    results = run_ranks(resume_each, 2, folders)
    assert snapshot(tmp_path) == before  # nothing is deleted, renamed or written
    for name, (_, words) in FAULTS.items():
        step, said = results[0][name]
        if words is None:
            assert (step, said) == (NEW, ""), name
        else:
            assert step == OLD, (name, step)
            assert said.count("\n") == 1 and f"step_{NEW:08d}: " in said, (name, said)
            assert any(either in said for either in words.split("|")), (name, said)
            assert len(said) < 500 and said.strip().isprintable(), (name, said)
        assert results[1][name] == (step, ""), name


HOPELESS = ["piece, middle", "index", "no manifest", "no piece", "empty folder", "format 1", "index: huge"]


def test_where_none_is_whole_no_run_starts_over(two, tmp_path):
    """C074: an error on all ranks that names each one; nor is one that is damaged taken because it was named."""
    folders = damaged_copies(two, tmp_path, {name: FAULTS[name][0] for name in HOPELESS})
    for name, folder in folders.items():
        FAULTS[name][0](folder / f"step_{OLD:08d}")
    before = snapshot(tmp_path)
    found = run_ranks(resume_each, 2, folders)
    named = run_ranks(resume_each, 2, folders, f"step_{NEW:08d}")
    assert snapshot(tmp_path) == before
    for name, rank in itertools.product(HOPELESS, range(2)):
        (kind, said), _ = found[rank][name]
        assert kind == "CheckpointError" and f"step_{OLD:08d}: " in said and f"step_{NEW:08d}: " in said, (name, said)
        assert any(said.count(words) == 2 for words in FAULTS[name][1].split("|")), (name, said)
        (kind, said), _ = named[rank][name]
        assert kind in ("CheckpointError", "ValueError") and f"step_{NEW:08d} is" in said, (name, said)


def test_flips_and_cuts_anywhere_change_nothing_in_silence(two, tmp_path):
    """C074: the newer one is skipped, or is loaded with all its values, as where an exponent is written in capitals."""
    draw = random.Random(6)

    def anywhere(path: Path) -> None:
        file = draw.choice([file for file in sorted(path.iterdir()) if file.stat().st_size])
        content = bytearray(file.read_bytes())
        if draw.random() < 0.8:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        else:
            del content[draw.randrange(len(content)) :]
        file.write_bytes(content)

    folders = damaged_copies(two, tmp_path, {str(number): anywhere for number in range(60)})
    before = snapshot(tmp_path)
    steps = [step for step, _ in run_ranks(resume_each, 2, folders)[0].values()]
    assert snapshot(tmp_path) == before
    assert set(steps) <= {OLD, NEW} and steps.count(OLD) > 50


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"model__ffn_dim": 12}, "model.ffn_dim=12, but 10 in the checkpoint"),
    "number of layers": ({"model__num_layers": 2}, "model.num_layers=2, but 1 in the checkpoint"),
    "vocabulary": ({"model__vocab_size": 16}, "model.vocab_size=16, but 14 in the checkpoint"),
    "dtype": ({"train__dtype": "float64"}, "float32[10, 6] in the checkpoint, float64[10, 6] in the run"),
}


def resume_others(folder: Path) -> dict[str, list[Any]]:
    wishes = ["auto", str(folder / f"step_{NEW:08d}")]
    runs = {name: Run(folder, **changes) for name, (changes, _) in REFUSED.items()}
    return {name: [run.resume(wish)[0] for wish in wishes] for name, run in runs.items()}


def test_another_model_is_refused_and_not_skipped(two):
    """C082: wrong model, wrong dtype; nor is an older one tried, which would not fit either."""
    before = snapshot(two)
    for results in run_ranks(resume_others, 2, two):
        for name, (_, words) in REFUSED.items():
            for kind, said in results[name]:
                assert kind == "ValueError" and words in said and "\n" not in said, (name, said)
    assert snapshot(two) == before
