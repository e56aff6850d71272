"""Model versions: made from updates, kept on disk, offered to whoever fetches them."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass

from fedring.codec.dense import dense_header
from fedring.codec.encoding import BUFFERS
from fedring.codec.schema import Schema
from fedring.rpc.contract import SMALL_BYTES
from fedring.rpc.errors import UnknownModel
from fedring.server.aggregate import NewModel, Plan, aggregate, store_model
from fedring.server.blobs import Blobs
from fedring.server.config import ServerConfig
from fedring.server.mean import Contribution
from fedring.server.modelfile import ModelReader
from fedring.server.optimize import ServerOptimizer
from fedring.server.packets import PacketSpec
from fedring.server.rows import ModelRow, UpdateRow
from fedring.train.files import load_model
from fedring.train.job import Job
from fedring.train.seam import build_model
from fedring.train.state import read_vectors, schema_of
from fedring.v1 import federation_pb2 as pb

MAX_STEPS = 7
"""Most deltas in one answer: with their buffers they are 14 packets."""

Piece = tuple[int, Callable[[int, int], bytes]]
"""So many bytes, and a reader of them."""


@dataclass(slots=True)
class Offer:
    """A model as one caller gets it; a context, for it holds files open."""

    header: pb.ModelHeader
    pieces: Sequence[Piece]
    files: ExitStack

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes of the payload."""
        parts = []
        for length, read in self.pieces:
            if size and offset < length:
                parts.append(read(offset, min(size, length - offset)))
                size -= len(parts[-1])
            offset = max(0, offset - length)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __enter__(self) -> "Offer":
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()


