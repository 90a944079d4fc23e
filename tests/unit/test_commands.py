"""`python -m data.format`: what is damaged is told, each byte of it; what is shown is what was written."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from http import HTTPStatus
from pathlib import Path

import numpy as np
import pytest

from data.commands import main
from data.tokenizer import train
from data.verify import problems
from data.writer import ShardWriter
from tests.shards import describe_anew, describe_corpus
from tests.store import Store
from tests.unit.test_megatron import write_pair

ROOT = Path(__file__).parents[2]
SHARDS = {
    "train/00000": {"one": "The first text.\n" * 9},
    "train/00001": {"two": "Zwölf Boxkämpfer\tjagen\r\n\x00\u2581" * 40, "ten": "ten"},
    "validation/00000": {"three": "held out\n" * 5},
}
TEXTS = {name: text for texts in SHARDS.values() for name, text in texts.items()}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A corpus as `data.prepare` leaves it: two shards to train on, one held out, and the tokenizer beside them."""
    folder = tmp_path_factory.mktemp("corpora") / "books"
    tokenizer = train(TEXTS.values(), 300)
    folder.mkdir()
    tokenizer.save(folder)
    facts = {"origin": "here", "licence": "CC0"}
    for shard, texts in SHARDS.items():
        with ShardWriter(folder / shard, 300, tokenizer.fingerprint, facts) as writer:
            for name, text in texts.items():
                writer.write(np.append(tokenizer.encode(text), tokenizer.eos_id))
                digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
                writer.end_document(name, len(text.encode()), digest)
    told = {"file": tokenizer.file_name, "sha256": hashlib.sha256(tokenizer.model_bytes).hexdigest()}
    describe_corpus(folder, **facts, tokenizer=told, notes=["documents: 4 kept"])
    return folder


@pytest.fixture
def corpus(prepared, tmp_path):
    return Path(shutil.copytree(prepared, tmp_path / "books"))


def run(capsysbinary, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsysbinary.readouterr()
    return code, out, err.decode()


@pytest.mark.parametrize("place", [".", "train", "train/00001", "train/00001/tokens", "train/00001/tokens.idx"])
def test_what_is_whole_is_said_to_be(prepared, capsysbinary, place):
    assert run(capsysbinary, "verify", prepared / place) == (0, f"{prepared / place}: whole\n".encode(), "")


def test_a_flip_anywhere_is_found(corpus):
    """One bit of a byte at a time: of tokens, of what describes them, of manifests but for notes, of the tokenizer."""
    missed = []
    for path in sorted(path for path in corpus.rglob("*") if path.is_file()):
        data = path.read_bytes()
        end = data.index(b'"tokenizer"') if path == corpus / "manifest.json" else len(data)
        for at in range(0, end, 17 if path.name == "manifest.json" else 211):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            if not list(problems(str(corpus))):
                missed.append((path.name, at, data[max(0, at - 20) : at + 20]))
        path.write_bytes(data)
    assert not missed and not list(problems(str(corpus)))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda at: os.truncate(at / "train/00001/tokens.bin", 100), ["00001/tokens.bin has 100 bytes"]),
        (lambda at: shutil.rmtree(at / "train/00001"), ["holds shards 00000, its corpus was made with 00000, 00001"]),
        (lambda at: (at / "tokenizer.model").unlink(), ["no tokenizer.model"]),
        (lambda at: change(at / "train/00000", num_bytes=9), ["says num_bytes 9, its", "train has num_bytes"]),
        (lambda at: change(at / "train/00000", licence="MIT"), ["00000 has licence 'MIT', its corpus 'CC0'"]),
        (lambda at: change(at / "train/00000", megatron_index="no"), ["says of tokens.idx, which is there, 'no'"]),
        (lambda at: change(at, splits={}), ["tells of no documents"]),
        (lambda at: forge(at / "train/00001", "tokens.bin", b"\xff" * 8),
         ["does not have its checksums in the blocks from token 0", "is not the shard"]),
        (lambda at: forge(at / "train/00000", "tokens.idx", b"\x09"), ["00000/tokens.idx is no Megatron index"]),
        (lambda at: hold_out_again(at), ["validation and train have 1 document in common"]),
        (lambda at: other_tokenizer(at), ["train is of tokenizer", "validation is of tokenizer"]),
    ],
)  # fmt: skip
def test_each_problem_is_told_once(corpus, capsysbinary, spoil, told):
    """C053, C068: exit code 74, one line for each problem with the path in it, and how many there are."""
    spoil(corpus)
    code, out, err = run(capsysbinary, "verify", corpus)
    *lines, last = out.decode().splitlines()
    assert (code, err, last) == (74, "", f"{corpus}: {len(told)} problem{'s' if len(told) > 1 else ''}")
    assert [part in line for part, line in zip(told, lines, strict=True)] == [True] * len(told), lines


