"""Removal of rows older than the configuration keeps."""

from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement, Connection, and_, bindparam, delete, or_, select

from fedring.server.state.ratings import versions_to_keep
from fedring.server.state.rows import JobRow, ModelRow
from fedring.server.state.sql import sealed
from fedring.server.state.sql.blob_names import STATES
from fedring.server.state.sql.tables import COUNTED, PUBLISHED, commands, evaluations, jobs, models, rounds, updates
from fedring.server.state.sql.updates import abandoned_since_a_model, forget_answered, remember
from fedring.train.jobs.start import version_of

# To write such a query down takes longer than to answer it, and it is asked for each job once a second.
_LAST_ROUND = [
    select(rounds.c.round).where(rounds.c.job_id == bindparam("job"), which).order_by(rounds.c.round.desc()).limit(1)
    for which in (COUNTED, PUBLISHED)
]


def remove_updates_and_rounds(connection: Connection, keep_update_rounds: int, keep_rounds: int) -> int:
    """Remove old updates and rounds, and return the rows' number.

    The newest ended rounds keep their updates.
    """
    ended = select(rounds.c.round).where(rounds.c.ended_at.is_not(None))
    running = connection.execute(select(jobs.c.job_id).where(jobs.c.state == "running")).scalars().all()
    # Of each job that runs, since a client may ask what became of its update.
    keep_update_rounds *= max(1, len(running))
    kept_rounds = ended.order_by(rounds.c.round.desc()).limit(keep_update_rounds)
    held = rounds.c.round.in_(select(updates.c.buffer))  # only few rounds still hold updates
    old: ColumnElement[bool] = updates.c.buffer.in_(
        ended.where(held, rounds.c.round.not_in(kept_rounds.scalar_subquery()))
    )
    # Transforms may ask for these when they make the job's next model. Only jobs with such rounds are read in full.
    given_up = select(rounds.c.job_id).where(held, rounds.c.ended_at.is_not(None), rounds.c.model_version == 0)
    rows = sealed.rows_of(
        connection, select(jobs).where(jobs.c.job_id.in_(running), jobs.c.job_id.in_(given_up)), JobRow
    )
    asked = [abandoned_since_a_model(row.job_id) for row in rows if row.spec.get("transforms")]
    old = and_(old, *(updates.c.buffer.not_in(each) for each in asked))
    remember(connection, old)
    forget_answered(connection, old)
    removed = connection.execute(delete(updates).where(old)).rowcount
    oldest = ended.order_by(rounds.c.round.desc()).offset(max(keep_rounds, keep_update_rounds) - 1).limit(1)
    too_old = (rounds.c.round < oldest.scalar_subquery()) & rounds.c.ended_at.is_not(None)
    # An update may answer the command of a much older round, or may still come.
    too_old &= rounds.c.round.not_in(select(updates.c.round)) & rounds.c.round.not_in(select(commands.c.round))
    too_old &= rounds.c.round.not_in(_last_rounds(connection, running))
    return removed + connection.execute(delete(rounds).where(too_old)).rowcount


def _last_rounds(connection: Connection, running: Sequence[int]) -> set[int]:
    """Return the rounds that say how far the jobs are that run.

    They are the last one of each that has ended, and the last one that has published: other jobs may have had many
    rounds since.
    """
    found: set[int] = set()
    for job_id in running:
        for query in _LAST_ROUND:
            found.update(connection.execute(query, {"job": job_id}).scalars())
    return found


def remove_models(
    connection: Connection, rows: Sequence[ModelRow], rules: Mapping[int, str], *, newest: int, jobs_kept: int
) -> int:
    """Remove models, with their evaluations and aggregation state.

    The state that only the next aggregation would read goes from older models, too.

    Args:
        connection: a transaction.
        rows: all models.
        rules: the key best_by of each job, by its id.
        newest: how many of the newest models are kept.
        jobs_kept: of how many of the last jobs that published a model the newest and the best one are kept.

    Returns:
        How many models were removed.
    """
    begun = select(rounds.c.base_version).where(rounds.c.ended_at.is_(None))
    bases = connection.execute(begun.union(select(commands.c.base_version))).scalars()
    waiting = jobs.c.state.in_(("queued", "running")) & (jobs.c.rounds_done == 0)
    starts = sealed.rows_of(connection, select(jobs).where(waiting), JobRow)
    wanted = {job.start_version or version_of(str(job.spec.get("start", ""))) for job in starts}
    running = set(connection.execute(select(jobs.c.job_id).where(jobs.c.state == "running")).scalars())
    newest_of = {row.job_id: row.version for row in sorted(rows, key=lambda row: row.version)}
    wanted |= {version for job_id, version in newest_of.items() if job_id in running}
    kept, complete = versions_to_keep(rows, rules, newest=newest, jobs=jobs_kept, bases=wanted.union(bases))
    removed = connection.execute(delete(models).where(models.c.version.not_in(kept))).rowcount
    connection.execute(delete(evaluations).where(evaluations.c.version.not_in(kept)))
    stale = models.c.version.not_in(complete) & or_(*(column != "" for column in STATES))
    sealed.change(connection, ModelRow, stale, control_digest="", **{column.name: "" for column in STATES})
    return removed
