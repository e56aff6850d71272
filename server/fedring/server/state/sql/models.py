"""The published models and their evaluations, in the database."""

from collections.abc import Sequence
from math import fsum

from sqlalchemy import delete, select

from fedring.daemon.crash import crashpoint
from fedring.server.state.ratings import best_of_each_job
from fedring.server.state.rows import ChargeRow, EvaluationRow, MetaRow, ModelRow, Pruned, RoundRow
from fedring.server.state.sql import sealed
from fedring.server.state.sql.blob_names import named_blobs
from fedring.server.state.sql.jobs import best_by, count_published
from fedring.server.state.sql.rounds import replace_round
from fedring.server.state.sql.sealed import rows_of
from fedring.server.state.sql.tables import evaluations, meta, models
from fedring.server.state.sql.transactions import Database
from fedring.train.metrics import combine

_DROPPED = "highest_dropped_model"


class ModelStore:
    """The models of a run."""

    def __init__(self, database: Database) -> None:
        self._database = database

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
        with self._database.transaction() as connection:
            sealed.add(connection, model)
            if charge is not None:
                sealed.add(connection, charge)
            if ended is not None:
                replace_round(connection, ended)
                count_published(connection, ended.job_id)
            crashpoint("before_publish_commit")
        crashpoint("after_publish_commit")

    def get(self, version: int) -> ModelRow | None:
        """Return a model; None if it is not kept."""
        return self._database.first(select(models).where(models.c.version == version), ModelRow)

    def newest(self, limit: int = 100, job_id: int = 0) -> list[ModelRow]:
        """Return the newest models, newest first.

        They are those of one job, unless `job_id` is 0.
        """
        query = select(models).order_by(models.c.version.desc()).limit(limit)
        return self._database.all(query.where(models.c.job_id == job_id) if job_id else query, ModelRow)

    def best_versions(self) -> set[int]:
        """Return the best version of each job that published models.

        The job's key best_by decides.
        """
        with self._database.transaction() as connection:
            return best_of_each_job(rows_of(connection, select(models), ModelRow), best_by(connection))

    def next_version(self) -> int:
        """Return the version of the next model.

        It is above all versions that a client can have seen.
        """
        with self._database.transaction() as connection:
            dropped = rows_of(connection, select(meta).where(meta.c.name == _DROPPED), MetaRow)
            newest = rows_of(connection, select(models).order_by(models.c.version.desc()).limit(1), ModelRow)
            return max([int(row.value) for row in dropped] + [row.version for row in newest], default=0) + 1

    def drop(self, versions: Sequence[int]) -> Pruned:
        """Remove models.

        Their versions are not used again, because clients may hold these models.
        """
        highest = self.next_version() - 1
        with self._database.transaction() as connection:
            before = named_blobs(connection)
            sealed.set_meta(connection, _DROPPED, str(highest))
            connection.execute(delete(evaluations).where(evaluations.c.version.in_(versions)))
            removed = connection.execute(delete(models).where(models.c.version.in_(versions))).rowcount
            return Pruned(removed, frozenset(before - named_blobs(connection)))


class EvaluationStore:
    """The evaluations of models."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, row: EvaluationRow) -> None:
        """Keep an evaluation.

        It replaces an earlier one of the same client and model.
        """
        same = (evaluations.c.version == row.version) & (evaluations.c.client_id == row.client_id)
        with self._database.transaction() as connection:
            connection.execute(delete(evaluations).where(same))
            sealed.add(connection, row)

    def of_model(self, version: int) -> list[EvaluationRow]:
        """Return all evaluations of a model.

        The server's comes first, then the clients' in client-id order.
        """
        query = select(evaluations).where(evaluations.c.version == version).order_by(evaluations.c.client_id)
        return self._database.all(query, EvaluationRow)

    def total(self, version: int) -> EvaluationRow | None:
        """Return the sum of the clients' evaluations, or None.

        None if there are none of this model.
        """
        rows = [row for row in self.of_model(version) if row.client_id]
        if not rows:
            return None
        correct, total, classified = (
            sum(getattr(row, name) for row in rows) for name in ("correct", "total", "classified")
        )
        metrics = combine((row.total, row.metrics) for row in rows)
        loss_sum = fsum(row.loss_sum for row in rows)
        return EvaluationRow(rows[0].round, version, "", correct, total, loss_sum, classified, metrics)
