"""The spool: what outlives the process: the residual, private tensors, and an update that is not accepted yet.

    residual.safetensors    what past updates left out; only an accepted update changes it, and the file names that one
    update                  magic "SP" | version u8 | flags u8 | length u32 | UpdateOffer | payload; there is no update
                            if the first eight bytes are zeros or the file is empty
    update.payload          the payload, if the version is 3: an update of many workers, put together on the disk
    update.residual         what this update leaves out, if bit 0 of the flags is 1; if it is 0, the update takes along
                            everything that past updates left out
    private-….safetensors,  private tensors (fedring.client.transfer.private); the second file belongs to the update, if
    update.private          bit 1 of the flags is 1
    control.safetensors,    the control variate (fedring.client.transfer.control); the second file belongs to the
    update.control          update, if bit 2 of the flags is 1
    personal-….safetensors, the client's own model, kept like private tensors; the second file belongs to the update, if
    update.personal         bit 3 of the flags is 1

Only the owner can read the files. An update is spooled before its first byte is sent. When it is accepted, what belongs
to it replaces the old files, and then the update is dropped; when it is refused, the update is dropped and the old ones
stay. The process may be killed between any two of these steps, and while it writes a file: the first eight bytes of an
update are written last.

The file `update` is overwritten in place, and keeps its size when its update is accepted. If it were emptied then and
written anew later, the file system would write it to the disk at once, which takes five times the processor's time.
"""

import contextlib
import logging
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedring.client.ledger import Ledger
from fedring.client.transfer.control import ControlState, OwnControl
from fedring.client.transfer.private import PrivateState, PrivateValues
from fedring.client.transfer.tensor_files import save_private
from fedring.client.transfer.update import residual_of_update
from fedring.codec.digest import Digest, update_name
from fedring.daemon.crash import crashpoint
from fedring.daemon.durable import close_to_others, private_opener, sync
from fedring.privacy.account import SampledSteps
from fedring.rpc.chunks import CHUNK_BYTES
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

_KEY = "residual"
Residual = NDArray[np.float32]  # [num_parameters]

_PREFIX = struct.Struct("<2sBBI")
_MAGIC, _VERSION, _APART = b"SP", 2, 3
_NONE = bytes(_PREFIX.size)
_LARGEST = 1e30  # No server takes an update with a larger value.
_FLAGS = 1, 2, 4, 8
_KEPT = ("residual.*", "private-*", "personal-*", "control.*", "update", "update.*", "checkpoints")


@dataclass(frozen=True, slots=True)
class Spooled:
    """A finished update on disk."""

    offer: pb.UpdateOffer
    header: pb.UpdateHeader  # the one in the offer
    leaves: bool  # whether its encoding leaves something out
    path: Path  # of the file
    start: int  # offset of the payload in the file, in bytes
    parts: Sequence[
        bytes | memoryview
    ] = ()  # the payload, in order, if this process made it; else it is read from disk
    has_private: bool = False  # whether private tensors belong to it
    has_control: bool = False  # whether a control variate belongs to it
    has_personal: bool = False  # whether a model of the client's own belongs to it

    @contextlib.contextmanager
    def reader(self) -> Iterator[Callable[[int, int], bytes | memoryview]]:
        """Provide a function of (offset, size) that returns that part of the payload."""
        if self.parts:
            yield self._part
            return
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield lambda offset, size: os.pread(fd, size, self.start + offset)
        finally:
            os.close(fd)

    @property
    def is_sound(self) -> bool:
        """Whether the update is undamaged. This reads the whole payload."""
        if not _name_matches(self.offer):
            return False
        digest = Digest(like=self.offer.payload_digest)
        with self.reader() as read:
            for offset in range(0, self.header.total_bytes, CHUNK_BYTES):
                digest.update(read(offset, min(CHUNK_BYTES, self.header.total_bytes - offset)))
        return digest.name == self.offer.payload_digest

    def _part(self, offset: int, size: int) -> bytes | memoryview:
        found: list[memoryview] = []
        for part in self.parts:
            if size and offset < len(part):
                found.append(memoryview(part)[offset : offset + size])
                size -= len(found[-1])
            offset = max(0, offset - len(part))
        return found[0] if len(found) == 1 else b"".join(found)


