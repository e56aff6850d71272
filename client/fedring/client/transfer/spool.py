"""The spool: state of accepted updates, and one update not accepted yet.

It outlives the process.

    update                  magic "SP" | version u8 | unsent u8 | length u32 | UpdateOffer | payload; there is no update
                            if the first eight bytes are zeros or the file is empty; unsent is 1 until any of it leaves
    update.payload          the payload, if the version is 5: an update of many workers, put together on the disk
    accepted                the newest accepted update and its line of models, if there are several lines
    update.left             what the update leaves, if it leaves anything (fedring.client.transfer.kept)
    kept-….safetensors      what accepted updates have left

Only the owner can read the files. An update is spooled before its first byte is sent. When it is accepted, what it
leaves gets the name of what was kept before, and then the update is dropped; when it is refused, both are dropped. The
process may be killed between any two of these steps, and while it writes a file: the first eight bytes of an update are
written last.

The file `update` is overwritten in place, and keeps its size when its update is accepted. If it were emptied then and
written anew later, the file system would write it to the disk at once, which takes five times the processor's time.
"""

import contextlib
import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from google.protobuf.message import DecodeError

from fedring.client.consent.audit import Audit, AuditTable
from fedring.client.policy.ledger import Ledger
from fedring.client.transfer.kept import KeptFiles, KeptState
from fedring.codec.digest import Digest, update_name
from fedring.daemon.crash import crashpoint
from fedring.daemon.durable import close_to_others, private_opener
from fedring.rpc.chunks import CHUNK_BYTES
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

_PREFIX = struct.Struct("<2sBBI")
_MAGIC, _VERSION, _APART = b"SP", 4, 5
_NONE = bytes(_PREFIX.size)
_UNSENT_AT = 3  # the place of that byte
_NO_AUDIT = AuditTable.model_validate({})
_KEPT = ("kept-*", "update", "update.*", "checkpoints", "accepted")
_MOST_NOTE = 1000  # characters


