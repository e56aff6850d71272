"""How messages come from stage to stage: within a process, and over any process group of torch.distributed.

Over a group each lane, the messages of one kind to one stage, has tags of its own. A sender waits while `credits` of a
lane's messages have not been taken, and so many receives are posted ahead of their use: nobody waits but the worker
itself. Messages are found by what they are, never by the order in which they came.

A header and its tensor travel as one, in a frame whose size both ends know: that of the same message in the lane's
newest run of as many micro-batches. A tensor of another size follows its frame by itself; in a first run, all do.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.pipeline.errors import PipelineError
from fedring.pipeline.messages import HEADER_BYTES, Key, Message, header, parse
from fedring.schedules.schedule import Kind, Schedule


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
        """All that was sent in the run has gone."""

    def abort(self) -> None:
        """Whoever waits for this worker hears that it has failed, where the group can tell."""


class Mailbox:
    """Messages that have come and were not asked for yet."""

    def __init__(self) -> None:
        self._messages: dict[Key, Message] = {}
        self._seen: set[Key] = set()

    def put(self, message: Message) -> None:
        """The message can be taken, once."""
        if message.key in self._seen:
            raise PipelineError(f"{message.key} came twice")
        self._seen.add(message.key)
        self._messages[message.key] = message

    def take(self, key: Key) -> Message | None:
        """The message, if it has come."""
        return self._messages.pop(key, None)


class LocalTransport:
    """Messages between stages of one process."""

    def __init__(self) -> None:
        self._box = Mailbox()

    def open(self, schedule: Schedule, worker: int, step: int) -> None:
        """The run can begin."""
        self._box = Mailbox()

    def send(self, message: Message) -> None:
        """The message has come."""
        self._box.put(message)

    def receive(self, key: Key) -> Message:
        """The message that was sent."""
        if (message := self._box.take(key)) is None:
            raise PipelineError(f"{key} was not sent: the schedule is wrong")
        return message

    def close(self) -> None:
        """Nothing is left."""
        self.abort()

    def abort(self) -> None:
        """What was sent and not received is gone."""
        self._box = Mailbox()


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
        self._in: dict[tuple[Kind, int], _InLane] = {}
        self._out: dict[tuple[Kind, int], _OutLane] = {}
        self._sizes: dict[tuple[Kind, int, int], list[int]] = {}  # of the newest run: by lane and micro-batches

    def open(self, schedule: Schedule, worker: int, step: int) -> None:
        """What other workers will send in this run can come."""
        if (rank := dist.get_rank(self.group)) != worker or dist.get_world_size(self.group) != len(schedule.workers):
            raise PipelineError(f"rank {rank} is worker {worker} of {len(schedule.workers)}: the group does not fit")
        self._box = Mailbox()
        self._in, self._out = {}, {}
        count = schedule.micro_batches
        for stage in range(schedule.stages):
            for kind, source in ((Kind.FORWARD, stage - 1), (Kind.BACKWARD, stage + 1)):
                if not 0 <= source < schedule.stages or schedule.owner(source) == schedule.owner(stage):
                    continue
                sender, receiver = schedule.owner(source), schedule.owner(stage)
                if worker not in (sender, receiver):
                    continue
                lane = _Lane(kind, stage, step, count, self._sizes.get((kind, stage, count), ()))
                self._sizes[kind, stage, count] = lane.sizes
                if worker == receiver:
                    self._in[kind, stage] = _InLane(self, sender, lane)
                else:
                    self._out[kind, stage] = _OutLane(self, receiver, lane)

    def send(self, message: Message) -> None:
        """The message is on its way, as soon as its lane has a credit."""
        lane = self._out.get((message.key.kind, message.key.stage))
        if lane is None:  # between stages of this worker
            self._box.put(message)
            return
        lane.send(message)
        self.sent_bytes += message.tensor.nbytes

    def receive(self, key: Key) -> Message:
        """The message, once it has come; who sent it gets a credit back."""
        lane = self._in.get((key.kind, key.stage))
        while (message := self._box.take(key)) is None:
            if lane is None:
                raise PipelineError(f"{key} was not sent: the schedule is wrong")
            self._box.put(lane.next())
        if lane is not None:
            lane.taken()
        return message

    def close(self) -> None:
        """All that was sent has gone."""
        for out in self._out.values():
            out.drain()
        for into in self._in.values():
            into.drain()

    def abort(self) -> None:
        """The group has failed for every rank, if its backend can do that."""
        self.group.abort()


def tag_of(kind: Kind, stage: int) -> int:
    """The tag of a lane's frames; the next is that of its receipts, and the one after that of tensors by themselves."""
    return 6 * stage + (3 if kind is Kind.BACKWARD else 0)


