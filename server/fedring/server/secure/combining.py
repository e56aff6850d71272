"""What the unmasking of a group gives: the seeds of all masks that are left in the sum of its updates.

Nothing that clients have sent is trusted: each secret that their shares give is compared with what its owner has
signed beforehand.
"""

from collections.abc import Iterator, Mapping, Sequence

from fedring.secure.errors import SecureError
from fedring.secure.keys import commitment, own_seed, pair_seed, public_key
from fedring.secure.roster import Roster
from fedring.secure.shamir import BadShares, combine
from fedring.server.model.masked_sum import GroupMasks


def masks_of(
    roster: Roster,
    peers: Sequence[str],
    survivors: Sequence[str],
    shares: Mapping[str, Sequence[bytes]],
    bits: int,
) -> GroupMasks:
    """Return the masks that the sum of the survivors' updates still holds.

    The masks of two survivors for each other have cancelled out. What is left is each survivor's own mask, and each
    survivor's masks for the peers that were lost after they had sealed their shares.

    Args:
        roster: the group.
        peers: the members for which updates were masked, in the roster's order.
        survivors: those of them whose updates count, in the same order.
        shares: by client, one share for each peer, in the same order; of the threshold's number of clients or more.
        bits: of a masked value.

    Raises:
        SecureError: "bad_unmask_shares", if the shares do not give what a client has signed.
    """
    chosen = sorted(shares, key=roster.places.__getitem__)[: roster.threshold]
    secrets = {
        peer: _secret(peer, {roster.places[client]: shares[client][place] for client in chosen})
        for place, peer in enumerate(peers)
    }
    masks = [
        mask
        for peer in peers
        for mask in (_own if peer in survivors else _pairs)(roster, peer, secrets[peer], survivors)
    ]
    return GroupMasks(name=survivors[0], clients=tuple(survivors), bits=bits, masks=tuple(masks))


def _own(roster: Roster, client: str, secret: bytes, _survivors: Sequence[str]) -> Iterator[tuple[bytes, int]]:
    """Return the mask that a survivor has added for itself."""
    if commitment(secret) != roster.member(client).own_mask:
        raise _wrong(client)
    yield own_seed(secret, roster.digest, client), 1


def _pairs(roster: Roster, client: str, secret: bytes, survivors: Sequence[str]) -> Iterator[tuple[bytes, int]]:
    """Return the masks that the survivors have added, or subtracted, for a client that was lost."""
    if public_key(secret) != roster.member(client).masking:
        raise _wrong(client)
    for survivor in survivors:
        first, second = sorted((survivor, client))
        seed = pair_seed(secret, roster.member(survivor).masking, roster.digest, first, second)
        yield seed, 1 if survivor == first else -1


def _secret(client: str, shares: Mapping[int, bytes]) -> bytes:
    try:
        return combine(shares)
    except BadShares:
        raise _wrong(client) from None


def _wrong(client: str) -> SecureError:
    return SecureError("bad_unmask_shares", f"the shares of {client}'s secret do not give what {client} has signed")
