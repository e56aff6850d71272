"""The sending and receiving of calls at one rank.

Requests and replies are operations of the ring's engine.

The n-th request of rank a to rank b has the key "a>b?n", and its reply "b>a!n". One thread waits for requests of all
peers. Requests of a peer are accepted in the order in which it has sent them, and then run on threads of a pool.
"""

import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from fedring.remote import requests
from fedring.remote.contexts import Context
from fedring.remote.errors import BadMessage, CallRefused
from fedring.remote.messages import Incoming, Message, decode, encode, outgoing, receive, send
from fedring.remote.service import Service, failed
from fedring.remote.values import Handle
from fedring.ring import RingError, RingProcessGroup
from fedring.ring.engine import collectives
from fedring.ring.engine.group import Group
from fedring.ring.engine.operation import Operation
from fedring.ring.torch.work import Pool
from fedring.train.names.offered import Offered

log = logging.getLogger(__name__)

_TIDY_SECONDS = 1.0  # between looks at who has left, and at references that nobody has any more
_REQUEST, _REPLY = "a remote call", "the reply to a remote call"  # part of the protocol

_MAX_RELEASED = 10_000  # references in one message, which has room for about 50,000

_times: "WeakKeyDictionary[Group, itertools.count[int]]" = WeakKeyDictionary()  # how often a group has served


