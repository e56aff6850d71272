"""The client's current work: at most one round and one evaluation.

It is the newest of each that the server has asked for.
"""

import asyncio
import time
from dataclasses import dataclass

from fedring.v1 import federation_pb2 as pb


@dataclass(slots=True, eq=False)
class Assignment:
    """A round to train in, with its outcome so far.

    The session's thread and the user's thread both read and write its fields, one at a time.
    """

    command: pb.TrainCmd
    deadline: float  # monotonic seconds
    end_reason: str = ""  # why the round ended; empty = it has not
    undelivered: bool = False  # the client could not learn what became of its update, which is to be offered again
    failure: pb.Failure | None = None  # what the server was told if this client failed
    accepted_name: str = ""  # the name of its update, once the server has accepted that
    previous: "Assignment | None" = None  # the assignment that it replaced

    @property
    def round_key(self) -> tuple[str, int, str]:
        """The run, the round, and the digest of the model.

        An update must name them to count for this round.
        """
        return _round_key(self.command)

    def matches(self, command: pb.TrainCmd, last: pb.LastAccepted) -> bool:
        """Return whether a command is this assignment's, sent again.

        A restored server counts its rounds from an earlier one again. Such a command differs in its epoch or in its
        model, or the server no longer knows what it has accepted or ended.

        Args:
            command: What the server has sent.
            last: The newest update of this client that the server remembers to have accepted.
        """
        if (self.command.epoch, self.round_key) != (command.epoch, _round_key(command)):
            return False
        return self.accepted_name == last.name if self.accepted_name else not self.end_reason

    @property
    def stop_reason(self) -> str:
        """Why an update is no longer wanted; empty = it is wanted.

        The round has ended, or its deadline has passed.
        """
        return self.end_reason or ("deadline" if time.monotonic() >= self.deadline else "")


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationOrder:
    """A model that the server wants evaluated."""

    command: pb.EvaluateCmd
    deadline: float  # monotonic seconds


def _round_key(command: pb.TrainCmd) -> tuple[str, int, str]:
    return command.run_id, command.round, command.model_digest


class WorkInbox:
    """Queues the server's commands for the user's thread.

    The session owns it, and uses it on its event loop only.
    """

    def __init__(self) -> None:
        self.current: Assignment | None = None  # the newest round, whether it was handed out or not
        self._round: Assignment | None = None  # the round to hand out next
        self._evaluation: EvaluationOrder | None = None
        self._filled = asyncio.Event()

    def train(self, command: pb.TrainCmd, last: pb.LastAccepted) -> Assignment:
        """Take a command to train.

        Args:
            command: What the server has sent.
            last: The newest update of this client that the server remembers to have accepted.

        Returns:
            The current assignment, with its new deadline, if the command is the same; else a new assignment, which
            replaces the current one.
        """
        deadline = time.monotonic() + command.deadline_seconds
        current = self.current
        if current and current.matches(command, last):
            current.deadline = deadline
            if current.undelivered:
                current.undelivered = False
                self._round = current
                self._filled.set()
            return current
        if current:
            current.end_reason = current.end_reason or "next_round"
            current.previous = None  # Otherwise no assignment would ever be freed.
        self.current = self._round = Assignment(command, deadline, previous=current)
        self._filled.set()
        return self.current

    async def hand_out_again(self, assignment: Assignment) -> None:
        """Hand out an assignment once more, if it is still current."""
        if assignment is self.current:
            self._round = assignment
            self._filled.set()

    def evaluate(self, command: pb.EvaluateCmd) -> None:
        """Queue a command to evaluate.

        It replaces one that has not been handed out.
        """
        self._evaluation = EvaluationOrder(command, time.monotonic() + command.deadline_seconds)
        self._filled.set()

    def end(self, round_: int, reason: str) -> None:
        """Note that a round takes no more updates, and why."""
        if self.current and self.current.command.round == round_ and not self.current.end_reason:
            self.current.end_reason = reason or "published"

    def end_all(self, reason: str) -> None:
        """Note that no round takes updates any more, and why."""
        if self.current and not self.current.end_reason:
            self.current.end_reason = reason

    async def take(self) -> Assignment | EvaluationOrder:
        """Wait for the next piece of work that is still wanted.

        Evaluations go first, because they are short.
        """
        while True:
            await self._filled.wait()
            evaluation, self._evaluation = self._evaluation, None
            if evaluation and time.monotonic() < evaluation.deadline:
                return evaluation
            round_, self._round = self._round, None
            if round_ and not round_.stop_reason:
                return round_
            self._filled.clear()
