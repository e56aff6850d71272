"""A group of clients whose keys were checked.

It has the statements of all members, and a digest that names the group. Members sign a set of survivors, too.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from google.protobuf.message import DecodeError

from fedring.secure import SecureError
from fedring.secure.keys import RoundSecrets, commitment, public_key
from fedring.secure.limits import MAX_GROUP, MIN_GROUP, threshold
from fedring.secure.shamir import SECRET_BYTES
from fedring.signatures.digests import CONTEXT, digest_of, task_digest
from fedring.signatures.proofs import BadProof, PrivateKey, Proof, PublicKey, sign, verify
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

MAX_STATEMENT_BYTES = 2048
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")

CheckIdentity = Callable[[str, Proof], None]
"""Returns if a proof belongs to a client id, as far as its caller can tell; BadProof if not."""


@dataclass(frozen=True, slots=True)
class Member:
    """A client of a group, whose signature was checked."""

    client_id: str
    statement: bytes
    key: PublicKey  # checks its signatures
    sealing: bytes  # X25519 public keys, 32 bytes each
    masking: bytes
    own_mask: bytes  # the commitment to the seed of its own mask


@dataclass(frozen=True)
class Roster:
    """A group of clients, in rising order of client id.

    The place of the first member is 1.
    """

    members: tuple[Member, ...]

    @cached_property
    def digest(self) -> bytes:
        """The digest that names the group, 32 bytes."""
        return roster_digest([member.statement for member in self.members])

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each member, from 1, by client id.

        Shares belong to places.
        """
        return {member.client_id: place for place, member in enumerate(self.members, 1)}

    @property
    def threshold(self) -> int:
        """The number of members that must answer to the end."""
        return threshold(len(self.members))

    def member(self, client: str) -> Member:
        """Return a member; KeyError if there is none of that id."""
        return self.members[self.places[client] - 1]

    def ordered(self, clients: Sequence[str]) -> bool:
        """Return whether clients are members, each once, and in the roster's order."""
        places = [self.places.get(client, 0) for client in clients]
        return all(low < high for low, high in zip([0, *places], places, strict=False))


def signed_keys(
    command: pb.TrainCmd, client_id: str, secrets: RoundSecrets, key: PrivateKey, proof: Proof
) -> wire.SignedKeys:
    """Return a client's public keys for a round, signed.

    Args:
        command: of the round.
        client_id: of the client.
        secrets: of the client, for this round only.
        key: proves who the client is.
        proof: the proof for that key.
    """
    # The run, round and task are signed with the keys, so that the server can use them for no other round or task.
    statement = wire.KeyStatement(
        context=CONTEXT,
        client_id=client_id,
        run_id=command.run_id,
        epoch=command.epoch,
        round=command.round,
        task=task_digest(command),
        sealing_key=public_key(secrets.sealing),
        masking_key=public_key(secrets.masking),
        own_mask=commitment(secrets.own_mask),
    ).SerializeToString(deterministic=True)
    return wire.SignedKeys(
        statement=statement,
        signature=sign(key, statement),
        certificates=proof.certificates,
        public_key=proof.public_key,
    )


def check_member(signed: wire.SignedKeys, command: pb.TrainCmd, check_identity: CheckIdentity, task: bytes) -> Member:
    """Return a client of a group after checking its signed keys.

    Args:
        signed: its keys.
        command: of the round, as the caller knows it.
        check_identity: checks that the proof belongs to the client id.
        task: the digest of the command's task, which is the same for all members.

    Raises:
        SecureError: "bad_peer_keys" if the statement is malformed, "other_round" if it is of another round,
            "other_task" if the client was asked for something else than the caller, "bad_peer_signature" if it is not
            signed by its key, "unknown_peer" if the key is not that client's.
    """
    if len(signed.statement) > MAX_STATEMENT_BYTES:
        raise SecureError("bad_peer_keys", f"a statement of {len(signed.statement)} bytes is too long")
    try:
        said = wire.KeyStatement.FromString(signed.statement)
    except DecodeError:
        raise SecureError("bad_peer_keys", "a client's statement cannot be read") from None
    name = said.client_id
    lengths = {len(part) for part in (said.task, said.sealing_key, said.masking_key, said.own_mask)}
    if not _NAME.fullmatch(name) or lengths != {SECRET_BYTES} or said.sealing_key == said.masking_key:
        raise SecureError("bad_peer_keys", f"the statement of {name[:128]!r} is malformed")
    proof = Proof(tuple(signed.certificates), signed.public_key)
    try:
        key = proof.key()
        verify(key, signed.signature, signed.statement)
    except BadProof as error:
        raise SecureError("bad_peer_signature", f"the keys of {name} are not signed well: {error}") from error
    # The signature is good: now a replay from another round, then another task for this client, are told apart.
    if (said.context, said.run_id, said.epoch, said.round) != (CONTEXT, command.run_id, command.epoch, command.round):
        raise SecureError("other_round", f"the keys of {name} are of another round: {said.round} of {said.run_id[:64]}")
    if said.task != task:
        raise SecureError("other_task", f"{name} was given another model or another task in this round")
    try:
        check_identity(name, proof)
    except BadProof as error:
        raise SecureError("unknown_peer", f"the keys of {name} are not known to be its own: {error}") from error
    return Member(name, signed.statement, key, said.sealing_key, said.masking_key, said.own_mask)


def check_roster(message: wire.SecureRoster, command: pb.TrainCmd, check_identity: CheckIdentity) -> Roster:
    """Return the group of a roster message after checking every member.

    Raises:
        SecureError: "too_few_peers" if it is too small, "bad_roster" if it is too large, not in order or names a key
            twice, or as check_member.
    """
    count = len(message.members)
    if count < MIN_GROUP:
        raise SecureError(
            "too_few_peers", f"a group of {count} clients is too small to hide one: {MIN_GROUP} are needed"
        )
    if count > MAX_GROUP:
        raise SecureError("bad_roster", f"a group of {count} clients is above {MAX_GROUP}")
    # Once for all members: it serialises the whole command.
    task = task_digest(command)
    members = tuple(check_member(each, command, check_identity, task) for each in message.members)
    names = [member.client_id for member in members]
    keys = {key for member in members for key in (member.sealing, member.masking)}
    if names != sorted(set(names)) or len(keys) != 2 * count:
        raise SecureError("bad_roster", "the clients of a group are not in order, or two have the same keys")
    return Roster(members)


def roster_digest(statements: Sequence[bytes]) -> bytes:
    """Return the digest that names a group, 32 bytes.

    Args:
        statements: of its members, in rising order of client id.
    """
    return digest_of("roster", statements)


def survivors_statement(roster: bytes, peers: Sequence[str], survivors: Sequence[str]) -> bytes:
    """Return the statement that a client signs before helping to unmask.

    Args:
        roster: the digest of its group.
        peers: all members whose shares have come in time, with itself, in the roster's order.
        survivors: those of them whose updates count, in the roster's order.
    """
    names = [wire.SecureSurvivors(client_ids=ids).SerializeToString(deterministic=True) for ids in (peers, survivors)]
    return digest_of("survivors", [roster, *names])
