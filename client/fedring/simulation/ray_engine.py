"""The workers of a simulation as actors on a Ray cluster.

The cluster may have several machines.
"""

import importlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Self

from fedring.codec.schema import Vectors
from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.simulation.engine import AT_A_TIME, OwnResult, evaluate, evaluate_own, load, succeeded
from fedring.simulation.samples import Setup
from fedring.simulation.worker import Order, Outcome, Own, SimulationWorker, Turn, limit_threads
from fedring.train.evaluation import Counts


class Actors:
    """Workers as actors of Ray.

    They run on the cluster that the script has connected to, or that RAY_ADDRESS names.

    Args:
        setup: Loaded by each of them; fedring, the modules that the job names and the data must be on each machine.
        workers: Their number. Each of them takes as many of the cluster's CPUs as it has threads.

    Raises:
        Failure: There is no Ray, no cluster or not enough CPUs, the job or its samples cannot be loaded, or a worker
            has ended.
    """

    def __init__(self, setup: Setup, workers: int) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ModuleNotFoundError as error:
            raise Failure("engine=ray needs Ray, which is not installed: install fedring[ray]", Exit.CONFIG) from error
        self._actors: list[Any] = []
        self._connected = not self._ray.is_initialized()
        try:
            if self._connected:
                self._ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
        except (OSError, RuntimeError, ValueError) as error:
            why = str(error).partition("\n")[0].rstrip(".")
            raise Failure(f"engine=ray finds no cluster: {why}: set RAY_ADDRESS, or `ray start --head` here") from error
        try:
            self._check_room(workers, setup.threads)
            actor = self._ray.remote(num_cpus=setup.threads)(_Actor)
            self._actors += [actor.remote() for _ in range(workers)]
            setups = [replace(setup, number=number, workers=workers) for number in range(workers)]
            loading = [each.load.remote(mine) for each, mine in zip(self._actors, setups, strict=True)]
            loaded = [self._result(each) for each in loading]
            self.sizes: Sequence[int] = loaded[0]
            self.why_exact = ""
        except BaseException:  # also KeyboardInterrupt: what was started must not keep running
            self.__exit__()
            raise

    def train(self, order: Order, turns: Iterable[Turn]) -> Iterator[Outcome]:
        shared = self._ray.put(order)
        for begun in [actor.begin.remote(shared) for actor in self._actors]:
            self._result(begun)
        return self._spread("train", turns)

    def evaluate_own(self, clients: Iterable[Own]) -> Iterator[OwnResult]:
        return self._spread("evaluate_own", clients)

    def _spread(self, method: str, work: Iterable[object]) -> Iterator[Any]:
        """Yield the workers' answers.

        Each worker is given a little of the work whenever it is free.
        """
        rest, busy = iter(work), dict[Any, Any]()

        def give(actor: Any) -> None:
            if some := list(islice(rest, AT_A_TIME)):
                busy[getattr(actor, method).remote(some)] = actor

        for actor in self._actors:
            give(actor)
        while busy:
            for done in self._ray.wait(list(busy))[0]:
                outcomes = self._result(done)
                give(busy.pop(done))  # It goes on while the caller deals with what it has done.
                yield from outcomes

    def evaluate(self, vectors: Vectors) -> Counts:
        shared = self._ray.put(vectors)
        counted = [actor.evaluate.remote(shared) for actor in self._actors]
        answers = [self._answer(each) for each in counted]  # of all of them: the workers go on after a failure
        return sum(map(succeeded, answers), Counts())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._connected:
            self._ray.shutdown()

    def _check_room(self, workers: int, threads: int) -> None:
        """Check that the cluster's machines have room for the workers.

        Ray would wait for room without end.
        """
        machines = [machine for machine in self._ray.nodes() if machine["Alive"]]
        room = sum(int(machine["Resources"].get("CPU", 0)) // threads for machine in machines)
        if workers > room:
            raise Failure(
                f"workers = {workers} with threads = {threads} need more CPUs than the Ray cluster has, which has room "
                f"for {room}",
                Exit.CONFIG,
            )

    def _result(self, reference: Any) -> Any:
        return succeeded(self._answer(reference))

    def _answer(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines()  # of a worker's own error, the last line says what it was
            why = (lines[-1] if isinstance(error, self._ray.exceptions.RayTaskError) else lines[0]).rstrip(".")
            raise Failure(f"a worker of the simulation ended on the Ray cluster: {why}") from error


class _Actor:
    """One worker, as Ray runs it on a machine of the cluster."""

    def load(self, setup: Setup) -> Sequence[int] | Failure:
        limit_threads(setup.threads)
        worker = load(setup)
        if isinstance(worker, Failure):
            return worker
        self._worker: SimulationWorker = worker
        return worker.sizes

    def begin(self, order: Order) -> None:
        self._worker.begin(order)

    def train(self, turns: Sequence[Turn]) -> list[Outcome]:
        return self._worker.train(turns)

    def evaluate_own(self, clients: Sequence[Own]) -> list[OwnResult]:
        return evaluate_own(self._worker, clients)

    def evaluate(self, vectors: Vectors) -> Counts | Failure:
        return evaluate(self._worker, vectors)
