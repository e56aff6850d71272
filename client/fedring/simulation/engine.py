"""The engines of a simulation, which run its workers.

One of the workers of this machine is the calling process, and the others are processes of their own.
"""

import gc
import logging
import multiprocessing
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import Any, Protocol, Self, TypeVar

import torch

from fedring.codec.schema import Vectors
from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.data import DataError
from fedring.job_code import job_code
from fedring.server.state.rows import UpdateRow
from fedring.simulation.samples import Setup
from fedring.simulation.worker import Order, Outcome, Own, SimulationWorker, Turn, limit_threads
from fedring.train.errors import SeamError, failure_detail
from fedring.train.evaluation import Counts

T = TypeVar("T")
W = TypeVar("W")
OwnResult = tuple[Counts, dict[str, float]]
"""The counts of a client's own model, and the figures that tell them."""

log = logging.getLogger(__name__)

AT_A_TIME = 4
"""The clients that a worker is given at a time: few, so that not many updates are in memory."""

SHARE_BYTES = 1 << 20
"""A worker may be given more clients than that, if their updates have no more bytes."""

SHARE_SECONDS = 0.1
"""The most time that it may take for more clients than that, so that their progress is shown."""

TOGETHER = 128
"""The most clients that a worker is given at a time, if it trains them together."""

_STOP_SECONDS = 5.0


class EvaluationFailed(Failure):
    """A model cannot be evaluated; the simulation goes on."""


class Engine(Protocol):
    """The workers of one simulation. A context manager, whose end stops them."""

    @property
    def sizes(self) -> Sequence[int]:
        """The number of training samples of each client."""
        ...

    @property
    def why_exact(self) -> str:
        """See SimulationWorker."""
        ...

    def train(self, order: Order, turns: Iterable[Turn]) -> Iterator[Outcome]:
        """Yield the outcome of each turn, in any order.

        The next turns are read when a worker is free.

        Raises:
            Failure: A worker has ended.
        """
        ...

    def evaluate_own(self, clients: Iterable[Own]) -> Iterator[OwnResult]:
        """Yield the evaluation of each client's own model, in any order.

        It is made on the client's test samples.

        Raises:
            Failure: A worker has ended.
        """
        ...

    def evaluate(self, vectors: Vectors) -> Counts:
        """Evaluate a model on all test samples.

        Raises:
            EvaluationFailed: The job's code raises an error, or its figures cannot be used.
            Failure: A worker has ended.
        """
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


def load(setup: Setup) -> SimulationWorker | Failure:
    """Return a worker, or the failure to make one.

    An error of the user's code may not survive pickling on its way to the caller, so it becomes a Failure here.
    """
    try:
        with job_code():
            return SimulationWorker(setup)
    except (SeamError, DataError) as error:
        return Failure(str(error).rstrip("."), Exit.CONFIG)
    except Exception as error:  # the user's code may raise anything
        log.exception("a worker of the simulation could not start")
        return Failure(f"a worker of the simulation could not start: {failure_detail(error)}")


def evaluate(worker: SimulationWorker, vectors: Vectors) -> Counts | Failure:
    """Return a worker's counts, or its failure."""
    try:
        return worker.evaluate(vectors)
    except Exception as error:  # the user's code may raise anything
        log.debug("the evaluation failed", exc_info=True)
        return EvaluationFailed(f"the model cannot be evaluated: {failure_detail(error)}")


def evaluate_own(worker: SimulationWorker, clients: Sequence[Own]) -> list[OwnResult]:
    """Return the evaluations of clients' own models.

    One that fails has only a warning.
    """
    return [_evaluate_own(worker, each) for each in clients]


def _evaluate_own(worker: SimulationWorker, own: Own) -> OwnResult:
    try:
        return worker.evaluate_own(own)
    except Exception as error:  # the user's code may raise anything
        log.debug("the evaluation failed", exc_info=True)
        return Counts(warnings=(f"a client's own model cannot be evaluated: {failure_detail(error)}",)), {}


