"""Blobs in an object store, with local copies.

The law: a blob is durable as an object before a row may name it. Each leader writes under its own term, so that no key
is ever used twice: what a deposed leader still deletes is nothing that a later one has written. The local copies only
save time. They are discarded at the start of a server, and one that turns out to be damaged is fetched again: only the
damage of the object itself is damage of the blob.

    <prefix>/state_id                the id of the state, which the database has, too; see `state_ids`
    <prefix>/blobs/<term>/<digest>   a blob
    <prefix>/unnamed/<digest>        one that no row named when a server started
    <prefix>/placing                 the terms in which a restore has begun to write blobs, and may still write some
                                     (the database says in which of them it was committed, see `PLACED`)
"""

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from threading import Lock

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import ObjectStore, from_url

from fedring.codec.digest import Digest, is_name
from fedring.daemon.config import ConfigError
from fedring.daemon.crash import crashpoint
from fedring.server.state.blob_interfaces import BlobReader, DiskSpace, Partial, by_range
from fedring.server.state.blobs import FileBlobs, FilePartial
from fedring.server.state.checked import CHANGED, CheckedReader
from fedring.server.state.failures import DamagedBlob, StorageError, StorageFailed
from fedring.server.state.files import BLOBS, STATE_ID

log = logging.getLogger(__name__)

NO_STATE = "none"
"""In the place of the id of a state, that there is none."""

PLACING = "placing"
"""The key of the terms of restores that have not ended."""

PLACED = "placed_in"
"""The name, in the table `meta`, of the term in which a restore or a move has brought the state."""

_THREADS = 16  # requests at a time
_PART_BYTES = 8 << 20
_PARTS = 2  # of one object that are under way at a time: each is in memory, and there are as many objects as threads
_TRIES = timedelta(seconds=20)
_PROBE_BYTES = 1 << 10
_MOST_SMALL_BYTES = 1 << 12
_MOST_PLACING = 64  # terms that are noted
_MOST_LOOKS = 16  # at the copy of one blob: a disk that damages it again and again is not asked for ever


