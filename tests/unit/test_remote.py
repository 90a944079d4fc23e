"""Shards behind URLs: what is read is what was written, or an error, whatever network, server and disk do."""

import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import numpy as np
import pytest

from data import remote
from data.format import BLOCK_TOKENS, DataError
from data.remote import PIECE_BYTES, RUN_PIECES, Cache
from data.shards import open_tokens
from tests.shards import write_documents
from tests.store import Store
from tests.unit.test_megatron import write_pair
from tests.unit.test_shards import write_corpus

ROOT = Path(__file__).parents[2]
ROOM = 64 * PIECE_BYTES


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """Tries follow each other at once."""
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)


@pytest.fixture
def corpus(tmp_path):
    """Three shards, the middle one of several blocks and pieces; and their tokens, end to end."""
    middle = np.random.default_rng(0).integers(0, 1000, 25 * BLOCK_TOKENS + 123)
    write_corpus(tmp_path / "at" / "books", {"train": [[[1, 2], [3]], [middle.tolist()], [[4]]]}, vocab_size=1000)
    return tmp_path / "at", np.concatenate([[1, 2, 3], middle, [4]])


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.parent.parent == folder)


def test_reads_what_was_written(corpus, tmp_path):
    """Over HTTP by ranges; each byte is fetched once, and not again by those that find it in the cache."""
    folder, line = corpus
    with Store(folder) as store:
        for attempt in range(2):
            tokens = open_tokens(f"{store.url}/books/train", cache=Cache(tmp_path / "cache", ROOM))
            store.sent.clear()
            ranges = np.sort(np.random.default_rng(1).integers(0, len(line) + 1, (30, 2)), axis=1).tolist()
            for start, stop in [*ranges, (0, len(line))]:
                assert (tokens.read(start, stop) == line[start:stop]).all()
            assert sum(store.sent.values()) == (0 if attempt else 2 * len(line))
        assert [entry["tokens"] for entry in tokens.documents()] == [2, 1, len(line) - 4, 1]
        assert tokens.fingerprint == open_tokens(folder / "books" / "train").fingerprint
        assert (tokens.digests() == open_tokens(folder / "books" / "train").digests()).all()


@pytest.mark.parametrize("unlisted", [None, HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN])
def test_what_lies_at_a_url_is_found(tmp_path, unlisted):
    """A shard, a Megatron pair, and shards that a corpus tells of; without that, those that the server lists."""
    at = tmp_path / "at"
    write_corpus(at / "books", {"train": [[[1]], [[2]]]})
    for name in ("10", "9"):
        write_documents(at / "plain", [[int(name)]], 100, name=name)
    write_pair(at / "theirs" / "text_document", [[[7]]])
    with Store(at, unlisted=unlisted) as store:
        assert open_tokens(f"{store.url}/books/train/").read(0, 2).tolist() == [1, 2]
        assert open_tokens(f"{store.url}/plain/9").read(0, 1).tolist() == [9]
        assert open_tokens(f"{store.url}/theirs/text_document").read(0, 1).tolist() == [7]
        if not unlisted:
            assert open_tokens(f"{store.url}/plain").read(0, 2).tolist() == [9, 10]
            assert open_tokens(f"{store.url}/theirs").read(0, 1).tolist() == [7]
        else:
            with pytest.raises(DataError, match=r"http://\S+/plain (is not there, or cannot be listed|.*403)"):
                open_tokens(f"{store.url}/plain")
        with pytest.raises(DataError, match=r"http://\S+/books/nothing (is not there|holds no|.*403)"):
            open_tokens(f"{store.url}/books/nothing")


