"""Messages from rank to rank: the n-th with a tag from one rank to another is the n-th that is received."""

import itertools
import threading
import zlib
from collections import Counter
from datetime import timedelta

from torch import Tensor

from fedring.ring import collectives
from fedring.ring.errors import CollectiveTimeout
from fedring.ring.frames import Frame
from fedring.ring.futures import RingFuture, deferred
from fedring.ring.group import Group
from fedring.ring.operation import Operation
from fedring.ring.program import Program, Receive, Send
from fedring.ring.staging import Staged
from fedring.ring.work import RingWork
from fedring.v1 import peer_pb2 as pb


class Messages:
    """A rank's messages; they have keys of their own, since not all ranks take part."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._sent: Counter[tuple[int, int]] = Counter()  # by rank and tag
        self._received: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()

    def send(self, staged: Staged, to: int, tag: int, *, timeout: float) -> Operation:
        """The values are on their way."""
        with self._lock:
            key = _key(self.group.rank, to, tag, self._sent[to, tag])
            self._sent[to, tag] += 1
        data = staged.data
        program = collectives.send(to, data) if len(data) else _signal(to)
        if to == self.group.rank:
            self._loop_back(_what(staged), program, key)
            key, program = f"{key}!", _nothing()
        return self.group.start(_what(staged), program, timeout=timeout, key=key)

    def receive(self, staged: Staged, source: int, tag: int, *, timeout: float) -> Operation:
        """The next message with the tag from a rank is what `staged` will hold."""
        with self._lock:
            key = _key(source, self.group.rank, tag, self._received[source, tag])
            self._received[source, tag] += 1
        return self._receive(staged, source, key, timeout=timeout)

    def receive_any(self, staged: Staged, tag: int, *, patience: float, timeout: float) -> tuple[int, Operation] | None:
        """The rank whose message with the tag comes first, and its receipt; None if none comes within `patience`."""
        me = self.group.rank
        others = [rank for rank in range(self.group.size) if rank != me]
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

    def _receive(self, staged: Staged, source: int, key: str, *, timeout: float) -> Operation:
        data = staged.data
        program = collectives.receive(source, data) if len(data) else _signalled(source)
        return self.group.start(_what(staged), program, timeout=timeout, key=key)

    def _loop_back(self, what: str, program: Program, key: str) -> None:
        """What the program sends to its own rank has come there."""
        me = self.group.rank
        for step in program:
            if isinstance(step, Send):
                head = pb.Head(key=key, signature=zlib.crc32(what.encode()), tag=step.tag, part=step.part)
                self.group.arrived(self.group.members[me], Frame(head, memoryview(bytes(step.data))))


class ReceiveFromAny(RingWork):
    """The receipt of a message from whichever rank; which one is decided when somebody waits for it."""

    _numbers = itertools.count()

    def __init__(self, messages: Messages, staged: Staged, tag: int, *, tensors: list[Tensor], timeout: float) -> None:
        super().__init__(messages.group, [], list(tensors), finish=staged.store)
        self._messages, self._staged, self._tag = messages, staged, tag
        self._timeout = timeout
        self._matching = threading.Lock()
        self._source = -1

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True once a message has come; raises the RingError that the group ended with."""
        seconds = timeout.total_seconds() or self._timeout
        if not self._matched(seconds):
            raise self.failed(CollectiveTimeout(f"no rank has sent a message with tag {self._tag} in {seconds:g} s"))
        return super().wait(timeout)

    def is_completed(self) -> bool:
        """Whether a message has come, or none will."""
        return self._matched(0) and super().is_completed()

    def source_rank(self) -> int:
        """The rank whose message it was, in the group."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> RingFuture:
        """A future of the tensors."""
        with self._lock:
            if self._future is None:
                self._future, complete = deferred(f"any{next(self._numbers)}", self._value)
                complete()
            return self._future

    def _matched(self, patience: float) -> bool:
        with self._matching:
            if not self.operations:
                found = self._messages.receive_any(self._staged, self._tag, patience=patience, timeout=self._timeout)
                if found is not None:
                    self._source, operation = found
                    self.operations = [operation]
            return bool(self.operations)


def _what(staged: Staged) -> str:
    return f"message {staged.dtype} [{staged.flat.numel()}]"


def _key(source: int, to: int, tag: int, number: int) -> str:
    return f"{source}>{to}#{tag}.{number}"


def _nothing() -> Program:
    yield from ()


def _signal(to: int) -> Program:
    yield Send(to, b"")


def _signalled(source: int) -> Program:
    yield Receive(source, 0)
