"""Runs a client as a worker of a group.

It takes part in one generation after the other, until the round is trained. A generation is one attempt of the group;
when a worker comes or goes, the server begins another.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from fedring.client.group.rendezvous import RendezvousStream
from fedring.job_code import job_code
from fedring.ring import Endpoint, RingError, RingOptions, Traffic, join, leave
from fedring.train.errors import TrainingStopped
from fedring.train.metrics import sendable_metrics
from fedring.v1 import rendezvous_pb2 as pb
from fedring.workers.training import Diverged, Watcher
from fedring.workers.usage import Usage

log = logging.getLogger(__name__)

_JOIN_SECONDS = 20.0  # less than the time that the server gives a group to form


class GenerationSuperseded(Exception):
    """The server has begun another generation, or has ended the round."""


class WorkerPart(Protocol):
    """A worker's part in one round, in one mode.

    Its group is torch's default group while its methods run.
    """

    usage: Usage
    """The time and the bytes that its training has taken so far."""

    @property
    def steps(self) -> int:
        """The step of the job after which it can continue."""
        ...

    @property
    def samples_found(self) -> int:
        """Training samples, for the server to compare; 0 = it need not."""
        ...

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of the training, by name."""
        ...

    @property
    def can_deliver(self) -> bool:
        """Whether this worker holds the whole update after the round."""
        ...

    def enter(self, generation: int, *, workers: int) -> None:
        """Copy the state of the worker from which the group continues.

        Args:
            generation: The number of the group.
            workers: How many are in it.
        """

    def train(self, watcher: Watcher) -> None:
        """Train to the end of the round.

        `watcher` checks whether to stop, and is told the progress.
        """

    def digest(self) -> bytes:
        """Return the BLAKE3 digest of the trained values, 32 bytes.

        It must be equal on all workers.
        """
        ...


@dataclass(slots=True, eq=False)
class RoundWorker:
    """One worker in one round."""

    rendezvous: RendezvousStream
    part: WorkerPart
    options: RingOptions
    look: Callable[[], None]  # raises TrainingStopped once the round is over
    progress: Callable[[float], None]  # is told the share of the round that is done, 0 to 1
    _trained: bool = False

    def run(self) -> bool:
        """Take part in the group's generations until the round is trained.

        Returns:
            Whether this worker is to deliver what the group has trained.

        Raises:
            TrainingStopped: If the round ended before it was trained.
        """
        seen = pb.GroupMessage()
        try:
            while seen.WhichOneof("message") not in ("deliver", "ended"):
                seen = self._next_order(seen)
                if seen.WhichOneof("message") == "prepare":
                    self._take_part(seen.prepare.generation)
                    if not self._trained:
                        gc.collect()  # An error and its traceback form a cycle, which would keep DDP's hooks alive.
        except TrainingStopped:
            if not self._trained:
                raise
        if seen.WhichOneof("message") == "ended" and not self._trained:
            raise TrainingStopped(seen.ended.reason)
        return seen.WhichOneof("message") == "deliver"

    def stay(self) -> None:
        """Wait until the round is over."""
        with suppress(TrainingStopped):
            self.rendezvous.wait(lambda news: news.WhichOneof("message") == "ended", self.look)

    def _take_part(self, generation: int) -> None:
        """Take part in a generation until it is trained, lost or superseded."""
        endpoint = Endpoint(self.options, generation=generation)
        self.rendezvous.on_news = lambda news: self._wake_up(endpoint, news)
        try:
            with _only_ring_errors(endpoint):
                self._train(endpoint)
        except GenerationSuperseded:
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
        ready = pb.Ready(generation=generation, address=endpoint.address, steps=part.steps, samples=part.samples_found)
        self.rendezvous.tell(pb.WorkerMessage(ready=ready))
        group = self._next(generation, "group").group
        members, identities = list(group.members), list(group.identities)
        join(endpoint, rank=group.rank, members=members, identities=identities, timeout=_JOIN_SECONDS)
        self.rendezvous.tell(pb.WorkerMessage(joined=pb.Joined(generation=generation)))
        # The server says "start" once all have joined: the first collective would wait for the others otherwise.
        self._next(generation, "start")
        part.enter(generation, workers=len(group.members))
        with job_code():
            part.train(Watcher(self.progress, lambda: self._check(generation), lambda: _sent(endpoint.traffic)))
        done = pb.Done(
            generation=generation,
            digest=part.digest(),
            num_samples=part.usage.samples,
            train_seconds=part.usage.seconds,
            metrics=sendable_metrics(part.metrics),
            cannot_deliver=not part.can_deliver,
        )
        self._trained = True
        # The values are complete: news of a new generation must not fail this endpoint any more.
        self.rendezvous.on_news = _ignore
        self.rendezvous.tell(pb.WorkerMessage(done=done))

    def _next(self, generation: int, kind: str) -> pb.GroupMessage:
        """Wait for one kind of message about this generation.

        Raises:
            GenerationSuperseded: If another generation has begun.
        """

        def wanted(news: pb.GroupMessage) -> bool:
            self._check(generation, news)
            return news.WhichOneof("message") == kind

        return self.rendezvous.wait(wanted, self.look)

    def _check(self, generation: int, news: pb.GroupMessage | None = None) -> None:
        """Raise if the generation must not continue."""
        self.look()
        if _is_superseded(generation, news or self.rendezvous.newest):
            raise GenerationSuperseded

    def _wake_up(self, endpoint: Endpoint, news: pb.GroupMessage) -> None:
        """End waiting collectives when the server has ended their generation.

        They may wait for a frozen peer.
        """
        if _is_superseded(endpoint.generation, news):
            endpoint.fail(RingError("the server has ended the generation"))

    def _next_order(self, seen: pb.GroupMessage) -> pb.GroupMessage:
        """Wait for a message other than `seen`, and return it."""
        return self.rendezvous.wait(lambda news: news != seen, self.look)

    def _tell_broken(self, generation: int, reason: str, detail: str) -> None:
        broken = pb.Broken(generation=generation, reason=reason, detail=detail[:1000])
        self.rendezvous.tell(pb.WorkerMessage(broken=broken))


def _sent(traffic: Traffic) -> int:
    """Return the bytes sent to peers, including those through shared memory."""
    return traffic.sent_bytes + traffic.shared_bytes


def _ignore(news: pb.GroupMessage) -> None:
    pass


def _is_superseded(generation: int, news: pb.GroupMessage) -> bool:
    """Return whether a message ends the generation.

    An empty one does not: the group can train without the server.
    """
    match news.WhichOneof("message"):
        case None | "group" | "start":
            return False
        case "prepare":
            return news.prepare.generation != generation
    return True


@contextmanager
def _only_ring_errors(endpoint: Endpoint) -> Iterator[None]:
    """Raise the endpoint's failure instead of torch's version of it."""
    try:
        yield
    except RuntimeError as error:
        if endpoint.failure is not None and not isinstance(error, RingError):
            raise endpoint.failure from error
        raise
