"""FedNova: what deltas are multiplied by, where the numbers of steps are from, and how far a lie about them gets."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.unit.host import ONES, running, spec

from fedring.daemon.config import explain
from fedring.server.aggregation.fednova import SPREAD, accumulation, factors, factors_of, steps_of
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.model.guards import guard
from fedring.server.state.rows import UpdateRow
from fedring.train.batches import cut
from fedring.train.jobs.job import Job
from fedring.train.plan import batches_in

ROW = UpdateRow(1, "a", "", "", (), 100, 0, 0.0, 1.0, 0.0)


def job(**keys: Any) -> Job:
    return Job.model_validate({"normalize_steps": True, "momentum": 0.0, **keys})


def of_steps(weights: Mapping[str, float], steps: Mapping[str, float], *, momentum: float = 0.0) -> dict[str, float]:
    return factors(weights, {client: accumulation(count, momentum) for client, count in steps.items()})


def test_equal_numbers_of_steps_change_nothing() -> None:
    assert of_steps({"a": 1, "b": 9}, {"a": 7, "b": 7}, momentum=0.9) == {"a": 1.0, "b": 1.0}


def test_a_delta_is_divided_by_its_steps_and_multiplied_by_their_weighted_mean() -> None:
    found = of_steps({"a": 1, "b": 3}, {"a": 2, "b": 10})
    assert found == pytest.approx({"a": 8 / 2, "b": 8 / 10})  # tau_eff = (1 * 2 + 3 * 10) / 4


@pytest.mark.parametrize(("dampening", "nesterov"), [(0.0, False), (0.0, True), (0.3, False), (1.0, False)])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 17])
def test_the_accumulation_is_that_of_torchs_sgd(steps: int, momentum: float, dampening: float, nesterov: bool) -> None:
    """With the same gradient in each step, SGD moves by the learning rate times the accumulation."""
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    nesterov = nesterov and momentum > 0  # torch refuses it otherwise
    optimizer = torch.optim.SGD([x], lr=0.5, momentum=momentum, dampening=dampening, nesterov=nesterov)
    for _ in range(steps):
        x.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
    assert accumulation(steps, momentum, dampening, nesterov) == pytest.approx(-x.item() / 0.5)


def test_normalised_averaging_finds_the_optimum_of_all_clients_where_plain_averaging_does_not() -> None:
    """Clients minimise (x - c)^2 / 2 with c = 0 and 1; the second one takes ten times as many steps."""
    steps, centres = {"a": 2, "b": 20}, {"a": 0.0, "b": 1.0}
    ends = {}
    for name, scale in (("plain", {"a": 1.0, "b": 1.0}), ("nova", of_steps({"a": 1, "b": 1}, steps))):
        x = 0.2
        for _ in range(3000):
            kept = {client: (1 - 0.001) ** count for client, count in steps.items()}
            x += sum(scale[client] * (1 - kept[client]) * (centres[client] - x) for client in steps) / 2
        ends[name] = x
    assert ends["nova"] == pytest.approx(0.5, abs=0.01)
    assert ends["plain"] > 0.85


@pytest.mark.parametrize("size", range(1, 40))
@pytest.mark.parametrize("batch_size", [1, 2, 7, 64])
def test_the_server_knows_how_many_batches_the_built_in_loop_makes(size: int, batch_size: int) -> None:
    assert batches_in(size, batch_size) == len(cut(torch.arange(size), batch_size))


def test_a_client_may_say_how_many_steps_it_took() -> None:
    assert steps_of(ROW, epochs=2, batch_size=30) == 8
    assert steps_of(replace(ROW, metrics={"steps": 5.0}), epochs=2, batch_size=30) == 5
    assert steps_of(replace(ROW, metrics={"steps": -5.0}), epochs=2, batch_size=30) == 8


def test_a_job_that_does_not_normalise_multiplies_nothing() -> None:
    assert factors_of(job(normalize_steps=False), 1, [ROW], {ROW.client_id: 1.0}) == {}


SGD_ARGS: list[dict[str, Any]] = [{}, {"nesterov": True}, {"dampening": 0.5}]


def test_the_momentum_of_the_built_in_sgd_counts_and_no_other() -> None:
    rows = [ROW, replace(ROW, client_id="b", num_samples=1000)]
    weights = {row.client_id: float(row.num_samples) for row in rows}
    plain = factors_of(job(), 1, rows, weights)
    assert factors_of(job(momentum=0.9), 1, rows, weights) != plain
    assert factors_of(job(momentum=0.9, optimizer="fedring.train.optimizers:adam"), 1, rows, weights) == plain
    rows = [replace(ROW, metrics={"steps": 2.0}), replace(ROW, client_id="b", metrics={"steps": 6.0})]
    found = [factors_of(job(momentum=0.9, optimizer_args=args), 1, rows, weights)["b"] for args in SGD_ARGS]
    assert len({round(factor, 4) for factor in found}) == len(SGD_ARGS)


def test_an_update_is_normalised_before_it_is_clipped() -> None:
    rows = [ROW, replace(ROW, client_id="b", num_samples=1000)]
    rows = [replace(row, norm=1.0) for row in rows]
    unclipped = guard(job(), rows)
    assert max(unclipped.factors.values()) > 1
    assert unclipped.clipped == ()
    clipped = guard(job(update_clip=1.0), rows)
    assert clipped.clipped == (max(unclipped.factors, key=unclipped.factors.__getitem__),)
    assert {client: min(1.0, factor) for client, factor in unclipped.factors.items()} == pytest.approx(clipped.factors)


@given(
    claims=st.lists(st.floats(1, 1e200), min_size=3, max_size=9),
    weights=st.lists(st.floats(1, 2**40), min_size=9, max_size=9),
    momentum=st.sampled_from([0.0, 0.9]),
)
def test_no_claim_gives_a_factor_beyond_the_square_of_the_spread(
    claims: list[float], weights: list[float], momentum: float
) -> None:
    names = [str(number) for number in range(len(claims))]
    found = of_steps(dict(zip(names, weights, strict=False)), dict(zip(names, claims, strict=True)), momentum=momentum)
    most = SPREAD**2 * (1 + 1e-9)
    assert all(1 / most <= factor <= most for factor in found.values())


def test_one_liar_among_honest_clients_gains_at_most_the_spread_and_a_little() -> None:
    honest = dict.fromkeys("bcdefghij", 20.0)
    weights = dict.fromkeys("abcdefghij", 1.0)
    assert of_steps(weights, {"a": 1.0, **honest})["a"] < SPREAD
    inflated = of_steps(weights, {"a": 1e9, **honest})
    assert max(inflated.values()) < 2


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"mu": 0.1}, "normalize_steps does not go with mu=0.1: leave one of them out"),
        ({"optimizer_args": {"dampening": 1.5}}, "normalize_steps needs optimizer_args.dampening from 0 to 1"),
        ({"mode": "data_parallel"}, "normalize_steps does not go with a data_parallel job"),
    ],
)
def test_a_job_that_cannot_normalise_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as refused:
        job(**keys)
    assert sentence in explain(refused.value, {}, Job)


async def test_a_round_normalises_the_updates_of_its_clients(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        sessions = [host.join(client) for client in "ab"]
        keys = {"normalize_steps": True, "momentum": 0.0, "batch_size": 10, "min_clients": 2}
        row, _ = await host.jobs.start(spec(**keys), "")
        commands = [await host.command(session) for session in sessions]
        before = host.rounds.latest
        assert before is not None
        for client, samples, values in (("a", 20, ONES), ("b", 60, 6 * ONES)):
            partial, update = host.update(commands[0], client, values)
            await host.offer((partial, replace(update, num_samples=samples)))
        assert await host.ended(row.job_id) == "completed"
        after = host.rounds.latest
        assert after is not None
        values_of = []
        for model in (before, after):
            with host.blobs.reader(model.blob) as blob:
                values_of.append(ModelReader(blob).vectors().parameters)
    # tau = 2 and 6, p = 1/4 and 3/4, tau_eff = 5: 5 (1/4 * 1 / 2 + 3/4 * 6 / 6) = 4.375
    assert np.allclose(values_of[1] - values_of[0], 4.375)
