"""The engines of a simulation, which run its workers.

Workers are processes of this machine, or one of them is in the calling process.
"""

import gc
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol, Self, TypeVar

import torch

from fedring.codec.schema import Vectors
from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.data import DataError
from fedring.job_code import job_code
from fedring.simulation.samples import Setup
from fedring.simulation.worker import Order, Outcome, Own, SimulationWorker, Turn, limit_threads
from fedring.train.errors import SeamError, failure_detail
from fedring.train.evaluation import Counts

T = TypeVar("T")
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


class InProcess:
    """One worker in the calling process.

    It needs no other process and can be debugged.

    Raises:
        Failure: The job or its samples cannot be loaded.
    """

    def __init__(self, setup: Setup) -> None:
        self._threads_before = torch.get_num_threads()
        limit_threads(setup.threads)
        try:
            self._worker = succeeded(load(setup))
        except Failure:
            self.__exit__()
            raise
        self.sizes: Sequence[int] = self._worker.sizes
        self.why_exact, self._batched = self._worker.why_exact, setup.batching is not None

    def train(self, order: Order, turns: Iterable[Turn]) -> Iterator[Outcome]:
        self._worker.begin(order)
        rest, most = iter(turns), at_a_time(order, 1) if self._batched else 1
        with job_code():  # around all of them, because to mark interrupts takes longer than a look whether they are
            while some := list(islice(rest, most)):
                yield from self._worker.train(some)

    def evaluate_own(self, clients: Iterable[Own]) -> Iterator[OwnResult]:
        for own in clients:
            yield from evaluate_own(self._worker, [own])

    def evaluate(self, vectors: Vectors) -> Counts:
        return succeeded(evaluate(self._worker, vectors))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        limit_threads(self._threads_before)


class Processes:
    """Workers in processes of their own.

    Args:
        setup: The data that each of them loads.
        workers: Their number.

    Raises:
        Failure: The job or its samples cannot be loaded, or a worker has ended.
    """

    def __init__(self, setup: Setup, workers: int) -> None:
        # The processes are forks of one that has only imported what they need: torch's threads would not survive a
        # fork of this process, and each import of torch takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch._dynamo"])  # which optimizers import when they are first used
        self._pipes: list[Connection] = []
        self._processes = []
        try:
            for number in range(workers):
                ours, theirs = context.Pipe()
                mine = replace(setup, number=number, workers=workers)
                process = context.Process(target=_serve, args=(theirs, mine, dict(os.environ)), daemon=True)
                self._pipes.append(ours)
                process.start()
                self._processes.append(process)
                theirs.close()
            found = [self._receive(pipe) for pipe in self._pipes]
        except BaseException:  # also KeyboardInterrupt: what was started must not keep running
            self._stop()
            raise
        self.sizes: Sequence[int] = found[0][0]
        self.why_exact: str = found[0][1]
        self._batched = setup.batching is not None
        self._client_seconds = float("inf")  # that a worker took for a client in the last round; not known yet

    def train(self, order: Order, turns: Iterable[Turn]) -> Iterator[Outcome]:
        for pipe in self._pipes:
            self._send(pipe, order)
        if self._batched:
            share = at_a_time(order, len(self._pipes))
            yield from self._spread(turns, lambda given: share)
            return
        began, most = time.perf_counter(), self._most(order)
        yield from self._spread(turns, lambda given: self._few(order.clients - given, most))
        if order.clients:
            self._client_seconds = (time.perf_counter() - began) * len(self._pipes) / order.clients

    def evaluate_own(self, clients: Iterable[Own]) -> Iterator[OwnResult]:
        return self._spread(clients, lambda given: AT_A_TIME)

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
        return max(1, min(most, -(-left // (2 * len(self._pipes)))))

    def _spread(self, work: Iterable[object], share: Callable[[int], int]) -> Iterator[Any]:
        """Yield the workers' answers.

        Each worker is given some of the work whenever it is free.

        Args:
            work: What is to be done.
            share: Returns how much of it a worker is given, when so much was given before.
        """
        rest, busy, given = iter(work), set[Connection](), 0

        def give(pipe: Connection) -> None:
            nonlocal given
            if some := list(islice(rest, share(given))):
                given += len(some)
                self._send(pipe, some)
                busy.add(pipe)

        for pipe in self._pipes:
            give(pipe)
        while busy:
            for pipe in [pipe for pipe in wait(list(busy)) if isinstance(pipe, Connection)]:
                outcomes = self._receive(pipe)
                busy.remove(pipe)
                give(pipe)  # It goes on while the caller deals with what it has done.
                yield from outcomes

    def evaluate(self, vectors: Vectors) -> Counts:
        for pipe in self._pipes:
            self._send(pipe, vectors)
        answers = [self._answer(pipe) for pipe in self._pipes]  # of all of them: the workers go on after a failure
        return sum(map(succeeded, answers), Counts())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

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
        number = self._pipes.index(pipe)
        process = self._processes[number]
        process.join(_STOP_SECONDS)
        code = process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return Failure(f"worker {number} of the simulation ended {how}: is there enough memory for all workers?")

    def _stop(self) -> None:
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
                case [Own(), *_] as clients:
                    _reply(pipe, evaluate_own(worker, clients))
                case turns:
                    _reply(pipe, worker.train(turns))


def _reply(pipe: Connection, answer: object) -> None:
    # From this protocol on, the values of an array are copied only once.
    pipe.send_bytes(ForkingPickler.dumps(answer, protocol=5))