class ObjectBlobs:
    """Blobs in an object store.

    The leader of a term uses it alone. The interface Blobs documents each method.

    Args:
        store: The object store, below whose prefix nothing else lies.
        local: A folder of this server, for partials and copies.
        term: The leader's.
    """

    def __init__(self, store: ObjectStore, local: FileBlobs, term: int) -> None:
        self._store, self._local, self._term = store, local, term
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="objects")
        self._fetching, self._judging = Lock(), Lock()
        self._looks, self._looked_at = Counter[str](), set[str]()  # at copies that may be damaged, by digest
        self._lost = set[str]()  # whose objects are damaged themselves
        for name in local.unnamed(()):
            local.delete(name)
        self._keys = {digest: set(keys) for digest, keys in list_blobs(store).items()}
        self._put_aside = _written(store, "unnamed/")

    def close(self) -> None:
        self._pool.shutdown()
        self._local.close()

    def open_partial(self, name: str, *, fresh: bool = False) -> FilePartial:
        return self._local.open_partial(name, fresh=fresh)

    def seal_many(self, partials: Sequence[Partial]) -> list[str]:
        files = list(partials)
        try:
            # All have ended before any file is closed, whose descriptor another one may get.
            for future in wait([self._pool.submit(self._put, file) for file in files]).done:
                future.result()
        except BaseException:
            for file in files:
                file.close()
            raise
        crashpoint("after_object_put")
        return self._local.seal_many(files)

    def abort(self, partial: Partial) -> None:
        self._local.abort(partial)

    def reader(self, digest: str) -> BlobReader:
        if digest in self._looked_at:
            raise StorageFailed("disk_error", f"the copy of {BLOBS}/{digest} is being looked at")
        try:
            return self._local.reader(digest)
        except StorageError as error:
            if error.reason != "missing_blob" or digest not in self._keys:
                raise
        self._fetch(digest)
        return self._local.reader(digest)

    def range_reader(self, digest: str) -> Callable[[int, int], bytes]:
        return by_range(self, digest)

    def has(self, digest: str) -> bool:
        return digest in self._keys

    def judge(self, damage: DamagedBlob) -> StorageError:
        digest = damage.digest
        with self._judging:
            if digest not in self._looked_at:
                if digest in self._lost or digest not in self._keys or self._looks[digest] == _MOST_LOOKS:
                    return damage
                self._looks[digest] += 1
                self._looked_at.add(digest)
                self._pool.submit(self._look_at, digest)
        return StorageFailed("disk_error", f"the copy of {BLOBS}/{digest} {damage.what}, so it is fetched again")

    def delete(self, digest: str) -> None:
        self._local.delete(digest)
        _let_go(self._store, self._keys.get(digest, set()))
        # Afterwards, and `_put` notes its key before it writes: so what was deleted while it was sealed is not there.
        self._keys.pop(digest, None)

    def partials(self) -> list[str]:
        return self._local.partials()

    def drop_partials(self, prefix: str) -> None:
        self._local.drop_partials(prefix)

    def unnamed(self, keep: Collection[str]) -> list[str]:
        return sorted(self._keys.keys() - set(keep))

    def sweep(self, keep: Collection[str], keep_partials: Collection[str] = ()) -> int:
        unnamed = self.unnamed(keep)
        with as_storage_errors():
            for digest in unnamed:
                if aside := copy_aside(self._store, digest, self._keys[digest]):
                    self._put_aside[aside] = datetime.now(UTC)
        for digest in unnamed:
            self.delete(digest)
        return len(unnamed) + self._local.sweep(self._local.unnamed(()), keep_partials)

    def forget_unnamed(self, seconds: float) -> None:
        limit = datetime.now(UTC) - timedelta(seconds=seconds)
        old = {key for key, since in self._put_aside.items() if since <= limit}
        _let_go(self._store, old)
        for key in old:
            del self._put_aside[key]

    def probe(self, size: int) -> None:
        self._local.probe(size)
        key = f"probe-{self._term}"
        with as_storage_errors():
            obstore.put(self._store, key, bytes(_PROBE_BYTES))
            delete_objects(self._store, [key])  # else each leader would leave one

    def disk_space(self) -> DiskSpace | None:
        return self._local.disk_space()

    def _put(self, partial: Partial) -> None:
        key, digest = f"blobs/{self._term}/{partial.digest}", partial.digest
        self._keys.setdefault(digest, set()).add(key)
        with as_storage_errors():
            obstore.put(self._store, key, _parts(partial), chunk_size=_PART_BYTES, max_concurrency=_PARTS)
        self._lost.discard(digest)

    def _look_at(self, digest: str) -> None:
        """Delete the local copy of a blob if it is damaged.

        Somebody who read an older copy may have found the damage, so the present one may be sound.
        """
        try:
            with self._fetching, self._local.reader(digest) as copy:
                CheckedReader(copy.read, copy.size, digest).check()
        except StorageError as error:
            if error.reason != "missing_blob":  # an earlier look has deleted it
                log.warning("this server's copy of an object is deleted, and fetched again: %s", error)
                self._local.delete(digest)
        finally:
            self._looked_at.discard(digest)

    def _fetch(self, digest: str) -> None:
        """Copy a blob into the local folder.

        Of several objects, the newest sound one counts.
        """
        with self._fetching:
            if self._local.has(digest):  # another thread has just copied it
                return
            damaged = None
            for key in newest_first(self._keys.get(digest, ())):
                try:
                    _copy(self._store, key, digest, self._local)
                except StorageFailed:
                    raise
                except StorageError as error:
                    damaged = error if damaged is None or damaged.reason == "missing_blob" else damaged
                else:
                    self._lost.discard(digest)
                    return
            self._lost.add(digest)
            raise damaged or StorageError("missing_blob", f"there is no object {digest}")


def list_blobs(store: ObjectStore) -> dict[str, dict[str, int]]:
    """Return the keys of each blob, by its digest.

    Each key comes with the size of its object.

    Raises:
        StorageFailed: They cannot be listed now.
    """
    found = dict[str, dict[str, int]]()
    with as_storage_errors():
        for batch in obstore.list(store, "blobs/"):
            for meta in batch:
                _, written, digest = f"//{meta['path']}".rsplit("/", 2)
                if is_name(digest) and written.isdecimal():
                    found.setdefault(digest, {})[meta["path"]] = meta["size"]
    return found


