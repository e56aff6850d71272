"""fl-server's metrics: counted where something happens, or read when Prometheus asks."""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import nan
from typing import Any

from grpc import StatusCode
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from fedring.codec.errors import CodecError
from fedring.daemon.metrics import Registry
from fedring.rpc.errors import FedringError
from fedring.rpc.metrics import CallMetrics
from fedring.server.round import machine as rd
from fedring.server.round.events import Phase, Presence, Round, State
from fedring.server.round.guard_metrics import GuardMetrics
from fedring.server.round.named_metrics import NamedMetrics
from fedring.server.secure.events import Step
from fedring.server.state.facts import Facts
from fedring.server.state.rows import UpdateRow
from fedring.v1 import control_pb2, federation_pb2, rendezvous_pb2, secure_pb2

PHASES = {
    Phase.WAITING: "waiting",
    Phase.TRAINING: "training",
    Phase.AGGREGATING: "aggregating",
    Phase.PUBLISHED: "evaluating",
}
"""The phases of a round that take time, by their label."""

ROUND_RESULTS = {Phase.PUBLISHED: "published", Phase.ABANDONED: "abandoned"}
CLIENT_STATES = ("selected", "pending", "delivered", "failed", "stalled")
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

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_BYTES = tuple(4.0**power for power in range(5, 16))  # 1 KiB to 1 GiB
_NORMS = tuple(10.0**power for power in range(-4, 5))
_LAGS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_LAG_PERIOD = 0.5  # seconds


