"""Preparing a corpus: what is kept, what is refused, and that nothing half made is ever seen."""

import dataclasses
import io
import json
import os
import shlex
import threading

import numpy as np
import pytest
import sentencepiece

from conf.compose import compose
from conf.schema import Source
from data import build, encoding, prepare, vocabulary
from data.corpus import Corpus
from data.format import open_shard
from data.scan import read_all
from data.shards import open_tokens
from data.split import settle
from data.text import Text
from tests.corpora import FILLER, books, run, snapshot, text_config, texts


def test_folder_of_text(tmp_path):
    """One document a file, each in one of the two splits; prepared twice, equal to the byte."""
    source = books(tmp_path / "books")
    (source / "deep").mkdir()
    (source / "deep" / "crlf.md").write_bytes(b"one\r\n\ttwo  \r\n" + "\u2581 \xff".encode("latin-1", "replace"))
    folder, _ = run(text_config(tmp_path, source))
    found = texts(folder)
    assert {name: text for name, (_, text) in found.items()} == {
        path.relative_to(source).as_posix(): path.read_bytes().decode("utf-8", "surrogateescape")
        for path in source.rglob("*")
        if path.is_file()
    }
    assert {split for split, _ in found.values()} == {"train", "validation"}
    again, _ = run(text_config(tmp_path, source, name="again"))
    assert snapshot(again) == snapshot(folder)


def test_prepared_data_inside_the_text_folder_is_not_text(tmp_path):
    books(tmp_path / "books")
    config = text_config(tmp_path, tmp_path)
    folder, _ = run(config)
    assert len(texts(folder)) == 12
    assert "already prepared" in run(config)[1][0]


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\x00\x01"])
def test_a_corpus_without_text_is_refused(tmp_path, content):
    """C067."""
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.path=.*a\.txt has no document with text"):
        run(text_config(tmp_path, tmp_path / "a.txt"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": None}, r"needs data\.path"),
        ({"path": "/no/such/place"}, r"data\.path=/no/such/place does not exist"),
        (
            {"vocab_size": 100_000},
            r"data\.vocab_size=100000 .*use data\.vocab_size=\d+ model\.vocab_size=\d+ or less",
        ),
        ({"validation_fraction": 0.0}, r"data\.validation_fraction=0\.0"),
    ],
)
def test_settings_that_cannot_be(tmp_path, options, message):
    config = text_config(tmp_path, books(tmp_path / "books"))
    with pytest.raises(ValueError, match=message):
        run(dataclasses.replace(config, **options))
    assert not (tmp_path / "corpora" / "mine").exists()


def test_prepared_data_is_kept(tmp_path):
    config = text_config(tmp_path, books(tmp_path / "books"))
    folder, _ = run(config)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    _, said = run(config)
    assert len(said) == 1 and "already prepared" in said[0] and "--force" in said[0]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 310}, r"data\.vocab_size was 300, is 310"),
        ({"validation_fraction": 0.5}, r"data\.validation_fraction was 0\.05, is 0\.5"),
    ],
)
def test_other_settings_do_not_overwrite(tmp_path, options, message):
    source = books(tmp_path / "books")
    folder, _ = run(text_config(tmp_path, source))
    before = snapshot(folder)
    with pytest.raises(ValueError, match=message + r".*another data\.name.*--force"):
        run(text_config(tmp_path, source, **options))
    assert snapshot(folder) == before
    run(text_config(tmp_path, source, **options), force=True)
    assert snapshot(folder) != before
    assert sorted(path.name for path in folder.parent.iterdir()) == [".mine.lock", "mine"]


def test_changed_files_do_not_overwrite(tmp_path):
    config = text_config(tmp_path, books(tmp_path / "books"))
    folder, _ = run(config)
    before = snapshot(folder)
    (tmp_path / "books" / "new.txt").write_text("one more")
    with pytest.raises(ValueError, match=r"data\.path was 12 files.*is 13 files"):
        run(config)
    assert snapshot(folder) == before


