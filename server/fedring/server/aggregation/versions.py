"""The kept model versions: their parts, and their damaged files."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema
from fedring.rpc.errors import UnknownModel
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.state.blob_interfaces import Blobs
from fedring.server.state.checked import CheckedReader, changed, unreadable
from fedring.server.state.failures import DamagedBlob, DamagedModel, StorageError, StorageFailed
from fedring.server.state.rows import ModelRow

log = logging.getLogger(__name__)


class ModelVersions:
    """The model versions that can be downloaded.

    `recover` and `damaged` may take long: they are not for the event loop.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._rows: dict[int, ModelRow] = {}
        self._unreadable: dict[int, ModelRow] = {}  # kept, but damaged when the server started
        self._schemas: dict[str, Schema] = {}  # by their hashes

    def remember(self, row: ModelRow) -> None:
        """Make a version available, after a look at its file.

        Raises:
            DamagedModel: if the file is missing or cut short, or its header is damaged.
            StorageFailed: if the file cannot be read now.
        """
        try:
            with self._blobs.reader(row.blob) as blob:
                if blob.size != row.bytes:
                    raise DamagedBlob(row.blob, f"has {blob.size} of {row.bytes} bytes")
                schema = ModelReader(blob).schema
                if schema.hash.hex() != row.schema_hash:
                    raise changed(row.blob)
                for each in (schema, schema.without_buffers):
                    self._schemas.setdefault(each.hash.hex(), each)
        except (CodecError, StorageError) as error:
            raise self.damage_of(row, error) from error
        self._rows[row.version] = row

    def recover(self, rows: Sequence[ModelRow]) -> ModelRow | None:
        """Make versions available after a start.

        Older ones that are damaged are left out, with a line in the log.

        Args:
            rows: the versions, newest first.

        Returns:
            The newest version; None if there is none.

        Raises:
            DamagedModel: if the file of the newest version is missing or cut short, or its header is damaged.
        """
        for row in reversed(rows):
            try:
                self.remember(row)
            except DamagedModel as error:
                if row is rows[0]:
                    raise DamagedModel(row, error, "restore a backup, or go on without it: --drop-damaged") from error
                log.error("%s", error.detail)
                self._unreadable[row.version] = row
        return rows[0] if rows else None

    def damaged(self, rows: Iterable[ModelRow]) -> list[ModelRow]:
        """Read all files of these versions, and return the damaged versions.

        A version is damaged if one of its files is.
        """
        return [row for row in rows if not all(map(self._is_sound, row.files))]

    def forget(self, kept: Iterable[int]) -> None:
        """Make all versions but these unavailable."""
        wanted = set(kept)
        for rows in (self._rows, self._unreadable):
            for version in rows.keys() - wanted:
                del rows[version]

    def schema_of(self, row: ModelRow) -> Schema:
        """Return the schema of an available version."""
        return self._schemas[row.schema_hash]

    def get(self, version: int) -> ModelRow | None:
        """Return an available version; None if it is not available."""
        return self._rows.get(version)

    def find(self, digest: str, version: int) -> ModelRow:
        """Return the newest version that matches.

        The control variate that belongs to a version is found by its digest, as the row of a model without buffers.

        Args:
            digest: of the model; if it is empty, `version` counts.
            version: its number; 0 means any.

        Raises:
            UnknownModel: if no such version is kept.
            DamagedModel: if it was damaged when the server started, and still is.
        """
        rows = sorted(
            (self._unreadable | self._rows).values(), key=lambda row: (row.version in self._rows, row.version)
        )
        if digest:
            rows = [row for row in rows if digest in (row.digest, row.control_digest)]
        elif version:
            rows = [row for row in rows if row.version == version]
        if not rows:
            name = digest[:80] or version
            advice = f"model {name} is not kept: `flctl models list` shows those that are"
            raise UnknownModel(advice if name else "there is no model yet")
        if rows[-1].version in self._unreadable:
            self.remember(rows[-1])
        return rows[-1] if digest in ("", rows[-1].digest) else self._control_of(rows[-1])

    def _control_of(self, row: ModelRow) -> ModelRow:
        schema = self.schema_of(row).without_buffers
        return ModelRow(
            row.version,
            row.round,
            row.control_digest,
            row.control_blob,
            schema.hash.hex(),
            schema.num_parameters,
            4 * schema.num_parameters,
            row.created_at,
        )

    def drop_delta(self, row: ModelRow) -> None:
        """Stop offering the delta to a version, whose file is damaged."""
        if row.version in self._rows:
            self._rows[row.version] = replace(row, delta_blob="")

    def damage_of(self, row: ModelRow, error: CodecError | StorageError) -> StorageError:
        """Return the error of a version with an unusable file.

        The file cannot be read, or cannot be trusted. It is `error` itself if a later attempt may succeed, or if it
        says all this already.
        """
        damage = changed(row.blob) if isinstance(error, CodecError) else unreadable(row.blob, error)
        if not isinstance(damage, DamagedBlob) or isinstance(damage, DamagedModel):
            return damage
        if not isinstance(judged := self._blobs.judge(damage), DamagedBlob):
            return judged
        same = (each.version for each in self._rows.values() if each.schema_hash == row.schema_hash)
        other = max((version for version in same if version != row.version), default=0)
        advice = f"start a job with start = {other}, or restore a backup" if other else "restore a backup"
        return DamagedModel(row, damage, advice)

    def round_of(self, digest: str, run_id: str) -> int:
        """Return the number of the round that made a blob's model.

        0 if it is no such model of this run.

        Raises:
            StorageFailed: if it cannot be read now.
        """
        try:
            with self._blobs.reader(digest) as blob:
                model = ModelReader(blob)
                if not model.schema.num_parameters or model.metadata.get("run_id") != run_id:
                    return 0
                return int(model.metadata.get("round", "0"))
        except StorageFailed:
            raise
        except (CodecError, StorageError, ValueError):  # it may hold anything that a client has sent
            return 0

    def _is_sound(self, digest: str) -> bool:
        try:
            with self._blobs.reader(digest) as blob:
                CheckedReader(blob.read, blob.size, digest).check()
        except StorageError as error:
            judged = self._blobs.judge(error) if isinstance(error, DamagedBlob) else error
            if isinstance(judged, StorageFailed):
                raise judged from error
            return False
        return True
