"""The serving of fl-server: recover, serve until told to stop, then drain."""

import asyncio
import gc
import json
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any

from fedring.daemon.checks import refuse_failed
from fedring.daemon.config import ConfigError, Loaded
from fedring.daemon.descriptors import raise_limit
from fedring.daemon.exits import Exit
from fedring.daemon.logs import log_always
from fedring.daemon.notify import sd_notify, watchdog
from fedring.daemon.tracing import set_up_tracing
from fedring.rpc.errors import Unavailable
from fedring.rpc.health import health_port
from fedring.rpc.leader_term import TellTerm, term_text
from fedring.server.config import ServerConfig
from fedring.server.guard.descriptors import check_descriptors, shares, wanted
from fedring.server.leading import beat, check_shared, lead, led_here, look_after_lead
from fedring.server.listening import listen
from fedring.server.operator.readiness import look_after_storage
from fedring.server.parts import Parts
from fedring.server.recovery import recover
from fedring.server.running.replacements import look_after_groups
from fedring.server.standby import stand_by
from fedring.server.state.failures import Deposed, FsyncFailed, StorageError
from fedring.server.state.lead import Lead
from fedring.server.state.log_check import migrated_at_start
from fedring.server.state.shared.leadership import DatabaseSession, beating
from fedring.version import SOFTWARE

log = logging.getLogger(__name__)


def _stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def serve(
    loaded: Loaded[ServerConfig],
    stack: ExitStack,
    *,
    check_only: bool,
    drop_damaged: bool = False,
    accept_older: bool = False,
    stop_event: Callable[[], asyncio.Event] = _stop_on_signals,
) -> int:
    """Serve until told to stop, then drain, and return the exit code.

    Args:
        loaded: The configuration.
        stack: Holds whatever must be released afterwards.
        check_only: Whether to return as soon as it could serve.
        drop_damaged: Whether to go on without models of which a file is damaged.
        accept_older: Whether to go on although the database has lost its newest facts.
        stop_event: Makes the event that ends the server.
    """
    config, named = loaded.config, _names_something(loaded.config)
    # Before the first start nobody waits for this server, and a wrong configuration leaves no state.
    if check_only or (named and not config.state_dir.exists()):
        _check_names(config)
        named = False
    origins = ", ".join(sorted(set(loaded.origins.values()))) or "defaults"
    where = f"clients at {config.listen}, flctl at {config.control_listen}, state in {config.state_dir}"
    log.info("fl-server of %s, %s, configuration from %s", SOFTWARE, where, origins)
    set_up_tracing("fl-server")
    limit = raise_limit(wanted(config).total)
    refuse_failed(check_descriptors(config, limit))
    session, stop = None, None
    if config.state_url and check_only:
        advice = await asyncio.to_thread(check_shared, config)
        print(*advice, "the configuration is good", sep="\n")
        return Exit.OK
    if check_only and (older := await asyncio.to_thread(_migrated, config)):
        print(f"the state of fedring {older} is migrated at the next start", "the configuration is good", sep="\n")
        return Exit.OK
    opening = stack.enter_context(ExitStack())
    if config.state_url:
        stop = stop_event()

        def stands_by(other: Lead) -> Coroutine[Any, Any, None]:
            return stand_by(config, other, shares(config, limit))

        def leads(session: DatabaseSession) -> None:
            # To open a large state takes longer than standbys wait, and than systemd does once this server was one.
            opening.enter_context(beating(session, lambda: sd_notify("WATCHDOG=1")))

        if (session := await lead(config, stop, stands_by, leads)) is None:
            return Exit.OK
    parts = await recover(
        config, stack, sweep=not check_only, drop_damaged=drop_damaged, accept_older=accept_older, session=session
    )
    parts.facts.lead = led_here(config, session) if session else None
    log_always(lambda: parts.rounds.newest.ids if parts.rounds.newest else {})
    metrics = parts.metrics
    metrics.rounds.expect(config.job.min_clients)
    term = term_text(session.term, parts.facts.store.run_id) if session else ""
    ports = await listen(config, parts, stack, shares(config, limit), [TellTerm(term)] if term else [])
    health, servers, pages, addresses = ports.health, ports.servers, ports.pages, ports.addresses
    if config.health_listen:
        server, addresses["health"] = health_port(config.health_listen, health)
        servers.append(server)
    if check_only:
        print(*parts.models.maker.offered.lines(), "the configuration is good", sep="\n")
        return Exit.OK

    async def drain(seconds: float) -> None:
        sd_notify("STOPPING=1\nSTATUS=draining")
        await health.stop()
        parts.journal.close()
        for session in parts.sessions:
            session.close(Unavailable("the server is stopping"))
        stops = [*(server.stop(seconds) for server in servers), *(page.stop(seconds) for page in pages)]
        await asyncio.gather(*stops)

    stop = stop or stop_event()  # before anybody learns that this server serves
    for server in servers:
        await server.start()
    # Callers are answered from here on: those of before a restart come back while what jobs need is still imported.
    if named:
        try:
            await parts.facts.heavy(_check_names, config)
        except ConfigError:
            await drain(0)
            raise
    await health.set(serving=True)
    where = f"serves clients at {addresses['listen']} and flctl at {addresses['control']}"
    log.info("%s", where, extra=addresses)
    sd_notify(f"STATUS={where}")
    print(json.dumps(addresses), flush=True)
    await asyncio.to_thread(opening.close)  # from here on, a server whose event loop stands still is silent
    others = [
        look_after_storage(parts.facts, parts.rounds, parts.journal, health),
        *ports.works(),
        *([beat(session, parts.facts), look_after_lead(session, parts.facts)] if session else []),
    ]
    return await _until_stopped(parts, others, stop=stop, drain=drain, drain_seconds=config.drain_seconds)