def change(folder, **facts):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | facts))


def forge(shard, name, data):
    """Other bytes at the beginning of a file, and hashes that fit them."""
    with open(shard / name, "r+b") as file:
        file.write(data)
    describe_anew(shard)


def hold_out_again(corpus):
    shutil.rmtree(corpus / "validation")
    shutil.copytree(corpus / "train" / "00000", corpus / "validation" / "00000")
    describe_corpus(corpus, **{key: change_nothing(corpus)[key] for key in ("origin", "licence", "tokenizer")})


def change_nothing(corpus):
    return json.loads((corpus / "manifest.json").read_bytes())


def other_tokenizer(corpus):
    """With as many pieces, but not the same."""
    tokenizer = train(["quite other words than those\n" * 50, TEXTS["two"]], 300)
    tokenizer.save(corpus)
    change(corpus, tokenizer={"file": "tokenizer.model", "sha256": hashlib.sha256(tokenizer.model_bytes).hexdigest()})


def test_several_damaged_blocks_are_counted(tmp_path):
    shard = tmp_path / "s"
    with ShardWriter(shard, 1000, "pieces") as writer:
        writer.write(np.zeros(9 << 16, dtype=int))
        writer.end_document("zeros", 0)
    with open(shard / "tokens.bin", "r+b") as file:
        for block in range(1, 9):
            file.seek((block << 17) + 5)
            file.write(b"\x01")
    assert list(problems(str(shard)))[-1].endswith("from token 65536, 131072, 196608, 262144, 327680 and 3 more")


def test_a_pair_is_read_to_its_end(tmp_path):
    pair = write_pair(tmp_path / "text", [[[1, 2]], [[3, -5]]], "<i4")
    assert ["id -5 in document 1" in problem for problem in problems(str(pair))] == [True]


def test_inspect_counts(prepared, capsysbinary):
    """Totals, lengths and names are those of the documents; shards and pairs can be looked at alone."""
    code, out, _ = run(capsysbinary, "inspect", prepared)
    text = out.decode()
    assert code == 0 and "origin: here\nlicence: CC0\ndocuments: 4 kept\n" in text
    assert f"{prepared}/train: 2 shards, 3 documents, " in text and "validation: 1 shard, 1 document, " in text
    assert f"text: {sum(len(TEXTS[name].encode()) for name in ('one', 'two', 'ten')):,} bytes" in text
    assert "longest: 'two' " in text
    code, out, _ = run(capsysbinary, "inspect", prepared / "train/00001/tokens")
    assert code == 0 and "longest: 'tokens:0' " in out.decode()


def test_histogram(tmp_path, capsysbinary):
    """Documents by powers of two of their length, and their share of all tokens."""
    pair = write_pair(tmp_path / "text", [[[0] * length] for length in (1, 4, 7, 8)])
    lines = [line.split() for line in run(capsysbinary, "inspect", pair)[1].decode().splitlines()]
    assert ["1", "1", "5.0", "%", "##"] in lines
    assert ["2", "to", "3", "0", "0.0", "%"] in lines
    assert ["4", "to", "7", "2", "55.0", "%", "#" * 22] in lines
    assert ["8", "to", "15", "1", "40.0", "%", "#" * 16] in lines


