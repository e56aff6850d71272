"""Messages between ranks: tensors point to point, and bytes to all."""

import itertools
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

from torch import Tensor

from fedring.ring.engine import collectives
from fedring.ring.engine.group import Group
from fedring.ring.engine.operation import Kind, Operation
from fedring.ring.engine.program import Expect, Program, Send
from fedring.ring.errors import CollectiveTimeout
from fedring.ring.torch.compiler import opaque
from fedring.ring.torch.profiling import begin_record, is_recording
from fedring.ring.torch.tensors import Staged, as_bytes, in_host_memory, plain
from fedring.ring.torch.work import RingFuture, RingWork, deferred
from fedring.ring.transport.frames import Frame
from fedring.v1 import peer_pb2 as pb

MOST_BYTES = 256 << 10
"""The largest message that is sent and received as bytes, in one frame; beyond it, an operation costs little."""
_EARLY_SHARE = 256  # such a message is at most this part of what may come early, since it waits there for its receiver


class Messages:
    """A rank's messages to and from other ranks.

    The n-th that one rank sends to another with a tag is the n-th that the other receives with it.

    They have keys of their own, since not all ranks take part in them.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._most_bytes = min(MOST_BYTES, group.max_early_bytes // _EARLY_SHARE)
        self._sent: Counter[tuple[int, int]] = Counter()  # by rank and tag
        self._received: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()

    def send(self, staged: Staged, to: int, tag: int, *, timeout: float) -> Operation:
        """Start to send values to a rank."""
        key, program = self._key_to(to, tag), collectives.send(to, staged.data)
        if to == self.group.rank:
            self._deliver_here(_what(staged), program, key)
            key, program = f"{key}!", _no_program()
        return self.group.start(
            _what(staged), program, timeout=timeout, key=key, ending=begin_record("send", [staged.flat])
        )

    def receive(self, staged: Staged, source: int, tag: int, *, timeout: float) -> Operation:
        """Start to receive a rank's next message with the tag.

        Its values go into `staged`.
        """
        return self._receive(staged, source, self._key_from(source, tag), timeout=timeout)

    def carries_bytes(self, size: int) -> bool:
        """Return whether so many bytes can be a message of bytes now.

        They must fit into one frame, and a profiler must see operations.
        """
        return 0 < size <= self._most_bytes and not is_recording()

    def send_bytes(self, head: bytes, body: Tensor, to: int, tag: int, *, timeout: float) -> Operation | None:
        """Send bytes as a message of uint8 values.

        They may change afterwards. The receiver cannot tell the message from one that `send` sends.

        Args:
            head: The first bytes.
            body: Has the other ones; together they are as many as `carries_bytes` allows.
            to: The rank.
            tag: The message's tag.
            timeout: Seconds that an operation may take.

        Returns:
            None if the message is sent, as it is if nobody has to wait for that; otherwise the operation that sends it.

        Raises:
            NotSupported: The ring does not carry such a tensor.
            RingError: This worker has left the group.
            Forked: This process is a fork of the worker.
        """
        data = b"".join((head, as_bytes(in_host_memory(plain(body))) if body.numel() else b""))
        key, what = self._key_to(to, tag), _bytes(len(data))  # after the bytes: what is refused must not be counted
        if to == self.group.rank:
            self._deliver_here(what, collectives.send(to, memoryview(data)), key)
        elif not self.group.send_at_once(what, data, to=to, key=key):
            return self.group.start(what, collectives.send(to, memoryview(data)), timeout=timeout, key=key)
        return None

    def receive_bytes(self, size: int, source: int, tag: int, *, timeout: float) -> memoryview:
        """Wait for a rank's next message with the tag.

        Returns its bytes, which may be in memory that the rank needs again.

        Args:
            size: Their number, which `carries_bytes` must allow.
            source: The rank, which may use `send` as well as `send_bytes`.
            tag: The message's tag.
            timeout: Seconds to wait.

        Raises:
            RingError: The error that ended the generation, or this worker has left the group.
            Forked: This process is a fork of the worker.
        """
        key = self._key_from(source, tag)
        return self.group.receive(_bytes(size), source=source, size=size, key=key, timeout=timeout)

    def receive_any(self, staged: Staged, tag: int, *, patience: float, timeout: float) -> tuple[int, Operation] | None:
        """Start to receive the first message with the tag from any rank.

        Args:
            staged: Receives the message's values.
            tag: The tag.
            patience: Seconds to wait until a message begins to come.
            timeout: Seconds that the operation may take after that.

        Returns:
            The rank that sends it and the operation that receives it, or None if no message has begun to come.
        """
        me = self.group.rank
        others = [rank for rank in range(self.group.size) if rank != me]
        self.group.home.check()
        while True:
            with self._lock:
                sources = {_key(rank, me, tag, self._received[rank, tag]): rank for rank in others}
            key = self.group.wait_for_any(sources, patience)
            if not key:
                return None
            source = sources[key]
            with self._lock:
                if key != _key(source, me, tag, self._received[source, tag]):
                    continue  # another thread has taken it
                self._received[source, tag] += 1
            return source, self._receive(staged, source, key, timeout=timeout)

    def _key_to(self, to: int, tag: int) -> str:
        """Count the next message to a rank, and return its key."""
        self.group.home.check()
        with self._lock:
            number = self._sent[to, tag]
            self._sent[to, tag] = number + 1
        return _key(self.group.rank, to, tag, number)

    def _key_from(self, source: int, tag: int) -> str:
        """Count the next message from a rank, and return its key."""
        self.group.home.check()
        with self._lock:
            number = self._received[source, tag]
            self._received[source, tag] = number + 1
        return _key(source, self.group.rank, tag, number)

    def _receive(self, staged: Staged, source: int, key: str, *, timeout: float) -> Operation:
        program = collectives.receive(source, staged.data)
        return self.group.start(
            _what(staged), program, timeout=timeout, key=key, ending=begin_record("recv", [staged.flat])
        )

    def _deliver_here(self, what: str, program: Program, key: str) -> None:
        """Give this rank the frames that a program sends to it."""
        me = self.group.rank
        for step in program:
            if isinstance(step, Send):
                head = pb.Head(key=key, signature=zlib.crc32(what.encode()), tag=step.tag, part=step.part)
                self.group.arrived(self.group.members[me], Frame(head, memoryview(bytes(step.data))))


@opaque
class ReceiveFromAny(RingWork):
    """The receipt of a message from any rank.

    The rank is decided when somebody waits for the message.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        messages: Messages,
        staged: Staged,
        tag: int,
        *,
        tensor: Tensor,
        finish: Callable[[], None] | None,
        timeout: float,
    ) -> None:
        super().__init__(messages.group, [], [tensor], finish=finish)
        self._messages, self._staged, self._tag = messages, staged, tag
        self._timeout = timeout
        self._matching = threading.Lock()
        self._source = -1

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until a message has come. Return True.

        Args:
            timeout: How long to wait; 0 = as long as the group's timeout says.

        Raises:
            CollectiveTimeout: No rank has sent one in time. That ends the generation.
            RingError: The error that ended the generation.
        """
        seconds = timeout.total_seconds() or self._timeout
        if not self._matched(seconds):
            raise self.failed(CollectiveTimeout(f"no rank has sent a message with tag {self._tag} in {seconds:g} s"))
        return super().wait(timeout)

    def is_completed(self) -> bool:
        """Return whether a message has come, or none will."""
        return self._matched(0) and super().is_completed()

    def source_rank(self) -> int:
        """Return the rank in the group whose message came."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> RingFuture:
        """Return a future of the tensors."""
        self._group.home.check()
        with self._lock:
            if self._future is None:
                self._future, complete = deferred(f"any{next(self._numbers)}", self._value)
                complete()
            return self._future

    def _matched(self, patience: float) -> bool:
        self._group.home.check()
        with self._matching:
            if not self.operations:
                found = self._messages.receive_any(self._staged, self._tag, patience=patience, timeout=self._timeout)
                if found is not None:
                    self._source, operation = found
                    self.operations = [operation]
            return bool(self.operations)