def newest_first(keys: Collection[str]) -> list[str]:
    """Return the keys of a blob, those of later terms first.

    Earlier ones may still be deleted by others. The latest may have no object, since it is being written now.
    """
    return sorted(keys, key=term_of, reverse=True)


def newest_key(keys: Collection[str]) -> str:
    """Return the key of the latest term."""
    return newest_first(keys)[0]


def copy_aside(store: ObjectStore, digest: str, keys: Collection[str]) -> str:
    """Copy a blob below unnamed/, and return its key there.

    The key is empty if there is no blob any more: a deposed leader may still delete those that it does not name.
    """
    key, aside = newest_key(keys), f"unnamed/{digest}"
    with suppress(FileNotFoundError):
        try:
            obstore.copy(store, key, aside)
        except BaseError:  # S3 itself copies up to 5 GiB (https://github.com/apache/arrow-rs-object-store/issues/563)
            found = obstore.get(store, key)
            with obstore.open_writer(store, aside, buffer_size=_PART_BYTES, max_concurrency=_PARTS) as copy:
                for part in found.stream(_PART_BYTES):
                    copy.write(part)
        return aside
    return ""


def move_aside(store: ObjectStore, digest: str, keys: Collection[str]) -> None:
    """Move a blob below unnamed/."""
    copy_aside(store, digest, keys)
    delete_objects(store, keys)


def delete_objects(store: ObjectStore, keys: Collection[str]) -> None:
    """Delete objects.

    Some may not be there, which is no error to S3, but to others.
    """
    try:
        if keys:
            obstore.delete(store, list(keys))
    except FileNotFoundError:
        for key in keys:
            with suppress(FileNotFoundError):
                obstore.delete(store, key)


def put_aside_unfinished(store: ObjectStore, named: Callable[[], Collection[str]], placed: int) -> None:
    """Move blobs of killed restores below unnamed/.

    If one was committed, these are the blobs that it has replaced. A server would take newer models of its own run
    among them for lost commits.

    A restore that was not committed stays noted: it may not know yet that it leads no more, and write more blobs.

    Args:
        store: The object store.
        named: Returns the blobs that rows name: a restore may have ended all the same.
        placed: The term in which the state that is there was placed; 0 = it began here.

    Raises:
        StorageFailed: The object store cannot be used now.
    """
    if not (terms := placing_terms(store)):
        return
    kept, replaced = named(), placed if placed in terms else 0
    with as_storage_errors():
        for digest, keys in list_blobs(store).items():
            written = {term_of(key) for key in keys}
            if digest not in kept and (written <= terms or max(written) <= replaced):
                move_aside(store, digest, keys)
    note_placing(store, terms - {placed})


def note_placing(store: ObjectStore, terms: Collection[int]) -> None:
    """Note the terms of restores that have not ended.

    Only the latest are kept, so that the object stays small: earlier ones have long ended.

    Raises:
        StorageFailed: They cannot be noted now.
    """
    if terms:
        write_object(store, PLACING, " ".join(map(str, sorted(terms)[-_MOST_PLACING:])).encode())
    else:
        with as_storage_errors():
            delete_objects(store, [PLACING])


def placing_terms(store: ObjectStore) -> set[int]:
    """Return the terms of restores that have not ended.

    Raises:
        StorageFailed: They cannot be read now.
    """
    return {int(word) for word in read_object(store, PLACING).split() if word.isdigit()}


def term_of(key: str) -> int:
    """Return the term of the leader that has written a blob's object."""
    return int(key.split("/")[1])


def open_objects(url: str) -> ObjectStore:
    """Open an object store.

    Args:
        url: Such as s3://bucket/prefix; the rest comes from the variables that such stores usually have.

    Raises:
        ConfigError: There is no such store.
    """
    try:
        return from_url(url, retry_config={"retry_timeout": _TRIES, "max_retries": 6})
    except (BaseError, ValueError) as error:
        raise ConfigError(f"blob_url {url!r} cannot be used: {_sentence(error)}") from error


