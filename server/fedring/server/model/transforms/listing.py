"""The list of a job's transforms. Nothing else decides by a feature."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from pydantic import ValidationError

from fedring.codec.schema import Schema
from fedring.daemon.config import explain
from fedring.privacy.charges import Charge
from fedring.server.aggregation.rule import Rule
from fedring.server.aggregation.steps import BaseFiles, Step
from fedring.server.aggregation.terms import Terms
from fedring.server.model.transforms import named
from fedring.server.model.transforms.client_noise import ClientNoise
from fedring.server.model.transforms.download import EncodedDownload
from fedring.server.model.transforms.guarding import Guards
from fedring.server.model.transforms.masked import MaskedLevels
from fedring.server.model.transforms.optimizing import Optimizing
from fedring.server.model.transforms.sample_noise import SampleNoise
from fedring.server.model.transforms.scaffold import Scaffold
from fedring.server.model.transforms.server_noise import ServerNoise
from fedring.server.model.transforms.staleness import Staleness
from fedring.server.model.transforms.states import KeptStates
from fedring.server.model.transforms.transform import Algorithm, ClosedRound, Feature, Skeleton, StatefulStep, Transform
from fedring.server.state.rows import ChargeRow, ModelRow
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb

_BEFORE: tuple[type[Feature], ...] = (
    *(Guards, ServerNoise, MaskedLevels, ClientNoise, SampleNoise, Scaffold),
    Staleness,
)
_AFTER: tuple[type[Feature], ...] = (Optimizing, EncodedDownload)
"""The features of jobs in the order in which they take the updates of a round, before and after the job's own list."""


@dataclass(frozen=True, slots=True)
class RoundSteps:
    """The steps of all transforms in one attempt to make a model."""

    closed: ClosedRound
    steps: Sequence[Step]
    rule: Rule | None  # by which updates are combined; None = the mean

    def stats(self) -> dict[str, Any]:
        """Return the figures that the round's row keeps."""
        return {key: figure for step in self.steps for key, figure in step.stats().items()}

    def charge(self) -> ChargeRow | None:
        """Return the charge for publishing the model; None if there is none."""
        return next((charge for step in self.steps if (charge := step.charge()) is not None), None)


class Transforms:
    """All transforms of a job, in the order of their steps."""

    def __init__(self, each: Sequence[Transform]) -> None:
        self._each = tuple(each)

    @property
    def hide_norms(self) -> bool:
        """Whether the norms of single updates are not shown to operators."""
        return any(each.hides_norms for each in self._each)

    def check(self, job: Job, schema: Schema, skeleton: Skeleton) -> None:
        """Check that the job can run with them: see Transform.check.

        Raises:
            ValueError: if it cannot: a sentence that names the key.
        """
        for each in self._each:
            each.check(job, schema, skeleton)

    def update_bytes(self, least: int) -> int:
        """Return the fewest bytes of an update: see Transform.update_bytes."""
        for each in self._each:
            least = each.update_bytes(least)
        return least

    def most_charged(self, job: Job, length: int) -> Charge:
        """Return the highest possible charge of a round: see Transform.most_charged.

        Raises:
            ValueError: if rounds cost nothing, or the clients of a group cannot add the noise.
        """
        found = (charge for each in self._each if (charge := each.most_charged(job, length)) is not None)
        if (charge := next(found, None)) is None:
            raise ValueError("the job has no dp")
        return charge

    def command(self, job: Job, command: pb.TrainCmd, base: ModelRow, files: BaseFiles) -> None:
        """Add to the command of a round: see Transform.command."""
        for each in self._each:
            each.command(job, command, base, files)

    def terms(self, terms: Terms, command: pb.TrainCmd, members: int) -> Terms:
        """Return the terms with all demands: see Transform.terms."""
        for each in self._each:
            terms = each.terms(terms, command, members)
        return terms

    def close(self, closed: ClosedRound, rule: Rule | None) -> RoundSteps:
        """Return the part of each in making the round's model: see Transform.close.

        Raises:
            ValueError: if the round has groups, and none of them opens groups, or the other way round.
        """
        if any(each.opens_groups for each in self._each) != (closed.groups is not None):
            raise ValueError("groups belong to jobs whose updates only sums open, and to all of their rounds")
        steps = [each.close(closed, rule) for each in self._each]
        named_steps = {
            each.name: (step, each.owner(closed.command.job.job_id))
            for each, step in zip(self._each, steps, strict=True)
            if isinstance(each, Algorithm) and isinstance(step, StatefulStep)
        }
        if named_steps:
            kept = {name: step for name, (step, _) in named_steps.items()}
            steps.append(KeptStates(kept, {name: owner for name, (_, owner) in named_steps.items()}))
        return RoundSteps(closed, steps, rule)


def transforms_of(job: Job) -> Transforms:
    """Return the transforms of a job.

    Raises:
        SeamError: "unknown_transform", or "bad_transform" if one of its list does not take its arguments.
    """
    features = [[made for feature in group if (made := feature.of(job)) is not None] for group in (_BEFORE, _AFTER)]
    chosen = [_make(each.name, each.args) for each in job.transforms]
    return Transforms([*features[0], *chosen, *features[1]])


def algorithms() -> dict[str, type[Algorithm[Any]]]:
    """Return the algorithms in the room `named`, by their names."""
    modules = (import_module(f"{named.__name__}.{module.name}") for module in iter_modules(named.__path__))
    offered = (each for module in modules for each in vars(module).values())
    return {each.name: each for each in offered if isinstance(each, type) and issubclass(each, Algorithm) and each.name}


def _make(name: str, args: Mapping[str, object]) -> Algorithm[Any]:
    known = algorithms()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(sorted(known))}"
        raise SeamError("unknown_transform", f"there is no transform {name}: {hint}")
    algorithm = known[name]
    try:
        return algorithm(algorithm.takes.model_validate(args))
    except ValidationError as error:
        text = f"{name}: {explain(error, {}, algorithm.takes)}"
        raise SeamError("bad_transform", text) from error
