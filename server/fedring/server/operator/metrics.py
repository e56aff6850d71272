"""All metrics of fl-server, in one registry."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from math import nan

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from fedring.daemon.metrics import Registry
from fedring.rpc.metrics import CallMetrics
from fedring.server.guard.metrics import GuardMetrics
from fedring.server.round.metrics import RoundMetrics
from fedring.server.round.open_round import KindMaker
from fedring.server.state.facts import Facts
from fedring.server.update.metrics import UpdateMetrics
from fedring.v1 import control_pb2, federation_pb2, rendezvous_pb2

_LAGS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_LAG_PERIOD = 0.5  # seconds


class Metrics:
    """The metrics of one fl-server; used from its event loop.

    Args:
        kinds: of rounds, beside the plain one.

    Attributes:
        of_kinds: the metrics of each kind of rounds.
    """

    def __init__(self, kinds: Sequence[type[KindMaker]] = ()) -> None:
        self.registry = registry = Registry()
        files = [file.DESCRIPTOR for file in (federation_pb2, rendezvous_pb2, control_pb2, health_pb2, reflection_pb2)]
        files += [kind.wire for kind in kinds if kind.wire is not None]
        self.calls = CallMetrics("server", registry, files)
        self.guard = GuardMetrics()
        registry.register(self.guard)
        self.rounds = RoundMetrics(registry)
        self.of_kinds = {kind: kind.declare(registry) for kind in kinds}
        self.updates = UpdateMetrics(registry)
        self._declare_jobs()
        self._declare_process()

    def _declare_jobs(self) -> None:
        new = self.registry
        text = "When this process took up the running job, of several the oldest one; 0 = none runs."
        self.job_started = new.gauge("fl_server_job_started_timestamp_seconds", text)
        text = (
            "When a job that runs has published last, or was taken up: of several, the one for which that is longest "
            "ago; 0 = none runs."
        )
        self.job_silent_since = new.gauge("fl_server_job_silent_since_timestamp_seconds", text)
        self.jobs = new.gauge("fl_server_jobs", "Jobs that run, and jobs in the queue.", state=("running", "queued"))
        text = (
            "Epsilon of all published rounds with [dp] together, for the delta of the newest such job; NaN = not known."
        )
        self.epsilon = new.gauge("fl_server_privacy_epsilon", text)
        self.epsilon.set(nan)

    def _declare_process(self) -> None:
        new = self.registry
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
        text = "1 while this server leads, or has its state for itself; 0 while it waits as a standby."
        self._leads = new.gauge("fl_server_leads", text)
        text = "The term in which this server leads, or that of the leader for which it waits; 0 = it shares no state."
        self._term = new.gauge("fl_server_leader_term", text)
        text = "When that term began, by the database's clock; 0 = it shares no state."
        self._since = new.gauge("fl_server_leader_since_timestamp_seconds", text)
        text = "Servers that wait to lead, as the leader knows; 0 on a standby."
        self._standbys = new.gauge("fl_server_standbys", text)
        text = "What the newest commit of accepted updates took to be on the disk."
        self._fsync = new.gauge("fl_server_last_fsync_seconds", text)

    def follow(self, facts: Facts) -> None:
        """Read the facts whenever Prometheus asks.

        It asks in another thread.
        """
        self._queue.set_function(lambda: facts.waiting)
        self._fsync.set_function(lambda: facts.commit_seconds)
        self._log_bytes.set_function(facts.store.log_bytes)
        self._failing.set_function(lambda: bool(facts.storage.fault))
        self._disk_free.set_function(partial(_disk, facts, "free"))
        self._disk_size.set_function(partial(_disk, facts, "total"))
        self._leads.set_function(lambda: facts.lead is None or facts.lead.here)
        self._term.set_function(lambda: facts.lead.term if facts.lead else 0)
        self._since.set_function(lambda: facts.lead.since if facts.lead else 0)
        self._standbys.set_function(lambda: len(facts.lead.standbys) if facts.lead and facts.lead.here else 0)

    async def measure_lag(self) -> None:
        """Measure again and again how late the event loop is, until cancelled."""
        while True:
            due = time.monotonic() + _LAG_PERIOD
            await asyncio.sleep(_LAG_PERIOD)
            self._lag.observe(max(0.0, time.monotonic() - due))


def _disk(facts: Facts, field: str) -> float:
    """Return a field of the state folder's DiskSpace; NaN if unknown."""
    space = facts.blobs.disk_space()
    return float(getattr(space, field)) if space else nan
