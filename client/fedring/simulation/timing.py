"""The time that simulated clients take, drawn from the simulation's seed.

A client's round is its download, its steps and its upload, one after the other:

    download bytes / bandwidth + steps * seconds_per_step / speed + upload bytes / bandwidth

Nothing here waits or reads a clock.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedring.daemon.config import ConfigError, check_keys, explain, read_document
from fedring.simulation.samples import client_id

_MEGABIT = 125_000  # bytes
Factor = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
"""A speed or a bandwidth."""


class Spread(BaseModel):
    """A figure that differs from client to client."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    median: Factor = Field(1.0, description="the figure of the middle client")
    spread: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] = Field(
        1.0, description="how many times the largest figure is the smallest; between them they are log-uniform"
    )
    sigma: Annotated[float, Field(ge=0, le=5, allow_inf_nan=False)] = Field(
        0.0, description="standard deviation of the figure's natural logarithm: the figures are log-normal"
    )
    clients: Mapping[str, Factor] = Field({}, description="the figures of single clients, by id")

    @model_validator(mode="after")
    def _one_kind(self) -> "Spread":
        if self.spread > 1 and self.sigma:
            raise ValueError("spread and sigma cannot be given together")
        return self

    def of(self, client: str, draw: random.Random) -> float:
        """Return the figure of a client.

        Args:
            client: Its id.
            draw: Is used for this figure alone.
        """
        if client in self.clients:
            return self.clients[client]
        if self.sigma:
            return self.median * draw.lognormvariate(0.0, self.sigma)
        return float(self.median * self.spread ** (draw.random() - 0.5))


class Availability(BaseModel):
    """When clients are there.

    Each comes and goes at times of its own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        1.0, description="share of each period in which a client is there"
    )
    period_seconds: Annotated[float, Field(ge=1, le=1e9, allow_inf_nan=False)] = Field(
        86400.0, description="after which a client comes again"
    )


class Timing(BaseModel):
    """The times of a simulation's clients."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seconds_per_step: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = Field(
        0.01, description="of a client with speed 1"
    )
    speed: Spread = Field(Spread.model_validate({}), description="how many times as fast a client trains")
    bandwidth: Spread | None = Field(
        None, description="megabits per second, in each direction; left out = transfers take no time"
    )
    availability: Availability = Field(Availability.model_validate({}), description="when clients are there")


@dataclass(frozen=True, slots=True)
class Pace:
    """The times of one client."""

    step: float  # seconds
    bandwidth: float  # bytes per second; inf = transfers take no time
    comes: float  # seconds from a client's period to the next one's begin, at time 0

    def seconds(self, *, down: int, steps: int, up: int) -> float:
        """Return the time of a round, with that many bytes and steps."""
        return down / self.bandwidth + steps * self.step + up / self.bandwidth


def pace_of(timing: Timing, client: str, seed: int) -> Pace:
    """Return the times of a client.

    They depend on nothing else, such as the number of clients.

    Args:
        timing: Of the simulation.
        client: The client's id.
        seed: Of the simulation.
    """

    def draw(figure: str) -> random.Random:
        return random.Random(f"timing:{seed}:{figure}:{client}")

    speed = timing.speed.of(client, draw("speed"))
    bandwidth = timing.bandwidth.of(client, draw("bandwidth")) * _MEGABIT if timing.bandwidth else inf
    comes = timing.availability.period_seconds * draw("availability").random()
    return Pace(timing.seconds_per_step / speed, bandwidth, comes)


def timing_of(given: Mapping[str, Any] | str | Path, clients: int) -> Timing:
    """Return the timing that was given.

    Args:
        given: Its keys, or the .toml or .json file that holds them.
        clients: The number of simulated clients.

    Raises:
        ConfigError: The file cannot be read, a key or a client is unknown, or a value is wrong.
    """
    table = dict(given) if isinstance(given, Mapping) else read_document(Path(given))
    where = "timing" if isinstance(given, Mapping) else str(given)
    check_keys(Timing, table, where=where)
    try:
        timing = Timing.model_validate(table)
    except ValidationError as error:
        raise ConfigError(explain(error, dict.fromkeys(table, where), Timing)) from error
    known = {client_id(client) for client in range(clients)}
    for key, figures in (("speed", timing.speed), ("bandwidth", timing.bandwidth)):
        if unknown := sorted((figures.clients if figures else {}).keys() - known):
            raise ConfigError(
                f"{where}: {key}.clients names {unknown[0]}, but the simulated clients are client-0 to "
                f"{client_id(clients - 1)}"
            )
    return timing
