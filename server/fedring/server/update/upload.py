"""One update on its way into the server, without I/O.

`Upload` is a state machine: each event that goes in is answered with the one effect that is to be performed next. What
performs it (`fedring.server.service.uploads`) reports the result as the next event. A refusal is raised.

    Offered ► LookUp ► Known ──► Done                                 the update was accepted before
                         └─► AskRound ► Terms ► Open ► Opened ► Send ► Sent ─┐
     ┌───────────────────────────────────────────────────────────────────────┘
     └► Read ► Chunk ► Write ► Written ► Read ... TakeDigest ► Digested ► Admit ► Admitted ► Accept ► Accepted ► Done

If the round refuses the update after it was opened (TooLate), the machine looks once more whether it was accepted: an
attempt of the same client before this one may have ended its round. An update that comes in one message needs no
machine: there is nothing to wait for between its checks (`fedring.server.service.upload_calls`).
"""

from dataclasses import dataclass

from fedring.codec.digest import name_of
from fedring.codec.schema import Schema
from fedring.rpc.chunks import CHUNK_BYTES
from fedring.rpc.contract import SMALL_BYTES
from fedring.rpc.errors import (
    BadRequest,
    Damaged,
    DamagedOnTheWay,
    TooLarge,
    UnknownRound,
)
from fedring.server.aggregation.terms import OpaqueForm, Terms
from fedring.server.state.rows import PacketSpec, UpdateRow
from fedring.server.update.admission import Admission, accepted_before, check_offer, check_sender, open_offer, row_of
from fedring.v1 import federation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Offered:
    """The client has offered an update."""

    offer: pb.UpdateOffer


@dataclass(frozen=True, slots=True)
class Known:
    """The name of the client's accepted update for this round.

    Empty if there is none.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Opened:
    """The payload has a place, which holds `size` bytes already."""

    size: int


@dataclass(frozen=True, slots=True)
class ReplySent:
    """The client was told where to go on."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The client has sent part of the payload."""

    offset: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Ended:
    """The client has ended its side of the stream."""


@dataclass(frozen=True, slots=True)
class Written:
    """The bytes of the last chunk are in their place."""


@dataclass(frozen=True, slots=True)
class Digested:
    """The name of all bytes that were received."""

    digest: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """Every byte of the payload was found good."""

    norm: float  # L2, of the parameters' delta, or of the weights if these were sent; 0 if it is opaque
    at: float  # wall clock, seconds
    payload: bytes = b""  # what the row keeps; empty if a blob does


@dataclass(frozen=True, slots=True)
class Accepted:
    """The update is durable; `already` if it had been accepted before."""

    already: bool
    head: str = ""  # of the server's receipts


@dataclass(frozen=True, slots=True)
class TooLate:
    """The round does not, or no longer, take the update."""

    error: UnknownRound


Event = (
    Offered | Known | Terms | Opened | ReplySent | Chunk | Ended | Written | Digested | Admitted | Accepted | TooLate
)


@dataclass(frozen=True, slots=True)
class LookUp:
    """Look up the client's accepted update in a round.

    The answer is Known, with the update's name.
    """

    run_id: str
    round: int


@dataclass(frozen=True, slots=True)
class AskRound:
    """Ask the round in progress for its terms (Terms, or TooLate)."""

    run_id: str
    round: int


@dataclass(frozen=True, slots=True)
class Open:
    """Open a place for the payload.

    The answer is Opened. The place is a file of that name, or memory if it has none.
    """

    name: str
    fresh: bool = False  # forget what the file holds


@dataclass(frozen=True, slots=True)
class Send:
    """Tell the client the next byte of the payload to send.

    The answer is Sent.
    """

    offset: int


@dataclass(frozen=True, slots=True)
class Read:
    """Wait for the client's next message.

    The answer is Chunk or Ended, or TooLate if the round has closed meanwhile.
    """

    run_id: str
    round: int


@dataclass(frozen=True, slots=True)
class Write:
    """Append bytes to the payload (Written)."""

    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class TakeDigest:
    """Ask for the digest of all received bytes.

    The answer is Digested.
    """


@dataclass(frozen=True, slots=True)
class Admit:
    """Check every byte of the payload (Admitted)."""

    packets: tuple[PacketSpec, ...]
    schema: Schema
    exact: bool = False  # whether the norm must be added up in float64
    opaque: OpaqueForm | None = None  # the form of an update that the server cannot open