class Agent:
    """One rank's side of remote calls. It serves until `close`.

    Args:
        group: The process group; all its ranks make an agent, in the same order if they make several.
        modules: The modules that others may call here, by name.
        offered: The functions and classes that others may call here.
        max_message_bytes: The most bytes that the tensors of a message may have.
        timeout: Seconds that a call may take; after that the generation ends.
        claim: Returns a reference of an agent's rank to what another one holds, given that one's rank and key.

    Attributes:
        rank: This rank in the group.
        size: The number of ranks.
    """

    def __init__(
        self,
        group: RingProcessGroup,
        *,
        modules: Mapping[str, nn.Module],
        offered: Offered,
        max_message_bytes: int,
        timeout: float,
        claim: Callable[["Agent", int, int | str], Any],
    ) -> None:
        self._world, self._timeout, self._max_bytes = group.world, timeout, max_message_bytes
        ranks = [group.world.members.index(member) for member in group.ring.members]
        time = next(_times.setdefault(group.ring, itertools.count()))
        self._ring = group.world.enter(f"{group.ring.name}/remote/{time}", ranks)
        self.rank, self.size = self._ring.rank, self._ring.size
        self.service = Service(self.rank, self.size, modules, offered, self, claim=partial(claim, self))
        self._numbers = [itertools.count() for _ in range(self.size)]  # of requests to each rank
        self._failure: RingError | None = None
        self._dropped: deque[Handle] = deque()  # references that this process does not have any more
        self._pool = Pool("remote-call")
        self._listener = threading.Thread(target=self._listen, name="remote-listener", daemon=True)
        if self.size > 1:
            self._listener.start()

    def name_of(self, rank: int) -> str:
        """Return the name of a rank in errors."""
        return f"rank {rank}"

    def begin(self) -> Context:
        """Begin a context at this rank."""
        return self.service.contexts.begin()

    def end(self, context: int) -> None:
        """Free a context here and at the owners it has called.

        This does not wait for the owners.
        """
        if not self._ring.home.is_here:
            return
        owners = self.service.contexts.end(context)
        with suppress(RingError):  # this rank has left, and so the others free what it had
            for owner in owners:
                if not self._ring.has_left(owner):
                    self._start(owner, outgoing(requests.content_of(requests.End(context=context))))
        if self.service.is_stepping(context):
            self._pool.run(partial(self.service.undo, context))

    def request(self, rank: int, message: Message, context: Context | None = None) -> Future[Message]:
        """Send a request to a rank, and return the future answer.

        Args:
            rank: The owner; may be this rank.
            message: The request, whose tensors must not change before the answer has come.
            context: The context that the request belongs to, if the owner must hear of its end.

        Raises:
            BadMessage: The request is too large to be sent.
            Refused: The context has ended.
            RingError: This rank has left the group.
            Forked: This process is a fork of the rank.
        """
        self._ring.home.check()
        future: Future[Message] = Future()
        if self.size == 1:
            self._tidy([])  # nobody listens
        if context is None:
            self._start(rank, message, future)
        else:
            with context.lock:  # so that the end of the context cannot overtake the request
                try:
                    context.calling(rank)
                except CallRefused:
                    if self._failure is not None:  # which has ended the context
                        raise _again(self._failure) from self._failure
                    raise
                self._start(rank, message, future)
        return future

    def drop(self, handle: Handle) -> None:
        """Note that an owner may drop a handle's value.

        The owner is told soon. This only makes a note, so it may be called while any lock is held.
        """
        self._dropped.append(handle)

    def wait_for_all(self) -> None:
        """Wait until all ranks wait here.

        So no rank leaves while another may still call it.

        Raises:
            RingError: A rank is lost, or has left.
        """
        program = collectives.barrier(self.rank, self.size)
        self._ring.start("the end of remote calls", program, key="end", timeout=math.inf).wait()

    def fail(self, error: RingError) -> None:
        """End the generation, on every rank."""
        self._ring.fail(error)

    def close(self) -> None:
        """Leave the group, and free everything.

        Calls that wait for an answer raise an error. In a fork of this rank nothing happens.
        """
        if not self._ring.home.is_here:
            return
        self._world.leave(self._ring)
        self._end_with(self._failure or RingError(f"rank {self.rank} does not serve any more"))
        if self._listener.ident is not None:
            self._listener.join()

    def _start(self, rank: int, message: Message, future: Future[Message] | None = None) -> None:
        """Send a request.

        The future, if there is one, ends with the answer or an error.
        """
        if rank == self.rank:
            self._deliver_here(message, future)
            return
        encode(message)  # raises here, and not in the engine, if it is too large
        number = next(self._numbers[rank])
        if future is not None:
            incoming = Incoming(self._max_bytes)
            reply = self._ring.start(
                _REPLY, receive(rank, incoming), key=f"{rank}>{self.rank}!{number}", timeout=self._timeout
            )
            reply.when_done(partial(_settle, future, reply, incoming))
        self._ring.start(_REQUEST, send(rank, message), key=f"{self.rank}>{rank}?{number}", timeout=self._timeout)

    def _deliver_here(self, message: Message, future: Future[Message] | None) -> None:
        """Answer a request of this rank to itself.

        Tensors are copied, as on their way to another rank.
        """
        if self._failure is not None:
            raise _again(self._failure)

        def answer(reply: Message) -> None:
            if future is not None:
                future.set_result(_copied(reply))

        self._accept(self.rank, _copied(message), answer)

    def _accept(self, rank: int, message: Message, answer: Any) -> None:
        """Accept a request, and run it on a thread of the pool.

        `answer` is called with the reply.
        """
        try:
            job, ended = self.service.accept(rank, message)
        except Exception as error:  # noqa: BLE001  # it is for the caller
            answer(failed(error))
            return
        if ended is not None:
            self.end(ended)
        if job is not None:
            self._pool.run(lambda: answer(job()))

    def _listen(self) -> None:
        """Receive the requests of all peers.

        This ends when this rank leaves or the generation fails.
        """
        peers = [rank for rank in range(self.size) if rank != self.rank]
        numbers = dict.fromkeys(peers, 0)
        while not all(self._ring.has_left(peer) for peer in peers):
            keys = {f"{peer}>{self.rank}?{number}": peer for peer, number in numbers.items()}
            key = self._ring.wait_for_any(keys, _TIDY_SECONDS)
            try:
                self._tidy(peers)
                if not key or all(self._ring.has_left(peer) for peer in peers):
                    continue
                peer, incoming = keys[key], Incoming(self._max_bytes)
                operation = self._ring.start(_REQUEST, receive(peer, incoming), key=key, timeout=self._timeout)
            except RingError as error:  # this rank has left
                self._end_with(error)
                return
            operation.when_done(partial(self._arrived, peer, numbers[peer], operation, incoming))
            if operation.error is not None:
                self._end_with(operation.error)
                return
            numbers[peer] += 1

    def _end_with(self, error: RingError) -> None:
        """Free everything, since the generation has ended."""
        self._failure = self._failure or error
        self.service.fail(error)

    def _arrived(self, peer: int, number: int, operation: Operation, incoming: Incoming) -> None:
        """Handle a request that has arrived.

        Called in the order of a peer's requests; must not wait.
        """
        if operation.error is not None:
            return
        answer = partial(self._reply, peer, number)
        try:
            message = incoming.take()
        except BadMessage as error:
            log.warning("rank %d sent a request that is refused: %s", peer, error)
            answer(failed(error))
            return
        self._accept(peer, message, answer)

    def _reply(self, peer: int, number: int, message: Message) -> None:
        try:
            encode(message)
        except BadMessage as error:
            message = failed(error)
        try:
            key = f"{self.rank}>{peer}!{number}"
            self._ring.start(_REPLY, send(peer, message), key=key, timeout=self._timeout)
        except RingError as error:
            log.info("a reply to rank %d was not sent: %s", peer, error)

    def _tidy(self, peers: Sequence[int]) -> None:
        """Send dropped references to their owners.

        References and contexts of ranks that have left are freed here.
        """
        dropped: dict[int, list[int]] = {}
        with suppress(IndexError):  # once there are no more; several threads may be here
            while True:
                handle = self._dropped.popleft()
                if isinstance(handle.key, int):
                    dropped.setdefault(handle.rank, []).append(handle.key)
        for rank, numbers in dropped.items():
            for begin in range(0, len(numbers), _MAX_RELEASED):
                if not self._ring.has_left(rank):
                    released = numbers[begin : begin + _MAX_RELEASED]
                    self._start(rank, outgoing(requests.content_of(requests.Release(released=released))))
        if left := [peer for peer in peers if self._ring.has_left(peer)]:
            self.service.left(left)


def _settle(future: Future[Message], operation: Operation, incoming: Incoming) -> None:
    """End a future as the operation that receives its value has ended."""
    try:
        if operation.error is not None:
            raise _again(operation.error)
        future.set_result(incoming.take())
    except Exception as error:  # noqa: BLE001  # raised again for those who wait
        future.set_exception(error)


def _again(error: RingError) -> RingError:
    """Return a copy of an error, to be raised once more."""
    return type(error)(str(error), rank=error.rank)


def _copied(message: Message) -> Message:
    """Return a copy of a message, as if it had been sent."""
    copy = decode(encode(message), max_bytes=sum(tensor.nbytes for tensor in message.tensors) + (1 << 40))
    for into, tensor in zip(copy.tensors, message.tensors, strict=True):
        into.copy_(tensor)
    return copy