def test_only_times_of_change_differ(tmp_path):
    config = text_config(tmp_path, books(tmp_path / "books"))
    run(config)
    os.utime(tmp_path / "books" / "book3.txt", (1, 1))
    with pytest.raises(
        ValueError, match=r"\(only times of change of files in data\.path differ, no name and no size\)"
    ):
        run(config)


def test_text_that_changes_meanwhile_is_noticed(tmp_path, monkeypatch):
    """Also where it keeps its length: the digests would not be those of the tokens' text."""
    config = text_config(tmp_path, books(tmp_path / "books"))
    whole, path = snapshot(run(config)[0]), tmp_path / "books" / "book5.txt"
    config.name, text, facts = "other", path.read_text(), path.stat()
    load = build.load
    with monkeypatch.context() as patch:
        patch.setattr(build, "load", lambda folder: (path.write_text(text[::-1]), load(folder))[1])
        with pytest.raises(ValueError, match="the text changed while it was prepared: run the same command again"):
            run(config)
    path.write_text(text)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    folder, said = run(config)
    assert snapshot(folder) == whole and not any("going on" in line for line in said)


def test_prepared_data_may_be_where_nothing_can_be_written(tmp_path, monkeypatch):
    config = text_config(tmp_path, books(tmp_path / "books"))
    folder, _ = run(config)
    monkeypatch.setattr(prepare, "_only_one", None)
    monkeypatch.setattr(type(folder), "mkdir", None)
    assert "already prepared" in run(config)[1][0]


