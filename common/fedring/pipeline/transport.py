"""How messages come from stage to stage: within a process, and over any process group of torch.distributed.

Over a group each lane, the messages of one kind to one stage, has tags of its own. A sender waits while `credits` of a
lane's messages have not been taken; a thread a lane receives ahead of their use. Messages are found by what they
are, never by the order in which they came.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.pipeline.errors import PipelineError
from fedring.pipeline.messages import HEADER_WORDS, Key, Message, header, parse
from fedring.pipeline.schedules import Kind, Schedule


class Transport(Protocol):
    """What a worker sends and receives by."""

    def open(self, schedule: Schedule, worker: int, step: int) -> None:
        """Messages of this run can be sent and received."""

    def send(self, message: Message) -> None:
        """The message is on its way; its tensor may change no more."""

    def receive(self, key: Key) -> Message:
        """The message, once it has come."""
        ...

    def close(self) -> None:
        """All that was sent in the run has been taken."""

    def abort(self) -> None:
        """Whoever waits for this worker hears that it has failed, where the group can tell."""


class LocalTransport:
    """Messages between stages of one process."""

    def __init__(self) -> None:
        self._box: dict[Key, Message] = {}

    def open(self, schedule: Schedule, worker: int, step: int) -> None:
        """The run can begin."""

    def send(self, message: Message) -> None:
        """The message has come."""
        if message.key in self._box:
            raise PipelineError(f"{message.key} was sent twice")
        self._box[message.key] = message

    def receive(self, key: Key) -> Message:
        """The message that was sent."""
        if key not in self._box:
            raise PipelineError(f"{key} was not sent: the schedule is wrong")
        return self._box.pop(key)

    def close(self) -> None:
        """Nothing is left."""
        self.abort()

    def abort(self) -> None:
        """What was sent and not received is gone."""
        self._box.clear()


class GroupTransport:
    """Messages over point-to-point operations of a group, whose rank w is the schedule's worker w."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, credits: int = 4, max_message_bytes: int = 1 << 30
    ) -> None:
        if credits < 1:
            raise ValueError("a lane needs at least one credit")
        chosen = group or dist.group.WORLD
        if chosen is None:
            raise PipelineError("torch.distributed has no process group yet")
        self.group, self.credits, self.max_message_bytes = chosen, credits, max_message_bytes
        self.sent_bytes = 0
        self._box = Mailbox()
        self._lanes: dict[tuple[Kind, int], _OutLane] = {}
        self._owner: Callable[[int], int] = int
        self._threads: list[threading.Thread] = []
        self._receiving: list[_InLane] = []

    def open(self, schedule: Schedule, worker: int, step: int) -> None:
        """A thread a lane receives what other workers will send in this run."""
        if (rank := dist.get_rank(self.group)) != worker or dist.get_world_size(self.group) != len(schedule.workers):
            raise PipelineError(f"rank {rank} is worker {worker} of {len(schedule.workers)}: the group does not fit")
        self._box, self._lanes, self._owner = Mailbox(), {}, schedule.owner
        self._receiving = []
        for stage in range(schedule.stages):
            for kind, source in ((Kind.FORWARD, stage - 1), (Kind.BACKWARD, stage + 1)):
                if not 0 <= source < schedule.stages or schedule.owner(source) == schedule.owner(stage):
                    continue
                if schedule.owner(stage) == worker:
                    lane = _InLane(self, self._box, schedule.owner(source), kind, stage)
                    self._receiving.append(lane)
        args = (step, schedule.micro_batches)
        self._threads = [threading.Thread(target=lane.run, args=args, daemon=True) for lane in self._receiving]
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """The message is on its way, as soon as its lane has a credit."""
        to, (_, kind, stage, _) = self._owner(message.key.stage), message.key
        if to == dist.get_rank(self.group):
            self._box.put(message)
            return
        if (kind, stage) not in self._lanes:
            self._lanes[kind, stage] = _OutLane(self, to, tag_of(kind, stage))
        self._lanes[kind, stage].send(message)
        self.sent_bytes += message.tensor.nbytes

    def receive(self, key: Key) -> Message:
        """The message, once it has come; who sent it gets a credit back."""
        message, taken = self._box.take(key)
        taken()
        return message

    def close(self) -> None:
        """All that was sent has been taken, and no thread of the run is left."""
        for lane in self._lanes.values():
            lane.drain()
        for thread in self._threads:
            thread.join()
        self._box.check()
        for receiving in self._receiving:
            receiving.drain()

    def abort(self) -> None:
        """The group has failed for every rank, if its backend can do that."""
        self._box.fail(PipelineError("this worker has failed"))
        self.group.abort()


