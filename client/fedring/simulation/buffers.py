"""Asynchronous rounds in virtual time.

fl-server's phases of such a round decide who trains when, and when a buffer is full. A client trains as soon as it has
its command, with the model of that moment, and its answer waits in the heap until its time has come.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify

from fedring.server.asynchronous.phases import Command, Deadlines, Expire, Given, Over, asynchronous_rules
from fedring.server.round.events import (
    Abandon,
    Delivered,
    Effect,
    Enlisted,
    Event,
    Failed,
    RoundOpened,
    RoundRules,
    Start,
    Started,
    Stepped,
    TakeStep,
)
from fedring.simulation.clock import ANSWERS, RoundTimes, TimedAnswer, VirtualRounds
from fedring.simulation.timing import Availability, Pace
from fedring.train.jobs.asynchronous_table import Asynchronous


@dataclass(frozen=True, slots=True)
class VirtualCommand:
    """A command that a client works on."""

    published: int  # models that there were before it
    given: float  # virtual seconds


class VirtualBuffers(VirtualRounds):
    """The buffers of a simulation, one after the other.

    Args:
        paces: As of VirtualRounds.
        availability: As of VirtualRounds.
        table: Of the job.

    Attributes:
        staleness: Of each client's update in the newest buffer.
        failed: The clients that said in the newest round that they cannot train.
        reason: Why the newest round makes no model; empty if it does.
    """

    def __init__(self, paces: Mapping[str, Pace], availability: Availability, table: Asynchronous) -> None:
        super().__init__(paces, availability)
        self._table = table
        self._commands: dict[str, VirtualCommand] = {}
        self._left_out: dict[str, str] = {}
        self._published, self._number = 0, 0
        self.staleness: dict[str, int] = {}
        self.failed: list[str] = []
        self.reason = ""

    def fill(self, number: int, published: int, rules: RoundRules) -> Iterator[frozenset[str]]:
        """Fill one buffer, and yield the clients with new commands.

        Before it is asked for more, their answers must have been given by `expect`.

        Args:
            number: Of the round.
            published: How many models there are.
            rules: Of the job's rounds.
        """
        self._began, self._delivered, self._left_out = self.now, {}, {}
        self._published, self._number = published, number
        self.staleness, self.failed, self.reason = {}, [], ""
        for client, command in sorted(self._commands.items()):
            if published - command.published > self._table.max_staleness:
                self._drop(client, "too_stale")
        self._apply(RoundOpened(number, asynchronous_rules(rules, self._table, frozenset(self._commands))))
        while True:
            effect = self._next_effect()
            match effect:
                case Start(clients):
                    self._started = self.now
                    carried = frozenset(self._commands)
                    until = {name: self._commands[name].given + rules.deadline for name in sorted(carried)}
                    self._give(clients)
                    until |= dict.fromkeys(clients, self.now + rules.deadline)
                    self._apply(Started(clients | carried, Deadlines(until)))
                    yield clients
                case TakeStep(Command(clients)):
                    self._give(clients)
                    for client in sorted(clients):
                        self._apply(Enlisted(client))
                    self._apply(Stepped(Given(dict.fromkeys(clients, self.now + rules.deadline))))
                    yield clients
                case TakeStep(Expire(clients)):
                    for client in sorted(clients):
                        self._drop(client, "deadline")
                        self._apply(Failed(client, number))
                        self._apply(Stepped(Over(client)))
                case _:
                    return self._close(effect)

    def expect(self, answers: Mapping[str, TimedAnswer]) -> None:
        """Note the answers of clients that have just got commands."""
        for client, answer in answers.items():
            event: Event = Delivered({client}) if answer.delivers else Failed(client, self._number)
            self._push(self.now + answer.seconds, ANSWERS, client, event)

    @property
    def times(self) -> RoundTimes:
        """The course of the newest round.

        Deliveries have the seconds after each client's own command.
        """
        failed = frozenset[str]()
        return RoundTimes(self._began, self._started, self.now, dict(self._delivered), failed, dict(self._left_out))

    def _give(self, clients: frozenset[str]) -> None:
        for client in clients:
            self._commands[client] = VirtualCommand(self._published, self.now)

    def _drop(self, client: str, why: str) -> None:
        """End a command whose answer no longer counts."""
        del self._commands[client]
        self._left_out[client] = why
        self._held.pop(client, None)
        self._events = [each for each in self._events if (each[1], each[2]) != (ANSWERS, client)]
        heapify(self._events)

    def _answer(self, client: str, event: Event) -> None:
        command = self._commands.pop(client)
        if isinstance(event, Delivered):
            self._delivered[client] = self.now - command.given
            self.staleness[client] = self._published - command.published
        else:
            event = Failed(client, self._number)  # which may be a later round than that of the command
            self.failed.append(client)
        self._apply(event)
        self._apply(Stepped(Over(client)))

    def _close(self, effect: Effect) -> None:
        self.reason = effect.reason if isinstance(effect, Abandon) else ""
        self._end(effect)
