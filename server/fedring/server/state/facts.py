"""Store and blobs for the event loop.

Each kind of work runs in the threads that may do it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn, ParamSpec, TypeVar

from fedring.job_code import job_code
from fedring.server.state.blob_interfaces import Blobs, Partial
from fedring.server.state.blobs import MemoryPartial
from fedring.server.state.failures import FsyncFailed, StorageError, StorageFailed
from fedring.server.state.lead import Lead
from fedring.server.state.rows import Acceptance, EventRow, LastAccepted, ModelRow, Pruned, UpdateRow
from fedring.server.state.sql.store import Store

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Storage:
    """Whether the state folder can be written to.

    It belongs to one event loop. It works until something could not be kept. Then it fails until a trial has succeeded.

    Attributes:
        fault: why it fails; empty while it works.
        since: when it began to fail, monotonic seconds.
        works: set while it works.
        fails: set while it fails.
    """

    def __init__(self) -> None:
        self.fault = ""
        self.since = 0.0
        self.works, self.fails = asyncio.Event(), asyncio.Event()
        self.works.set()
        self._distrusted, self._lost = asyncio.Event(), FsyncFailed()

    def fail(self, why: str) -> None:
        """Note that something could not be kept."""
        if not self.fault:
            self.since = time.monotonic()
        self.fault = why
        self.works.clear()
        self.fails.set()

    def mend(self) -> None:
        """Note that a trial has succeeded."""
        self.fault = ""
        self.fails.clear()
        self.works.set()

    def distrust(self, error: FsyncFailed) -> None:
        """Note that a sync has failed."""
        self._lost = error
        self._distrusted.set()

    async def until_distrusted(self) -> NoReturn:
        """Raise FsyncFailed when a sync has failed.

        Only the acceptor and the jobs end the daemon by their own errors. A call of a client or an operator does not.
        """
        await self._distrusted.wait()
        raise self._lost

    async def works_or(self, event: asyncio.Event) -> None:
        """Return when the storage works, or when `event` is set."""
        waits = [asyncio.ensure_future(each.wait()) for each in (self.works, event)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


class Facts:
    """The state of a server, and the threads that work with it.

    `db` runs in the store's only thread, `heavy` in a thread of its own, `work` in a small pool. Within a `lane`,
    `heavy` has another thread: so the code of one job, which may take for ever, keeps no other waiting. Methods without
    `async` run in one of those threads. The storage is noted to fail if any of them raises StorageFailed, and to be
    distrusted after FsyncFailed.

    Attributes:
        store: the rows.
        blobs: the files.
        storage: whether the two can be written to.
        pool: the threads of `work`.
        waiting: pieces of work that threads are doing, or that wait for a thread.
        commit_seconds: how long the newest commit of updates took.
        lead: which server leads, of those that share the state; None = nobody shares it.
        last_accepted: each client's newest accepted update, in memory, so that clients can join while the disk is slow.
    """

    def __init__(self, store: Store, blobs: Blobs, *, threads: int) -> None:
        self.store, self.blobs = store, blobs
        self.lead: Lead | None = None
        self.storage = Storage()
        self.waiting = 0
        self.commit_seconds = 0.0
        self.last_accepted = store.updates.last_accepted()
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="work")
        self._db = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._heavy: ContextVar[Executor] = ContextVar("heavy")
        self._lanes = [ThreadPoolExecutor(1, thread_name_prefix="heavy")]
        self._made, self._making = 0, set[int]()  # the highest version that was made here, and those in the making

    async def db(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function`, a transaction, in the store's thread.

        Returns:
            Its result.
        """
        return await self._run(self._db, lambda: function(*args, **kwargs))

    async def heavy(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function`, which may take seconds and use the pool.

        Returns:
            Its result.
        """
        return await self._run(self._heavy.get(self._lanes[0]), lambda: function(*args, **kwargs))

    @contextmanager
    def lane(self) -> Iterator[None]:
        """Give `heavy` a thread of its own within, for the caller's task."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="heavy")
        self._lanes.append(pool)
        token = self._heavy.set(pool)
        try:
            yield
        finally:
            self._heavy.reset(token)
            self._lanes.remove(pool)
            pool.shutdown(wait=False)

    @asynccontextmanager
    async def new_version(self) -> AsyncIterator[int]:
        """Provide the version of a model that is made and published within.

        Several may be in the making, each with a version of its own. One that fails leaves its version to the next.
        """
        if not self._made:  # what the store has then is never above what was made here since
            self._made = await self.db(self.store.models.next_version) - 1
        version = max(self._made, *self._making, 0) + 1
        self._making.add(version)
        try:
            yield version
            self._made = max(self._made, version)
        finally:
            self._making.discard(version)

    async def work(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function`, one computation or file access, in the pool.

        Returns:
            Its result.
        """
        return await self._run(self.pool, lambda: function(*args, **kwargs))

    async def keep(self, attempt: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `attempt` when the storage works, again after each failure.

        Returns:
            Its result.
        """
        while True:
            await self.storage.works.wait()
            try:
                return await attempt(*args, **kwargs)
            except StorageFailed as error:
                self.storage.fail(str(error))  # so that the next attempt waits

    async def probe(self, size: int) -> None:
        """Return if `size` more bytes and a transaction can be kept.

        Raises:
            StorageFailed: if not.
        """
        await self.work(self.blobs.probe, size)
        await self.db(self.store.probe)

    def commit_updates(self, batch: Sequence[tuple[Partial, UpdateRow]]) -> list[Acceptance]:
        """Seal the updates' files, then commit all rows in one transaction.

        Args:
            batch: each update's payload and row. A MemoryPartial is not sealed, because its payload lies in the row.
        """
        began = time.monotonic()
        self.blobs.seal_many([partial for partial, _ in batch if not isinstance(partial, MemoryPartial)])
        outcomes = self.store.updates.accept([row for _, row in batch])
        self.commit_seconds = time.monotonic() - began
        for (_, row), outcome in zip(batch, outcomes, strict=True):
            if outcome is Acceptance.NEW:
                new = LastAccepted(row.epoch, row.round, row.name)
                self.last_accepted[row.client_id] = max(self.last_accepted.get(row.client_id, new), new)
        return outcomes

    def prune(self, keep_models: int, keep_update_rounds: int, keep_rounds: int, keep_jobs: int) -> bool:
        """Remove old rows as Store.prune does, with their blobs.

        Rows and blobs are removed in one call of `db`, so that nothing is sealed in between.

        Returns:
            Whether there was anything.
        """
        return self._delete(self.store.prune(keep_models, keep_update_rounds, keep_rounds, keep_jobs))

    def drop_updates(self, number: int, clients: Sequence[str]) -> None:
        """Remove the clients' accepted updates of a round, with their blobs."""
        self._delete(self.store.updates.drop(number, clients))
        self.last_accepted = self.store.updates.last_accepted()

    def forget_client(self, client_id: str) -> int:
        """Remove a client as UpdateStore.forget_client does, with its blobs.

        Returns:
            The number of its accepted updates that are gone, kept and pruned.
        """
        count = self.store.updates.counts()[client_id]
        self._delete(self.store.updates.forget_client(client_id))
        self.last_accepted = self.store.updates.last_accepted()
        return count - self.store.updates.counts()[client_id]

    def discard(self, digests: Sequence[str]) -> None:
        """Remove just sealed blobs that no row names.

        Empty names are ignored.
        """
        for digest in set(filter(None, digests)) - self.store.named_blobs():
            self.blobs.delete(digest)

    def commit_model(self, model: ModelRow, commit: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Commit the row of a model that was just made.

        What is removed with another job's rows may have the same content. Nothing is removed during a call of `db`.

        Args:
            model: The row.
            commit: A transaction that adds it.

        Raises:
            StorageFailed: One of the blobs was removed. Nothing was changed.
        """
        if gone := [digest for digest in model.files if not self.blobs.has(digest)]:
            raise StorageFailed("disk_error", f"{gone[0]} was removed with the rows of another model: it is made anew")
        commit(*args, **kwargs)

    def drop_models(self, versions: Sequence[int]) -> None:
        """Remove models with their blobs."""
        self._delete(self.store.models.drop(versions))

    async def save_events(self, rows: list[EventRow]) -> None:
        """Keep events. If that fails, a line in the log says so."""
        try:
            await self.db(self.store.events.append, rows)
        except StorageError as error:
            log.error("%d events were not stored: %s", len(rows), error)

    def close(self) -> None:
        """End the threads, then release the store and the blobs."""
        for pool in (*self._lanes, self.pool, self._db):
            pool.shutdown()
        self.store.close()
        self.blobs.close()

    def _delete(self, pruned: Pruned) -> bool:
        for digest in pruned.blobs:
            self.blobs.delete(digest)
        return bool(pruned.rows or pruned.blobs)

    async def _run(self, executor: Executor, function: Callable[[], T]) -> T:
        outcome = _Outcome[T](loop=asyncio.get_running_loop())
        executor.submit(outcome.call, job_code()(function))
        self.waiting += 1
        try:
            return await outcome
        finally:
            if outcome.done():
                self._note(outcome.exception())  # also if the caller has been cancelled, and will never know
            self.waiting -= 1

    def _note(self, error: BaseException | None) -> None:
        if isinstance(error, StorageFailed):
            self.storage.fail(str(error))
        elif isinstance(error, FsyncFailed):
            self.storage.distrust(error)


class _Outcome(asyncio.Future[T]):
    """The outcome of a function that a thread calls.

    Whoever awaits it is only cancelled when the function has ended, because that may use what the caller is about to
    close. It takes two steps of the event loop, where `run_in_executor` within `shield` takes five.
    """

    def call(self, function: Callable[[], T]) -> None:
        """Call the function, in a thread."""
        settle: Callable[[], None]
        try:
            settle = partial(self.set_result, function())
        except StopIteration as error:  # which no future takes: whoever awaits it would wait for ever
            settle = partial(self.set_exception, RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:  # noqa: BLE001  # all errors are the caller's
            settle = partial(self.set_exception, error)
        self.get_loop().call_soon_threadsafe(settle)

    def cancel(self, msg: Any = None) -> bool:
        """Refuse: the caller's task learns of it at the end."""
        return False