@opaque
class BytesGather:
    """An allgather of bytes that runs while the caller continues.

    `wait` and `collect` are separate, so that waiting can be measured alone.
    """

    def __init__(self, work: RingWork, messages: list[memoryview]) -> None:
        self._work = work
        self._messages = messages

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until all messages have come.

        Args:
            timeout_seconds: How long to wait; None = as long as the group's timeout says.

        Raises:
            RingError: The error that ended the generation before they came.
        """
        self._work.wait(timedelta(seconds=timeout_seconds or 0))

    def collect(self) -> list[memoryview]:
        """Return the messages in the order of ranks, once all have come."""
        self.wait()
        return self._messages

    @property
    def future(self) -> RingFuture:
        """A future of the messages in the order of ranks."""
        return self._work.get_future()


def gather_bytes(group: Group, payload: bytes | memoryview, *, limit: int, timeout: float) -> BytesGather:
    """Start an allgather of bytes over all ranks of a group.

    Args:
        group: The group.
        payload: This rank's message.
        limit: The most bytes of a message, equal on all ranks.
        timeout: Seconds that it may take.

    Raises:
        ValueError: The message is larger than the limit.
    """
    mine = memoryview(payload).cast("B")
    if len(mine) > limit:
        raise ValueError(f"a message of {len(mine)} bytes is larger than the limit of {limit}")
    messages = [memoryview(b"")] * group.size
    messages[group.rank] = mine
    program = collectives.allgather_bytes(group.rank, group.size, messages, limit)
    what = f"allgather of at most {limit} bytes"
    ending = begin_record("all_gather_bytes", [])
    operation = group.start(what, program, kind=Kind.GRADIENTS, timeout=timeout, ending=ending)
    return BytesGather(RingWork(group, [operation], messages), messages)


def _what(staged: Staged) -> str:
    return f"message {staged.dtype} [{staged.flat.numel()}]"


def _bytes(count: int) -> str:
    """Return the description of a message of uint8 values."""
    return f"message torch.uint8 [{count}]"


def _key(source: int, to: int, tag: int, number: int) -> str:
    return f"{source}>{to}#{tag}.{number}"


def _no_program() -> Program:
    yield Expect({}, 0)
