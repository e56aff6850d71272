"""Metrics of updates: their number, their sizes, and reasons for refusals."""

import asyncio
from collections.abc import Sequence

from grpc import StatusCode

from fedring.codec.errors import CodecError
from fedring.daemon.metrics import Registry
from fedring.rpc.errors import FedringError
from fedring.server.state.rows import UpdateRow

UPDATE_RESULTS = ("accepted", "duplicate", "rejected", "interrupted")

# fmt: off
REJECTIONS = (
    "already_accepted_other", "bad_chunk", "bad_compression", "bad_digest", "bad_encoding", "bad_epoch", "bad_header",
    "bad_indices", "bad_metrics", "bad_packets", "bad_request", "bad_samples", "bad_scale", "bad_update", "bomb",
    "corrupt", "database", "digest_mismatch", "disk_error", "disk_full", "internal", "missing_blob", "mixed_kinds",
    "newer_state", "no_sample_dp", "non_finite", "not_a_worker", "not_allowed", "not_masked", "not_selected",
    "out_of_range", "overloaded", "partial_busy", "round_closed", "too_large", "too_many_files", "truncated",
    "unknown_encoding",
    "unknown_round", "wrong_client", "wrong_control", "wrong_length", "wrong_model", "wrong_schema", "wrong_size",
    "wrong_width", "other",
)
# fmt: on
"""The reasons that label refused updates. A closed list, so that a client cannot create series."""

_AGAIN = (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED, StatusCode.CANCELLED)
"""The statuses of uploads that were interrupted; the client goes on with them."""

_BYTES = tuple(4.0**power for power in range(5, 16))  # 1 KiB to 1 GiB
_NORMS = tuple(10.0**power for power in range(-4, 5))


class UpdateMetrics:
    """Counts uploads that ended, by their results."""

    def __init__(self, registry: Registry) -> None:
        text = "Uploads that ended; what was interrupted, the client goes on with."
        self._updates = registry.counter("fl_server_updates_total", text, result=UPDATE_RESULTS)
        text = "Updates that were refused."
        self._rejected = registry.counter("fl_server_updates_rejected_total", text, reason=REJECTIONS)
        self._bytes = registry.histogram("fl_server_update_bytes", "Payloads of accepted updates.", _BYTES)
        text = "L2 norms of accepted updates' parameters."
        self._norm = registry.histogram("fl_server_update_norm", text, _NORMS)

    def accepted(self, rows: Sequence[UpdateRow], *, norm: bool) -> None:
        """Count accepted updates.

        Their norms are shown only if `norm` is true.
        """
        self._updates.labels("accepted").inc(len(rows))
        for row in rows:
            self._bytes.observe(row.total_bytes)
            if norm:
                self._norm.observe(row.norm)

    def repeated(self) -> None:
        """Count an update that had been accepted before."""
        self._updates.labels("duplicate").inc()

    def refused(self, error: CodecError | FedringError | asyncio.CancelledError) -> None:
        """Count an upload that ended without an accepted update."""
        if isinstance(error, asyncio.CancelledError) or (isinstance(error, FedringError) and error.status in _AGAIN):
            self._updates.labels("interrupted").inc()
            return
        self._updates.labels("rejected").inc()
        self._rejected.labels(error.reason if error.reason in REJECTIONS else "other").inc()
