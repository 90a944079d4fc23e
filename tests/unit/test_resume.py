"""Preparing that is stopped, in whatever way, and run again: the same bytes come of it."""

import dataclasses
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data import build, encoding, prepare, scan, writer
from data.corpus import Changed
from data.format import DataError
from data.workers import in_order
from tests.corpora import FILLER, books, jsonl, run, snapshot, text_config
from tests.drill import ROOT, Run, kill_drill, write_text


@pytest.fixture
def small(monkeypatch):
    """Everything that is done in large portions is done in small ones."""
    monkeypatch.setattr(encoding, "JOB_CHARS", 3_000)
    monkeypatch.setattr(encoding, "MARK_SECONDS", 0.0)
    monkeypatch.setattr(scan, "GROUP_BYTES", 5_000)
    batches = encoding.Tokenizer.batches
    monkeypatch.setattr(encoding.Tokenizer, "batches", lambda self, pieces: batches(self, pieces, 2_000))


def mixed(folder):
    """Text of several batches, records and files, some of them twice."""
    books(folder, 5)
    (folder / "long.txt").write_text("".join(f"{n}: {FILLER}" for n in range(60)))
    jsonl(folder / "r.jsonl", [f"{n % 17}: {FILLER[: 40 * n]}" for n in range(40)])
    return folder


def failing(monkeypatch, module, name, at):
    """Makes the `at`-th call of a function fail, as a full disk would; says whether it came to that."""
    calls, function = [], getattr(module, name)

    def replaced(*arguments, **options):
        calls.append(1)
        if len(calls) == at:
            raise OSError(28, "No space left on device")
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, replaced)
    return lambda: len(calls) >= at


@pytest.mark.parametrize(
    ("module", "name", "calls"),
    [
        (encoding, "_write", (1, 2, 9, 40, 70)),
        (encoding, "write_state", (1, 2, 12)),
        (encoding, "put", (1, 7)),
        (writer, "publish", (2, 4, 9)),
        (build, "read_all", (1,)),
        (build, "settle", (1,)),
        (build, "train_tokenizer", (1,)),
        (build, "put", (1, 2)),
        (build, "_describe", (2,)),
        (scan, "measure", (3,)),
    ],
)
def test_stopped_anywhere(tmp_path, monkeypatch, small, module, name, calls):
    """By an error at this call of that function; what is finished stays, and only the rest is done."""
    config = text_config(tmp_path, mixed(tmp_path / "in"), shard_tokens=8_000, validation_fraction=0.3)
    whole = snapshot(run(config)[0])
    assert sum(path.endswith("tokens.bin") for path in whole) > 4
    for at in calls:
        shutil.rmtree(tmp_path / "corpora")
        with monkeypatch.context() as patch:
            failed = failing(patch, module, name, at)
            with pytest.raises(OSError, match=r"No space left.*what is finished stays in .*\.mine\.tmp; run the same"):
                run(config)
            assert failed() and not (tmp_path / "corpora" / "mine").exists()
        folder, said = run(config)
        assert any("going on from what an earlier run left" in line for line in said)
        assert snapshot(folder) == whole
        assert sorted(path.name for path in folder.parent.iterdir()) == [".mine.lock", "mine"]


def test_stopped_long_after_a_mark(tmp_path, monkeypatch, small):
    """Shards that were published since then are written again."""
    monkeypatch.setattr(encoding, "JOB_CHARS", 10**9)
    config = text_config(tmp_path, mixed(tmp_path / "in"), shard_tokens=8_000)
    with monkeypatch.context() as patch:
        calls = []
        patch.setattr(encoding, "_write", lambda *a, f=encoding._write: (calls.append(a), f(*a))[1])
        whole = snapshot(run(config)[0])
    shutil.rmtree(tmp_path / "corpora")
    with monkeypatch.context() as patch:
        failing(patch, encoding, "_write", len(calls))
        pytest.raises(OSError, run, config)
    assert len(list((tmp_path / "corpora" / ".mine.tmp" / "train").glob("0000?"))) > 1
    assert snapshot(run(config)[0]) == whole


def test_finished_work_is_not_done_again(tmp_path, monkeypatch, small):
    """Neither reading nor training, and of the text only what was not yet written."""
    config = text_config(tmp_path, mixed(tmp_path / "in"), shard_tokens=20_000)
    encoded = []
    monkeypatch.setattr(encoding, "_write", lambda *a, f=encoding._write: (encoded.append(a[1].size), f(*a))[1])
    run(config)
    total, parts = sum(encoded), len(encoded)
    shutil.rmtree(tmp_path / "corpora")
    with monkeypatch.context() as patch:
        failing(patch, encoding, "_write", parts * 3 // 4)
        pytest.raises(OSError, run, config)
    encoded.clear()
    for name in ("read_all", "train"):
        monkeypatch.setattr(build, name, None)
    run(config)
    assert 0 < sum(encoded) < 0.4 * total


def test_stopped_before_it_got_its_name(tmp_path, monkeypatch, small):
    """Also where it was to take the place of another: nothing is done again."""
    config = text_config(tmp_path, mixed(tmp_path / "in"))
    whole = snapshot(run(config)[0])
    run(dataclasses.replace(config, vocab_size=310), force=True)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "publish", lambda *paths: 1 / 0)
        pytest.raises(ZeroDivisionError, run, config, force=True)
    assert sorted(path.name for path in (tmp_path / "corpora").iterdir()) == [".mine.lock", ".mine.tmp"]
    monkeypatch.setattr(prepare, "build", None)
    assert snapshot(run(config)[0]) == whole


