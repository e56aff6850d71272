"""The steps of transforms in the making of one model.

`fedring.server.aggregation.aggregate` walks over the base and the updates, and calls the hooks of all steps in order.
A step belongs to one attempt to close one round: it may keep in itself what one hook has found for a later one.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedring.codec.errors import CodecError
from fedring.server.aggregation.combining import Combination, Finish, Walk
from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.modelfile import LoadedModel
from fedring.server.aggregation.versions import ModelVersions
from fedring.server.state.blob_interfaces import Blobs
from fedring.server.state.checked import CheckedReader, Room, read_checked, unreadable
from fedring.server.state.failures import StorageError
from fedring.server.state.rows import ChargeRow, ModelRow, PacketSpec, UpdateRow

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
T = TypeVar("T")


class Combine(Protocol):
    """Walks once over the combined delta of the parameters."""

    def __call__(self, finish: Finish[T]) -> Generator[T, None, None]:
        """Yield finish(start, base, delta) of each piece, in order.

        Several threads compute the pieces.
        """
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """A model before it is written.

    Only one of the two walks may be made, and only once.
    """

    buffers: Float64
    deltas: Combine
    parameters: Callable[[], Generator[Float32, None, None]]  # tile by tile
    delta_packets: tuple[PacketSpec, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)  # contents of blobs, by their columns in ModelRow


@dataclass(frozen=True, slots=True)
class VectorFile:
    """A model file without buffers that is written piece by piece."""

    pieces: Generator[Float32, None, None]
    metadata: Mapping[str, str]
    digest_column: str  # of ModelRow, for the digest of the values


class BaseFiles:
    """The files of the base model of a round.

    Args:
        blobs: hold them.
        versions: say what the damage of a file means.
        base: the model.
        stack: closes what was opened.

    Attributes:
        room: the limit that all readers of this round share.
        opened: must be checked when everything has been read.
    """

    def __init__(self, blobs: Blobs, versions: ModelVersions, base: ModelRow, stack: ExitStack) -> None:
        self._blobs, self._versions, self._base, self._stack = blobs, versions, base, stack
        self.room, self.opened = Room(), list[CheckedReader]()

    def open(self, name: str) -> CheckedReader:
        """Open a blob that is read by range.

        Raises:
            DamagedModel: if it cannot be read.
            StorageFailed: if it cannot be read now.
        """
        try:
            blob = self._stack.enter_context(self._blobs.reader(name))
        except StorageError as error:
            raise self.damage_of(unreadable(name, error)) from error
        self.opened.append(CheckedReader(blob.read, blob.size, name, self.room))
        return self.opened[-1]

    def read(self, name: str) -> bytes:
        """Return all bytes of a blob; b"" without a name.

        Raises:
            DamagedModel, StorageFailed: as open().
        """
        try:
            return read_checked(self._blobs, name) if name else b""
        except StorageError as error:
            raise self.damage_of(error) from error

    def payload(self, row: UpdateRow) -> CheckedReader:
        """Return a reader of an update's payload, by range.

        It must be checked when everything has been read.
        """
        return CheckedReader(self._reader_of(row), row.total_bytes, row.digest, self.room)

    def _reader_of(self, row: UpdateRow) -> Callable[[int, int], bytes]:
        if row.blob:
            return self._blobs.range_reader(row.blob)
        return lambda offset, size: row.payload[offset : offset + size]

    def damage_of(self, error: CodecError | StorageError) -> StorageError:
        """Return the base's error for an error of a file."""
        return self._versions.damage_of(self._base, error)


class Step:
    """One transform's part in making one model.

    Each hook does nothing by default.
    """

    whole: ClassVar[bool] = False
    """Whether `change` is called, for which the base is loaded into memory."""

    def stats(self) -> dict[str, Any]:
        """Return the figures that the round's row keeps."""
        return {}

    def charge(self) -> ChargeRow | None:
        """Return the charge for publishing the model, or None.

        None if it costs no privacy.
        """
        return None

    def read(self, base: ModelRow, files: BaseFiles) -> None:
        """Read the state that belongs to the base model.

        Raises:
            DamagedModel: if it is damaged.
            StorageFailed: if it cannot be read now.
        """

    def contributions(self, given: list[Contribution], length: int) -> list[Contribution]:
        """Return the contributions with other weights, or others in their place.

        Nothing is decoded yet.

        Args:
            given: the updates, as the steps before have left them.
            length: the number of parameters of the model.

        Raises:
            CodecError: if a payload is damaged, or its values are impossible.
        """
        return given

    def combination(self, how: Combination) -> Combination:
        """Return how the contributions are combined."""
        return how

    def piece(self, start: int, delta: Float64) -> None:
        """Read a piece of the combined delta, or change it in place.

        Several threads call this, in any order.

        Args:
            start: the place where the piece begins.
            delta: of the parameters, after the pieces of earlier steps, [n].
        """

    def change(self, base: LoadedModel, draft: Draft) -> Draft:
        """Return another draft of the model.

        Raises:
            CodecError: if a value does not fit its format.
        """
        return draft

    def files(self, walk: Walk) -> Mapping[str, bytes | VectorFile]:
        """Return blobs to write, by their columns in ModelRow.

        All parameters are made by now.
        """
        return {}

    def columns(self) -> Mapping[str, Any]:
        """Return further columns of the model's row, after `files`."""
        return {}