@dataclass(frozen=True, slots=True)
class Spooled:
    """A finished update on disk."""

    offer: pb.UpdateOffer
    header: pb.UpdateHeader  # the one in the offer
    path: Path  # of the file
    start: int  # offset of the payload in the file, in bytes
    parts: Sequence[
        bytes | memoryview
    ] = ()  # the payload, in order, if this process made it; else it is read from disk
    made_here: bool = False  # whether this process made it
    unsent: Path | None = None  # the spool's file, if nothing of the update has left; None = some of it may have

    def leaves(self) -> None:
        """Note that some of the update is about to leave.

        A client that is killed then asks the server about it.
        """
        if self.unsent is None:
            return
        # If the note fails, the server still names the update in its answer to Join.
        with contextlib.suppress(OSError):
            _overwrite(self.unsent, bytes(1), _UNSENT_AT)

    @contextlib.contextmanager
    def reader(self) -> Iterator[Callable[[int, int], bytes | memoryview]]:
        """Provide a function (offset, size) that returns a payload's part."""
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
    """The spool in one state folder, which the caller has locked.

    It belongs to the user's thread.

    Args:
        folder: The folder.
        client: The client whose folder it is.
        on_dropped: Is called when a file of what updates have left was dropped, because it is damaged.
        audit: The table [audit] of the client.

    Attributes:
        kept: What accepted updates have left.
        ledger: The account of what this client has spent of its privacy.
        audit: The chained log of what this client has done.
    """

    def __init__(
        self,
        folder: Path,
        client: str,
        on_dropped: Callable[[], None] = lambda: None,
        audit: AuditTable = _NO_AUDIT,
    ) -> None:
        self.folder = folder
        self.kept = KeptFiles(folder, client, on_dropped)
        self.ledger = Ledger(folder)
        self.audit = Audit(audit, folder)
        self._update_file, self._payload_file = folder / "update", folder / "update.payload"
        self.payload_part.unlink(missing_ok=True)  # It was being put together when the process was killed.
        close_to_others(folder, *_KEPT)  # what earlier versions have left
        self._accepted_file = folder / "accepted"
        self._accepted = self._accepted_before()  # the newest accepted update that this folder knows of
        self._empty = False  # whether it certainly holds no update
        self._left = True  # whether there may be a file of what an update leaves

    @property
    def size(self) -> int:
        """The bytes of the update not accepted yet; 0 = none.

        Any thread may ask.
        """
        try:
            with self._update_file.open("rb") as file:
                prefix = file.read(_PREFIX.size)
                payload = self._payload_file.stat().st_size if prefix[2:3] == bytes([_APART]) else 0
                return os.fstat(file.fileno()).st_size + payload if any(prefix) else 0
        except OSError:
            return 0

    def pending(self) -> Spooled | None:
        """Return the update that is not accepted yet, if there is one.

        A damaged one is dropped.
        """
        if self._empty:
            return None
        try:
            with self._update_file.open("rb") as file:
                prefix = file.read(_PREFIX.size)
                if not any(prefix):
                    return None
                magic, version, unsent, length = _PREFIX.unpack(prefix)
                if unsent > 1 or magic != _MAGIC or version not in (_VERSION, _APART):
                    raise struct.error
                offer = pb.UpdateOffer.FromString(file.read(length))
                if not _name_matches(offer):  # The server could not be asked about it.
                    raise struct.error
                header, file_of = pb.UpdateHeader.FromString(offer.header), self._update_file if unsent else None
                if version == _APART and self._payload_file.stat().st_size == header.total_bytes:
                    return Spooled(offer, header, self._payload_file, 0, unsent=file_of)
                start = _PREFIX.size + length
                if version != _APART and start + header.total_bytes == os.fstat(file.fileno()).st_size:
                    return Spooled(offer, header, self._update_file, start, unsent=file_of)
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
        state: KeptState | None = None,
        *,
        durable: bool = False,
        version: int = _VERSION,
    ) -> Spooled:
        """Write an update to disk, in the place of any other.

        It is not synced: it need not survive a power loss.

        Args:
            offer: The header and the names of the update.
            parts: The payload, in order.
            state: The state that it leaves; None = what is kept stays as it is.
            durable: Whether what it leaves must survive a power loss.
            version: Of the file; 5 if the payload is in a file of its own.
        """
        header = pb.UpdateHeader.FromString(offer.header)
        facts = {"client": header.client_id, "round": header.round, "update": offer.name, "bytes": header.total_bytes}
        offer.audit_head = self.audit.note("sends", **facts)  # first: no update leaves that is not in the log
        if state is not None or self._left:
            self.drop()  # The old update must never be found together with what belongs to the new one.
        if state is not None and self.kept.spool(state, offer.name, durable=durable):
            self._left = True
            crashpoint("client_left_spooled")
        self._empty = False
        head = offer.SerializeToString()
        prefix = _PREFIX.pack(_MAGIC, version, 1, len(head))
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
        return Spooled(offer, header, self._update_file, start, parts, made_here=True, unsent=self._update_file)

    def adopt(self, offer: pb.UpdateOffer, payload: Path) -> Spooled:
        """Adopt an update whose payload is a file already.

        It takes the place of any other update, and leaves nothing.

        Args:
            offer: The header and the names of the update.
            payload: The file, in the folder of the spool. It is moved.
        """
        self.drop()
        payload.chmod(0o600)
        payload.replace(self._payload_file)
        spooled = self.write(offer, [], version=_APART)
        return replace(spooled, path=self._payload_file, start=0)

    @property
    def payload_part(self) -> Path:
        """Where to write the payload of an update that is then adopted."""
        return self.folder / "update.payload.part"

    def accept(self, spooled: Spooled) -> None:
        """Drop the accepted update, and make the state it leaves current.

        That is synced, so that this also holds after a power loss.
        """
        crashpoint("client_accepted")
        if self._left and self.kept.accept(spooled.offer.name, made_here=spooled.made_here):
            crashpoint("client_left_placed")
        self.drop()
        crashpoint("client_noted")

    def note_accepted(self, name: str, line: str) -> None:
        """Note the newest accepted update, and its line of models.

        It is on the disk only if there are files of other lines: they are still valid, although that update is newer.
        If the note gets lost, they are dropped, and not used wrongly.
        """
        self._accepted = name, line
        if self.kept.has_others(line):
            part = self._accepted_file.with_suffix(".part")
            with contextlib.suppress(OSError), open(part, "w", opener=private_opener) as file:
                file.write(f"{name}\n{line}")
                part.replace(self._accepted_file)

    def is_of_another_line(self, update: str, line: str) -> bool:
        """Return whether an accepted update was of another line."""
        name, other = self._accepted
        return (bool(update) and update == name and other != line) or self.kept.is_of_another(update, line)

    def _accepted_before(self) -> tuple[str, str]:
        try:
            name, _, line = self._accepted_file.read_text()[:_MOST_NOTE].partition("\n")
        except (OSError, UnicodeDecodeError):
            return "", ""
        return (name, line) if line else ("", "")

    def drop(self) -> None:
        """Drop the update, if there is one.

        What is kept stays as it was before.
        """
        if self._empty:
            return
        with contextlib.suppress(FileNotFoundError):
            _overwrite(self._update_file, _NONE, 0)
        if self._left:
            self.kept.drop()
        self._payload_file.unlink(missing_ok=True)
        self._empty, self._left = True, False


def _name_matches(offer: pb.UpdateOffer) -> bool:
    return update_name(offer.header, offer.payload_digest) == offer.name


def _overwrite(file: Path, data: bytes, at: int) -> None:
    """Write some bytes into a file that is there."""
    fd = os.open(file, os.O_WRONLY)
    try:
        os.pwrite(fd, data, at)
    finally:
        os.close(fd)


def _write_all(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    views = [memoryview(part) for part in parts]
    while views:
        written = os.writev(fd, views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]
