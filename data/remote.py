"""Shards behind a URL of fsspec (optional extra), through a bounded cache on this machine's disk.

The cache holds aligned pieces of files, each a file of its own that gets its name once it is whole, so that all ranks
of a node share one cache. A piece carries its checksum; and whoever reads a shard compares the shard's own each time,
and has what is damaged fetched once more.
"""

import contextlib
import fcntl
import logging
import os
import random
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from data.storage import DataError, Unreachable, sha256, without_login

PIECE_BYTES = 1 << 20  # a multiple of a shard's block
RUN_PIECES = 8  # fetched by one request at most
FIRST_TRIES, TRIES = 3, 8  # before and after a store has answered once
PAUSE_SECONDS = 0.5  # before the second try; doubled before each further one
CONNECT_SECONDS, SILENT_SECONDS = 30, 60  # http: after which a try has failed
SPARE = 0.1  # share of the cache that is freed at once when it is full
STALE_SECONDS = 3600  # after which a piece that was never finished is removed

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Cache:
    """Pieces of remote files in a folder of this machine, shared by its processes and kept between runs.

    The least recently used are removed when it is full. It may be too large by what processes write at one moment:
    one piece each. Only pieces are ever removed, whatever else lies in the folder.

    Args:
        folder: on a disk of this machine; made where it is not there.
        max_bytes: what the pieces may take up; best several for each process that uses it.

    Raises:
        DataError: by each method, where the folder cannot be used: its disk is full, or it is another user's.
    """

    def __init__(self, folder: Path | str, max_bytes: int) -> None:
        if max_bytes < RUN_PIECES * (PIECE_BYTES + 4):
            raise ValueError(
                f"data.cache_bytes={max_bytes} holds no request: use {2 * RUN_PIECES * PIECE_BYTES} or more"
            )
        self.folder, self.max_bytes = Path(folder).absolute() / "pieces", max_bytes
        with self._usable():
            self.folder.mkdir(parents=True, exist_ok=True)

    def read(self, key: str, piece: int) -> bytes | None:
        """A piece that is here and undamaged; None otherwise."""
        path = self.folder / key / str(piece)
        with self._usable():
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                return None
            with contextlib.suppress(PermissionError, FileNotFoundError):  # another user's, or just removed
                os.utime(path)  # used now: last to be removed
        return data[:-4] if zlib.crc32(data[:-4]).to_bytes(4, "little") == data[-4:] else None

    def write(self, key: str, piece: int, data: bytes) -> None:
        """Keeps a piece, removing others where there is no room."""
        folder = self.folder / key
        with self._usable():
            folder.mkdir(exist_ok=True)
            self._make_room(len(data) + 4)
            temporary = folder / f"{piece}.{random.getrandbits(64):016x}.tmp"
            try:
                with open(temporary, "wb") as file:
                    file.write(data)
                    file.write(zlib.crc32(data).to_bytes(4, "little"))
                os.replace(temporary, folder / str(piece))
            except OSError:
                temporary.unlink(missing_ok=True)
                raise

    def remove(self, key: str, pieces: range) -> None:
        """Drops pieces that turned out to be wrong."""
        with self._usable():
            for piece in pieces:
                (self.folder / key / str(piece)).unlink(missing_ok=True)

    @contextlib.contextmanager
    def fetching(self, key: str, run: int) -> Iterator[None]:
        """One process at a time: those that waited then find what it has fetched. One that is killed lets go."""
        with self._locked(f"run-{(int(key[:8], 16) + run) % 64:02}"):
            yield

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as opened:
            with self._usable():
                lock = opened.enter_context(open(self.folder / f"{name}.lock", "a+b"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except DataError:
            raise
        except OSError as error:
            raise DataError(
                f"{self.folder} cannot be used as a cache ({error.strerror}): see to its rights, free space there, "
                "lower data.cache_bytes, or name another folder by data.cache"
            ) from error

    def _make_room(self, num_bytes: int) -> None:
        """Counts bytes as used, in a file that all processes share: too many of them where one was killed."""
        with self._locked("used"):
            record = self.folder / "used"
            text = record.read_bytes() if record.exists() else b""
            used = int(text) if text.isdigit() and len(text) < 20 else self.max_bytes  # what is damaged: measured anew
            if used + num_bytes > self.max_bytes:
                used = self._free(num_bytes)
            record.write_text(str(used + num_bytes))

    def _free(self, num_bytes: int) -> int:
        """Removes the pieces used longest ago where there is no room; returns the bytes of what is left."""
        found, used, stale = list[tuple[float, int, str]](), 0, time.time() - STALE_SECONDS
        for folder in [entry.path for entry in os.scandir(self.folder) if re.fullmatch("[0-9a-f]{32}", entry.name)]:
            for entry in os.scandir(folder):
                with contextlib.suppress(FileNotFoundError):  # another process has just given it its name
                    facts = entry.stat()
                    used += facts.st_size
                    if not entry.name.endswith(".tmp") or facts.st_mtime < stale:
                        found.append((facts.st_mtime, facts.st_size, entry.path))
        target = self.max_bytes - num_bytes
        if used > target:
            target = min(target, int(self.max_bytes * (1 - SPARE)))
        for _, size, path in sorted(found):
            if used <= target:
                break
            Path(path).unlink(missing_ok=True)
            used -= size
        return used


class Remote:
    """A folder behind a URL; `data.storage.Storage` says what its methods do. Without a cache all is fetched anew."""

    steady = False
    heal = "copy it there again from where it is whole"

    def __init__(self, url: str, cache: Cache | None = None) -> None:
        self.where, self._cache = without_login(url.rstrip("/")), cache
        self._store = "/".join(self.where.split("/")[:3])
        self._url = _with_login(url.rstrip("/"), self._store)
        self._files, self._path = _connect(self._url)
        self._version: str | None = None
        self._sizes, self._told = dict[str, int](), dict[str, int]()  # as the store says, and the manifest

    def below(self, name: str) -> "Remote":
        return Remote(f"{self._url}/{name}", self._cache)

    def listing(self) -> tuple[list[str], list[str]]:
        try:
            entries = self._patiently(self.where, lambda: self._files.ls(self._path, detail=True))
        except FileNotFoundError:
            raise DataError(f"{self.where} is not there, or cannot be listed: check the URL") from None
        folders, files = list[str](), list[str]()
        for entry in entries:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            (folders if entry["type"] == "directory" else files).append(name)
        return folders, files

    def size(self, name: str) -> int | None:
        url = f"{self.where}/{name}"
        if name not in self._sizes:
            try:
                facts = self._patiently(url, lambda: self._files.info(f"{self._path}/{name}"))
            except FileNotFoundError:
                return None
            if facts["type"] == "directory":
                return None
            if facts["size"] is None:
                raise Unreachable(f"{url} cannot be read in parts, its server does not say sizes: use one that does")
            self._sizes[name] = int(facts["size"])
        return self._sizes[name]

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        stop = start + len(buffer)
        size = self._require(name, self._told[name] if name in self._told else self.size(name), stop)
        if self._cache is None or self._version is None:
            buffer[:] = self._patiently(f"{self.where}/{name}", lambda: self._fetch(name, start, stop))
            return
        run_bytes = RUN_PIECES * PIECE_BYTES
        for run in range(start // run_bytes, -(-stop // run_bytes)):
            low, high = max(start, run * run_bytes), min(stop, (run + 1) * run_bytes)
            self._read_run(self._cache, name, size, run, low, buffer[low - start : high - start])

    def pin(self, version: str, sizes: Mapping[str, int]) -> None:
        self._version, self._told = version, dict(sizes)

    def forget(self, name: str, start: int, stop: int) -> None:
        if self._cache is not None:
            self._cache.remove(self._key(name), range(start // PIECE_BYTES, -(-stop // PIECE_BYTES)))

    def close(self) -> None:
        pass

    def _key(self, name: str) -> str:
        return sha256(f"{self.where}/{name}\n{self._version}".encode())[:32]

    def _require(self, name: str, size: int | None, stop: int) -> int:
        """Returns `size`, of a file; DataError where there is none or it ends before byte `stop`."""
        if size is None or stop > size:
            state = "is missing" if size is None else f"ends at byte {size}, before {stop}"
            raise DataError(f"{self.where}/{name} {state}: {self.heal}")
        return size

    def _read_run(self, cache: Cache, name: str, size: int, run: int, start: int, buffer: memoryview) -> None:
        """Bytes from `start` on, within a run of pieces that are fetched by one request where they are not here."""
        key, stop = self._key(name), start + len(buffer)
        pieces = range(start // PIECE_BYTES, -(-stop // PIECE_BYTES))

        def find() -> dict[int, bytes | None]:
            found = {piece: cache.read(key, piece) for piece in pieces}
            if None in found.values():
                with cache.fetching(key, run):
                    found = {piece: cache.read(key, piece) for piece in pieces}  # another process may have fetched them
                    missing = [piece for piece, data in found.items() if data is None]
                    if missing:
                        first, last = missing[0], missing[-1]
                        data = self._fetch(name, first * PIECE_BYTES, min((last + 1) * PIECE_BYTES, size))
                        for piece in range(first, last + 1):
                            at = (piece - first) * PIECE_BYTES
                            found[piece] = part = data[at : at + PIECE_BYTES]
                            cache.write(key, piece, part)
            return found

        # Pauses between tries are made without the lock: ranks that wait for it fail together, not one after another.
        for piece, data in self._patiently(f"{self.where}/{name}", find).items():
            origin = piece * PIECE_BYTES
            low, high = max(start, origin), min(stop, origin + PIECE_BYTES)
            buffer[low - start : high - start] = data[low - origin : high - origin]

    def _fetch(self, name: str, start: int, stop: int) -> bytes:
        """Bytes of a file, by one request that is made once."""
        if start == stop:
            return b""
        try:
            data = self._files.cat_file(f"{self._path}/{name}", start=start, end=stop)
        except FileNotFoundError:
            raise DataError(f"{self.where}/{name} is missing: {self.heal}") from None
        except Exception as error:
            if _status(error) != 416:  # which is: the file ends before `start`
                raise
            data = b""
        if len(data) > stop - start:
            raise Unreachable(
                f"{self.where}/{name} cannot be read in parts, {len(data)} bytes came of the {stop - start} asked for: "
                "use a server that knows Range (python -m http.server does not)"
            )
        if len(data) < stop - start:
            self._require(name, self.size(name), stop)  # the manifest may tell of more than is there
            raise OSError(f"{len(data)} bytes came of the {stop - start} asked for")
        return data

    def _patiently(self, url: str, request: Callable[[], T]) -> T:
        """The answer to a request, which is made again after a pause where it fails.

        Raises:
            FileNotFoundError: where there is nothing of that name.
            DataError: that of the request, at once: asking again does not mend data, nor a cache.
            Unreachable: where each try failed; names the URL and the last reason.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                answer = request()
            except DataError:
                raise
            except Exception as failure:  # each store has errors of its own
                error, final = _judge(failure)
                if isinstance(error, FileNotFoundError):
                    _answered.add(self._store)
                    raise error from None
                reason = without_login(f"{type(error).__name__}: {error}")
                if final or attempt >= (TRIES if self._store in _answered else FIRST_TRIES):
                    tried = f"tried {attempt} time{'s' if attempt > 1 else ''}"
                    raise Unreachable(
                        f"{url} cannot be read, {tried} ({reason}): check URL, rights, network"
                    ) from error
            else:
                _answered.add(self._store)
                return answer
            pause = PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)  # ranks come back one by one
            _log.warning("%s could not be read (%s): again in %.1f s", url, reason, pause)
            time.sleep(pause)


_answered = set[str]()  # stores that have been reached before: they are worth waiting for


_logins = dict[str, str]()  # stores that were given with name and password, by how messages name them


def _with_login(url: str, store: str) -> str:
    """The URL to connect with: `where` of what was opened lacks the login of its store, and may be opened again."""
    given = "/".join(url.split("/")[:3])
    if given != store:
        _logins[store] = given
    return _logins.get(store, given) + url[len(given) :]


def _connect(url: str) -> tuple[Any, str]:
    """The store of a URL, and the place in it."""
    shown = without_login(url)
    if re.match("https?://", url) and re.search("[?#]", url):
        raise ValueError(
            f"{re.split('[?#]', shown)[0]}… goes on with ? or #, as no folder of a web server does: leave the query "
            "out, and write %3F and %23 where a name has these"
        )
    try:
        import fsspec

        options = {}
        if re.match("https?://", url):
            import aiohttp

            limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)
            options = {"client_kwargs": {"timeout": limits}}
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise ValueError(
            f"{shown} needs a package that is not there ({error}): pip install fsspec aiohttp for http, fsspec s3fs "
            "for s3, fsspec gcsfs for gs"
        ) from None
    except ValueError as error:
        raise ValueError(f"{shown} is no URL that fsspec knows ({without_login(str(error))})") from None


def _judge(failure: Exception) -> tuple[BaseException, bool]:
    """What went wrong, and whether asking again cannot help.

    It cannot where the store refuses, as by 401 and 403, and not for being busy; nor where the fault is in a program.
    """
    error, cause = failure, failure.__cause__
    missing = cause is None or isinstance(cause, FileNotFoundError) or _status(cause) in (404, 410)
    if isinstance(failure, FileNotFoundError) and not missing:  # fsspec's http calls any failure of a size that
        error = cause
    status = _status(error)
    refused = isinstance(error, PermissionError) or (400 <= status < 500 and status not in (408, 425, 429))
    return error, refused or isinstance(error, TypeError | ValueError | AttributeError)


def _status(error: BaseException) -> int:
    status = getattr(error, "status", 0)
    return status if isinstance(status, int) else 0
