"""Which model is the best, and which versions are kept."""

from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.unit.rows import a_model

from fedring.server.state.ratings import best_of, best_of_each_job, versions_to_keep
from fedring.server.state.rows import ModelRow
from fedring.train.jobs.job import Job
from fedring.train.jobs.start import is_path, spelled, version_of

Figures = dict[str, float]


def rated(*figures: tuple[int, Figures]) -> list[ModelRow]:
    """Return versions 1, 2, ... with these jobs and named figures."""
    return [
        replace(a_model(version), job_id=job, metrics=metrics)
        for version, (job, metrics) in enumerate(figures, start=1)
    ]


def accuracies(*values: float | None) -> list[ModelRow]:
    """Return versions 1, 2, ... of job 1 with these accuracies."""
    return rated(*((1, {} if value is None else {"eval/accuracy": value}) for value in values))


PERPLEXITIES = rated((1, {"eval/accuracy": 0.9, "eval/perplexity": 4.0}), (1, {"eval/perplexity": 2.0}), (1, {}))


@pytest.mark.parametrize(
    ("models", "rule", "best"),
    [
        ([], "", None),
        (accuracies(None), "", None),
        (accuracies(0.5, 0.7, 0.6), "", 2),
        (accuracies(0.7, 0.7), "", 1),  # the oldest of equals
        (accuracies(0.0, None), "", 1),
        (rated((1, {"eval/accuracy": 0.7, "eval/loss": 9.0}), (1, {"eval/accuracy": 0.5, "eval/loss": 0.1})), "", 1),
        (rated((1, {"eval/loss": 0.1}), (1, {"eval/accuracy": 0.2, "eval/loss": 5.0})), "", 2),
        (rated((1, {"eval/loss": 3.0}), (1, {"eval/loss": 2.0})), "", 2),  # accuracy is not defined
        (rated((1, {"server/accuracy": 0.3}), (1, {"server/accuracy": 0.2, "eval/loss": 1.0})), "", 1),
        (PERPLEXITIES, "", 1),
        (PERPLEXITIES, "min eval/perplexity", 2),  # a round without the metric is never the best
        (PERPLEXITIES, "max eval/perplexity", 1),
        (PERPLEXITIES, "max eval/f1", None),  # accuracy does not stand in for a metric that the job names
        (accuracies(nan, 0.1, inf), "", 2),
        (accuracies(nan), "", None),
    ],
)
def test_the_best_model_is_chosen_by_its_jobs_rule(models: list[ModelRow], rule: str, best: int | None) -> None:
    for order in (models, models[::-1]):
        found = best_of(order, rule)
        assert (found.version if found else None) == best


@pytest.mark.parametrize(("min_delta", "best"), [(0.0, 4), (0.06, 3), (0.15, 3), (0.5, 1)])
def test_a_model_is_better_only_by_more_than_min_delta(min_delta: float, best: int) -> None:
    found = best_of(accuracies(0.1, 0.2, 0.3, 0.35), "", min_delta=min_delta)
    assert found is not None
    assert found.version == best


def test_each_job_has_a_best_model_by_a_rule_of_its_own() -> None:
    figures = [(1, 0.9), (1, 0.5), (2, 0.3), (2, 0.2), (0, 0.99)]
    models = [*rated(*((job, {"eval/accuracy": value}) for job, value in figures)), replace(a_model(6), job_id=3)]
    assert best_of_each_job(models, {2: "min eval/accuracy"}) == {1, 4}


RATINGS = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.dictionaries(st.sampled_from(["eval/accuracy", "eval/f1"]), st.sampled_from([0.1, 0.5, 0.9])),
    ),
    max_size=12,
)
JOB_RULES = st.dictionaries(st.integers(1, 4), st.sampled_from(["", "max eval/f1", "min eval/accuracy"]))


@given(RATINGS, JOB_RULES, st.integers(0, 5), st.integers(0, 3), st.sets(st.integers(1, 14), max_size=2))
def test_the_newest_versions_the_newest_and_the_best_of_each_late_job_and_what_is_used_are_kept(
    ratings: list[tuple[int, Figures]], rules: dict[int, str], newest: int, jobs: int, bases: set[int]
) -> None:
    models = rated(*ratings)
    kept, complete = versions_to_keep(models, rules, newest=newest, jobs=jobs, bases=bases)
    present = {row.version for row in models}
    assert kept <= present
    assert set(sorted(present)[-max(newest, 1) :]) | bases & present <= kept
    late = sorted({row.job_id for row in models} - {0})[::-1][:jobs]
    for job in late:
        mine = [row for row in models if row.job_id == job]
        best = best_of(mine, rules.get(job, "")) or mine[-1]
        assert {max(row.version for row in mine), best.version} <= kept & complete
    assert len(kept) <= max(newest, 1) + 2 * len(late) + len(bases)
    assert bases & present <= complete
    assert len(complete) <= 1 + 2 * len(late) + len(bases)
    assert complete <= kept


@pytest.mark.parametrize(
    ("given", "one"),
    [("fresh", "fresh"), ("best", "best"), (0, "newest"), ("0", "newest"), (11, "11"), ("011", "11"), ("a/b", "a/b")],
)
def test_each_start_has_one_spelling(given: object, one: str) -> None:
    job = Job.model_validate({"start": given})
    assert job.start == one == spelled(one)
    assert Job.model_validate(job.model_dump(mode="json")) == job
    assert version_of(one) == (11 if one == "11" else 0)
    assert is_path(one) is (one == "a/b")


@pytest.mark.parametrize("wrong", ["", "frsh", -1, True, 1.5, None, [], 2**63, "9" * 40, "a\n.pt", "²"])
def test_another_start_is_refused(wrong: object) -> None:
    with pytest.raises(ValidationError, match=r"must (be|not hold)"):
        Job.model_validate({"start": wrong})
