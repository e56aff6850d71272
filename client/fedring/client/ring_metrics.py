"""Metrics of rings and of data-parallel training.

They are read from counters that exist anyway, so a step costs no more.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:  # a client that only takes part in federated rounds never imports these
    from fedring.ring import Traffic
    from fedring.workers.data_parallel_epochs import DataParallelTraining
    from fedring.workers.usage import Usage

Facts = dict[str, float]

_FLOAT = 4  # bytes
_SUMS = ("steps", "seconds", "samples", "wait_seconds", "compress_seconds", "decompress_seconds")  # of Usage


@runtime_checkable
class Sparse(Protocol):
    """A hook that sends a share of the gradient.

    It keeps the rest as its residual.
    """

    def sparsity(self) -> float:
        """Return the share of the entries that the hook sends now."""
        ...

    def residual_norm(self) -> float:
        """Return the L2 norm of the residual."""
        ...


class RingMetrics(Collector):
    """The sums of this process's rings and data-parallel trainings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._past: Facts = {}  # the sums of trainings that have ended
        self._now: Callable[[], Facts] = dict  # returns the figures of the training that runs
        self._hook: Callable[[], object] = lambda: None  # returns the hook of the newest training, while it exists
        self._traffic: Callable[[], Traffic] | None = None

    def read(self, traffic: Callable[[], "Traffic"]) -> None:
        """Read the counters of all rings from `traffic` from now on."""
        self._traffic = traffic

    @contextmanager
    def training(self, training: "DataParallelTraining", *, workers: int) -> Iterator[None]:
        """Show a training's figures while the block runs.

        At its end they are added to the sums.
        """
        numel = sum(p.numel() for p in training.replica.model.parameters() if p.requires_grad)
        dense = _FLOAT * numel * 2 * (workers - 1) / workers  # bytes that a ring sends in an allreduce of the gradient
        with self._lock:
            self._now = lambda: _facts(training.usage, dense)
            self._hook = weakref.ref(training.hook)
        try:
            yield
        finally:
            with self._lock:
                self._past, self._now = _sum(self._past, self._now()), dict

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, for Prometheus."""
        yield from self._ring_metrics()
        yield from self._training_metrics()

    def _ring_metrics(self) -> Iterator[Metric]:
        traffic = self._traffic() if self._traffic else None
        yield SummaryMetricFamily(
            "fl_ring_allreduce_seconds",
            "Exchanges of gradients: allreduces, and allgathers of compressed ones.",
            traffic.exchanges if traffic else 0,
            traffic.exchange_seconds if traffic else 0.0,
        )
        text = "Waits for a rank to begin its part of a collective. The slowest rank is waited for most."
        waits = SummaryMetricFamily("fl_ring_wait_seconds", text, labels=["peer_rank"])
        for rank, wait in sorted(traffic.waits.items()) if traffic else ():
            waits.add_metric([str(rank)], wait.times, wait.seconds)
        yield waits
        sent = traffic.sent_bytes + traffic.shared_bytes if traffic else 0
        text = "Bytes sent to peers, over the network or through shared memory on one host."
        yield CounterMetricFamily("fl_ring_sent_bytes_total", text, sent)
        text = "Streams that were refused because their certificate is not that of a member of the group."
        yield CounterMetricFamily("fl_ring_refused_streams_total", text, traffic.refused_streams if traffic else 0)

    def _training_metrics(self) -> Iterator[Metric]:
        with self._lock:
            facts = _sum(self._past, self._now())
            hook = self._hook()
        text = "Bytes that plain allreduces of the same gradients would have sent."
        yield CounterMetricFamily("fl_ring_dense_bytes_total", text, facts["dense_bytes"])
        text = "Steps of data-parallel training."
        yield SummaryMetricFamily("fl_ring_step_seconds", text, int(facts["steps"]), facts["seconds"])
        text = "Samples on which this worker has trained in data-parallel jobs."
        yield CounterMetricFamily("fl_ring_samples_total", text, facts["samples"])
        text = "Time in steps during which the worker only waited for gradients."
        yield CounterMetricFamily("fl_ring_idle_seconds_total", text, facts["wait_seconds"])
        text = "Time that the communication hook took to compress gradients."
        yield CounterMetricFamily("fl_ring_hook_compress_seconds_total", text, facts["compress_seconds"])
        text = "Time that the communication hook took to decompress gradients."
        yield CounterMetricFamily("fl_ring_hook_decompress_seconds_total", text, facts["decompress_seconds"])
        sparse = hook if isinstance(hook, Sparse) else None
        text = "Share of the gradient's entries that the hook sends now; 1 = all."
        yield GaugeMetricFamily("fl_ring_sparsity_ratio", text, sparse.sparsity() if sparse else 1.0)
        text = "L2 norm of the hook's residual."
        yield GaugeMetricFamily("fl_ring_residual_norm", text, sparse.residual_norm() if sparse else 0.0)


def _facts(usage: "Usage", dense: float) -> Facts:
    return {name: getattr(usage, name) for name in _SUMS} | {"dense_bytes": usage.steps * dense}


def _sum(one: Facts, other: Facts) -> Facts:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in (*_SUMS, "dense_bytes")}
