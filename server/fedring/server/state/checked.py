"""Reading blobs with a check of their digests.

The bytes that were used must have the digest that the blob is named by. A blob is named by the digest of its bytes, so
damage on the disk can be noticed whenever it is read. A CheckedReader digests what passes through it, and compares at
the end. Its user must not publish or send what was read before `check` has returned.
"""

from collections.abc import Callable, Iterable
from threading import Lock

from fedring.codec.digest import Digest, is_called
from fedring.server.state.blob_interfaces import Blobs
from fedring.server.state.failures import DamagedBlob, StorageError, StorageFailed

CHANGED = "does not hold what was written to it"
"""What is wrong with bytes that have another digest: a clause that follows their name."""

_STEP = 1 << 20  # bytes that are read at a time for the digest alone
_AHEAD = 4  # ranges by which one thread may be ahead of another
_ROOM = 32 << 20  # bytes that may wait for earlier bytes, in all readers of one walk


class Room:
    """A limit on bytes waiting for earlier bytes to be read.

    All readers of one walk share it.
    """

    def __init__(self, size: int = _ROOM) -> None:
        self._left, self._lock = size, Lock()

    def take(self, size: int) -> bool:
        """Count `size` bytes until `give` if they fit; return whether they do."""
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True

    def give(self, size: int) -> None:
        """Stop counting `size` bytes."""
        with self._lock:
            self._left += size


class CheckedReader:
    """Reads a blob by range, and digests it on the way.

    If the ranges follow each other, the bytes are read once, also if several threads take turns. What was read out of
    order, twice, or not at all is read again by `check`, because bytes that were digested before they were used cannot
    be trusted.

    Args:
        read: returns `size` bytes at `offset`; safe from any number of threads.
        size: the blob's length in bytes.
        digest: the blob's name.
        room: the limit that the readers of one walk share.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, digest: str, room: Room | None = None) -> None:
        self.size, self.digest = size, digest
        self._read, self._room = read, room or Room()
        self._hash = Digest(like=digest)
        self._digested = 0  # bytes from the start
        self._early: dict[int, bytes] = {}  # ranges that wait for earlier ones, by offset
        self._twice = False  # something was used after it had been digested
        self._lock = Lock()

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes at `offset`; called from any number of threads."""
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
        """Check that the whole blob has its digest.

        The blob is named by the digest.

        Raises:
            DamagedBlob: if it has not, or cannot be read to its end.
            StorageFailed: if it cannot be read now.
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
    """Check all readers, and return the errors of damaged blobs."""
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
        DamagedBlob: if they do not have the digest that it is named by, or if it is missing.
        StorageFailed: if it cannot be read now.
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
    """Return the error of a blob whose bytes have another digest.

    A blob is named by its digest.
    """
    return DamagedBlob(digest, CHANGED)


def unreadable(digest: str, error: StorageError) -> StorageError:
    """Return the error of a blob that cannot be read.

    It is `error` itself if a later attempt may succeed.
    """
    if isinstance(error, StorageFailed | DamagedBlob):
        return error
    known = {"missing_blob": "is missing", "truncated": "has been cut short"}
    what = known.get(error.reason, f"cannot be read ({error})")
    return DamagedBlob(digest, what)
