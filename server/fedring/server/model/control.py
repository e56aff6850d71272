"""SCAFFOLD's control variate of the server, c.

This is its file, and the change by the updates of a round. With the deltas d_i of the clients S of a round, their
numbers of steps K_i, and the learning rate eta, client i's own control variate changes by -c - d_i / (K_i eta)
(Karimireddy et al. 2020, section 3, option II). Overrides of the job may give a client an eta of its own. So with N
clients that have one, among them those of S,

    c' = c - |S| / N (c + mean over S of d_i / (K_i eta))

is the mean of all clients' own again. That holds only if each client has used the control variate that its newest
counted update has left. The file names these updates, and each new update names the one that it relies on. If one of
them relies on another one (a client's state was lost or put back, or the round of an accepted update was abandoned),
c ends with that round, and begins anew as zero.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from fedring.codec.errors import CodecError
from fedring.server.aggregation.combining import Walk
from fedring.server.aggregation.mean import weighted_mean
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.walk import cut, in_order
from fedring.server.state.rows import UpdateRow
from fedring.train.jobs.job import Job
from fedring.train.scaffold import local_steps
from fedring.untrusted import parse_json

Float32 = NDArray[np.float32]

_COUNTED = "counted"


@dataclass(frozen=True, slots=True)
class ControlPlan:
    """How the updates of a round change c."""

    scales: Mapping[str, float]  # K_i eta, above 0, by client id: the clients of the round
    counted: Mapping[
        str, str
    ]  # the name of the newest counted update, with those of the round, by client id: N clients
    before: Callable[[int, int], Float32] | None = None  # a range of c; None = all of it is zero

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the new c's file."""
        return {_COUNTED: json.dumps(self.counted, sort_keys=True)}


def plan_control(
    job: Job,
    job_round: int,
    updates: Sequence[UpdateRow],
    before: ModelReader | None,
    *,
    told: Mapping[str, Job] = MappingProxyType({}),
) -> ControlPlan | list[str]:
    """Return the plan of a round's change of c.

    Args:
        job: says how clients train.
        job_round: the number of the round within the job.
        updates: the accepted updates, at least one.
        before: the file of c; None = all of it is zero.
        told: the jobs of clients for which overrides hold, by client id.

    Returns:
        The plan; or the clients for which c has to begin anew, sorted.

    Raises:
        CodecError: "bad_model", if the file is damaged.
        StorageError: if it cannot be read.
    """
    counted = counted_in(before) if before else {}
    if strangers := sorted(row.client_id for row in updates if row.control_previous != counted.get(row.client_id, "")):
        return strangers
    return ControlPlan(
        scales={row.client_id: _scale(row, told.get(row.client_id, job), job_round) for row in updates},
        counted=counted | {row.client_id: row.name for row in updates},
        before=before.parameters if before else None,
    )


def _scale(row: UpdateRow, job: Job, job_round: int) -> float:
    settings = job.settings_of(job_round)
    return settings.lr * local_steps(row.num_samples, epochs=settings.epochs, batch_size=job.batch_size)


def counted_in(file: ModelReader) -> dict[str, str]:
    """Return the updates that a file of c names, by client id.

    Raises:
        CodecError: "bad_model", if it names none.
    """
    try:
        return {str(client): str(name) for client, name in parse_json(file.metadata[_COUNTED]).items()}
    except (KeyError, ValueError, AttributeError) as error:
        raise CodecError("bad_model", "the file of the control variate does not name the clients' updates") from error


def next_control(walk: Walk, plan: ControlPlan) -> Generator[Float32, None, None]:
    """Yield c', piece by piece.

    Args:
        walk: the parameters, with the updates of the round.
        plan: how they change c.

    Raises:
        CodecError: "non_finite", if a value does not fit into float32.
    """
    weights = [1.0 / plan.scales[client.client_id] for client in walk.clients]
    divisor = len(walk.clients)
    share = len(walk.clients) / len(plan.counted)

    def piece(start: int, stop: int) -> Float32:
        base = walk.base(start, stop)
        change = weighted_mean(base, walk.clients, weights, divisor, start)
        before = plan.before(start, stop) if plan.before else np.zeros(stop - start, np.float32)
        change += before
        with np.errstate(over="ignore"):
            after = (before - share * change).astype(np.float32)
        if not np.isfinite(after).all():
            raise CodecError("non_finite", "a value of the control variate does not fit into float32")
        return after

    return in_order(walk.executor, piece, cut(0, walk.length, walk.step))