@pytest.mark.parametrize("name", ["one", "two", "ten"])
@pytest.mark.parametrize("cut", [1, 1 << 16])
def test_cat_gives_the_text_back(prepared, capsysbinary, monkeypatch, name, cut):
    """Every byte of it, by name or by number, whatever is decoded at once."""
    monkeypatch.setattr("data.commands.CAT_TOKENS", cut)
    for which in (name, ["one", "two", "ten"].index(name)):
        assert run(capsysbinary, "cat", prepared / "train", "--document", which) == (0, TEXTS[name].encode(), "")


def test_cat_shows_a_part(prepared, capsysbinary):
    """Text from one token on; ids where there is no tokenizer, or they are asked for."""
    place = prepared / "train/00001/tokens"
    _, whole, _ = run(capsysbinary, "cat", place, "--ids")
    code, part, _ = run(capsysbinary, "cat", place, "--ids", "--start", 3, "--count", 20)
    assert code == 0 and part.split() == whole.split()[3:23]
    code, part, _ = run(capsysbinary, "cat", place, "--start", 3, "--count", 20)
    assert code == 0 and 0 < len(part) < len(TEXTS["two"]) and part in TEXTS["two"].encode()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["cat", "{}/train", "--document", "tow"], 3, "no document of that name; the nearest is 'two'"),
        (["cat", "{}/train", "--document", "3"], 3, "has documents 0 to 2"),
        (["cat", "{}/train", "--document", "-1"], 3, "has documents 0 to 2"),
        (["cat", "{}/train", "--start", "9999"], 3, "--start 9999: document 0 has tokens 0 to "),
        (["cat", "{}/train", "--count", "-2"], 3, "--start 0 --count -2: document 0 has tokens"),
        (["cat", "{}"], 3, "is a whole corpus: give one side of it"),
        (["inspect", "{}/test"], 3, "test does not exist"),
        (["verify"], 3, "required: PATH: see python -m data.format --help"),
        (["mend", "{}"], 3, "invalid choice: 'mend'"),
        (["inspect", "{}/../empty"], 74, "holds no shard"),
    ],
)
def test_refusals(prepared, capsysbinary, arguments, code, message):
    """One line on standard error; 3 for what was asked, 74 for what is there."""
    (prepared.parent / "empty").mkdir(exist_ok=True)
    found, out, err = run(capsysbinary, *[argument.format(prepared) for argument in arguments])
    assert (found, out) == (code, b"") and message in err and err.count("\n") == 1


def test_no_tokenizer_beside_it(tmp_path, prepared, capsysbinary):
    pair = write_pair(tmp_path / "text", [[[70, 71]]])
    code, _, err = run(capsysbinary, "cat", pair)
    assert code == 3 and "--tokenizer FILE, or show numbers by --ids" in err
    assert run(capsysbinary, "cat", pair, "--tokenizer", prepared / "tokenizer.model")[0] == 0


def test_at_a_url(prepared, capsysbinary):
    """All three commands; damage that a cache would hide is found, as none is used."""
    with Store(prepared.parent) as store:
        url = f"{store.url}/books"
        assert run(capsysbinary, "verify", url)[:2] == (0, f"{url}: whole\n".encode())
        assert run(capsysbinary, "cat", f"{url}/train", "--document", "two")[1] == TEXTS["two"].encode()
        assert b"train: 2 shards, 3 documents" in run(capsysbinary, "inspect", url)[1]
        store.trouble = lambda path, data: b"\x00" + data[1:] if path.endswith("1/tokens.bin") and data else data
        code, out, _ = run(capsysbinary, "verify", url)
        assert code == 74 and b"00001/tokens.bin is corrupt" in out


