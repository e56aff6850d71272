"""Bytes on disk, named by what they are: `blobs/<digest>` and, until they are whole, `partial/<name>`.

The law: a file below blobs/ is complete, synced, and has the digest that it is
named by. So a row may name a blob as soon as `seal_many` returned, never before.
A blob that no row names is rubbish, which `sweep` removes.
"""

import errno
import os
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, Self

from fedring.codec.digest import Digest, is_name, name_of
from fedring.daemon.crash import crashpoint
from fedring.rpc.errors import Overloaded

FSYNC_THREADS = 16  # concurrent fsyncs share the journal's commits
_REREAD_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class StorageError(Exception):
    """The bytes could not be written or read; `reason` is a stable metric label."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class StorageFailed(StorageError, Overloaded):
    """The disk is full, or fails: "disk_full" or "disk_error". Nothing was changed, and later it may work."""


class FsyncFailed(Exception):
    """The kernel may have dropped what it could not write: the daemon must exit and recover from the disk."""


class Partial(Protocol):
    """Bytes that are still being written, at their end only."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def digest(self) -> str: ...
    def write(self, data: bytes | memoryview) -> None: ...
    def read(self, offset: int, size: int) -> bytes: ...
    def close(self) -> None: ...


class BlobReader(AbstractContextManager["BlobReader"], Protocol):
    """A blob, readable by range until it is closed, even if it is deleted meanwhile."""

    @property
    def size(self) -> int: ...
    def read(self, offset: int, size: int) -> bytes: ...
    def close(self) -> None: ...


class Blobs(Protocol):
    """Where bytes are kept."""

    def open_partial(self, name: str, *, fresh: bool = False) -> Partial: ...
    def seal_many(self, partials: Sequence[Partial]) -> list[str]: ...
    def abort(self, partial: Partial) -> None: ...
    def reader(self, digest: str) -> BlobReader: ...
    def range_reader(self, digest: str) -> Callable[[int, int], bytes]: ...
    def delete(self, digest: str) -> None: ...
    def partials(self) -> list[str]: ...
    def drop_partials(self, prefix: str) -> None: ...
    def sweep(self, keep: Collection[str], keep_partials: Collection[str] = ()) -> int: ...


