"""Guards: what a client's update counts, how long it may be, and what the round's row says of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.host import SIZE, running, spec

from fedring.server.aggregation.combining import buckets_of
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.model.guards import Guard, guard, weight_of
from fedring.server.state.rows import UpdateRow
from fedring.train.jobs.job import Job


def updates(**norms: float) -> list[UpdateRow]:
    """One update for each name, of that norm; the first client has 1 sample, the second 2 and so on."""
    return [
        UpdateRow(1, name, "", "", (), number, 1, 1.0, norm, 1.0)
        for number, (name, norm) in enumerate(norms.items(), start=1)
    ]


def guarded(rows: list[UpdateRow], last: float = 0.0, **settings: Any) -> Guard:
    return guard(Job.model_validate(settings), rows, last)


def test_by_default_only_the_number_of_samples_is_bounded() -> None:
    rows = [*updates(a=1e6, b=1.0), UpdateRow(1, "c", "", "", (), 1 << 40, 1, 1.0, 1.0, 1.0)]
    found = guarded(rows)
    assert found.weights == {"a": 1.0, "b": 2.0, "c": 2.0**20}
    assert found.factors == {}
    assert found.stats() == {"capped": ["c"]}


def test_all_updates_can_count_the_same() -> None:
    found = guarded(updates(a=1.0, b=2.0, c=3.0), weights="uniform", max_samples=1)
    assert found.weights == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert found.stats() == {}


def test_with_a_robust_rule_a_claim_of_many_samples_changes_no_update() -> None:
    rows = [*updates(a=1.0, b=1.0, c=1.0), UpdateRow(1, "d", "", "", (), 1 << 40, 1, 1.0, 1.0, 1.0)]
    settings: dict[str, Any] = {"normalize_steps": True, "batch_size": 1, "momentum": 0.0}
    by_mean = guarded(rows, **settings)
    assert by_mean.factors["c"] > 5
    by_median = guarded(rows, **settings, aggregation={"rule": "median"})
    assert by_median.factors["c"] < 4
    assert (by_mean.capped, by_median.capped) == (("d",), ())


def test_the_one_update_of_a_group_is_not_told_to_be_capped() -> None:
    assert guarded(updates(a=1.0), mode="data_parallel", max_samples=1).capped == ()


def test_updates_that_are_too_long_are_shortened() -> None:
    found = guarded(updates(a=1.0, b=8.0, c=4.0, d=0.0), update_clip=2.0)
    assert found.factors == {"b": 0.25, "c": 0.5}
    assert found.stats() == {"update_clip": 2.0, "median_norm": 1.0, "clipped": ["b", "c"]}


@pytest.mark.parametrize(
    ("last", "clip", "bound"), [(3.0, 0.0, 6.0), (0.0, 0.0, 10.0), (3.0, 4.0, 4.0), (3.0, 100.0, 6.0)]
)
def test_the_bound_follows_the_last_round_and_the_first_round_itself(last: float, clip: float, bound: float) -> None:
    rows = updates(a=1.0, b=5.0, c=1e30)
    assert guarded(rows, last, update_clip_factor=2.0, update_clip=clip).bound == bound


def test_of_two_clients_the_longer_update_does_not_choose_its_bound() -> None:
    assert guarded(updates(a=1.0, b=1e6), update_clip_factor=2.0).factors == {"b": 2e-6}


async def test_the_metrics_of_a_training_count_as_much_as_its_update(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        sessions = [host.join(name) for name in ("a", "b")]
        row, _ = await host.jobs.start(spec(min_clients=2, max_samples=3), "")
        for session, loss, samples in zip(sessions, (1.0, 9.0), (1, 1 << 40), strict=True):
            partial, update = host.update(await host.command(session), session.client_id)
            await host.offer((partial, replace(update, num_samples=samples, metrics={"loss": loss, "seen_sum": 2.0})))
        assert await host.ended(row.job_id) == "completed"
        (round_,) = host.store.rounds.newest(10, row.job_id)
    assert round_.stats["metrics"] == {"train/loss": (1 * 1 + 3 * 9) / 4, "train/seen_sum": 4.0}


@pytest.mark.parametrize(("samples", "weight"), [(0, 0.0), (2, 2.0), (1 << 40, 5.0)])
def test_what_a_client_counts_is_bounded(samples: int, weight: float) -> None:
    assert weight_of(Job.model_validate({"max_samples": 5}), samples) == weight
    assert weight_of(Job.model_validate({"weights": "uniform"}), samples) == float(samples > 0)


async def test_the_buckets_of_a_round_depend_on_a_secret_that_outlives_the_server(tmp_path: Path) -> None:
    names, values = "abcdef", [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    async with running(tmp_path) as host:
        sessions = [host.join(name) for name in names]
        row, _ = await host.jobs.start(spec(min_clients=6, aggregation={"rule": "median", "bucketing": 2}), "")
        commands = [await host.command(session) for session in sessions]
        for session, command, value in zip(sessions, commands, values, strict=True):
            await host.offer(host.update(command, session.client_id, np.full(SIZE, value, np.float32)))
        assert await host.ended(row.job_id) == "completed"
        secret, models = host.store.secret, []
        for model in host.store.models.newest(2):
            with host.blobs.reader(model.blob) as blob:
                models.append(ModelReader(blob).vectors().parameters)
    buckets = buckets_of(names, 2, f"{secret}{commands[0].seed}")
    expected = np.median([np.mean([values[index] for index in bucket]) for bucket in buckets])
    assert np.allclose(models[0] - models[1], expected)
    assert len(secret) == 32
    assert secret != host.store.run_id
    async with running(tmp_path) as host:
        assert host.store.secret == secret
