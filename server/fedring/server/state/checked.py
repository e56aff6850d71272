"""Blobs that are proven to be what their names say, by the very bytes that were used.

A blob is named by the digest of its bytes, so damage on the disk can be noticed whenever it is read. A
CheckedReader digests what passes through it and compares at the end: whoever publishes or sends what was read
does so after `check`, never before.
"""

from collections.abc import Callable, Iterable
from threading import Lock

from grpc import StatusCode

from fedring.codec.digest import Digest, is_called
from fedring.rpc.errors import FedringError
from fedring.server.state.blobs import Blobs, StorageError, StorageFailed

_STEP = 1 << 20  # bytes that are read at a time for the digest alone
_AHEAD = 4  # ranges by which one thread may be ahead of another
_ROOM = 32 << 20  # bytes that may wait for those before them, in all readers of one walk


class DamagedBlob(StorageError, FedringError):
    """Bytes are not those that their digest was taken of.

    Attributes:
        digest: their name, which is the blob's if they are one.
        what: what is wrong with them, a clause for people.
    """

    status = StatusCode.DATA_LOSS

    def __init__(self, digest: str, what: str, text: str = "") -> None:
        super().__init__("damaged_blob", text or f"blobs/{digest} {what}")
        self.digest, self.what = digest, what


class Room:
    """How many bytes all readers of one walk may hold back until those before them have come."""

    def __init__(self, size: int = _ROOM) -> None:
        self._left, self._lock = size, Lock()

    def take(self, size: int) -> bool:
        """Return whether there was room for `size` bytes; if so, they are counted until `give`."""
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True

    def give(self, size: int) -> None:
        """Let go of `size` bytes."""
        with self._lock:
            self._left += size


class CheckedReader:
    """Reads a blob by range and digests it on the way.

    Ranges that follow each other cost one pass over the bytes, also if several threads take turns. What was read out
    of order, twice, or not at all, `check` reads once more: it never trusts bytes that were digested before they were
    used.

    Args:
        read: returns `size` bytes at `offset`; safe from any number of threads.
        size: the blob's length in bytes.
        digest: the blob's name.
        room: what the readers of one walk share.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, digest: str, room: Room | None = None) -> None:
        self.size, self.digest = size, digest
        self._read, self._room = read, room or Room()
        self._hash = Digest(like=digest)
        self._digested = 0  # bytes from the start
        self._early: dict[int, bytes] = {}  # ranges that wait for those before them, by offset
        self._twice = False  # something was used that had been digested before
        self._lock = Lock()

    def read(self, offset: int, size: int) -> bytes:
        """Return the `size` bytes at `offset`, from any thread."""
        data = self._read(offset, size)
        with self._lock:
            if offset == self._digested:
                self._digest(data)
            elif offset < self._digested:
                self._twice = True
            elif offset - self._digested <= _AHEAD * size and self._room.take(size):
                self._early[offset] = data
        return data

    def check(self) -> None:
        """Return if the whole blob is what its name says.

        Raises:
            DamagedBlob: if it is not, or cannot be read to its end.
        """
        with self._lock:
            self._forget_early()
            if self._twice:
                self._hash, self._digested, self._twice = Digest(like=self.digest), 0, False
            try:
                while data := self._read(self._digested, min(_STEP, self.size - self._digested)):
                    self._digest(data)
            except StorageError as error:
                raise unreadable(self.digest, error) from error
            if self._hash.name != self.digest:
                raise changed(self.digest)

    def _digest(self, data: bytes) -> None:
        self._hash.update(data)
        self._digested += len(data)
        while data := self._early.pop(self._digested, b""):
            self._room.give(len(data))
            self._hash.update(data)
            self._digested += len(data)

    def _forget_early(self) -> None:
        self._room.give(sum(map(len, self._early.values())))
        self._early.clear()


def find_damage(readers: Iterable[CheckedReader]) -> list[DamagedBlob]:
    """Return what `check` says of those readers whose blob is damaged."""
    found = []
    for reader in readers:
        try:
            reader.check()
        except DamagedBlob as error:
            found.append(error)
    return found


def read_checked(blobs: Blobs, digest: str) -> bytes:
    """Return all bytes of a blob.

    Raises:
        DamagedBlob: if they are not what its name says, or if it is missing.
    """
    try:
        with blobs.reader(digest) as blob:
            data = blob.read(0, blob.size)
    except StorageError as error:
        raise unreadable(digest, error) from error
    if not is_called(data, digest):
        raise changed(digest)
    return data


def changed(digest: str) -> DamagedBlob:
    """Return the error of a blob whose bytes are others."""
    return DamagedBlob(digest, "does not hold what was written to it")


def unreadable(digest: str, error: StorageError) -> StorageError:
    """Return the error of a blob that cannot be read: `error` itself if another attempt may go well."""
    if isinstance(error, StorageFailed | DamagedBlob):
        return error
    known = {"missing_blob": "is missing", "truncated": "has been cut short"}
    what = known.get(error.reason, f"cannot be read ({error})")
    return DamagedBlob(digest, what)
