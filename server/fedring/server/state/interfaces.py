"""The interface of a store of facts.

`fedring.server.state.sql.store.SqlStore` implements it. The suite in tests/unit/server/state/test_store.py checks that
an implementation keeps these promises.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from fedring.server.state.rows import (
    ChargeRow,
    EvaluationRow,
    EventRow,
    JobRow,
    LastAccepted,
    ModelRow,
    RoundRow,
    TokenRow,
    UpdateRow,
)

Kept = TypeVar("Kept")


class RoundBound(Protocol):
    """A row that belongs to a round."""

    @property
    def round(self) -> int:
        """The number of the round."""
        ...


class Acceptance(StrEnum):
    """The outcome of an offered update."""

    NEW = "accepted"
    ALREADY = "already_accepted"  # the same update was accepted before
    OTHER = "already_accepted_other"  # refused: another update of the client was accepted for the round


@dataclass(frozen=True, slots=True)
class Pruned:
    """The removed part of a store."""

    rows: int
    blobs: frozenset[str]  # the names of the blobs that no row names any more


class JobStore(Protocol):
    """The jobs."""

    def create(self, job: JobRow) -> JobRow:
        """Add a job, and return it with its new id.

        If there is one with its idempotency key, that one is returned.
        """
        ...

    def of_key(self, key: str) -> JobRow | None:
        """Return the job with this idempotency key; None if there is none."""
        ...

    def begin(self, job: JobRow, version: int, after: tuple[int, int], first: ModelRow | None = None) -> None:
        """Note a job's specification and its start, in one transaction.

        Args:
            job: The job.
            version: The version that it starts from.
            after: The epoch and the number of the round before its line of models.
            first: The row of that version, if it is new.
        """
        ...

    def set_state(self, job_id: int, state: str, reason: str = "") -> None:
        """Change the state of a job, and the reason for it."""
        ...

    def get(self, job_id: int) -> JobRow | None:
        """Return a job; None if there is none with that id."""
        ...

    def newest(self, limit: int = 100) -> list[JobRow]:
        """Return the newest jobs, newest first."""
        ...

    def next_queued(self) -> JobRow | None:
        """Return the oldest job that is queued."""
        ...

    def running(self) -> JobRow | None:
        """Return the job that is running, or was when the server stopped."""
        ...


class RoundStore(Protocol):
    """The rounds of all jobs, and their charges."""

    def create(self, row: RoundRow) -> RoundRow:
        """Add a round, and return it with its new number.

        The number is above the numbers of all rounds there ever were.
        """
        ...

    def replace(self, row: RoundRow) -> None:
        """Replace the row of a round.

        What its kind has kept of it (`KeptStore`) goes with its end.

        Raises:
            StoreError: "corrupt", if there is no such round.
        """
        ...

    def save_seconds_left(self, number: int, phase: str, seconds: float) -> None:
        """Note how long a round may stay in its phase.

        Nothing changes if the round is in another phase by now.
        """
        ...

    def get(self, number: int) -> RoundRow | None:
        """Return a round; None if it is not kept."""
        ...

    def newest(self, limit: int = 100, job_id: int = 0, below: int = 0) -> list[RoundRow]:
        """Return the newest rounds, newest first.

        `job_id` and `below`, a number, select some unless they are 0.
        """
        ...

    def ended_of(self, job_id: int) -> int:
        """Return the number of a job's ended rounds.

        They were published or abandoned. Pruned ones count, too.
        """
        ...

    def last_published(self, job_id: int) -> RoundRow | None:
        """Return a job's newest round with a published model, or None."""
        ...

    def newest_open(self) -> RoundRow | None:
        """Return the newest round that has not ended.

        A restarted server continues there.
        """
        ...

    def end_orphans(self) -> None:
        """Abandon the open rounds of jobs that are not running.

        The reason is "job_ended".
        """
        ...

    def save_evaluation(self, row: RoundRow) -> None:
        """Replace an evaluated round's row, and keep its metrics.

        The metrics are kept with the model.
        """
        ...

    def charges(self) -> list[ChargeRow]:
        """Return the charges of rounds with differential privacy.

        The oldest is first. None is ever pruned.
        """
        ...


class UpdateStore(Protocol):
    """The accepted updates of rounds."""

    def accept(self, rows: Sequence[UpdateRow]) -> list[Acceptance]:
        """Accept updates, all in one transaction.

        Of a client, only the first update for a round is accepted, also within `rows`.

        Returns:
            The outcome of each, in order.

        Raises:
            StorageError: "database", if there is no such round; then none of the updates was accepted.
        """
        ...

    def accepted_name(self, number: int, client_id: str) -> str:
        """Return the name of a client's accepted update in a round.

        Of pruned updates, only the newest is known.
        """
        ...

    def last_accepted(self) -> dict[str, LastAccepted]:
        """Return each client's newest accepted update, kept or pruned, by client id."""
        ...

    def of_round(self, number: int) -> list[UpdateRow]:
        """Return a round's accepted updates in client-id order."""
        ...

    def counts(self) -> dict[str, int]:
        """Return the number of accepted updates of each client id.

        Kept and pruned updates count.
        """
        ...

    def drop(self, number: int, clients: Sequence[str]) -> Pruned:
        """Remove clients' updates of a round.

        It is as if they had never been accepted.
        """
        ...

    def forget_client(self, client_id: str) -> Pruned:
        """Remove a client's evaluations and its updates of ended rounds.

        Its pruned updates are forgotten, too.
        """
        ...


