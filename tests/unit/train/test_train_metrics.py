"""Named figures: which are allowed, how they are combined, which round is best, what an evaluation may return."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from fedring.rpc.contract import MAX_FIGURE
from fedring.train.errors import TrainError
from fedring.train.evaluation import Counts, counts_of, evaluate, run_evaluator
from fedring.train.jobs.job import Job
from fedring.train.metrics import MAX_METRICS, best_of, check_metrics, combine, named_metrics, result_of, with_origin

CPU = torch.device("cpu")


def test_means_are_weighted_by_samples_and_names_that_end_in_sum_are_added_up() -> None:
    combined = combine([(1, {"f1": 0.2, "words_sum": 10}), (3, {"f1": 0.6, "words_sum": 5, "rare": 7.0})])
    assert combined == {"f1": pytest.approx(0.5), "rare": 7.0, "words_sum": 15}


def test_figures_without_samples_do_not_count() -> None:
    assert combine([(0, {"f1": 0.2, "words_sum": 4})]) == {}
    assert combine([]) == {}


def test_one_client_cannot_crowd_out_the_names_that_others_report() -> None:
    hostile = {f"a{number}": 1.0 for number in range(MAX_METRICS)}
    combined = combine([(5, hostile), (5, {"z": 2.0}), (5, {"z": 4.0})])
    assert combined["z"] == 3.0
    assert len(combined) == MAX_METRICS


def test_the_largest_figures_of_many_clients_stay_finite() -> None:
    combined = combine([(2**40, {"f1": MAX_FIGURE, "x_sum": -MAX_FIGURE})] * 1000)
    assert all(map(math.isfinite, combined.values()))


@given(st.lists(st.tuples(st.integers(0, 2**40), st.dictionaries(st.sampled_from("abc"), st.floats(-1e9, 1e9)))))
def test_the_order_of_the_clients_makes_no_difference(reports: list[tuple[int, Mapping[str, float]]]) -> None:
    assert combine(reports) == combine(reversed(reports))


@pytest.mark.parametrize(
    ("metrics", "what"),
    [
        ({f"m{number}": 0.0 for number in range(MAX_METRICS + 1)}, "at most 32"),
        ({"a b": 1.0}, "cannot name a metric"),
        ({"": 1.0}, "cannot name a metric"),
        ({"x" * 129: 1.0}, "cannot name a metric"),
        ({"f1": math.nan}, "must be a number"),
        ({"f1": math.inf}, "must be a number"),
        ({"f1": -2 * MAX_FIGURE}, "must be a number"),
    ],
)
def test_what_a_server_would_refuse_is_found(metrics: dict[str, float], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        check_metrics(metrics)


def test_what_is_no_finite_number_is_left_out_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    told = {"f1": torch.tensor(0.5), "undefined": math.nan, "huge": 1e300, "word": "x"}
    assert named_metrics(told) == {"f1": 0.5}
    assert "huge, undefined, word" in caplog.text


def test_known_means_take_precedence_over_figures_of_the_same_name() -> None:
    assert with_origin("eval", {"loss": 9.0, "f1": 0.5}, loss=1.0, accuracy=None) == {"eval/loss": 1.0, "eval/f1": 0.5}


ROUNDS: list[dict[str, float]] = [
    {"eval/accuracy": 0.5, "eval/loss": 0.1, "eval/perplexity": 4.0},
    {"eval/accuracy": 0.9, "eval/loss": 0.4, "eval/perplexity": 2.0},
    {"eval/accuracy": 0.9, "eval/loss": 0.3},
    {},
]


@pytest.mark.parametrize(
    ("rounds", "rule", "best"),
    [
        (ROUNDS, "", 1),  # the highest accuracy; the first of equals
        (ROUNDS, "min eval/loss", 0),
        (ROUNDS, "max eval/loss", 1),
        (ROUNDS, "min eval/perplexity", 1),
        (ROUNDS, "max eval/f1", None),
        ([{"eval/loss": 2.0}, {"eval/loss": 1.0}], "", 1),  # accuracy is not defined
        ([{"server/accuracy": 0.1}, {"server/accuracy": 0.2, "eval/loss": 9.0}], "", 1),
        ([{"eval/accuracy": math.nan}, {"eval/accuracy": 0.1}, {"eval/accuracy": math.inf}], "", 1),
        ([{}], "", None),
        ([], "", None),
    ],
)
def test_the_best_round(rounds: list[dict[str, float]], rule: str, best: int | None) -> None:
    assert best_of(rounds, rule) == best
    result = result_of(rounds[best], rule) if best is not None else ""
    name, _, value = result.partition(" ")
    assert bool(result) is (best is not None)
    assert not rule or best is None or (name, float(value)) == (rule.split()[1], rounds[best][name])


@pytest.mark.parametrize("rule", ["eval/f1", "max f1", "most eval/f1", "max eval/", "max eval/a b", "max other/f1"])
def test_a_rule_of_another_form_is_refused_with_the_job(rule: str) -> None:
    with pytest.raises(ValidationError, match=r"best_by\n.*max NAME"):
        Job.model_validate({"best_by": rule})
    assert Job.model_validate({"best_by": "max train/f1_sum"}).best_by == "max train/f1_sum"


def test_accuracy_of_a_model_whose_labels_are_not_classes_is_not_defined() -> None:
    def squared(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels).square().mean()

    samples: Any = [(torch.zeros(3), torch.ones(2)), (torch.zeros(3), torch.ones(2))]
    model = nn.Linear(3, 2, bias=False)
    counts = evaluate(model, samples, loss=squared, device=CPU)
    assert counts == Counts(None, 2, 2.0)
    assert (counts.accuracy, counts.loss) == (None, 1.0)
    assert (counts + counts).accuracy is None
    assert (Counts() + counts).correct is None


def test_counts_of_several_clients_add_up_with_their_figures() -> None:
    both = Counts(1, 2, 3.0, {"f1": 0.5, "n_sum": 1}) + Counts(3, 6, 1.0, {"f1": 0.9, "n_sum": 2})
    assert (both.correct, both.total, both.loss_sum, both.accuracy) == (4, 8, 4.0, 0.5)
    assert both.metrics == {"f1": pytest.approx(0.8), "n_sum": 3}


@pytest.mark.parametrize(
    ("told", "counts"),
    [
        ((8, 10, 2.5), Counts(8, 10, 2.5)),
        ((None, 10, 2.5), Counts(None, 10, 2.5)),
        (Counts(8, 10, 2.5, {"f1": 1.0}), Counts(8, 10, 2.5, {"f1": 1.0})),
        ({"loss": 0.5, "f1": 0.75}, Counts(None, 4, 2.0, {"f1": 0.75})),
        ({"loss": 0.5, "num_samples": 10, "accuracy": 0.8}, Counts(8, 10, 5.0)),
        (
            {"loss": torch.tensor(0.5), "f1": math.nan, "my f1": 1.5},
            Counts(
                None,
                4,
                2.0,
                warnings=(
                    "the metric f1 is nan: it must be a number of at most 1e+200",
                    "'my f1' cannot name a metric: use 1 to 128 of A-Z a-z 0-9 . _ -",
                ),
            ),
        ),
    ],
)
def test_what_a_users_evaluation_may_return(told: object, counts: Counts) -> None:
    assert counts_of(told, 4) == counts


@pytest.mark.parametrize(
    ("told", "what"),
    [
        (None, "return a mapping with loss"),
        ({"f1": 0.5}, "return a mapping with loss"),
        ({"loss": "low"}, "could not convert"),
        ({"loss": 0.5, "accuracy": 1.5}, "cannot be correct"),
        ({"loss": math.nan}, "it must be a finite number of at most"),
        ({"loss": 0.5, "accuracy": math.inf}, "cannot convert float infinity to integer"),
        ((11, 10, 2.5), "11 of 10 samples cannot be correct"),
    ],
)
def test_an_evaluation_that_returns_something_else_is_refused(told: object, what: str) -> None:
    with pytest.raises(TrainError, match=what) as caught:
        counts_of(told, 4)
    assert caught.value.reason == "bad_result"


def test_too_many_figures_of_an_evaluation_lose_only_the_last_ones() -> None:
    counts = counts_of({"loss": 0.5, **{f"f{number}": 1.0 for number in range(MAX_METRICS + 1)}}, 4)
    assert len(counts.metrics) == MAX_METRICS
    assert counts.warnings == (f"there are {MAX_METRICS + 1} metrics: there may be at most {MAX_METRICS}",)


def test_the_number_of_samples_must_be_known() -> None:
    with pytest.raises(TrainError, match="num_samples"):
        counts_of({"loss": 0.5})


def test_a_users_evaluation_gets_the_model_in_evaluation_mode_and_all_samples() -> None:
    model, samples, seen = nn.Linear(2, 2), [(torch.zeros(2), 0)] * 3, []

    def own(model: nn.Module, given: Any) -> dict[str, float]:
        seen.append((model.training, len(given), torch.is_grad_enabled()))
        return {"loss": 1.0}

    data: Any = samples
    assert run_evaluator(own, model, data, loss=nn.CrossEntropyLoss(), device=CPU) == Counts(None, 3, 3.0)
    assert seen == [(False, 3, False)]
    assert model.training
    nothing: Any = []
    assert run_evaluator(own, model, nothing, loss=nn.CrossEntropyLoss(), device=CPU) == Counts()
