"""The end of a job that gets no better.

Whether a job ends depends on all of its rounds. Each round that was published notes, in its row, which of the rounds
until then are the best ones. So the next round reads only the row before it, and a restarted server, or one that has
removed old rounds, comes to the same answer.
"""

from collections.abc import Iterator
from dataclasses import replace

from fedring.daemon.wording import counted
from fedring.server.state.rows import RoundRow
from fedring.server.state.sql.rounds import RoundStore
from fedring.train.jobs.job import Job
from fedring.train.metrics import Leaders, Metrics, lead, leader_of

_LEADERS, _COUNT, _VERSIONS = "leaders", "published", "leading_versions"
_CHUNK = 32  # rounds that are read at once


def no_better(rounds: RoundStore, job_id: int, spec: Job) -> str:
    """Count a job's newest round, and return why the job ends.

    It ends early after `patience` published models that are not better by more than `min_delta`.

    Args:
        rounds: of the run.
        job_id: of the job, which has published a model.
        spec: the job.

    Returns:
        The reason; empty if the job goes on.
    """
    newest: RoundRow | None = None
    waiting: list[tuple[int, Metrics]] = []  # rounds that are not counted: the newest, and those before a kill
    leaders: Leaders = {}
    count, versions = 0, dict[int, int]()  # rounds of the job that have published, and what the leading ones did
    for row in _published(rounds, job_id):
        newest = newest or row
        if _LEADERS in row.stats:
            leaders = {str(name): (int(place), float(value)) for name, (place, value) in row.stats[_LEADERS].items()}
            count = int(row.stats[_COUNT])
            versions = {int(place): int(version) for place, version in row.stats[_VERSIONS].items()}
            break
        waiting.append((row.model_version, row.stats.get("metrics", {})))
    if newest is None:
        return ""
    for version, metrics in reversed(waiting):
        # Counted by the job's own rounds: other jobs publish versions meanwhile.
        count += 1
        versions[count] = version
        leaders = lead(leaders, count, metrics, spec.best_by, min_delta=spec.min_delta)
    if waiting:
        leading = {str(place): versions[place] for place in sorted({place for place, _ in leaders.values()})}
        stats = {**newest.stats, _LEADERS: leaders, _COUNT: count, _VERSIONS: leading}
        rounds.replace(replace(newest, stats=stats))
    best = leader_of(leaders, spec.best_by)
    if best is None or (since := count - best.place) < spec.patience:
        return ""
    result = f"version {versions[best.place]} ({best.name} {best.value:.6g})"
    more = f" by more than {spec.min_delta:g}" if spec.min_delta else ""
    return f"it ended early: {result} was not surpassed{more} for {counted(since, 'round')}"


def _published(rounds: RoundStore, job_id: int) -> Iterator[RoundRow]:
    """Yield a job's rounds with a published model, newest first."""
    below, size = 0, 2  # as a rule, the round before the newest one is counted
    while chunk := rounds.newest(size, job_id, below):
        yield from (row for row in chunk if row.model_version)
        below, size = chunk[-1].round, _CHUNK
