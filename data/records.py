"""Records: the lines of .jsonl files, packed with gzip or Zstandard or not, and the rows of .parquet files.

A line ends at \\n only, as JSON may hold every other line break. Packages that only some of these need are extras.
"""

import gzip
import importlib.util
import io
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from data.documents import Document, slices

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
FACTS = {"id": "id", "name": "title", "title": "title", "url": "url", "source": "source"}
FACTS |= {"licence": "licence", "license": "licence"}  # of a record: what it is called in documents.jsonl
LONGEST_FACT = 1_000  # characters; a longer one is no name
ROWS = 64  # of a .parquet file, read at once
_PACKED_BYTES = 1 << 11  # read at once: unpacked, four of them may be 128 KB, so that these are at most 64 MB


def is_records(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def require(path: Path) -> None:
    """Raises: ValueError where a package that reads this file is not installed."""
    for suffix, package, instead in (
        (".jsonl.zst", "zstandard", "unpack it"),
        (".parquet", "pyarrow", "write it as .jsonl"),
    ):
        if path.name.lower().endswith(suffix) and importlib.util.find_spec(package) is None:
            raise ValueError(f"{path} is read with the package {package}: pip install {package}, or {instead}")


def fields(path: Path) -> str:
    """Names of what is text in the first of some records, for a message; "" where nothing is."""
    records = _rows(path, None, (0, 0)) if path.name.lower().endswith(".parquet") else _lines(path, (0, 0))
    with closing(records):
        _, _, record = next(records, (0, 0, None))
    return ", ".join(key for key, value in record.items() if isinstance(value, str)) if isinstance(record, dict) else ""


def read_records(
    path: Path, name: str, text_field: str, place: tuple[int, int], counts: Counter[str]
) -> Iterator[Document]:
    """The records that have text, named `name:number`; counts the others.

    Args:
        place: of the record to start with: its first byte in the unpacked file, and the number of lines or rows before.

    Raises:
        ValueError: for a line that is no JSON (naming file and line), a file that cannot be unpacked, a package that is
            not installed, a .parquet file whose column of that name is missing or not text.
    """
    records = _rows(path, text_field, place) if name.lower().endswith(".parquet") else _lines(path, place)
    with closing(records):
        for number, at, record in records:
            text = record.get(text_field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                counts[f'bad (no string "{text_field}")'] += 1
            elif not text or text.isspace():
                counts["empty"] += 1
            else:
                facts, labels = _facts(record, text_field)
                yield Document(f"{name}:{number}", partial(slices, text), facts, (at, number - 1), labels)


def _facts(record: dict[str, Any], text_field: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What is known of a record's source, and the names among it."""
    facts: dict[str, Any] = {}
    for key, called in FACTS.items():
        value = record.get(key)
        if key != text_field and isinstance(value, str | int) and 0 < len(str(value)) <= LONGEST_FACT:
            facts.setdefault(called, value)
    return facts, tuple(str(facts[called]) for called in ("id", "title", "url") if called in facts)


def _lines(path: Path, place: tuple[int, int]) -> Iterator[tuple[int, int, Any]]:
    """Number, first byte and JSON value of each line that is not blank."""
    at, before = place
    with _open(path) as file:
        _skip(file, at)
        for number in itertools.count(before + 1):
            try:
                line = file.readline()
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{path} is packed badly ({error}): pack it again") from None
            if not line:
                return
            start, at = at, at + len(line)
            try:
                text = line.decode("utf-8")
                del line  # which may be very long
                text = text.removeprefix("\ufeff") if number == 1 else text
                record = json.loads(text) if text.strip() else _BLANK
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number} is not JSON ({error}): mend or remove this line") from None
            del text
            if record is not _BLANK:
                yield number, start, record
            del record


_BLANK = object()


def _skip(file: io.BufferedIOBase, count: int) -> None:
    if not isinstance(file, gzip.GzipFile) and file.seekable():
        file.seek(count)
        return
    while count > 0:
        count -= len(file.read(min(count, 1 << 20))) or count


def _open(path: Path) -> Any:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rb")
    if path.name.lower().endswith(".zst"):
        return io.BufferedReader(_Zstandard(path), 1 << 20)
    return open(path, "rb", buffering=1 << 20)


class _Zstandard(io.RawIOBase):
    """Unpacks a file frame by frame, in bounded memory. The package's own reader takes a cut file for a whole one."""

    def __init__(self, path: Path) -> None:
        import zstandard  # an extra

        self._path, self._file = path, open(path, "rb")
        self._unpacker, self._error = zstandard.ZstdDecompressor(), zstandard.ZstdError
        self._frame: Any = None
        self._packed, self._unpacked = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            self._packed = self._packed or self._file.read(_PACKED_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise ValueError(f"{self._path} ends within a frame, it was cut: pack it again")
                return 0
            try:
                self._frame = self._frame or self._unpacker.decompressobj()
                self._unpacked = memoryview(self._frame.decompress(self._packed))
            except self._error as error:
                raise ValueError(f"{self._path} is packed badly ({error}): pack it again") from None
            self._packed = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        count = min(len(buffer), len(self._unpacked))
        buffer[:count], self._unpacked = self._unpacked[:count], self._unpacked[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _rows(path: Path, text_field: str | None, place: tuple[int, int]) -> Iterator[tuple[int, int, Any]]:
    """Number, number of those before it, and columns of each row; all columns where no field is given."""
    import pyarrow  # an extra
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            schema = file.schema_arrow
            if text_field is not None:
                _check_column(path, schema, text_field)
            columns = [name for name in schema.names if text_field in (None, name) or name in FACTS]
            row = 0
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                if row + num_rows <= place[1]:
                    row += num_rows
                    continue
                for batch in file.iter_batches(ROWS, row_groups=[group], columns=columns, use_threads=False):
                    if row + len(batch) <= place[1]:
                        row += len(batch)
                        continue
                    for record in batch.to_pylist():
                        row += 1
                        if row > place[1]:
                            yield row, row - 1, record
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a whole .parquet file ({error}): write it again") from None


def _check_column(path: Path, schema: Any, text_field: str) -> None:
    import pyarrow.types as types

    texts = {
        column.name
        for column in schema
        if any(is_type(column.type) for is_type in (types.is_string, types.is_large_string, types.is_string_view))
        or types.is_dictionary(column.type)
        or types.is_null(column.type)  # of a file in which all are missing
    }
    if text_field not in texts:
        legal = ", ".join(name for name in schema.names if name in texts)
        kind = f" of text, it is of {schema.field(text_field).type}" if text_field in schema.names else ""
        remedy = f"set data.text_field to one of {legal}" if legal else "write it again with a column of strings"
        raise ValueError(f"{path} has no column {text_field!r}{kind}: {remedy}")
