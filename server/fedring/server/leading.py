"""The wait of a server until it leads, and its beats."""

import asyncio
import logging
import socket
from typing import NoReturn

from fedring.daemon.notify import sd_notify
from fedring.server.config import ServerConfig
from fedring.server.state.facts import Facts
from fedring.server.state.files import STATE_ID
from fedring.server.state.noise_secret import erase_noise_secrets
from fedring.server.state.shared.leadership import BEAT_SECONDS, DatabaseSession, Leader, attempt, open_session
from fedring.server.state.shared.replication import WITHOUT_STANDBY, is_synchronous

log = logging.getLogger(__name__)

_TRY_SECONDS = 0.5


async def lead(config: ServerConfig, stop: asyncio.Event) -> DatabaseSession | None:
    """Wait until this server leads.

    Args:
        config: Names the database.
        stop: Ends the wait.

    Returns:
        The session that leads; None if `stop` is set before.

    Raises:
        ConfigError: The database cannot be used.
        Deposed: It cannot be reached, or the session has ended.
    """
    session = await asyncio.to_thread(open_session, config.state_url)
    if not await asyncio.to_thread(is_synchronous, session.engine):
        log.warning(WITHOUT_STANDBY)
    name, known = f"{socket.gethostname()} ({config.listen})", ""
    while not stop.is_set():
        found = await asyncio.to_thread(attempt, session, name)
        if isinstance(found, DatabaseSession):
            log.info("leads in term %d", found.term, extra={"term": found.term})
            return found
        if isinstance(found, Leader) and found.name != known:
            known = found.name
            # The rounds that this server may have begun are the other one's now, and none goes on with their noise.
            erase_noise_secrets(config.state_dir)
            log.info("waits as a standby: %s leads", known)
            sd_notify(f"READY=1\nSTATUS=waits as a standby: {known} leads")
        sd_notify("WATCHDOG=1")
        try:
            await asyncio.wait_for(stop.wait(), _TRY_SECONDS)
        except TimeoutError:
            continue
    session.close()
    return None


def check_shared(config: ServerConfig) -> list[str]:
    """Check that the shared state can be reached, without leading.

    Returns:
        What could be better, as sentences.

    Raises:
        ConfigError: The database or the object store cannot be used.
        StorageFailed: The object store cannot be reached.
        Deposed: The database cannot be reached.
    """
    from fedring.server.state.shared.object_blobs import open_objects, read_object  # whose packages are an extra

    session = open_session(config.state_url)
    try:
        advice = [] if is_synchronous(session.engine) else [WITHOUT_STANDBY]
    finally:
        session.close()
    read_object(open_objects(config.blob_url), STATE_ID)
    return advice


async def beat(session: DatabaseSession) -> NoReturn:
    """Tell standbys again and again that this server is alive."""
    while True:
        await asyncio.to_thread(session.beat)
        await asyncio.sleep(BEAT_SECONDS)


async def look_after_lead(session: DatabaseSession, facts: Facts) -> NoReturn:
    """Notice that this server leads no more, also while nobody writes.

    Raises:
        Deposed: It does not.
    """
    while True:
        await facts.db(session.check)
        await asyncio.sleep(BEAT_SECONDS)