@dataclass(frozen=True, slots=True)
class _Lane:
    """The messages of one kind to one stage in one run."""

    kind: Kind
    stage: int
    step: int
    count: int
    known: Sequence[int]  # bytes of each message's tensor in the run before
    sizes: list[int] = field(default_factory=list)  # in this one, so far

    @property
    def tag(self) -> int:
        """That of its frames."""
        return tag_of(self.kind, self.stage)

    def expected(self, number: int) -> int:
        """The bytes that a frame has for its tensor: the same at both ends, for both have seen all messages."""
        return self.known[number] if number < len(self.known) else 0

    def asks(self, number: int, credits: int) -> bool:
        """Whether the sender will wait until this message has been taken: a later one needs its credit."""
        return number + credits < self.count


class _InLane:
    """The messages of one kind to one stage of this worker; as many can come as there are credits."""

    def __init__(self, transport: GroupTransport, peer: int, lane: _Lane) -> None:
        self._group, self._peer, self._lane = transport.group, peer, lane
        self._limit, self._credits = transport.max_message_bytes, transport.credits
        self._begun = self._taken = 0
        self._posted: deque[tuple[Any, Tensor]] = deque()
        self._receipts: list[tuple[Any, Tensor]] = []
        for _ in range(min(self._credits, lane.count)):
            self._post()

    def next(self) -> Message:
        """The lane's next message, once it has come."""
        if not self._posted:
            raise PipelineError("more was asked for than a lane's messages")
        work, frame = self._posted.popleft()
        work.wait()
        message = parse(frame[:HEADER_BYTES].view(torch.int64), max_bytes=self._limit)
        key, tensor, lane = message.key, message.tensor, self._lane
        if (key.step, key.kind, key.stage) != (lane.step, lane.kind, lane.stage):
            raise PipelineError(f"{key} came while step {lane.step} ran")
        lane.sizes.append(tensor.nbytes)
        if tensor.nbytes == len(frame) - HEADER_BYTES:
            body = frame[HEADER_BYTES:].view(tensor.dtype).reshape(tensor.shape)
            message = Message(key, message.version, body)
        else:
            dist.recv(tensor, group=self._group, group_src=self._peer, tag=lane.tag + 2)
        if self._begun < lane.count:
            self._post()
        return message

    def taken(self) -> None:
        """The sender has a credit more, if it needs one."""
        if self._lane.asks(self._taken, self._credits):
            receipt = torch.zeros(1, dtype=torch.uint8)
            work = dist.isend(receipt, group=self._group, group_dst=self._peer, tag=self._lane.tag + 1)
            self._receipts.append((work, receipt))
        self._taken += 1

    def drain(self) -> None:
        """Every receipt has gone out."""
        for work, _ in self._receipts:
            work.wait()
        self._receipts.clear()

    def _post(self) -> None:
        frame = torch.empty(HEADER_BYTES + self._lane.expected(self._begun), dtype=torch.uint8)
        work = dist.irecv(frame, group=self._group, group_src=self._peer, tag=self._lane.tag)
        self._posted.append((work, frame))
        self._begun += 1


class _OutLane:
    """The messages of one kind to one stage of another worker."""

    def __init__(self, transport: GroupTransport, peer: int, lane: _Lane) -> None:
        self._group, self._peer, self._lane = transport.group, peer, lane
        self._credits = transport.credits
        self._waiting: deque[tuple[list[Any], list[Tensor]]] = deque()  # until they have gone, and been taken

    def send(self, message: Message) -> None:
        """The message is on its way; at most `credits` are."""
        if len(self._waiting) >= self._credits:
            self._wait()
        lane, tensor = self._lane, message.tensor.detach().cpu().contiguous()
        number = len(lane.sizes)
        frame = torch.empty(HEADER_BYTES + lane.expected(number), dtype=torch.uint8)
        frame[:HEADER_BYTES] = header(message).view(torch.uint8)
        parts = [(frame, lane.tag)]
        if tensor.nbytes == len(frame) - HEADER_BYTES:
            frame[HEADER_BYTES:] = tensor.reshape(-1).view(torch.uint8)
        else:
            frame[HEADER_BYTES:] = 0
            parts.append((tensor, lane.tag + 2))
        lane.sizes.append(tensor.nbytes)
        works = [dist.isend(part, group=self._group, group_dst=self._peer, tag=tag) for part, tag in parts]
        kept = [part for part, _ in parts]
        if lane.asks(number, self._credits):
            kept.append(torch.empty(1, dtype=torch.uint8))
            works.append(dist.irecv(kept[-1], group=self._group, group_src=self._peer, tag=lane.tag + 1))
        self._waiting.append((works, kept))

    def drain(self) -> None:
        """Every message has gone."""
        while self._waiting:
            self._wait()

    def _wait(self) -> None:
        works, _ = self._waiting.popleft()
        for work in works:
            work.wait()