def test_a_link_to_nothing_is_refused_at_the_start(tmp_path):
    config = text_config(tmp_path, books(tmp_path / "books"))
    (tmp_path / "corpora").mkdir()
    (tmp_path / "corpora" / "mine").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"corpora/mine is a link to \S+gone, which does not exist: remove the link"):
        run(config)
    folder, _ = run(dataclasses.replace(config, name="there"))
    (tmp_path / "corpora" / "mine").unlink()
    (tmp_path / "corpora" / "mine").symlink_to(folder)
    assert "already prepared" in run(config)[1][0]
    run(dataclasses.replace(config, vocab_size=310), force=True)  # in the place of the link, not of what it leads to
    assert (
        not (tmp_path / "corpora" / "mine").is_symlink()
        and "already prepared" in run(dataclasses.replace(config, name="there"))[1][0]
    )
    assert sorted(path.name for path in folder.parent.iterdir()) == [".mine.lock", ".there.lock", "mine", "there"]


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_of_somebody_else_is_never_touched(tmp_path, force):
    config = text_config(tmp_path, books(tmp_path / "books"))
    foreign = tmp_path / "corpora" / "mine" / "train"
    foreign.mkdir(parents=True)
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"mine exists, but data\.prepare did not write it.*another data\.name"):
        run(config, force)
    assert (foreign / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("name", ["train/00000/tokens.bin", "validation/00000/manifest.json", "tokenizer.model"])
def test_damaged_data_is_prepared_again(tmp_path, name):
    """C053: running again heals."""
    config = text_config(tmp_path, books(tmp_path / "books"))
    folder, _ = run(config)
    before = snapshot(folder)
    with open(folder / name, "r+b") as file:
        file.truncate((folder / name).stat().st_size - 5)
    _, said = run(config)
    assert said[0].startswith("damaged: ") and name in said[0]
    assert snapshot(folder) == before


def test_two_at_once_prepare_it_once(tmp_path):
    config = text_config(tmp_path, books(tmp_path / "books", number=40))
    said = []
    threads = [threading.Thread(target=prepare.prepare, args=(config, False, said.append)) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sum(line.startswith("preparing") for line in said) == 1
    assert sum("already prepared" in line for line in said) == 2


def command(tmp_path, *arguments):
    return prepare.main([f"data.root={tmp_path / 'corpora'}", *arguments])


def test_command(tmp_path, capsys):
    source = books(tmp_path / "books")
    arguments = ["data=text", f"data.path={source}", "data.vocab_size=300", "model.vocab_size=300"]
    assert command(tmp_path, *arguments) == 0
    assert "train: " in capsys.readouterr().out
    assert command(tmp_path, *arguments) == 0 and "already prepared" in capsys.readouterr().out
    assert command(tmp_path, "--force", *arguments) == 0 and "prepared again" in capsys.readouterr().out
    assert (tmp_path / "corpora" / "text" / "tokenizer.model").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["data=text"], 3, "data.path"),
        (["data.pth=x"], 3, "Did you mean data.path?"),
        (["--fast"], 3, "--help"),
        (["data=text", f"data.path={__file__}", "data.root=/proc/none"], 74, "/proc/none"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, arguments, code, message):
    assert command(tmp_path, *arguments) == code
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_help_answers(capsys):
    with pytest.raises(SystemExit) as end:
        prepare.main(["--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert all(word in shown for word in ("data.path=", "data.name=", "--force", "exit codes", "data.vocab_size="))
    quoted = next(word for word in shown.split() if "validation_names" in word)
    assert compose(shlex.split(quoted)).data.validation_names == "A*,B"


def test_unigram(tmp_path):
    source = books(tmp_path / "books")
    folder, said = run(text_config(tmp_path, source, tokenizer="unigram"))
    assert json.loads((folder / "manifest.json").read_text())["tokenizer"]["kind"] == "unigram"
    assert {name: text for name, (_, text) in texts(folder).items()} == {
        path.name: path.read_text() for path in source.iterdir()
    }


def test_a_tokenizer_that_is_there(tmp_path):
    """Copied into the corpus; the same ids come of it."""
    source = books(tmp_path / "books")
    folder, _ = run(text_config(tmp_path, source))
    config = text_config(tmp_path, source, name="b", tokenizer=str(folder / "tokenizer.model"), vocab_size=77)
    again, said = run(config)
    mine, theirs = snapshot(folder), snapshot(again)
    assert {path for path in mine if mine[path] != theirs[path]} == {"manifest.json"}
    facts = json.loads(theirs["manifest.json"])
    assert facts["tokenizer"] == json.loads(mine["manifest.json"])["tokenizer"] and facts["tokenizer"]["lossless"]
    assert "data.vocab_size" not in facts["inputs"] and not any("trained" in line for line in said)
    other, _ = run(text_config(tmp_path, source, name="c", vocab_size=310))
    with pytest.raises(ValueError, match=r"data\.tokenizer was tokenizer\.model \w+, is tokenizer\.model \w+"):
        run(dataclasses.replace(config, tokenizer=str(other / "tokenizer.model")))


def test_a_tokenizer_that_loses_text_is_allowed_and_counted(tmp_path):
    """C070: by a default of SentencePiece, two spaces become one."""
    source, model = books(tmp_path / "books", 4), io.BytesIO()
    (source / "two.txt").write_text(" and  two")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([FILLER]), model_writer=model, vocab_size=60, model_type="bpe", minloglevel=2
    )
    (tmp_path / "theirs.model").write_bytes(model.getvalue())
    folder, said = run(text_config(tmp_path, source, tokenizer=str(tmp_path / "theirs.model")))
    manifest = json.loads((folder / "manifest.json").read_text())
    [note] = [note for note in manifest["notes"] if "do not come back byte for byte" in note]
    assert note.startswith("5 documents ") and note in said
    assert not manifest["tokenizer"]["lossless"]
    [size] = [entry["bytes"] for side in manifest["splits"] for entry in open_tokens(folder / side).documents()
              if entry["name"] == "two.txt"]  # fmt: skip
    assert size == 9


def test_our_own_tokenizer_losing_text_is_our_own_error(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary.Tokenizer, "restores", lambda self, batch, ids: "Chapter 7" not in str(batch))
    with pytest.raises(RuntimeError, match=r"document book7\.txt does not come back"):
        run(text_config(tmp_path, books(tmp_path / "books")))


def test_another_tokenizer_in_the_corpus_is_damage(tmp_path):
    source = books(tmp_path / "books")
    config = text_config(tmp_path, source)
    folder, _ = run(config)
    before = snapshot(folder)
    other, _ = run(text_config(tmp_path, source, name="other", vocab_size=310))
    (folder / "tokenizer.model").write_bytes((other / "tokenizer.model").read_bytes())
    _, said = run(config)
    assert said[0].startswith("damaged: the tokenizer in ") and snapshot(folder) == before


@pytest.mark.parametrize("damage", ["gone", "exchanged"])
def test_shards_that_are_not_those_of_the_corpus_are_damage(tmp_path, damage):
    config = text_config(tmp_path, books(tmp_path / "books"), shard_tokens=1_000)
    folder, _ = run(config)
    before, shards = snapshot(folder), sorted((folder / "train").iterdir())
    assert len(shards) > 3 and [path.name for path in shards] == [f"{n:05d}" for n in range(len(shards))]
    manifest = json.loads(before["manifest.json"])["splits"]["train"]
    assert [entry["name"] for entry in manifest["shards"]] == [path.name for path in shards]
    assert [entry["fingerprint"] for entry in manifest["shards"]] == [open_shard(path).fingerprint for path in shards]
    shards[-1].rename(tmp_path / "away")
    if damage == "exchanged":
        shards[0].rename(shards[-1])
        (tmp_path / "away").rename(shards[0])
    _, said = run(config)
    assert said[0].startswith("damaged: ") and "train" in said[0] and snapshot(folder) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": Source.tokens}, "data=tokens is prepared already"),
        ({"root": "s3://bucket/x"}, "data.root=s3://bucket/x is a URL"),
        ({"end_token": "</s>"}, "data.end_token=</s> is for a data.tokenizer that is a file"),
        ({"mixture": "mine:1"}, "data.mixture=mine:1 is for training: .*prepare each corpus by its own data.name"),
        ({"validation_names": " ,"}, "data.validation_names= , has no names"),
        ({"tokenizer": "/no/such.model"}, "/no/such.model"),
    ],
)
def test_what_cannot_be_prepared(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run(text_config(tmp_path, books(tmp_path / "books"), **options))


def test_sample_is_spread_evenly(tmp_path, monkeypatch):
    """Over the training documents, and of these only."""
    (tmp_path / "in").mkdir()
    lines = "".join(f"{n:09d}\n" for n in range(100_000))  # a million characters
    (tmp_path / "in" / "a.txt").write_text(lines)
    (tmp_path / "in" / "b.txt").write_text("never" * 100)
    config = text_config(tmp_path, tmp_path / "in", validation_names="b.txt")
    source, work = Text(config), tmp_path / "work"
    work.mkdir()
    listing = source.listing()
    plan = settle(source, listing, read_all(source, listing, work, 1), work, 0.5)
    sample = list(Corpus(source, listing.names, work, plan).sample(100_000, 1_000))
    assert 90_000 < sum(map(len, sample)) < 120_000 and "never" not in "".join(sample)
    places = np.diff([int(text.split()[1]) for text in sample])
    assert places.max() < 1.5 * places.min()
    assert "".join(Corpus(source, listing.names, work, plan).sample(10**9, 1_000)) == lines


def test_progress_is_told_in_lines(tmp_path, monkeypatch):
    """Where there is no terminal: up to all of the text, in bytes."""
    monkeypatch.setattr(build, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(encoding, "JOB_CHARS", 1_000)
    source = books(tmp_path / "books")
    size = sum(path.stat().st_size for path in source.iterdir()) / 1e6
    _, said = run(text_config(tmp_path, source))
    for what in ("reading", "tokenizing"):
        lines = [line for line in said if line.startswith(what)]
        assert lines[-1] == f"{what}: {size:.1f} of {size:.1f} MB"
    assert len(lines) > 12
