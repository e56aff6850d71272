"""All metrics of fl-client.

They are counted where things happen, or read when Prometheus asks.
"""

from math import nan

from fedring.client.pipeline_metrics import PipelineMetrics
from fedring.client.ring_metrics import RingMetrics
from fedring.daemon.metrics import Registry
from fedring.rpc.metrics import CallMetrics
from fedring.v1 import federation_pb2, rendezvous_pb2

RESULTS = ("accepted", "trained", "refused", "failed", "zeroed", "over")
"""The outcomes of a client's part in a round.

"trained" means that another worker of the group delivers, "zeroed" that the client has failed, and that the server got
an update that changes nothing in the place of the reason.
"""

HIDDEN = (
    "bad_batch", "bad_result", "disk_failed", "diverged", "frozen_changed", "no_update", "non_finite", "out_of_memory",
    "process_ended", "too_long", "train_error", "wrong_schema", "other",
)  # fmt: skip
"""The reasons of failures that the server is not told."""

_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class ClientMetrics:
    """The metrics of one client, and the registry that serves them."""

    def __init__(self) -> None:
        self.registry = new = Registry()
        files = (federation_pb2.DESCRIPTOR, rendezvous_pb2.DESCRIPTOR)
        self.calls = CallMetrics("client", new, files)
        text = "Rounds that this client was asked to train in, by what became of its part."
        self._rounds = new.counter("fl_client_rounds_total", text, result=RESULTS)
        text = "Failures that the server was not told, because masks or noise cover what the client sends."
        self._hidden = new.counter("fl_client_hidden_failures_total", text, reason=HIDDEN)
        text = "Seconds that the training of a round took."
        self._train_seconds = new.histogram("fl_client_train_seconds", text, _SECONDS)
        text = "Evaluations of models that the server has asked for, by whether this client had counts."
        self._evaluations = new.counter("fl_client_evaluations_total", text, result=("evaluated", "failed"))
        self.reconnects = new.counter("fl_client_reconnects_total", "Sessions after the first.")
        text = "Bytes of the update on disk that the server has not accepted yet."
        self.spool_bytes = new.gauge("fl_client_spool_bytes", text)
        text = "Files of what updates have left that were dropped, because they were damaged or another client's."
        self.dropped_files = new.counter("fl_client_dropped_files_total", text)
        text = "Bytes of updates' payloads that were sent."
        self.upload_bytes = new.counter("fl_client_upload_bytes_total", text)
        text = "Bytes of models' payloads that were received."
        self.download_bytes = new.counter("fl_client_download_bytes_total", text)
        text = "When the certificate of this client expires; NaN = it has none."
        self.certificate_expiry = new.gauge("fl_client_certificate_expiry_timestamp_seconds", text)
        self.certificate_expiry.set(nan)
        text = (
            "Epsilon of this client's samples over all jobs with [sample_dp], for its privacy.delta; NaN = not known."
        )
        self.sample_epsilon = new.gauge("fl_client_sample_epsilon", text)
        self.ring = RingMetrics()
        self.pipe = PipelineMetrics()
        for collector in (self.ring, self.pipe):
            new.register(collector)

    def hide(self, reason: str) -> None:
        """Count a failure that the server is not told."""
        self._hidden.labels(reason if reason in HIDDEN else "other").inc()

    def evaluated(self, counted: bool) -> None:
        """Count an evaluation.

        Args:
            counted: Whether it has counts; False = it has failed, or there are no test samples.
        """
        self._evaluations.labels("evaluated" if counted else "failed").inc()

    def finished(self, result: str, train_seconds: float | None) -> None:
        """Count the end of this client's part in a round.

        Args:
            result: One of RESULTS.
            train_seconds: How long the training took; None = it was not trained to its end.
        """
        if train_seconds is not None:
            self._train_seconds.observe(train_seconds)
        self._rounds.labels(result).inc()
