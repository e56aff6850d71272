"""A server that waits to lead, and answers reads meanwhile.

For all else it names the leader. It reads the state that the leader writes, over a connection of its own that cannot
write. Its ports are those of a leader, with a gate before them, and its parts are those of a leader, in which nothing
runs: instead, the newest facts are read again and again.
"""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from grpc import aio

from fedring.daemon.config import ConfigError
from fedring.daemon.lock import StateLock
from fedring.rpc.errors import Standby
from fedring.server.config import ServerConfig
from fedring.server.guard.descriptors import Shares
from fedring.server.listening import Ports, listen
from fedring.server.model.models import Models
from fedring.server.operator.listings import MAX_ID, Listings
from fedring.server.parts import Parts, assemble
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageError, StorageFailed
from fedring.server.state.files import SHARED
from fedring.server.state.lead import Lead
from fedring.server.state.shared.leadership import open_reader
from fedring.server.state.sql.store import Store

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_READS = frozenset(
    f"/fedring.v1.{call}"
    for call in (
        *(f"ControlService/{name}" for name in ("GetStatus", "ListJobs", "ListRounds", "ListClients", "ListModels")),
        *("ControlService/GetPrivacy", "ControlService/WatchEvents", "TokenService/ListTokens"),
    )
)
"""The calls that a standby answers."""


async def stand_by(config: ServerConfig, lead: Lead, most: Shares) -> None:
    """Answer reads, until cancelled.

    A database that cannot be read for a while is waited for, as whoever is cancelling this does.

    Args:
        config: Of the server. Its port for health checks stays closed, by which a balancer may know the leader.
        lead: Who leads, kept up to date by the caller.
        most: How many connections each port takes.

    Raises:
        ConfigError: The state is another version's, or the folder is in use.
    """
    while True:
        try:
            return await _answer(config, lead, most)
        except StorageFailed as error:  # between its opening and the first look of `_follow`
            log.debug("answers nothing yet: %s", error)
        await asyncio.sleep(_LOOK_SECONDS)


async def _answer(config: ServerConfig, lead: Lead, most: Shares) -> None:
    quiet = config.model_copy(update={"audit_chain": False})
    with ExitStack() as stack:
        try:
            stack.enter_context(StateLock(config.state_dir))
        except OSError as error:
            raise ConfigError(f"state_dir {config.state_dir} cannot be used: {error}") from error
        parts = await _open(quiet, stack, lead)
        try:
            ports = await listen(quiet, parts, stack, most, last=[Gate(lead)])
        except ConfigError as error:  # as on one machine, where the leader has these addresses
            log.warning("answers nothing while it waits: %s", error)
            gc.collect()  # of what was bound already
            return
        await _serve(parts, ports, lead)


async def _open(config: ServerConfig, stack: ExitStack, lead: Lead) -> Parts:
    while True:
        if (store := await asyncio.to_thread(_open_store, config.state_url, lead)) is not None:
            break
        await asyncio.sleep(_LOOK_SECONDS)
    stack.callback(store.close)
    facts = Facts(store, FileBlobs(config.state_dir / SHARED, durable=False), threads=1)
    stack.callback(facts.close)
    facts.lead = lead
    models = Models(facts.blobs, facts.pool, config, store.run_id)
    return assemble(config, facts, models, Sessions(config.max_clients, config.lost_after_seconds))


def _open_store(url: str, lead: Lead) -> Store | None:
    """Return the facts that the leader writes.

    It is None if this program does not read them yet.
    """
    reader = open_reader(url)
    if reader is None:  # the first leader is about to make the tables
        return None
    try:
        return Store(reader)
    except StorageError as error:
        reader.dispose()
        if error.reason == "older_state":  # this server migrates it, once it leads
            log.debug("answers nothing while %s leads: %s", lead.leader, error)
            return None
        if isinstance(error, StorageFailed):
            raise
        if error.reason == "database":  # as when it is restarted at this moment
            raise StorageFailed("disk_error", str(error)) from error
        raise ConfigError(f"the shared state cannot be used: {error}") from error


async def _start(servers: Sequence[aio.Server]) -> None:
    for server in servers:
        await server.start()


async def _serve(parts: Parts, ports: Ports, lead: Lead) -> None:
    starting = asyncio.ensure_future(_start(ports.servers))
    try:
        await asyncio.shield(starting)
        await ports.health.set(serving=False, why=lead.why_waits)
        log.info("answers what can be read at %s", ports.addresses["control"], extra=ports.addresses)
        async with asyncio.TaskGroup() as tasks:
            for work in (*ports.works(), _follow(parts, ports, lead)):
                tasks.create_task(work)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        parts.journal.close()
        # A server that was not started keeps its port when it is stopped, and this one is about to lead.
        await asyncio.wait([starting])
        await asyncio.gather(*(server.stop(None) for server in ports.servers), *(page.stop(0) for page in ports.pages))


async def _follow(parts: Parts, ports: Ports, lead: Lead) -> NoReturn:
    """Read the newest facts again and again, and set the health.

    While the facts cannot be read, those that are known stay.
    """
    facts, begun, last = parts.facts, False, ""
    while True:
        fault = ""
        try:
            if not begun:
                parts.journal.begin(await facts.db(facts.store.events.last_id))
                begun = True
            await _read(parts, ports)
            facts.storage.mend()
        except StorageError as error:
            fault = str(error)
            if fault != last and not isinstance(error, StorageFailed):  # what passes is told by whoever tries to lead
                log.warning("the shared state cannot be read: %s", error)
        last = fault
        why = lead.why_waits if lead.fault or not fault else f"{lead.why_waits}; {fault}"
        await ports.health.set(serving=False, why=why)
        await asyncio.sleep(_LOOK_SECONDS)


async def _read(parts: Parts, ports: Ports) -> None:
    facts, store, rounds, jobs, journal = parts.facts, parts.facts.store, parts.rounds, parts.jobs, parts.journal
    rounds.latest = next(iter(await facts.db(store.models.newest, 1)), None)
    rounds.last = next(iter(await facts.db(store.rounds.newest, 1)), None)
    jobs.running = {row.job_id: row for row in await facts.db(store.jobs.running)}
    jobs.waiting = len(await facts.db(store.jobs.queued))
    for event in await Listings(facts).events(journal.last_id, MAX_ID):
        journal.repeat(event)
    await ports.security.tokens.load()


@dataclass(frozen=True, slots=True)
class Gate(aio.ServerInterceptor):
    """Lets only those calls pass that a standby answers.

    Attributes:
        lead: Who answers the others.
    """

    lead: Lead

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], handler_call_details: Any) -> Any:
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None or method in _READS or not method.startswith("/fedring."):
            return handler
        service = method.rpartition("/")[0].rpartition(".")[2]
        lead = self.lead

        async def refuse(request: Any, context: Any) -> None:
            where = lead.control if service in ("ControlService", "TokenService") else lead.leader
            raise Standby(where)

        return grpc.stream_stream_rpc_method_handler(refuse)
