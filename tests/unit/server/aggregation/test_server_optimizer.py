"""Server optimizers: torch.optim on the negated delta, with a state that is saved between steps."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedring.server.aggregation.optimizer import ELEMENTWISE, ServerOptimizer
from fedring.server.aggregation.rule import OptimizerError
from fedring.server.aggregation.yogi import Yogi

RNG = np.random.default_rng(0)
BASE = RNG.standard_normal(33, np.float32)
DELTAS = [RNG.standard_normal(33, np.float32) for _ in range(5)]
ARGS = {"SGD": {"lr": 0.5, "momentum": 0.9}}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_steps_with_saved_states_equal_those_of_one_optimizer_in_memory(name: str) -> None:
    args: dict[str, Any] = ARGS.get(name, {"lr": 0.1})
    parameter = torch.from_numpy(BASE.copy()).requires_grad_()
    kept = getattr(torch.optim, name, Yogi)([parameter], **args)
    model, state = BASE, b""
    for delta in DELTAS:
        model, state = ServerOptimizer(name, args).step(model, delta, state)
        parameter.grad = -torch.from_numpy(delta)
        kept.step()
        assert np.array_equal(model, parameter.detach().numpy())


def test_sgd_with_learning_rate_1_adds_the_delta() -> None:
    model, _ = ServerOptimizer("SGD", {"lr": 1.0}).step(BASE, DELTAS[0], b"")
    assert np.array_equal(model, BASE + DELTAS[0])


def test_adam_steps_as_in_the_paper() -> None:
    """Reddi et al. 2021, algorithm 2: x + lr m / (sqrt(v) + tau), here with torch's bias correction."""
    model, _ = ServerOptimizer("Adam", {"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-3}).step(BASE, DELTAS[0], b"")
    assert np.allclose(model, BASE + 0.1 * DELTAS[0] / (np.abs(DELTAS[0]) + 1e-3), atol=1e-6)


def in_the_paper(rule: str, *, lr: float, beta1: float, beta2: float, tau: float) -> NDArray[np.float64]:
    """Return the model after DELTAS by Reddi et al. 2021, algorithm 2, in float64."""
    x, m, v = BASE.astype(np.float64), np.zeros(33), np.full(33, tau**2)
    for delta in DELTAS:
        m = beta1 * m + (1 - beta1) * delta
        square = delta.astype(np.float64) ** 2
        v = v + square if rule == "FedAdagrad" else v - (1 - beta2) * square * np.sign(v - square)
        x = x + lr * m / (np.sqrt(v) + tau)
    return x


def test_yogi_steps_as_in_the_paper() -> None:
    args = {"lr": 0.1, "betas": [0.8, 0.9], "eps": 0.5, "initial_accumulator_value": 0.25}
    model, state = BASE, b""
    for delta in DELTAS:
        model, state = ServerOptimizer("Yogi", args).step(model, delta, state)
    assert np.allclose(model, in_the_paper("FedYogi", lr=0.1, beta1=0.8, beta2=0.9, tau=0.5), rtol=0, atol=1e-6)


def test_adagrad_steps_as_in_the_paper_without_momentum() -> None:
    args = {"lr": 0.1, "eps": 0.5, "initial_accumulator_value": 0.25}
    model, state = BASE, b""
    for delta in DELTAS:
        model, state = ServerOptimizer("Adagrad", args).step(model, delta, state)
    assert np.allclose(model, in_the_paper("FedAdagrad", lr=0.1, beta1=0.0, beta2=0.0, tau=0.5), rtol=0, atol=1e-6)


@pytest.mark.parametrize("args", [{"lr": 0.0}, {"betas": [0.9, 1.0]}, {"betas": [0.9]}, {"eps": 0}, {"tau": 1}])
def test_arguments_that_yogi_cannot_use_are_refused(args: dict[str, object]) -> None:
    with pytest.raises(OptimizerError):
        ServerOptimizer("Yogi", args)


@pytest.mark.parametrize(
    ("name", "args"), [("SGD", {"lr": 1.0}), ("Adam", {"lr": 0.2})], ids=["other class", "other arguments"]
)
def test_the_state_of_another_optimizer_is_not_used(name: str, args: dict[str, float]) -> None:
    _, foreign = ServerOptimizer("Adam", {"lr": 0.1}).step(BASE, DELTAS[0], b"")
    optimizer = ServerOptimizer(name, args)
    assert np.array_equal(optimizer.step(BASE, DELTAS[1], foreign)[0], optimizer.step(BASE, DELTAS[1], b"")[0])


def test_a_step_does_not_change_its_inputs() -> None:
    base, delta = BASE.copy(), DELTAS[0].copy()
    ServerOptimizer("Adam", {"lr": 0.1}).step(base, delta, b"")
    assert np.array_equal(base, BASE)
    assert np.array_equal(delta, DELTAS[0])


@pytest.mark.parametrize("name", ["LBFGS", "Muon", "SparseAdam", "Adafactor", "Optimizer", "lr_scheduler", "os"])
def test_an_optimizer_that_does_not_treat_each_value_by_itself_is_refused(name: str) -> None:
    with pytest.raises(OptimizerError, match="does not treat each value by itself"):
        ServerOptimizer(name, {})


@pytest.mark.parametrize(
    "args", [{"rate": 1}, {"params": []}, {"lr": "fast"}, {"lr": -1.0}, {"lr": float("nan")}, {"betas": [0.9]}]
)
def test_arguments_that_do_not_fit_are_refused(args: dict[str, object]) -> None:
    with pytest.raises(OptimizerError):
        ServerOptimizer("Adam", args)


def test_a_damaged_state_is_an_error() -> None:
    with pytest.raises(OptimizerError, match="not a state"):
        ServerOptimizer("Adam", {}).step(BASE, DELTAS[0], b"rubbish")


@pytest.mark.parametrize("name", ["Adam", "Yogi"])
def test_a_delta_whose_square_is_infinite_is_refused_and_does_not_stay_in_the_state(name: str) -> None:
    delta = np.array([1e30, 1.0], np.float32)
    with pytest.raises(OptimizerError, match="is not finite"):
        ServerOptimizer(name, {"lr": 0.1}).step(np.zeros(2, np.float32), delta, b"")
