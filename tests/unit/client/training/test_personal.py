"""Clients' own models: what they are trained for, what they start from, and on which samples they are evaluated."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedring.client.training.personal import figures_of, train_own, with_own
from fedring.daemon.config import explain
from fedring.data.partition import parts, parts_alike
from fedring.simulation import simulate
from fedring.train.evaluation import Counts
from fedring.train.jobs.job import Job
from fedring.train.jobs.personal_table import Personal
from fedring.train.metrics import MAX_METRICS
from fedring.train.optimizers import sgd
from fedring.train.plan import Plan
from fedring.train.tensors.sharing import Sharing
from fedring.train.tensors.state import split

SAMPLES = TensorDataset(torch.ones(8, 1), torch.full((8, 1), 4.0))
PLAN = Plan(epochs=1, batch_size=8, lr=0.1, momentum=0.0)


def how(**keys: Any) -> Personal:
    return Personal.model_validate(keys)


def train(how: Personal, model: nn.Module, start: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    own = train_own(
        model, SAMPLES, PLAN, how, loss=nn.functional.mse_loss, optimizer_factory=sgd, start=start,
        schema=split(model, Sharing()).not_frozen, device=torch.device("cpu"),
    )  # fmt: skip
    assert own is not None
    return own


def test_an_own_model_that_diverges_costs_the_round_nothing() -> None:
    model = nn.Linear(1, 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = train_own(
        model, SAMPLES, replace(PLAN, lr=1e30), how(epochs=20), loss=nn.functional.mse_loss, optimizer_factory=sgd,
        start=None, schema=split(model, Sharing()).not_frozen, device=torch.device("cpu"),
    )  # fmt: skip
    assert own is None
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_figures_of_an_own_model_take_the_place_of_others() -> None:
    counts = Counts(1, 2, 3.0, metrics={f"m{index}": 1.0 for index in range(MAX_METRICS)})
    told = with_own(counts, Counts(1, 2, 3.0)).metrics
    assert len(told) == MAX_METRICS
    assert (told["accuracy_personal"], told["loss_personal"]) == (0.5, 1.5)


def weight(value: float) -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def test_a_clients_own_model_minimises_its_loss_and_the_distance_to_the_rounds_model() -> None:
    """The loss is (v - 4)^2 and the round's model 1: with mu = 6, the minimum of (v - 4)^2 + 3 (v - 1)^2 is 7 / 4."""
    model = weight(1.0)
    own = train(how(mu=6.0, epochs=60), model)
    assert own["weight"].item() == pytest.approx(1.75, abs=1e-4)
    assert model.get_parameter("weight").item() == 1.0
    assert train(how(mu=0.0, epochs=60), model)["weight"].item() == pytest.approx(4.0, abs=1e-4)


def test_ditto_goes_on_with_the_clients_own_model_and_fine_tuning_begins_anew() -> None:
    start = {"weight": torch.tensor([[10.0]])}
    gradient = 2 * (10.0 - 4.0) + 0.5 * (10.0 - 1.0)
    own = train(how(mu=0.5), weight(1.0), start)
    assert own["weight"].item() == pytest.approx(10.0 - 0.1 * gradient)
    own = train(how(method="fine_tuning", mu=0.5), weight(1.0), start)
    assert own["weight"].item() == pytest.approx(1.0 - 0.1 * 2 * (1.0 - 4.0))


def test_figures_that_are_not_known_or_not_finite_are_not_told() -> None:
    assert figures_of(Counts(3, 4, 2.0)) == {"accuracy_personal": 0.75, "loss_personal": 0.5}
    assert figures_of(Counts(None, 4, float("inf"))) == {}
    assert figures_of(Counts()) == {}


@given(seed=st.integers(0, 9), count=st.integers(1, 9), name=st.sampled_from(["shards", "dirichlet", "iid"]))
def test_test_samples_are_divided_like_training_samples_and_each_belongs_to_one_client(
    seed: int, count: int, name: str
) -> None:
    rng = np.random.default_rng(seed)
    labels, others = rng.integers(5, size=300), rng.integers(6, size=200)
    held = parts(name, labels, count=count, alpha=0.2, seed=seed)
    found = parts_alike(held, labels, others, seed=seed)
    assert np.array_equal(np.sort(np.concatenate(found)), np.arange(200))
    for mine, test in zip(held, found, strict=True):
        for label in range(5):
            share = np.count_nonzero(labels[mine] == label) / np.count_nonzero(labels == label)
            wanted = share * np.count_nonzero(others == label)
            assert abs(np.count_nonzero(others[test] == label) - wanted) <= 1


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"mode": "data_parallel"}, 'the table [personal] needs mode = "federated", and it is "data_parallel"'),
        ({"trainer": "code:train"}, 'the table [personal] needs trainer = "", and it is "code:train"'),
        ({"private": ["*.bias"]}, 'the table [personal] needs private = [], and it is ["*.bias"]'),
        ({"shared": ["1.*"]}, 'the table [personal] needs shared = ["*"], and it is ["1.*"]'),
        ({"personal": {"mu": -1}}, "mu"),
        ({"personal": {"method": "apfl"}}, "method"),
        ({"personal": {"lambda": 1}}, "lambda"),
    ],
)
def test_a_job_that_cannot_have_models_of_clients_own_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Job.model_validate({"personal": {}, **keys})
    assert sentence in explain(refused.value, {}, Job)


def test_models_of_clients_own_do_not_change_the_rounds_model() -> None:
    job = {"rounds": 2, "model_args": {"hidden": 8}, "partition": "shards"}
    plain, personal = (
        simulate({**job, **keys}, clients=6, per_round=3, workers=1) for keys in ({}, {"personal": {"epochs": 3}})
    )
    assert plain["model_sha256"] == personal["model_sha256"]
    last = personal["rounds"][-1]["metrics"]
    assert last["eval/accuracy"] == plain["accuracy"]
    assert last["eval/accuracy_personal"] > last["eval/accuracy"]
