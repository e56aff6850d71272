"""The spans of a round and of its phases."""

from fedring.daemon.tracing import Span
from fedring.server.round import machine as rd


class RoundTrace:
    """Follows the round in progress, one at a time."""

    def __init__(self) -> None:
        self._round: Span | None = None
        self._phase: Span | None = None
        self._at: rd.Phase | None = None

    def begin(self, number: int, job_id: int) -> str:
        """A round has begun; the name of its span, for those who take part."""
        self._round = Span("round", round=number, job=job_id)
        return self._round.traceparent

    def follow(self, round_: rd.Round | None) -> None:
        """The round is now as given: a new phase has begun if it is another, and without a round all is over."""
        phase = round_.phase if round_ else None
        if phase is self._at or self._round is None:
            return
        self._at = phase
        if self._phase:
            self._phase.end()
        if phase:
            self._phase = Span(phase, self._round.traceparent)
        else:
            self._round.end()
            self._round = self._phase = None
