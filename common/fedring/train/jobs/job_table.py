"""The base of the tables of a job.

A table has keys, and demands of other keys. The tables of modes also say how clients train together.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict


class Budget(NamedTuple):
    """The most that all rounds of a server may cost together."""

    max_epsilon: float  # 0 = no limit
    delta: float
    server_noise: bool  # whether the server adds the noise


class JobView(Protocol):
    """The keys of a job that its tables look at."""

    @property
    def weights(self) -> str: ...
    @property
    def override(self) -> Sequence[object]: ...
    @property
    def best_by(self) -> str: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def momentum(self) -> float: ...
    @property
    def evaluator(self) -> str: ...
    @property
    def evaluate_on_server(self) -> bool: ...
    @property
    def min_clients_to_aggregate(self) -> int: ...
    @property
    def fewest_updates(self) -> int: ...
    @property
    def tables(self) -> Mapping[str, "JobTable"]: ...


class JobTable(BaseModel):
    """A table of a job that turns an algorithm on.

    Unknown keys are errors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    hides: ClassVar[bool] = False
    """Whether updates hide numbers of samples, metrics and training times."""

    opens_seed: ClassVar[bool] = False
    """Whether fl-server chooses the seed of a job that sets none: two jobs with one seed begin with the same model."""

    alone: ClassVar[str] = ""
    """Why a simulation cannot train several clients as one computation, as a clause."""

    at_once: ClassVar[str] = ""
    """Why all clients of a round must begin together, as a clause."""

    @property
    def budget(self) -> Budget | None:
        """The privacy budget of rounds, if the server charges them."""
        return None

    def updates_of(self, clients: int) -> tuple[int, str]:
        """Return how many updates a rule gets of a round.

        Args:
            clients: Of the round.

        Returns:
            The number, and a clause that says why there are not as many as clients, or nothing.
        """
        return clients, ""

    def check(self, job: JobView) -> None:
        """Check that the other keys of the job go with this table.

        Raises:
            ValueError: If a key has another value than it must have; the sentence says why.
        """


class TrainingMode(JobTable):
    """The table of a mode: how clients train together.

    This class is the mode federated.
    """

    grouped: ClassVar[bool] = False
    """Whether the clients of a round form one group of workers, one of which delivers the update for all."""

    staged: ClassVar[bool] = False
    """Whether each worker has some stages of the model, and none has all of it."""

    @property
    def workers(self) -> int:
        """The exact number of clients in a group.

        0 = the job's other keys decide.
        """
        return 0

    @property
    def patience(self) -> float:
        """Seconds that a group waits for the replacement of a lost worker."""
        return 0.0

    @property
    def by_module(self) -> bool:
        """Whether the server makes the first model one module at a time."""
        return False

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that the job names."""
        return ()

    def applied_momentum(self, momentum: float) -> float:
        """Return the momentum that is applied before gradients are sent.

        Args:
            momentum: Of the job.
        """
        return 0.0

    def own_code(self, momentum: float) -> Iterator[tuple[str, Literal["hook", "cut"], str]]:
        """Yield key, kind and name of the user's callables for workers.

        Args:
            momentum: Of the job.
        """
        yield from ()
