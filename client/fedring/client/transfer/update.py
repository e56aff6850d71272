"""Makes an update of a trained model: pure functions of arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedring.client.policy.promises import has_noise
from fedring.codec import BUFFERS, CodecError, Encoding, Vectors, encode_buffers
from fedring.codec.dense import dense_header
from fedring.codec.digest import name_of, update_name
from fedring.compress.feedback import compress
from fedring.train.bounds import MAX_SECONDS
from fedring.train.metrics import check_metrics, sendable_metrics
from fedring.train.tensors.download import HeldModel
from fedring.v1 import federation_pb2 as pb


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """The training's figures, sent along with the model.

    Raises:
        ValueError: If a figure is out of range.
    """

    samples: int  # that were trained on, at least 1
    train_seconds: float = 0.0  # 0 to 30 days
    metrics: Mapping[str, float] = field(default_factory=dict)  # at most MAX_METRICS, by name

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}: it must be at least 1")
        if not 0 <= self.train_seconds <= MAX_SECONDS:
            raise ValueError(f"train_seconds is {self.train_seconds:g}: it must be 0 to {MAX_SECONDS} (30 days)")
        check_metrics(sendable_metrics(self.metrics))


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """A finished update, and the residual that it leaves behind."""

    header: pb.UpdateHeader
    offer: pb.UpdateOffer  # the header as bytes, and the names of the payload and of the update
    parts: Sequence[bytes | memoryview]  # of the payload, in order
    residual: NDArray[np.float32] | None  # [num_parameters]; None = it leaves nothing out


def make_update(
    command: pb.TrainCmd,
    client_id: str,
    base: HeldModel,
    trained: Vectors,
    training: TrainingReport,
    residual: NDArray[np.float32] | None,
    *,
    describe: Callable[[pb.UpdateHeader], None] = lambda header: None,
) -> Update:
    """Make the update that leads from `base` to `trained`, plus the residual.

    Args:
        command: The command that is answered; names the encoding.
        client_id: The client that sends the update.
        base: The model that the training began with.
        trained: The values that it ended with. Its parameters are overwritten.
        training: What the training reports.
        residual: What past updates left out, [num_parameters]; None = nothing.
        describe: Writes into the header what else the server must know.

    Raises:
        CodecError: With the reason "non_finite", if a value is not finite.
    """
    delta = np.subtract(trained.parameters, base.vectors.parameters, out=trained.parameters)
    parts, left_out = _encode(delta, residual, encoding_of(command.encoding))
    packets = [pb.Packet(vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding=command.encoding.name)]
    packets[0].bytes = sum(map(len, parts))
    if trained.buffers.size:
        parts.append(encode_buffers(trained.buffers))
        packets.append(pb.Packet(vector=pb.VECTOR_BUFFERS, kind=pb.KIND_WEIGHTS, encoding=BUFFERS))
        packets[1].bytes = len(parts[-1])
    header = header_of(command, client_id, packets, training)
    describe(header)
    return Update(header, offered(header, name_of(*parts)), parts, left_out)


def offer_of(
    command: pb.TrainCmd,
    client_id: str,
    vectors: Sequence[tuple[str, str, int]],
    payload_digest: str,
    training: TrainingReport,
) -> pb.UpdateOffer:
    """Return the offer of an update that is a whole model.

    The model is a file. It has the values themselves, not their change.

    Args:
        command: The command that is answered.
        client_id: The client that sends the update.
        vectors: The role ("parameter" or "buffer"), the encoding and the bytes of each vector in the file, in order.
        payload_digest: The name of the file's bytes.
        training: What the training reports.
    """
    roles = {"parameter": pb.VECTOR_PARAMETERS, "buffer": pb.VECTOR_BUFFERS}
    packets = [
        pb.Packet(vector=roles[role], kind=pb.KIND_WEIGHTS, encoding=encoding, bytes=size)
        for role, encoding, size in vectors
    ]
    return offered(header_of(command, client_id, packets, training), payload_digest)


def header_of(
    command: pb.TrainCmd, client_id: str, packets: Sequence[pb.Packet], training: TrainingReport
) -> pb.UpdateHeader:
    """Return the header of an update with these packets."""
    if has_noise(command.job):  # the noise on the model does not cover what a client says of its data
        training = TrainingReport(samples=1)
    for packet in packets:
        packet.num_samples = training.samples
    return pb.UpdateHeader(
        run_id=command.run_id,
        epoch=command.epoch,
        round=command.round,
        client_id=client_id,
        base_digest=command.model_digest,
        schema_hash=command.schema_hash,
        packets=packets,
        total_bytes=sum(packet.bytes for packet in packets),
        train_seconds=training.train_seconds,
        metrics=sendable_metrics(training.metrics),
    )


def offered(header: pb.UpdateHeader, payload_digest: str) -> pb.UpdateOffer:
    """Return the offer of an update with a header and a payload."""
    sent = header.SerializeToString()
    return pb.UpdateOffer(header=sent, payload_digest=payload_digest, name=update_name(sent, payload_digest))


def encoding_of(message: pb.Encoding) -> Encoding:
    """Return the encoding that a command names.

    Parameters that it leaves out have their defaults.

    Raises:
        CodecError: If there is no such encoding, or a parameter is out of range.
    """
    default = Encoding(message.name)
    return Encoding(
        message.name,
        message.chunk or default.chunk,
        message.keep_ratio or default.keep_ratio,
        message.step or default.step,
    )


def _encode(
    delta: NDArray[np.float32], residual: NDArray[np.float32] | None, encoding: Encoding
) -> tuple[list[bytes | memoryview], NDArray[np.float32] | None]:
    """Return the payload of `delta` [D] plus `residual` [D], and the residual.

    The payload is in parts. `delta` is overwritten.
    """
    if encoding.name != "fp32":
        compressed = compress(delta, residual, encoding)
        return [compressed.payload], compressed.residual
    # The vector is part of the payload as it is. To join it to its header would copy 100 MB for 25 million parameters.
    if residual is not None:
        delta += residual
    if not np.isfinite(delta).all():
        raise CodecError("non_finite")
    stored = np.ascontiguousarray(delta, "<f4")
    return [dense_header("fp32", delta.size), stored.data.cast("B")], None