def test_other_stores_of_fsspec(corpus, tmp_path):
    """A store in memory stands for those that need a network; its folders are listed."""
    import fsspec

    folder, line = corpus
    files = fsspec.filesystem("memory")
    files.put(str(folder / "books"), "/books", recursive=True)
    for cache in (None, Cache(tmp_path / "cache", ROOM)):
        tokens = open_tokens("memory://books/train", cache=cache)
        assert (tokens.read(0, len(line)) == line).all()
    files.rm("/books/manifest.json")
    assert (open_tokens("memory://books/train").read(0, len(line)) == line).all()
    files.rm("/books", recursive=True)


@pytest.mark.parametrize("trouble", [HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE, None])
def test_a_server_that_fails_now_and_then(corpus, tmp_path, caplog, trouble):
    """Errors 500 and 503, and connections cut in the middle of an answer, are lived through, and said."""
    folder, line = corpus
    with Store(folder) as store, caplog.at_level(logging.WARNING):
        open_tokens(f"{store.url}/books/train")  # the store has answered: from now on it is waited for
        store.trouble = lambda path, data: data if sum(store.requests.values()) % 3 else trouble
        tokens = open_tokens(f"{store.url}/books/train", cache=Cache(tmp_path / "cache", ROOM))
        assert (tokens.read(0, len(line)) == line).all()
    assert "could not be read" in caplog.text and store.url in caplog.text


@pytest.mark.parametrize(
    ("trouble", "tries", "message"),
    [
        (HTTPStatus.INTERNAL_SERVER_ERROR, remote.TRIES, "tried 8 times .*500"),
        (HTTPStatus.FORBIDDEN, 1, "tried 1 time .*403"),
        (None, remote.TRIES, "tried 8 times"),
    ],
)
def test_a_server_that_fails_for_good(corpus, tmp_path, trouble, tries, message):
    """The error names the URL and the reason, after a number of tries; at once where asking again cannot help."""
    folder, _ = corpus
    with Store(folder) as store:
        tokens = open_tokens(f"{store.url}/books/train", cache=Cache(tmp_path / "cache", ROOM))
        store.requests.clear()
        store.trouble = lambda path, data: trouble
        with pytest.raises(DataError, match=rf"http://\S+/books/train/00001/tokens\.bin cannot be read, {message}"):
            tokens.read(100, 200)
        assert sum(store.requests.values()) == tries
        with pytest.raises(DataError, match=rf"http://\S+ cannot be read, {message}"):
            open_tokens(f"{store.url}/books/train")  # and is not said to be missing


def test_no_server_at_all():
    with Store(ROOT) as store:
        url = store.url
    with pytest.raises(DataError, match=rf"{url}/books/\S* cannot be read, tried 3 times .*[Cc]onnect"):
        open_tokens(f"{url}/books/train")


def test_a_server_without_ranges_is_refused(corpus):
    """It sends the whole file: that is said, and neither taken for the range that was asked for, nor asked again."""
    with Store(corpus[0], ranges=False) as store:
        tokens = open_tokens(f"{store.url}/books/train")
        store.requests.clear()
        with pytest.raises(DataError, match=r"1/tokens\.bin cannot be read in parts.*use a server that knows Range"):
            tokens.read(100, 110)
        assert store.requests == {"/books/train/00001/tokens.bin": 1}


def test_a_mistake_in_a_program_is_not_tried_again(corpus, monkeypatch):
    """Here, or in the package of a store: it is told at once, and not after a minute."""
    with Store(corpus[0]) as store:
        shard = open_tokens(f"{store.url}/books/train/00001")
        calls = []
        monkeypatch.setattr(shard.storage._files, "cat_file", lambda *given, **more: calls.append(given) or len(3))
        with pytest.raises(DataError, match=r"00001/tokens\.bin cannot be read, tried 1 time .TypeError: "):
            shard.read(0, 10)
        assert len(calls) == 1


def test_requests_at_the_start(corpus, tmp_path):
    """The manifest tells the sizes of files, and one of them is held against the truth; what is kept is not asked."""
    folder, _ = corpus
    with Store(folder) as store:
        for kept in (0, 1):
            open_tokens(f"{store.url}/books/train", cache=Cache(tmp_path / "cache", ROOM))
            expected = {"manifest.json": 2, "tokens.bin": 1, "documents.npy": 1 - kept, "crc.npy": 1 - kept}
            assert all(store.requests[f"/books/train/00001/{name}"] == number for name, number in expected.items())
            store.requests.clear()


