"""Rounds in virtual time.

fl-server's own state machine decides when a round begins, when it ends, and who is in it. Here it is given events
from a heap, with the times at which they happen, and the time is whatever the next event or the next deadline says.
Nothing waits, and no rule of a round is written again.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from fedring.server.round import machine
from fedring.server.round.events import (
    Abandon,
    Abandoned,
    Aggregate,
    Closed,
    Delivered,
    Effect,
    Event,
    Failed,
    Finished,
    Left,
    Matched,
    Member,
    Presence,
    Published,
    RoundOpened,
    RoundRules,
    RoundState,
    Start,
    Started,
)
from fedring.server.sessions.members import Members
from fedring.simulation.timing import Availability, Pace

_COMES, ANSWERS, _GOES = range(3)
"""The order of events at the same time: a client that goes has answered before."""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """The answer of a client to a command, with its time."""

    seconds: float  # after the command
    delivers: bool  # False = it says that it cannot train


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """The course of a round.

    Times are virtual seconds since the simulation began.
    """

    began: float
    started: float | None  # when the command was sent; None = too few clients came
    ended: float
    delivered: Mapping[str, float]  # seconds after the command, in the order of the deliveries
    failed: frozenset[str]  # that said so before the end
    left_out: Mapping[str, str]  # clients that had not answered at the end, and why nobody waited

    @property
    def figures(self) -> dict[str, Any]:
        """The figures for a report."""
        return {
            "began": self.began,
            "started": self.started,
            "ended": self.ended,
            "seconds": self.ended - self.began,
            "delivered": dict(self.delivered),
            "left_out": dict(self.left_out),
        }


class VirtualRounds:
    """The rounds of a simulation, one after the other.

    Args:
        paces: The times of each client that can take part, by id.
        availability: When clients are there.

    Attributes:
        now: The virtual time, in seconds.
    """

    def __init__(self, paces: Mapping[str, Pace], availability: Availability) -> None:
        self.now = 0.0
        self._here_for = availability.share * availability.period_seconds
        self._away_for = availability.period_seconds - self._here_for
        self._events: list[tuple[float, int, str, Event]] = []
        self._held: dict[str, Event] = {}  # answers of clients that are away
        self._delivered: dict[str, float] = {}
        self._began = self._started = 0.0
        here = set(paces)
        if self._away_for:
            # A client that comes `comes` seconds after the begin goes, in the period before, `_away_for` earlier.
            for client, pace in paces.items():
                if (goes := pace.comes - self._away_for) > 0:
                    self._push(goes, _GOES, client, Left(client))
                else:
                    self._push(pace.comes, _COMES, client, Matched(client))
                    here.discard(client)
        self._state = RoundState(Members((client, Member(Presence.MATCHED, 0.0)) for client in sorted(here)))

    def begin(self, number: int, rules: RoundRules) -> list[str]:
        """Wait for clients, and return those that are drawn, sorted.

        There are none if too few come in time: the round is over then, and `abandoned` has its times.

        Args:
            number: Of the round.
            rules: By which it goes.
        """
        self._began = self.now
        self._delivered = {}
        self._apply(RoundOpened(number, rules))
        effect = self._next_effect()
        if isinstance(effect, Start):
            self._started = self.now
            self._apply(Started(effect.clients))
            return sorted(effect.clients)
        self._end(effect)
        return []

    def abandoned(self) -> RoundTimes:
        """Return the times of a round for which too few clients came."""
        return RoundTimes(self._began, None, self.now, {}, frozenset(), {})

    def finish(self, answers: Mapping[str, TimedAnswer]) -> RoundTimes:
        """Let the clients answer until the round ends.

        Args:
            answers: Of each client that `begin` has returned.
        """
        number = self._state.round.number if self._state.round else 0
        for client, answer in answers.items():
            event = Delivered({client}) if answer.delivers else Failed(client, number)
            self._push(self.now + answer.seconds, ANSWERS, client, event)
        effect, left_out = self._next_effect(), dict[str, str]()
        round_ = self._state.round
        if round_ is None:
            raise machine.IllegalEvent("a round has ended by itself")
        expected = machine.pending(self._state, self.now)
        stragglers = effect.stragglers if isinstance(effect, Aggregate) else frozenset[str]()
        late = "deadline" if self.now >= machine.deadline(round_) else "closed early"
        for client in sorted(round_.selected - round_.delivered - round_.failed):
            left_out[client] = "straggler" if client in stragglers else late if client in expected else "away"
        self._end(effect)
        # Whoever was left out stops, as fl-client does as soon as it hears of the end.
        self._held.clear()
        self._events = [each for each in self._events if each[1] != ANSWERS]
        heapify(self._events)
        return RoundTimes(self._began, self._started, self.now, dict(self._delivered), round_.failed, left_out)

    def _end(self, effect: Effect) -> None:
        """End the round.

        To make a model and to evaluate it takes no time.
        """
        ends: Collection[Event] = (Closed(), Published(frozenset()))
        for event in (Abandoned(effect.reason),) if isinstance(effect, Abandon) else ends:
            self._apply(event)
        self._apply(Finished())

    def _next_effect(self) -> Effect:
        """Go on in time until something is due."""
        while (effect := machine.due(self._state, self.now)) is None:
            wake = machine.wake_at(self._state, self.now)
            # What happens at the moment of a deadline happens before it.
            if self._events and self._events[0][0] <= wake:
                self.now, _, client, event = heappop(self._events)
                self._happen(client, event)
            else:
                self.now = wake
        return effect

    def _happen(self, client: str, event: Event) -> None:
        match event:
            case Matched():
                self._push(self.now + self._here_for, _GOES, client, Left(client))
                self._apply(event)
                if client in self._held:
                    self._answer(client, self._held.pop(client))
            case Left():
                self._push(self.now + self._away_for, _COMES, client, Matched(client))
                self._apply(event)
            case _ if self._state.members[client].presence is Presence.AWAY:
                self._held[client] = event  # it trains on while it is away, and delivers when it is back
            case _:
                self._answer(client, event)

    def _answer(self, client: str, event: Event) -> None:
        if isinstance(event, Delivered):
            self._delivered[client] = self.now - self._started
        self._apply(event)

    def _apply(self, event: Event) -> None:
        self._state = machine.apply(self._state, event, self.now)

    def _push(self, at: float, order: int, client: str, event: Event) -> None:
        heappush(self._events, (at, order, client, event))
