"""The interface of a store of blobs: sealed files, and partials.

Partials become sealed files. `fedring.server.state.blobs.FileBlobs` implements it. The suite in
tests/unit/server/state/test_blobs.py checks that an implementation keeps these promises.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from fedring.server.state.failures import DamagedBlob, StorageError


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The space of the file system that holds the blobs, in bytes."""

    total: int
    free: int  # for this process; a file system may reserve some for root


class Partial(Protocol):
    """Bytes that are still being written, at their end only.

    One thread at a time uses them.
    """

    @property
    def size(self) -> int:
        """The number of bytes so far."""
        ...

    @property
    def digest(self) -> str:
        """The name of the bytes so far (`fedring.codec.digest`)."""
        ...

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes, which are not durable yet.

        Raises:
            StorageFailed: if the disk is full or failed. `size` and `digest` then tell how much was written.
        """
        ...

    def read(self, offset: int, size: int) -> bytes | memoryview:
        """Return `size` bytes at `offset`; raise StorageError ("truncated") if there are fewer."""
        ...

    def close(self) -> None:
        """Release the partial.

        Its bytes stay, and can be opened again by the partial's name.
        """
        ...


class BlobReader(AbstractContextManager["BlobReader"], Protocol):
    """An open blob, which can be read until it is closed.

    It may be deleted meanwhile. This is a context manager.
    """

    @property
    def size(self) -> int:
        """The length of the blob in bytes."""
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes at `offset`; called from any number of threads.

        Raises:
            StorageError: "truncated" if there are fewer, "unreadable" if the disk cannot read them.
        """
        ...

    def close(self) -> None:
        """Release the blob."""
        ...


def by_range(blobs: "Blobs", digest: str) -> Callable[[int, int], bytes]:
    """Return a reader of a blob, opened anew for each range."""

    def read(offset: int, size: int) -> bytes:
        with blobs.reader(digest) as blob:
            return blob.read(offset, size)

    return read


class Blobs(Protocol):
    """Bytes that are named by their digest, and unfinished partials.

    A sealed blob is complete, durable and has the digest that it is named by, so a row may name it. A blob that no row
    names is put aside by `sweep`, and removed some days later, because the row may have been lost.
    """

    def open_partial(self, name: str, *, fresh: bool = False) -> Partial:
        """Open a partial to append to.

        After a power loss its end may be wrong; its digest tells.

        Args:
            name: 1 to 200 characters of A-Z a-z 0-9 . _ -, not beginning with a dot.
            fresh: discard what the partial holds.

        Raises:
            StorageError: "partial_busy", if it is open already.
            StorageFailed: if the disk is full or failed.
            ValueError: if the name is no such name.
        """
        ...

    def seal_many(self, partials: Sequence[Partial]) -> list[str]:
        """Close partials, and make them durable blobs.

        Returns:
            The blobs' names, in order. Rows may name them.

        Raises:
            StorageFailed: if the disk failed. No row may name any of them. The partials can be opened again.
            FsyncFailed: if a sync failed.
            TypeError: if a partial was not opened here.
        """
        ...

    def abort(self, partial: Partial) -> None:
        """Close a partial, and remove it with its bytes, as `delete` does."""
        ...

    def reader(self, digest: str) -> BlobReader:
        """Open a blob.

        Raises:
            StorageError: "missing_blob", if there is none of that name.
            StorageFailed: if it cannot be opened now.
        """
        ...

    def range_reader(self, digest: str) -> Callable[[int, int], bytes]:
        """Return a function that reads `size` bytes at `offset` of a blob.

        It raises as `reader` and `read` do. It holds no file open between two calls, because a round may read thousands
        of blobs.
        """
        ...

    def has(self, digest: str) -> bool:
        """Return whether a blob is there, as far as is known."""
        ...

    def judge(self, damage: DamagedBlob) -> StorageError:
        """Return the error for damage of a blob that was found.

        It is `damage` itself, or a StorageFailed if only a copy may be damaged, which is then looked at and made anew.
        It takes no time.
        """
        ...

    def delete(self, digest: str) -> None:
        """Remove a blob if it is there.

        Readers that are open can still read it. If the disk refuses that, a line in the log says so, and the next start
        puts it aside.
        """
        ...

    def partials(self) -> list[str]:
        """Return the names of all partials, open or not, in order."""
        ...

    def drop_partials(self, prefix: str) -> None:
        """Remove all partials whose names begin with `prefix`.

        Those that are open can be written to, to no effect.
        """
        ...

    def unnamed(self, keep: Collection[str]) -> list[str]:
        """Return the names of all blobs but those to keep, in order."""
        ...

    def sweep(self, keep: Collection[str], keep_partials: Collection[str] = ()) -> int:
        """Put aside all blobs but `keep`, and remove closed partials.

        It must not run between `seal_many` and the rows' commit.

        Returns:
            How many there were.
        """
        ...

    def forget_unnamed(self, seconds: float) -> None:
        """Remove blobs put aside longer ago than `seconds`."""
        ...

    def probe(self, size: int) -> None:
        """Check that `size` more bytes can be kept now.

        Raises:
            StorageFailed: if not.
        """
        ...

    def disk_space(self) -> DiskSpace | None:
        """Return the space of the disk, or None.

        None if it cannot be found out now.
        """
        ...

    def close(self) -> None:
        """Release the folder. No other method may be called afterwards."""
        ...
