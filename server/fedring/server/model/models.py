"""Model versions: made from updates, kept on disk, offered to whoever fetches them."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import replace

from torch import nn

from fedring.codec.dense import dense_header
from fedring.codec.digest import name_of
from fedring.codec.encoding import BUFFERS
from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema
from fedring.rpc.contract import SMALL_BYTES
from fedring.rpc.errors import Unavailable, UnknownModel
from fedring.server.config import ServerConfig
from fedring.server.model.aggregate import NewModel, Plan, aggregate, store_model
from fedring.server.model.damage import DamagedModel, DamagedUpdates
from fedring.server.model.mean import Contribution
from fedring.server.model.modelfile import ModelReader
from fedring.server.model.offer import Offer, Piece, reader_of
from fedring.server.model.optimizer import ServerOptimizer
from fedring.server.state.blobs import Blobs, StorageError, StorageFailed
from fedring.server.state.checked import CheckedReader, DamagedBlob, Room, changed, find_damage, unreadable
from fedring.server.state.rows import ModelRow, PacketSpec, UpdateRow
from fedring.train.errors import SeamError
from fedring.train.files import load_model
from fedring.train.job import Job
from fedring.train.seam import build_model
from fedring.train.state import read_vectors, schema_of
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

MAX_STEPS = 7
"""Most deltas in one answer: with their buffers they are 14 packets."""

_Parts = tuple[list[pb.Packet], list[Piece], Callable[[], None]]


class Models:
    """All methods but `remember`, `fits`, `offer` and `small` may take long: not for the event loop."""

    def __init__(self, blobs: Blobs, executor: Executor, config: ServerConfig, run_id: str) -> None:
        self._blobs, self._executor, self._config, self._run_id = blobs, executor, config, run_id
        self._rows: dict[int, ModelRow] = {}
        self._unread: dict[int, ModelRow] = {}  # kept, but damaged when the server started
        self._schemas: dict[str, Schema] = {}
        self._built: dict[str, Schema] = {}  # by what a job says of its model

    def remember(self, row: ModelRow) -> None:
        """Let the model be fetched.

        Raises:
            DamagedModel: if its file is missing or cut short, or its header is not what it was.
        """
        try:
            with self._blobs.reader(row.blob) as blob:
                if blob.size != row.bytes:
                    raise DamagedBlob(row.blob, f"has {blob.size} of {row.bytes} bytes")
                schema = ModelReader(blob).schema
                if schema.hash.hex() != row.schema_hash:
                    raise changed(row.blob)
                self._schemas.setdefault(row.schema_hash, schema)
        except (CodecError, StorageError) as error:
            raise self._damaged(row, error) from error
        self._rows[row.version] = row

    def recover(self, rows: Sequence[ModelRow]) -> ModelRow | None:
        """Let these models be fetched, newest first, but for older ones that are damaged; returns the newest.

        Raises:
            DamagedModel: if the newest is missing or cut short, or its header is not what it was.
        """
        for row in reversed(rows):
            try:
                self.remember(row)
            except DamagedModel as error:
                if row is rows[0]:
                    raise DamagedModel(row, error, "restore a backup, or go on without it: --drop-damaged") from error
                log.error("%s", error.detail)
                self._unread[row.version] = row
        return rows[0] if rows else None

    def damaged(self, rows: Iterable[ModelRow]) -> list[ModelRow]:
        """Return those models of which a file is damaged; reads all of them."""
        return [row for row in rows if not all(map(self._is_sound, filter(None, files_of(row))))]

    def _is_sound(self, digest: str) -> bool:
        try:
            with self._blobs.reader(digest) as blob:
                CheckedReader(blob.read, blob.size, digest).check()
        except StorageFailed:
            raise
        except StorageError:
            return False
        return True

    def forget(self, kept: Iterable[int]) -> None:
        """Only these versions can be fetched."""
        wanted = set(kept)
        for rows in (self._rows, self._unread):
            for version in rows.keys() - wanted:
                del rows[version]

    def schema_of(self, row: ModelRow) -> Schema:
        """What the model consists of."""
        return self._schemas[row.schema_hash]

    def fits(self, row: ModelRow, job: Job) -> bool:
        """Whether it is known to be a model of the job's kind."""
        built = self._built.get(_kind(job))
        return built is not None and built.hash.hex() == row.schema_hash

    def fitting(self, latest: ModelRow | None, job: Job, version: int) -> ModelRow:
        """`latest` if it is of the job's kind, else a new first model, `version`; SeamError if none can be made."""
        model, schema = self._build(job)
        if latest is not None and schema.hash.hex() == latest.schema_hash:
            return latest
        if latest is None and self._config.init_path is not None:
            load_model(self._config.init_path, model)
        new = store_model(schema, read_vectors(model), self._blobs, {"run_id": self._run_id})
        return self._row(new, schema, version=version, number=0)

    def check_fits(self, row: ModelRow, job: Job) -> None:
        """Return if the version is a model of the job's kind; SeamError if it is not."""
        if self._build(job)[1].hash.hex() != row.schema_hash:
            raise SeamError("wrong_schema", f"Version {row.version} is not a model of the job's kind: see `start`.")

    def next(self, base: ModelRow, updates: Sequence[UpdateRow], job: Job, number: int, version: int) -> ModelRow:
        """Make the model that round `number` publishes as `version`, and seal its blobs.

        Raises:
            DamagedModel: if a file of the base is damaged.
            DamagedUpdates: if updates are; without them it may go well.
            CodecError, OptimizerError, StorageError: if the result cannot be had or kept.
        """
        chosen = job.server_optimizer
        plan = Plan(
            optimizer=ServerOptimizer(chosen.name, chosen.args) if chosen else None,
            optimizer_blob=base.optimizer_blob,
            encoding=job.delta_encoding,
            residual_blob=base.residual_blob,
            metadata={"run_id": self._run_id, "round": str(number)},
        )
        room = Room()
        with ExitStack() as files:
            try:
                blob = files.enter_context(self._blobs.reader(base.blob))
            except StorageError as error:
                raise self._damaged(base, error) from error
            checked = CheckedReader(blob.read, blob.size, base.blob, room)
            sources = [CheckedReader(self._reader(row), row.total_bytes, row.digest, room) for row in updates]

            def check() -> None:
                for damage in find_damage([checked]):
                    raise self._damaged(base, damage)
                pairs = zip(updates, sources, strict=True)
                if lost := [(row, damage.what) for row, source in pairs for damage in find_damage([source])]:
                    raise DamagedUpdates(lost)

            contributions = [
                Contribution(row.client_id, row.num_samples, row.packets, source.read)
                for row, source in zip(updates, sources, strict=True)
            ]
            reader = ModelReader(checked)
            try:
                new = aggregate(reader, contributions, self._blobs, self._executor, plan, check=check)
            except DamagedBlob as error:  # what the last round left beside the model
                raise self._damaged(base, error) from error
            except (CodecError, StorageError):
                check()  # damage looks like anything
                raise
            return self._row(new, reader.schema, version=version, number=number, base=base)

    def offer(self, request: pb.FetchModelRequest) -> Offer:
        """The wanted version: as deltas to the held one where that is shorter, else whole."""
        row = self._wanted(request)
        with ExitStack() as files:
            steps = self._steps(row, request.held_digest)
            packets, pieces, prove = self._deltas(steps, files) if steps else self._whole(row, files)
            base = request.held_digest if steps else ""
            header = pb.ModelHeader(
                run_id=self._run_id,
                version=row.version,
                schema_hash=bytes.fromhex(row.schema_hash),
                schema=self.schema_of(row).json,
                packets=packets,
                base_digest=base,
                total_bytes=sum(length for length, _ in pieces),
                payload_name=name_of(f"{row.digest} {base}".encode()),
                model_digest=row.digest,
            )
            return Offer(header, pieces, files.pop_all(), prove)

    def small(self, row: ModelRow, job: Job) -> pb.SmallModel | None:
        """The whole version in one message; None if it is too large for that, or sent as steps."""
        if job.delta_encoding or row.bytes > SMALL_BYTES:
            return None
        with self.offer(pb.FetchModelRequest(version=row.version)) as offer:
            model = pb.SmallModel(header=offer.header, payload=offer.read(0, offer.header.total_bytes))
            offer.prove()
        return model if model.ByteSize() <= SMALL_BYTES else None

    def _build(self, job: Job) -> tuple[nn.Module, Schema]:
        model = build_model(job.model, job.model_args, job.seed, self._config.trusted)
        schema = self._built[_kind(job)] = schema_of(model)
        return model, schema

    def _wanted(self, request: pb.FetchModelRequest) -> ModelRow:
        """The row of the model that is asked for, the newest of several; UnknownModel if it is not kept."""
        rows = sorted((self._unread | self._rows).values(), key=lambda row: (row.version in self._rows, row.version))
        if request.digest:
            rows = [row for row in rows if row.digest == request.digest]
        elif request.version:
            rows = [row for row in rows if row.version == request.version]
        if not rows:
            name = request.digest[:80] or request.version
            advice = f"model {name} is not kept: `flctl models list` shows those that are"
            raise UnknownModel(advice if name else "there is no model yet")
        if rows[-1].version in self._unread:
            self.remember(rows[-1])  # or raise what is wrong with it
        return rows[-1]

    def _steps(self, row: ModelRow, held: str) -> list[ModelRow]:
        """The versions whose deltas lead from `held` to `row`, oldest first; empty if they do not, or not cheaply."""
        steps: list[ModelRow] = []
        size, at = 0, row
        while held and held != at.digest and at.delta_blob and len(steps) < MAX_STEPS:
            steps.append(at)
            size += sum(packet.bytes for packet in at.delta_packets)
            if at.base_digest == held and size < row.bytes:
                return steps[::-1]
            before = self._rows.get(at.base_version)
            if before is None:
                break
            at = before
        return []

    def _deltas(self, steps: Sequence[ModelRow], files: ExitStack) -> _Parts:
        packets = [_packet(packet) for step in steps for packet in step.delta_packets]
        readers = []
        for step in steps:
            try:
                blob = files.enter_context(self._blobs.reader(step.delta_blob))
            except StorageError as error:
                raise self._without_delta(step, error) from error
            readers.append(CheckedReader(blob.read, blob.size, step.delta_blob))

        def prove() -> None:
            for step, reader in zip(steps, readers, strict=True):
                for damage in find_damage([reader]):
                    raise self._without_delta(step, damage)

        return packets, [(reader.size, reader.read) for reader in readers], prove

    def _whole(self, row: ModelRow, files: ExitStack) -> _Parts:
        schema = self.schema_of(row)
        try:
            reader = ModelReader(files.enter_context(self._blobs.reader(row.blob)))
            if reader.schema.hash != schema.hash:
                raise changed(row.blob)
        except (CodecError, StorageError) as error:
            raise self._damaged(row, error) from error
        middle, end = 4 * schema.num_parameters, 4 * schema.num_parameters + 8 * schema.num_buffers

        def values(offset: int, size: int) -> bytes:
            """Bytes of both vectors, in the order in which they are sent and the model's digest has them."""
            split = min(max(middle - offset, 0), size)
            first = reader.parameter_bytes(offset, split) if split else b""
            return first + reader.buffer_bytes(offset + split - middle, size - split) if split < size else first

        checked = CheckedReader(values, end, row.digest)

        def prove() -> None:
            for damage in find_damage([checked]):
                raise self._damaged(row, DamagedBlob(row.blob, damage.what))

        packets: list[pb.Packet] = []
        pieces: list[Piece] = []
        for vector, name, start, stop, width in (
            (pb.VECTOR_PARAMETERS, "fp32", 0, middle, 4),
            (pb.VECTOR_BUFFERS, BUFFERS, middle, end, 8),
        ):
            if start < stop:
                head = dense_header(name, (stop - start) // width)
                size = len(head) + stop - start
                packets.append(pb.Packet(vector=vector, kind=pb.KIND_WEIGHTS, encoding=name, bytes=size))
                pieces += [(len(head), reader_of(head)), (stop - start, _shifted(checked.read, start))]
        return packets, pieces, prove

    def _damaged(self, row: ModelRow, error: CodecError | StorageError) -> StorageError:
        """The error of a model of which a file could not be read, or not trusted; `error` if it may go well later."""
        damage = changed(row.blob) if isinstance(error, CodecError) else unreadable(row.blob, error)
        if not isinstance(damage, DamagedBlob) or isinstance(damage, DamagedModel):
            return damage
        same = (each.version for each in self._rows.values() if each.schema_hash == row.schema_hash)
        other = max((version for version in same if version != row.version), default=0)
        way = f"start a job with start = {other}, or restore a backup" if other else "restore a backup"
        return DamagedModel(row, damage, way)

    def _without_delta(self, step: ModelRow, error: StorageError) -> Exception:
        """From now on the model is sent whole; the error of the one who was to have its delta."""
        damage = unreadable(step.delta_blob, error)
        if not isinstance(damage, DamagedBlob):
            return damage
        if step.version in self._rows:
            self._rows[step.version] = replace(step, delta_blob="")
        return Unavailable(
            f"the step to model {step.version} is damaged: ask again for the whole", reason=damage.reason
        )

    def _reader(self, row: UpdateRow) -> Callable[[int, int], bytes]:
        return self._blobs.range_reader(row.blob) if row.blob else reader_of(row.payload)

    def _row(
        self, new: NewModel, schema: Schema, *, version: int, number: int, base: ModelRow | None = None
    ) -> ModelRow:
        return ModelRow(
            version=version,
            round=number,
            digest=new.digest,
            blob=new.blob,
            schema_hash=schema.hash.hex(),
            parameters=schema.num_parameters,
            bytes=new.bytes,
            created_at=time.time(),
            base_version=base.version if base else 0,
            base_digest=base.digest if base else "",
            delta_blob=new.delta_blob,
            delta_packets=new.delta_packets,
            residual_blob=new.residual_blob,
            optimizer_blob=new.optimizer_blob,
        )


def files_of(row: ModelRow) -> tuple[str, ...]:
    """The names of the model's blobs; empty ones for those that it has not."""
    return row.blob, row.delta_blob, row.residual_blob, row.optimizer_blob


def _kind(job: Job) -> str:
    return json.dumps([job.model, job.model_args])


def _packet(packet: PacketSpec) -> pb.Packet:
    vector = pb.VECTOR_PARAMETERS if packet.vector == "parameters" else pb.VECTOR_BUFFERS
    return pb.Packet(vector=vector, kind=pb.KIND_DELTA, encoding=packet.encoding, bytes=packet.bytes)


def _shifted(read: Callable[[int, int], bytes], start: int) -> Callable[[int, int], bytes]:
    return lambda offset, size: read(start + offset, size)
