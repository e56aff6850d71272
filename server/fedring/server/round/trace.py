"""Spans of rounds and of their phases."""

from opentelemetry import trace

from fedring.daemon.tracing import start_span, traceparent_of
from fedring.server.round.events import Phase, Round


class RoundTrace:
    """Makes a span of one round, and one of each phase."""

    def __init__(self) -> None:
        self._round: trace.Span | None = None
        self._phase: trace.Span | None = None
        self._at: Phase | None = None

    def begin(self, number: int, job_id: int) -> str:
        """Begin the span of a round, and return its traceparent.

        The traceparent is for the clients that take part.
        """
        self._round = start_span("round", round=number, job=job_id)
        return traceparent_of(self._round)

    def follow(self, round_: Round | None) -> None:
        """End the span of the last phase, and begin the next.

        Without a round, both the phase's span and the round's end.
        """
        phase = round_.phase if round_ else None
        if phase is self._at or self._round is None:
            return
        self._at = phase
        if self._phase:
            self._phase.end()
        if phase:
            self._phase = start_span(phase, traceparent_of(self._round))
        else:
            self._round.end()
            self._round = self._phase = None
