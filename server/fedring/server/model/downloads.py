"""Downloads of models: in full, in part, or as deltas.

The deltas lead to a model from one that the caller holds.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from fedring.codec.dense import dense_header
from fedring.codec.digest import Digest, name_of
from fedring.codec.encoding import BUFFERS
from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema
from fedring.rpc.contract import SMALL_BYTES
from fedring.rpc.errors import BadRequest, Unavailable, UnknownModel
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.versions import ModelVersions
from fedring.server.state.blob_interfaces import Blobs
from fedring.server.state.checked import CheckedReader, changed, find_damage, unreadable
from fedring.server.state.failures import DamagedBlob, StorageError
from fedring.server.state.rows import ModelRow, PacketSpec
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb

MAX_DELTAS = 7
"""Most deltas in one download: with their buffers they are 14 packets."""

MAX_RANGES = 65536
"""Most ranges of values in one request."""

_STEP = 1 << 20  # bytes that are read at a time for a digest

Piece = tuple[int, Callable[[int, int], bytes]]
"""A number of bytes, and a function that reads `size` of them at `offset`."""


@dataclass(slots=True)
class Download:
    """One download of a model. It holds files open: a context manager.

    Attributes:
        header: what is sent first.
        pieces: what the payload consists of, in order.
        files: what must be closed.
        check: returns if no file was damaged, else raises DamagedModel, or Unavailable for a delta. It must be called
            when everything has been read, and before the caller gets the last bytes. It may take long if the payload
            was not read from its start: not for the event loop then.
    """

    header: pb.ModelHeader
    pieces: Sequence[Piece]
    files: ExitStack
    check: Callable[[], None]

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes of the payload at `offset`.

        Raises:
            DamagedModel: if a file cannot be read to its end.
            Unavailable: if the file of a delta cannot: the caller may ask again, and gets the model in full.
            StorageFailed: if the disk failed.
        """
        parts = []
        try:
            for length, read in self.pieces:
                if size and offset < length:
                    parts.append(read(offset, min(size, length - offset)))
                    size -= len(parts[-1])
                offset = max(0, offset - length)
        except StorageError:
            self.check()  # raises an error that names the model
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __enter__(self) -> "Download":
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()


_Parts = tuple[list[pb.Packet], list[Piece], Callable[[], None]]