@dataclass(frozen=True, slots=True)
class Accept:
    """Accept the update durably (Accepted, or TooLate)."""

    row: UpdateRow
    client_head: str = ""  # of the client's own log


@dataclass(frozen=True, slots=True)
class Done:
    """The update is accepted; `already` if it had been before."""

    already: bool
    head: str = ""  # of the server's receipts


Effect = LookUp | AskRound | Open | Send | Read | Write | TakeDigest | Admit | Accept | Done


class Upload:
    """One update of one client; belongs to the call that brings it.

    Args:
        client_id: the client that makes the call.
        epoch: the server's; it goes into the update's row.

    Attributes:
        spoilt: whether the bytes that were received must not be kept for another attempt.
    """

    def __init__(self, client_id: str, epoch: int) -> None:
        self.spoilt = False
        self._client_id, self._epoch = client_id, epoch
        self._size = self._resumed = 0
        self._terms: Terms | None = None  # known as soon as the header was found good
        self._late: UnknownRound | None = None

    def handle(self, event: Event) -> Effect:
        """Take an event in.

        Args:
            event: what has happened; the events follow each other as in the module's drawing.

        Returns:
            What is to be done next.

        Raises:
            FedringError, CodecError: if the update is refused; `spoilt` then says what to do with its bytes.
        """
        match event:
            case Offered(offer):
                return self._offered(offer)
            case Known(name):
                return self._known(name)
            case Terms():
                return self._check(event)
            case Opened(size):
                return self._opened(size)
            case ReplySent() | Written():
                complete = self._size == self._header.total_bytes
                return TakeDigest() if complete else Read(self._header.run_id, self._header.round)
            case Chunk(offset, data):
                return self._chunk(offset, data)
            case Ended():
                text = f"the stream ended at {self._size} of {self._header.total_bytes} bytes"
                raise BadRequest(text, reason="truncated")
            case Digested(digest):
                return self._digested(digest)
            case Admitted():
                terms = self._terms
                if terms is None:
                    raise ValueError("a payload was admitted before its header")
                found = Admission(self._packets, event.norm, event.at)
                row = row_of(self._offer, terms, found, event.payload, epoch=self._epoch)
                return Accept(row, self._offer.audit_head)
            case Accepted(already, head):
                return Done(already, head)
            case TooLate(error):
                return self._too_late(error)

    def _offered(self, offer: pb.UpdateOffer) -> Effect:
        self._offer = open_offer(offer)
        self._header = self._offer.header
        check_sender(self._header, self._client_id)
        return self._look_up()

    def _look_up(self) -> LookUp:
        return LookUp(self._header.run_id, self._header.round)

    def _known(self, name: str) -> Effect:
        if accepted_before(self._offer, name):
            return Done(already=True)
        if self._late is not None:
            raise self._late
        return AskRound(self._header.run_id, self._header.round)

    def _check(self, terms: Terms) -> Open:
        """Check the header before any byte of the payload is used."""
        header = self._header
        self._packets = check_offer(header, terms)
        self._terms = terms
        if header.total_bytes <= SMALL_BYTES:  # its row will keep it
            return Open("")
        # One file for each client and round, whatever the digest: a client cannot fill the disk with beginnings.
        self._place = f"{header.round}-{name_of(header.client_id.encode())[-32:]}"
        return Open(self._place)

    def _opened(self, size: int) -> Effect:
        if size > self._header.total_bytes:
            return Open(self._place, fresh=True)
        self._size = self._resumed = size
        return Send(size)

    def _chunk(self, offset: int, data: bytes | memoryview) -> Write:
        if not 0 < len(data) <= CHUNK_BYTES or offset != self._size:
            raise BadRequest(f"expected 1 to {CHUNK_BYTES} bytes at {self._size}", reason="bad_chunk")
        if self._size + len(data) > self._header.total_bytes:
            self.spoilt = True
            raise TooLarge(f"more than the declared {self._header.total_bytes} bytes")
        self._size += len(data)
        return Write(data)

    def _digested(self, digest: str) -> Admit:
        if digest == self._offer.digest and (terms := self._terms) is not None:
            return Admit(self._packets, terms.schema, exact=terms.bare, opaque=terms.opaque)
        self.spoilt = True
        if self._resumed:  # what lay here before may have been damaged by a power loss, or have been of another payload
            raise Damaged("the part that was here is not of this payload: send it from the start")
        raise DamagedOnTheWay("the payload is not what its digest says: send it again")

    def _too_late(self, error: UnknownRound) -> LookUp:
        if self._terms is None:
            raise error
        self._late = error
        return self._look_up()
