"""A disk that loses power: the files that may be there afterwards, computed from a log of what programs did.

What was synced is there: of a file its bytes and its size, of a folder its names. Of everything else, some may be there
and some not, as ALICE has it (Pillai et al., All File Systems Are Not Created Equal, OSDI 2014):

    bytes    the size is any of the sizes since the sync, each sector has any of the contents that it had since then,
             and what was never written is zeros
    names    each change of names has happened or not; changes of the same name stay in order, a rename is never half
             done, and a file that moves to another folder is never lost on the way

To sync a file does not sync its name, which is more than ext4, XFS and btrfs do to a program.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.power.records import Record

UNSEEN = "-shm"
"""Names of files with this end are mapped: SQLite throws their content away when it recovers."""


class Loss(NamedTuple):
    """How a disk loses what was not synced."""

    names: str  # "none" and "all" are kept, or a "prefix", or "some"
    sectors: str  # "none" and "all" are kept, or "some"


LOSSES = (
    Loss("none", "none"),
    Loss("all", "none"),
    Loss("none", "all"),
    Loss("prefix", "some"),
    Loss("some", "some"),
    Loss("all", "some"),
)


class _Write(NamedTuple):
    start: int
    data: bytes | None  # None: the file ends at `start`

    def touches(self, start: int, end: int) -> bool:
        return self.start < end and (self.data is None or self.start + len(self.data) > start)

    def put(self, content: bytearray, at: int) -> None:
        """Change the part of a file that begins at `at`."""
        if self.data is None:
            start = max(0, self.start - at)
            content[start:] = bytes(len(content) - start)
        else:
            start, end = max(self.start, at), min(self.start + len(self.data), at + len(content))
            content[start - at : end - at] = self.data[start - self.start : end - self.start]

    def size_after(self, size: int) -> int:
        return self.start if self.data is None else max(size, self.start + len(self.data))


@dataclass(eq=False)
class _File:
    synced: bytearray = field(default_factory=bytearray)
    pending: list[_Write] = field(default_factory=list)
    done: int = 0  # writes that are synced

    def sync(self, mark: int) -> None:
        """Sync all writes before the one with the number `mark`."""
        count = max(0, mark - self.done)
        for write in self.pending[:count]:
            _apply(self.synced, write)
        del self.pending[:count]
        self.done += count

    def now(self) -> bytes:
        content = bytearray(self.synced)
        for write in self.pending:
            _apply(content, write)
        return bytes(content)

    def after_loss(self, sectors: str, rng: random.Random) -> bytes:
        """Return a content that the file may have after a power loss."""
        if sectors != "some" or not self.pending:
            return self.now() if sectors == "all" else bytes(self.synced)
        sizes = [len(self.synced)]
        for write in self.pending:
            sizes.append(write.size_after(sizes[-1]))
        width, journalled = rng.choice([512, 4096]), rng.randint(0, len(self.pending))
        size = sizes[journalled]
        content = bytearray(size)
        for start in range(0, size, width):
            end = min(start + width, size)
            base, writes = self._sector(start, end, journalled)
            part = bytearray(base.ljust(end - start, b"\0"))
            for write in writes[: rng.randint(0, len(writes))]:
                write.put(part, start)
            content[start:end] = part
        return bytes(content)

    def _sector(self, start: int, end: int, journalled: int) -> tuple[bytes, list[_Write]]:
        """Return what is in a sector for certain, and what may have been written to it since.

        To cut a file writes nothing: what it has lost is lost when its new size is on the disk, and no byte before.
        What is written there later goes to another place on the disk, where nobody finds it before.
        """
        base, writes = bytes(self.synced[start:end]), list[_Write]()
        for number, write in enumerate(self.pending):
            if write.data is None and write.start <= start:
                if number >= journalled:
                    break
                base, writes = b"", []
            elif write.touches(start, end):
                writes.append(write)
        return base, writes


def _apply(content: bytearray, write: _Write) -> None:
    size = write.size_after(len(content))
    content.extend(bytes(max(0, size - len(content))))
    del content[size:]
    write.put(content, 0)


@dataclass(eq=False)
class _Folder:
    synced: dict[str, "_Node"] = field(default_factory=dict)
    now: dict[str, "_Node"] = field(default_factory=dict)


_Node = _File | _Folder


@dataclass(eq=False)
class _Change:
    """A change of names that is not synced yet; None takes a name away."""

    entries: list[tuple[_Folder, str, _Node | None]]
    after: "_Change | None" = None  # it cannot have happened without this one


class Disk:
    """The files below one folder, which records change.

    Args:
        root: The folder. It is there, and empty.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._top = _Folder()
        self._files: dict[int, _File] = {}  # by inode number
        self._changes: list[_Change] = []
        self._marks: dict[tuple[int, int], list[_Change] | tuple[_File, int]] = {}  # of syncs that have begun
        self.mapped: set[str] = set()

    def feed(self, record: Record) -> None:
        """Do what the record says."""
        if record.inode in self._files and record.kind in "WTRBU":
            self._find_renamed(self._files[record.inode], record.name)
        match record.kind:
            case "C":
                self._files[record.inode] = file = _File()
                self._change(self._place(record.name), file)
            case "W":
                file = self._files[record.inode]
                file.pending.append(_Write(record.number, record.data))
            case "T":
                self._files[record.inode].pending.append(_Write(record.number, None))
            case "D":
                self._change(self._place(record.name), _Folder())
            case "U":
                self._change(self._place(record.name), None)
            case "L":
                folder, name = self._place(record.name)
                self._change(self._place(record.other), folder.now[name])
            case "R":
                self._rename(self._place(record.name), self._place(record.other))
            case "B":
                file = self._files[record.inode]
                self._marks[record.pid, record.number] = file, file.done + len(file.pending)
            case "E":
                folder = self._folder(record.name)
                begun = [change for change in self._changes if any(entry[0] is folder for entry in change.entries)]
                self._marks[record.pid, record.number] = begun
            case "F":
                self._sync(self._marks.pop((record.pid, record.number)))
            case "P":
                self.mapped.add(record.name)

    def now(self) -> dict[str, bytes]:
        """Return the contents of all files, by their paths below the root."""
        return {path: file.now() for path, file in _walk(self._top, lambda folder: folder.now)}

    def content(self, path: str) -> bytes:
        """Return what a file contains now."""
        folder, name = self._place(path)
        file = folder.now[name]
        assert isinstance(file, _File), path
        return file.now()

    def lose_power(self, folder: Path, loss: Loss, rng: random.Random) -> None:
        """Write the files that may be there after a power loss into a new folder."""
        names = {id(each): dict(each.synced) for each in _folders(self._top)}
        for change in self._kept(loss.names, rng):
            for where, name, node in change.entries:
                _set(names.setdefault(id(where), dict(where.synced)), name, node)

        def write(node: _Folder, path: Path) -> None:
            path.mkdir(parents=True)
            path.chmod(0o700)  # whatever the program has asked for: nothing here depends on it
            for name, each in names.get(id(node), node.synced).items():
                if isinstance(each, _Folder):
                    write(each, path / name)
                else:
                    unseen = name.endswith(UNSEEN)
                    data = rng.randbytes(len(each.now())) if unseen else each.after_loss(loss.sectors, rng)
                    (path / name).write_bytes(data)
                    (path / name).chmod(0o600)

        write(self._top, folder)

    def _kept(self, names: str, rng: random.Random) -> list[_Change]:
        if names == "none":
            return []
        if names == "all":
            return self._changes
        if names == "prefix":
            return self._changes[: rng.randint(0, len(self._changes))]
        lost: set[_Change] = set()
        touched: set[tuple[int, str]] = set()  # by what is lost
        for change in self._changes:
            entries = {(id(folder), name) for folder, name, _ in change.entries}
            if change.after in lost or entries & touched or rng.random() < 0.5:
                lost.add(change)
                touched |= entries
        return [change for change in self._changes if change not in lost]

    def _find_renamed(self, file: _File, path: str) -> None:
        """Rename a file that has another name now, as it turns out: the layer has not seen it."""
        if path.endswith(" (deleted)"):
            return
        folder, name = self._place(path)
        if folder.now.get(name) is not file:
            before = next(each for each, node in folder.now.items() if node is file)
            self._rename((folder, before), (folder, name))

    def _rename(self, old: tuple[_Folder, str], new: tuple[_Folder, str]) -> None:
        (source, before), (target, after) = old, new
        node = source.now[before]
        if target.now.get(after) is node:  # two names of one file: nothing happens
            return
        if source is target:
            self._add(_Change([(source, before, None), (target, after, node)]))
        else:
            placed = _Change([(target, after, node)])
            self._add(placed)
            self._add(_Change([(source, before, None)], placed))

    def _change(self, place: tuple[_Folder, str], node: _Node | None) -> None:
        self._add(_Change([(*place, node)]))

    def _add(self, change: _Change) -> None:
        self._changes.append(change)
        for folder, name, node in change.entries:
            _set(folder.now, name, node)

    def _sync(self, mark: "list[_Change] | tuple[_File, int]") -> None:
        if isinstance(mark, tuple):
            file, count = mark
            file.sync(count)
            return
        wanted = {*mark, *(change.after for change in mark if change.after is not None)}
        for change in [each for each in self._changes if each in wanted]:
            for folder, name, node in change.entries:
                _set(folder.synced, name, node)
        self._changes = [change for change in self._changes if change not in wanted]

    def _place(self, path: str) -> tuple[_Folder, str]:
        above, _, name = path.rpartition("/")
        return self._folder(above), name

    def _folder(self, path: str) -> _Folder:
        node: _Node = self._top
        for name in filter(None, path.removeprefix(self._root).split("/")):
            assert isinstance(node, _Folder), path
            node = node.now[name]
        assert isinstance(node, _Folder), path
        return node


_Names = Callable[[_Folder], dict[str, _Node]]


def _set(names: dict[str, _Node], name: str, node: _Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _walk(folder: _Folder, names: _Names, path: str = "") -> Iterator[tuple[str, _File]]:
    for name, node in names(folder).items():
        if isinstance(node, _Folder):
            yield from _walk(node, names, f"{path}{name}/")
        else:
            yield path + name, node


def _folders(folder: _Folder) -> Iterator[_Folder]:
    yield folder
    for node in {*folder.synced.values(), *folder.now.values()}:
        if isinstance(node, _Folder):
            yield from _folders(node)
