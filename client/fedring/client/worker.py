"""A client as a worker: one generation of the group after the other, until the round is trained."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from fedring.client.rendezvous import Rendezvous
from fedring.client.update import sendable
from fedring.ring import Endpoint, RingError, RingOptions, Traffic, join, leave
from fedring.train.errors import TrainingStopped
from fedring.v1 import rendezvous_pb2 as pb
from fedring.workers.usage import Usage
from fedring.workers.watcher import Diverged, Watcher

log = logging.getLogger(__name__)

_JOIN_SECONDS = 20.0  # less than the server's patience with a group that forms


class Superseded(Exception):
    """The server has said something else in the meantime."""


class Part(Protocol):
    """What a worker does in the groups of one round, in one mode; torch's default group is the one it is in."""

    usage: Usage
    """What its training has taken so far."""

    @property
    def steps(self) -> int:
        """Steps of the job that it can go on after."""
        ...

    @property
    def metrics(self) -> dict[str, float]:
        """What the training says of itself."""
        ...

    def enter(self, generation: int, *, workers: int) -> None:
        """It stands where the group goes on."""

    def train(self, watcher: Watcher) -> None:
        """The round is trained to its end."""

    def digest(self) -> bytes:
        """BLAKE3 of the parameters that the round ended with, 32 bytes: equal on all workers."""
        ...


@dataclass(slots=True, eq=False)
class Worker:
    """One worker in one round; `look` raises TrainingStopped once the round is over."""

    rendezvous: Rendezvous
    part: Part
    options: RingOptions
    look: Callable[[], None]
    progress: Callable[[float], None]
    _trained: bool = False

    def run(self) -> bool:
        """Whether this worker is to deliver what the group has trained; TrainingStopped if nobody has."""
        seen = pb.GroupMessage()
        try:
            while seen.WhichOneof("message") not in ("deliver", "ended"):
                seen = self._order_after(seen)
                if seen.WhichOneof("message") == "prepare":
                    self._take_part(seen.prepare.generation)
                    if not self._trained:
                        gc.collect()  # a failure lies in its own traceback, which keeps DDP's hooks on the parameters
        except TrainingStopped:
            if not self._trained:
                raise
        if seen.WhichOneof("message") == "ended" and not self._trained:
            raise TrainingStopped(seen.ended.reason)
        return seen.WhichOneof("message") == "deliver"

    def stay(self) -> None:
        """Return when the round is over."""
        with suppress(TrainingStopped):
            self.rendezvous.wait(lambda news: news.WhichOneof("message") == "ended", self.look)

    def _take_part(self, generation: int) -> None:
        """The generation has come to its end: trained, lost, or superseded."""
        endpoint = Endpoint(self.options, generation=generation)
        self.rendezvous.on_news = lambda news: self._wake_up(endpoint, news)
        try:
            with _only_ring_errors(endpoint):
                self._train(endpoint)
        except Superseded:
            log.info("generation %d was superseded", generation)
        except RingError as error:
            self._tell_broken(generation, error.reason, str(error))
        except Diverged as error:
            log.error("%s", error)
            self._tell_broken(generation, "diverged", str(error))
        finally:
            self.rendezvous.on_news = _ignore
            leave()
            endpoint.close()

    def _train(self, endpoint: Endpoint) -> None:
        generation, part = endpoint.generation, self.part
        ready = pb.Ready(generation=generation, address=endpoint.address, steps=part.steps)
        self.rendezvous.tell(pb.WorkerMessage(ready=ready))
        group = self._next(generation, "group").group
        members, identities = list(group.members), list(group.identities)
        join(endpoint, rank=group.rank, members=members, identities=identities, timeout=_JOIN_SECONDS)
        self.rendezvous.tell(pb.WorkerMessage(joined=pb.Joined(generation=generation)))
        self._next(generation, "start")
        part.enter(generation, workers=len(group.members))
        part.train(Watcher(self.progress, lambda: self._check(generation), lambda: _sent(endpoint.traffic)))
        done = pb.Done(
            generation=generation,
            digest=part.digest(),
            num_samples=part.usage.samples,
            train_seconds=part.usage.seconds,
            metrics=sendable(part.metrics),
        )
        self._trained = True
        self.rendezvous.on_news = _ignore
        self.rendezvous.tell(pb.WorkerMessage(done=done))

    def _next(self, generation: int, kind: str) -> pb.GroupMessage:
        """What the server says next of this generation; Superseded if it speaks of another."""

        def wanted(news: pb.GroupMessage) -> bool:
            self._check(generation, news)
            return news.WhichOneof("message") == kind

        return self.rendezvous.wait(wanted, self.look)

    def _check(self, generation: int, news: pb.GroupMessage | None = None) -> None:
        """Return if the generation may go on."""
        self.look()
        if _is_superseded(generation, news or self.rendezvous.newest):
            raise Superseded

    def _wake_up(self, endpoint: Endpoint, news: pb.GroupMessage) -> None:
        """A collective that waits for a frozen peer ends as soon as the server has given up on the generation."""
        if _is_superseded(endpoint.generation, news):
            endpoint.fail(RingError("the server has ended the generation"))

    def _order_after(self, seen: pb.GroupMessage) -> pb.GroupMessage:
        """What the server says once that is no more what it said."""
        return self.rendezvous.wait(lambda news: news != seen, self.look)

    def _tell_broken(self, generation: int, reason: str, detail: str) -> None:
        broken = pb.Broken(generation=generation, reason=reason, detail=detail[:1000])
        self.rendezvous.tell(pb.WorkerMessage(broken=broken))


def _sent(traffic: Traffic) -> int:
    """Bytes that have gone to peers, on the wire or through memory of one host."""
    return traffic.sent_bytes + traffic.shared_bytes


def _ignore(news: pb.GroupMessage) -> None:
    pass


def _is_superseded(generation: int, news: pb.GroupMessage) -> bool:
    """Whether the server speaks of something else; while it is silent, the group does not need it."""
    match news.WhichOneof("message"):
        case None | "group" | "start":
            return False
        case "prepare":
            return news.prepare.generation != generation
    return True


@contextmanager
def _only_ring_errors(endpoint: Endpoint) -> Iterator[None]:
    """Inside, what torch makes of a failed collective is the failure itself."""
    try:
        yield
    except RuntimeError as error:
        if endpoint.failure is not None and not isinstance(error, RingError):
            raise endpoint.failure from error
        raise
