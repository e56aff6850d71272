"""When a job ends because nothing gets better: the same answer at any time, from a bounded number of rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.rows import a_job, a_round

from fedring.server.jobs.patience import no_better
from fedring.server.state.rows import RoundRow
from fedring.server.state.sql.store import Store
from fedring.train.jobs.job import Job
from fedring.train.metrics import best_of

FIGURES = st.dictionaries(
    st.sampled_from(["eval/accuracy", "server/accuracy", "eval/loss"]), st.sampled_from([0.1, 0.2, 0.25, 0.4])
)
HISTORY = st.lists(st.none() | FIGURES, max_size=12)  # of each round, its figures; None = it was abandoned
SPECS = st.sampled_from(
    [{"patience": 2}, {"patience": 1, "min_delta": 0.1}, {"patience": 3, "best_by": "min eval/loss", "min_delta": 0.06}]
)


def spec(keys: dict[str, Any]) -> Job:
    return Job.model_validate({"rounds": 100, **keys})


def since_best(history: list[dict[str, float] | None], job: Job) -> int | None:
    """Return how many rounds have published since the best one, by all of them."""
    published = [figures for figures in history if figures is not None]
    place = best_of(published, job.best_by, min_delta=job.min_delta)
    return None if place is None else len(published) - 1 - place


@settings(max_examples=20)
@given(HISTORY, SPECS, st.data())
def test_the_answer_is_that_of_all_rounds_although_few_are_read(
    history: list[dict[str, float] | None], keys: dict[str, Any], data: st.DataObject
) -> None:
    """Also after restarts, rounds that a kill has left uncounted, and the removal of old rounds."""
    store, job, version = Store("sqlite://"), spec(keys), 0
    row = a_job(store, rounds=100)
    for number, figures in enumerate(history, 1):
        version += figures is not None
        made = a_round(store, row, ended=True)
        stats = {} if figures is None else {"metrics": figures}
        store.rounds.replace(replace(made, model_version=version if figures is not None else 0, stats=stats))
        if figures is None or data.draw(st.integers(0, 3)) == 0:
            continue  # abandoned; or the server was killed before it counted the round
        waits = since_best(history[:number], job)
        found = no_better(store.rounds, row.job_id, job)
        assert bool(found) == (waits is not None and waits >= job.patience)
        assert no_better(store.rounds, row.job_id, job) == found  # counting twice changes nothing
        store.prune(1, 1, 1, 1)
    store.close()


class CountingRounds:
    """A store of rounds that counts the rows it returns."""

    def __init__(self, store: Store) -> None:
        self._rounds, self.rows = store.rounds, 0

    def newest(self, *given: int) -> list[RoundRow]:
        found = self._rounds.newest(*given)
        self.rows += len(found)
        return found

    def replace(self, row: RoundRow) -> None:
        self._rounds.replace(row)


@pytest.mark.parametrize("keys", [{"patience": 200}, {"patience": 200, "min_delta": 0.1}])
def test_a_round_reads_two_rows_however_many_there_are(tmp_path: Path, keys: dict[str, Any]) -> None:
    store = Store(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    row, counting = a_job(store, rounds=100), CountingRounds(store)
    for version in range(1, 12):
        made = a_round(store, row, ended=True)
        store.rounds.replace(replace(made, model_version=version, stats={"metrics": {"eval/accuracy": version / 60}}))
        before = counting.rows
        assert no_better(counting, row.job_id, spec(keys)) == ""  # type: ignore[arg-type]  # it has what is called
        assert counting.rows - before <= 2
    store.close()
