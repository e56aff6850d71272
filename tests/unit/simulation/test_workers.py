"""Workers in processes of their own: how many clients they are given at a time, and what that must not change."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fedring.codec.schema import Vectors
from fedring.simulation import engine, simulate
from fedring.simulation.engine import AT_A_TIME, SHARE_BYTES, Local
from fedring.simulation.worker import Order, Outcome, SimulationWorker, Turn


@pytest.mark.programs
@pytest.mark.timeout(120)
def test_shares_and_answers_larger_than_a_pipe_block_nobody() -> None:
    # In the second round, a share of four clients has control variates of 12 MB, and its answer has them and updates.
    keys: dict[str, Any] = {
        "rounds": 2,
        "model_args": {"hidden": 10_000},
        "subset_size": 4,
        "batch_size": 4,
        "scaffold": True,
        "momentum": 0.0,
        "weights": "uniform",
        "evaluate": False,
    }
    one, two = (simulate(keys, clients=24, workers=workers, threads=1) for workers in (1, 2))
    assert one["model_sha256"] == two["model_sha256"]
    assert [row["clients"] for row in two["rounds"]] == [24, 24]


@pytest.mark.programs
def test_many_small_clients_in_one_message_make_the_model_of_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    here: list[int] = []
    send, train = Local._send, SimulationWorker.train

    def counted(self: Local, pipe: Any, message: object) -> None:
        given.extend([len(message)] if isinstance(message, list) and message else [])
        send(self, pipe, message)

    def counted_here(self: SimulationWorker, turns: Sequence[Turn]) -> list[Outcome]:
        here.append(len(turns))
        return train(self, turns)

    monkeypatch.setattr(Local, "_send", counted)
    monkeypatch.setattr(SimulationWorker, "train", counted_here)
    monkeypatch.setattr(engine, "SHARE_SECONDS", 1e6)  # however slow this machine is
    keys: dict[str, Any] = {"rounds": 3, "model_args": {"hidden": 4}, "subset_size": 4, "evaluate": False}
    two, one = (simulate(keys, clients=80, workers=workers, threads=1) for workers in (2, 1))
    assert one["model_sha256"] == two["model_sha256"]
    assert here[-3 * 80 :] == [1] * 3 * 80  # of the second simulation
    assert sum(given) + len(here) == 2 * 3 * 80
    first = given[: given.index(max(given))]
    assert max(given) == 10
    assert max(first) == AT_A_TIME  # nobody knows in the first round how long a client takes


@pytest.mark.parametrize(
    ("seconds", "parameters", "wanted"),
    [
        (float("inf"), 10, AT_A_TIME),
        (0.001, 10_000, 26),
        (0.01, 10_000, 10),
        (1.0, 10_000, AT_A_TIME),
        (0.001, SHARE_BYTES, AT_A_TIME),
    ],
    ids=["first round", "small and short", "small", "long", "large"],
)
def test_a_worker_is_given_many_clients_if_they_are_small_and_short(
    seconds: float, parameters: int, wanted: int
) -> None:
    workers = Local.__new__(Local)
    workers._client_seconds = seconds
    order = Order(b"", Vectors(np.zeros(parameters, np.float32), np.zeros(0)), 100)
    assert workers._most(order) == wanted
