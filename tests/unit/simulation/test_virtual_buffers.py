"""Asynchronous rounds in virtual time: whose updates come together, how old they are, and what is refused."""

from collections.abc import Iterable, Iterator
from math import inf
from typing import Any

import pytest

from fedring.control.failure import Failure
from fedring.privacy.account import SampledSteps, sampled_epsilon
from fedring.server.round.events import RoundRules
from fedring.simulation import simulate
from fedring.simulation.buffers import VirtualBuffers
from fedring.simulation.clock import TimedAnswer
from fedring.simulation.engine import Local
from fedring.simulation.timing import Availability, Pace
from fedring.simulation.worker import Order, Outcome, Turn
from fedring.train.jobs.asynchronous_table import Asynchronous

TIMES = {"a": 1.0, "b": 2.0, "c": 3.0, "slow": 10.0}
RULES = RoundRules(min_clients=4, deadline=100.0)
JOB: dict[str, Any] = {
    "weights": "uniform",
    "evaluate": False,
    "min_clients": 6,
    "model_args": {"hidden": 8},
    "batch_size": 16,
    "encoding": "fp32_sparse",
}
SPEEDS = {"speed": {"clients": {f"client-{number}": 1.0 - number / 7 for number in range(6)}}}


def buffers(**table: Any) -> VirtualBuffers:
    paces = {name: Pace(1.0, inf, 0.0) for name in TIMES}
    given = Asynchronous.model_validate({"concurrency": 4, "buffer": 2, **table})
    return VirtualBuffers(paces, Availability.model_validate({}), given)


def fill(virtual: VirtualBuffers, number: int, rules: RoundRules = RULES) -> list[str]:
    """Fill one buffer, and return the clients that got commands for it."""
    given: list[str] = []
    for clients in virtual.fill(number, number - 1, rules):
        given += sorted(clients)
        virtual.expect({name: TimedAnswer(TIMES[name], delivers=True) for name in clients})
    return given


def test_the_first_updates_make_a_version_and_slow_ones_come_later_and_older() -> None:
    virtual = buffers()
    assert fill(virtual, 1) == ["a", "b", "c", "slow"]
    assert (virtual.now, virtual.staleness) == (2.0, {"a": 0, "b": 0})
    assert fill(virtual, 2) == ["a", "b"]
    assert (virtual.now, virtual.staleness) == (3.0, {"a": 0, "c": 1})  # both at 3 s; "b" would come at 4 s
    number = 2
    while "slow" not in virtual.staleness:
        number += 1
        assert "slow" not in fill(virtual, number)
    assert virtual.times.delivered["slow"] == 10.0
    assert virtual.staleness["slow"] == number - 1


def test_a_model_that_is_too_old_and_a_deadline_end_a_command() -> None:
    virtual = buffers(max_staleness=1)
    fill(virtual, 1)
    fill(virtual, 2)
    assert "slow" in fill(virtual, 3)  # a new command, with the newest model
    assert virtual.times.left_out == {"slow": "too_stale"}
    late = buffers()
    rules = RoundRules(min_clients=4, deadline=5.0)
    number, left_out = 0, dict[str, str]()
    while not left_out:
        number += 1
        fill(late, number, rules)
        left_out = dict(late.times.left_out)
    assert left_out == {"slow": "deadline"}
    assert late.now >= 5.0


def test_a_simulation_is_the_same_each_time_and_lets_nobody_have_more_than_its_share() -> None:
    job = {**JOB, "rounds": 12, "asynchronous": {"concurrency": 6, "buffer": 2}}
    one, other = (simulate(job, clients=6, timing=SPEEDS, workers=1) for _ in range(2))
    assert one["model_sha256"] == other["model_sha256"]
    assert one["updates"] == 24
    delivered = [row["virtual"]["delivered"] for row in one["rounds"]]
    assert max(sum(name in each for each in delivered) for name in delivered[0]) <= len(delivered)
    assert "client-5" in set().union(*delivered)  # the slowest one is heard, too
    assert one["virtual_seconds"] < 12 * max(delivered[-1].values()) * 6


def test_with_equal_speeds_and_a_buffer_for_all_it_is_the_synchronous_job() -> None:
    equal = {"speed": {"median": 1.0}}
    table = {"concurrency": 6, "buffer": 6}
    job = {**JOB, "rounds": 4, "min_clients_to_aggregate": 1}
    plain = simulate(job, clients=6, timing=equal, workers=1)
    buffered = simulate(job, clients=6, timing=equal, workers=1, asynchronous=table)
    assert buffered["model_sha256"] == plain["model_sha256"]


def test_samples_are_charged_also_if_the_answer_comes_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: dict[int, list[SampledSteps]] = {}
    train = Local.train

    def noted(self: Local, order: Order, turns: Iterable[Turn]) -> Iterator[Outcome]:
        for outcome in train(self, order, turns):
            if outcome.spent is not None:
                spent.setdefault(outcome.client, []).append(outcome.spent)
            yield outcome

    monkeypatch.setattr(Local, "train", noted)
    table = {"asynchronous": {"concurrency": 6, "buffer": 2}, "sample_dp": {"noise_multiplier": 1.0}}
    report = simulate({**JOB, "rounds": 3, "encoding": "fp32", **table}, clients=6, timing=SPEEDS, workers=1)
    assert sum(map(len, spent.values())) > report["updates"]
    assert report["sample_epsilon"] == max(sampled_epsilon(each, 1e-5) for each in spent.values())


def test_a_private_mean_is_divided_by_the_size_of_the_buffer() -> None:
    noise = {"noise_multiplier": 0.5, "adaptive": False, "delta": 1e-3}
    report = simulate(
        {**JOB, "rounds": 3, "encoding": "fp32", "asynchronous": {"concurrency": 6, "buffer": 3}, "dp": noise},
        clients=6,
        timing=SPEEDS,
        workers=1,
    )
    assert report["updates"] == 9


def test_without_times_it_is_refused_with_advice() -> None:
    with pytest.raises(Failure, match=r"asynchronous: .* give a timing"):
        simulate({**JOB, "rounds": 1, "asynchronous": {"concurrency": 2, "buffer": 1}}, clients=6)
