"""The transport of messages between stages.

It works within a process, or over any process group of torch.distributed.

The messages of one tensor, or of its gradients, from one worker to another form a lane. Over a group, the lanes of an
edge have tags of their own. A sender waits while as many messages of the lane as it has credits have not been taken,
and the receiver posts as many receives in advance, so that the workers need no other threads. Messages are found by
their key, not by the order of arrival. A group that carries bytes, as the ring does, takes small messages without an
operation for each.

Only messages that the schedule does not already tell the sender to be taken get a receipt (`Traffic.receipts`).

A header and its tensor travel together in a frame whose size both ends know: the size of the same message in the lane's
previous run with as many micro-batches. A tensor of another size follows its frame separately; in a first run, all do.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.pipeline.errors import PipelineError
from fedring.pipeline.messages import HEADER_BYTES, Key, StageMessage, header, parse
from fedring.schedules.schedule import Kind
from fedring.schedules.traffic import Lane, Traffic


class StageTransport(Protocol):
    """The way in which a worker sends and receives messages."""

    def open(self, traffic: Traffic, worker: int, step: int) -> None:
        """Get ready for the messages of a run.

        Args:
            traffic: The messages of the run.
            worker: The number of this worker in the schedule.
            step: The number of the run.
        """

    def send(self, message: StageMessage) -> None:
        """Send a message; its tensor must not change any more."""

    def receive(self, key: Key) -> StageMessage:
        """Wait for the message with this key, and return it."""
        ...

    def close(self) -> None:
        """Wait until all messages of the run have been sent."""

    def abort(self, why: str) -> None:
        """Let waiting workers fail, if the group can do that.

        Args:
            why: The reason, which their errors name if the group can carry it.
        """


@runtime_checkable
class Telling(Protocol):
    """A group that can tell its ranks the reason for an abort.

    Those of torch's own backends cannot.
    """

    def abort_because(self, why: str) -> None:
        """Make the group fail on every rank, with this reason."""


class ByteMessages(Protocol):
    """Messages of bytes between the ranks of a group.

    They are messages of uint8 values for whoever sends or receives tensors at the other end. To send and receive them
    as bytes costs less.
    """

    def carries_bytes(self, size: int) -> bool:
        """Return whether so many bytes can be a message now."""
        ...

    def send_bytes(self, head: bytes, body: Tensor, to: int, tag: int, *, timeout: float) -> Any:
        """Send bytes, and those of a tensor, to a rank.

        Returns:
            An operation to wait for, until which the tensor must not change; None if the message is sent.
        """

    def receive_bytes(self, size: int, source: int, tag: int, *, timeout: float) -> memoryview:
        """Wait for the next message of a rank, and return its bytes."""
        ...


@runtime_checkable
class Bytewise(Protocol):
    """A group that carries messages of bytes."""

    messages: ByteMessages

    def seconds(self) -> float:
        """Return how long an operation may take."""
        ...


class Mailbox:
    """Messages that have arrived and have not been taken yet."""

    def __init__(self) -> None:
        self._messages: dict[Key, StageMessage] = {}
        self._seen: set[Key] = set()

    def put(self, message: StageMessage) -> None:
        """Add a message, which can be taken once.

        Raises:
            PipelineError: If a message with this key was added before.
        """
        if message.key in self._seen:
            raise PipelineError(f"{message.key} arrived twice")
        self._seen.add(message.key)
        self._messages[message.key] = message

    def take(self, key: Key) -> StageMessage | None:
        """Remove and return the message with this key.

        It is None if the message has not arrived.
        """
        return self._messages.pop(key, None)


class LocalTransport:
    """Messages between stages of one process."""

    def __init__(self) -> None:
        self._box = Mailbox()

    def open(self, traffic: Traffic, worker: int, step: int) -> None:
        """Begin a run without messages."""
        self._box = Mailbox()

    def send(self, message: StageMessage) -> None:
        """Deliver a message at once."""
        self._box.put(message)

    def receive(self, key: Key) -> StageMessage:
        """Return the message with this key, which must have been sent."""
        if (message := self._box.take(key)) is None:
            raise PipelineError(f"{key} was not sent: the schedule is wrong")
        return message

    def close(self) -> None:
        """End the run."""
        self.abort("")

    def abort(self, why: str) -> None:
        """Drop the messages that were sent and not received."""
        self._box = Mailbox()


class GroupTransport:
    """Messages over point-to-point operations of a process group.

    Rank w of the group is worker w of the schedule.

    Attributes:
        group: The process group.
        credits: The largest number of messages of a lane between neighbouring stages that were sent and not taken.
        max_message_bytes: The largest tensor to receive.
        sent_bytes: The bytes of tensors that this worker has sent.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, credits: int = 4, max_message_bytes: int = 1 << 30
    ) -> None:
        if credits < 1:
            raise ValueError(f"credits={credits} must be at least 1")
        chosen = group or dist.group.WORLD
        if chosen is None:
            raise PipelineError("there is no default process group: call torch.distributed.init_process_group() first")
        self.group, self.credits, self.max_message_bytes = chosen, credits, max_message_bytes
        self.bytewise = chosen if isinstance(chosen, Bytewise) else None  # the group, if it carries bytes
        self.sent_bytes = 0
        self._box = Mailbox()
        self._traffic: Traffic | None = None
        self._plan: list[_Plan] = []  # of the lanes in that traffic
        self._in: dict[Lane, _InLane] = {}
        self._out: dict[Lane, _OutLane] = {}
        self._sizes: dict[tuple[str, int, Lane], list[int]] = {}  # in the newest run of each schedule

    def open(self, traffic: Traffic, worker: int, step: int) -> None:
        """Make the lanes of a run.

        Raises:
            PipelineError: If the group does not fit the schedule.
        """
        schedule = traffic.schedule
        if (rank := dist.get_rank(self.group)) != worker or dist.get_world_size(self.group) != len(schedule.workers):
            raise PipelineError(
                f"rank {rank} of {dist.get_world_size(self.group)} cannot be worker {worker} of "
                f"{len(schedule.workers)}: use a group whose ranks are the schedule's workers"
            )
        if traffic is not self._traffic:
            self._plan = [_planned(traffic, name, count, self.credits) for name, count in traffic.lanes(worker).items()]
        self._box, self._traffic = Mailbox(), traffic
        self._in, self._out = {}, {}
        for plan in self._plan:
            # The sizes of the last run with the same schedule are the frames' sizes in this one.
            name, place = plan.name, (schedule.name, schedule.micro_batches, plan.name)
            lane = _Lane(plan, step, self._sizes.get(place, ()))
            self._sizes[place] = lane.sizes
            if worker == name.receiver:
                self._in[name] = _InLane(self, lane)
            else:
                self._out[name] = _OutLane(self, lane)

    def send(self, message: StageMessage) -> None:
        """Send a message, after waiting for a credit of its lane."""
        lane = self._out.get(self._lane_of(message.key))
        if lane is None:  # the message is for a stage of this worker
            self._box.put(message)
            return
        lane.send(message)
        self.sent_bytes += message.tensor.nbytes

    def receive(self, key: Key) -> StageMessage:
        """Wait for the message with this key.

        Its sender gets the credit back.
        """
        lane = self._in.get(self._lane_of(key))
        while (message := self._box.take(key)) is None:
            if lane is None:
                raise PipelineError(f"{key} was not sent: the schedule is wrong")
            self._box.put(lane.next())
        if lane is not None:
            lane.taken(answered=message.tensor.is_floating_point())
        return message

    def close(self) -> None:
        """Wait until all messages and receipts have been sent."""
        for out in self._out.values():
            out.drain()
        for into in self._in.values():
            into.drain()

    def abort(self, why: str) -> None:
        """Make the group fail on every rank, if it can.

        This depends on its backend, as does whether the other ranks learn the reason.
        """
        if isinstance(self.group, Telling):
            self.group.abort_because(why)
        else:
            self.group.abort()

    def _lane_of(self, key: Key) -> Lane:
        if self._traffic is None:
            raise PipelineError("the transport has not been opened")
        return self._traffic.lane(key.kind, key.edge, key.micro_batch)