def stop(monkeypatch, config, at, **options):
    """Prepares until the part `at` is to be written, which fails."""
    with monkeypatch.context() as patch:
        failing(patch, encoding, "_write", at)
        pytest.raises(OSError, run, config, **options)


@pytest.mark.parametrize("what", ["settings", "files", "force"])
def test_what_was_begun_from_something_else_is_dropped(tmp_path, monkeypatch, small, what):
    config = text_config(tmp_path, mixed(tmp_path / "in"))
    stop(monkeypatch, config, 40)
    if what == "settings":
        config.shard_tokens = 10_000
    if what == "files":
        (tmp_path / "in" / "book0.txt").write_text("another text, quite short\n")
    folder, said = run(config, force=what == "force")
    assert not any("going on" in line for line in said)
    config.name = "again"
    assert snapshot(run(config)[0]) == snapshot(folder)


def test_damaged_leftovers_are_an_error_until_force(tmp_path, monkeypatch, small):
    config = text_config(tmp_path, mixed(tmp_path / "in"), shard_tokens=20_000)
    whole = snapshot(run(config)[0])
    shutil.rmtree(tmp_path / "corpora")
    stop(monkeypatch, config, 40)
    for path in (tmp_path / "corpora" / ".mine.tmp").rglob("*.tmp/tokens.bin"):
        path.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"has 0 of the \d+ bytes that were marked .*remove \S+\.mine\.tmp to"
        ) as error:
            run(config)
        assert "run the same command again" not in str(error.value)
    assert snapshot(run(config, force=True)[0]) == whole


def test_a_finished_shard_that_is_missing_is_an_error(tmp_path, monkeypatch, small):
    """A corpus without its documents is never published."""
    config = text_config(tmp_path, mixed(tmp_path / "in"), shard_tokens=2_000)
    stop(monkeypatch, config, 40)
    shutil.rmtree(tmp_path / "corpora" / ".mine.tmp" / "train" / "00000")
    with pytest.raises(DataError, match=r"train/00000 is missing, which was finished"):
        run(config)


class Killed(BaseException):
    """Nothing is tidied after it, as by signal 9."""


