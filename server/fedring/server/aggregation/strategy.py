"""Strategies: a job's aggregation rule, with methods of the user's own.

A class that `[aggregation] rule = "module:attribute"` names may have, beside the method of a rule, two more:
`configure(history)`, which returns settings of the next round, and `evaluate(model)`, which returns figures of the
model that a round has published. Each is optional, and a class without the method of a rule averages.

An object is made anew for each call, and is told all that it may depend on. So a restarted server, and a simulation, do
the same as a server that was never stopped, but for one thing: a server that is killed while a model is evaluated goes
on without the figures of that evaluation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Integral
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fedring.daemon.config import explain
from fedring.job_code import job_code
from fedring.server.aggregation.robust import CenteredClip, FLTrust, GeometricMedian, Krum, Median, TrimmedMean
from fedring.server.aggregation.rule import CoordinateRule, GramRule, Rule
from fedring.server.state.rows import RoundRow
from fedring.train.errors import SeamError
from fedring.train.jobs.aggregation_table import Aggregation
from fedring.train.jobs.job import Job
from fedring.train.metrics import check_metrics

if TYPE_CHECKING:  # these import torch, which is imported when the first job needs it
    from torch import nn

    from fedring.train.names.offered import Offered

HISTORY = 100
"""The most past rounds that `configure` is given, the newest ones."""

CONFIGURABLE = ("lr", "epochs", "subset_size", "batch_size", "momentum", "mu", "sample_clients")
"""The keys of a job whose values `configure` may choose for a round."""

_METHODS = ("coefficients", "combine", "configure", "evaluate")
_MOST_TEXT = 500


@dataclass(frozen=True, slots=True)
class PastClient:
    """One client's figures of a past round.

    All values are the client's own word.
    """

    num_samples: int
    train_seconds: float
    metrics: Mapping[str, float]  # by the names that the client's training gives them


@dataclass(frozen=True, slots=True)
class PastRound:
    """A round of the job that is over."""

    number: int  # within the job, from 1
    published: bool  # whether it made a model
    reason: str  # why it made none, a stable word; otherwise empty
    seconds: float  # from the command to the model
    settings: Mapping[str, float]  # those that `configure` or a schedule has chosen, by their keys
    clients: Mapping[str, PastClient]  # those whose update was accepted, by client id
    metrics: Mapping[str, float]  # such as "train/loss", "eval/accuracy", and "server/f1" of `evaluate`


Configure = Callable[[Sequence[PastRound]], Any]
Evaluate = Callable[["nn.Module"], Any]


@dataclass(frozen=True, slots=True)
class Strategy:
    """A job's rule, with the user's own methods for its rounds.

    The methods also concern its models.
    """

    name: str
    rule: Rule | None = None  # None = the mean
    configure: Configure | None = None  # takes the past rounds, oldest first; returns a mapping of settings
    evaluate: Evaluate | None = None  # takes the new model; returns a mapping of figures


class StrategyError(Exception):
    """A strategy of the user's own failed, or returned unusable values.

    Attributes:
        reason: "bad_strategy", for the round's row.
    """

    reason = "bad_strategy"


def make_strategy(table: Aggregation, offered: "Offered") -> Strategy:
    """Return the strategy that a job names.

    Args:
        table: names the rule, and has its arguments.
        offered: what jobs may name here.

    Raises:
        SeamError: if a class of the user's own is not offered, or cannot be made with its arguments, or has none of the
            methods ("bad_rule").
    """
    if table.own:
        return _own_strategy(table, offered)
    rules: dict[str, Rule | None] = {
        "mean": None,
        "centered_clip": CenteredClip(table.radius),
        "geometric_median": GeometricMedian(),
        "krum": Krum(table.malicious),
        "multi_krum": Krum(table.malicious, several=True),
        "median": Median(),
        "trimmed_mean": TrimmedMean(table.beta),
        "fltrust": FLTrust(),
    }
    return Strategy(table.rule, rules[table.rule])


def past_round(row: RoundRow) -> PastRound:
    """Return a row's ended round in the form for `configure`."""
    return PastRound(
        number=row.job_round,
        published=row.model_version > 0,
        reason=row.reason,
        seconds=row.stats.get("seconds", 0.0),
        settings=MappingProxyType(row.stats.get("settings", {})),
        clients=MappingProxyType(
            {
                client: PastClient(facts["num_samples"], facts["train_seconds"], MappingProxyType(facts["metrics"]))
                for client, facts in row.stats.get("clients", {}).items()
                if facts["num_samples"]
            }
        ),
        metrics=MappingProxyType(row.stats.get("metrics", {})),
    )