class KeptStore(Protocol):
    """Rows that a kind of round keeps while its round is open.

    They go with the end of the round. `fedring.server.state.sql.schema` lists the kinds of rows.
    """

    def add(self, row: RoundBound, commit: str) -> Acceptance:
        """Keep a row, unless there is one with its key.

        Args:
            row: the row.
            commit: names the commit for fault tests.

        Raises:
            StorageError: "database", if there is no such round.
        """
        ...

    def put(self, row: RoundBound, commit: str, charge: ChargeRow | None = None) -> None:
        """Keep a row in place of the one with its key.

        Args:
            row: the row.
            commit: names the commit for fault tests.
            charge: what the round costs, if the row lets anybody see a sum. A round is charged only once.
        """
        ...

    def of_round(self, kind: type[Kept], number: int) -> list[Kept]:
        """Return a round's rows of one kind, ordered by their keys."""
        ...


class ModelStore(Protocol):
    """The published models."""

    def publish(self, model: ModelRow, ended: RoundRow | None = None, charge: ChargeRow | None = None) -> None:
        """Add the newest model, and end the round that made it.

        The model's blobs are sealed. The round is counted in its job.

        Args:
            model: the model.
            ended: the round's row as it is after its end; None for a model that no round made.
            charge: what the round costs, if its job has differential privacy.

        Raises:
            StorageError: "database", if there is a model of that version.
        """
        ...

    def get(self, version: int) -> ModelRow | None:
        """Return a model; None if it is not kept."""
        ...

    def newest(self, limit: int = 100, job_id: int = 0) -> list[ModelRow]:
        """Return the newest models, newest first.

        They are those of one job, unless `job_id` is 0.
        """
        ...

    def best_versions(self) -> set[int]:
        """Return the best version of each job that published models.

        The job's key best_by decides.
        """
        ...

    def next_version(self) -> int:
        """Return the version of the next model.

        It is above all versions that a client can have seen.
        """
        ...

    def drop(self, versions: Sequence[int]) -> Pruned:
        """Remove models.

        Their versions are not used again, because clients may hold these models.
        """
        ...


class EvaluationStore(Protocol):
    """The evaluations of models."""

    def add(self, row: EvaluationRow) -> None:
        """Keep an evaluation.

        It replaces an earlier one of the same client and model.
        """
        ...

    def of_model(self, version: int) -> list[EvaluationRow]:
        """Return all evaluations of a model.

        The server's comes first, then the clients' in client-id order.
        """
        ...

    def total(self, version: int) -> EvaluationRow | None:
        """Return the sum of the clients' evaluations, or None.

        None if there are none of this model.
        """
        ...


class EventStore(Protocol):
    """The newest events."""

    def append(self, rows: Sequence[EventRow]) -> None:
        """Add events, and remove the oldest above KEEP_EVENTS.

        Their ids are above all before.
        """
        ...

    def after(self, event_id: int, limit: int = 1000) -> list[EventRow]:
        """Return the events with greater ids, oldest first."""
        ...

    def newest(self, limit: int) -> list[EventRow]:
        """Return the newest events, oldest first."""
        ...

    def last_id(self) -> int:
        """Return the id of the newest event; 0 if there is none."""
        ...


class TokenStore(Protocol):
    """The tokens of clients and operators."""

    def add(self, row: TokenRow) -> None:
        """Add a token."""
        ...

    def all(self) -> list[TokenRow]:
        """Return all tokens, oldest first."""
        ...

    def revoke(self, token_id: str, at: float) -> None:
        """Note when a token was revoked.

        A token that was revoked before keeps its time.
        """
        ...


class Store(Protocol):
    """The facts of a run, in stores of one concern each.

    Each method of a store is one transaction over all of them. When a method that changes something returns, the change
    is durable; when it raises, nothing was changed. All methods are called from one thread. A row must not name a blob
    that has not been sealed.

    Every method raises StorageFailed if the disk is full or failed, FsyncFailed if a sync failed, and another
    StorageError if the database is damaged ("corrupt") or does not allow the change ("database").

    Attributes:
        run_id: the id of the run, which was drawn when the database was created.
        secret: a random text that is drawn once, too, and that no client may learn.
        epoch: of the rounds: 0 until the state is restored from a backup, and greater after each restore.
    """

    run_id: str
    secret: str
    epoch: int

    jobs: JobStore
    rounds: RoundStore
    updates: UpdateStore
    kept: KeptStore
    models: ModelStore
    evaluations: EvaluationStore
    events: EventStore
    tokens: TokenStore

    def prune(self, keep_models: int, keep_update_rounds: int, keep_rounds: int, keep_jobs: int = 0) -> Pruned:
        """Remove old rows.

        Open rounds, their updates and the models that jobs start from always stay. Of each client, the number of its
        updates and the newest one's name stay known. Of all models but the newest, and those that `keep_jobs` keeps,
        the residual and the optimizer's state are released.

        Args:
            keep_models: how many of the newest models stay, at least one.
            keep_update_rounds: of how many of the newest ended rounds the updates stay.
            keep_rounds: how many of the newest ended rounds stay, at least `keep_update_rounds`.
            keep_jobs: of how many of the newest jobs the newest and the best model stay.
        """
        ...

    def begin_epoch(self) -> None:
        """Count rounds in a new epoch from now on.

        The newest facts were lost.
        """
        ...

    def shorten_log(self) -> None:
        """Shorten the store's files beside the facts themselves.

        This is called when a round has ended.
        """
        ...

    def log_bytes(self) -> int:
        """Return how much that is now, in bytes; called from any thread."""
        ...

    def named_blobs(self) -> set[str]:
        """Return the names of all blobs that a row names."""
        ...

    def probe(self) -> None:
        """Write something durably without changing anything.

        This raises if the store cannot be written to.
        """
        ...

    def close(self) -> None:
        """Release the database. No other method may be called afterwards."""
        ...