class Metrics:
    """The metrics of one fl-server; used from its event loop."""

    def __init__(self) -> None:
        self.registry = registry = Registry()
        files = (federation_pb2, rendezvous_pb2, secure_pb2, control_pb2, health_pb2, reflection_pb2)
        self.calls = CallMetrics("server", registry, [file.DESCRIPTOR for file in files])
        self.guard = GuardMetrics()
        registry.register(self.guard)
        self.named = NamedMetrics()
        registry.register(self.named)
        self._began = 0.0  # the training of the round in progress, monotonic
        self._declare_rounds()
        self._declare_secure_aggregation()
        self._declare_updates()
        self._declare_process()

    def _declare_rounds(self) -> None:
        new = self.registry
        self._rounds = new.counter("fl_server_rounds_total", "Rounds that ended.", result=ROUND_RESULTS.values())
        text = "From the command to the clients to the published model."
        self._duration = new.histogram("fl_server_round_duration_seconds", text, _SECONDS)
        text = "What rounds spent in each phase."
        self._phase = new.histogram("fl_server_round_phase_seconds", text, _SECONDS, phase=PHASES.values())
        text = "When the newest round published; 0 = none has since the start."
        self._completed = new.gauge("fl_server_round_last_completed_timestamp_seconds", text)
        self._clients = new.gauge("fl_server_round_clients", "Clients of the round in progress.", state=CLIENT_STATES)
        text = "How often a client was found to be stalled: it had reported no progress for stalled_after_seconds."
        self.stalled = new.counter("fl_server_clients_stalled_total", text)
        text = "Clients that rounds went on without because of straggler_factor."
        self.stragglers = new.counter("fl_server_stragglers_total", text)
        text = "What clients had in the newest round to train and deliver."
        self._deadline = new.gauge("fl_server_round_deadline_seconds", text)
        text = "Clients that the newest round needed to start; before it, those that the configuration says."
        self.min_clients = new.gauge("fl_server_round_min_clients", text)
        text = "When this process took up the running job; 0 = none runs."
        self.job_started = new.gauge("fl_server_job_started_timestamp_seconds", text)

    def _declare_secure_aggregation(self) -> None:
        new, steps = self.registry, [step for step in Step if step is not Step.DONE]
        text = "What each step of secure aggregation took, group by group."
        self.secure_seconds = new.histogram("fl_server_secure_step_seconds", text, _SECONDS, step=steps)
        text = "Clients that secure aggregation went on without from each of its steps on."
        self.secure_lost = new.counter("fl_server_secure_lost_clients_total", text, step=steps)

    def _declare_updates(self) -> None:
        new = self.registry
        text = "Uploads that ended; what was interrupted, the client goes on with."
        self._updates = new.counter("fl_server_updates_total", text, result=UPDATE_RESULTS)
        text = "Updates that were refused."
        self._rejected = new.counter("fl_server_updates_rejected_total", text, reason=REJECTIONS)
        text = "Accepted updates whose bytes were found to be damaged: rounds ended without them."
        self._lost = new.counter("fl_server_updates_lost_total", text)
        text = "Accepted updates that counted for max_samples, although their clients reported more samples."
        self._capped = new.counter("fl_server_updates_capped_total", text)
        text = "Accepted updates that were shortened by update_clip or update_clip_factor."
        self._clipped = new.counter("fl_server_updates_clipped_total", text)
        self._bytes = new.histogram("fl_server_update_bytes", "Payloads of accepted updates.", _BYTES)
        self._norm = new.histogram("fl_server_update_norm", "L2 norms of accepted updates' parameters.", _NORMS)
        text = "From the accepted updates to the next model on disk."
        self.aggregate_seconds = new.histogram("fl_server_aggregate_seconds", text, _SECONDS)
        self._loss = new.gauge(
            "fl_server_model_loss", "Mean loss of the model that was evaluated last; NaN = none was yet."
        )
        text = (
            "Accuracy of the model that was evaluated last: on clients' held-out samples, or else on the server's; "
            "NaN = it is not defined, or not known yet."
        )
        self._accuracy = new.gauge("fl_server_model_accuracy_ratio", text)
        for gauge in (self._loss, self._accuracy):
            gauge.set(nan)

        text = (
            "Epsilon of all published rounds with [dp] together, for the delta of the newest such job; NaN = not known."
        )
        self.epsilon = new.gauge("fl_server_privacy_epsilon", text)
        self.epsilon.set(nan)

    def _declare_process(self) -> None:
        new = self.registry
        text = "Clients that watch, and have confirmed it."
        self._connected = new.gauge("fl_server_clients_connected", text)
        text = "When the certificate of this server ends; NaN = it has none."
        self.certificate_expiry = new.gauge("fl_server_certificate_expiry_timestamp_seconds", text)
        self.certificate_expiry.set(nan)
        text = "How late a timer of the event loop fires."
        self._lag = new.histogram("fl_server_event_loop_lag_seconds", text, _LAGS)
        text = "Pieces of work that threads do, or that wait for one."
        self._queue = new.gauge("fl_server_executor_queue_length", text)
        text = "What the disk of the state folder can still hold."
        self._disk_free = new.gauge("fl_server_disk_free_bytes", text)
        self._disk_size = new.gauge("fl_server_disk_size_bytes", "What the disk of the state folder can hold in all.")
        text = "1 while nothing can be kept, because the disk is full or fails; else 0."
        self._failing = new.gauge("fl_server_storage_failing", text)
        text = "Length of the database's log, which is emptied after rounds and from database_log_bytes on."
        self._log_bytes = new.gauge("fl_server_database_log_bytes", text)
        text = "What the newest commit of accepted updates took to be on the disk."
        self._fsync = new.gauge("fl_server_last_fsync_seconds", text)

    def follow(self, state: Callable[[], State], facts: Facts) -> None:
        """Read the machine's state and the facts whenever Prometheus asks, which it does in another thread."""
        self._connected.set_function(lambda: _count(state(), Presence.MATCHED))
        for name in CLIENT_STATES:
            self._clients.labels(name).set_function(partial(_clients, state, name))
        self._queue.set_function(lambda: facts.waiting)
        self._fsync.set_function(lambda: facts.commit_seconds)
        self._log_bytes.set_function(facts.store.log_bytes)
        self._failing.set_function(lambda: bool(facts.storage.fault))
        self._disk_free.set_function(partial(_disk, facts, "free"))
        self._disk_size.set_function(partial(_disk, facts, "total"))

    def moved(self, before: Round | None, after: Round | None, now: float) -> None:
        """Count a change of the round in progress.

        Args:
            before: the round before the change; None if there was none.
            after: the round now; None if it has finished.
            now: monotonic seconds.
        """
        if before is None:
            if after is not None:
                self._deadline.set(after.rules.deadline)
                self.min_clients.set(after.rules.min_clients)
                self._began = now
            return
        if after is not None and after.phase is before.phase:
            if after.phase is Phase.AGGREGATING:
                self._lost.inc(len(before.delivered - after.delivered))
            return
        if before.phase in PHASES:
            self._phase.labels(PHASES[before.phase]).observe(now - before.since)
        if after is None:
            return
        if after.phase is Phase.TRAINING:
            self._began = now
        if after.phase in ROUND_RESULTS:
            self._rounds.labels(ROUND_RESULTS[after.phase]).inc()
        if after.phase is Phase.PUBLISHED:
            self._duration.observe(now - self._began)
            self._completed.set(time.time())

    def evaluated(self, stats: Mapping[str, Any]) -> None:
        """Show the figures of an evaluation that is over; `stats` are those of the round's row."""
        figures = stats["metrics"]
        for name, gauge in (("accuracy", self._accuracy), ("loss", self._loss)):
            keys = [f"{origin}/{name}" for origin in ("eval", "server") if f"{origin}/loss" in figures]
            if keys:
                gauge.set(next((figures[key] for key in keys if key in figures), nan))
        self.named.show(figures)

    def accepted(self, row: UpdateRow, *, norm: bool) -> None:
        """Count an accepted update; its norm is shown only if `norm` is true."""
        self._updates.labels("accepted").inc()
        self._bytes.observe(row.total_bytes)
        if norm:
            self._norm.observe(row.norm)

    def guarded(self, stats: Mapping[str, Any]) -> None:
        """Count the updates that guards have changed, by the figures of their round."""
        self._capped.inc(len(stats.get("capped", ())))
        self._clipped.inc(len(stats.get("clipped", ())))

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

    async def measure_lag(self) -> None:
        """Measure again and again how late the event loop is, until cancelled."""
        while True:
            due = time.monotonic() + _LAG_PERIOD
            await asyncio.sleep(_LAG_PERIOD)
            self._lag.observe(max(0.0, time.monotonic() - due))


def _count(state: State, presence: Presence) -> int:
    return sum(member.presence is presence for member in state.members.values())


def _clients(state: Callable[[], State], name: str) -> int:
    """Return how many clients of the round in progress are in that state."""
    now = state()
    if now.round is None:
        return 0
    return len(rd.pending(now, time.monotonic()) if name == "pending" else getattr(now.round, name))


def _disk(facts: Facts, field: str) -> float:
    """Return a field of the state folder's DiskSpace; NaN if it cannot be found out."""
    space = facts.blobs.disk_space()
    return float(getattr(space, field)) if space else nan
