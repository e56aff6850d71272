"""What the server wants of this client now: at most one round and one evaluation, the newest of each."""

import asyncio
import time
from dataclasses import dataclass

from fedring.v1 import federation_pb2 as pb


@dataclass(slots=True, eq=False)
class Assignment:
    """A round to train for, and whether it is still wanted. Read and written by both threads, a word at a time."""

    command: pb.TrainCmd
    deadline: float  # seconds, monotonic
    over: str = ""  # why the round ended; empty = it has not
    idle: bool = False  # its update could not be brought to an end: it is to be offered again
    failure: pb.Failure | None = None  # what the server was told if this client could not do it
    accepted: str = ""  # the name of its update, once the server has accepted that
    before: "Assignment | None" = None  # in whose place it came

    @property
    def start(self) -> tuple[str, int, str]:
        """What an update must be of to count for it: the run, the round, and the digest of the model."""
        return _start_of(self.command)

    def is_for(self, command: pb.TrainCmd, last: pb.LastAccepted) -> bool:
        """Return whether the command is this one, sent again.

        A server that was restored counts its rounds from an earlier one again. It may say so (the epoch), start from
        another model, or not know any more what it has accepted, or ended.

        Args:
            command: what the server has sent.
            last: the newest update of this client that it knows to have accepted.
        """
        if (self.command.epoch, self.start) != (command.epoch, _start_of(command)):
            return False
        return self.accepted == last.name if self.accepted else not self.over

    @property
    def ended(self) -> str:
        """Why an update is no longer wanted; empty = it is wanted."""
        return self.over or ("deadline" if time.monotonic() >= self.deadline else "")


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationOrder:
    """A model to evaluate."""

    command: pb.EvaluateCmd
    deadline: float  # seconds, monotonic


def _start_of(command: pb.TrainCmd) -> tuple[str, int, str]:
    return command.run_id, command.round, command.model_digest


class WorkInbox:
    """Commands in, work out; used by one event loop."""

    def __init__(self) -> None:
        self.current: Assignment | None = None
        self._round: Assignment | None = None
        self._evaluation: EvaluationOrder | None = None
        self._filled = asyncio.Event()

    def train(self, command: pb.TrainCmd, last: pb.LastAccepted) -> Assignment:
        """The assignment of that round: the one in hand if it is the same, else a new one in the place of any other."""
        deadline = time.monotonic() + command.deadline_seconds
        current = self.current
        if current and current.is_for(command, last):
            current.deadline = deadline
            if current.idle:
                current.idle = False
                self._round = current
                self._filled.set()
            return current
        if current:
            current.over = current.over or "next_round"
            current.before = None  # more would never be let go
        self.current = self._round = Assignment(command, deadline, before=current)
        self._filled.set()
        return self.current

    async def again(self, assignment: Assignment) -> None:
        """Hand the assignment out once more, if it is the one in hand and still wanted."""
        if assignment is self.current:
            self._round = assignment
            self._filled.set()

    def evaluate(self, command: pb.EvaluateCmd) -> None:
        """Evaluate this model next, and no other that still waits."""
        self._evaluation = EvaluationOrder(command, time.monotonic() + command.deadline_seconds)
        self._filled.set()

    def end(self, round_: int, reason: str) -> None:
        """That round takes no more updates."""
        if self.current and self.current.command.round == round_ and not self.current.over:
            self.current.over = reason or "published"

    def end_all(self, reason: str) -> None:
        """No round takes updates any more."""
        if self.current and not self.current.over:
            self.current.over = reason

    async def take(self) -> Assignment | EvaluationOrder:
        """The next piece of work that is still wanted; evaluations first, as they are short and came first."""
        while True:
            await self._filled.wait()
            evaluation, self._evaluation = self._evaluation, None
            if evaluation and time.monotonic() < evaluation.deadline:
                return evaluation
            round_, self._round = self._round, None
            if round_ and not round_.ended:
                return round_
            self._filled.clear()