class Downloads:
    """Opens downloads of the available versions."""

    def __init__(self, blobs: Blobs, run_id: str, versions: ModelVersions) -> None:
        self._blobs, self._run_id, self._versions = blobs, run_id, versions

    def open(self, request: pb.FetchModelRequest) -> Download:
        """Open a download of the wanted version.

        It comes as deltas to the held one if that is shorter, else in full.

        Raises:
            UnknownModel: if the version is not kept, or "no_residual" if the exact model is wanted and is not.
            BadRequest: "bad_ranges", if the model does not have the ranges that are wanted.
            DamagedModel: if its file is damaged.
            Unavailable: if the file of a delta is damaged: the caller may ask again, and gets the model in full.
            StorageFailed: if the disk failed.
        """
        row = self._versions.find(request.digest, request.version)
        if request.ranges:
            return self._in_ranges(row, request.ranges)
        with ExitStack() as files:
            deltas = self._deltas_between(request.held_digest, row)
            packets, pieces, check = self._as_deltas(deltas, files) if deltas else self._in_full(row, files)
            if request.exact:
                packets, pieces, check = self._with_residual(row, files, (packets, pieces, check))
            base = request.held_digest if deltas else ""
            header = pb.ModelHeader(
                run_id=self._run_id,
                version=row.version,
                schema_hash=bytes.fromhex(row.schema_hash),
                schema=self._versions.schema_of(row).json,
                packets=packets,
                base_digest=base,
                total_bytes=sum(length for length, _ in pieces),
                payload_name=name_of(f"{row.digest} {base}".encode()),
                model_digest=row.digest,
                exact=request.exact,
            )
            # From here on the download closes the files. An error above closes them at once.
            return Download(header, pieces, files.pop_all(), check)

    def small(self, row: ModelRow, job: Job) -> pb.SmallModel | None:
        """Return a version in one message, or None.

        None if it is too large for that, or if the job's clients do not fetch it.

        Raises:
            DamagedModel: if its file is damaged.
            StorageFailed: if the disk failed.
        """
        if job.download_encoding != "full" or job.training.staged or row.bytes > SMALL_BYTES:
            return None  # The workers of a pipeline fetch their stages only.
        with self.open(pb.FetchModelRequest(version=row.version)) as download:
            model = pb.SmallModel(header=download.header, payload=download.read(0, download.header.total_bytes))
            download.check()
        return model if model.ByteSize() <= SMALL_BYTES else None

    def _deltas_between(self, held: str, row: ModelRow) -> list[ModelRow]:
        """Return the versions whose deltas lead from `held` to `row`, oldest first.

        It is empty if no deltas do, or if they are longer than the model.
        """
        rows: list[ModelRow] = []
        size, at = 0, row
        while held and held != at.digest and at.delta_blob and len(rows) < MAX_DELTAS:
            rows.append(at)
            size += sum(packet.bytes for packet in at.delta_packets)
            if at.base_digest == held and size < row.bytes:
                return rows[::-1]
            before = self._versions.get(at.base_version)
            if before is None:
                break
            at = before
        return []

    def _as_deltas(self, rows: Sequence[ModelRow], files: ExitStack) -> _Parts:
        packets = [_packet(packet) for row in rows for packet in row.delta_packets]
        readers = []
        for row in rows:
            try:
                blob = files.enter_context(self._blobs.reader(row.delta_blob))
            except StorageError as error:
                raise self._without_delta(row, error) from error
            readers.append(CheckedReader(blob.read, blob.size, row.delta_blob))

        def check() -> None:
            for row, reader in zip(rows, readers, strict=True):
                for damage in find_damage([reader]):
                    raise self._without_delta(row, damage)

        return packets, [(reader.size, reader.read) for reader in readers], check

    def _in_ranges(self, row: ModelRow, wanted: Sequence[pb.ValueRange]) -> Download:
        """Open a download of some values.

        The file is read once before, and again as the values are sent. The whole file is compared with its digest, and
        then names the payload by the digest of the wanted values.
        """
        schema = self._versions.schema_of(row)
        check_ranges(wanted, schema)
        with ExitStack() as files:
            reader = self._reader(row, files)
            try:
                with self._blobs.reader(row.blob) as blob:
                    CheckedReader(blob.read, blob.size, row.blob).check()
            except StorageError as error:
                raise self._versions.damage_of(row, error) from error
            pieces: list[Piece] = []
            for one in wanted:
                if one.vector == pb.VECTOR_PARAMETERS:
                    pieces.append((4 * one.count, _shifted(reader.parameter_bytes, 4 * one.start)))
                else:
                    pieces.append((8 * one.count, _shifted(reader.buffer_bytes, 8 * one.start)))
            digest = Digest()
            for length, read in pieces:
                for offset in range(0, length, _STEP):
                    digest.update(read(offset, min(_STEP, length - offset)))
            header = pb.ModelHeader(
                run_id=self._run_id,
                version=row.version,
                schema_hash=bytes.fromhex(row.schema_hash),
                schema=schema.json,
                ranges=wanted,
                total_bytes=sum(length for length, _ in pieces),
                payload_name=digest.name,
                model_digest=row.digest,
            )
            return Download(header, pieces, files.pop_all(), lambda: None)  # The receiver compares payload_name.

    def _reader(self, row: ModelRow, files: ExitStack) -> ModelReader:
        try:
            reader = ModelReader(files.enter_context(self._blobs.reader(row.blob)))
            if reader.schema.hash.hex() != row.schema_hash:
                raise changed(row.blob)
        except (CodecError, StorageError) as error:
            raise self._versions.damage_of(row, error) from error
        return reader

    def _in_full(self, row: ModelRow, files: ExitStack) -> _Parts:
        schema, reader = self._versions.schema_of(row), self._reader(row, files)
        middle, end = 4 * schema.num_parameters, 4 * schema.num_parameters + 8 * schema.num_buffers

        def values(offset: int, size: int) -> bytes:
            """Read both vectors in the order of the model's digest.

            They are sent in this order.
            """
            split = min(max(middle - offset, 0), size)
            first = reader.parameter_bytes(offset, split) if split else b""
            return first + reader.buffer_bytes(offset + split - middle, size - split) if split < size else first

        checked = CheckedReader(values, end, row.digest)

        def check() -> None:
            for damage in find_damage([checked]):
                raise self._versions.damage_of(row, DamagedBlob(row.blob, damage.what))

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
                pieces += [(len(head), _reader_of(head)), (stop - start, _shifted(checked.read, start))]
        return packets, pieces, check

    def _with_residual(self, row: ModelRow, files: ExitStack, model: _Parts) -> _Parts:
        """Add a packet of the residual of download_encoding.

        There is no packet if the encoding has left nothing out of the model.
        """
        packets, pieces, check_model = model
        if not row.residual_blob and not row.delta_blob:
            return model
        try:
            blob = files.enter_context(self._blobs.reader(row.residual_blob)) if row.residual_blob else None
        except StorageError as error:
            if not isinstance(unreadable(row.residual_blob, error), DamagedBlob):
                raise
            blob = None
        if blob is None:
            raise UnknownModel(
                f"what the encoding has left out of model {row.version} is not kept any more: it is kept for the "
                "newest and the best version of each of the last jobs",
                reason="no_residual",
            )
        residual = CheckedReader(blob.read, blob.size, row.residual_blob)

        def check() -> None:
            check_model()
            for damage in find_damage([residual]):
                raise self._versions.damage_of(row, damage)

        head = dense_header("fp32", blob.size // 4)
        size = len(head) + blob.size
        packet = pb.Packet(vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding="fp32", bytes=size)
        return [*packets, packet], [*pieces, (len(head), _reader_of(head)), (blob.size, residual.read)], check

    def _without_delta(self, row: ModelRow, error: StorageError) -> Exception:
        """Send the version in full from now on.

        Returns:
            The error of the caller that was to get its delta.
        """
        damage = unreadable(row.delta_blob, error)
        if isinstance(damage, DamagedBlob):
            damage = self._blobs.judge(damage)
        if not isinstance(damage, DamagedBlob):
            return damage
        self._versions.drop_delta(row)
        return Unavailable(
            f"the delta to model {row.version} is damaged: ask again, and the model is sent in full",
            reason=damage.reason,
        )


def check_ranges(wanted: Sequence[pb.ValueRange], schema: Schema) -> None:
    """Check that a model has the values that a client asks for.

    Args:
        wanted: the ranges of the request.
        schema: what the model consists of.

    Raises:
        BadRequest: "bad_ranges", if a range is empty, beyond its vector, or not behind the one before, or if there are
            too many.
    """
    sizes = {pb.VECTOR_PARAMETERS: schema.num_parameters, pb.VECTOR_BUFFERS: schema.num_buffers}
    ends = dict.fromkeys(sizes, 0)
    if len(wanted) > MAX_RANGES:
        raise BadRequest(f"{len(wanted)} ranges are above MAX_RANGES = {MAX_RANGES}", reason="bad_ranges")
    for one in wanted:
        if one.vector not in sizes or not one.count or not ends[one.vector] <= one.start <= sizes[one.vector]:
            raise BadRequest(f"{one.count} values at {one.start} are no range, or out of order", reason="bad_ranges")
        ends[one.vector] = one.start + one.count
        if ends[one.vector] > sizes[one.vector]:
            text = f"{one.count} values at {one.start} are beyond the vector's {sizes[one.vector]}"
            raise BadRequest(text, reason="bad_ranges")


def _reader_of(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, size: data[offset : offset + size]


def _packet(packet: PacketSpec) -> pb.Packet:
    vector = pb.VECTOR_PARAMETERS if packet.vector == "parameters" else pb.VECTOR_BUFFERS
    return pb.Packet(vector=vector, kind=pb.KIND_DELTA, encoding=packet.encoding, bytes=packet.bytes)


def _shifted(read: Callable[[int, int], bytes], start: int) -> Callable[[int, int], bytes]:
    return lambda offset, size: read(start + offset, size)