class Models:
    """All methods but `remember`, `fits`, `offer` and `small` may take long: not for the event loop."""

    def __init__(self, blobs: Blobs, executor: Executor, config: ServerConfig, run_id: str) -> None:
        self._blobs, self._executor, self._config, self._run_id = blobs, executor, config, run_id
        self._rows: dict[int, ModelRow] = {}
        self._schemas: dict[str, Schema] = {}
        self._built: dict[str, Schema] = {}  # by what a job says of its model

    def remember(self, row: ModelRow) -> None:
        """The model can be fetched."""
        self._rows[row.version] = row
        if row.schema_hash not in self._schemas:
            with self._blobs.reader(row.blob) as blob:
                self._schemas[row.schema_hash] = ModelReader(blob).schema

    def forget(self, kept: Iterable[int]) -> None:
        """Only these versions can be fetched."""
        self._rows = {version: self._rows[version] for version in kept if version in self._rows}

    def schema_of(self, row: ModelRow) -> Schema:
        """What the model consists of."""
        return self._schemas[row.schema_hash]

    def fits(self, row: ModelRow, job: Job) -> bool:
        """Whether it is known to be a model of the job's kind."""
        built = self._built.get(_kind(job))
        return built is not None and built.hash.hex() == row.schema_hash

    def fitting(self, latest: ModelRow | None, job: Job) -> ModelRow:
        """`latest` if it is a model of the job's kind, else a new first model; SeamError if none can be made."""
        model = build_model(job.model, job.model_args, job.seed, self._config.trusted)
        schema = self._built[_kind(job)] = schema_of(model)
        if latest is not None and schema.hash.hex() == latest.schema_hash:
            return latest
        if latest is None and self._config.init_path is not None:
            load_model(self._config.init_path, model)
        new = store_model(schema, read_vectors(model), self._blobs, {"run_id": self._run_id})
        return self._row(new, schema, version=latest.version + 1 if latest else 1, number=0, base=0)

    def next(self, base: ModelRow, updates: Sequence[UpdateRow], job: Job, number: int) -> ModelRow:
        """The model that round `number` makes of its accepted updates; its blobs are sealed."""
        chosen = job.server_optimizer
        plan = Plan(
            optimizer=ServerOptimizer(chosen.name, chosen.args) if chosen else None,
            optimizer_blob=base.optimizer_blob,
            encoding=job.delta_encoding,
            residual_blob=base.residual_blob,
            metadata={"run_id": self._run_id, "round": str(number)},
        )
        with self._blobs.reader(base.blob) as blob:
            reader = ModelReader(blob)
            contributions = [
                Contribution(row.client_id, row.num_samples, row.packets, self._reader(row)) for row in updates
            ]
            new = aggregate(reader, contributions, self._blobs, self._executor, plan)
            return self._row(new, reader.schema, version=base.version + 1, number=number, base=base.version)

    def offer(self, request: pb.FetchModelRequest) -> Offer:
        """The wanted version: as deltas to the held one where that is shorter, else whole."""
        row = self._rows.get(request.version or max(self._rows, default=0))
        if row is None:
            advice = f"model {request.version} is not kept: `flctl models list` shows those that are"
            raise UnknownModel(advice if request.version else "there is no model yet")
        with ExitStack() as files:
            steps = self._steps(row, request.held_version)
            packets, pieces = self._deltas(steps, files) if steps else self._whole(row, files)
            base = request.held_version if steps else 0
            header = pb.ModelHeader(
                run_id=self._run_id,
                version=row.version,
                schema_hash=bytes.fromhex(row.schema_hash),
                schema=self.schema_of(row).json,
                packets=packets,
                base_version=base,
                total_bytes=sum(length for length, _ in pieces),
                payload_digest=hashlib.sha256(f"{row.digest} {base}".encode()).digest(),
                model_digest=bytes.fromhex(row.digest),
            )
            return Offer(header, pieces, files.pop_all())

    def small(self, row: ModelRow) -> pb.SmallModel | None:
        """The whole version in one message; None if it is too large for that."""
        if row.bytes > SMALL_BYTES:
            return None
        with self.offer(pb.FetchModelRequest(version=row.version)) as offer:
            model = pb.SmallModel(header=offer.header, payload=offer.read(0, offer.header.total_bytes))
        return model if model.ByteSize() <= SMALL_BYTES else None

    def _steps(self, row: ModelRow, held: int) -> list[ModelRow]:
        """The versions whose deltas lead from `held` to `row`, oldest first; empty if they do not, or not cheaply."""
        steps: list[ModelRow] = []
        size, at = 0, row
        while held and at.version > held and at.delta_blob and len(steps) < MAX_STEPS:
            steps.append(at)
            size += sum(packet.bytes for packet in at.delta_packets)
            if at.base_version == held and size < row.bytes:
                return steps[::-1]
            before = self._rows.get(at.base_version)
            if before is None:
                break
            at = before
        return []

    def _deltas(self, steps: Sequence[ModelRow], files: ExitStack) -> tuple[list[pb.Packet], list[Piece]]:
        packets = [_packet(packet) for step in steps for packet in step.delta_packets]
        blobs = [files.enter_context(self._blobs.reader(step.delta_blob)) for step in steps]
        return packets, [(blob.size, blob.read) for blob in blobs]

    def _whole(self, row: ModelRow, files: ExitStack) -> tuple[list[pb.Packet], list[Piece]]:
        reader = ModelReader(files.enter_context(self._blobs.reader(row.blob)))
        schema = self.schema_of(row)
        packets: list[pb.Packet] = []
        pieces: list[Piece] = []
        vectors = (
            (pb.VECTOR_PARAMETERS, "fp32", schema.num_parameters, 4, reader.parameter_bytes),
            (pb.VECTOR_BUFFERS, BUFFERS, schema.num_buffers, 8, reader.buffer_bytes),
        )
        for vector, name, count, width, read in vectors:
            if count:
                head = dense_header(name, count)
                size = len(head) + width * count
                packets.append(pb.Packet(vector=vector, kind=pb.KIND_WEIGHTS, encoding=name, bytes=size))
                pieces += [(len(head), _reader_of(head)), (width * count, read)]
        return packets, pieces

    def _reader(self, row: UpdateRow) -> Callable[[int, int], bytes]:
        return self._blobs.range_reader(row.blob) if row.blob else _reader_of(row.payload)

    def _row(self, new: NewModel, schema: Schema, *, version: int, number: int, base: int) -> ModelRow:
        return ModelRow(
            version=version,
            round=number,
            digest=new.digest,
            blob=new.blob,
            schema_hash=schema.hash.hex(),
            parameters=schema.num_parameters,
            bytes=new.bytes,
            created_at=time.time(),
            base_version=base,
            delta_blob=new.delta_blob,
            delta_packets=new.delta_packets,
            residual_blob=new.residual_blob,
            optimizer_blob=new.optimizer_blob,
        )


def _kind(job: Job) -> str:
    return json.dumps([job.model, job.model_args])


def _packet(packet: PacketSpec) -> pb.Packet:
    vector = pb.VECTOR_PARAMETERS if packet.vector == "parameters" else pb.VECTOR_BUFFERS
    return pb.Packet(vector=vector, kind=pb.KIND_DELTA, encoding=packet.encoding, bytes=packet.bytes)


def _reader_of(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, size: data[offset : offset + size]
