"""Which of several models is the best, and which versions are kept: functions of rows, without a database."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from fedring.server.state.rows import ModelRow


def rating_in(stats: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return accuracy and mean loss of a round's model: the clients', or else the server's; None = not evaluated."""
    if total := stats.get("total"):
        classified = stats.get("classified", total)
        accuracy = stats["correct"] / classified if classified else None  # not defined, as for a language model
        return _finite(accuracy), _finite(stats["loss_sum"] / total)
    return _finite(stats.get("server_accuracy")), _finite(stats.get("server_loss"))


def best_of(models: Iterable[ModelRow]) -> ModelRow | None:
    """Return the model with the highest accuracy, or with the lowest loss if none has an accuracy.

    Of several that are equally good it is the oldest. None = there is no result at all.
    """
    rows = sorted(models, key=lambda row: row.version)
    if with_accuracy := [row for row in rows if row.accuracy is not None]:
        return max(with_accuracy, key=lambda row: row.accuracy or 0.0)
    with_loss = [row for row in rows if row.loss is not None]
    return min(with_loss, key=lambda row: row.loss or 0.0, default=None)


def result_of(model: ModelRow) -> str:
    """Return the result of a model's evaluation in words, or an empty text."""
    if model.accuracy is not None:
        return f"accuracy {model.accuracy:.4f}"
    return f"loss {model.loss:.4f}" if model.loss is not None else ""


def best_of_each_job(models: Iterable[ModelRow]) -> set[int]:
    """Return the versions that are the best of the job that published them."""
    rows = list(models)
    best = (best_of(row for row in rows if row.job_id == job_id) for job_id in {row.job_id for row in rows} - {0})
    return {row.version for row in best if row is not None}


def versions_to_keep(
    models: Sequence[ModelRow], *, newest: int, jobs: int, bases: Collection[int]
) -> tuple[set[int], set[int]]:
    """Return which versions are kept, and which of these also keep what only the next aggregation reads.

    Args:
        models: All models.
        newest: How many of the newest models are kept, at least one.
        jobs: Of how many of the last jobs that published a model the newest and the best one are kept.
        bases: Versions that are in use, or will be.
    """
    rows = sorted(models, key=lambda row: -row.version)
    kept = {row.version for row in rows[: max(newest, 1)]}
    complete = {row.version for row in rows[:1]}
    for job_id in sorted({row.job_id for row in rows if row.job_id}, reverse=True)[:jobs]:
        mine = [row for row in rows if row.job_id == job_id]
        complete |= {mine[0].version, (best_of(mine) or mine[0]).version}
    present = {row.version for row in rows}
    return (kept | complete | set(bases)) & present, complete


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
