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


@pytest.mark.parametrize("listing", [True, False])
def test_what_lies_at_a_url_is_found(tmp_path, listing):
    """A shard, a Megatron pair, and shards that a corpus tells of; without that, those that the server lists."""
    at = tmp_path / "at"
    write_corpus(at / "books", {"train": [[[1]], [[2]]]})
    for name in ("10", "9"):
        write_documents(at / "plain", [[int(name)]], 100, name=name)
    write_pair(at / "theirs" / "text_document", [[[7]]])
    with Store(at, listing=listing) as store:
        assert open_tokens(f"{store.url}/books/train/").read(0, 2).tolist() == [1, 2]
        assert open_tokens(f"{store.url}/plain/9").read(0, 1).tolist() == [9]
        assert open_tokens(f"{store.url}/theirs/text_document").read(0, 1).tolist() == [7]
        if listing:
            assert open_tokens(f"{store.url}/plain").read(0, 2).tolist() == [9, 10]
            assert open_tokens(f"{store.url}/theirs").read(0, 1).tolist() == [7]
        else:
            with pytest.raises(DataError, match=r"http://\S+/plain is not there, or cannot be listed"):
                open_tokens(f"{store.url}/plain")
        with pytest.raises(DataError, match=r"http://\S+/books/nothing is not there|books/nothing holds no"):
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
        (HTTPStatus.FORBIDDEN, 1, "refused .*403"),
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
    """It sends the whole file each time: that is said, and not taken for the range that was asked for."""
    with Store(corpus[0], ranges=False) as store, pytest.raises(DataError, match="does the server know Range"):
        open_tokens(f"{store.url}/books/train").read(0, 10)


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
            write_pair(tmp_path / "at" / "theirs", [[[first, 5], [5] * first]])
            assert open_tokens(f"{store.url}/train/0", cache=cache).read(0, 2).tolist() == [first, 5]
            assert open_tokens(f"{store.url}/theirs", cache=cache).read(0, 2).tolist() == [first, 5]


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
            with pytest.raises(DataError, match=r"cache/pieces takes no piece .No space left.*data\.cache_bytes"):
                tokens.read(100, 200)
        assert not list(cache.folder.rglob("*.tmp"))
        assert (tokens.read(100, 200) == line[100:200]).all()


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