@pytest.mark.parametrize("cached", [True, False])
def test_files_that_are_not_as_long_as_their_manifest_says(corpus, tmp_path, cached):
    """Found at the opening, or where they are read: at once, and as damage, not as a server that fails."""
    folder, _ = corpus
    shard = folder / "books" / "train" / "00001"
    with Store(folder) as store:
        url = f"{store.url}/books/train"
        for name, size in {"documents.jsonl": 9, "digests.npy": 0, "crc.npy": 100}.items():
            data = (shard / name).read_bytes()
            for cut in (data[:size], None):
                (shard / name).unlink() if cut is None else (shard / name).write_bytes(cut)
                store.requests.clear()
                cache = Cache(tmp_path / f"{name} {cut is None}", ROOM) if cached else None
                state = "is missing" if cut is None else f"ends at byte {size}, before"
                with pytest.raises(DataError, match=rf"00001/{name} {state}.*: copy it there again"):
                    tokens = open_tokens(url, cache=cache)
                    tokens.digests()
                    list(tokens.documents())
                assert store.requests[f"/books/train/00001/{name}"] <= 2
            (shard / name).write_bytes(data)
        os.truncate(shard / "tokens.bin", 10)  # also where all else is kept
        with pytest.raises(DataError, match=r"00001/tokens\.bin has 10 bytes, its manifest expects"):
            open_tokens(url, cache=cache)


def test_passwords_are_not_told(corpus, tmp_path):
    """The store gets them, also when what was opened is opened by its `where`; messages leave them out."""
    folder, line = corpus
    with Store(folder) as store:
        url = store.url.replace("://", "://me:hunter2@") + "/books/train"
        tokens = open_tokens(url, cache=Cache(tmp_path / "cache", ROOM))
        assert (tokens.read(0, 100) == line[:100]).all()
        assert tokens.where == f"{store.url}/books/train" and tokens.parts[0].where == f"{tokens.where}/00000"
        before = store.logins.total()
        open_tokens(tokens.where)
        assert store.logins.total() > before and len(store.logins) == 1
        for place, trouble in ((f"{url}/nothing", None), (url, HTTPStatus.FORBIDDEN), (f"{url}?sig=me:hunter2", None)):
            store.trouble = lambda path, data, trouble=trouble: data if trouble is None else trouble
            with pytest.raises((DataError, ValueError), match="http://127") as caught:
                open_tokens(place)
            assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match=r"nosuch://b/x is no URL") as caught:
        open_tokens("nosuch://me:hunter2@b/x")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("end", ["?sig=abc", "#part", "/a?b"])
def test_a_url_with_a_query_is_refused(end):
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9/books(/a)?… goes on with \? or #.*%3F and %23"):
        open_tokens(f"http://127.0.0.1:9/books{end}")


def flip(data):
    return bytes([data[0] ^ 1]) + data[1:] if data else data


def test_bytes_flipped_on_the_way_are_fetched_again(corpus, tmp_path):
    """Once; in the tokens as in the small files."""
    folder, line = corpus
    with Store(folder) as store:
        spoilt = set()

        def once(path, data):
            if path in spoilt or path.endswith(".json"):
                return data
            spoilt.add(path)
            return flip(data)

        store.trouble = once
        names = "tokens.bin", "documents.npy", "crc.npy"
        tokens = open_tokens(f"{store.url}/books/train", cache=Cache(tmp_path / "cache", ROOM))
        assert (tokens.read(0, len(line)) == line).all()
        assert {f"/books/train/0000{n}/{name}" for n in range(3) for name in names} <= spoilt


