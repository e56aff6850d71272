"""Workers in processes of their own: how many clients they are given at a time, and what that must not change."""

from typing import Any

import numpy as np
import pytest

from fedring.codec.schema import Vectors
from fedring.simulation import engine, simulate
from fedring.simulation.engine import AT_A_TIME, SHARE_BYTES, Processes
from fedring.simulation.worker import Order


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
    send = Processes._send

    def counted(self: Processes, pipe: Any, message: object) -> None:
        given.extend([len(message)] if isinstance(message, list) else [])
        send(self, pipe, message)

    monkeypatch.setattr(Processes, "_send", counted)
    monkeypatch.setattr(engine, "SHARE_SECONDS", 1e6)  # however slow this machine is
    keys: dict[str, Any] = {"rounds": 3, "model_args": {"hidden": 4}, "subset_size": 4, "evaluate": False}
    one, two = (simulate(keys, clients=80, workers=workers, threads=1) for workers in (1, 2))
    assert one["model_sha256"] == two["model_sha256"]
    assert sum(given) == 3 * 80
    first = given[: given.index(max(given))]
    assert max(given) == 20
    assert max(first) == AT_A_TIME  # nobody knows in the first round how long a client takes
    assert given[-1] == 1


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
    workers = Processes.__new__(Processes)
    workers._client_seconds = seconds
    order = Order(b"", Vectors(np.zeros(parameters, np.float32), np.zeros(0)), 100)
    assert workers._most(order) == wanted