def killed_removing(monkeypatch, *wanted):
    """Makes the first removal of a folder in which `wanted` are stop once these are gone."""
    rmtree = shutil.rmtree

    def replaced(path, *arguments, **options):
        if all((Path(path) / name).exists() for name in wanted):
            for name in wanted:
                (rmtree if (Path(path) / name).is_dir() else os.unlink)(Path(path) / name)
            raise Killed
        rmtree(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", replaced)


@pytest.mark.parametrize("cause", ["settings", "force", "changed"])
def test_killed_while_it_removes_what_was_begun(tmp_path, monkeypatch, small, cause):
    """What is left of that is never gone on with."""
    config = text_config(tmp_path, mixed(tmp_path / "in"), shard_tokens=2_000)
    whole = snapshot(run(config)[0])
    shutil.rmtree(tmp_path / "corpora")
    stop(monkeypatch, config, 40)
    assert (tmp_path / "corpora" / ".mine.tmp" / "train" / "00000").is_dir()
    with monkeypatch.context() as patch:
        killed_removing(patch, "train/00000")
        if cause == "changed":
            patch.setattr(encoding, "_write", raising(Changed()))
        other = dataclasses.replace(config, shard_tokens=20_000) if cause == "settings" else config
        pytest.raises(Killed, run, other, force=cause == "force")
    folder, said = run(config)
    assert snapshot(folder) == whole and not any("going on" in line for line in said)
    assert sorted(path.name for path in folder.parent.iterdir()) == [".mine.lock", "mine"]


@pytest.mark.parametrize("name", ["rows", "fates", "plan.json"])
def test_killed_while_it_tidies_a_whole_corpus(tmp_path, monkeypatch, small, name):
    config = text_config(tmp_path, mixed(tmp_path / "in"))
    whole = snapshot(run(config)[0])
    shutil.rmtree(tmp_path / "corpora")
    with monkeypatch.context() as patch:
        killed_removing(patch, name)
        pytest.raises(Killed, run, config)
    monkeypatch.setattr(prepare, "build", None)
    assert snapshot(run(config)[0]) == whole


def raising(error):
    def function(*arguments):
        raise error

    return function


def test_a_forced_run_goes_on(tmp_path, monkeypatch, small):
    """By the same command, which says how to begin anew; without --force too, where nothing is in its place."""
    config = text_config(tmp_path, mixed(tmp_path / "in"), shard_tokens=20_000)
    run(config)
    config.shard_tokens = 2_000
    for at in (40, 20):
        stop(monkeypatch, config, at, force=True)
    folder, said = run(config, force=True)
    assert any(re.search(r"going on from .*\.mine\.tmp; remove that folder to begin anew", line) for line in said)
    config.name = "again"
    assert snapshot(run(config)[0]) == snapshot(folder)


def test_what_systems_leave_in_folders_is_passed_by(tmp_path, monkeypatch, small):
    config = text_config(tmp_path, mixed(tmp_path / "in"), shard_tokens=2_000)
    whole = snapshot(run(config)[0])
    shutil.rmtree(tmp_path / "corpora")
    stop(monkeypatch, config, 40)
    for name in (".DS_Store", ".nfs0001"):
        (tmp_path / "corpora" / ".mine.tmp" / "train" / name).write_bytes(b"x")
    folder, said = run(config)
    assert any("going on" in line for line in said)
    assert {name: data for name, data in snapshot(folder).items() if "/." not in name} == whole


def test_errors_of_another_cause_leave_what_is_finished(tmp_path, monkeypatch, small):
    config = text_config(tmp_path, mixed(tmp_path / "in"), shard_tokens=2_000)
    stop(monkeypatch, config, 40)
    with monkeypatch.context() as patch:
        patch.setattr(encoding, "_write", raising(ValueError("something else")))
        pytest.raises(ValueError, run, config)
    assert any("going on" in line for line in run(config)[1])


def test_a_full_disk_is_named_from_the_start(tmp_path, monkeypatch):
    config = text_config(tmp_path, mixed(tmp_path / "in"))
    monkeypatch.setattr(prepare, "put", raising(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"No space left.*\.mine\.tmp"):
        run(config)


def test_bytes_do_not_depend_on_the_number_of_processes(tmp_path, monkeypatch):
    """Nor on what is sent to them at once."""
    monkeypatch.setattr(encoding, "JOB_CHARS", 20_000)
    monkeypatch.setattr(scan, "GROUP_BYTES", 20_000)
    config = text_config(tmp_path, mixed(tmp_path / "in"), workers=1)
    whole, used = snapshot(run(config)[0]), []
    for module in (encoding, scan):
        monkeypatch.setattr(
            module, "in_order", lambda w, j, workers, *few: (used.append(workers), in_order(w, j, workers, *few))[1]
        )
    config.name, config.workers = "two", 2
    assert snapshot(run(config)[0]) == whole and used == [2, 2]
    monkeypatch.setattr(encoding, "JOB_CHARS", 1)
    config.name, config.workers = "one", 1
    assert snapshot(run(config)[0]) == whole


def test_killed_at_random_moments(tmp_path):
    """C053. benchmarks/data.py does so fifty times."""
    report = kill_drill(tmp_path, kills=4, megabytes=2.0)
    assert report.kills == 4 and report.orphans == 0
    assert report.finished == report.identical >= 1 and report.resumed >= 2


def test_interrupted(tmp_path):
    """Ctrl-C reaches all processes of a terminal; one says so, and the next run goes on."""
    write_text(tmp_path, 6.0)
    process = Run(tmp_path)
    while not list((tmp_path / ".text.tmp").glob("train/*")):
        assert process.process.poll() is None, process.end()
        time.sleep(0.01)
    os.killpg(process.process.pid, signal.SIGINT)
    code, said = process.end()
    assert code == 130 and said.endswith("data.prepare: stopped; the same command goes on from here\n")
    assert "Traceback" not in said and process.gone()
    code, said = Run(tmp_path).end()
    assert code == 0 and "going on from" in said


def test_a_worker_that_is_killed_ends_the_command(tmp_path):
    """As the system does where memory runs out."""
    write_text(tmp_path, 6.0)
    process = Run(tmp_path)
    while not list((tmp_path / ".text.tmp").glob("train/*")):
        assert process.process.poll() is None, process.end()
        time.sleep(0.01)
    children = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children").read_text().split()
    workers = [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(int(workers[0]), signal.SIGKILL)
    code, said = process.end()
    assert code == 74 and "one of 2 processes died, perhaps for want of memory" in said.splitlines()[-1]
    assert process.gone() and Run(tmp_path).end()[0] == 0


def test_full_disk(tmp_path):
    """I10: a file that may not grow; a named error, and with room the same command goes on to the same bytes."""
    source = mixed(tmp_path / "in")
    whole = snapshot(run(text_config(tmp_path, source, name="whole"))[0])
    arguments = ["data=text", f"data.path={source}", f"data.root={tmp_path / 'corpora'}", "data.vocab_size=300"]
    command = [sys.executable, "-m", "data.prepare", *arguments, "model.vocab_size=300", "data.workers=1"]
    size = len(whole["train/00000/tokens.bin"])
    for limit in (1_000, size // 2, size - 1):
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            preexec_fn=lambda limit=limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )
        assert done.returncode == 74 and "File too large" in done.stderr and "run the same command again" in done.stderr
        assert done.stderr.count("\n") == 1 and not (tmp_path / "corpora" / "text").exists()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "going on from" in done.stdout
    assert snapshot(tmp_path / "corpora" / "text") == whole
