"""FedDyn at the client.

Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", algorithm 1. Client k adds to its loss the terms
- <g_k, theta> and (alpha / 2) |theta - theta_0|^2, where theta_0 is the round's model. So each step's gradient gets -
g_k, and FedProx's term with mu = alpha. Its update then leaves

    g_k' = g_k - alpha (theta_k - theta_0)

where theta_k - theta_0 is the change that the server decodes, so that the server's h is the mean of all g_k.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor

from fedring.client.transfer.kept import Section
from fedring.client.transforms.interface import (
    Arguments,
    RoundStart,
    Sent,
    Transform,
    by_parameter,
    finite_section,
    vector_in,
)
from fedring.train.plan import Plan


class _Arguments(Arguments):
    alpha: float = Field(gt=0, allow_inf_nan=False)


class FedDyn(Transform):
    """The linear term of one round, g_k."""

    name: ClassVar[str] = "feddyn"

    def __init__(self, start: RoundStart, kept: Section | None, args: Mapping[str, object]) -> None:
        self._schema, self._alpha = start.schema, _Arguments.model_validate(args).alpha
        command = start.command
        # Of one job of one run: the server's h begins with zeros there, too.
        self._words = {"run": command.run_id, "job": str(command.job.job_id)}
        known = kept is not None and dict(kept.words) == self._words
        size = self._schema.num_parameters
        self._linear = vector_in(kept) if kept and known else np.zeros(size, np.float32)

    def plan(self, plan: Plan) -> Plan:
        """Add the quadratic term."""
        return replace(plan, mu=plan.mu + self._alpha)

    def corrections(self) -> dict[str, Tensor]:
        """Return - g_k."""
        return by_parameter(-self._linear, self._schema)

    def after(self, sent: Sent) -> Section:
        """Return g_k'."""
        with np.errstate(over="ignore"):
            values = (self._linear - self._alpha * sent.delta).astype(np.float32)
        return finite_section(values, self._words, name="FedDyn's linear term")
