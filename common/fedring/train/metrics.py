"""Named figures of trainings and evaluations.

This module says which figures are allowed, how they are combined, and which round is the best. A name that ends in
"_sum" stands for a sum over clients, and every other name for a mean, weighted by samples. So the name alone says how a
figure is combined, and clients cannot disagree about it.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from math import fsum, isfinite, nan
from typing import Any, NamedTuple

from fedring.rpc.contract import MAX_FIGURE

log = logging.getLogger(__name__)

MAX_METRICS = 32
"""The most figures of one training or evaluation, and the most names of each origin that a round keeps."""

SUM = "_sum"
"""The end of the names of figures that are added up."""

ORIGINS = ("train", "eval", "server")
"""Where a round's figures are from: its updates, its clients' evaluations, and the server's own evaluation."""

RULES = ("max eval/accuracy", "max server/accuracy", "min eval/loss", "min server/loss")
"""The rules for the best round if a job names none: the first of these figures that any round has decides."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RULE = re.compile(rf"(max|min) ({'|'.join(ORIGINS)})/{_NAME.pattern}")

Metrics = Mapping[str, float]
Leaders = Mapping[str, tuple[int, float]]
"""The best round so far by each figure that may decide: its place and the figure, by the figure's name."""


class Leader(NamedTuple):
    """The best of some rounds, by one figure."""

    name: str  # of the figure
    place: int  # of the round
    value: float


def check_metrics(metrics: Metrics) -> None:
    """Check that figures can be sent.

    Their number, their names and their magnitudes are bounded.

    Raises:
        ValueError: If a server would refuse them.
    """
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"there are {len(metrics)} metrics: there may be at most {MAX_METRICS}")
    for name, value in metrics.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:128]!r} cannot name a metric: use 1 to 128 of A-Z a-z 0-9 . _ -")
        if not abs(value) <= MAX_FIGURE:
            raise ValueError(f"the metric {name} is {value:g}: it must be a number of at most {MAX_FIGURE:g}")


def sendable_metrics(metrics: Metrics) -> dict[str, float]:
    """Return the figures without those that cannot be sent.

    A server would refuse an update with figures that are not finite or too large.
    """
    sendable = {name: float(value) for name, value in metrics.items() if abs(value) <= MAX_FIGURE}
    if left_out := sorted(metrics.keys() - sendable.keys()):
        log.warning(
            "these metrics are left out because they are not finite numbers, or too large: %s", ", ".join(left_out)
        )
    return sendable


def named_metrics(told: Mapping[Any, object]) -> dict[str, float]:
    """Return the finite figures that a user's function has returned.

    Raises:
        ValueError: If names, or their number, are not allowed.
    """
    sendable = sendable_metrics({str(name): _number(value) for name, value in told.items()})
    check_metrics(sendable)
    return sendable


