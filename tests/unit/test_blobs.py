"""Blobs: what is sealed is whole, durable and named by its digest; all else can be resumed or swept."""

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from fedring.codec.digest import name_of
from fedring.daemon.lock import StateInUse, StateLock
from fedring.server.state.blobs import FileBlobs, FsyncFailed, StorageError


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[FileBlobs]:
    blobs = FileBlobs(tmp_path)
    yield blobs
    blobs.close()


def sealed(blobs: FileBlobs, data: bytes) -> str:
    partial = blobs.open_partial("some")
    partial.write(data)
    return blobs.seal(partial)


def test_a_sealed_blob_has_its_digest_as_name_and_is_read_by_range(blobs: FileBlobs, tmp_path: Path) -> None:
    digest = sealed(blobs, b"0123456789")
    assert digest == f"blake3-{blake3(b'0123456789').hexdigest()}"
    with blobs.reader(digest) as blob:
        assert (blob.size, blob.read(3, 4), blob.read(10, 0)) == (10, b"3456", b"")
    assert blobs.range_reader(digest)(8, 2) == b"89"
    assert blobs.partials() == []
    assert (tmp_path / "blobs" / digest).read_bytes() == b"0123456789"


def test_a_broken_upload_goes_on_where_it_ended(blobs: FileBlobs) -> None:
    first = blobs.open_partial("1-alice")
    first.write(b"hello ")
    first.close()
    again = blobs.open_partial("1-alice")
    assert again.size == 6
    again.write(memoryview(b"world"))
    assert again.read(4, 4) == b"o wo"
    assert blobs.seal(again) == name_of(b"hello world")


def test_a_fresh_partial_forgets_what_was_there(blobs: FileBlobs) -> None:
    old = blobs.open_partial("model")
    old.write(b"old")
    old.close()
    new = blobs.open_partial("model", fresh=True)
    assert (new.size, new.digest) == (0, name_of())
    new.close()


def test_nobody_else_can_write_to_an_open_partial(blobs: FileBlobs) -> None:
    partial = blobs.open_partial("x")
    with pytest.raises(StorageError) as caught:
        blobs.open_partial("x")
    assert caught.value.reason == "partial_busy"
    partial.close()
    blobs.open_partial("x").close()


def test_many_partials_are_sealed_at_once_in_order(blobs: FileBlobs) -> None:
    partials = [blobs.open_partial(f"c-{i}") for i in range(40)]
    for i, partial in enumerate(partials):
        partial.write(b"x" * i)
    assert blobs.seal_many(partials) == [name_of(b"x" * i) for i in range(40)]
    assert blobs.partials() == []


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a\0b", "x" * 201])
def test_a_partial_cannot_lie_elsewhere(blobs: FileBlobs, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name"):
        blobs.open_partial(name)
    with pytest.raises(StorageError, match="not a digest"):
        blobs.reader(name)


def test_a_sweep_leaves_what_is_named_and_what_is_open(blobs: FileBlobs) -> None:
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


def test_blobs_that_were_named_by_sha256_are_read_kept_and_swept_as_all_others(
    blobs: FileBlobs, tmp_path: Path
) -> None:
    named, orphan = (hashlib.sha256(data).hexdigest() for data in (b"named", b"orphan"))
    (tmp_path / "blobs" / named).write_bytes(b"named")
    (tmp_path / "blobs" / orphan).write_bytes(b"orphan")
    new = sealed(blobs, b"new")
    assert blobs.sweep({named, new}) == 1
    with blobs.reader(named) as blob:
        assert blob.read(0, blob.size) == b"named"
    with pytest.raises(StorageError, match="missing_blob"):
        blobs.reader(orphan)
    blobs.delete(named)
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == [new]


def test_an_open_reader_outlives_the_deletion(blobs: FileBlobs) -> None:
    digest = sealed(blobs, b"model")
    with blobs.reader(digest) as blob:
        blobs.delete(digest)
        blobs.delete(digest)
        assert blob.read(0, 5) == b"model"


def test_an_aborted_partial_is_gone(blobs: FileBlobs) -> None:
    partial = blobs.open_partial("bad")
    partial.write(b"NaN")
    blobs.abort(partial)
    assert blobs.partials() == []


def test_a_read_beyond_the_end_is_an_error_not_fewer_bytes(blobs: FileBlobs) -> None:
    with blobs.reader(sealed(blobs, b"abc")) as blob, pytest.raises(StorageError) as caught:
        blob.read(1, 3)
    assert caught.value.reason == "truncated"


@pytest.mark.parametrize(("number", "reason"), [(errno.ENOSPC, "disk_full"), (errno.EIO, "disk_error")])
def test_a_failed_write_keeps_size_and_digest_true(
    blobs: FileBlobs, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    partial = blobs.open_partial("x")
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
    assert blobs.seal(partial) == name_of(b"12345678")


def test_after_a_failed_fsync_nothing_is_sealed(blobs: FileBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    partials = [blobs.open_partial(name) for name in "ab"]

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(FsyncFailed):
            blobs.seal_many(partials)
    assert blobs.partials() == ["a", "b"]
    assert blobs.sweep(()) == 2


def test_a_state_directory_has_one_owner(tmp_path: Path) -> None:
    with StateLock(tmp_path / "state"):
        with pytest.raises(StateInUse, match=f"in use by process {os.getpid()}") as caught:
            StateLock(tmp_path / "state")
        assert caught.value.pid == os.getpid()
    with StateLock(tmp_path / "state"):
        pass
