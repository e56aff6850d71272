"""Updates that differ in their values alone.

A round of a small model is over within milliseconds. Then much of its time would go into headers, digests and checks
that say the same of each update. Here their common form is worked out once, and each client adds its difference. The
rows are those that `worker.admit` returns, but for three things. The difference lies beside its row, as the array that
the training has left, and the row's packets and payload are those of the rest. The names of the update and of its
payload are empty, since nobody asks for them in a job whose updates have such a form.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fedring.codec import BUFFERS, encode_buffers
from fedring.codec.dense import dense_header
from fedring.codec.schema import Vectors
from fedring.server.aggregation.contributions import values_at_a_time
from fedring.server.aggregation.terms import Terms
from fedring.server.aggregation.walk import cut
from fedring.server.state.rows import PacketSpec, UpdateRow, lay_out
from fedring.server.update.admission import MAX_BUFFER, MAX_NORM
from fedring.train.bounds import MAX_SAMPLES, MAX_SECONDS
from fedring.train.metrics import sendable_metrics
from fedring.train.plan import TrainResult
from fedring.v1 import federation_pb2 as pb


@dataclass(frozen=True, slots=True)
class SharedForm:
    """The common part of a round's updates.

    Attributes:
        round: The number of the round.
        epoch: Of the server.
        packets: Those of each update but the parameters': the buffers of the base, if it has any.
        payload: Their bytes.
        total_bytes: Of each update, with its parameters.
        blocks: Of the parameters, in which `check_payload` adds up: guards act on the norm, which must be the same to
            the bit.
    """

    round: int
    epoch: int
    packets: tuple[PacketSpec, ...]
    payload: bytes
    total_bytes: int
    blocks: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, command: pb.TrainCmd, base: Vectors, terms_of: Callable[[int], Terms]) -> Self | None:
        """Return the form of a round's updates, or None.

        None = they are not alike.

        Args:
            command: Of the round.
            base: The model that it starts from, whose buffers the updates have.
            terms_of: Returns the demands of the round on an update of a group with so many clients; 0 = of no group.
        """
        buffers, job = base.buffers, command.job
        own = job.transforms or job.dp or job.sample_dp or job.personal or command.HasField("control")
        if own or command.encoding.name != "fp32":
            return None
        terms = terms_of(0)
        if terms.bare or terms.silent or terms.control_line or terms.opaque is not None:
            return None
        if buffers.size and not np.abs(buffers).max() <= MAX_BUFFER:
            return None
        size = base.parameters.size
        payload = encode_buffers(buffers) if buffers.size else b""
        packets = lay_out([("buffers", "weights", BUFFERS, len(payload))] if payload else [])
        total = len(dense_header("fp32", size)) + 4 * size + len(payload)
        if total > terms.most_bytes:
            return None
        blocks = tuple(cut(0, size, values_at_a_time(())))
        return cls(command.round, command.epoch, packets, payload, total, blocks)

    def row(self, client: str, delta: NDArray[np.float32], result: TrainResult) -> UpdateRow | None:
        """Return the row of an update, or None for a refused one.

        Args:
            client: The id of the client.
            delta: The difference of its parameters to the base's. Of a square that overflows, numpy warns.
            result: Of the built-in training, whose figures have names that can be sent.
        """
        square = 0.0
        for low, high in self.blocks:
            block = delta[low:high]
            square += float(np.dot(block, block))
        # It is finite only if all values are. Whoever is refused here is told why by the usual checks.
        if not isfinite(square) or sqrt(square) > MAX_NORM:
            return None
        if not 0 <= result.seconds <= MAX_SECONDS or result.num_samples > MAX_SAMPLES:
            return None
        return UpdateRow(
            round=self.round,
            client_id=client,
            digest="",
            name="",
            packets=self.packets,
            num_samples=result.num_samples,
            total_bytes=self.total_bytes,
            train_seconds=result.seconds,
            norm=sqrt(square),
            accepted_at=time.time(),
            metrics=sendable_metrics(result.metrics),
            payload=self.payload,
            epoch=self.epoch,
        )