def succeeded(result: T | Failure) -> T:
    """Return the result, unless it is a Failure, which is raised."""
    if isinstance(result, Failure):
        raise result
    return result


def at_a_time(order: Order, workers: int) -> int:
    """Return the most clients that a worker trains together.

    All workers get as many as the others, and few enough that the updates of one share do not fill the memory.
    """
    share = -(-order.clients // workers)
    return max(1, -(-share // -(-share // TOGETHER))) if share else 1


class Local:
    """Workers of this machine: the calling process, and processes of their own.

    A single one needs no other process and can be debugged.

    Args:
        setup: The data that each of them loads.
        workers: Their number.

    Raises:
        Failure: The job or its samples cannot be loaded, or a worker has ended.
    """

    def __init__(self, setup: Setup, workers: int) -> None:
        self._threads_before = torch.get_num_threads()
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._ready = selectors.DefaultSelector()
        try:
            for number in range(1, workers):
                self._start(replace(setup, number=number, workers=workers))
            limit_threads(setup.threads)
            self._worker = succeeded(load(replace(setup, workers=workers)))
            for pipe in self._pipes:
                self._receive(pipe)
        except BaseException:  # also KeyboardInterrupt: what was started must not keep running
            self.__exit__()
            raise
        self.sizes: Sequence[int] = self._worker.sizes
        self.why_exact, self._batched = self._worker.why_exact, setup.batching is not None
        self._client_seconds = float("inf")  # that a worker took for a client in the last round; not known yet

    def train(self, order: Order, turns: Iterable[Turn]) -> Iterator[Outcome]:
        for pipe in self._pipes:
            self._send(pipe, order)
        self._worker.begin(order)
        workers = 1 + len(self._pipes)
        if self._batched:
            share = at_a_time(order, workers)
            yield from self._spread(turns, self._worker.train, lambda given: share, share)
            return
        began, most = time.perf_counter(), self._most(order)
        yield from self._spread(turns, self._worker.train, lambda given: self._few(order.clients - given, most), 1)
        if order.clients:
            self._client_seconds = (time.perf_counter() - began) * workers / order.clients

    def evaluate_own(self, clients: Iterable[Own]) -> Iterator[OwnResult]:
        return self._spread(clients, partial(evaluate_own, self._worker), lambda given: AT_A_TIME, 1)

    def _most(self, order: Order) -> int:
        """Return the most clients that a worker is given at a time.

        Each message costs as much as a part of a small client's training, so there are many small clients in one.
        """
        small = SHARE_BYTES // max(1, order.vectors.parameters.nbytes)
        return max(AT_A_TIME, min(small, int(SHARE_SECONDS / self._client_seconds)))

    def _few(self, left: int, most: int) -> int:
        """Return the number of waiting clients that a worker is given.

        There are fewer at the end, so that all workers end together.
        """
        return max(1, min(most, -(-left // (4 * (len(self._pipes) + 1)))))

    def _spread(
        self,
        work: Iterable[W],
        own: Callable[[Sequence[W]], Iterable[T]],
        share: Callable[[int], int],
        mine: int,
    ) -> Iterator[T]:
        """Yield the workers' answers.

        The other workers are given some of the work whenever they have done some, and the calling process does what is
        left.

        Args:
            work: What is to be done.
            own: Does some of it here.
            share: Returns how much of it another worker is given, when so much was given before.
            mine: How much of it is done here, before the others are looked after.
        """
        rest, given, unanswered, hungry = iter(work), 0, 0, set(self._pipes)

        def take(count: int) -> list[W]:
            nonlocal given
            some = list(islice(rest, count))
            given += len(some)
            return some

        def give(pipe: Connection) -> None:
            nonlocal unanswered
            some = take(share(given))
            self._send(pipe, some)
            unanswered += bool(some)
            if not some:  # which tells the worker that nothing more comes
                hungry.remove(pipe)

        # Each has one share ahead, so that it does not wait while this process is in the middle of a long training.
        for pipe in self._pipes:
            give(pipe)
        some = take(mine)
        for pipe in self._pipes:
            if pipe in hungry:
                give(pipe)
        with job_code():  # around all of them, because to mark interrupts takes longer than a look whether they are
            while some or unanswered:
                if some:
                    yield from own(some)
                    some = take(mine)
                for key, _ in self._ready.select(0 if some else None) if unanswered else ():
                    answer, unanswered = self._receive(key.data), unanswered - 1
                    if key.data in hungry:
                        give(key.data)  # It goes on while the caller deals with what it has done.
                    yield from answer

    def evaluate(self, vectors: Vectors) -> Counts:
        for pipe in self._pipes:
            self._send(pipe, vectors)
        own = evaluate(self._worker, vectors)
        answers = [own, *map(self._answer, self._pipes)]  # of all of them: the workers go on after a failure
        return sum(map(succeeded, answers), Counts())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        limit_threads(self._threads_before)
        self._stop()

    def _start(self, setup: Setup) -> None:
        """Start the process of a worker."""
        # The processes are forks of one that has only imported what they need: torch's threads would not survive a
        # fork of this process, and each import of torch takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch._dynamo"])  # which optimizers import when they are first used
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, setup, dict(os.environ)), daemon=True)
        self._pipes.append(ours)
        self._ready.register(ours, selectors.EVENT_READ, ours)
        process.start()
        self._processes.append(process)
        theirs.close()

    def _send(self, pipe: Connection, message: object) -> None:
        try:
            pipe.send(message)
        except OSError as error:
            raise self._ended(pipe) from error

    def _receive(self, pipe: Connection) -> Any:
        return succeeded(self._answer(pipe))

    def _answer(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended(pipe) from error

    def _ended(self, pipe: Connection) -> Failure:
        number = self._pipes.index(pipe) + 1
        process = self._processes[number - 1]
        process.join(_STOP_SECONDS)
        code = process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return Failure(f"worker {number} of the simulation ended {how}: is there enough memory for all workers?")

    def _stop(self) -> None:
        self._ready.close()
        for pipe in self._pipes:
            pipe.close()  # which ends the worker, as soon as it has done what it was given
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_STOP_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(pipe: Connection, setup: Setup, environment: Mapping[str, str]) -> None:
    """Serve as a worker until the pipe is closed.

    Runs in a process of its own.
    """
    os.environ.clear()  # They are those of the first simulation of this script.
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the parent ends this one
    limit_threads(setup.threads)
    with suppress(EOFError, OSError):
        worker = load(setup)
        if isinstance(worker, Failure):
            return _reply(pipe, worker)
        _reply(pipe, (worker.sizes, worker.why_exact))
        gc.freeze()  # A collection would go through all of torch's modules, in each round.
        while True:
            match pipe.recv():
                case Order() as order:
                    worker.begin(order)
                case Vectors() as vectors:
                    _reply(pipe, evaluate(worker, vectors))
                case share:
                    while share:
                        answer = evaluate_own(worker, share) if isinstance(share[0], Own) else worker.train(share)
                        share = pipe.recv()  # before it answers: both ends would wait if both had much to send
                        _reply(pipe, answer)


def _by_arguments(kind: type[Turn | Outcome | UpdateRow]) -> None:
    """Let pipes carry a frozen dataclass as a call of it.

    By itself, it is read and written field by field, in Python: half of what a small client's message costs.
    """
    values = attrgetter(*(each.name for each in fields(kind)))
    ForkingPickler.register(kind, lambda record: (kind, values(record)))


for _kind in (Turn, Outcome, UpdateRow):
    _by_arguments(_kind)


def _reply(pipe: Connection, answer: object) -> None:
    # From this protocol on, the values of an array are copied only once.
    pipe.send_bytes(ForkingPickler.dumps(answer, protocol=5))
