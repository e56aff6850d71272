"""The facts of a run in a database that SQLAlchemy knows."""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Select, bindparam, delete, func, insert, select, union_all, update

from fedring.daemon.crash import crashpoint
from fedring.server.state.interfaces import Acceptance, Pruned
from fedring.server.state.ratings import best_of_each_job
from fedring.server.state.rows import (
    KEEP_EVENTS,
    ChargeRow,
    EvaluationRow,
    EventRow,
    JobRow,
    LastAccepted,
    MetaRow,
    ModelRow,
    RoundRow,
    SecureMessageRow,
    SecureRoundRow,
    TokenRow,
    UpdateRow,
)
from fedring.server.state.sql import known, sealed, secure_rows
from fedring.server.state.sql.database import (
    EPOCH,
    LOG_BYTES,
    SECRET,
    UNREADABLE,
    backup,
    epoch_in,
    meaning_of,
    next_epoch,
    open_database,
    shorten_log,
    translate,
)
from fedring.server.state.sql.pruning import STATES, remove_models, remove_updates_and_rounds
from fedring.server.state.sql.sealed import Row, rows_of
from fedring.server.state.sql.tables import (
    TABLE_OF,
    charges,
    evaluations,
    events,
    jobs,
    meta,
    models,
    rounds,
    tokens,
    updates,
)
from fedring.train.metrics import combine

Numbered = TypeVar("Numbered", JobRow, RoundRow)
_BLOB_COLUMNS = (updates.c.blob, models.c.blob, models.c.delta_blob, *STATES)
# Two conditions, because SQLite would read the whole table for pairs (round, client).
_KNOWN = select(updates.c.round).where(
    updates.c.round.in_(bindparam("rounds", expanding=True)),
    updates.c.client_id.in_(bindparam("clients", expanding=True)),
)
_DROPPED = "highest_dropped_model"


