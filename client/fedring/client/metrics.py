"""fl-client's metrics, all of them: counted where it happens, or read when Prometheus asks."""

from math import nan

from fedring.client.pipeline_metrics import PipelineMetrics
from fedring.client.ring_metrics import RingMetrics
from fedring.daemon.metrics import Registry
from fedring.rpc.metrics import CallMetrics
from fedring.v1 import federation_pb2, rendezvous_pb2

RESULTS = ("accepted", "trained", "refused", "failed", "over")
"""What becomes of a client's part in a round; "trained" = another worker of the group delivers for it."""

_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class ClientMetrics:
    """What one client tells of itself."""

    def __init__(self) -> None:
        self.registry = new = Registry()
        files = (federation_pb2.DESCRIPTOR, rendezvous_pb2.DESCRIPTOR)
        self.calls = CallMetrics("client", new, files)
        text = "Rounds that this client was asked to train in, by what became of its part."
        self._rounds = new.counter("fl_client_rounds_total", text, result=RESULTS)
        text = "What the training of a round took."
        self._train_seconds = new.histogram("fl_client_train_seconds", text, _SECONDS)
        self.reconnects = new.counter("fl_client_reconnects_total", "Sessions after the first.")
        text = "The update on disk that the server has not taken yet."
        self.spool_bytes = new.gauge("fl_client_spool_bytes", text)
        text = "Bytes of updates' payloads that were sent."
        self.upload_bytes = new.counter("fl_client_upload_bytes_total", text)
        text = "Bytes of models' payloads that came."
        self.download_bytes = new.counter("fl_client_download_bytes_total", text)
        text = "When the certificate of this client ends; NaN = it has none."
        self.certificate_expiry = new.gauge("fl_client_certificate_expiry_timestamp_seconds", text)
        self.certificate_expiry.set(nan)
        self.ring = RingMetrics()
        self.pipe = PipelineMetrics()
        for collector in (self.ring, self.pipe):
            new.register(collector)

    def finished(self, result: str, train_seconds: float | None) -> None:
        """This client's part in a round is over; without `train_seconds`, it was not trained to its end."""
        if train_seconds is not None:
            self._train_seconds.observe(train_seconds)
        self._rounds.labels(result).inc()