def usable_metrics(told: Mapping[Any, object]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the sendable figures, and a sentence on each other.

    Args:
        told: What a user's function has returned.
    """
    usable: dict[str, float] = {}
    sentences: list[str] = []
    for name, value in told.items():
        figure = {str(name): _number(value)}
        try:
            check_metrics(usable | figure)
        except ValueError as error:
            sentences.append(f"{error}")
        else:
            usable |= figure
    return usable, tuple(sentences)


def combine(reports: Iterable[tuple[float, Metrics]]) -> dict[str, float]:
    """Return the figures of several clients together.

    The order of the reports makes no difference.

    Args:
        reports: For each client its weight, such as its number of samples, and its figures, which do not count with a
            weight of 0.

    Returns:
        For each name the sum or the mean over the clients that have reported it, sorted by name. If there are more
        than MAX_METRICS names, those that most clients have reported, so that one client cannot crowd out the others.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for weight, metrics in reports:
        for name, value in metrics.items() if weight else ():
            found.setdefault(name, []).append((weight, value))
    kept = sorted(found, key=lambda name: (-len(found[name]), name))[:MAX_METRICS]
    return {name: _combined(name, found[name]) for name in sorted(kept)}


def with_origin(origin: str, metrics: Metrics, **means: float | None) -> dict[str, float]:
    """Return the figures under their names in a round: "eval/f1".

    Args:
        origin: One of ORIGINS.
        metrics: The figures by their own names.
        means: Figures that take precedence over those of the same name, if they are not None.
    """
    known = {**metrics, **{name: value for name, value in means.items() if value is not None}}
    return {f"{origin}/{name}": value for name, value in known.items()}


def check_rule(rule: str) -> str:
    """Return a valid rule for the best round, such as "max eval/f1".

    An empty rule stands for RULES.

    Raises:
        ValueError: If it has another form.
    """
    if rule and not _RULE.fullmatch(rule):
        raise ValueError(f'must be "max NAME" or "min NAME", with a NAME such as eval/f1 or train/loss, not {rule!r}')
    return rule


def best_of(rounds: Sequence[Metrics], rule: str = "", *, min_delta: float = 0.0) -> int | None:
    """Return the place of the best round, or None.

    It is None if the rounds cannot be compared.

    Args:
        rounds: The figures of each round, as Round.metrics has them. A round without the figure that is compared, or
            in which it is not a finite number, is never the best. Of equally good rounds, the first one is the best.
        rule: The job's key best_by.
        min_delta: A round is better than the best one before it only by more than this.
    """
    leaders: Leaders = {}
    for place, metrics in enumerate(rounds):
        leaders = lead(leaders, place, metrics, rule, min_delta=min_delta)
    found = leader_of(leaders, rule)
    return found.place if found else None


def lead(leaders: Leaders, place: int, metrics: Metrics, rule: str = "", *, min_delta: float = 0.0) -> Leaders:
    """Return the leaders after one more round.

    Args:
        leaders: Of the rounds before it; empty before the first one.
        place: Names the round, such as its place among all of them.
        metrics: Its figures.
        rule: As for best_of.
        min_delta: As for best_of.
    """
    after = dict(leaders)
    for direction, name in _rules(rule):
        if not _has(metrics, name):
            continue
        known, sign = leaders.get(name), 1 if direction == "max" else -1
        if known is None or sign * (metrics[name] - known[1]) > min_delta:
            after[name] = (place, metrics[name])
    return after


def leader_of(leaders: Leaders, rule: str = "") -> Leader | None:
    """Return the best of the rounds that lead() was told, or None.

    None if they cannot be compared.
    """
    names = (name for _, name in _rules(rule) if name in leaders)
    return next((Leader(name, *leaders[name]) for name in names), None)


def result_of(metrics: Metrics, rule: str = "") -> str:
    """Return the figure of a round that best_of compares, or "".

    An example is "eval/f1 0.75"; it is "" if the round has no such figure.
    """
    name = next((name for _, name in _rules(rule) if _has(metrics, name)), "")
    return f"{name} {metrics[name]:.6g}" if name else ""


def _rules(rule: str) -> list[tuple[str, str]]:
    """Return pairs of direction and name, in order of preference.

    The first name that any round has is compared.
    """
    pairs = (each.split() for each in ([rule] if rule else RULES))
    return [(direction, name) for direction, name in pairs]


def _number(value: object) -> float:
    """Return a value as a number; NaN if it is none."""
    try:
        return float(value)  # type: ignore[arg-type]  # TypeError says so at run time
    except (TypeError, ValueError, OverflowError):
        return nan


def _has(metrics: Metrics, name: str) -> bool:
    return isfinite(metrics.get(name, nan))


def is_evaluated(metrics: Metrics) -> bool:
    """Return whether a round's figures have any of an evaluation."""
    return any(not name.startswith("train/") for name in metrics)


def _combined(name: str, values: Sequence[tuple[float, float]]) -> float:
    if name.endswith(SUM):
        return fsum(value for _, value in values)
    return fsum(weight * value for weight, value in values) / fsum(weight for weight, _ in values)