def _names_something(config: ServerConfig) -> bool:
    """Return whether the configuration names parts of jobs.

    They may be missing here. Without any, torch is not imported before the first job needs it.
    """
    return bool({"trusted", "init_path"} & config.model_fields_set or config.job.model_fields_set)


def _migrated(config: ServerConfig) -> str:
    try:
        return migrated_at_start(config.state_dir)
    except StorageError as error:
        raise ConfigError(f"state_dir {config.state_dir} cannot be used: {error}") from error


def _check_names(config: ServerConfig) -> None:
    from fedring.server.startup_checks import check  # imports torch: seconds

    check(config)


async def _until_stopped(
    parts: Parts,
    others: Sequence[Coroutine[Any, Any, None]],
    *,
    stop: asyncio.Event,
    drain: Callable[[float], Awaitable[None]],
    drain_seconds: float,
) -> int:
    """Serve until stopped, then drain, and return the exit code.

    It ends when `stop` is set, or when a part ends that must not.
    """
    sd_notify("READY=1")
    gc.freeze()  # these objects stay, so no collection need look at them again
    works = [
        parts.jobs.run(),
        parts.acceptor.run(),
        parts.journal.save(parts.facts.save_events),
        parts.keeper.run(),
        parts.sweep.run(),
        parts.facts.storage.until_distrusted(),
        look_after_groups(parts.rounds, parts.sessions, parts.facts),
        watchdog(),
        parts.metrics.measure_lag(),
        *others,
    ]
    code, disk_failed = Exit.OK, False
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in works]
            await stop.wait()
            log.info("stopping")
            await drain(drain_seconds)
            await parts.keeper.save_time()
            for task in running:
                task.cancel()
    except* FsyncFailed as group:
        # The kernel may have dropped pages. Only a restart can be trusted, since it reads the disk.
        log.critical("cannot go on: %s", group.exceptions[0])
        code, disk_failed = Exit.TRY_AGAIN if isinstance(group.exceptions[0], Deposed) else Exit.FAILED, True
    except* Exception as group:  # a fault, or a disk that is full: a restart recovers from what is stored
        log.critical("cannot go on: %s", group.exceptions[0], exc_info=group.exceptions[0])
        code = code or Exit.FAILED  # when the session with a database ends, calls in progress fail, too
    if code is not Exit.OK:
        await drain(0)
    if not disk_failed:
        await parts.facts.save_events(parts.journal.unsaved())
    return code
