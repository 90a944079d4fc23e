"""Where prepared data lies: a folder of this machine, or, in data/remote.py, one behind a URL."""

import hashlib
import itertools
import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

PORTION_BYTES = 1 << 20
MOST_OPEN = 128  # files held open for reading: macOS allows 256 a process, and other things are open too
HEAL = "run `python -m data.prepare` with this run's data settings, with --force where it finds nothing to do"


class DataError(OSError):
    """Prepared data that is missing, truncated or corrupt; the message names the path and how to heal it."""


class Unreachable(DataError):
    """Nothing is known of the data: the network, or the store it lies in, does not answer."""


class Storage(Protocol):
    """A folder that is read.

    Attributes:
        where: its path or URL, without a password: for messages.
        steady: what was read once reads the same again; False where it may be fetched anew, damage and all.
        heal: what to do where something is missing or wrong.
    """

    where: str
    steady: bool
    heal: str

    def below(self, name: str) -> "Storage":
        """The folder `name` in this one, which need not exist."""
        ...

    def listing(self) -> tuple[list[str], list[str]]:
        """Names of the folders and of the files right in this one, in no order; DataError where it is not there."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is no such file."""
        ...

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fills `buffer`, bytes, from byte `start` of a file. Safe in several threads.

        Raises:
            DataError: where the file ends before that.
        """
        ...

    def pin(self, version: str, sizes: Mapping[str, int]) -> None:
        """Says which content this is: what was kept of other content under this name is not used.

        Args:
            version: names the content.
            sizes: bytes of files in it, for which `read_into` need not ask. `size` says what is true.
        """
        ...

    def forget(self, name: str, start: int, stop: int) -> None:
        """Those bytes were wrong: they are not kept, so that the next reading may find them mended."""
        ...

    def close(self) -> None:
        """Lets go of open files; reading opens them again."""
        ...


class Local:
    """A folder of this machine; `Storage` says what its methods do."""

    steady = True
    heal = HEAL

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).absolute()
        self.where = str(Path(folder))
        self._number, self._files = next(_numbers), dict[str, _Open]()

    def below(self, name: str) -> "Local":
        return Local(os.path.join(self.where, name))

    def listing(self) -> tuple[list[str], list[str]]:
        try:
            with os.scandir(self.folder) as entries:
                known = [(entry.name, entry.is_dir()) for entry in entries]
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(f"{self.where} is no folder: {HEAL}") from None
        return [name for name, is_folder in known if is_folder], [name for name, is_folder in known if not is_folder]

    def size(self, name: str) -> int | None:
        path = self.folder / name
        return path.stat().st_size if path.is_file() else None

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        path, done = self.folder / name, 0
        file = self._opened(name)
        while done < len(buffer):
            try:
                count = os.preadv(file.number, [buffer[done:]], start + done)
            except OSError as error:
                raise DataError(f"{path} cannot be read ({error.strerror}): see to its disk") from error
            if not count:
                raise DataError(f"{path} ends at byte {start + done}, before {start + len(buffer)}: {HEAL}")
            done += count

    def pin(self, version: str, sizes: Mapping[str, int]) -> None:
        pass

    def forget(self, name: str, start: int, stop: int) -> None:
        pass

    def close(self) -> None:
        with _lock:
            self._files.clear()

    def _opened(self, name: str) -> "_Open":
        """The file, open; of all those open in this process the one used longest ago is closed for it."""
        with _lock:
            file = self._files[name] = self._files.get(name) or _Open(self.folder / name)
            _recent.pop((self._number, name), None)
            _recent[self._number, name] = weakref.ref(self)
            while len(_recent) > MOST_OPEN:
                (_, oldest), folder = _recent.popitem(last=False)
                if (held := folder()) is not None:
                    held._files.pop(oldest, None)
            return file


class _Open:
    """A file open for reading, closed when nothing uses it any more: also in the middle of a read, so without lock."""

    def __init__(self, path: Path) -> None:
        try:
            self.number = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise DataError(f"{path} is missing: {HEAL}") from None
        weakref.finalize(self, os.close, self.number)


_recent: OrderedDict[tuple[int, str], weakref.ref[Local]] = OrderedDict()  # of which folder, and which of its files
_numbers = itertools.count()
_lock = threading.Lock()


def read_whole(storage: Storage, name: str) -> bytes | None:
    """The bytes of a small file; None where there is none."""
    size = storage.size(name)
    if size is None:
        return None
    data = bytearray(size)
    storage.read_into(name, 0, memoryview(data))
    return bytes(data)


def read_portions(storage: Storage, name: str, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file of any size, in portions."""
    for start in range(0, size, PORTION_BYTES):
        data = bytearray(min(PORTION_BYTES, size - start))
        storage.read_into(name, start, memoryview(data))
        yield bytes(data)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def is_url(path: Path | str) -> bool:
    """s3://bucket/corpora is one, corpora is none; file:///corpora is handled as the path that it says."""
    return (
        isinstance(path, str) and re.match(r"([A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*://", path) is not None
    )


def without_login(text: str) -> str:
    """URLs without name and password, for messages. What stands before an @ elsewhere, as in abfs, is no secret."""
    return re.sub(r"(?<=tp://|ps://)[^/\s]*@|(?<=://)[^/\s]*:[^/\s]*@", "", text)