@pytest.mark.parametrize("cached", [True, False])
def test_a_damaged_shard_is_named(corpus, tmp_path, cached):
    """Bytes that are wrong where they lie are an error after a second try; when they are mended, they are read."""
    folder, line = corpus
    with Store(folder) as store:
        cache = Cache(tmp_path / "cache", ROOM) if cached else None
        tokens = open_tokens(f"{store.url}/books/train", cache=cache)
        store.trouble = lambda path, data: flip(data) if path.endswith("1/tokens.bin") else data
        store.requests.clear()
        with pytest.raises(
            DataError, match=r"http://\S+/00001/tokens\.bin is corrupt, tokens from 0 on .*copy it there"
        ):
            tokens.read(10, 20)
        assert store.requests["/books/train/00001/tokens.bin"] == 2
        store.trouble = lambda path, data: data
        assert (tokens.read(10, 20) == line[10:20]).all()
        tokens.read(5 * BLOCK_TOKENS, 5 * BLOCK_TOKENS + 9)
        store.trouble = lambda path, data: flip(data)
        if cached:
            assert (tokens.read(10, 20) == line[10:20]).all()
        else:  # what was checked once is checked again where it is fetched again
            with pytest.raises(DataError, match="is corrupt"):
                tokens.read(10, 20)


def test_damaged_pieces_of_the_cache_are_fetched_again(corpus, tmp_path):
    """A byte flipped, a piece cut short, one that is empty."""
    folder, line = corpus
    cache = Cache(tmp_path / "cache", ROOM)
    with Store(folder) as store:
        tokens = open_tokens(f"{store.url}/books/train", cache=cache)
        assert (tokens.read(0, len(line)) == line).all()
        pieces = sorted(path for path in cache.folder.rglob("*") if path.parent != cache.folder and path.is_file())
        for number, path in enumerate(pieces):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes([data, data[:-1], b""][number % 3])
        assert (tokens.read(0, len(line)) == line).all()


def test_other_content_under_the_same_url_is_not_mixed(tmp_path):
    """What was kept of a corpus is not taken for one that was prepared anew in its place."""
    cache = Cache(tmp_path / "cache", ROOM)
    with Store(tmp_path / "at") as store:
        for first in (1, 2):
            place = tmp_path / "at" / "train"
            if place.exists():
                place.rename(tmp_path / "old")
            write_documents(place, [[first, 5]], 100, name="0")
            write_pair(tmp_path / "at" / "theirs", [[[first, 5]]])
            assert open_tokens(f"{store.url}/train/0", cache=cache).read(0, 2).tolist() == [first, 5]
            theirs = open_tokens(f"{store.url}/theirs", cache=cache)
            assert theirs.read(0, 2).tolist() == [first, 5]
            assert theirs.fingerprint == open_tokens(tmp_path / "at" / "theirs").fingerprint


def test_pairs_in_one_folder_are_kept_apart(tmp_path):
    """One that is made anew is read anew, whatever lies beside it and did not change."""
    cache = Cache(tmp_path / "cache", ROOM)
    with Store(tmp_path / "at") as store:
        for documents in ([[[1, 1]]], [[[2], [2]]], [[[3, 3]]]):
            write_pair(tmp_path / "at" / "pairs" / "a", documents)
            write_pair(tmp_path / "at" / "pairs" / "b", [[[9, 9]]])
            value = documents[0][0][0]
            assert open_tokens(f"{store.url}/pairs", cache=cache).read(0, 4).tolist() == [value, value, 9, 9]