class FilePartial:
    """A file below partial/ with the digest of all that it holds; usable by one thread at a time."""

    def __init__(self, path: Path, closed: Callable[[str], None], *, fresh: bool) -> None:
        self.path = path
        self.size = 0
        self._closed = closed
        self._digest = Digest()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_TRUNC if fresh else 0)
        try:
            self.fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise _storage_error(error) from error
        self._reread()

    @property
    def name(self) -> str:
        """What it was opened by."""
        return self.path.name

    @property
    def digest(self) -> str:
        """The name of the bytes so far."""
        return self._digest.name

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`; after a StorageError `size` and `digest` still are those of the file."""
        view = memoryview(data).cast("B")
        while view:
            try:
                written = os.write(self.fd, view)
            except OSError as error:
                raise _storage_error(error) from error
            self._count(view[:written])
            view = view[written:]

    def read(self, offset: int, size: int) -> bytes:
        """The `size` bytes at `offset`."""
        return _read(self.fd, offset, size)

    def close(self) -> None:
        """Let go of the file; it stays, and can be opened again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._closed(self.name)

    def _reread(self) -> None:
        try:
            while data := os.pread(self.fd, _REREAD_BYTES, self.size):
                self._count(data)
        except OSError as error:
            os.close(self.fd)
            raise _storage_error(error) from error

    def _count(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self.size += len(data)


class MemoryPartial:
    """A payload that is small enough to wait in memory for its row."""

    def __init__(self, payload: bytes = b"") -> None:
        self.payload = bytearray(payload)

    @property
    def size(self) -> int:
        """Bytes so far."""
        return len(self.payload)

    @property
    def digest(self) -> str:
        """The name of the bytes so far."""
        return name_of(self.payload)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        self.payload += data

    def read(self, offset: int, size: int) -> bytes:
        """The `size` bytes at `offset`."""
        return bytes(self.payload[offset : offset + size])

    def close(self) -> None:
        """Nothing is held."""


class FileReader:
    """A blob's file. It is read, not mapped: mapped pages would count as the daemon's memory."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _storage_error(error) from error
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, size: int) -> bytes:
        """The `size` bytes at `offset`; safe from any number of threads."""
        try:
            return _read(self._fd, offset, size)
        except StorageFailed as error:  # of what cannot be read, another attempt is of no use
            raise StorageError("unreadable", str(error)) from error

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FileBlobs:
    """Blobs in a folder that one process owns (StateLock)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._partial, self._blobs = root / "partial", root / "blobs"
        self._open: set[str] = set()
        for folder in (self._partial, self._blobs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = os.open(self._blobs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._pool = ThreadPoolExecutor(FSYNC_THREADS, thread_name_prefix="fsync")
        _sync_folder(root)

    def close(self) -> None:
        """Let go of the folder and the threads."""
        self._pool.shutdown()
        os.close(self._folder)

    def open_partial(self, name: str, *, fresh: bool = False) -> FilePartial:
        """A partial to append to: what a broken upload left is still in it, unless `fresh`.

        After a power loss its end may hold bytes that were never written; the digest tells.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name a partial")
        if name in self._open:
            raise StorageError("partial_busy", f"{name} is being written")
        self._open.add(name)
        try:
            return FilePartial(self._partial / name, self._open.discard, fresh=fresh)
        except StorageError:
            self._open.discard(name)
            raise

    def seal(self, partial: Partial) -> str:
        """`seal_many` of one."""
        return self.seal_many([partial])[0]

    def seal_many(self, partials: Sequence[Partial]) -> list[str]:
        """Close the partials, make them durable blobs and return their digests, in order.

        On StorageError none may be named by a row, and all are closed; what is left of them can be opened again.
        """
        if not partials:
            return []
        files = [_own(partial) for partial in partials]
        try:
            self._fsync_all([file.fd for file in files])
            crashpoint("after_blob_fsync")
            for file in files:
                file.path.replace(self._path(file.digest))
            crashpoint("after_blob_rename")
        except OSError as error:
            raise _storage_error(error) from error
        finally:
            for file in files:
                file.close()
        _fsync(self._folder)
        return [file.digest for file in files]

    def sync(self) -> None:
        """Make the names in blobs/ durable."""
        _fsync(self._folder)

    def abort(self, partial: Partial) -> None:
        """Remove the partial and its bytes."""
        file = _own(partial)
        file.path.unlink(missing_ok=True)
        file.close()

    def reader(self, digest: str) -> FileReader:
        """The blob, open; StorageError("missing_blob") if there is none, or can be none of that name."""
        if not is_name(digest):  # a row of the database may be damaged
            raise StorageError("missing_blob", f"{digest!r} is not a digest")
        return FileReader(self._path(digest))

    def range_reader(self, digest: str) -> Callable[[int, int], bytes]:
        """A codec's Reader of the blob that holds no file open between two reads: a round may have thousands."""

        def read(offset: int, size: int) -> bytes:
            with self.reader(digest) as blob:
                return blob.read(offset, size)

        return read

    def delete(self, digest: str) -> None:
        """Remove the blob, if it is there; readers that are open keep their bytes."""
        self._path(digest).unlink(missing_ok=True)

    def partials(self) -> list[str]:
        """The names of all partials, open or not."""
        return sorted(path.name for path in self._partial.iterdir())

    def drop_partials(self, prefix: str) -> None:
        """No partial whose name begins so is left; one that is open is, as a file without a name."""
        for name in self.partials():
            if name.startswith(prefix):
                (self._partial / name).unlink(missing_ok=True)

    def sweep(self, keep: Collection[str], keep_partials: Collection[str] = ()) -> int:
        """Remove all blobs and closed partials but those to keep; returns how many.

        Right only while nothing is between `seal_many` and the commit of the row that names it.
        """
        kept, kept_partials = set(keep), set(keep_partials) | self._open
        rubbish = [path for path in self._blobs.iterdir() if is_name(path.name) and path.name not in kept]
        rubbish += [path for path in self._partial.iterdir() if path.name not in kept_partials]
        for path in rubbish:
            path.unlink(missing_ok=True)
        return len(rubbish)

    def probe(self, size: int) -> None:
        """Return if `size` more bytes can be kept now; StorageError if not."""
        path = self._partial / "probe"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
                os.pwrite(fd, b"\1", size - 1)
                os.fsync(fd)
            finally:
                os.close(fd)
                path.unlink(missing_ok=True)
        except OSError as error:
            raise _storage_error(error) from error

    def _fsync_all(self, fds: Sequence[int]) -> None:
        if len(fds) == 1:
            return _fsync(fds[0])
        done = wait([self._pool.submit(_fsync, fd) for fd in fds]).done  # all, before any is closed
        for future in done:
            future.result()

    def _path(self, digest: str) -> Path:
        if not is_name(digest):
            raise ValueError(f"{digest!r} is not a digest")
        return self._blobs / digest


def _own(partial: Partial) -> FilePartial:
    if not isinstance(partial, FilePartial):
        raise TypeError(f"{partial!r} is not a partial of FileBlobs")
    return partial


def _read(fd: int, offset: int, size: int) -> bytes:
    parts: list[bytes] = []
    missing = size
    try:
        while missing and (data := os.pread(fd, missing, offset)):  # Linux reads at most 2 GiB at once
            parts.append(data)
            offset, missing = offset + len(data), missing - len(data)
    except OSError as error:
        raise _storage_error(error) from error
    if missing:
        raise StorageError("truncated", f"{size - missing} of {size} bytes")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _fsync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise FsyncFailed(str(error)) from error


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _fsync(fd)
    finally:
        os.close(fd)


def _storage_error(error: OSError) -> StorageError:
    if isinstance(error, FileNotFoundError):
        return StorageError("missing_blob", str(error))
    return StorageFailed("disk_full" if error.errno in _FULL else "disk_error", str(error))