class Mailbox:
    """Messages that have come and were not asked for yet."""

    def __init__(self) -> None:
        self._messages: dict[Key, tuple[Message, Callable[[], None]]] = {}
        self._seen: set[Key] = set()
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def put(self, message: Message, taken: Callable[[], None] = lambda: None) -> None:
        """The message can be taken, and `taken` will be called then."""
        with self._changed:
            if message.key in self._seen:
                raise PipelineError(f"{message.key} came twice")
            self._seen.add(message.key)
            self._messages[message.key] = (message, taken)
            self._changed.notify_all()

    def take(self, key: Key) -> tuple[Message, Callable[[], None]]:
        """The message; raises what a lane has failed with."""
        with self._changed:
            while key not in self._messages:
                self.check()
                self._changed.wait()
            return self._messages.pop(key)

    def fail(self, error: Exception) -> None:
        """Whoever waits for a message hears of it."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what a lane has failed with."""
        if self._error is not None:
            raise self._error


def tag_of(kind: Kind, stage: int) -> int:
    """The tag of a lane's messages; the next one is that of its receipts."""
    return 4 * stage + (2 if kind is Kind.BACKWARD else 0)


class _InLane:
    """The messages of one kind to one stage of this worker."""

    def __init__(self, transport: GroupTransport, box: Mailbox, source: int, kind: Kind, stage: int) -> None:
        self._group, self._limit = transport.group, transport.max_message_bytes
        self._box, self._source, self._kind, self._stage = box, source, kind, stage
        self._tag = tag_of(kind, stage)
        self._receipts: list[Any] = []

    def run(self, step: int, count: int) -> None:
        """`count` messages of the step have come; the mailbox hears if one cannot."""
        try:
            for _ in range(count):
                self._receive(step)
        except (RuntimeError, ValueError) as error:  # of the backend, and our own
            self._box.fail(error)

    def _receive(self, step: int) -> None:
        words = torch.empty(HEADER_WORDS, dtype=torch.int64)
        dist.recv(words, group=self._group, group_src=self._source, tag=self._tag)
        message = parse(words, max_bytes=self._limit)
        key = message.key
        if (key.step, key.kind, key.stage) != (step, self._kind, self._stage):
            raise PipelineError(f"{key} came while step {step} ran")
        if message.tensor.numel():
            dist.recv(message.tensor, group=self._group, group_src=self._source, tag=self._tag)
        self._box.put(message, self._taken)

    def _taken(self) -> None:
        """The sender has a credit more."""
        receipt = torch.zeros(1, dtype=torch.int64)
        work = dist.isend(receipt, group=self._group, group_dst=self._source, tag=self._tag + 1)
        self._receipts.append((work, receipt))

    def drain(self) -> None:
        """Every receipt has gone out."""
        for work, _ in self._receipts:
            work.wait()
        self._receipts.clear()


class _OutLane:
    """The messages of one kind to one stage of another worker."""

    def __init__(self, transport: GroupTransport, to: int, tag: int) -> None:
        self._group, self._credits, self._to, self._tag = transport.group, transport.credits, to, tag
        self._waiting: deque[tuple[list[Any], list[Tensor]]] = deque()  # until their receipts have come

    def send(self, message: Message) -> None:
        """The message is on its way; at most `credits` are."""
        if len(self._waiting) >= self._credits:
            self._wait()
        tensor = message.tensor.detach().cpu().contiguous()
        parts = [header(message), tensor][: 2 if tensor.numel() else 1]
        works = [dist.isend(part, group=self._group, group_dst=self._to, tag=self._tag) for part in parts]
        receipt = torch.empty(1, dtype=torch.int64)
        works.append(dist.irecv(receipt, group=self._group, group_src=self._to, tag=self._tag + 1))
        self._waiting.append((works, [*parts, receipt]))

    def drain(self) -> None:
        """Every message has been taken."""
        while self._waiting:
            self._wait()

    def _wait(self) -> None:
        works, _ = self._waiting.popleft()
        for work in works:
            work.wait()
