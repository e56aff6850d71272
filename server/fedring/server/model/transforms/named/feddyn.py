"""FedDyn (Acar et al. 2021, algorithm 1).

Each client's loss gets a term that moves with what the client has learned before. Here is the server's part of it.
With m clients, the clients P of a round, the mean d of their deltas, and h, which starts with zeros,

    h' = h - alpha |P| / m d        model' = model + d - h' / alpha

so h is alpha times the mean, over all m clients, of how far each of them has moved the model so far, with the opposite
sign. A client has moved as soon as its update is accepted. So h also takes in the updates of rounds that were abandoned
afterwards, or else it would never be that mean again, and the model would not get where it should. h belongs to the
job: it begins anew with each job, and if the arguments change.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema
from fedring.server.aggregation.contributions import Contribution, open_vectors, values_at_a_time
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.rule import Rule
from fedring.server.aggregation.steps import BaseFiles
from fedring.server.aggregation.walk import cut
from fedring.server.model.transforms.transform import Algorithm, ClosedRound, Skeleton, StatefulStep, States
from fedring.server.state.failures import StorageError, StorageFailed
from fedring.server.state.rows import ModelRow, UpdateRow
from fedring.train.bounds import MAX_COUNT, Positive
from fedring.train.jobs.aggregation_table import MEAN
from fedring.train.jobs.algorithm_checks import check_keys
from fedring.train.jobs.job import Job

log = logging.getLogger(__name__)

_NEEDS = {
    "trainer": "",
    "mu": 0.0,
    "weights": "uniform",
    "update_clip": 0.0,
    "update_clip_factor": 0.0,
    "normalize_steps": False,
    "scaffold": False,
    "aggregation.rule": MEAN,
}


class Args(BaseModel):
    """The arguments of feddyn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    alpha: Positive = Field(description="weight of the term in each client's loss")
    clients: int = Field(0, ge=0, le=MAX_COUNT, description="m, all clients; 0 = the job's min_clients")


class FedDyn(Algorithm[Args]):
    """The server half of feddyn."""

    name: ClassVar[str] = "feddyn"
    takes: ClassVar[type[BaseModel]] = Args

    def check(self, job: Job, schema: Schema, skeleton: Skeleton) -> None:
        """See Transform.check."""
        check_keys(job, "transforms: feddyn", _NEEDS)
        # With these tables, d is not the plain mean, or clients follow other gradients.
        others = ["server_optimizer"] if job.server_optimizer is not None else []
        others += [key for key, table in job.tables.items() if table.hides]
        if other := next(iter(others), ""):
            raise ValueError(f"transforms: feddyn does not go with the table [{other}]: leave one of them out")
        first = job.transforms[0].name
        if first != self.name:
            raise ValueError(f"transforms: feddyn needs the plain mean of updates: let it stand before {first}")
        if 0 < self.args.clients < job.min_clients:
            text = f"clients = {self.args.clients} are all clients, and min_clients = {job.min_clients} take part"
            raise ValueError(f"transforms: feddyn: {text}: raise clients, or leave it out")

    def close(self, closed: ClosedRound, rule: Rule | None) -> "NextH":
        """See Transform.close."""
        return NextH(self.args.alpha, self.args.clients or closed.job.min_clients, closed.past.uncounted())


class NextH(StatefulStep):
    """One round of FedDyn.

    Args:
        alpha: as in the module's formulas.
        clients: m. If more clients than that have delivered, in this round or an abandoned one, it is their number.
        uncounted: updates that only h takes in, in any order.
    """

    def __init__(self, alpha: float, clients: int, uncounted: Sequence[UpdateRow] = ()) -> None:
        # Sorted, so that their sum is the same to the bit in a simulation and with each kind of database.
        self._alpha, self._uncounted = alpha, sorted(uncounted, key=lambda row: (row.buffer, row.client_id))
        self._most = max([clients, *Counter(row.buffer for row in uncounted).values()])  # m
        self._share = 0.0  # |P| / m
        self._moved: NDArray[np.float64] | None = None  # the sum of the uncounted deltas, [length]
        self._h = np.empty(0, np.float32)  # each piece of h is replaced by that of h' as soon as it is known

    def contributions(self, given: list[Contribution], length: int) -> list[Contribution]:
        """See Step.contributions."""
        self._most = max(self._most, len(given))
        self._share = len(given) / self._most
        return given

    def read(self, base: ModelRow, files: BaseFiles) -> None:
        """See Step.read."""
        rows, length, values = list(self._uncounted), base.parameters, np.empty(0, np.float32)
        if any(packet.kind == "weights" for row in rows for packet in row.packets):  # a delta needs no base
            values = ModelReader(files.open(base.blob)).parameters(0, length)
        while rows:
            moved = np.zeros(length)
            if (damaged := next((row for row in rows if not _is_added(row, values, files, moved)), None)) is None:
                self._moved = moved
                return
            rows.remove(damaged)  # which shows only at its end: the others are added up anew

    def begin(self, before: States, length: int) -> None:
        """See StatefulStep.begin."""
        self._h = before["h"].copy() if "h" in before else np.zeros(length, np.float32)

    def piece(self, start: int, delta: NDArray[np.float64]) -> None:
        """See Step.piece."""
        h = self._h[start : start + len(delta)]
        with np.errstate(over="ignore"):
            h[:] = h - self._alpha * self._share * delta
            if self._moved is not None:
                h[:] -= self._alpha / self._most * self._moved[start : start + len(delta)]
        if not np.isfinite(h).all():
            raise CodecError("non_finite", "a value of h of feddyn does not fit into float32")
        delta -= h / np.float64(self._alpha)

    def state(self) -> States:
        """See StatefulStep.state."""
        return {"h": self._h}


def _is_added(row: UpdateRow, base: NDArray[np.float32], files: BaseFiles, moved: NDArray[np.float64]) -> bool:
    """Add an update's delta to `moved`, and return whether it was sound."""
    sent, length = files.payload(row), len(moved)
    try:
        (vector,) = open_vectors([Contribution(row.client_id, 1.0, row.packets, sent.read)], "parameters", length)
        for start, stop in cut(0, length, values_at_a_time(vector.decoders)):
            moved[start:stop] += vector.delta(base[start:stop], start, stop)
        sent.check()
    except StorageFailed:
        raise
    except (StorageError, CodecError) as error:
        log.warning("h of feddyn lacks an update of %s in an abandoned round: %s", row.client_id, error)
        return False
    return True
