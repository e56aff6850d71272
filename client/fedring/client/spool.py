"""What outlives the process: the residual, and an update that is not accepted yet.

    residual.safetensors    what past updates left out, changed only by an accepted update
    spool/header.pb         an UpdateHeader
    spool/payload           its payload
    spool/residual          what this update leaves out, if its encoding leaves out anything,
    spool/no_residual       or else a sign that it sends all that past updates left out
    spool.new/              a spool in the making; worth nothing

An update is spooled before its first byte is sent. When it is accepted, its residual takes the old one's place and
then the spool goes; when it is not, only the spool goes. A process may die between any two of these steps.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

_KEY = "residual"
Residual = NDArray[np.float32]  # [num_parameters]


@dataclass(frozen=True, slots=True)
class Spooled:
    """A finished update on disk."""

    header: pb.UpdateHeader
    payload: Path

    @contextlib.contextmanager
    def reader(self) -> Iterator["PayloadReader"]:
        """Inside, parts of the payload can be read."""
        fd = os.open(self.payload, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield PayloadReader(fd)
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class PayloadReader:
    """An open payload."""

    fd: int

    def __call__(self, offset: int, size: int) -> bytes:
        """The `size` bytes at `offset`."""
        return os.pread(self.fd, size, offset)


class Spool:
    """One state folder, which its caller has locked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._residual_file = folder / "residual.safetensors"
        self._spool = folder / "spool"
        self._cached: tuple[str, bytes, Residual | None] | None = None  # run, schema hash, residual
        shutil.rmtree(folder / "spool.new", ignore_errors=True)

    def residual(self, run_id: str, schema_hash: bytes) -> Residual | None:
        """What past updates of this run and schema left out, [num_parameters] float32; one of others is dropped."""
        if self._cached is None or self._cached[:2] != (run_id, schema_hash):
            self._cached = (run_id, schema_hash, self._load(run_id, schema_hash))
        return self._cached[2]

    def pending(self) -> Spooled | None:
        """The update that is not accepted yet; a damaged one is dropped."""
        if not self._spool.exists():
            return None
        payload = self._spool / "payload"
        try:
            header = pb.UpdateHeader.FromString((self._spool / "header.pb").read_bytes())
            if payload.stat().st_size == header.total_bytes:
                return Spooled(header, payload)
        except (OSError, DecodeError):
            pass  # a kill in the middle of a removal leaves less than a whole
        log.warning("dropped a spooled update that is not whole")
        self.drop()
        return None

    def write(self, header: pb.UpdateHeader, parts: Sequence[bytes | memoryview], residual: Residual | None) -> Spooled:
        """The update, on disk in the place of any other. No fsync: it need not survive the machine."""
        self.drop()
        new = self._folder / "spool.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        with (new / "payload").open("wb", buffering=0) as file:
            for part in parts:
                _write_all(file.fileno(), part)
        if residual is not None:
            metadata = {"run": header.run_id, "schema": header.schema_hash.hex()}
            save_file({_KEY: residual}, new / "residual", metadata)
        else:
            (new / "no_residual").touch()
        (new / "header.pb").write_bytes(header.SerializeToString())
        new.rename(self._spool)
        return Spooled(header, self._spool / "payload")

    def accept(self, spooled: Spooled, residual: Residual | None = None) -> None:
        """The update is the server's: what it left out is from now on the residual, also after a power loss.

        Give `residual`, the one that was written, to spare a later reading of it.
        """
        left = self._spool / "residual"
        if left.exists():
            _sync(left)
            left.rename(self._residual_file)
            _sync(self._folder)
            key = (spooled.header.run_id, spooled.header.schema_hash)
            self._cached = None if residual is None else (*key, residual)
        elif (self._spool / "no_residual").exists() and self._residual_file.exists():
            self._residual_file.unlink()
            _sync(self._folder)
            self._cached = None
        self.drop()

    def drop(self) -> None:
        """No update is spooled; the residual is as it was before there was one."""
        shutil.rmtree(self._spool, ignore_errors=True)

    def _load(self, run_id: str, schema_hash: bytes) -> Residual | None:
        if not self._residual_file.exists():
            return None
        try:
            with safe_open(self._residual_file, framework="numpy") as file:
                metadata = file.metadata() or {}
                if (metadata.get("run"), metadata.get("schema")) == (run_id, schema_hash.hex()):
                    residual: Residual = file.get_tensor(_KEY)
                    return residual
                why = "another run" if metadata.get("run") != run_id else "another model"
        except SafetensorError as error:
            why = f"a damaged file ({error})"
        log.info("dropped the residual of %s", why)
        self._residual_file.unlink()
        return None


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
