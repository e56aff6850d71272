"""The protocol state of one client in one round of secure aggregation.

It takes the server's messages, and returns the answers. Everything that must not differ when it is said again is
written durably before it is returned: secrets before keys, sealed shares before they are sent, the peers before
anything is masked, the name of the payload before its first byte is sent, the survivors before they are signed, and the
answer that removes masks before it is given. So a process that was killed answers with the same bytes. A second message
of a kind, with another content, is refused.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from fedring.client.policy.identity import Signer
from fedring.client.secure.group_keys import GroupKeys, Shares, check_signatures, check_survivors, to_release
from fedring.client.secure.state import RoundRecord, SecureState, name_of
from fedring.daemon.crash import crashpoint
from fedring.secure import SecureError
from fedring.secure.keys import RoundSecrets, commitment, draw_secrets
from fedring.secure.levels import bits_of
from fedring.secure.masks import MAX_BITS, Words
from fedring.secure.roster import CheckIdentity, Roster, check_roster, signed_keys, survivors_statement
from fedring.secure.shamir import SHARE_BYTES
from fedring.signatures.digests import task_digest
from fedring.signatures.proofs import Proof, sign
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

M = TypeVar("M", bound=Message)

CRASH_POINTS = {
    f"client_secure_{step}" for step in ("begun", "roster", "peers", "payload", "survivors", "noted", "released")
}
"""Crash points at which a step is on the disk, and nothing of it was said."""


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """The client's identity and demands in a round."""

    client_id: str
    signer: Signer
    check_identity: CheckIdentity  # says who may be a peer
    min_clients: int = 0  # fewest clients of a group, and fewest survivors, that this site helps to add up
    strict: bool = False  # whether it refuses to be asked for two sums that differ by few updates