def test_at_a_url_that_lists_no_folders(prepared, capsysbinary):
    with Store(prepared.parent, unlisted=HTTPStatus.FORBIDDEN) as store:
        for place in ("books", "books/train", "books/train/00000"):
            url = f"{store.url}/{place}"
            assert run(capsysbinary, "verify", url) == (0, f"{url}: whole\n".encode(), "")


def test_files_longer_than_they_should_be_are_told_at_a_url(corpus, capsysbinary):
    """Although what their manifest tells of is all there."""
    with open(corpus / "train/00000/documents.jsonl", "ab") as file:
        file.write(b"x")
    with Store(corpus.parent) as store:
        code, out, _ = run(capsysbinary, "verify", f"{store.url}/books")
    assert code == 74 and b"00000/documents.jsonl has " in out


def test_a_damaged_tokenizer_is_told_at_a_url(corpus, capsysbinary):
    """By its own name, and not that of a copy here; what is there is not prepared anew by a command here."""
    change(corpus, tokenizer={"file": "tokenizer.model"})
    (corpus / "tokenizer.model").write_bytes(b"none")
    with Store(corpus.parent) as store:
        code, out, _ = run(capsysbinary, "verify", f"{store.url}/books")
    told = out.decode().splitlines()[0]
    assert code == 74 and told.startswith(f"{store.url}/books/tokenizer.model is no tokenizer (")
    assert told.endswith(": copy it there again from where it is whole") and "data.prepare" not in out.decode()


def test_passwords_are_not_shown(prepared, capsysbinary):
    with Store(prepared.parent) as store:
        url = store.url.replace("://", "://me:hunter2@") + "/books"
        assert run(capsysbinary, "verify", url) == (0, f"{store.url}/books: whole\n".encode(), "")
        for arguments in (["inspect", f"{url}/train"], ["cat", url], ["inspect", f"{url}/none"]):
            _, out, err = run(capsysbinary, *arguments)
            assert f"{store.url}/books".encode() in out + err.encode() and b"hunter2" not in out + err.encode()


@pytest.mark.parametrize("notes", [None, 3, "absent"])
def test_inspect_without_notes(corpus, capsysbinary, notes):
    change(corpus, notes=notes)
    if notes == "absent":
        path = corpus / "manifest.json"
        path.write_text(json.dumps({key: value for key, value in change_nothing(corpus).items() if key != "notes"}))
    code, out, err = run(capsysbinary, "inspect", corpus)
    assert (code, err) == (0, "") and b"licence: CC0\n" + bytes(corpus) in out


def test_names_do_nothing_to_a_terminal(tmp_path, capsysbinary):
    with ShardWriter(tmp_path / "s", 1000, "pieces") as writer:
        writer.write(np.array([1, 2]))
        writer.end_document("evil\x1b]0;title\x07\nname", 2)
    code, out, _ = run(capsysbinary, "inspect", tmp_path / "s")
    assert code == 0 and b"\x1b" not in out and rb"longest: 'evil\x1b]0;title\x07\nname' 2" in out


@pytest.mark.parametrize("damaged", [True, False])
def test_verify_whose_reader_stops_reading(corpus, damaged):
    """The exit code tells what is known by then."""
    if damaged:
        os.truncate(corpus / "train/00000/tokens.bin", 2)
    command = [sys.executable, "-m", "data.format", "verify", str(corpus)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        reader.stdout.close()
        assert (reader.stderr.read(), reader.wait()) == (b"", 74 if damaged else 0)


def test_as_a_command(prepared):
    """`python -m data.format`, its help, and a reader that stops reading."""
    command = [sys.executable, "-m", "data.format"]
    shown = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0 and all(word in shown.stdout for word in ("verify", "inspect", "cat", "exit codes"))
    told = [*command, "cat", str(prepared / "train"), "--document", "two"]
    with subprocess.Popen(told, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        reader.stdout.close()
        assert (reader.stderr.read(), reader.wait()) == (b"", 0)