def ask_settings(strategy: Strategy, job: Job, history: Iterable[PastRound]) -> dict[str, float]:
    """Return the next round's settings by `configure`, by their keys.

    Empty without that method.

    Raises:
        StrategyError: if it fails, or if what it returns is not a mapping of allowed keys to values that fit the job.
    """
    if strategy.configure is None:
        return {}
    told = _call(strategy, "configure", strategy.configure, tuple(history))
    for key in told:
        if key not in CONFIGURABLE:
            raise _wrong(strategy, f"configure returned the key {key!r:.100}: choose from {', '.join(CONFIGURABLE)}")
    chosen = {key: _number(strategy, "configure", key, value) for key, value in told.items()}
    try:
        configured = with_settings(job, chosen)
    except ValidationError as error:
        text = f"configure returned settings that do not fit the job: {explain(error, {}, Job)}"
        raise _wrong(strategy, text) from error
    return {key: getattr(configured, key) for key in sorted(chosen)}


def with_settings(job: Job, settings: Mapping[str, float]) -> Job:
    """Return the job with the settings of one round.

    Raises:
        ValidationError: if they do not fit the job.
    """
    return Job.model_validate({**job.model_dump(), **settings}) if settings else job


def ask_metrics(strategy: Strategy, model: "nn.Module") -> dict[str, float]:
    """Return the figures found by `evaluate`, by their names.

    Empty without that method.

    Args:
        strategy: whose method is called.
        model: is in evaluation mode.

    Raises:
        StrategyError: if it fails, or if what it returns is not a mapping of names to finite numbers.
    """
    if strategy.evaluate is None:
        return {}
    told = _call(strategy, "evaluate", strategy.evaluate, model)
    figures = {str(name): float(_number(strategy, "evaluate", name, value)) for name, value in told.items()}
    try:
        check_metrics(figures)
    except ValueError as error:
        raise _wrong(strategy, f"evaluate returned figures that cannot be kept: {error}") from error
    return figures


def _own_strategy(table: Aggregation, offered: "Offered") -> Strategy:
    make = offered.get("rule", table.rule, table.args)
    try:
        with job_code():
            made: Any = make()
    except Exception as error:  # the user's code may raise anything
        text = f"The rule {table.rule} cannot be made with {table.args}: {type(error).__name__}: {error}."
        raise SeamError("bad_rule", text) from error
    methods = {name: getattr(made, name, None) for name in _METHODS}
    if not any(map(callable, methods.values())):
        text = f"{table.rule} returned a {type(made).__name__}: let it return an object with {', '.join(_METHODS)}"
        raise SeamError("bad_rule", f"{text}, or some of these methods.")
    rule = made if isinstance(made, GramRule | CoordinateRule) else None
    if rule is None and table.bucketing > 1:
        raise SeamError("bad_rule", f"{table.rule} has no rule for the buckets of bucketing = {table.bucketing}.")
    return Strategy(table.rule, rule, methods["configure"], methods["evaluate"])


def _call(strategy: Strategy, method: str, function: Callable[[Any], Any], argument: object) -> dict[Any, Any]:
    """Return the mapping that a method of the user's returns."""
    try:
        with job_code():
            told = function(argument)
            if isinstance(told, Mapping):
                return dict(told)
    except Exception as error:  # the user's code may raise anything
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        raise _wrong(strategy, f"{method} raised {text}") from error
    raise _wrong(strategy, f"{method} returned a {type(told).__name__} instead of a mapping")


def _number(strategy: Strategy, method: str, key: object, value: object) -> float:
    """Return the user's value as a finite number.

    It is an int if it is whole by its type.
    """
    try:
        with job_code():
            number = float("text" if isinstance(value, bool | str) else value)  # type: ignore[arg-type]  # it may raise
    except Exception as error:  # the value may be an object of the user's
        text = f"{method} returned a {type(value).__name__} for {key!r:.100} instead of a number"
        raise _wrong(strategy, text) from error
    if not isfinite(number):
        raise _wrong(strategy, f"{method} returned {number} for {key!r:.100}")
    return int(value) if isinstance(value, Integral) else number


def _wrong(strategy: Strategy, text: str) -> StrategyError:
    return StrategyError(" ".join(f"the strategy {strategy.name} failed: {text}".split())[:_MOST_TEXT])
