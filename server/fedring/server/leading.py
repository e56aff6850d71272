"""The wait of a server until it leads, and its beats."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, NoReturn

from fedring.daemon.config import ConfigError
from fedring.daemon.notify import sd_notify
from fedring.rpc.address import ANY_HOST
from fedring.server.config import ServerConfig
from fedring.server.state.facts import Facts
from fedring.server.state.failures import Deposed, StorageFailed
from fedring.server.state.lead import Lead
from fedring.server.state.noise_secret import erase_noise_secrets
from fedring.server.state.shared.leadership import (
    BEAT_SECONDS,
    DatabaseSession,
    Leader,
    attempt,
    check_role,
    open_session,
    wait_beside,
)
from fedring.server.state.shared.replication import WITHOUT_STANDBY, is_synchronous

log = logging.getLogger(__name__)

_TRY_SECONDS = 0.5


async def lead(
    config: ServerConfig,
    stop: asyncio.Event,
    meanwhile: Callable[[Lead], Coroutine[Any, Any, None]],
    begun: Callable[[DatabaseSession], object] = lambda session: None,
) -> DatabaseSession | None:
    """Wait until this server leads.

    Args:
        config: Names the database.
        stop: Ends the wait.
        meanwhile: Makes the work of a server that waits, of who leads now. It is cancelled when this one leads.
        begun: Called with the session that leads, before that work has ended: this may take longer than others wait.

    Returns:
        The session that leads; None if `stop` is set before.

    Raises:
        ConfigError: The database or the object store cannot be used.
        StorageError: The two belong to different states, or to another version.
        Deposed: It cannot be reached, or the session has ended.
    """
    session = await asyncio.to_thread(open_session, config.state_url)
    try:
        for advice in await asyncio.to_thread(_check_both, config, session):
            log.warning(advice)
    except StorageFailed as error:  # it may work again when this server leads, which looks again
        log.warning("the shared state cannot be checked now: %s", error)
    except BaseException:
        session.close()
        raise
    try:
        async with asyncio.TaskGroup() as tasks:
            waiting: asyncio.Task[None] | None = None
            async for other in _wait(config, session, stop):
                if isinstance(other, DatabaseSession):
                    session = other
                    begun(session)
                else:
                    waiting = waiting or tasks.create_task(meanwhile(other))
            if waiting:
                waiting.cancel()
    except ExceptionGroup as group:
        session.close()
        raise group.exceptions[0] from None
    if session.term:
        log.info("leads in term %d", session.term, extra={"term": session.term})
        return session
    session.close()
    return None


async def _wait(
    config: ServerConfig, session: DatabaseSession, stop: asyncio.Event
) -> AsyncIterator[Lead | DatabaseSession]:
    """Try again and again to lead.

    A database that fails is waited for: a session that does not lead has nothing to lose.

    Yields:
        Who leads, always the same object, after each attempt; at last the session that leads.

    Raises:
        ConfigError: Another server has the same name.
    """
    (name, control), heard = addresses_of(config), (0, 0.0)
    lead = Lead(here=False, leader="")
    while not stop.is_set():
        try:
            found = await asyncio.to_thread(_look, session, name, control)
        except (Deposed, StorageFailed) as error:
            found = None
            _tell(lead, f"the database cannot be used now: {getattr(error, 'why', error)}")
        else:
            _tell(lead, "")
        if isinstance(found, DatabaseSession):
            yield found
            return
        if isinstance(found, Leader):
            if found.name == name:  # it may be this server's own session of before, which does not beat any more
                if heard[0] == found.pid and heard[1] != found.beat:
                    raise ConfigError(f"another server that is called {name} leads: give each a name of its own (name)")
                heard = found.pid, found.beat
            if found.name != lead.leader:
                # The rounds that this server may have begun are the other one's now, and none goes on with their noise.
                erase_noise_secrets(config.state_dir)
                log.info("waits as a standby: %s leads", found.name)
                lead.leader = found.name
                sd_notify(f"READY=1\nSTATUS={lead.why_waits}")
            lead.control, lead.term, lead.since = found.control, found.term, found.since
            yield lead
        sd_notify("WATCHDOG=1")
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _TRY_SECONDS)


def _look(session: DatabaseSession, name: str, control: str) -> DatabaseSession | Leader | None:
    """Try to lead, or else tell the leader that this server waits."""
    found = attempt(session, name, control)
    if isinstance(found, Leader) and found.name != name:
        wait_beside(session, name)
    return found


def _tell(lead: Lead, fault: str) -> None:
    """Tell of a failure of the database when it begins and ends."""
    if fault and not lead.fault:
        log.warning("goes on waiting: %s", fault)
    elif lead.fault and not fault:
        log.info("the database can be used again")
    if bool(fault) != bool(lead.fault):
        lead.fault = fault
        sd_notify(f"STATUS={lead.why_waits}")


def check_shared(config: ServerConfig) -> list[str]:
    """Check that the shared state can be reached, without leading.

    Returns:
        What could be better, as sentences.

    Raises:
        ConfigError: The database or the object store cannot be used.
        StorageError: The two belong to different states, or to another version.
        StorageFailed: The object store cannot be reached, or the database is held by somebody else.
        Deposed: The database cannot be reached.
    """
    session = open_session(config.state_url)
    try:
        return _check_both(config, session)
    finally:
        session.close()


def _check_both(config: ServerConfig, session: DatabaseSession) -> list[str]:
    """Check the needs of a leader, before anything is written."""
    from fedring.server.state.shared.object_blobs import check_writable, open_objects  # whose packages are an extra
    from fedring.server.state.shared.opening import check_same_state

    check_role(session)
    advice = [] if is_synchronous(session.engine) else [WITHOUT_STANDBY]
    objects = open_objects(config.blob_url)
    check_same_state(session, objects)
    check_writable(objects, config.blob_url)
    return advice


def addresses_of(config: ServerConfig) -> tuple[str, str]:
    """Return the addresses at which clients and operators reach this server.

    The first one is its name.
    """
    return _reachable(config.listen, config.name), _reachable(config.control_listen, config.name)


def _reachable(listen: str, name: str) -> str:
    host, _, port = listen.rpartition(":")
    if listen.startswith("unix:"):
        return listen
    return f"{name or (socket.gethostname() if host in ANY_HOST else host)}:{port}"


def led_here(config: ServerConfig, session: DatabaseSession) -> Lead:
    """Return the lead of this server."""
    return Lead(True, *addresses_of(config), session.term, session.since)


async def beat(session: DatabaseSession, facts: Facts) -> NoReturn:
    """Tell standbys again and again that this server is alive."""
    while True:
        standbys = await asyncio.to_thread(session.beat)
        if facts.lead and standbys is not None:
            facts.lead.standbys = standbys
        await asyncio.sleep(BEAT_SECONDS)


async def look_after_lead(session: DatabaseSession, facts: Facts) -> NoReturn:
    """Notice that this server leads no more, also while nobody writes.

    Raises:
        Deposed: It does not.
    """
    while True:
        with suppress(StorageFailed):  # somebody else holds the database: the next look will do
            await facts.db(session.check)
        await asyncio.sleep(BEAT_SECONDS)
