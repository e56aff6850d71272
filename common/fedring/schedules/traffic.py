"""The messages between the actions of a schedule.

They follow from the routes that tensors take.
"""

from collections import defaultdict
from math import lcm
from typing import NamedTuple

from fedring.schedules.routes import Routes
from fedring.schedules.schedule import Action, Kind, Schedule, ScheduleError


class Lane(NamedTuple):
    """The messages of one kind and edge between two workers."""

    kind: Kind  # FORWARD for tensors, BACKWARD for their gradients
    edge: int  # its number in Routes.edges
    sender: int
    receiver: int


class Traffic:
    """The messages of a schedule over given routes.

    Attributes:
        schedule: The schedule.
        routes: The routes.
        edges: The edges of the routes, by number.
    """

    def __init__(self, schedule: Schedule, routes: Routes) -> None:
        """Make the traffic.

        Raises:
            ScheduleError: If the routes are those of another number of stages, or a stage has no use.
        """
        if routes.stages != schedule.stages:
            raise ScheduleError(
                f"routes of {routes.stages} stages were given for a schedule of {schedule.stages} stages"
            )
        self.schedule, self.routes, self.edges = schedule, routes, routes.edges
        self._owners = [schedule.owners(stage) for stage in range(schedule.stages)]
        self._into: dict[int, list[int]] = defaultdict(list)  # the edges to a stage
        self._out_of: dict[int, list[int]] = defaultdict(list)  # the edges from a stage
        for number, edge in enumerate(self.edges):
            self._into[edge.target].append(number)
            self._out_of[edge.source].append(number)
        for stage in range(schedule.stages - 1):
            if not self._out_of[stage]:
                raise ScheduleError(f"no later stage uses what stage {stage} makes")

    def received(self, action: Action) -> list[int]:
        """Return the edges of the messages that an action needs.

        They are in the order in which it takes them.
        """
        if action.kind is Kind.UPDATE:
            return []
        return (self._into if action.kind is Kind.FORWARD else self._out_of)[action.stage]

    def sent(self, action: Action) -> list[int]:
        """Return the edges of the messages that an action sends.

        They are in the order of sending.
        """
        if action.kind is Kind.UPDATE:
            return []
        return (self._out_of if action.kind is Kind.FORWARD else self._into)[action.stage]

    def lane(self, kind: Kind, edge: int, micro_batch: int) -> Lane:
        """Return the lane that carries a message."""
        _, source, target = self.edges[edge]
        makers, users = self._owners[source], self._owners[target]
        maker, user = makers[micro_batch % len(makers)], users[micro_batch % len(users)]
        return Lane(kind, edge, maker, user) if kind is Kind.FORWARD else Lane(kind, edge, user, maker)

    def lanes(self, worker: int) -> dict[Lane, int]:
        """Return the lanes between a worker and others, with message counts.

        The counts are those of a run.
        """
        counts: dict[Lane, int] = defaultdict(int)
        for action in self.schedule.workers[worker]:
            for edge in self.sent(action):
                counts[self.lane(action.kind, edge, action.micro_batch)] += 1
            for edge in self.received(action):
                counts[self.lane(action.kind, edge, action.micro_batch)] += 1
        return {lane: count for lane, count in counts.items() if lane.sender != lane.receiver}

    def receipts(self, lane: Lane, credits: int) -> frozenset[int]:
        """Return the messages of a lane whose sender needs a receipt.

        Message n + credits waits until message n was taken. The lane that carries the answers of the same tensor, its
        gradients or the tensors that they belong to, often tells that: an answer that was sent after message n was
        taken, and that the schedule has the sender take before it sends message n + credits. Such a message needs no
        receipt. This holds only if each tensor is answered, so for no tensor without gradients.

        Args:
            lane: The lane.
            credits: How many of its messages may be sent before the first of them is taken.

        Returns:
            The numbers of the messages, in the order in which the receiver takes them.
        """
        heard, answered = self._answers_before(lane.sender, lane), self._answers_before(lane.receiver, lane)
        waiting = range(len(heard) - credits)
        return frozenset(number for number in waiting if heard[number + credits] <= answered[number])

    def _answers_before(self, worker: int, lane: Lane) -> list[int]:
        """Count the answers before each message of a lane, at one end.

        They are those that the worker has taken, if it sends the messages, or has sent, if it takes them.
        """
        kind = Kind.BACKWARD if lane.kind is Kind.FORWARD else Kind.FORWARD
        back = Lane(kind, lane.edge, lane.receiver, lane.sender)
        found, answers = [], 0
        for action in self.schedule.workers[worker]:
            # An action takes all of its messages before it sends its results.
            for edge in (*self.received(action), *self.sent(action)):
                if edge == lane.edge:
                    passed = self.lane(action.kind, edge, action.micro_batch)
                    answers += passed == back
                    if passed == lane:
                        found.append(answers)
        return found

    def credits(self, lane: Lane, credits: int) -> int:
        """Return the number of messages that a lane can hold.

        So many may be sent before the first of them is taken.

        Args:
            lane: The lane.
            credits: The number for neighbouring stages of one worker each. A lane that passes by other stages has more:
                one for each of its micro-batches that can be on their way through these stages.
        """
        _, source, target = self.edges[lane.edge]
        ahead = sum(map(len, self._owners[source:target])) - 1  # micro-batches that the source is ahead by
        return credits + -(-ahead // lcm(len(self._owners[source]), len(self._owners[target])))
