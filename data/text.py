"""Documents from a user's own text, `data=text data.path=…`: files, records, or folders such as repositories."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from conf.schema import DataConfig, Unit
from data.documents import Document, Listing, kind, portions, tree, walk
from data.records import SUFFIXES, fields, is_records, read_records, require

KINDS = f"a text file, a file of records ({', '.join(SUFFIXES)}), or a folder of them"
TIMES = "times of change in data.path"  # in a listing's state


class Text:
    """The files of `data.path`; those prepared by us, which may lie there too, are none of them.

    Raises:
        ValueError: where `data.path` is not set or not there, or is no folder with data.unit=folder.
    """

    def __init__(self, config: DataConfig) -> None:
        if not config.path:
            raise ValueError(f"data.source=text needs data.path: {KINDS}")
        path, root = Path(config.path).expanduser(), Path(config.root).resolve()
        if not path.exists():
            raise ValueError(f"data.path={config.path} does not exist: give {KINDS}")
        if config.unit is Unit.folder and not path.is_dir():
            raise ValueError(
                f"data.unit=folder makes a document of each folder in data.path={config.path}, which is a file: give a "
                "folder, or use data.unit=file"
            )
        if path.is_dir() and path.resolve() == root:
            raise ValueError(
                f"data.path={config.path} is data.root={config.root}, where prepared data lies, which would be read as "
                "text: set data.root to another folder"
            )
        if (root / config.name) in (path.resolve(), *path.resolve().parents):
            raise ValueError(
                f"data.path={config.path} lies where the prepared data is to be, data.root={config.root} "
                f"data.name={config.name}: choose another data.name or data.root"
            )
        self._path, self._unit, self._text_field = path, config.unit, config.text_field
        self._root = path if path.is_dir() else path.parent
        self._corpora = root
        self.held_out = patterns(config.validation_names)

    def listing(self) -> Listing:
        """Names, sizes and times of change; nothing is read."""
        names, counts = (
            walk(self._root, frozenset(), self._corpora) if self._path.is_dir() else ([self._path.name], None)
        )
        if self._unit is Unit.file:
            for name in names:
                require(self._root / name)
        digest, times, sizes = hashlib.sha256(), hashlib.sha256(), []
        for name in names:
            facts = (self._root / name).stat()
            sizes.append(facts.st_size)
            digest.update(f"{name}\0{facts.st_size}\0".encode(errors="surrogateescape"))
            times.update(f"{facts.st_mtime_ns}\0".encode())
        state = {"data.path": f"{len(names)} files, {sum(sizes)} bytes, state {digest.hexdigest()[:12]}"}
        state[TIMES] = times.hexdigest()[:12]
        if self._unit is Unit.folder:
            names, sizes = _folders(names, sizes, counts)
        if not names:
            kind = "folder with files in it" if self._unit is Unit.folder else "file"
            raise ValueError(f"data.path={self._path} has no {kind}: give {KINDS}")
        return Listing(f"data.path={self._path}", names, sizes, counts, state)

    def read(self, name: str, place: tuple[int, int], counts: Counter[str]) -> Iterator[Document]:
        """As `Source.read`; a text file and a folder are one document each."""
        path = self._root / name
        if self._unit is Unit.folder:
            files = self._files(path, counts)
            if files:
                yield Document(name, partial(tree, path, files, name), {"files": len(files)})
            else:
                counts["empty"] += 1
        elif is_records(name):
            yield from read_records(path, name, self._text_field, place, counts)
        elif (found := kind(path)) == "kept":
            yield Document(name, partial(portions, path))
        else:
            counts[found] += 1

    def advice(self, listing: Listing) -> str:
        for name in listing.names if self._unit is Unit.file else ():
            if is_records(name) and (found := fields(self._root / name)):
                return f"data.text_field={self._text_field} is none of theirs that has text: set it to one of {found}"
        return "give text that has some"

    def _files(self, folder: Path, counts: Counter[str]) -> list[str]:
        """The files of a folder that have text."""
        kept = []
        for name in walk(folder, frozenset(), self._corpora)[0]:
            found = kind(folder / name)
            counts[f"files {found}"] += 1
            kept += [name] if found == "kept" else []
        return kept


def patterns(names: str | None) -> tuple[str, ...] | None:
    """The patterns of data.validation_names; None where it is not set.

    Raises:
        ValueError: where it is set to none.
    """
    if not names:
        return None
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    if not found:
        raise ValueError(f"data.validation_names={names} has no names: give patterns of names, or leave it out")
    return found


def _folders(names: list[str], sizes: list[int], counts: Counter[str]) -> tuple[list[str], list[int]]:
    """The folders right below, each with the bytes of its files; files beside them are counted only."""
    folders = dict[str, int]()
    for name, size in zip(names, sizes, strict=True):
        folder, slash, _ = name.partition("/")
        if slash:
            folders[folder] = folders.get(folder, 0) + size
        else:
            counts["beside the folders"] += 1
    return sorted(folders), [folders[folder] for folder in sorted(folders)]
