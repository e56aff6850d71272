"""Robust rules do what the papers' formulas say, and jobs that they cannot serve are refused."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from fedring.offers import offers
from fedring.server.aggregation.combining import buckets_of
from fedring.server.aggregation.robust import CenteredClip, GeometricMedian, Krum, Median, TrimmedMean
from fedring.server.aggregation.rule import GramRule
from fedring.server.aggregation.strategy import make_strategy
from fedring.train.errors import SeamError
from fedring.train.jobs.aggregation_table import RULES, Aggregation
from fedring.train.jobs.job import Job
from fedring.train.names.offered import Offered, collect

Float64 = NDArray[np.float64]


def combined(rule: GramRule, deltas: Float64) -> Float64:
    """Apply a rule to deltas [n, D] by its coefficients."""
    weights = np.full(len(deltas), 1 / len(deltas))
    return np.asarray(rule.coefficients(deltas @ deltas.T, weights) @ deltas)


def clipped(deltas: Float64, radius: float) -> Float64:
    """Karimireddy et al. 2021, algorithm 2, on the vectors themselves, without those that are far too long."""
    norms = np.linalg.norm(deltas, axis=1)
    deltas = deltas[norms <= 3 * np.median(norms)]
    centre = np.zeros(deltas.shape[1])
    for _ in range(3):
        apart = [delta - centre for delta in deltas]
        centre = centre + sum(each * min(1.0, radius / np.linalg.norm(each)) for each in apart) / len(deltas)
    return centre


def weiszfeld(deltas: Float64) -> Float64:
    """Pillutla et al. 2022, algorithm 2, on the vectors themselves."""
    norms = np.linalg.norm(deltas, axis=1)
    point: Float64 = np.mean(deltas * np.minimum(1.0, np.median(norms) / norms)[:, None], axis=0)
    for _ in range(8):
        weights = [1 / np.linalg.norm(delta - point) for delta in deltas]
        point = np.asarray(sum(w * delta for w, delta in zip(weights, deltas, strict=True)) / sum(weights))
    return point


def scores(deltas: Float64, malicious: int) -> list[float]:
    """Blanchard et al. 2017, section 4: the sum of the squared distances to the n - f - 2 closest others."""
    count, result = len(deltas), []
    for own in range(count):
        squares = sorted(np.sum((deltas[own] - deltas[other]) ** 2) for other in range(count) if other != own)
        result.append(float(sum(squares[: count - malicious - 2])))
    return result


def honest_and_malicious(seed: int) -> Float64:
    """Eight updates around one mean, and two that are far away, [10, 50]."""
    rng = np.random.default_rng(seed)
    return np.concatenate([1 + rng.standard_normal((8, 50)), 1e6 * rng.standard_normal((2, 50))])


@pytest.mark.parametrize("seed", range(3))
def test_rules_of_gram_matrices_equal_their_formulas_on_vectors(seed: int) -> None:
    deltas = honest_and_malicious(seed)
    order = np.argsort(scores(deltas, 2))
    np.testing.assert_allclose(combined(CenteredClip(2.0), deltas), clipped(deltas, 2.0), rtol=1e-9)
    np.testing.assert_allclose(combined(GeometricMedian(), deltas), weiszfeld(deltas), rtol=1e-9)
    np.testing.assert_array_equal(combined(Krum(2), deltas), deltas[order[0]])
    np.testing.assert_allclose(combined(Krum(2, several=True), deltas), deltas[order[:8]].mean(axis=0), rtol=1e-12)


def test_the_radius_of_centered_clipping_is_the_median_norm_unless_it_is_given() -> None:
    deltas = honest_and_malicious(0)
    radius = float(np.median(np.linalg.norm(deltas, axis=1)))
    np.testing.assert_allclose(combined(CenteredClip(), deltas), clipped(deltas, radius), rtol=1e-9)


def test_centered_clipping_leaves_out_what_is_more_than_three_times_as_long_as_the_median() -> None:
    deltas = np.eye(5)
    deltas[4] *= 3.01
    assert CenteredClip().coefficients(deltas @ deltas.T, np.full(5, 0.2))[4] == 0
    deltas[4] *= 2.99 / 3.01
    assert CenteredClip().coefficients(deltas @ deltas.T, np.full(5, 0.2))[4] > 0.05


@pytest.mark.parametrize(("count", "zeros"), [(3, 1), (10, 4), (20, 8)])
def test_clients_that_send_zeros_do_not_hold_the_geometric_median_at_the_base_model(count: int, zeros: int) -> None:
    honest = 1 + 0.1 * np.random.default_rng(0).standard_normal((count - zeros, 50))
    found = combined(GeometricMedian(), np.concatenate([honest, np.zeros((zeros, 50))]))
    assert np.linalg.norm(found) > 0.9 * np.linalg.norm(honest.mean(axis=0))


@pytest.mark.parametrize("rule", [CenteredClip(), GeometricMedian(), Krum(2), Krum(2, several=True)], ids=repr)
def test_two_of_ten_clients_with_huge_updates_move_the_result_little(rule: GramRule) -> None:
    deltas = honest_and_malicious(0)
    distances = np.linalg.norm(deltas[:8] - deltas[:8].mean(axis=0), axis=1)
    assert np.linalg.norm(combined(rule, deltas) - deltas[:8].mean(axis=0)) < 1.1 * distances.max()
    assert np.linalg.norm(deltas.mean(axis=0)) > 1e5


@pytest.mark.parametrize("rule", [CenteredClip(), GeometricMedian(), Krum(1)], ids=repr)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_equal_updates_of_any_size_give_that_update(rule: GramRule, scale: float) -> None:
    deltas = np.full((5, 4), scale)
    np.testing.assert_allclose(combined(rule, deltas), deltas[0], rtol=1e-6)


def test_distances_between_honest_clients_survive_a_client_with_a_huge_norm() -> None:
    rng = np.random.default_rng(1)
    deltas = np.concatenate([1 + 1e-3 * rng.standard_normal((6, 1000)), np.full((1, 1000), 1e28)])
    chosen = combined(Krum(1), deltas)
    assert np.array_equal(chosen, deltas[np.argmin(scores(deltas, 1))])


COORDINATES = np.array([[5.0, 1, 2], [1, 1, 4], [3, -9, 8], [4, 7, 1], [100, 1, -50]])


def test_median_and_trimmed_mean_of_each_coordinate() -> None:
    weights = np.full(5, 0.2)
    assert Median().combine(COORDINATES, weights).tolist() == [4.0, 1.0, 2.0]
    assert Median().combine(COORDINATES[:4], weights).tolist() == [3.5, 1.0, 3.0]
    assert TrimmedMean(0.2).combine(COORDINATES, weights).tolist() == [4.0, 1.0, 7 / 3]
    assert TrimmedMean(0.1).combine(COORDINATES, weights).tolist() == [4.0, 1.0, 7 / 3], "beta n is rounded up"
    assert TrimmedMean(0.49).combine(COORDINATES[:2], weights).tolist() == [3.0, 1.0, 3.0], "something stays"


def test_buckets_depend_on_the_seed_and_the_ids_only() -> None:
    names = [f"client-{number:02}" for number in range(11)]
    buckets = buckets_of(names, 2, "7")
    assert sorted(index for bucket in buckets for index in bucket) == list(range(11))
    assert [len(bucket) for bucket in buckets] == [2, 2, 2, 2, 2, 1]
    assert buckets == buckets_of(names, 2, "7")
    assert len({str(buckets_of(names, 2, str(seed))) for seed in range(20)}) > 15
    assert buckets_of(names, 1, "7") == [[index] for index in range(11)]


def test_every_rule_that_a_job_can_name_can_be_made() -> None:
    extra: dict[str, dict[str, Any]] = {
        "fltrust": {"data": "a:b"},
        "krum": {"malicious": 1},
        "multi_krum": {"malicious": 1},
    }
    tables = [Aggregation.model_validate({"rule": rule, **extra.get(rule, {})}) for rule in RULES]
    made = {table.rule: make_strategy(table, Offered()).rule for table in tables}
    assert made["mean"] is None
    assert made["multi_krum"] == Krum(1, several=True)
    assert len(set(map(repr, made.values()))) == len(RULES)


KRUM = {"rule": "krum", "malicious": 1}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"aggregation": {"rule": "trimed_mean"}}, "there is no rule 'trimed_mean': did you mean trimmed_mean?"),
    ({"aggregation": {"rule": "x"}}, "there is no rule 'x': choose from mean, centered_clip"),
    ({"aggregation": {"rule": "a b:c"}}, "is not of the form module:attribute"),
    ({"aggregation": {"rule": "krum"}}, "krum needs malicious"),
    ({"aggregation": KRUM, "min_clients": 4}, "krum with malicious = 1 needs 5 updates, and has 4"),
    ({"aggregation": {**KRUM, "bucketing": 2}, "min_clients": 8}, "needs 9 updates, and has 8, which bucketing = 2"),
    ({"aggregation": KRUM, "min_clients": 9, "sample_clients": 4}, "has 4"),
    ({"aggregation": KRUM, "min_clients": 8, "sample_ratio": 0.5}, "has 4"),
    (
        {"aggregation": KRUM, "min_clients": 9, "min_clients_to_aggregate": 4, "close_at_minimum": True},
        "has 4",
    ),
    ({"aggregation": {"rule": "trimmed_mean"}}, "beta = 0.1 leaves nothing of 2 updates"),
    ({"aggregation": {"rule": "trimmed_mean", "beta": 0.5}}, "less than 0.5"),
    ({"aggregation": {"bucketing": 2}}, "bucketing is for other rules than mean"),
    ({"aggregation": {"rule": "median", "args": {"a": 1}}}, "a rule of your own and for the data of fltrust: median"),
    (
        {"aggregation": {"rule": "fltrust", "data": "a:b"}, "private": ["head.*"]},
        "fltrust trains the whole model on the server: leave out shared and private",
    ),
    ({"aggregation": {"rule": "fltrust"}}, "fltrust needs data, the function that returns the server's own samples"),
    ({"aggregation": {"rule": "fltrust", "data": "mnist"}}, "data = 'mnist' is not of the form module:attribute"),
    ({"aggregation": {"rule": "median", "data": "a:b"}}, "data = 'a:b' is for the rule fltrust: median needs no"),
    ({"aggregation": {"data": "a:b"}}, "data = 'a:b' is for the rule fltrust: mean needs no samples"),
    ({"aggregation": {"radius": 1.5}}, "radius = 1.5 is for centered_clip: mean does not read it"),
    ({"aggregation": {"rule": "median", "beta": 0.2}}, "beta = 0.2 is for trimmed_mean: median does not read it"),
    (
        {"aggregation": {"rule": "a:b", "malicious": 1}},
        "malicious = 1 is for krum and multi_krum: a:b does not read it",
    ),
    ({"aggregation": {"rule": "median", "f": 1}}, "Extra inputs are not permitted"),
    ({"aggregation": {"rule": "median"}, "mode": "data_parallel"}, "belong to the mode federated"),
    ({"update_clip": 1.0, "mode": "data_parallel"}, "belong to the mode federated"),
    ({"update_clip": float("nan")}, "finite"),
    ({"max_samples": 0}, "greater than or equal to 1"),
    ({"weights": "equal"}, "'samples' or 'uniform'"),
]


@pytest.mark.parametrize(("settings", "text"), REFUSED)
def test_a_job_whose_rule_cannot_work_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Job.model_validate(settings)
    assert text in str(caught.value)


def test_the_fewest_updates_that_krum_takes_are_taken() -> None:
    for bucketing, malicious in ((1, 1), (2, 1), (3, 2)):
        table = Aggregation.model_validate({"rule": "krum", "malicious": malicious, "bucketing": bucketing})
        shortages = [bool(table.too_few(updates)) for updates in range(1, 40)]
        least = shortages.index(False) + 1
        assert shortages == [True] * (least - 1) + [False] * (40 - least)
        assert f"needs {least} updates" in table.too_few(least - 1)


@offers("rule")
class Scaled:
    """A rule of the user's own."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def coefficients(self, gram: Float64, weights: Float64) -> Float64:
        """The mean, times a factor."""
        return self.factor * weights


@offers("rule")
def no_rule() -> int:
    """Return something else than a rule."""
    return 3


def test_a_rule_of_the_users_own_is_made_with_its_arguments() -> None:
    table = Aggregation.model_validate({"rule": f"{__name__}:Scaled", "args": {"factor": 0.5}})
    rule = make_strategy(table, collect([__name__])).rule
    assert isinstance(rule, Scaled)
    assert rule.factor == 0.5


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [("Scaled", {"factr": 1}, "bad_argument"), ("no_rule", {}, "bad_rule"), ("nothing", {}, "not_offered")],
)
def test_a_name_that_is_no_rule_is_refused(name: str, args: dict[str, Any], reason: str) -> None:
    table = Aggregation.model_validate({"rule": f"{__name__}:{name}", "args": args})
    with pytest.raises(SeamError) as caught:
        make_strategy(table, collect([__name__]))
    assert caught.value.reason == reason
    with pytest.raises(SeamError) as caught:
        make_strategy(table, collect(["fedring"]))
    assert caught.value.reason == "not_offered"
