"""A model as one caller fetches it: a header, and the bytes of its payload by range."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from fedring.server.state.blobs import StorageError
from fedring.v1 import federation_pb2 as pb

Piece = tuple[int, Callable[[int, int], bytes]]
"""So many bytes, and a reader of them."""


@dataclass(slots=True)
class Offer:
    """A model as one caller gets it; a context, for it holds files open."""

    header: pb.ModelHeader
    pieces: Sequence[Piece]
    files: ExitStack
    prove: Callable[[], None]
    """To be called when all has been read and before the caller has the last of it; raises if a file was damaged.
    It may take long if the caller did not begin at the start: not for the event loop."""

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes of the payload."""
        parts = []
        try:
            for length, read in self.pieces:
                if size and offset < length:
                    parts.append(read(offset, min(size, length - offset)))
                    size -= len(parts[-1])
                offset = max(0, offset - length)
        except StorageError:
            self.prove()  # it knows what this file is of
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __enter__(self) -> "Offer":
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()


def reader_of(data: bytes) -> Callable[[int, int], bytes]:
    """Return a reader of bytes that are at hand."""
    return lambda offset, size: data[offset : offset + size]
