"""The table [aggregation] of a job: the aggregation rule.

The rule turns the updates of a round into one change of the model.
"""

import re
from difflib import get_close_matches
from math import ceil
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedring.train.bounds import Count, Positive, PositiveCount, Table, Text

MEAN = "mean"
RULES = (MEAN, "centered_clip", "geometric_median", "krum", "multi_krum", "median", "trimmed_mean", "fltrust")

_READERS = {"malicious": ("krum", "multi_krum"), "beta": ("trimmed_mean",), "radius": ("centered_clip",)}
"""The rules that read each argument."""

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Aggregation(BaseModel):
    """All settings of the aggregation rule. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: Text = Field(
        MEAN,
        description=f"how updates become one change of the model: {', '.join(RULES)}, or a class of your own as "
        "module:attribute (docs/strategies.md)",
    )
    args: Table = Field(
        default_factory=dict, description="keyword arguments of a class of your own, or of the data of fltrust"
    )
    data: Text = Field(
        "",
        description="the server's own samples, module:attribute from a module that it trusts (fltrust); a function as "
        "for the job's key data",
    )
    bucketing: PositiveCount = Field(
        1, description="number of updates, drawn anew in each round, that are averaged before the rule sees them"
    )
    malicious: Count = Field(0, description="number of clients that may send anything, at least 1 (krum, multi_krum)")
    beta: float = Field(
        0.1, gt=0, lt=0.5, description="share of the values that is left out at each end (trimmed_mean)"
    )
    radius: Positive | None = Field(
        None,
        description="distance from the centre to which updates are shortened; none = the median norm of the round's "
        "updates (centered_clip)",
    )

    @property
    def own(self) -> bool:
        """Whether the rule is the user's own, module:attribute."""
        return ":" in self.rule

    def too_few(self, updates: int) -> str:
        """Return why the rule cannot combine `updates` updates, or "".

        The text is a clause.
        """
        buckets = ceil(updates / self.bucketing)
        after = f", which bucketing = {self.bucketing} makes {buckets}" if self.bucketing > 1 else ""
        if self.rule in ("krum", "multi_krum") and buckets <= 2 * self.malicious + 2:
            least = (2 * self.malicious + 2) * self.bucketing + 1
            return f"{self.rule} with malicious = {self.malicious} needs {least} updates, and has {updates}{after}"
        if self.rule == "trimmed_mean" and buckets <= 2 * trimmed(self.beta, buckets):
            return f"trimmed_mean with beta = {self.beta:g} leaves nothing of {updates} updates{after}"
        return ""

    @model_validator(mode="after")
    def _known_rule(self) -> Self:
        if self.own:
            if not _NAME.fullmatch(self.rule):
                raise ValueError(f"rule = {self.rule!r} is not of the form module:attribute")
        elif self.rule not in RULES:
            near = get_close_matches(self.rule, RULES, n=1)
            advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(RULES)}, or name your own"
            raise ValueError(f"there is no rule {self.rule!r}: {advice}")
        if self.args and not (self.own or self.data):
            raise ValueError(f"args are for a rule of your own and for the data of fltrust: {self.rule} takes none")
        if self.data and self.rule != "fltrust":
            raise ValueError(f"data = {self.data!r} is for the rule fltrust: {self.rule} needs no samples")
        if self.rule == "fltrust" and not self.data:
            raise ValueError("fltrust needs data, the function that returns the server's own samples")
        if self.data and not _NAME.fullmatch(self.data):
            raise ValueError(f"data = {self.data!r} is not of the form module:attribute")
        # A value that no rule reads is a mistake of its author, not a harmless extra.
        for key, readers in _READERS.items():
            value = getattr(self, key)
            if self.rule not in readers and value != type(self).model_fields[key].default:
                raise ValueError(f"{key} = {value:g} is for {' and '.join(readers)}: {self.rule} does not read it")
        if self.rule in ("krum", "multi_krum") and not self.malicious:
            raise ValueError(f"{self.rule} needs malicious, the number of clients that may send anything, above 0")
        if self.rule == MEAN and self.bucketing > 1:
            raise ValueError("bucketing is for other rules than mean: the mean of means is a mean")
        return self


def trimmed(beta: float, count: int) -> int:
    """Return the number of values trimmed at each end.

    A trimmed mean of `count` values leaves out the share beta of them at each end, rounded up.
    """
    return ceil(beta * count - 1e-9)