class Spool:
    """The spool in one state folder, which the caller has locked. It belongs to the user's thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.private = PrivateState(folder)
        self.ledger = Ledger(folder)
        self.control = ControlState(folder)
        self.personal = PrivateState(folder, "personal")
        self._residual_file, self._left_file = folder / "residual.safetensors", folder / "update.residual"
        self._update_file, self._payload_file = folder / "update", folder / "update.payload"
        self.payload_part.unlink(missing_ok=True)  # It was being put together when the process was killed.
        close_to_others(folder, *_KEPT)  # what earlier versions have left
        self._empty = False  # whether it certainly holds no update
        self._left = True  # whether the files that belong to an update may exist
        self._cached: tuple[str, bytes, Residual | None] | None = None  # run, schema hash, residual
        self._noted: pb.LastAccepted | None = None  # the accepted update that left the cached residual, if it is known

    @property
    def size(self) -> int:
        """The bytes of the update that is not accepted yet; 0 if there is none. Any thread may ask."""
        try:
            with self._update_file.open("rb") as file:
                prefix = file.read(_PREFIX.size)
                payload = self._payload_file.stat().st_size if prefix[2:3] == bytes([_APART]) else 0
                return os.fstat(file.fileno()).st_size + payload if any(prefix) else 0
        except OSError:
            return 0

    def residual(
        self, run_id: str, schema_hash: bytes, last: pb.LastAccepted, *, after: tuple[int, int] = (0, 0)
    ) -> Residual | None:
        """Return the residual for the next update; a residual that does not belong to it is dropped.

        Args:
            run_id: The run of the next update.
            schema_hash: The schema of the next update, as `residual_of` names it.
            last: The newest update of this client that the server has accepted. If the residual was left by an older
                one, it was sent in the meantime, and is dropped. If it was left by a newer one, the server has been
                restored, and the residual stays.
            after: An epoch and a round. The residuals of this round, and of earlier ones, belong to models that the
                job does not continue.

        Returns:
            What past updates left out, [num_parameters] float32; None if they left out nothing.
        """
        if self._cached is None or self._cached[:2] != (run_id, schema_hash):
            self._cached = (run_id, schema_hash, self._load(run_id, schema_hash))
        if self._cached[2] is not None and (self._was_sent_since(last) or self._is_of_other_models(after)):
            self._residual_file.unlink(missing_ok=True)
            self._cached = (run_id, schema_hash, None)
        return self._cached[2]

    def charge_samples(self, command: pb.TrainCmd, spent: SampledSteps) -> None:
        """Charge a training with DP-SGD; before a job's first one, drop the residual, which no noise may cover.

        Raises:
            OSError: If that is impossible.
        """
        if not self.ledger.has_charged(command):
            self._residual_file.unlink(missing_ok=True)
            sync(self.folder)
            self._cached = None
        self.ledger.charge_samples(command, spent)

    def pending(self) -> Spooled | None:
        """Return the update that is not accepted yet, if there is one; a damaged one is dropped."""
        if self._empty:
            return None
        try:
            with self._update_file.open("rb") as file:
                prefix = file.read(_PREFIX.size)
                if not any(prefix):
                    return None
                magic, version, flags, length = _PREFIX.unpack(prefix)
                leaves, *has = (bool(flags & bit) for bit in _FLAGS)
                if magic != _MAGIC or version not in (_VERSION, _APART):
                    raise struct.error
                offer = pb.UpdateOffer.FromString(file.read(length))
                if not _name_matches(offer):  # The server could not be asked about it.
                    raise struct.error
                header = pb.UpdateHeader.FromString(offer.header)
                if version == _APART and self._payload_file.stat().st_size == header.total_bytes:
                    return Spooled(offer, header, leaves, self._payload_file, 0)
                start = _PREFIX.size + length
                if version != _APART and start + header.total_bytes == os.fstat(file.fileno()).st_size:
                    return Spooled(offer, header, leaves, self._update_file, start, (), *has)
        except FileNotFoundError:
            return None
        except (OSError, struct.error, DecodeError):
            pass  # It was being written when the process was killed, or the disk has damaged it.
        log.warning("dropped a spooled update that is damaged or incomplete")
        self.drop()
        return None

    def write(
        self,
        offer: pb.UpdateOffer,
        parts: Sequence[bytes | memoryview],
        residual: Residual | None,
        *,
        private: PrivateValues | None = None,
        control: OwnControl | None = None,
        personal: PrivateValues | None = None,
        version: int = _VERSION,
    ) -> Spooled:
        """Write an update to disk, in the place of any other. It is not synced: it need not survive a power loss.

        Its private tensors are synced, because they are to replace older ones.

        Args:
            offer: The header and the names of the update.
            parts: The payload, in order.
            residual: What the update leaves out, [num_parameters]; None = nothing.
            private: The private tensors that belong to it; None = none.
            control: The control variate that it leaves; None = none.
            personal: The client's own model that belongs to it; None = none.
            version: Of the file; 3 if the payload is in a file of its own.
        """
        header = pb.UpdateHeader.FromString(offer.header)
        leaves, *has = (each is not None for each in (residual, private, control, personal))
        flags = sum(bit for bit, present in zip(_FLAGS, (leaves, *has), strict=True) if present)
        if flags:  # The old update must never be found together with what belongs to the new one.
            self.drop()
            self._left = True
        if private is not None:
            self.private.spool(private, offer.name)
            crashpoint("client_private_spooled")
        if control is not None:
            self.control.spool(control, header.run_id)
            crashpoint("client_control_spooled")
        if personal is not None:
            self.personal.spool(personal, offer.name)
            crashpoint("client_personal_spooled")
        if residual is not None:
            noted = {"epoch": str(header.epoch), "round": str(header.round), "name": offer.name}
            metadata = {"run": header.run_id, "schema": residual_of_update(header).hex(), **noted}
            save_private(save_file, self._left_file, {_KEY: residual}, metadata)
            crashpoint("client_residual_spooled")
        self._empty = False
        head = offer.SerializeToString()
        prefix = _PREFIX.pack(_MAGIC, version, flags, len(head))
        fd = private_opener(str(self._update_file), os.O_WRONLY | os.O_CREAT)
        try:
            _write_all(fd, [_NONE, head, *parts])
            end = os.lseek(fd, 0, os.SEEK_CUR)
            if os.fstat(fd).st_size != end:
                os.truncate(fd, end)
            os.pwrite(fd, prefix, 0)
        finally:
            os.close(fd)
        crashpoint("client_update_spooled")
        start = len(prefix) + len(head)
        return Spooled(offer, header, leaves, self._update_file, start, parts, *has)

    def adopt(self, offer: pb.UpdateOffer, payload: Path) -> Spooled:
        """Take over an update whose payload is a file already, in the place of any other update; it leaves nothing out.

        Args:
            offer: The header and the names of the update.
            payload: The file, in the folder of the spool. It is moved.
        """
        self.drop()
        payload.chmod(0o600)
        payload.replace(self._payload_file)
        spooled = self.write(offer, [], None, version=_APART)
        return replace(spooled, path=self._payload_file, start=0)

    @property
    def payload_part(self) -> Path:
        """Where to write the payload of an update that is then adopted."""
        return self.folder / "update.payload.part"

    def accept(self, spooled: Spooled, residual: Residual | None = None) -> None:
        """Note that the server has accepted the update: drop it, and keep what belongs to it.

        That is synced, so that this also holds after a power loss.

        Args:
            spooled: The update.
            residual: What it left out, if the caller has it; this saves reading it from the disk later.
        """
        crashpoint("client_accepted")
        if spooled.has_private:
            self.private.accept(spooled.offer.name)
            crashpoint("client_private_placed")
        if spooled.has_control:
            self.control.accept()
            crashpoint("client_control_placed")
        if spooled.has_personal:
            self.personal.accept(spooled.offer.name)
            crashpoint("client_personal_placed")
        if not spooled.leaves:
            known_absent = self._cached is not None and self._cached[2] is None
            if not known_absent and self._residual_file.exists():
                self._residual_file.unlink()
                sync(self.folder)
                self._cached = None
        elif self._left_file.exists():  # If not, it became the residual before the process was killed.
            sync(self._left_file)
            self._left_file.rename(self._residual_file)
            sync(self.folder)
            crashpoint("client_residual_placed")
            key = (spooled.header.run_id, residual_of_update(spooled.header))
            self._cached = None if residual is None else (*key, residual)
            header = spooled.header
            self._noted = pb.LastAccepted(epoch=header.epoch, round=header.round, name=spooled.offer.name)
            # A server that chose enormous steps has done this: no later update with such a residual could be sent.
            if residual is not None and not _may_be_sent(residual):
                self.end_residual("a value is not finite, or beyond 1e30")
        self.drop()
        crashpoint("client_noted")

    def end_residual(self, why: str) -> bool:
        """Drop the residual; return whether there was one."""
        if not self._residual_file.exists():
            return False
        log.warning("dropped the residual of past updates: %s", why)
        self._residual_file.unlink()
        self._cached = None
        return True

    def drop(self) -> None:
        """Drop the update, if there is one. The residual stays as it was before."""
        if self._empty:
            return
        with contextlib.suppress(FileNotFoundError), self._update_file.open("r+b", buffering=0) as file:
            file.write(_NONE)
        if self._left:
            self._left_file.unlink(missing_ok=True)
            self.private.drop()
            self.control.drop()
            self.personal.drop()
        self._payload_file.unlink(missing_ok=True)
        self._empty, self._left = True, False

    def _was_sent_since(self, last: pb.LastAccepted) -> bool:
        """Return whether the server has accepted a newer update than the one that left the residual, or another one."""
        noted = self._noted
        if noted is None or last.name in ("", noted.name) or (noted.epoch, noted.round) > (last.epoch, last.round):
            return False
        log.warning(
            "dropped the residual of round %d: an update of round %d was accepted since", noted.round, last.round
        )
        return True

    def _is_of_other_models(self, after: tuple[int, int]) -> bool:
        # An older server names no epoch: then the numbers of the rounds decide.
        if self._noted is None or (self._noted.epoch if after[0] else 0, self._noted.round) > after:
            return False
        log.info("dropped the residual of round %d: this job does not continue that model", self._noted.round)
        return True

    def _load(self, run_id: str, schema_hash: bytes) -> Residual | None:
        if not self._residual_file.exists():
            return None
        try:
            with safe_open(self._residual_file, framework="numpy") as file:
                metadata = file.metadata() or {}
                if (metadata.get("run"), metadata.get("schema")) == (run_id, schema_hash.hex()):
                    residual: Residual = file.get_tensor(_KEY)
                    if _may_be_sent(residual):
                        self._noted = _noted_in(metadata)
                        return residual
                    why = "a damaged file (a value is not finite, or beyond 1e30)"
                else:
                    why = "another run" if metadata.get("run") != run_id else "another model"
        except SafetensorError as error:
            why = f"a damaged file ({error})"
        log.info("dropped the residual of %s", why)
        self._residual_file.unlink()
        return None


def _may_be_sent(residual: Residual) -> bool:
    """Return whether an update can be sent with this; NaN makes both comparisons false."""
    return bool(residual.max(initial=0) <= _LARGEST and residual.min(initial=0) >= -_LARGEST)


def _name_matches(offer: pb.UpdateOffer) -> bool:
    return update_name(offer.header, offer.payload_digest) == offer.name


def _noted_in(metadata: Mapping[str, str]) -> pb.LastAccepted | None:
    """Return the update that left a residual; None if the file was written before residuals named it."""
    try:
        epoch, round_ = int(metadata["epoch"]), int(metadata["round"])
        return pb.LastAccepted(epoch=epoch, round=round_, name=metadata["name"])
    except (KeyError, ValueError):
        return None


def _write_all(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    views = [memoryview(part) for part in parts]
    while views:
        written = os.writev(fd, views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]
