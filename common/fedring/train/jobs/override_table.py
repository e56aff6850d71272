"""The tables [[override]] of a job: settings by the labels of clients.

    [[override]]
    where = { gpu = "yes" }
    epochs = 2

Which overrides hold for a client follows from its labels when a round selects it. The server keeps that with the round,
so that the client is told the same again after a restart. From then on, a client has a job of its own
(`with_overrides`), and whatever depends on how it trains reads that one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fedring.train.bounds import NonNegative, PositiveCount
from fedring.train.jobs.labels import Wanted, WantedLabels, match, shown
from fedring.train.jobs.round_settings import Epochs, Rate, SubsetSize

MAX_OVERRIDES = 16
"""The most overrides of a job."""


def _check_where(where: dict[str, str | list[str]]) -> dict[str, str | list[str]]:
    if not where:
        raise ValueError("names no label, and an override for all clients is the key of the job itself")
    return where


class Override(BaseModel):
    """Training settings of the clients with some labels.

    Unknown keys are errors. A key that is not set stays as the job has it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    where: Annotated[WantedLabels, AfterValidator(_check_where)] = Field(
        description="labels of the clients for which the other keys hold, each with its value or a list of values"
    )
    subset_size: SubsetSize | None = Field(None, description="samples that such a client draws for each round; 0 = all")
    epochs: Epochs | None = Field(None, description="passes over the drawn samples")
    batch_size: PositiveCount | None = Field(None, description="samples per step")
    lr: Rate | None = Field(None, description="learning rate of the client's optimizer")
    momentum: float | None = Field(None, ge=0, lt=1, description="momentum of the client's optimizer")
    mu: NonNegative | None = Field(None, description="weight of FedProx's proximal term")
    clip_norm: NonNegative | None = Field(None, description="largest norm of the gradient of a step; 0 = any")
    precision: Literal["fp32", "bf16"] | None = Field(None, description="of the forward pass and the loss in training")

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.values:
            keys = ", ".join(key for key in type(self).model_fields if key != "where")
            raise ValueError(f"an override changes nothing: set one of {keys}, or leave it out")
        return self

    @property
    def values(self) -> dict[str, Any]:
        """The keys that are set, with their values."""
        given = {key: getattr(self, key) for key in type(self).model_fields if key != "where"}
        return {key: value for key, value in given.items() if value is not None}


def _check_listed(given: object) -> object:
    if isinstance(given, Mapping):
        raise ValueError("must be a list of tables: [[override]], with two brackets on each side")
    return given


Overrides = Annotated[list[Override], BeforeValidator(_check_listed), Field(max_length=MAX_OVERRIDES)]


class Overridable(Protocol):
    """A job, as this module sees it."""

    @property
    def override(self) -> Sequence[Override]: ...
    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self: ...


J = TypeVar("J", bound=Overridable)


def overrides_for(labels: Mapping[str, str], overrides: Sequence[Override]) -> list[int]:
    """Return the places of the overrides that these labels match."""
    return [place for place, each in enumerate(overrides) if match(labels, each.where)]


def overrides_of(clients: Mapping[str, Mapping[str, str]], overrides: Sequence[Override]) -> dict[str, list[int]]:
    """Return the places of each client's overrides, if it has any.

    Args:
        clients: the labels of each client, by its id.
        overrides: those of the job.
    """
    held = {client: overrides_for(labels, overrides) for client, labels in sorted(clients.items())} if overrides else {}
    return {client: places for client, places in held.items() if places}


def with_overrides(job: J, places: Sequence[int]) -> J:
    """Return the job of a client for which overrides hold.

    Args:
        job: the job, with the settings of the round.
        places: those of the overrides; of two that set the same key, the later one wins.
    """
    laid = {key: value for place in sorted(places) for key, value in job.override[place].values.items()}
    return job.model_copy(update=laid) if laid else job


def unmatched(clients: Iterable[Mapping[str, str]], overrides: Sequence[Override]) -> list[Wanted]:
    """Return the labels of overrides that match none of the clients.

    Args:
        clients: the labels of each client.
        overrides: those of the job.
    """
    all_of_them = list(clients)
    return [each.where for each in overrides if not any(match(labels, each.where) for labels in all_of_them)]


def no_client_has(wanted: Iterable[Wanted], *, who: str) -> str:
    """Return a clause about overrides without clients; "" without any.

    Args:
        wanted: the labels that no client has, of each override.
        who: the clients, such as "no client here".
    """
    texts = [shown(labels) for labels in wanted]
    return f"{who} has {' or '.join(texts)}, for which the job has [[override]]" if texts else ""