class SecureParticipant:
    """One client in one round. Any thread may use it.

    Args:
        command: what the server has asked for.
        identity: of the client.
        state: its files.

    Raises:
        SecureError: "other_task" if the round began with another task, "damaged_state" if its file is damaged.
        OSError: if its file cannot be written.
    """

    def __init__(self, command: pb.TrainCmd, identity: ClientIdentity, state: SecureState) -> None:
        self.command = pb.TrainCmd()
        self.command.CopyFrom(command)
        self.command.ClearField("model")
        self.name = name_of(command)
        self.task = task_digest(command)
        self._identity, self._state = identity, state
        self._sums = state.released.sums(command.model_digest, identity.min_clients, strict=identity.strict)
        self._lock = threading.Lock()
        record = state.load(self.name)
        if record is None:
            secrets = draw_secrets()
            record = RoundRecord(self.command.SerializeToString(), secrets.sealing, secrets.masking, secrets.own_mask)
            keys = signed_keys(self.command, identity.client_id, secrets, identity.signer.key, identity.signer.proof)
            record.keys = keys.SerializeToString()
            state.save(self.name, record)
            crashpoint("client_secure_begun")
        elif task_digest(pb.TrainCmd.FromString(record.command)) != self.task:
            raise SecureError("other_task", f"the server has shown two models or two tasks in round {self.name.round}")
        self._record = record

    def keys(self) -> wire.SecureKeys:
        """Return this client's keys, which are always the same."""
        return wire.SecureKeys(round=self.name.round, keys=_parse(wire.SignedKeys, self._record.keys))

    def on_roster(self, message: wire.SecureRoster) -> wire.SecureShares:
        """Check the group, and return this client's sealed shares.

        They are the shares of its secrets, sealed for the members.

        Raises:
            SecureError: "other_roster" if another group was taken before, "bad_roster" if this client's own keys are
                not in it as they were sent, "privacy_policy" if it is too small for this site, or as check_roster.
            OSError: if the file cannot be written.
        """
        data = message.SerializeToString(deterministic=True)
        with self._lock:
            if not self._is_new("roster", data):
                return _parse(wire.SecureShares, self._record.shares)
            roster = check_roster(message, self.command, self._identity.check_identity)
            own = _parse(wire.SignedKeys, self._record.keys)
            if own not in message.members:
                raise SecureError("bad_roster", "this client's own keys are not in its group as it has sent them")
            _check_enough(self._identity, len(roster.members), "a group")
            if not self.command.job.dp and bits_of(self.command.secure, len(roster.members)) > MAX_BITS:
                raise SecureError("bad_roster", f"sums of {len(roster.members)} clients need more than {MAX_BITS} bits")
            shares, own_shares = self._keys_in(roster).share(self.name.round)
            self._keep(roster=data, shares=shares.SerializeToString(), own_shares=b"".join(own_shares))
            return shares

    def on_peers(self, message: wire.SecurePeers) -> None:
        """Check and keep the shares sealed by others.

        This client may mask its update then.

        Raises:
            SecureError: "other_peers" if others were taken before, "too_few_peers" if they are fewer than the
                threshold, "bad_peers" if they are not members of the group, "bad_share" if one does not open or is not
                what the server was told, "privacy_policy" if they are too few for this site.
            OSError: if the file cannot be written.
        """
        data = message.SerializeToString(deterministic=True)
        with self._lock:
            if not self._is_new("peers", data):
                return
            roster = self.roster
            names = [each.client_id for each in message.shares]
            if not roster.ordered(names) or self._identity.client_id in names:
                raise SecureError("bad_peers", "the peers are not other clients of the group, in order")
            if len(names) + 1 < roster.threshold:
                text = (
                    f"{len(names) + 1} of {len(roster.members)} clients have sent shares: {roster.threshold} are needed"
                )
                raise SecureError("too_few_peers", text)
            _check_enough(self._identity, len(names) + 1, "peers")
            self._keys_in(roster).open(message)
            self._keep(peers=data)

    @property
    def may_mask(self) -> bool:
        """Whether the peers are known."""
        return bool(self._record.peers)

    @property
    def masks(self) -> bytes:
        """The commitment to this round's masks, 32 bytes.

        This client has told everybody of it.
        """
        return commitment(self._record.own_mask)

    def mask(self, integers: NDArray[np.signedinteger], bits: int) -> Words:
        """Return an update's integers under all masks of this client.

        They are [n] modulo 2^bits.

        Args:
            integers: of the update, and its weight if weights count, or private integers [n].
            bits: of a masked value.

        Raises:
            SecureError: "bad_peers" if the peers are not known yet, "lost_masked_update" if the masks were used.
        """
        with self._lock:
            self._check_unused()
            keys, peers = self._keys_in(self.roster), self._peers
        return keys.mask(integers, bits, peers)

    def bind(self, payload: str) -> None:
        """Bind the masks to one payload, which may be sent then.

        Args:
            payload: its name.

        Raises:
            SecureError: "lost_masked_update" if they are bound to another one.
            OSError: if the file cannot be written.
        """
        with self._lock:
            if self._record.payload != payload.encode():
                self._check_unused()
                self._keep(payload=payload.encode())

    def on_survivors(self, message: wire.SecureSurvivors) -> wire.SurvivorsSignature:
        """Return this client's signature of the survivors.

        They are the clients whose updates count.

        Raises:
            SecureError: "other_survivors" if others were taken before, "bad_survivors" if they are not peers, too few,
                or without this client or its update, "privacy_policy" if they are too few for this site,
                "other_identity" if this client's key was replaced since it has sent its keys, or as Sums.check().
            OSError: if the file cannot be written.
        """
        data = message.SerializeToString(deterministic=True)
        with self._lock:
            if self._is_new("survivors", data):
                names, peers, roster = list(message.client_ids), self._peers, self.roster
                check_survivors(names, peers, roster, self.command.job)
                if self._identity.client_id not in names or not self._record.payload:
                    text = "this client is not among the survivors, or has sent no update"
                    raise SecureError("bad_survivors", text)
                _check_enough(self._identity, len(names), "a sum")
                self._sums.check(names)
                key = self._identity.signer
                if key.proof.key() != roster.member(self._identity.client_id).key:
                    raise SecureError("other_identity", "the key of this client was replaced while the round went on")
                statement = survivors_statement(roster.digest, peers, names)
                self._keep(survivors=data, signature=sign(key.key, statement))
            return wire.SurvivorsSignature(round=self.name.round, signature=self._record.signature)

    def on_unmask(self, message: wire.SecureUnmask) -> wire.UnmaskShares:
        """Return the shares that remove the masks.

        It checks before that enough survivors have signed the same survivors. They are of each survivor the share of
        the seed of its own mask, and of each lost peer that of its masking key: never both of one client.

        Raises:
            SecureError: "bad_survivors" if survivors were not taken before, or others have signed,
                "bad_peer_signature" if one of the signatures is not of these survivors, "too_few_signatures" if they
                are fewer than the threshold, or as Sums.check().
            OSError: if a file cannot be written.
        """
        with self._lock:
            if not self._record.released:
                if not self._record.survivors:
                    text = "the server wants masks removed before it has said who survived"
                    raise SecureError("bad_survivors", text)
                roster, peers = self.roster, self._peers
                survivors = list(_parse(wire.SecureSurvivors, self._record.survivors).client_ids)
                check_signatures(message, roster, survivors, survivors_statement(roster.digest, peers, survivors))
                # Noted before any share leaves: later demands for another sum of this model are checked against it.
                self._sums.note(survivors)
                answer = wire.UnmaskShares(round=self.name.round, shares=to_release(self.shares(), peers, survivors))
                self._keep(released=answer.SerializeToString())
            return _parse(wire.UnmaskShares, self._record.released)

    def shares(self) -> dict[str, Shares]:
        """Return the held shares of this client and its peers, by client.

        The server must never learn both shares of one client.
        """
        held = self._keys_in(self.roster).open(_parse(wire.SecurePeers, self._record.peers))
        own = self._record.own_shares
        return held | {self._identity.client_id: (own[:SHARE_BYTES], own[SHARE_BYTES:])}

    @cached_property
    def roster(self) -> Roster:
        """The group.

        Raises:
            SecureError: "bad_roster" if it is not known yet.
        """
        if not self._record.roster:
            raise SecureError("bad_roster", "the server has sent a later step before the group")
        # Who the members are was checked before the group was written; a certificate may have expired since.
        return check_roster(_parse(wire.SecureRoster, self._record.roster), self.command, _checked_before)

    def _keys_in(self, roster: Roster) -> GroupKeys:
        record = self._record
        secrets = RoundSecrets(record.sealing, record.masking, record.own_mask)
        return GroupKeys(self._identity.client_id, roster, secrets)

    @property
    def _peers(self) -> list[str]:
        """This client and its peers, in the roster's order."""
        if not self._record.peers:
            raise SecureError("bad_peers", "the server has sent a later step before the peers")
        others = {each.client_id for each in _parse(wire.SecurePeers, self._record.peers).shares}
        return [name for name in self.roster.places if name in others or name == self._identity.client_id]

    def _is_new(self, kind: str, data: bytes) -> bool:
        known = getattr(self._record, kind)
        if known and known != data:
            raise SecureError(f"other_{kind}", f"the server has sent another {kind} for round {self.name.round} before")
        return not known

    def _keep(self, **values: bytes) -> None:
        """Write values durably, and use them from then on only."""
        known = {name: getattr(self._record, name) for name in RoundRecord.__slots__}
        record = RoundRecord(**known | values)
        self._state.save(self.name, record)
        self._record = record
        crashpoint(f"client_secure_{next(iter(values))}")

    def _check_unused(self) -> None:
        if self._record.payload:
            raise lost_update(self.name.round)


def _check_enough(identity: ClientIdentity, count: int, what: str) -> None:
    if count < identity.min_clients:
        text = f"this site's privacy.min_clients = {identity.min_clients} is above {what} of {count} clients"
        raise SecureError("privacy_policy", text)


def lost_update(round_: int) -> SecureError:
    """Return the error of a lost update whose masks are bound.

    The masks may not cover another update.
    """
    text = f"the update of round {round_} is lost, and its masks may not cover another one"
    return SecureError("lost_masked_update", text)


def _checked_before(name: str, proof: Proof) -> None:
    """Accept every identity."""


def _parse(kind: Callable[[], M], data: bytes) -> M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise SecureError("damaged_state", "the file of the round holds a message that cannot be read") from error
    return message
