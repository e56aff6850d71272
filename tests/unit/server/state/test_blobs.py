"""Blobs: what is sealed is complete, durable and named by its digest; everything else can be continued or swept."""

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from fedring.codec.digest import name_of
from fedring.daemon.lock import StateInUse, StateLock
from fedring.server.state.blob_interfaces import Blobs
from fedring.server.state.blobs import FileBlobs, MemoryPartial
from fedring.server.state.failures import FsyncFailed, StorageError, StorageFailed
from fedring.server.state.shared.object_blobs import ObjectBlobs, open_objects


def in_objects(folder: Path) -> ObjectBlobs:
    (folder / "objects").mkdir(exist_ok=True)
    return ObjectBlobs(open_objects((folder / "objects").as_uri()), FileBlobs(folder / "local", durable=False), term=1)


IMPLEMENTATIONS: tuple[Callable[[Path], Blobs], ...] = (FileBlobs, in_objects)


@pytest.fixture(params=IMPLEMENTATIONS)
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Blobs]:
    blobs: Blobs = request.param(tmp_path)
    yield blobs
    blobs.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FileBlobs]:
    files = FileBlobs(tmp_path)
    yield files
    files.close()


def sealed(blobs: Blobs, data: bytes) -> str:
    partial = blobs.open_partial("some")
    partial.write(data)
    return blobs.seal_many([partial])[0]


class TestBlobs:
    """The promises of `fedring.server.state.blob_interfaces.Blobs`. To check another implementation, add it above."""

    def test_a_sealed_blob_has_its_digest_as_name_and_is_read_by_range(self, blobs: Blobs) -> None:
        digest = sealed(blobs, b"0123456789")
        assert digest == f"blake3-{blake3(b'0123456789').hexdigest()}"
        with blobs.reader(digest) as blob:
            assert (blob.size, blob.read(3, 4), blob.read(10, 0)) == (10, b"3456", b"")
        assert blobs.range_reader(digest)(8, 2) == b"89"
        assert blobs.partials() == []

    def test_a_partial_that_was_closed_is_continued_where_it_ended(self, blobs: Blobs) -> None:
        first = blobs.open_partial("1-alice")
        first.write(b"hello ")
        first.close()
        again = blobs.open_partial("1-alice")
        assert again.size == 6
        again.write(memoryview(b"world"))
        assert again.read(4, 4) == b"o wo"
        assert blobs.seal_many([again])[0] == name_of(b"hello world")

    def test_a_fresh_partial_discards_what_was_there(self, blobs: Blobs) -> None:
        old = blobs.open_partial("model")
        old.write(b"old")
        old.close()
        new = blobs.open_partial("model", fresh=True)
        assert (new.size, new.digest) == (0, name_of())
        new.close()

    def test_an_open_partial_cannot_be_opened_again(self, blobs: Blobs) -> None:
        partial = blobs.open_partial("x")
        with pytest.raises(StorageError) as caught:
            blobs.open_partial("x")
        assert caught.value.reason == "partial_busy"
        partial.close()
        blobs.open_partial("x").close()

    def test_many_partials_are_sealed_at_once_and_named_in_order(self, blobs: Blobs) -> None:
        partials = [blobs.open_partial(f"c-{i}") for i in range(40)]
        for i, partial in enumerate(partials):
            partial.write(b"x" * i)
        assert blobs.seal_many(partials) == [name_of(b"x" * i) for i in range(40)]
        assert blobs.partials() == []

    @pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a\0b", "x" * 201])
    def test_a_name_that_is_a_path_is_refused(self, blobs: Blobs, name: str) -> None:
        with pytest.raises(ValueError, match="cannot name"):
            blobs.open_partial(name)
        with pytest.raises(StorageError, match="not a digest"):
            blobs.reader(name)

    def test_a_sweep_keeps_what_is_named_and_what_is_open(self, blobs: Blobs) -> None:
        named, orphan = sealed(blobs, b"named"), sealed(blobs, b"orphan")
        for name in ("kept", "rubbish"):
            blobs.open_partial(name).close()
        current = blobs.open_partial("open")
        assert blobs.sweep({named}, ["kept"]) == 2
        assert blobs.partials() == ["kept", "open"]
        blobs.reader(named).close()
        with pytest.raises(StorageError) as caught:
            blobs.reader(orphan)
        assert caught.value.reason == "missing_blob"
        current.close()

    def test_unnamed_are_all_blobs_but_those_to_keep(self, blobs: Blobs) -> None:
        one, other = sealed(blobs, b"one"), sealed(blobs, b"other")
        assert blobs.unnamed([]) == sorted([one, other])
        assert blobs.unnamed([one]) == [other]

    def test_an_open_reader_outlives_the_blob(self, blobs: Blobs) -> None:
        digest = sealed(blobs, b"model")
        with blobs.reader(digest) as blob:
            blobs.delete(digest)
            blobs.delete(digest)
            assert blob.read(0, 5) == b"model"

    def test_an_aborted_partial_is_gone(self, blobs: Blobs) -> None:
        partial = blobs.open_partial("bad")
        partial.write(b"NaN")
        blobs.abort(partial)
        assert blobs.partials() == []

    def test_a_read_beyond_the_end_is_an_error(self, blobs: Blobs) -> None:
        with blobs.reader(sealed(blobs, b"abc")) as blob, pytest.raises(StorageError) as caught:
            blob.read(1, 3)
        assert caught.value.reason == "truncated"

    def test_partials_are_dropped_by_the_beginning_of_their_names(self, blobs: Blobs) -> None:
        for name in ("1-alice", "1-bob", "11-alice"):
            blobs.open_partial(name).close()
        blobs.drop_partials("1-")
        assert blobs.partials() == ["11-alice"]

    def test_a_range_reader_of_a_missing_blob_fails_when_it_reads(self, blobs: Blobs) -> None:
        read = blobs.range_reader(name_of(b"never written"))
        with pytest.raises(StorageError) as caught:
            read(0, 1)
        assert caught.value.reason == "missing_blob"

    def test_a_probe_leaves_nothing_and_the_disk_has_space(self, blobs: Blobs) -> None:
        space = blobs.disk_space()
        assert space is not None
        assert 0 < space.free <= space.total
        blobs.probe(1 << 20)
        assert blobs.partials() == []

    def test_a_partial_of_another_store_cannot_be_sealed(self, blobs: Blobs) -> None:
        with pytest.raises(TypeError, match="is not a partial of"):
            blobs.seal_many([MemoryPartial(b"small")])


