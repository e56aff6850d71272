"""The table [asynchronous] of a job: no round waits for slow clients.

Each client trains from the newest model of its time, and the first `buffer` updates that come make the next one
(FedBuff, Nguyen et al. 2022, algorithm 1).
"""

from collections.abc import Mapping
from math import sqrt
from typing import Self

from pydantic import Field, model_validator

from fedring.train.bounds import Count, PositiveCount
from fedring.train.jobs.aggregation_table import MEAN
from fedring.train.jobs.algorithm_checks import check_needs, value_of
from fedring.train.jobs.job_table import JobTable, JobView

CLOSE = 0.5
"""A buffer of more than this share of the clients at work waits for slow ones again."""

_NEEDS: Mapping[str, tuple[object, str]] = {
    "mode": ("federated", "the workers of the other modes take each step together"),
    "aggregation.rule": (MEAN, "other rules compare updates of one model, and these begin with several"),
    "weights": ("uniform", "each update is divided by the same number, buffer"),
    "evaluate": (False, "clients at work evaluate nothing: evaluate_on_server may be true"),
    "scaffold": (False, "its control variates assume that all clients begin with the same model"),
    "normalize_steps": (False, "its mean depends on which updates come together"),
    "sample_ratio": (1.0, "asynchronous.concurrency says how many clients train at once"),
    "sample_clients": (0, "asynchronous.concurrency says how many clients train at once"),
    "select_factor": (1.0, "nobody waits for slow clients anyway: raise asynchronous.concurrency"),
    "close_at_minimum": (False, "asynchronous.buffer says how many updates make a model"),
    "straggler_factor": (0.0, "a slow client's update counts in a later version"),
}
"""The demands of the table [asynchronous], with reasons."""

_TRANSFORMS = "these algorithms assume that all clients of a round begin with the same model"


class Asynchronous(JobTable):
    """All settings of asynchronous rounds."""

    concurrency: PositiveCount = Field(description="clients that train at once, each from the newest model of its time")
    buffer: PositiveCount = Field(
        description="updates that make the next model, at most one of each client; much fewer than concurrency"
    )
    max_staleness: Count = Field(
        9,
        description="versions by which the model that a client began with may be older than the one that its update "
        "changes; a client that takes longer begins anew; at most keep_models of fl-server - 1",
    )
    evaluate_every: PositiveCount = Field(
        1, description="versions from one evaluation on the server to the next; the last version is evaluated, too"
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.buffer > self.concurrency:
            raise ValueError(
                f"buffer = {self.buffer} is above concurrency = {self.concurrency}, and would never be full while each "
                "client has one update in it: lower buffer, or raise concurrency"
            )
        return self

    def check(self, job: JobView) -> None:
        """See JobTable."""
        check_needs(job, "asynchronous", _NEEDS, "", "")
        apart = {key: table.at_once for key, table in job.tables.items() if table.at_once}
        if value_of(job, "transforms", None):
            apart["transforms"] = _TRANSFORMS
        for key, why in apart.items():
            raise ValueError(f"asynchronous does not go with {key}: {why}: leave one of the two out")
        if job.min_clients_to_aggregate > self.buffer:
            raise ValueError(
                f"asynchronous: min_clients_to_aggregate is {job.min_clients_to_aggregate}, and must be at most "
                f"buffer = {self.buffer}, with which a model is made"
            )
        if value_of(job, "server_optimizer", None) is not None and not _is_plain(job):
            raise ValueError(
                "asynchronous: server_optimizer has momentum or adapts to each value, which late updates would bias: "
                "leave it out, or use SGD without momentum"
            )

    @property
    def warning(self) -> str:
        """Why the numbers are a bad choice; empty if they are not."""
        if self.buffer <= CLOSE * self.concurrency:
            return ""
        return (
            f"asynchronous: buffer = {self.buffer} is close to concurrency = {self.concurrency}, so that most versions "
            "wait for slow clients: a tenth to a third of concurrency is usual"
        )


def staleness_weight(versions: int) -> float:
    """Return the weight of an update by its age in versions.

    Nguyen et al. 2022, section 5: s(t) = 1 / sqrt(1 + t).
    """
    return 1.0 / sqrt(1.0 + versions)


def _is_plain(job: object) -> bool:
    name, args = value_of(job, "server_optimizer.name", ""), value_of(job, "server_optimizer.args", {})
    return name == "SGD" and isinstance(args, Mapping) and not args.get("momentum")
