"""From the table [aggregation] of a job to the rule that it names."""

from collections.abc import Sequence
from typing import Any

from fedring.server.model.robust import CenteredClip, FLTrust, GeometricMedian, Krum, Median, TrimmedMean
from fedring.server.model.rule import CoordinateRule, GramRule, Rule
from fedring.train.aggregation_table import Aggregation
from fedring.train.errors import SeamError
from fedring.train.seam import resolve


def make_rule(table: Aggregation, trusted: Sequence[str]) -> Rule | None:
    """Return the rule that a job names; None for the mean.

    Args:
        table: names the rule, and has its arguments.
        trusted: the modules from which a rule of the user's own may come.

    Raises:
        SeamError: if a rule of the user's own cannot be imported, or made with its arguments ("bad_rule").
    """
    if table.own:
        return _own_rule(table, trusted)
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
    return rules[table.rule]


def _own_rule(table: Aggregation, trusted: Sequence[str]) -> Rule:
    make = resolve(table.rule, trusted)
    try:
        rule: Any = make(**table.args)
    except Exception as error:  # the user's code may raise anything
        text = f"The rule {table.rule} cannot be made with {table.args}: {type(error).__name__}: {error}."
        raise SeamError("bad_rule", text) from error
    if not isinstance(rule, GramRule | CoordinateRule):
        text = f"{table.rule} returned a {type(rule).__name__}: let it return an object with coefficients or combine."
        raise SeamError("bad_rule", text)
    return rule