def test_a_blob_is_a_file_that_is_named_by_its_digest(files: FileBlobs, tmp_path: Path) -> None:
    digest = sealed(files, b"0123456789")
    assert (tmp_path / "blobs" / digest).read_bytes() == b"0123456789"


def test_blobs_that_are_named_by_sha256_are_treated_like_all_others(files: FileBlobs, tmp_path: Path) -> None:
    named, orphan = (hashlib.sha256(data).hexdigest() for data in (b"named", b"orphan"))
    (tmp_path / "blobs" / named).write_bytes(b"named")
    (tmp_path / "blobs" / orphan).write_bytes(b"orphan")
    new = sealed(files, b"new")
    assert files.sweep({named, new}) == 1
    with files.reader(named) as blob:
        assert blob.read(0, blob.size) == b"named"
    with pytest.raises(StorageError, match="missing_blob"):
        files.reader(orphan)
    files.delete(named)
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == [new]


def test_what_is_swept_lies_in_a_folder_of_its_own_until_it_is_old(files: FileBlobs, tmp_path: Path) -> None:
    files.forget_unnamed(0.0)
    digest = sealed(files, b"orphan")
    old = time.time() - 1e6
    os.utime(tmp_path / "blobs" / digest, (old, old))
    assert files.sweep(()) == 1
    files.forget_unnamed(3600.0)
    assert (tmp_path / "unnamed" / digest).read_bytes() == b"orphan", "its time is that of the sweep"
    assert sealed(files, b"orphan") == digest
    assert files.sweep(()) == 1
    files.forget_unnamed(-1.0)
    assert list((tmp_path / "unnamed").iterdir()) == []


@pytest.mark.parametrize(("number", "reason"), [(errno.ENOSPC, "disk_full"), (errno.EIO, "disk_error")])
def test_after_a_failed_write_size_and_digest_are_those_of_the_file(
    files: FileBlobs, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    partial = files.open_partial("x")
    real = os.write

    def full(fd: int, data: memoryview) -> int:
        if partial.size >= 4:
            raise OSError(number, os.strerror(number))
        return real(fd, data[:4])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageError) as caught:
            partial.write(b"12345678")
    assert (caught.value.reason, partial.size) == (reason, 4)
    partial.write(b"5678")
    assert files.seal_many([partial])[0] == name_of(b"12345678")


def test_after_a_failed_fsync_nothing_is_sealed(files: FileBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    partials = [files.open_partial(name) for name in "ab"]

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(FsyncFailed):
            files.seal_many(partials)
    assert files.partials() == ["a", "b"]
    assert files.sweep(()) == 2


def test_what_a_disk_does_not_remove_is_left_to_the_next_start(
    files: FileBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    digest, old = sealed(files, b"old"), sealed(files, b"older")
    assert files.sweep([digest]) == 1
    begun, dropped = files.open_partial("begun"), files.open_partial("7-a")
    dropped.close()

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        files.delete(digest)
        files.abort(begun)
        files.drop_partials("7-")
        files.forget_unnamed(-1.0)
    assert caplog.text.count("was not removed: Read-only file system") == 4
    files.open_partial("begun", fresh=True).close()  # it is not open any more
    assert files.sweep(()) == 3
    files.forget_unnamed(-1.0)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} & {digest, old, "begun", "7-a"} == set()


def test_folders_that_a_disk_does_not_list_are_left_to_later(
    files: FileBlobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sealed(files, b"orphan")
    files.sweep(())
    files.open_partial("7-a").close()

    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        files.drop_partials("7-")
        with pytest.raises(StorageFailed) as caught:
            files.forget_unnamed(-1.0)
    assert caught.value.reason == "disk_error"
    assert "cannot be listed: Input/output error" in caplog.text
    assert files.partials() == ["7-a"]


def test_a_sweep_that_the_disk_refuses_is_told_as_its_failure(
    files: FileBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = sealed(files, b"orphan")

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(os, "utime", refuse)
    with pytest.raises(StorageFailed) as caught:
        files.sweep(())
    assert (caught.value.reason, files.has(digest)) == ("disk_error", True)


def test_what_people_do_with_files_that_were_put_aside_does_no_harm(files: FileBlobs, tmp_path: Path) -> None:
    digest = sealed(files, b"orphan")
    files.sweep(())
    (tmp_path / "unnamed" / "looked at").mkdir()
    files.forget_unnamed(-1.0)
    assert [path.name for path in (tmp_path / "unnamed").iterdir()] == ["looked at"]
    assert not files.has(digest)


def test_a_state_directory_has_one_owner(tmp_path: Path) -> None:
    with StateLock(tmp_path / "state"):
        with pytest.raises(StateInUse, match=f"in use by process {os.getpid()}") as caught:
            StateLock(tmp_path / "state")
        assert caught.value.pid == os.getpid()
    with StateLock(tmp_path / "state"):
        pass