def test_the_cache_stays_within_its_bound(corpus, tmp_path):
    """The pieces used longest ago go first; files that are none of its pieces are never touched."""
    folder, line = corpus
    cache = Cache(tmp_path / "cache", (RUN_PIECES + 1) * PIECE_BYTES)
    foreign = [cache.folder / "mine.txt", tmp_path / "cache" / "mine" / "thesis.tex", cache.folder / "mine" / "0"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(PIECE_BYTES))
    write_documents(folder / "books" / "large", [np.resize(line, 20 * PIECE_BYTES // 2).tolist()], 1000, name="0")
    with Store(folder) as store:
        tokens = open_tokens(f"{store.url}/books/large/0", cache=cache)
        expected = np.resize(line, 20 * PIECE_BYTES // 2)
        for start in [*range(0, len(expected), PIECE_BYTES // 2), 5, 7]:
            assert (tokens.read(start, start + 10) == expected[start : start + 10]).all()
            assert size_of(cache.folder) - PIECE_BYTES <= cache.max_bytes  # one of them is foreign["mine/0"]
        store.sent.clear()
        tokens.read(5, 6)
        assert not store.sent  # used last: still here
    assert all(path.stat().st_size == PIECE_BYTES for path in foreign)
    with pytest.raises(ValueError, match=r"data\.cache_bytes=1000 .* use \d+ or more"):
        Cache(tmp_path / "tiny", 1000)


def test_what_was_read_last_is_kept_longest(tmp_path):
    """Not what was written last."""
    cache, key, data = Cache(tmp_path, (RUN_PIECES + 1) * PIECE_BYTES), "0" * 32, bytes(PIECE_BYTES)
    for piece in range(RUN_PIECES):
        cache.write(key, piece, data)
        os.utime(cache.folder / key / str(piece), (piece, piece))
    assert cache.read(key, 0) == data
    cache.write(key, RUN_PIECES, data)
    assert cache.read(key, 0) == data and cache.read(key, 1) is None and cache.read(key, RUN_PIECES) == data


def test_readers_at_one_moment_fetch_once(corpus, tmp_path):
    """Each waits for the one that fetches the same pieces, and finds them then."""
    folder, line = corpus
    with Store(folder) as store, ThreadPoolExecutor(6) as pool:

        def slow(path, data):
            time.sleep(0.1)
            return data

        url = f"{store.url}/books/train"
        ranks = [open_tokens(url, cache=Cache(tmp_path / "cache", ROOM)) for _ in range(6)]
        store.trouble = slow
        store.sent.clear()
        assert all(pool.map(lambda tokens: (tokens.read(5, 9000) == line[5:9000]).all(), ranks))
        assert store.sent["/books/train/00001/tokens.bin"] == PIECE_BYTES


def test_a_cache_of_many_processes(corpus, tmp_path):
    """Ranks of a node that read at one moment fetch each piece once between them; one that is killed holds up none."""
    folder, line = corpus
    code = (
        "import sys, zlib\nfrom data.remote import Cache\nfrom data.shards import open_tokens\n"
        "tokens = open_tokens(sys.argv[1], cache=Cache(sys.argv[2], 1 << 26))\n"
        "print(zlib.crc32(tokens.read(0, tokens.num_tokens).tobytes()))"
    )
    with Store(folder) as store:
        url = f"{store.url}/books/train"
        command = [sys.executable, "-c", code, url, str(tmp_path / "cache")]
        killed = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        while not store.sent["/books/train/00001/tokens.bin"] and killed.poll() is None:
            pass
        killed.kill()
        killed.wait()
        store.sent.clear()
        ranks = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(3)]
        found = {rank.communicate()[0] for rank in ranks}
        sent = store.sent["/books/train/00001/tokens.bin"]
    assert found == {str(remote.zlib.crc32(line.astype("<u2").tobytes())).encode() + b"\n"}
    assert 0 < sent <= 2 * len(line)


def test_a_full_disk_is_named(corpus, tmp_path, monkeypatch):
    """No half piece is left, and reading goes on once there is room."""
    folder, line = corpus
    cache = Cache(tmp_path / "cache", ROOM)
    with Store(folder) as store:
        tokens = open_tokens(f"{store.url}/books/train", cache=cache)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(DataError, match=r"cache/pieces cannot be used as a cache .No space.*data\.cache_bytes"):
                tokens.read(100, 200)
        assert not list(cache.folder.rglob("*.tmp"))
        assert (tokens.read(100, 200) == line[100:200]).all()


@pytest.mark.parametrize(
    ("owner", "method"), [(Path, "mkdir"), (Path, "write_text"), (Path, "read_bytes"), (remote.fcntl, "flock")]
)
def test_a_folder_that_is_no_cache(tmp_path, monkeypatch, owner, method):
    """Full, or another user's, whatever it is that fails first: the folder is named, and the setting."""
    cache = Cache(tmp_path / "cache", ROOM)
    monkeypatch.setattr(owner, method, lambda *given, **more: (_ for _ in ()).throw(OSError(30, "Read-only")))
    with pytest.raises(DataError, match=r"cache/pieces cannot be used as a cache .Read-only.*data\.cache$"):
        cache.read("0" * 32, 0)
        cache.write("0" * 32, 0, b"abc")


def test_a_folder_that_cannot_be_a_cache(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"file/cache/pieces cannot be used as a cache.*data\.cache$"):
        Cache(tmp_path / "file" / "cache", ROOM)


def test_pieces_of_another_user_are_read(tmp_path, monkeypatch):
    """The time of their use cannot be set."""
    cache = Cache(tmp_path / "cache", ROOM)
    cache.write("0" * 32, 0, b"abc")
    monkeypatch.setattr(os, "utime", lambda *given: (_ for _ in ()).throw(PermissionError(1, "not yours")))
    assert cache.read("0" * 32, 0) == b"abc"


@pytest.mark.parametrize("record", [b"", b"\xff\x00", "²".encode(), "٣".encode(), b"9" * 5000, b"-1"])
def test_a_damaged_record_of_the_cache(tmp_path, record):
    """What is used is measured anew."""
    cache = Cache(tmp_path / "cache", ROOM)
    cache.write("0" * 32, 0, b"abc")
    (cache.folder / "used").write_bytes(record)
    cache.write("0" * 32, 1, b"abc")
    assert (cache.folder / "used").read_bytes() == b"14"


def test_ranks_that_wait_do_not_wait_for_each_other(corpus, tmp_path, monkeypatch):
    """While one pauses before its next try, others may try: the lock is free."""
    folder, _ = corpus
    cache, free = Cache(tmp_path / "cache", ROOM), []

    def sleep(seconds):
        for path in cache.folder.glob("*.lock"):
            with open(path, "a+b") as lock:
                remote.fcntl.flock(lock, remote.fcntl.LOCK_EX | remote.fcntl.LOCK_NB)
            free.append(path.name)

    with Store(folder) as store:
        tokens = open_tokens(f"{store.url}/books/train", cache=cache)
        store.trouble = lambda path, data: HTTPStatus.SERVICE_UNAVAILABLE
        monkeypatch.setattr(remote.time, "sleep", sleep)
        with pytest.raises(DataError, match="tried 8 times .*503"):
            tokens.read(100, 200)
    assert any(name.startswith("run-") for name in free)


def test_reading_in_threads(corpus, tmp_path):
    folder, line = corpus
    with Store(folder) as store, ThreadPoolExecutor(6) as pool:
        tokens = open_tokens(f"{store.url}/books/train", cache=Cache(tmp_path / "cache", ROOM))
        ranges = np.sort(np.random.default_rng(3).integers(0, len(line) + 1, (60, 2)), axis=1).tolist()
        assert all(pool.map(lambda place: (tokens.read(*place) == line[slice(*place)]).all(), ranges))


@pytest.mark.parametrize(
    ("url", "message"),
    [("nosuch://bucket/x", "is no URL that fsspec knows"), ("s3://bucket/x", "pip install .*fsspec s3fs for s3")],
)
def test_stores_that_cannot_be_opened(url, message):
    """The package that a store needs is named."""
    with pytest.raises(ValueError, match=message):
        open_tokens(url)