class SqlStore:
    """The server's Store, in an SQL database.

    Store documents each method.

    Args:
        url: the database: "sqlite:///path", or "sqlite://" for one in memory.
        keep_events: how many of the newest events are kept.
        log_bytes: how long SQLite's log may become.

    Raises:
        StoreError: "older_state" or "newer_state" if another version has written the database, "corrupt" if it is
            damaged.
    """

    def __init__(self, url: str, *, keep_events: int = KEEP_EVENTS, log_bytes: int = LOG_BYTES) -> None:
        self._engine = open_database(url, log_bytes=log_bytes)
        self._keep_events = keep_events
        with self._transaction() as connection:
            found = {row.name: row.value for row in rows_of(connection, select(meta), MetaRow)}
        self.run_id, self.secret = found["run_id"], found[SECRET]
        self.epoch = epoch_in(found)

    def set_state_id(self, state_id: str) -> None:
        """Keep the id that also lies beside the blobs.

        It may be called once for each database.
        """
        with self._transaction() as connection:
            sealed.add(connection, MetaRow("state_id", state_id))

    def close(self) -> None:
        self._engine.dispose()

    def backup(self, path: Path) -> None:
        """Copy the whole database to `path`, which must not exist."""
        backup(self._engine, path)

    def create_job(self, job: JobRow) -> JobRow:
        with self._transaction() as connection:
            if job.idempotency_key is not None:
                query = select(jobs).where(jobs.c.idempotency_key == job.idempotency_key)
                if found := rows_of(connection, query, JobRow):
                    return found[0]
            return _insert(connection, job, "job_id")

    def job_of_key(self, key: str) -> JobRow | None:
        return self._first(select(jobs).where(jobs.c.idempotency_key == key), JobRow)

    def begin_job(self, job: JobRow, version: int, after: tuple[int, int], first: ModelRow | None = None) -> None:
        with self._transaction() as connection:
            if first is not None:
                sealed.add(connection, first)
            values = {"start_version": version, "residual_epoch": after[0], "residual_after": after[1]}
            sealed.change(connection, JobRow, jobs.c.job_id == job.job_id, spec=job.spec, **values)
            crashpoint("before_begin_commit")
        crashpoint("after_begin_commit")

    def set_job_state(self, job_id: int, state: str, reason: str = "") -> None:
        with self._transaction() as connection:
            sealed.change(connection, JobRow, jobs.c.job_id == job_id, state=state, reason=reason)

    def job(self, job_id: int) -> JobRow | None:
        return self._first(select(jobs).where(jobs.c.job_id == job_id), JobRow)

    def jobs(self, limit: int = 100) -> list[JobRow]:
        return self._list(select(jobs).order_by(jobs.c.job_id.desc()).limit(limit), JobRow)

    def next_queued_job(self) -> JobRow | None:
        return self._first(select(jobs).where(jobs.c.state == "queued").order_by(jobs.c.job_id), JobRow)

    def running_job(self) -> JobRow | None:
        return self._first(select(jobs).where(jobs.c.state == "running").order_by(jobs.c.job_id), JobRow)

    def job_rounds_ended(self, job_id: int) -> int:
        ended = (rounds.c.job_id == job_id) & rounds.c.ended_at.is_not(None)
        last = self._first(select(rounds).where(ended).order_by(rounds.c.job_round.desc()), RoundRow)
        return last.job_round if last else 0

    def create_round(self, row: RoundRow) -> RoundRow:
        with self._transaction() as connection:
            return _insert(connection, row, "round")

    def update_round(self, row: RoundRow) -> None:
        with self._transaction() as connection:
            _replace_round(connection, row)

    def save_seconds_left(self, number: int, phase: str, seconds: float) -> None:
        this = (rounds.c.round == number) & (rounds.c.phase == phase)
        with self._transaction() as connection:
            sealed.change(connection, RoundRow, this, seconds_left=seconds)

    def round(self, number: int) -> RoundRow | None:
        return self._first(select(rounds).where(rounds.c.round == number), RoundRow)

    def rounds(self, limit: int = 100, job_id: int = 0, below: int = 0) -> list[RoundRow]:
        query = select(rounds).order_by(rounds.c.round.desc()).limit(limit)
        if below:
            query = query.where(rounds.c.round < below)
        return self._list(query.where(rounds.c.job_id == job_id) if job_id else query, RoundRow)

    def last_published(self, job_id: int) -> RoundRow | None:
        published = (rounds.c.job_id == job_id) & (rounds.c.model_version > 0)
        return self._first(select(rounds).where(published).order_by(rounds.c.round.desc()).limit(1), RoundRow)

    def open_round(self) -> RoundRow | None:
        query = select(rounds).where(rounds.c.ended_at.is_(None)).order_by(rounds.c.round.desc())
        return self._first(query, RoundRow)

    def end_orphans(self) -> None:
        running = select(jobs.c.job_id).where(jobs.c.state == "running")
        orphans = rounds.c.ended_at.is_(None) & rounds.c.job_id.not_in(running.scalar_subquery())
        with self._transaction() as connection:
            ended = {"phase": "abandoned", "reason": "job_ended", "ended_at": time.time()}
            sealed.change(connection, RoundRow, orphans, **ended)
            secure_rows.forget_ended(connection)

    def accept_updates(self, rows: Sequence[UpdateRow]) -> list[Acceptance]:
        if not rows:
            return []
        with self._transaction() as connection:
            keys = [(row.round, row.client_id) for row in rows]
            numbers, names_of = map(sorted, map(set, zip(*keys, strict=True)))
            mine = {"rounds": numbers, "clients": names_of}
            accepted: list[UpdateRow] = []
            if connection.execute(_KNOWN, mine).first():  # There is hardly ever one, and whole rows take longer.
                accepted = rows_of(connection, _KNOWN.with_only_columns(*updates.c), UpdateRow, mine)
            names = {(row.round, row.client_id): row.name for row in accepted}
            outcome, new = [], []
            for key, row in zip(keys, rows, strict=True):
                if key not in names:
                    names[key] = row.name
                    new.append(row)
                    outcome.append(Acceptance.NEW)
                else:
                    outcome.append(Acceptance.ALREADY if names[key] == row.name else Acceptance.OTHER)
            if new:
                sealed.add(connection, *new)
            crashpoint("before_row_commit")
        crashpoint("after_row_commit")
        return outcome

    def accepted_name(self, number: int, client_id: str) -> str:
        with self._transaction() as connection:
            return known.accepted_name(connection, number, client_id)

    def last_accepted(self) -> dict[str, LastAccepted]:
        with self._transaction() as connection:
            return known.last_accepted(connection)

    def forget_client(self, client_id: str) -> Pruned:
        with self._transaction() as connection:
            before = _named(connection)
            removed = known.forget(connection, client_id)
            return Pruned(removed, frozenset(before - _named(connection)))

    def updates_of(self, number: int) -> list[UpdateRow]:
        return self._list(select(updates).where(updates.c.round == number).order_by(updates.c.client_id), UpdateRow)

    def update_counts(self) -> dict[str, int]:
        with self._transaction() as connection:
            return known.update_counts(connection)

    def publish(self, model: ModelRow, ended: RoundRow | None = None, charge: ChargeRow | None = None) -> None:
        with self._transaction() as connection:
            sealed.add(connection, model)
            if charge is not None:
                sealed.add(connection, charge)
            if ended is not None:
                _replace_round(connection, ended)
                (job,) = rows_of(connection, select(jobs).where(jobs.c.job_id == ended.job_id), JobRow)
                sealed.put(connection, replace(job, rounds_done=job.rounds_done + 1))
            crashpoint("before_publish_commit")
        crashpoint("after_publish_commit")

    def add_secure_message(self, row: SecureMessageRow) -> Acceptance:
        with self._transaction() as connection:
            outcome = secure_rows.add_message(connection, row)
            crashpoint(f"before_secure_{row.kind}_commit")
        crashpoint(f"after_secure_{row.kind}_commit")
        return outcome

    def save_secure_round(self, row: SecureRoundRow, step: str, charge: ChargeRow | None = None) -> None:
        with self._transaction() as connection:
            secure_rows.save_decisions(connection, row)
            if charge is not None and not connection.execute(select(charges).filter_by(round=charge.round)).first():
                sealed.add(connection, charge)
            crashpoint(f"before_secure_{step}_commit")
        crashpoint(f"after_secure_{step}_commit")

    def secure_round(self, number: int) -> tuple[SecureRoundRow | None, list[SecureMessageRow]]:
        with self._transaction() as connection:
            return secure_rows.decisions_of(connection, number), secure_rows.messages_of(connection, number)

    def charges(self) -> list[ChargeRow]:
        return self._list(select(charges).order_by(charges.c.round), ChargeRow)

    def model(self, version: int) -> ModelRow | None:
        return self._first(select(models).where(models.c.version == version), ModelRow)

    def models(self, limit: int = 100, job_id: int = 0) -> list[ModelRow]:
        query = select(models).order_by(models.c.version.desc()).limit(limit)
        return self._list(query.where(models.c.job_id == job_id) if job_id else query, ModelRow)

    def best_versions(self) -> set[int]:
        with self._transaction() as connection:
            return best_of_each_job(rows_of(connection, select(models), ModelRow), _rules(connection))

    def save_evaluation(self, row: RoundRow) -> None:
        published = models.c.version == row.model_version
        with self._transaction() as connection:
            _replace_round(connection, row)
            sealed.change(connection, ModelRow, published, metrics=row.stats.get("metrics", {}))

    def add_evaluation(self, row: EvaluationRow) -> None:
        same = (evaluations.c.version == row.version) & (evaluations.c.client_id == row.client_id)
        with self._transaction() as connection:
            connection.execute(delete(evaluations).where(same))
            sealed.add(connection, row)

    def evaluations(self, version: int) -> list[EvaluationRow]:
        query = select(evaluations).where(evaluations.c.version == version).order_by(evaluations.c.client_id)
        return self._list(query, EvaluationRow)

    def evaluation_sum(self, version: int) -> EvaluationRow | None:
        rows = [row for row in self.evaluations(version) if row.client_id]
        if not rows:
            return None
        correct, total, classified = (
            sum(getattr(row, name) for row in rows) for name in ("correct", "total", "classified")
        )
        metrics = combine((row.total, row.metrics) for row in rows)
        loss_sum = fsum(row.loss_sum for row in rows)
        return EvaluationRow(rows[0].round, version, "", correct, total, loss_sum, classified, metrics)

    def append_events(self, rows: Sequence[EventRow]) -> None:
        if rows:
            with self._transaction() as connection:
                sealed.add(connection, *rows)
                newest = select(events.c.id).order_by(events.c.id.desc())
                first_of_old = newest.offset(self._keep_events).limit(1).scalar_subquery()
                connection.execute(delete(events).where(events.c.id <= first_of_old))

    def events_after(self, event_id: int, limit: int = 1000) -> list[EventRow]:
        return self._list(select(events).where(events.c.id > event_id).order_by(events.c.id).limit(limit), EventRow)

    def last_events(self, limit: int) -> list[EventRow]:
        return self._list(select(events).order_by(events.c.id.desc()).limit(limit), EventRow)[::-1]

    def last_event_id(self) -> int:
        with self._transaction() as connection:
            return connection.execute(select(func.max(events.c.id))).scalar() or 0

    def add_token(self, row: TokenRow) -> None:
        with self._transaction() as connection:
            sealed.add(connection, row)

    def tokens(self) -> list[TokenRow]:
        return self._list(select(tokens).order_by(tokens.c.created_at, tokens.c.token_id), TokenRow)

    def revoke_token(self, token_id: str, at: float) -> None:
        mine = (tokens.c.token_id == token_id) & tokens.c.revoked_at.is_(None)
        with self._transaction() as connection:
            sealed.change(connection, TokenRow, mine, revoked_at=at)

    def drop_updates(self, number: int, clients: Sequence[str]) -> Pruned:
        with self._transaction() as connection:
            before = _named(connection)
            theirs = (updates.c.round == number) & updates.c.client_id.in_(clients)
            removed = connection.execute(delete(updates).where(theirs)).rowcount
            return Pruned(removed, frozenset(before - _named(connection)))

    def next_version(self) -> int:
        with self._transaction() as connection:
            dropped = rows_of(connection, select(meta).where(meta.c.name == _DROPPED), MetaRow)
            newest = rows_of(connection, select(models).order_by(models.c.version.desc()).limit(1), ModelRow)
            return max([int(row.value) for row in dropped] + [row.version for row in newest], default=0) + 1

    def drop_models(self, versions: Sequence[int]) -> Pruned:
        highest = self.next_version() - 1
        with self._transaction() as connection:
            before = _named(connection)
            _set_meta(connection, _DROPPED, str(highest))
            connection.execute(delete(evaluations).where(evaluations.c.version.in_(versions)))
            removed = connection.execute(delete(models).where(models.c.version.in_(versions))).rowcount
            return Pruned(removed, frozenset(before - _named(connection)))

    def prune(self, keep_models: int, keep_update_rounds: int, keep_rounds: int, keep_jobs: int = 0) -> Pruned:
        with self._transaction() as connection:
            before = _named(connection)
            removed = remove_updates_and_rounds(connection, keep_update_rounds, keep_rounds)
            rows = rows_of(connection, select(models), ModelRow)
            removed += remove_models(connection, rows, _rules(connection), newest=keep_models, jobs_kept=keep_jobs)
            return Pruned(removed, frozenset(before - _named(connection)))

    def begin_epoch(self) -> None:
        with self._transaction() as connection:
            epoch = next_epoch({EPOCH: str(self.epoch)})
            _set_meta(connection, EPOCH, str(epoch))
        self.epoch = epoch

    def shorten_log(self) -> None:
        try:
            shorten_log(self._engine)
        except sqlite3.Error as error:
            raise meaning_of(error) from error

    def log_bytes(self) -> int:
        try:
            return Path(f"{self._engine.url.database}-wal").stat().st_size
        except OSError:  # there is none yet, or the database is in memory
            return 0

    def named_blobs(self) -> set[str]:
        with self._transaction() as connection:
            return _named(connection)

    def probe(self) -> None:
        with self._transaction() as connection:
            connection.execute(update(meta).values(value=meta.c.value))

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except UNREADABLE as error:
            raise translate(error) from error

    def _list(self, query: Select[Any], kind: type[Row]) -> list[Row]:
        with self._transaction() as connection:
            return rows_of(connection, query, kind)

    def _first(self, query: Select[Any], kind: type[Row]) -> Row | None:
        return next(iter(self._list(query.limit(1), kind)), None)


def _set_meta(connection: Connection, name: str, value: str) -> None:
    connection.execute(delete(meta).where(meta.c.name == name))
    sealed.add(connection, MetaRow(name, value))


def _insert(connection: Connection, row: Numbered, key: str) -> Numbered:
    values = sealed.values_of(row)
    del values[key]
    (given,) = connection.execute(insert(TABLE_OF[type(row)]), values).inserted_primary_key or (0,)
    changes: dict[str, Any] = {key: given}
    numbered = replace(row, **changes)
    sealed.put(connection, numbered)  # The digest covers the number, which the database has just chosen.
    return numbered


def _replace_round(connection: Connection, row: RoundRow) -> None:
    sealed.put(connection, row)
    if row.ended_at is not None:
        secure_rows.forget_ended(connection)


def _rules(connection: Connection) -> dict[int, str]:
    """Return the key best_by of each job with a model."""
    query = select(jobs).where(jobs.c.job_id.in_(select(models.c.job_id)))
    return {job.job_id: str(job.spec.get("best_by", "")) for job in rows_of(connection, query, JobRow)}


def _named(connection: Connection) -> set[str]:
    query = union_all(*(select(column).where(column != "") for column in _BLOB_COLUMNS))
    return set(connection.execute(query).scalars())
