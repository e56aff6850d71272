"""Pure functions of one client's secrets and its group's keys."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedring.secure import SecureError
from fedring.secure.keys import SEALED_BYTES, RoundSecrets, own_seed, pair_seed, seal, share_digests, share_key, unseal
from fedring.secure.limits import fewest_survivors
from fedring.secure.masks import Words, mask, word_type, wrap
from fedring.secure.roster import Roster
from fedring.secure.shamir import split
from fedring.signatures.proofs import BadProof, verify
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

PIECE = 1 << 20
"""Values that are masked at a time."""

Shares = tuple[bytes, bytes]
"""The shares of a client's masking key, and of the seed of its own mask."""


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """The keys of one client in its group."""

    client_id: str
    roster: Roster
    secrets: RoundSecrets

    def share(self, round_: int) -> tuple[wire.SecureShares, Shares]:
        """Return the shares of this client's secrets.

        Returns:
            Those of the others, each sealed for its holder, and this client's own.
        """
        roster, count, own = self.roster, len(self.roster.members), (b"", b"")
        masking = split(self.secrets.masking, roster.threshold, count)
        own_mask = split(self.secrets.own_mask, roster.threshold, count)
        shares = wire.SecureShares(round=round_)
        for place, member in enumerate(roster.members):
            pair = masking[place], own_mask[place]
            if member.client_id == self.client_id:
                own = pair
                continue
            self._pair_seed(member.client_id)  # refuses a key that cannot be used, while there is time
            key = share_key(self.secrets.sealing, member.sealing, roster.digest, self.client_id, member.client_id)
            digests = share_digests(roster.digest, self.client_id, member.client_id, *pair)
            shares.shares.add(client_id=member.client_id, sealed=seal(key, *pair), digests=digests)
        return shares, own

    def open(self, message: wire.SecurePeers) -> dict[str, Shares]:
        """Return each peer's unsealed shares.

        Raises:
            SecureError: "bad_share" if one does not open, or is not what the server was told.
        """
        roster, opened = self.roster, dict[str, Shares]()
        for each in message.shares:
            if len(each.sealed) != SEALED_BYTES:
                text = f"the sealed shares of {each.client_id} are {len(each.sealed)} bytes long"
                raise SecureError("bad_share", text)
            sealing = roster.member(each.client_id).sealing
            key = share_key(self.secrets.sealing, sealing, roster.digest, each.client_id, self.client_id)
            try:
                pair = opened[each.client_id] = unseal(key, each.sealed)
            except SecureError as error:
                raise SecureError(error.reason, f"{error}: {each.client_id} sealed it") from error
            # Whoever gives out a share that the server was told otherwise would be taken for a liar.
            if share_digests(roster.digest, each.client_id, self.client_id, *pair) != each.digests:
                raise SecureError("bad_share", f"{each.client_id} has sealed other shares than it has told the server")
        return opened

    def mask(self, integers: NDArray[np.signedinteger], bits: int, peers: Sequence[str]) -> Words:
        """Return an update's integers under all masks of this client.

        They are [n] modulo 2^bits.

        Args:
            integers: The integers, [n].
            bits: Of a masked value.
            peers: This client and its peers.
        """
        me, roster = self.client_id, self.roster
        # A pair's mask is added by the first of the two, and subtracted by the other.
        seeds = [(self._pair_seed(peer), 1 if me < peer else -1) for peer in peers if peer != me]
        seeds.append((own_seed(self.secrets.own_mask, roster.digest, me), 1))
        words: Words = np.empty(len(integers), word_type(bits))
        for start in range(0, len(integers), PIECE):
            stop = min(start + PIECE, len(integers))
            piece = wrap(integers[start:stop], bits)
            for seed, sign in seeds:
                (np.add if sign > 0 else np.subtract)(piece, mask(seed, bits, start, stop), out=piece)
            words[start:stop] = piece
        return words

    def _pair_seed(self, peer: str) -> bytes:
        first, second = sorted((self.client_id, peer))
        masking = self.roster.member(peer).masking
        return pair_seed(self.secrets.masking, masking, self.roster.digest, first, second)


def check_survivors(names: Sequence[str], peers: Sequence[str], roster: Roster, job: pb.JobSpec) -> None:
    """Check the clients whose updates are to count.

    Args:
        names: The clients.
        peers: This client and its peers.
        roster: The group.
        job: The job.

    Raises:
        SecureError: "bad_survivors" if they are not peers, in order, or are too few.
    """
    needed = fewest_survivors(len(roster.members), job.min_results if job.dp else 0)
    if not roster.ordered(names) or not set(names) <= set(peers):
        raise SecureError("bad_survivors", "the survivors are not peers of this client, in order")
    if len(names) < needed:
        raise SecureError("bad_survivors", f"{len(names)} clients have survived: {needed} are needed")


def to_release(shares: Mapping[str, Shares], peers: Sequence[str], survivors: Collection[str]) -> list[bytes]:
    """Return the shares that unmask the survivors' sum.

    They are in the order of the peers. Never both of one client: with both, the server could read its update.
    """
    return [own_mask if name in survivors else masking for name in peers for masking, own_mask in [shares[name]]]


def check_signatures(message: wire.SecureUnmask, roster: Roster, survivors: Sequence[str], statement: bytes) -> None:
    """Check that enough survivors have signed the same survivors.

    Args:
        message: The signatures.
        roster: The group.
        survivors: The clients whose updates count.
        statement: The statement that they sign.

    Raises:
        SecureError: "bad_survivors" if others have signed, "bad_peer_signature" if a signature is not of these
            survivors, "too_few_signatures" if they are fewer than the threshold.
    """
    signers = [each.client_id for each in message.signatures]
    if not roster.ordered(signers) or not set(signers) <= set(survivors):
        raise SecureError("bad_survivors", "those who have signed are not survivors, each once and in order")
    for each in message.signatures:
        try:
            verify(roster.member(each.client_id).key, each.signature, statement)
        except BadProof as error:
            text = f"{each.client_id} has not signed these survivors: {error}"
            raise SecureError("bad_peer_signature", text) from error
    if len(signers) < roster.threshold:
        text = f"{len(signers)} survivors have signed: {roster.threshold} are needed"
        raise SecureError("too_few_signatures", text)
