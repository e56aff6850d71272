"""A client as a worker: one generation of the group after the other, until the round is trained."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from fedring.client.hooks import Compressed
from fedring.client.rendezvous import Rendezvous
from fedring.client.ring_metrics import RingMetrics
from fedring.ring import Endpoint, RingError, RingOptions, Traffic, join, leave
from fedring.train.errors import TrainingStopped
from fedring.train.group import Course, Diverged, GroupTraining, Watcher
from fedring.train.replica import Replica, synchronize
from fedring.train.usage import Hook, Usage
from fedring.v1 import rendezvous_pb2 as pb

log = logging.getLogger(__name__)

_JOIN_SECONDS = 20.0  # less than the server's patience with a group that forms


class Superseded(Exception):
    """The server has said something else in the meantime."""


@dataclass(slots=True, eq=False)
class Standing:
    """What a worker keeps from round to round of one job."""

    replica: Replica
    hook: Hook
    workers: int = 0  # in its newest group; 0 = it was in none yet


@dataclass(slots=True, eq=False)
class Worker:
    """One worker in one round; `look` raises TrainingStopped once the round is over."""

    rendezvous: Rendezvous
    standing: Standing
    course: Course
    options: RingOptions
    look: Callable[[], None]
    progress: Callable[[float], None]
    usage: Usage = field(default_factory=Usage)
    means: dict[str, float] = field(default_factory=dict)
    ring: RingMetrics = field(default_factory=RingMetrics)
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

    @property
    def metrics(self) -> dict[str, float]:
        """What the training says of itself."""
        standing = self.standing
        return {
            **self.means,
            **self.usage.metrics,
            "workers": standing.workers,
            "job_steps": standing.replica.progress.steps,
        }

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
        generation, replica = endpoint.generation, self.standing.replica
        ready = pb.Ready(generation=generation, address=endpoint.address, steps=replica.progress.steps)
        self.rendezvous.tell(pb.WorkerMessage(ready=ready))
        group = self._next(generation, "group").group
        join(endpoint, rank=group.rank, members=list(group.members), timeout=_JOIN_SECONDS)
        self.rendezvous.tell(pb.WorkerMessage(joined=pb.Joined(generation=generation)))
        self._next(generation, "start")
        self._catch_up(generation, workers=len(group.members))
        watcher = Watcher(self.progress, lambda: self._check(generation), lambda: _sent(endpoint.traffic))
        training = GroupTraining(replica, self.course, self.standing.hook, watcher)
        try:
            with self.ring.training(training, workers=len(group.members)):
                self.means = training.run() or self.means
        finally:
            self.usage += training.usage
        done = pb.Done(
            generation=generation,
            digest=replica.digest(),
            num_samples=self.usage.samples,
            train_seconds=self.usage.seconds,
            metrics=self.metrics,
        )
        self._trained = True
        self.rendezvous.on_news = _ignore
        self.rendezvous.tell(pb.WorkerMessage(done=done))

    def _catch_up(self, generation: int, *, workers: int) -> None:
        """This worker is where the one with most steps was, and what it owes is scaled to the group's size."""
        standing, hook = self.standing, self.standing.hook
        if isinstance(hook, Compressed):
            hook.leave()
        source = synchronize(standing.replica)
        steps = standing.replica.progress.steps
        if isinstance(hook, Compressed):
            hook.enter(standing.workers, steps)
        log.info(
            "generation %d: %d workers, from step %d of the job, which rank %d had",
            generation,
            workers,
            steps,
            source,
            extra={"generation": generation, "workers": workers, "step": steps},
        )
        if workers < standing.workers:
            log.warning("what %d lost workers had not sent is lost", standing.workers - workers)
        standing.workers = workers

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
