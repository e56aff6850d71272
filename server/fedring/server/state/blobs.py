"""Blobs as files: `blobs/<digest>` and, until they are complete, `partial/<name>`.

The law: a file below blobs/ is complete, synced, and has the digest that it is named by. So a row may name a blob as
soon as `seal_many` has returned, and never before. `sweep` moves a blob that no row names to `unnamed/<digest>`.
"""

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Self

from fedring.codec.digest import Digest, is_name, name_of
from fedring.daemon.crash import crashpoint
from fedring.server.state.blob_interfaces import DiskSpace, Partial, by_range
from fedring.server.state.failures import DamagedBlob, FsyncFailed, StorageError, StorageFailed
from fedring.server.state.files import BLOBS, PARTIAL, UNNAMED

log = logging.getLogger(__name__)

FSYNC_THREADS = 16  # concurrent fsyncs share the commits of the file system's journal
_REREAD_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class FilePartial:
    """A partial in a file below partial/, with its digest.

    The digest is of all that the file holds.
    """

    def __init__(self, path: Path, closed: Callable[[str], None], *, fresh: bool) -> None:
        self.path = path
        self.size = 0
        self._closed = closed
        self._digest = Digest()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_TRUNC if fresh else 0)
        try:
            self.fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise storage_error(error) from error
        self._reread()

    @property
    def name(self) -> str:
        """The name that it was opened by."""
        return self.path.name

    @property
    def digest(self) -> str:
        return self._digest.name

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            try:
                written = os.write(self.fd, view)
            except OSError as error:
                raise storage_error(error) from error
            self._count(view[:written])
            view = view[written:]

    def read(self, offset: int, size: int) -> bytes:
        return _read(self.fd, offset, size)

    def close(self) -> None:
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
            raise storage_error(error) from error

    def _count(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self.size += len(data)


class MemoryPartial:
    """A small payload in memory, kept in its row.

    It is a partial that is never sealed.
    """

    def __init__(self, payload: bytes = b"") -> None:
        self.payload = payload

    @property
    def size(self) -> int:
        return len(self.payload)

    @property
    def digest(self) -> str:
        return name_of(self.payload)

    def write(self, data: bytes | memoryview) -> None:
        self.payload += bytes(data)

    def read(self, offset: int, size: int) -> memoryview:
        return memoryview(self.payload)[offset : offset + size]

    def close(self) -> None:
        """Do nothing: it holds no file."""


class FileReader:
    """An open blob.

    Its file is read, not mapped, because mapped pages would count as the daemon's memory.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise storage_error(error) from error
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, size: int) -> bytes:
        try:
            return _read(self._fd, offset, size)
        except StorageFailed as error:  # the file is open, so another attempt would fail, too
            raise StorageError("unreadable", str(error)) from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FileBlobs:
    """Blobs in a state folder, which one process owns (StateLock).

    The interface Blobs documents each method.

    Args:
        root: The folder.
        durable: Whether sealed blobs must survive a crash of the machine; nobody needs those of a simulation then.
    """

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self._durable = durable
        self._root, self._partial, self._blobs, self._unnamed = root, root / PARTIAL, root / BLOBS, root / UNNAMED
        self._open: set[str] = set()
        for folder in (self._partial, self._blobs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = os.open(self._blobs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._pool = ThreadPoolExecutor(FSYNC_THREADS, thread_name_prefix="fsync")
        if durable:
            _sync_folder(root)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._folder)

    def open_partial(self, name: str, *, fresh: bool = False) -> FilePartial:
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

    def seal_many(self, partials: Sequence[Partial]) -> list[str]:
        if not partials:
            return []
        files = [_own(partial) for partial in partials]
        try:
            if self._durable:
                self._fsync_all([file.fd for file in files])
            crashpoint("after_blob_fsync")
            for file in files:
                file.path.replace(self._path(file.digest))
            crashpoint("after_blob_rename")
        except OSError as error:
            raise storage_error(error) from error
        finally:
            for file in files:
                file.close()
        self.sync()
        return [file.digest for file in files]

    def sync(self) -> None:
        """Make the names in blobs/ durable."""
        if self._durable:
            _fsync(self._folder)

    def abort(self, partial: Partial) -> None:
        file = _own(partial)
        _remove(file.path)
        file.close()

    def reader(self, digest: str) -> FileReader:
        if not is_name(digest):  # a row of a damaged database may name anything
            raise StorageError("missing_blob", f"{digest!r} is not a digest")
        return FileReader(self._path(digest))

    def range_reader(self, digest: str) -> Callable[[int, int], bytes]:
        return by_range(self, digest)

    def has(self, digest: str) -> bool:
        return self._path(digest).exists()

    def judge(self, damage: DamagedBlob) -> StorageError:
        return damage

    def delete(self, digest: str) -> None:
        _remove(self._path(digest))

    def partials(self) -> list[str]:
        return sorted(path.name for path in self._partial.iterdir())

    def drop_partials(self, prefix: str) -> None:
        try:
            names = self.partials()
        except OSError as error:  # as with those that it does not remove, the next start does
            log.warning("%s cannot be listed: %s", self._partial, error.strerror)
            return
        for name in names:
            if name.startswith(prefix):
                _remove(self._partial / name)

    def sweep(self, keep: Collection[str], keep_partials: Collection[str] = ()) -> int:
        kept_partials = set(keep_partials) | self._open
        blobs = [self._blobs / name for name in self.unnamed(keep)]
        partials = [path for path in self._partial.iterdir() if path.name not in kept_partials]
        try:
            if blobs:
                self._unnamed.mkdir(mode=0o700, exist_ok=True)
            for path in blobs:
                os.utime(path)  # its time is that of the sweep
                path.replace(self._unnamed / path.name)
        except OSError as error:
            raise storage_error(error) from error
        for path in partials:  # no client was told that the server has them
            _remove(path)
        return len(blobs) + len(partials)

    def unnamed(self, keep: Collection[str]) -> list[str]:
        kept = set(keep)
        return sorted(path.name for path in self._blobs.iterdir() if is_name(path.name) and path.name not in kept)

    def forget_unnamed(self, seconds: float) -> None:
        limit = time.time() - seconds
        try:
            for path in self._unnamed.iterdir() if self._unnamed.exists() else ():
                with suppress(FileNotFoundError):  # people look at what was put aside, and may take it, or add folders
                    if path.is_file() and path.stat().st_mtime <= limit:
                        _remove(path)
        except OSError as error:
            raise storage_error(error) from error

    def probe(self, size: int) -> None:
        path = self._partial / "probe"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
                os.pwrite(fd, b"\1", size - 1)
                os.fsync(fd)  # if it fails, nothing is lost that anybody was told of: the disk is tried again
            finally:
                os.close(fd)
                path.unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(error) from error

    def disk_space(self) -> DiskSpace | None:
        try:
            disk = os.statvfs(self._root)
        except OSError:
            return None
        return DiskSpace(total=disk.f_blocks * disk.f_frsize, free=disk.f_bavail * disk.f_frsize)

    def _fsync_all(self, fds: Sequence[int]) -> None:
        if len(fds) == 1:
            return _fsync(fds[0])
        done = wait([self._pool.submit(_fsync, fd) for fd in fds]).done  # wait for all before any file is closed
        for future in done:
            future.result()

    def _path(self, digest: str) -> Path:
        if not is_name(digest):
            raise ValueError(f"{digest!r} is not a digest")
        return self._blobs / digest


def _remove(path: Path) -> None:
    """Remove a file that nothing names any more.

    Nothing depends on that, so one that cannot be removed now is left to the sweep of the next start.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s was not removed: %s", path, error.strerror)


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
        raise storage_error(error) from error
    if missing:
        raise StorageError("truncated", f"{size - missing} of {size} bytes")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _fsync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise FsyncFailed(str(error)) from error


def _sync_folder(path: Path) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise storage_error(error) from error
    try:
        _fsync(fd)
    finally:
        os.close(fd)


def storage_error(error: OSError) -> StorageError:
    """Return the storage error for an error of the operating system.

    It tells a full disk from one that fails.
    """
    if isinstance(error, FileNotFoundError):
        return StorageError("missing_blob", str(error))
    if error.errno in _NO_DESCRIPTOR:  # nothing is wrong with the disk, and connections that end give descriptors back
        return StorageFailed("too_many_files", str(error))
    return StorageFailed("disk_full" if error.errno in _FULL else "disk_error", str(error))
