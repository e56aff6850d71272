"""The disk that loses power, with records as the layer writes them: what was synced stays, the rest may be lost."""

import random
from collections.abc import Iterator
from pathlib import Path

from tests.power.disk import LOSSES, Disk, Loss
from tests.power.records import Record

ROOT = "/disk"
SEEDS = range(40)


class Program:
    """Changes a disk as a program does."""

    def __init__(self) -> None:
        self.disk = Disk(Path(ROOT))
        self._inodes: dict[str, int] = {}
        self._syncs = 0

    def create(self, name: str, data: bytes) -> None:
        self._inodes[name] = len(self._inodes) + 1
        self._feed("C", name)
        self._feed("W", name, data=data)

    def write(self, name: str, at: int, data: bytes) -> None:
        self._feed("W", name, at, data=data)

    def cut(self, name: str, size: int) -> None:
        self._feed("T", name, size)

    def rename(self, old: str, new: str) -> None:
        self._feed("R", old, other=new)
        self._inodes[new] = self._inodes.pop(old)

    def remove(self, name: str) -> None:
        self._feed("U", name)

    def make_folder(self, name: str) -> None:
        self._feed("D", name)

    def sync(self, name: str, *, folder: bool = False) -> None:
        self.begin_sync(name, folder=folder)
        self.end_sync(name)

    def begin_sync(self, name: str, *, folder: bool = False) -> None:
        self._syncs += 1
        self._feed("E" if folder else "B", name, self._syncs)

    def end_sync(self, name: str) -> None:
        self._feed("F", name, self._syncs)

    def _feed(self, kind: str, name: str, number: int = 0, *, other: str = "", data: bytes = b"") -> None:
        path = f"{ROOT}/{name}" if name else ROOT
        other = f"{ROOT}/{other}" if other else ""
        self.disk.feed(Record(kind, 1, self._inodes.get(name, 0), number, path, other, data))

    def outcomes(self, folder: Path) -> list[dict[str, bytes]]:
        """Return what may be there after a power loss, drawn in all ways and with many seeds."""
        return list(self._outcomes(folder))

    def _outcomes(self, folder: Path) -> Iterator[dict[str, bytes]]:
        for loss in LOSSES:
            for seed in SEEDS:
                lost = folder / f"{loss.names}-{loss.sectors}-{seed}"
                self.disk.lose_power(lost, loss, random.Random(seed))
                yield {str(path.relative_to(lost)): path.read_bytes() for path in lost.rglob("*") if path.is_file()}


def test_a_file_that_was_never_synced_may_be_missing_empty_or_complete(tmp_path: Path) -> None:
    program = Program()
    program.create("a", b"text")
    found = program.outcomes(tmp_path)
    assert {} in found
    assert {"a": b""} in found
    assert {"a": b"text"} in found


def test_a_synced_file_may_have_no_name(tmp_path: Path) -> None:
    program = Program()
    program.create("a", b"text")
    program.sync("a")
    assert sorted(map(str, {str(each) for each in program.outcomes(tmp_path)})) == ["{'a': b'text'}", "{}"]
    program.sync("", folder=True)
    assert program.outcomes(tmp_path / "named") == [{"a": b"text"}] * len(LOSSES) * len(SEEDS)


def test_what_is_written_while_a_sync_runs_is_not_synced(tmp_path: Path) -> None:
    program = Program()
    program.create("a", b"old")
    program.sync("", folder=True)
    program.begin_sync("a")
    program.write("a", 0, b"new")
    program.end_sync("a")
    found = program.outcomes(tmp_path)
    assert {"a": b"old"} in found
    assert {"a": b"new"} in found
    assert all(each in ({"a": b"old"}, {"a": b"new"}) for each in found)


def test_a_rename_is_done_or_not_and_never_half(tmp_path: Path) -> None:
    program = Program()
    program.create("a", b"old")
    program.create("b", b"new")
    for name in ("a", "b"):
        program.sync(name)
    program.sync("", folder=True)
    program.rename("b", "a")
    found = program.outcomes(tmp_path)
    assert all(each in ({"a": b"old", "b": b"new"}, {"a": b"new"}) for each in found)
    assert {"a": b"new"} in found


def test_a_file_that_moves_to_another_folder_is_never_lost(tmp_path: Path) -> None:
    program = Program()
    for folder in ("from", "to"):
        program.make_folder(folder)
    program.sync("", folder=True)
    program.create("from/a", b"text")
    program.sync("from/a")
    program.sync("from", folder=True)
    program.rename("from/a", "to/a")
    assert all(b"text" in each.values() for each in program.outcomes(tmp_path / "before"))
    program.sync("to", folder=True)
    found = program.outcomes(tmp_path / "after")
    assert all(each["to/a"] == b"text" for each in found)
    assert any("from/a" in each for each in found), "its old name may come back"


def test_a_name_that_was_reused_has_no_older_content(tmp_path: Path) -> None:
    program = Program()
    program.create("a", b"old")
    program.sync("a")
    program.sync("", folder=True)
    program.remove("a")
    program.create("a", b"new")
    program.sync("a")
    assert {str(each) for each in program.outcomes(tmp_path)} == {"{'a': b'old'}", "{}", "{'a': b'new'}"}


def test_a_write_is_torn_at_the_borders_of_sectors(tmp_path: Path) -> None:
    program = Program()
    program.create("a", bytes(8192))
    program.sync("a")
    program.sync("", folder=True)
    program.write("a", 0, b"x" * 8192)
    found = [each["a"] for each in program.outcomes(tmp_path)]
    for content in found:
        assert len(content) == 8192
        assert all(len(set(content[at : at + 512])) == 1 for at in range(0, 8192, 512))
    assert any(set(content) == {0, ord("x")} for content in found)


def test_a_cut_file_is_cut_or_as_it_was(tmp_path: Path) -> None:
    program = Program()
    program.create("a", b"o" * 1024)
    program.sync("a")
    program.sync("", folder=True)
    program.cut("a", 0)
    found = {each["a"] for each in program.outcomes(tmp_path / "cut")}
    assert found == {b"o" * 1024, b""}
    program.write("a", 0, b"n" * 512)
    found = {each["a"] for each in program.outcomes(tmp_path / "written")}
    assert found == {b"o" * 1024, b"", b"n" * 512, bytes(512)}


def test_losing_nothing_is_what_a_kill_does(tmp_path: Path) -> None:
    program = Program()
    program.make_folder("folder")
    program.create("folder/a", b"one")
    program.rename("folder/a", "b")
    program.write("b", 3, b"two")
    program.disk.lose_power(tmp_path / "killed", Loss("all", "all"), random.Random(0))
    assert (tmp_path / "killed" / "b").read_bytes() == b"onetwo"
    assert program.disk.now() == {"b": b"onetwo"}
