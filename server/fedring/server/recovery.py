"""Recovery of a server's parts from the state folder.

They go on where the last process ended.
"""

import errno
import logging
from collections.abc import Collection, Iterable
from contextlib import ExitStack

from fedring.daemon.config import ConfigError
from fedring.daemon.lock import StateLock
from fedring.server.config import ServerConfig
from fedring.server.model.models import Models
from fedring.server.parts import Parts, assemble
from fedring.server.round.events import Phase
from fedring.server.sessions.crowd import PaceSteering
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageError, StorageFailed
from fedring.server.state.identity import open_state
from fedring.server.state.log_check import older
from fedring.server.state.rows import RoundRow
from fedring.server.state.shared.leadership import DatabaseSession
from fedring.server.state.shared.replication import may_have_lost_commits, note_timeline

log = logging.getLogger(__name__)

_ALL = 1_000_000_000
_LATER = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors that are no fault of the configuration: another start may go well."""

_FAILED_OVER = (
    "the database has failed over without a synchronous standby, or was put back: updates that were accepted before "
    "may be lost, so rounds are counted in a new epoch"
)


async def recover(
    config: ServerConfig,
    stack: ExitStack,
    *,
    sweep: bool,
    drop_damaged: bool = False,
    accept_older: bool = False,
    session: DatabaseSession | None = None,
) -> Parts:
    """Open the state folder for this process alone, and recover its parts.

    Nobody else may use the folder until `stack` is closed.

    Args:
        config: names the folder.
        stack: receives the resources to close in the end.
        sweep: put aside the files that nothing names, never before the newest model was found to be there, and end the
            rounds of jobs that do not run; without it, this is only a look.
        drop_damaged: forget models of which a file is damaged, instead of refusing to start without the newest.
        accept_older: go on, in a new epoch, if the database has lost commits, instead of refusing to start.
        session: with the database of a shared state, in which this server leads; None = the state is in the folder.

    Raises:
        ConfigError: if the folder cannot be used, is in use, holds parts of two states, or has lost commits.
        DamagedModel: if the newest model is missing or cut short.
        StorageFailed: if the disk fails.
    """
    try:
        stack.enter_context(StateLock(config.state_dir))
        facts = _open(config, session, adopt=sweep, accept_older=accept_older)
    except StorageFailed:
        raise
    except (OSError, StorageError) as error:
        if isinstance(error, OSError) and error.errno in _LATER:
            raise StorageFailed("disk_error" if error.errno == errno.EIO else "disk_full", str(error)) from error
        place = f"state_dir {config.state_dir}" if session is None else "the shared state"
        raise ConfigError(f"{place} cannot be used: {error}") from error
    # The stack closes it even when a later step fails.
    stack.callback(facts.close)
    store, blobs = facts.store, facts.blobs
    models = Models(blobs, facts.pool, config, store.run_id)
    pace = PaceSteering(config.max_connected, stay=config.idle_seconds)
    sessions = Sessions(config.max_clients, config.lost_after_seconds, pace)
    parts = assemble(config, facts, models, sessions)
    if drop_damaged:
        await _drop_damaged(parts)
    failed_over = session is not None and await facts.db(may_have_lost_commits, session.engine)
    if failed_over and sweep:
        await facts.db(store.begin_epoch)
    await _find_lost_models(parts, config, accept=accept_older or failed_over)
    open_rounds = await reload(parts, end_orphans=sweep)
    if failed_over:
        parts.journal.write("database_failed_over", _FAILED_OVER)
    if session and sweep:
        await facts.db(note_timeline, session.engine)  # only now: another start would else not begin an epoch
    # Files are put aside only now: the check for lost models reads those that nothing names.
    if sweep:
        resumable = _resumable(facts, open_rounds)
        if swept := await facts.db(blobs.sweep, await facts.db(store.named_blobs), resumable):
            log.info("put aside %d files that nothing names", swept)
        await facts.db(blobs.forget_unnamed, config.unnamed_seconds)
    return parts


def _open(config: ServerConfig, session: DatabaseSession | None, *, adopt: bool, accept_older: bool) -> Facts:
    if session is None:
        files = open_state(
            config.state_dir, adopt=adopt, accept_older=accept_older, log_bytes=config.database_log_bytes
        )
        return Facts(*files, threads=config.threads)
    from fedring.server.state.shared.opening import open_shared  # whose packages are an extra

    return Facts(*open_shared(config.state_dir, config.blob_url, session, adopt=adopt), threads=config.threads)


async def reload(parts: Parts, *, end_orphans: bool = True) -> Collection[int]:
    """Load the newest models, the last round and the interrupted ones.

    Returns:
        The numbers of the rounds that a restart interrupted.

    Raises:
        DamagedModel: if the newest model is missing or cut short.
    """
    facts, store, rounds = parts.facts, parts.facts.store, parts.rounds
    rows = await facts.db(store.models.newest, _ALL)
    rounds.latest = await facts.heavy(parts.models.versions.recover, rows)
    parts.journal.begin(await facts.db(store.events.last_id))
    if end_orphans:
        await facts.db(store.rounds.end_orphans)
    interrupted = await facts.db(store.rounds.unended)
    newest = await facts.db(store.rounds.newest, len(interrupted) + 1)
    rounds.last = next((row for row in newest if row.ended_at is not None), None)
    if end_orphans:
        await parts.privacy.forget(interrupted)
    # A round that is open comes last: clients have commands of it, too, and it is not one that has ended.
    rounds.interrupted.set([*await _commanded(facts), *interrupted])
    return rounds.interrupted.rows.keys()


async def _commanded(facts: Facts) -> Iterable[RoundRow]:
    """Return the ended rounds whose commands clients may still work on.

    They wait for their jobs to go on, as interrupted rounds do.
    """
    clients: dict[tuple[int, int], list[str]] = {}
    for row in await facts.db(facts.store.commands.of_running_jobs):
        clients.setdefault((row.round, row.job_id), []).append(row.client_id)
    return [
        RoundRow(number, job_id, 0, Phase.PUBLISHED, 0.0, selected=tuple(names), ended_at=0.0)
        for (number, job_id), names in clients.items()
    ]


async def _find_lost_models(parts: Parts, config: ServerConfig, *, accept: bool) -> None:
    """Look for models of rounds that the database does not know.

    The row of a round comes before its model, so such a model shows that commits were lost.

    Raises:
        StorageError: "lost_commits", if there is one; with `accept`, a new epoch begins instead.
    """
    facts, store = parts.facts, parts.facts.store
    newest = max((row.round for row in await facts.db(store.rounds.newest, 1)), default=0)
    unnamed = await facts.db(facts.blobs.unnamed, await facts.db(store.named_blobs))
    made = [(await facts.heavy(parts.models.versions.round_of, name, store.run_id), name) for name in unnamed]
    number, name = max(made, default=(0, ""))
    if number > newest:
        error = older(config.state_dir, f"blobs/{name} is a model of round {number}, which the database does not know")
        if not accept:
            raise error
        log.warning("goes on all the same: %s", error)
        await facts.db(store.begin_epoch)


async def _drop_damaged(parts: Parts) -> None:
    facts = parts.facts
    rows = await facts.db(facts.store.models.newest, _ALL)
    if damaged := [row.version for row in await facts.heavy(parts.models.versions.damaged, rows)]:
        await facts.db(facts.drop_models, damaged)
        log.warning("dropped damaged models: %s", ", ".join(map(str, sorted(damaged))))


def _resumable(facts: Facts, numbers: Collection[int]) -> list[str]:
    """Return the partial uploads that the interrupted rounds may go on with."""
    prefixes = tuple(f"{number}-" for number in numbers)
    return [name for name in facts.blobs.partials() if name.startswith(prefixes)]
