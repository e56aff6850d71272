"""The workers of a simulation as actors on a Ray cluster, which may have several machines."""

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Self

from fedring.codec.schema import Vectors
from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.simulation.engine import AT_A_TIME, evaluate, load, succeeded
from fedring.simulation.worker import Order, Outcome, Setup, Turn, Worker, limit_threads
from fedring.train.evaluation import Counts


class Actors:
    """Workers as actors of Ray.

    The cluster is the one in RAY_ADDRESS, or the one that the script has connected to, or
    a new one on this machine, which ends with the simulation.

    Args:
        setup: What each of them loads; the modules and the data must be on every machine of the cluster.
        workers: Their number.

    Raises:
        Failure: Ray is missing or cannot be reached, the job or its samples cannot be loaded, or a worker has ended.
    """

    sizes: Sequence[int]

    def __init__(self, setup: Setup, workers: int) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ModuleNotFoundError as error:
            raise Failure("engine=ray needs ray, which is not here: pip install 'fedring[ray]'", Exit.CONFIG) from error
        self._started = not self._ray.is_initialized()
        try:
            if self._started:
                self._ray.init(log_to_driver=False, include_dashboard=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise Failure(f"engine=ray: the cluster cannot be reached: {error}", Exit.UNAVAILABLE) from error
        try:
            actor = self._ray.remote(num_cpus=1)(_Actor)
            numbered = [replace(setup, number=number, workers=workers) for number in range(workers)]
            self._actors: list[Any] = [actor.remote() for _ in numbered]
            loading = [each.load.remote(mine) for each, mine in zip(self._actors, numbered, strict=True)]
            self.sizes, *_ = [self._result(each) for each in loading]
        except BaseException:  # also KeyboardInterrupt: what was started must not keep running
            self.__exit__()
            raise

    def train(self, order: Order, turns: Iterable[Turn]) -> Iterator[Outcome]:
        shared = self._ray.put(order)
        for begun in [actor.begin.remote(shared) for actor in self._actors]:
            self._result(begun)
        rest, busy = iter(turns), dict[Any, Any]()

        def give(actor: Any) -> None:
            if some := list(islice(rest, AT_A_TIME)):
                busy[actor.train.remote(some)] = actor

        for actor in self._actors:
            give(actor)
        while busy:
            for reference in self._ray.wait(list(busy))[0]:
                actor, outcomes = busy.pop(reference), self._result(reference)
                give(actor)
                yield from outcomes

    def evaluate(self, vectors: Vectors) -> Counts:
        shared = self._ray.put(vectors)
        counted = [actor.evaluate.remote(shared) for actor in self._actors]
        return sum((self._result(each) for each in counted), Counts())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in getattr(self, "_actors", []):
            self._ray.kill(actor)
        if self._started:
            self._ray.shutdown()

    def _result(self, reference: Any) -> Any:
        try:
            return succeeded(self._ray.get(reference))
        except self._ray.exceptions.RayError as error:
            raise Failure(f"a worker of the simulation ended: {str(error).splitlines()[0]}") from error


class _Actor:
    """What Ray runs on a machine of the cluster."""

    def load(self, setup: Setup) -> list[int] | Failure:
        limit_threads(setup.threads)
        worker = load(setup)
        if isinstance(worker, Failure):
            return worker
        self._worker: Worker = worker
        return worker.sizes

    def begin(self, order: Order) -> None:
        self._worker.begin(order)

    def train(self, turns: Sequence[Turn]) -> list[Outcome]:
        return self._worker.train(turns)

    def evaluate(self, vectors: Vectors) -> Counts | Failure:
        return evaluate(self._worker, vectors)
