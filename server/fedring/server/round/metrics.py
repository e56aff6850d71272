"""Metrics of rounds, their clients, and the newest model."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import nan
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedring.daemon.metrics import SECONDS, Registry
from fedring.server.round import machine as rd
from fedring.server.round.events import Phase, Presence, Round, RoundRules, RoundState
from fedring.train.metrics import MAX_METRICS, ORIGINS

PHASES = {
    Phase.WAITING: "waiting",
    Phase.TRAINING: "training",
    Phase.AGGREGATING: "aggregating",
    Phase.PUBLISHED: "evaluating",
}
"""The phases of a round that take time, by their label."""

ROUND_RESULTS = {Phase.PUBLISHED: "published", Phase.ABANDONED: "abandoned"}
CLIENT_STATES = ("selected", "pending", "delivered", "failed", "stalled")

MAX_SERIES = len(ORIGINS) * MAX_METRICS
"""The most names that this process ever shows. Users and clients choose the names, and must not create many series."""


class RoundMetrics:
    """Counts rounds and their clients; used from the event loop."""

    def __init__(self, registry: Registry) -> None:
        self._rules: dict[int, RoundRules] = {}  # of each open round
        self._began: dict[int, float] = {}  # when the training of each open round began, monotonic
        self.named = NamedMetrics()
        registry.register(self.named)
        self._declare_rounds(registry)
        self._declare_models(registry)

    def _declare_rounds(self, new: Registry) -> None:
        self._rounds = new.counter("fl_server_rounds_total", "Rounds that ended.", result=ROUND_RESULTS.values())
        text = "From the command to the clients to the published model."
        self._duration = new.histogram("fl_server_round_duration_seconds", text, SECONDS)
        text = "What rounds spent in each phase."
        self._phase = new.histogram("fl_server_round_phase_seconds", text, SECONDS, phase=PHASES.values())
        text = "When the newest round published; 0 = none has since the start."
        self._completed = new.gauge("fl_server_round_last_completed_timestamp_seconds", text)
        self._clients = new.gauge("fl_server_round_clients", "Clients of the round in progress.", state=CLIENT_STATES)
        self._connected = new.gauge("fl_server_clients_connected", "Clients that watch, and have confirmed it.")
        text = "How often a client was found to be stalled: it had reported no progress for stalled_after_seconds."
        self.stalled = new.counter("fl_server_clients_stalled_total", text)
        text = "Clients that rounds went on without because of straggler_factor or select_factor."
        self.stragglers = new.counter("fl_server_stragglers_total", text)
        text = (
            "What clients have to train and deliver in an open round, of several the most; without one, what they had "
            "in the newest round."
        )
        self._deadline = new.gauge("fl_server_round_deadline_seconds", text)
        text = (
            "Clients that an open round needs to start, of several the most; between the rounds of a job, those of the "
            "newest one; without a job, those that the configuration says."
        )
        self._min_clients, self._usual = new.gauge("fl_server_round_min_clients", text), 0

    def _declare_models(self, new: Registry) -> None:
        text = "Accepted updates whose bytes were found to be damaged: rounds ended without them."
        self._lost = new.counter("fl_server_updates_lost_total", text)
        text = "Accepted updates that counted for max_samples, although their clients reported more samples."
        self._capped = new.counter("fl_server_updates_capped_total", text)
        text = "Accepted updates that were shortened by update_clip or update_clip_factor."
        self._clipped = new.counter("fl_server_updates_clipped_total", text)
        text = "From the accepted updates to the next model on disk."
        self.aggregate_seconds = new.histogram("fl_server_aggregate_seconds", text, SECONDS)
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

    def follow(self, here: Callable[[], RoundState], rounds: Callable[[], list[RoundState]]) -> None:
        """Read clients and rounds whenever Prometheus asks.

        It asks in another thread.
        """
        self._connected.set_function(lambda: _count(here(), Presence.MATCHED))
        for name in CLIENT_STATES:
            self._clients.labels(name).set_function(partial(_clients, rounds, name))

    def moved(self, before: Round | None, after: Round | None, now: float) -> None:
        """Count a change of a round.

        Args:
            before: the round before the change; None if there was none.
            after: the round now; None if it has finished.
            now: monotonic seconds.
        """
        # A resumed round may be past its training, so its duration counts from now.
        if before is None:
            if after is not None:
                self._rules[after.number] = after.rules
                self._demand()
                self._began[after.number] = now
            return
        if after is not None and after.phase is before.phase:
            if after.phase is Phase.AGGREGATING:
                self._lost.inc(len(before.delivered - after.delivered))
            return
        if before.phase in PHASES:
            self._phase.labels(PHASES[before.phase]).observe(now - before.since)
        if after is None:
            self._began.pop(before.number, None)
            self._rules.pop(before.number, None)
            self._demand()
            return
        if after.phase is Phase.TRAINING:
            self._began[after.number] = now
        if after.phase in ROUND_RESULTS:
            self._rounds.labels(ROUND_RESULTS[after.phase]).inc()
        if after.phase is Phase.PUBLISHED:
            self._duration.observe(now - self._began[after.number])
            self._completed.set(time.time())

    def _demand(self) -> None:
        """Show the demands of the open rounds, or of the last one."""
        # Of several jobs, one may open a round of seconds again and again while another one trains for hours.
        if self._rules:
            self._deadline.set(max(rules.deadline for rules in self._rules.values()))
            self._min_clients.set(max(map(rd.needed, self._rules.values())))

    def expect(self, clients: int) -> None:
        """Show so many clients as needed while no job runs."""
        self._usual = clients
        self._min_clients.set(clients)

    def job_ended(self) -> None:
        """Show the usual number again, unless rounds of other jobs are open."""
        if not self._rules:
            self._min_clients.set(self._usual)

    def evaluated(self, stats: Mapping[str, Any]) -> None:
        """Show the figures of an evaluation that has ended.

        `stats` are those of the round's row.
        """
        figures = stats["metrics"]
        for name, gauge in (("accuracy", self._accuracy), ("loss", self._loss)):
            keys = [f"{origin}/{name}" for origin in ("eval", "server") if f"{origin}/loss" in figures]
            if keys:
                gauge.set(next((figures[key] for key in keys if key in figures), nan))
        self.named.show(figures)

    def guarded(self, stats: Mapping[str, Any]) -> None:
        """Count the updates that guards changed in a round."""
        self._capped.inc(len(stats.get("capped", ())))
        self._clipped.inc(len(stats.get("clipped", ())))


class NamedMetrics(Collector):
    """The figures of the last evaluated round, for Prometheus.

    Prometheus reads them in another thread.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()  # all that have been shown, at most MAX_SERIES
        self._figures: Mapping[str, float] = {}

    def show(self, figures: Mapping[str, float]) -> None:
        """Show the figures of this round in place of the last one's."""
        fresh = sorted(figures.keys() - self._names)
        self._names.update(fresh[: MAX_SERIES - len(self._names)])
        self._figures = {name: value for name, value in figures.items() if name in self._names}

    def collect(self) -> Iterator[Metric]:
        """Yield the metric, for Prometheus."""
        text = "Named metrics of the round that was evaluated last: means over clients, or sums if they end in _sum."
        family = GaugeMetricFamily("fl_server_round_metric", text, labels=["metric"])
        for name, value in sorted(self._figures.items()):
            family.add_metric([name], value)
        yield family


def _count(state: RoundState, presence: Presence) -> int:
    return sum(member.presence is presence for member in state.members.values())


def _clients(rounds: Callable[[], list[RoundState]], name: str) -> int:
    """Return how many clients of the open rounds are in that state."""
    states = [(state, state.round) for state in rounds() if state.round is not None]
    if name == "pending":
        return sum(len(rd.pending(state, time.monotonic())) for state, _ in states)
    return sum(len(getattr(round_, name)) for _, round_ in states)
