"""Server optimizers: torch.optim on the negated delta, with a state that is saved between steps."""

import numpy as np
import pytest
import torch

from fedring.server.model.optimizer import ELEMENTWISE, OptimizerError, ServerOptimizer

RNG = np.random.default_rng(0)
BASE = RNG.standard_normal(33, np.float32)
DELTAS = [RNG.standard_normal(33, np.float32) for _ in range(5)]
ARGS = {"SGD": {"lr": 0.5, "momentum": 0.9}}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_steps_with_saved_states_equal_those_of_one_optimizer_in_memory(name: str) -> None:
    args = ARGS.get(name, {"lr": 0.1})
    parameter = torch.from_numpy(BASE.copy()).requires_grad_()
    kept = getattr(torch.optim, name)([parameter], **args)
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