def state_ids(store: ObjectStore) -> list[str]:
    """Return the ids of the states that the objects belong to.

    There are two while one state replaces another: a commit of the database decides which of them is there. NO_STATE is
    one of them while a state comes into an empty place.

    Raises:
        StorageFailed: They cannot be read now.
    """
    return read_object(store, STATE_ID).decode(errors="replace").split()


def check_writable(store: ObjectStore, url: str) -> None:
    """Check that objects may be written and deleted.

    Nothing is left behind.

    Raises:
        ConfigError: They may not.
        StorageFailed: The object store cannot be reached now.
    """
    key = f"probe-{uuid.uuid4().hex}"
    try:
        with as_storage_errors():
            obstore.put(store, key, b"fl-server")
            obstore.delete(store, key)
    except StorageError as error:
        if isinstance(error.__cause__, PermissionDeniedError | UnauthenticatedError):
            text = f"blob_url {url} may not be written with these keys: {error}"
            raise ConfigError(f"{text}; allow reading, listing, writing and deleting") from error
        raise


def read_object(store: ObjectStore, key: str) -> bytes:
    """Return a small object; empty if there is none.

    Raises:
        StorageError: "unreadable" if it is not small, so it is none of ours.
        StorageFailed: It cannot be read now.
    """
    try:
        found = obstore.get(store, key)
        if (size := found.meta["size"]) > _MOST_SMALL_BYTES:
            raise StorageError("unreadable", f"the object {key} has {size} bytes, which no fl-server has written")
        return bytes(found.bytes())
    except FileNotFoundError:
        return b""
    except BaseError as error:
        raise StorageFailed("disk_error", _sentence(error)) from error


def write_object(store: ObjectStore, key: str, data: bytes) -> None:
    """Write a small object.

    Raises:
        StorageFailed: It cannot be written now.
    """
    with as_storage_errors():
        obstore.put(store, key, data)


def _copy(store: ObjectStore, key: str, digest: str, local: FileBlobs) -> None:
    """Copy an object into the local folder, if it has its digest."""
    partial = local.open_partial(f"object-{digest}"[:200], fresh=True)
    try:
        with as_storage_errors():
            for part in obstore.get(store, key).stream(_PART_BYTES):
                partial.write(memoryview(part))
        if partial.digest != digest:
            raise StorageError("unreadable", f"the object {key} {CHANGED}")
    except BaseException:
        local.abort(partial)
        raise
    local.seal_many([partial])


def _written(store: ObjectStore, prefix: str) -> dict[str, datetime]:
    """Return when each object below a prefix was written."""
    with as_storage_errors():
        metas = [meta for batch in obstore.list(store, prefix) for meta in batch]
    return {meta["path"]: meta["last_modified"] for meta in metas}


def _let_go(store: ObjectStore, keys: Collection[str]) -> None:
    """Delete objects.

    One that cannot be deleted now is put aside at the next start.
    """
    try:
        delete_objects(store, keys)
    except BaseError as error:
        log.warning("%d objects were not deleted: %s", len(keys), _sentence(error))


def _parts(partial: Partial) -> Iterator[bytes]:
    """Yield the bytes of a partial.

    Without any, it yields one empty part.

    Raises:
        StorageFailed: The disk has changed them, which ends the upload without an object.
    """
    digest = Digest()
    for offset in range(0, max(1, partial.size), _PART_BYTES):
        data = bytes(partial.read(offset, min(_PART_BYTES, partial.size - offset)))
        digest.update(data)
        yield data
    if digest.name != partial.digest:
        raise StorageFailed("disk_error", f"a file that was to become {partial.digest} {CHANGED}")


@contextmanager
def as_storage_errors() -> Iterator[None]:
    """Raise the storage errors that stand for an object store's."""
    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        missing = isinstance(error, FileNotFoundError)
        kind = StorageError if missing else StorageFailed
        raise kind("missing_blob" if missing else "disk_error", _sentence(error)) from error


def _sentence(error: BaseException) -> str:
    """Return the first line of an object store's error."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
