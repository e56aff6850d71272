"""The server half of a transform, as all of them have it."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from fedring.codec import Decoder
from fedring.codec.schema import Schema
from fedring.privacy.charges import Charge
from fedring.server.aggregation.rule import Rule
from fedring.server.aggregation.steps import BaseFiles, Step
from fedring.server.aggregation.terms import Terms
from fedring.server.model.masked_sum import GroupMasks
from fedring.server.state.rows import ModelRow, UpdateRow
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from torch import nn  # which is imported when the first job needs it

A = TypeVar("A", bound=BaseModel)
States = Mapping[str, NDArray[np.float32]]
"""The values that an algorithm keeps from round to round, by names of its own."""

Skeleton = Callable[[], "nn.Module"]
"""Makes the model of a job, without values."""


class Past(Protocol):
    """The earlier rounds of a job, for one that closes.

    Its methods may take long.
    """

    def last_stats(self) -> Mapping[str, Any]:
        """Return the figures of the last published round; empty without one."""
        ...

    def last_clip(self) -> float:
        """Return the clip chosen by the last charged round.

        0 without one.
        """
        ...

    def uncounted(self) -> Sequence[UpdateRow]:
        """Return the accepted updates of rounds abandoned since the last model.

        Their clients were told that these updates count. They are in the order of their rounds.
        """
        ...

    def noise_secret(self) -> bytes:
        """Return a secret of this round only, always the same.

        Raises:
            StorageFailed: if it cannot be kept.
        """
        ...


class NoPast:
    """The past of a first round without noise."""

    def last_stats(self) -> Mapping[str, Any]:
        """See Past."""
        return {}

    def last_clip(self) -> float:
        """See Past."""
        return 0.0

    def uncounted(self) -> Sequence[UpdateRow]:
        """See Past."""
        return ()

    def noise_secret(self) -> bytes:
        """See Past."""
        raise RuntimeError("this round has no secret")


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """A round that takes no more updates."""

    job: Job  # with the settings of this round
    command: pb.TrainCmd
    updates: Sequence[UpdateRow]  # those that count, in any order
    selected: int  # clients that were drawn
    secret: str = ""  # draws the buckets of the rule, and is for nothing that clients know
    groups: Sequence[GroupMasks] | None = None  # whose sums alone are known, with all their updates; None = no groups
    past: Past = field(default_factory=NoPast)
    told: Mapping[str, Job] = field(default_factory=dict)  # the jobs of clients for which overrides hold, by client id
    in_memory: Collection[str] = frozenset()  # clients whose payloads lie in their rows since they were checked
    deltas: Mapping[str, Decoder] = field(default_factory=dict)  # of the parameters, by clients whose rows lack them

    @property
    def count(self) -> int:
        """How many updates or sums of updates the rule combines."""
        return len(self.updates if self.groups is None else self.groups)


class Transform:
    """The server half of one feature of a job.

    It keeps nothing of a round. Each hook does nothing by default.
    """

    opens_groups: ClassVar[bool] = False
    """Whether it makes contributions of groups of updates, so that its rounds have groups."""

    hides_norms: ClassVar[bool] = False
    """Whether the norms of single updates are not shown to operators."""

    def check(self, job: Job, schema: Schema, skeleton: Skeleton) -> None:
        """Check that the job can run with this transform.

        Args:
            job: the job, whose keys fit together.
            schema: of what the job shares of its model.
            skeleton: makes the job's model without values.

        Raises:
            ValueError: if it cannot: a sentence that begins with the key.
        """

    def update_bytes(self, least: int) -> int:
        """Return the fewest bytes of an update; 0 = not known.

        Args:
            least: the same without this transform.
        """
        return least

    def most_charged(self, job: Job, length: int) -> Charge | None:
        """Return the highest possible charge of a round; None without one.

        Args:
            job: the job.
            length: the number of parameters of its model.

        Raises:
            ValueError: if the clients of a group cannot add the noise.
        """
        return None

    def command(self, job: Job, command: pb.TrainCmd, base: ModelRow, files: BaseFiles) -> None:
        """Add fields to the command of a round.

        They are the same in each call.

        Raises:
            DamagedModel, StorageFailed: as BaseFiles raises them.
        """

    def terms(self, terms: Terms, command: pb.TrainCmd, members: int) -> Terms:
        """Return the terms with the demands of this transform.

        Args:
            terms: as the transforms before have left them.
            command: of the round.
            members: the number of clients in the group of the update's client; 0 = there are no groups.
        """
        return terms

    def close(self, closed: ClosedRound, rule: Rule | None) -> Step:
        """Return the transform's part in making the round's model.

        Args:
            closed: the round.
            rule: by which its updates are combined; None = the mean.

        Raises:
            StorageFailed: if something cannot be kept that the step needs.
        """
        return Step()


class Feature(Transform, ABC):
    """A transform that a key of the job asks for."""

    @classmethod
    @abstractmethod
    def of(cls, job: Job) -> Self | None:
        """Return the transform for a job, or None.

        None if the job does not ask for it.
        """


class StatefulStep(Step):
    """A step that keeps values from round to round of its job.

    They are lost if its arguments change.
    """

    def begin(self, before: States, length: int) -> None:
        """Take the values of the last round; none in the first one.

        Args:
            before: by the names that `state` gave them.
            length: the number of parameters of the model.
        """

    def state(self) -> States:
        """Return the values for the next round.

        All parameters are made by now.
        """
        return {}


class NoArgs(BaseModel):
    """The arguments of an algorithm that takes none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Algorithm(Transform, Generic[A]):
    """A transform that jobs name in their list `transforms`.

    Args:
        args: its arguments, which are valid.
    """

    name: ClassVar[str] = ""
    """By which jobs name it."""

    takes: ClassVar[type[BaseModel]] = NoArgs
    """The model of its arguments, A. It forbids others."""

    def __init__(self, args: A) -> None:
        self.args = args

    def owner(self, job_id: int) -> str:
        """Return the owner of a state.

        No other job and arguments may use it.
        """
        return json.dumps([job_id, self.args.model_dump(mode="json")], sort_keys=True)