def tag_of(kind: Kind, edge: int) -> int:
    """Return the tag of a lane's frames.

    The lane's receipts have the next tag, and its separate tensors the one after.
    """
    return 6 * edge + (3 if kind is Kind.BACKWARD else 6)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The messages of a lane in every run of a schedule."""

    name: Lane
    count: int  # of messages
    credits: int
    receipts: frozenset[int]  # the messages whose receipt the sender needs, if tensors have gradients
    tag: int  # of frames


def _planned(traffic: Traffic, name: Lane, count: int, credits: int) -> _Plan:
    many = traffic.credits(name, credits)
    return _Plan(name, count, many, traffic.receipts(name, many), tag_of(name.kind, name.edge))


@dataclass(frozen=True, slots=True)
class _Lane:
    """The messages of a lane in one run."""

    plan: _Plan
    step: int
    known: Sequence[int]  # the bytes of each message's tensor in the previous run
    sizes: list[int] = field(default_factory=list)  # the bytes of each message's tensor in this run, so far

    def expected(self, number: int) -> int:
        """Return the bytes of a frame that hold its tensor.

        Both ends agree, because both have seen all messages.
        """
        return self.known[number] if number < len(self.known) else 0

    def needs_receipt(self, number: int, *, answered: bool) -> bool:
        """Return whether the sender waits for a message's receipt.

        It does if a later message needs the credit, and nothing else tells that the message was taken.

        Args:
            number: The message's place in the lane.
            answered: Whether its tensor has gradients. Both ends know, and it is so for all messages of a lane.
        """
        return number in self.plan.receipts if answered else number + self.plan.credits < self.plan.count


class _InLane:
    """The receiving end of a lane.

    As many messages can arrive in advance as there are credits.

    Receives are posted when the first message is wanted, because a tensor of whole numbers has no gradients. A group
    that carries bytes keeps messages that come before, so that none are posted.
    """

    def __init__(self, transport: GroupTransport, lane: _Lane) -> None:
        self._group, self._lane = transport.group, lane
        self._source = lane.plan.name.sender
        self._peer = dist.get_global_rank(self._group, self._source)  # torch takes group_src from 2.6 on only
        self._limit = transport.max_message_bytes
        largest = HEADER_BYTES + max(lane.known, default=0)
        bytewise = transport.bytewise
        self._bytewise = bytewise if bytewise and bytewise.messages.carries_bytes(largest) else None
        self._begun = self._taken = 0  # receives that were posted, and messages that were taken
        self._posted: deque[tuple[Any, Tensor]] = deque()
        self._receipts: list[tuple[Any, Tensor]] = []

    def next(self) -> StageMessage:
        """Wait for the lane's next message, and return it."""
        lane, plan = self._lane, self._lane.plan
        if len(lane.sizes) == plan.count:
            raise PipelineError(f"all {plan.count} messages of a lane have arrived: the schedule is wrong")
        frame = self._next_frame()
        found = parse(memoryview(frame)[:HEADER_BYTES], max_bytes=self._limit)
        key, dtype = found.key, found.dtype
        if (key.step, key.kind, key.edge) != (lane.step, plan.name.kind, plan.name.edge):
            raise PipelineError(f"{key} arrived in step {lane.step} on edge {plan.name.edge}")
        lane.sizes.append(size := found.nbytes)
        kind = torch.uint8 if dtype is torch.bool else dtype
        if size and size == len(frame) - HEADER_BYTES:
            values = torch.frombuffer(frame, dtype=kind, offset=HEADER_BYTES)
        else:
            values = torch.empty(size // kind.itemsize, dtype=kind, device="cpu")
            if size != len(frame) - HEADER_BYTES:
                dist.recv(_as_bytes(values), self._peer, group=self._group, tag=plan.tag + 2)
        values = values.ne(0) if dtype is torch.bool else values  # other bytes are no booleans
        return StageMessage(key, found.version, values.view(found.shape))

    def taken(self, *, answered: bool) -> None:
        """Return a credit to the sender, if it needs one."""
        if self._lane.needs_receipt(self._taken, answered=answered):
            receipt = torch.zeros(1, dtype=torch.uint8, device="cpu")
            work = dist.isend(receipt, self._peer, group=self._group, tag=self._lane.plan.tag + 1)
            self._receipts.append((work, receipt))
        self._taken += 1

    def drain(self) -> None:
        """Wait until all receipts have been sent."""
        for work, _ in self._receipts:
            work.wait()
        self._receipts.clear()

    def _next_frame(self) -> bytearray | memoryview:
        """Wait for the next frame, and return it."""
        if self._bytewise is not None:
            size, tag = HEADER_BYTES + self._lane.expected(len(self._lane.sizes)), self._lane.plan.tag
            came = self._bytewise.messages.receive_bytes(size, self._source, tag, timeout=self._bytewise.seconds())
            return bytearray(came)  # a copy, for the group needs its memory for the next messages
        self._post()  # here, before the wait, and not after it: whoever waits for the message can then go on at once
        work, frame = self._posted.popleft()
        work.wait()
        return frame.numpy().data

    def _post(self) -> None:
        while len(self._posted) < self._lane.plan.credits and self._begun < self._lane.plan.count:
            frame = torch.empty(HEADER_BYTES + self._lane.expected(self._begun), dtype=torch.uint8, device="cpu")
            work = dist.irecv(frame, self._peer, group=self._group, tag=self._lane.plan.tag)
            self._posted.append((work, frame))
            self._begun += 1


class _OutLane:
    """The sending end of a lane."""

    def __init__(self, transport: GroupTransport, lane: _Lane) -> None:
        self._group, self._lane, self._bytewise = transport.group, lane, transport.bytewise
        self._to = lane.plan.name.receiver
        self._peer = dist.get_global_rank(self._group, self._to)
        self._waiting: deque[tuple[list[Any], list[Tensor]]] = deque()  # messages not known to be sent and taken

    def send(self, message: StageMessage) -> None:
        """Send a message, once a credit is free."""
        lane, plan, tensor = self._lane, self._lane.plan, message.tensor
        if len(self._waiting) >= plan.credits:
            self._wait()
        number, size = len(lane.sizes), tensor.nbytes
        expected = lane.expected(number)
        works: list[Any] = []
        kept: list[Tensor] = []
        body = tensor if size == expected else torch.zeros(expected, dtype=torch.uint8, device="cpu")
        if self._bytewise is not None and self._bytewise.messages.carries_bytes(HEADER_BYTES + expected):
            head, seconds = header(message), self._bytewise.seconds()
            if operation := self._bytewise.messages.send_bytes(head, body, self._to, plan.tag, timeout=seconds):
                works.append(operation)
        else:
            frame = torch.empty(HEADER_BYTES + expected, dtype=torch.uint8, device="cpu")
            frame.numpy().data[:HEADER_BYTES] = header(message)
            frame[HEADER_BYTES:].copy_(_as_bytes(body))
            self._start(dist.isend, frame, plan.tag, works, kept)
        if size != expected:
            self._start(dist.isend, _as_bytes(tensor), plan.tag + 2, works, kept)
        # The frame told the receiver the tensor's size, so both ends now expect the same in the next run.
        lane.sizes.append(size)
        if lane.needs_receipt(number, answered=tensor.is_floating_point()):
            self._start(dist.irecv, torch.empty(1, dtype=torch.uint8, device="cpu"), plan.tag + 1, works, kept)
        self._waiting.append((works, kept))

    def drain(self) -> None:
        """Wait until all messages have been sent."""
        while self._waiting:
            self._wait()

    def _start(self, operation: Any, tensor: Tensor, tag: int, works: list[Any], kept: list[Tensor]) -> None:
        """Start to send or receive a tensor, and keep it meanwhile."""
        works.append(operation(tensor, self._peer, group=self._group, tag=tag))
        kept.append(tensor)

    def _wait(self) -> None:
        works, _ = self._waiting.popleft()
        for work in works:
            work.wait()


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes [n] in host memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
