"""Store and blobs, from the event loop: each kind of work in the threads that may do it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

from fedring.server.state.blobs import FileBlobs, FilePartial, MemoryPartial, StorageError, StorageFailed
from fedring.server.state.interfaces import Acceptance, Pruned, Store
from fedring.server.state.rows import EventRow, LastAccepted, UpdateRow
from fedring.server.state.storage import Storage

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Facts:
    """The state directory. `db` runs in the store's one thread, `heavy` in one of its own, `work` in a small pool."""

    def __init__(self, store: Store, blobs: FileBlobs, *, threads: int) -> None:
        self.store, self.blobs = store, blobs
        self.storage = Storage()
        self.waiting = 0  # pieces of work that threads do, or that wait for one
        self.commit_seconds = 0.0  # that the newest commit of updates took
        self.last_accepted = store.last_accepted()
        """The newest accepted update of each client: at hand also while the disk is slow, for whoever joins."""
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="work")
        self._db = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._heavy = ThreadPoolExecutor(1, thread_name_prefix="heavy")

    async def db(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function`, a transaction, returns."""
        return await self._run(self._db, lambda: function(*args, **kwargs))

    async def heavy(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function`, which may take seconds and use the pool, returns."""
        return await self._run(self._heavy, lambda: function(*args, **kwargs))

    async def work(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function`, one piece of computing or file access, returns."""
        return await self._run(self.pool, lambda: function(*args, **kwargs))

    async def keep(self, attempt: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `attempt` returns, once the storage works: one that fails is made again when it does."""
        while True:
            await self.storage.works.wait()
            try:
                return await attempt(*args, **kwargs)
            except StorageFailed as error:
                self.storage.fail(str(error))  # the next attempt waits

    async def probe(self, size: int) -> None:
        """Return if the storage takes `size` more bytes and a transaction; StorageFailed if not."""
        await self.work(self.blobs.probe, size)
        await self.db(self.store.probe)

    def commit_updates(self, batch: list[tuple[FilePartial | MemoryPartial, UpdateRow]]) -> list[Acceptance]:
        """What became of each update: the files are sealed first, then all rows are committed at once."""
        began = time.monotonic()
        self.blobs.seal_many([partial for partial, _ in batch if isinstance(partial, FilePartial)])
        outcomes = self.store.accept_updates([row for _, row in batch])
        self.commit_seconds = time.monotonic() - began
        for (_, row), outcome in zip(batch, outcomes, strict=True):
            if outcome is Acceptance.NEW:
                new = LastAccepted(row.epoch, row.round, row.name)
                self.last_accepted[row.client_id] = max(self.last_accepted.get(row.client_id, new), new)
        return outcomes

    def prune(self, keep_models: int, keep_update_rounds: int, keep_rounds: int) -> bool:
        """Whether anything old was let go. Rows and blobs go in one call of `db`: nothing is sealed in between."""
        return self._delete(self.store.prune(keep_models, keep_update_rounds, keep_rounds))

    def drop_updates(self, number: int, clients: Sequence[str]) -> None:
        """Forget the clients' accepted updates of the round, and their bytes."""
        self._delete(self.store.drop_updates(number, clients))
        self.last_accepted = self.store.last_accepted()

    def forget_client(self, client_id: str) -> int:
        """Forget the client, and its updates in rounds that have ended; returns how many rows that were."""
        forgotten = self.store.forget_client(client_id)
        self._delete(forgotten)
        self.last_accepted = self.store.last_accepted()
        return forgotten.rows

    def discard(self, digests: Sequence[str]) -> None:
        """Remove those of the blobs, just sealed, that no row names."""
        for digest in set(filter(None, digests)) - self.store.named_blobs():
            self.blobs.delete(digest)

    def drop_models(self, versions: Sequence[int]) -> None:
        """Forget the models, and their files."""
        self._delete(self.store.drop_models(versions))

    async def save_events(self, rows: list[EventRow]) -> None:
        """Keep the events; that they cannot be kept is logged."""
        try:
            await self.db(self.store.append_events, rows)
        except StorageError as error:
            log.error("%d events were not stored: %s", len(rows), error)

    def close(self) -> None:
        """End the threads, then let go of the store and the blobs."""
        for pool in (self._heavy, self.pool, self._db):
            pool.shutdown()
        self.store.close()
        self.blobs.close()

    def _delete(self, pruned: Pruned) -> bool:
        for digest in pruned.blobs:
            self.blobs.delete(digest)
        return bool(pruned.rows or pruned.blobs)

    async def _run(self, executor: Executor, function: Callable[[], T]) -> T:
        future = asyncio.get_running_loop().run_in_executor(executor, function)
        self.waiting += 1
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():  # it may use what the caller is about to close, however often that is cancelled
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            raise
        except StorageFailed as error:
            self.storage.fail(str(error))
            raise
        finally:
            self.waiting -= 1
