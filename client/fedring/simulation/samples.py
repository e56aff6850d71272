"""The samples of simulated clients.

They are parts of one data set, or those that a data callable returns for each client.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from fedring.data import ClientPart, Samples, Split, load_split
from fedring.data.partition import held_out_parts, labels_of, parts, subset
from fedring.data.samples import SamplesView
from fedring.train.batches import size_of
from fedring.train.jobs.job import Job
from fedring.train.loop import seeded
from fedring.train.names.offered import Offered, collect

_KEPT = 256  # splits of single clients in memory; the others are loaded again when their turn comes


@dataclass(frozen=True, slots=True)
class Batching:
    """How clients are to be trained together."""

    most_bytes: int  # the most memory for all clients that are trained at once
    demanded: bool  # whether a job that cannot be batched is refused; else its clients are trained one by one


@dataclass(frozen=True, slots=True)
class Setup:
    """The data that a worker loads once, when it starts."""

    job: Job
    clients: int  # among whom the samples are divided
    data_root: Path | None
    trusted: tuple[str, ...]  # the code that the job names
    device: str
    threads: int  # of torch
    secret: bytes  # from which those of the clients follow
    labels: tuple[Mapping[str, str], ...] = ()  # of the clients, which take them in turns; empty = they have none
    batching: Batching | None = None  # how clients are trained together; None = one by one
    number: int = 0  # of the worker, from 0
    workers: int = 1  # among whom the test samples are divided, unless the job has an evaluator
    objects: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # those that only this process has, by name

    def offered(self) -> Offered:
        """Return the functions and classes that the job names.

        Raises:
            SeamError: Something cannot be imported.
        """
        return collect(self.trusted, root=self.data_root, objects=self.objects)


def labels_of_client(client: int, setup: Setup) -> Mapping[str, str]:
    """Return the labels of a client by its number."""
    return setup.labels[client % len(setup.labels)] if setup.labels else {}


def client_id(client: int) -> str:
    """Return the id of a client by its number.

    `fedring.ctl.fleet.Fleet` names its clients in the same way.
    """
    return f"client-{client}"


class ClientSamples(Protocol):
    """The samples of all simulated clients."""

    @property
    def sizes(self) -> list[int]:
        """The number of training samples of each client."""
        ...

    def train(self, client: int) -> Dataset[Any]:
        """Return the training samples of a client."""
        ...

    def test(self, client: int) -> Dataset[Any]:
        """Return the test samples of a client, for its own model."""
        ...

    def held_out(self) -> Iterator[Dataset[Any]]:
        """Yield the test samples on which this worker evaluates models."""
        ...


class Shares:
    """Parts of one data set, as the job divides it.

    Args:
        split: All samples.
        setup: Of the worker.

    Raises:
        DataError: The samples cannot be divided.
    """

    def __init__(self, split: Split, setup: Setup) -> None:
        job, self._split = setup.job, split
        labels = labels_of(split.train, job.partition)
        self._parts = parts(job.partition, labels, count=setup.clients, alpha=job.alpha, seed=job.seed)
        self.sizes = [len(part) for part in self._parts]
        self._views = not job.trainer
        # A user's evaluator sees all test samples at once, so that its figures do not depend on the number of workers.
        shares = 1 if job.evaluator else setup.workers
        held_out = parts("iid", labels_of(split.test, "iid"), count=shares, alpha=job.alpha, seed=job.seed)
        self._held_out = [subset(split.test, held_out[setup.number])] if setup.number < shares else []
        self._test_parts = (
            held_out_parts(job.partition, self._parts, labels, split.test, seed=job.seed) if job.personal else []
        )

    def train(self, client: int) -> Dataset[Any]:
        samples, part = self._split.train, self._parts[client]
        # The built-in loop takes batches only. A user's trainer gets what it gets from fl-client, with all attributes.
        return SamplesView(samples, part) if self._views and isinstance(samples, Samples) else subset(samples, part)

    def test(self, client: int) -> Dataset[Any]:
        return subset(self._split.test, self._test_parts[client])

    def held_out(self) -> Iterator[Dataset[Any]]:
        yield from self._held_out


class OwnParts:
    """The samples that a data callable returns for each client.

    Each worker evaluates on the test samples of some of the clients, one client after the other, as real ones do.

    Args:
        data: The callable, which takes a part.
        setup: Of the worker.
        device: Whose random numbers are seeded for each call.

    Raises:
        DataError: The samples of a client cannot be loaded.
    """

    def __init__(self, data: Callable[..., Any], setup: Setup, device: torch.device) -> None:
        def load(client: int) -> Split:
            with seeded(setup.job.seed, device):
                return load_split(data, setup.data_root, False, ClientPart(client, setup.clients, client_id(client)))

        self._load, self._setup = lru_cache(_KEPT)(load), setup
        self.sizes = [size_of(self._load(client).train) for client in range(setup.clients)]

    def train(self, client: int) -> Dataset[Any]:
        return self._load(client).train

    def test(self, client: int) -> Dataset[Any]:
        return self._load(client).test

    def held_out(self) -> Iterator[Dataset[Any]]:
        setup = self._setup
        yield from (self._load(client).test for client in range(setup.number, setup.clients, setup.workers))
