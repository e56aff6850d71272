"""The client's work: of each job, one round and one evaluation.

It is the newest of each that the server has asked for.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from fedring.train.bounds import MAX_SECONDS
from fedring.v1 import federation_pb2 as pb

_KEEP = 16
"""How many jobs that have no round open are remembered, to know a command that is sent again."""

_MOST_EVALUATIONS = 64
"""How many evaluations wait while the client trains. A client takes part in as many jobs at most."""


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
    withdrawn: Callable[[], str] = lambda: ""  # returns a reason if the site lets no update leave any more

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

    Args:
        max_jobs: Of how many jobs rounds may be open at once. A command of one more job ends the oldest of them.
    """

    def __init__(self, max_jobs: int = 1) -> None:
        self._max_jobs = max(1, max_jobs)
        self._newest: dict[tuple[str, int], Assignment] = {}  # by run and job, the newest last
        self._queue: list[Assignment] = []  # the rounds to hand out
        self._evaluations: dict[tuple[str, int], EvaluationOrder] = {}  # by run and job
        self._filled = asyncio.Event()

    @property
    def current(self) -> Assignment | None:
        """The newest round, whether it was handed out or not."""
        return next(reversed(self._newest.values()), None)

    def train(self, command: pb.TrainCmd, last: pb.LastAccepted) -> Assignment:
        """Take a command to train.

        Args:
            command: What the server has sent.
            last: The newest update of this client that the server remembers to have accepted.

        Returns:
            The job's assignment, with its new deadline, if the command is the same; else a new assignment, which
            replaces it.
        """
        deadline = _deadline(command.deadline_seconds)
        key = _job_key(command)
        before = self._newest.get(key)
        if before and before.matches(command, last):
            before.deadline = deadline
            if before.undelivered:
                before.undelivered = False
                self._hand_out(before, first=True)  # so that its update is not lost for that of another job
            return before
        # With one job at a time, a command follows upon the one before, whatever its job.
        previous = before or (self.current if self._max_jobs == 1 else None)
        if before:
            del self._newest[key]
            before.end_reason = before.end_reason or "next_round"
        open_ = [each for each in self._newest.values() if not each.end_reason]
        for oldest in open_[: max(0, len(open_) + 1 - self._max_jobs)]:
            oldest.end_reason = "next_round"
        if previous:
            previous.previous = None  # Otherwise no assignment would ever be freed.
        made = self._newest[key] = Assignment(command, deadline, previous=previous)
        ended = [name for name, each in self._newest.items() if each.end_reason]
        for name in ended[: max(0, len(ended) - _KEEP)]:
            del self._newest[name]
        self._hand_out(made)
        return made

    def find(self, round_: int) -> Assignment | None:
        """Return the newest assignment of a round, if there is one."""
        return next((each for each in reversed(self._newest.values()) if each.command.round == round_), None)

    async def hand_out_again(self, assignment: Assignment) -> None:
        """Hand out an assignment once more, if it is still its job's."""
        if assignment is self._newest.get(_job_key(assignment.command)):
            self._hand_out(assignment, first=True)

    def evaluate(self, command: pb.EvaluateCmd) -> None:
        """Queue a command to evaluate.

        It replaces one of its job that has not been handed out, and the oldest if too many wait.
        """
        order = EvaluationOrder(command, _deadline(command.deadline_seconds))
        self._evaluations[command.run_id, command.job.job_id] = order
        if len(self._evaluations) > _MOST_EVALUATIONS:
            del self._evaluations[next(iter(self._evaluations))]
        self._filled.set()

    def end(self, round_: int, reason: str) -> None:
        """Note that a round takes no more updates, and why."""
        for each in self._newest.values():
            if each.command.round == round_:
                each.end_reason = each.end_reason or reason or "published"

    def end_all(self, reason: str) -> None:
        """Note that no round takes updates any more, and why."""
        for each in self._newest.values():
            each.end_reason = each.end_reason or reason

    async def take(self) -> Assignment | EvaluationOrder:
        """Wait for the next piece of work that is still wanted.

        Evaluations go first, because they are short. Then the rounds of several jobs have their turns, in the order of
        their commands.
        """
        while True:
            await self._filled.wait()
            while self._evaluations:
                evaluation = self._evaluations.pop(next(iter(self._evaluations)))
                if time.monotonic() < evaluation.deadline:
                    return evaluation
            while self._queue:
                round_ = self._queue.pop(0)
                if not round_.stop_reason:
                    return round_
            self._filled.clear()

    def _hand_out(self, assignment: Assignment, *, first: bool = False) -> None:
        """Queue an assignment, of each job only the newest one."""
        key = _job_key(assignment.command)
        self._queue = [each for each in self._queue if _job_key(each.command) != key and not each.stop_reason]
        self._queue.insert(0 if first else len(self._queue), assignment)
        self._filled.set()


def _deadline(seconds: float) -> float:
    """Return the time of a deadline, given as any number."""
    return time.monotonic() + min(max(0.0, seconds), MAX_SECONDS)  # 0, if it is not a number


def _job_key(command: pb.TrainCmd) -> tuple[str, int]:
    return command.run_id, command.job.job_id
