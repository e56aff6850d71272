"""The choice of the best model, and of the versions to keep.

These are functions of rows, without a database.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from fedring.server.state.rows import ModelRow
from fedring.train import metrics


def best_of(models: Iterable[ModelRow], rule: str, *, min_delta: float = 0.0) -> ModelRow | None:
    """Return the best model by a job's key best_by, or None.

    fedring.train.metrics.best_of decides. None if there is none.
    """
    rows = sorted(models, key=lambda row: row.version)
    place = metrics.best_of([row.metrics for row in rows], rule, min_delta=min_delta)
    return None if place is None else rows[place]


def best_of_each_job(models: Iterable[ModelRow], rules: Mapping[int, str]) -> set[int]:
    """Return the best version of each job that published models.

    Args:
        models: All models.
        rules: The key best_by of each job, by its id.
    """
    rows = list(models)
    jobs = {row.job_id for row in rows} - {0}
    best = (best_of((row for row in rows if row.job_id == job_id), rules.get(job_id, "")) for job_id in jobs)
    return {row.version for row in best if row is not None}


def versions_to_keep(
    models: Sequence[ModelRow], rules: Mapping[int, str], *, newest: int, jobs: int, bases: Collection[int]
) -> tuple[set[int], set[int]]:
    """Return the versions to keep, and those to keep completely.

    Complete ones also keep what only the next aggregation reads.

    Args:
        models: All models.
        rules: The key best_by of each job, by its id.
        newest: How many of the newest models are kept, at least one.
        jobs: Of how many of the last jobs that published a model the newest and the best one are kept.
        bases: Versions that are in use, or will be. They keep everything.
    """
    rows = sorted(models, key=lambda row: -row.version)
    kept = {row.version for row in rows[: max(newest, 1)]}
    complete = {row.version for row in rows[:1]}
    for job_id in sorted({row.job_id for row in rows if row.job_id}, reverse=True)[:jobs]:
        mine = [row for row in rows if row.job_id == job_id]
        complete |= {mine[0].version, (best_of(mine, rules.get(job_id, "")) or mine[0]).version}
    present = {row.version for row in rows}
    complete |= set(bases) & present
    return kept | complete, complete
