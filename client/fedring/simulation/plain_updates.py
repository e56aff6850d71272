"""Updates that differ in their values alone.

A round of a small model is over within milliseconds. Then much of its time would go into headers, digests and checks
that say the same of each update. Here their common form is worked out once, and each client adds its difference. The
rows are those that `worker.admit` returns, but for the names of updates and payloads, which nobody asks for in a job
whose updates have such a form.
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
from fedring.server.state.rows import Kind, PacketSpec, UpdateRow, Vector, lay_out
from fedring.server.update.admission import MAX_BUFFER, MAX_NORM
from fedring.train.bounds import MAX_SAMPLES, MAX_SECONDS
from fedring.train.metrics import sendable_metrics
from fedring.train.plan import TrainResult
from fedring.v1 import federation_pb2 as pb


@dataclass(frozen=True, slots=True, eq=False)
class SharedForm:
    """The common part of a round's updates.

    Attributes:
        command: The command that they answer.
        base: The model that they start from, and whose buffers they have.
        packets: The packets of each.
        head: The payload before the parameters' differences.
        tail: The payload after them.
    """

    command: pb.TrainCmd
    base: Vectors
    packets: tuple[PacketSpec, ...]
    head: bytes
    tail: bytes

    @classmethod
    def of(cls, command: pb.TrainCmd, base: Vectors, terms_of: Callable[[int], Terms]) -> Self | None:
        """Return the form of a round's updates, or None.

        None = they are not alike.

        Args:
            command: Of the round.
            base: The model that it starts from.
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
        head, tail = dense_header("fp32", base.parameters.size), encode_buffers(buffers) if buffers.size else b""
        size = len(head) + 4 * base.parameters.size
        parts: list[tuple[Vector, Kind, str, int]] = [("parameters", "delta", "fp32", size)]
        if tail:
            parts.append(("buffers", "weights", BUFFERS, len(tail)))
        return cls(command, base, lay_out(parts), head, tail) if size + len(tail) <= terms.most_bytes else None

    def row(self, client: str, parameters: NDArray[np.float32], result: TrainResult) -> UpdateRow | None:
        """Return the row of an update, or None for a refused one.

        Args:
            client: The id of the client.
            parameters: The values after its training. They are overwritten.
            result: Of the built-in training, whose figures have names that can be sent.
        """
        delta = np.subtract(parameters, self.base.parameters, out=parameters)
        with np.errstate(over="ignore", invalid="ignore"):
            # Block by block, as `check_payload` adds up: guards act on the norm, which must be the same to the bit.
            spans = cut(0, delta.size, values_at_a_time(()))
            square = sum(float(np.dot(delta[low:high], delta[low:high])) for low, high in spans)
        # It is finite only if all values are. Whoever is refused here is told why by the usual checks.
        if not isfinite(square) or sqrt(square) > MAX_NORM:
            return None
        if not 0 <= result.seconds <= MAX_SECONDS or result.num_samples > MAX_SAMPLES:
            return None
        command = self.command
        return UpdateRow(
            round=command.round,
            client_id=client,
            digest="",
            name="",
            packets=self.packets,
            num_samples=result.num_samples,
            total_bytes=sum(packet.bytes for packet in self.packets),
            train_seconds=result.seconds,
            norm=sqrt(square),
            accepted_at=time.time(),
            metrics=sendable_metrics(result.metrics),
            payload=b"".join((self.head, delta.astype("<f4", copy=False).data, self.tail)),
            epoch=command.epoch,
        )
