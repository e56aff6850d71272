"""The metrics that fl-client reads from rings, data-parallel training and pipelines."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fedring.client.metrics import RESULTS, ClientMetrics
from fedring.ring.transport.interface import Traffic, Wait
from fedring.workers.usage import Usage

WORKERS = 4


@pytest.fixture
def metrics() -> ClientMetrics:
    return ClientMetrics()


def value(metrics: ClientMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


class Hook:
    """A hook that sends 1 % of the entries, and whose residual has the norm 3."""

    def sparsity(self) -> float:
        return 0.01

    def residual_norm(self) -> float:
        return 3.0


def training(usage: Usage, hook: object) -> Any:
    """Return the part of a DataParallelTraining that the metrics read, with a model of 10 parameters."""
    return SimpleNamespace(usage=usage, hook=hook, replica=SimpleNamespace(model=nn.Linear(9, 1)))


def test_all_metrics_exist_before_anything_happens(metrics: ClientMetrics) -> None:
    for result in RESULTS:
        assert value(metrics, "fl_client_rounds_total", result=result) == 0
    for name in ("fl_ring_sent_bytes_total", "fl_ring_step_seconds_count", "fl_ring_residual_norm"):
        assert value(metrics, name) == 0
    assert value(metrics, "fl_ring_sparsity_ratio") == 1


def test_the_usage_of_trainings_is_shown_while_they_run_and_adds_up(metrics: ClientMetrics) -> None:
    hook = Hook()
    for round_ in (1, 2):
        running = training(Usage(), hook)
        with metrics.ring.training(running, workers=WORKERS):
            running.usage = Usage(steps=5, samples=40, seconds=2.0, wait_seconds=0.5, compress_seconds=0.25)
            assert value(metrics, "fl_ring_step_seconds_count") == 5 * round_
        assert value(metrics, "fl_ring_step_seconds_count") == 5 * round_
    assert value(metrics, "fl_ring_step_seconds_sum") == 4.0
    assert value(metrics, "fl_ring_samples_total") == 80
    assert value(metrics, "fl_ring_idle_seconds_total") == 1.0
    assert value(metrics, "fl_ring_hook_compress_seconds_total") == 0.5
    assert value(metrics, "fl_ring_dense_bytes_total") == 10 * (4 * 10) * 2 * 3 / 4
    assert value(metrics, "fl_ring_sparsity_ratio") == 0.01
    assert value(metrics, "fl_ring_residual_norm") == 3.0


def test_a_training_that_fails_is_counted(metrics: ClientMetrics) -> None:
    with pytest.raises(RuntimeError), metrics.ring.training(training(Usage(steps=3), Hook()), workers=WORKERS):
        raise RuntimeError
    assert value(metrics, "fl_ring_step_seconds_count") == 3


def test_the_metrics_do_not_keep_a_hook_alive(metrics: ClientMetrics) -> None:
    with metrics.ring.training(training(Usage(), Hook()), workers=WORKERS):
        pass
    assert value(metrics, "fl_ring_residual_norm") == 0


def test_waits_are_reported_by_rank(metrics: ClientMetrics) -> None:
    traffic = Traffic(sent_bytes=100, shared_bytes=20, exchanges=3, exchange_seconds=0.5, waits={2: Wait(4, 1.5)})
    traffic.refused_streams = 5
    metrics.ring.read(lambda: traffic + traffic)
    assert value(metrics, "fl_ring_sent_bytes_total") == 240
    assert value(metrics, "fl_ring_refused_streams_total") == 10
    assert value(metrics, "fl_ring_allreduce_seconds_count") == 6
    assert value(metrics, "fl_ring_allreduce_seconds_sum") == 1.0
    assert value(metrics, "fl_ring_wait_seconds_count", peer_rank="2") == 8
    assert value(metrics, "fl_ring_wait_seconds_sum", peer_rank="2") == 3.0


def test_runs_of_a_pipeline_add_up(metrics: ClientMetrics) -> None:
    for bubble in (0.5, 0.25):
        metrics.pipe.add_run(bubble, 3, {(1, "forward"): (4, 0.5), (1, "backward"): (4, 1.0)})
    assert value(metrics, "fl_pipe_bubble_ratio") == 0.25
    assert value(metrics, "fl_pipe_inflight_microbatches") == 3
    assert value(metrics, "fl_pipe_stage_seconds_count", stage="1", kind="forward") == 8
    assert value(metrics, "fl_pipe_stage_seconds_sum", stage="1", kind="backward") == 2.0
