"""The unmasking of a group: seeds of the masks in its sum.

These are the masks that have not cancelled out in the sum of the group's updates.

Nothing that clients have sent is trusted. Each secret that their shares give is compared with what its owner has signed
beforehand, and each share with the digest that its owner has told when it was dealt. So a wrong share does not end the
round while enough are right, and it is always known whose it is:

* A client has checked all that was dealt to it against the same digests, before it went on. If it gives out a share
  that does not fit, it lies, and nobody else.
* If all shares fit and do not give the secret, its owner has dealt shares that belong to none.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from fedring.secure.keys import DIGEST_BYTES, commitment, own_seed, pair_seed, public_key, share_digest
from fedring.secure.roster import Roster
from fedring.secure.shamir import BadShares, combine, correct
from fedring.server.model.masked_sum import GroupMasks

MOST_TRIES = 100
"""How often wrong shares that nobody can tell from right ones are looked for in a group, at most: 20 ms each."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """The members' knowledge of each other before their masks are removed."""

    roster: Roster
    peers: Sequence[str]  # members for which updates were masked, in the roster's order
    survivors: Sequence[str]  # those of them whose updates count, in the same order
    digests: Mapping[str, Mapping[str, bytes]]  # of the shares that each peer has dealt, by peer and receiver


@dataclass(slots=True)
class Unmasking:
    """The result of combining a group's shares."""

    masks: GroupMasks | None = None  # None = a secret is not known
    liars: dict[str, str] = field(default_factory=dict)  # clauses on the fault of each, by client
    unknown: list[str] = field(default_factory=list)  # peers whose secrets are not known


def unmask(agreed: Agreed, answers: Mapping[str, Sequence[bytes]], bits: int) -> Unmasking:
    """Return the masks left in the survivors' sum, and the liars.

    The liars are the clients that have sent wrong shares.

    The masks of two survivors for each other have cancelled out. What is left is each survivor's own mask, and each
    survivor's masks for the peers that were lost after they had sealed their shares.

    Args:
        agreed: the members' knowledge of each other.
        answers: by client, one share for each peer, in the same order; of the threshold's number of clients or more.
        bits: of a masked value.
    """
    places, done = agreed.roster.places, Unmasking()
    order = sorted(answers, key=places.__getitem__)
    tries = iter(range(MOST_TRIES))
    wrong: Counter[str] = Counter()  # shares that each client has given out
    masks: list[tuple[bytes, int]] = []
    for number, peer in enumerate(agreed.peers):
        given = {client: answers[client][number] for client in order}
        right = _as_dealt(agreed, peer, given)
        wrong.update(given.keys() - right.keys())
        shares = {places[client]: share for client, share in right.items()}
        if len(shares) < agreed.roster.threshold:
            done.unknown.append(peer)
            continue
        fits = _fits(agreed, peer)
        secret = _first(shares, agreed.roster.threshold, fits)
        if secret is None:
            done.liars[peer] = "the shares that it has dealt do not give the secret that it has signed"
            others = {place: share for place, share in shares.items() if place != places[peer]}  # it has no digest
            secret = _first(others, agreed.roster.threshold, fits)
            secret = secret or _corrected(shares, agreed.roster.threshold, fits, tries)
        if secret is None:
            done.unknown.append(peer)
        else:
            masks += _masks(agreed, peer, secret)
    for client, count in wrong.items():
        done.liars[client] = f"{count} of the {len(agreed.peers)} shares that it gave out are not those dealt to it"
    if not done.unknown:
        survivors = tuple(agreed.survivors)
        done.masks = GroupMasks(name=survivors[0], clients=survivors, bits=bits, masks=tuple(masks))
    return done


def _as_dealt(agreed: Agreed, maker: str, given: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the shares of a peer's secret that match its digests.

    By client; the peer's own share is taken as it is.
    """
    own_mask, told = maker in agreed.survivors, agreed.digests[maker]
    kept = slice(DIGEST_BYTES, None) if own_mask else slice(DIGEST_BYTES)
    name = agreed.roster.digest
    return {
        holder: share
        for holder, share in given.items()
        if holder == maker or share_digest(name, maker, holder, share, own_mask=own_mask) == told[holder][kept]
    }


def _fits(agreed: Agreed, peer: str) -> Callable[[bytes], bool]:
    """Return a check that a secret is the one its owner signed."""
    member = agreed.roster.member(peer)
    if peer in agreed.survivors:
        return lambda secret: commitment(secret) == member.own_mask
    return lambda secret: public_key(secret) == member.masking


def _first(shares: Mapping[int, bytes], threshold: int, fits: Callable[[bytes], bool]) -> bytes | None:
    """Return the secret that the first of the shares give.

    None if they give none, or another one than the owner has signed.
    """
    try:
        secret = combine(dict(islice(shares.items(), threshold)))
    except BadShares:
        return None
    return secret if fits(secret) else None


def _corrected(
    shares: Mapping[int, bytes], threshold: int, fits: Callable[[bytes], bool], tries: Iterator[int]
) -> bytes | None:
    """Return the secret of shares, some of them wrong.

    None if it is not found with the tries that are left.

    If an odd number of shares is above the threshold, one wrong share more can be corrected without each of them.
    """
    odd = (len(shares) - threshold) % 2 == 1
    for left_out in (0, *(shares if odd else ())):
        if next(tries, None) is None:
            return None
        rest = {place: share for place, share in shares.items() if place != left_out}
        secret = correct(rest, threshold)
        if secret is not None and fits(secret):
            return secret
    return None


def _masks(agreed: Agreed, peer: str, secret: bytes) -> Iterator[tuple[bytes, int]]:
    """Return the masks from a peer's secret, with their signs.

    The sign is +1 for those that were added, -1 for others.

    Of a survivor it is the mask that it has added for itself, of a lost peer are those that survivors have for it.
    """
    roster = agreed.roster
    if peer in agreed.survivors:
        yield own_seed(secret, roster.digest, peer), 1
        return
    for survivor in agreed.survivors:
        first, second = sorted((survivor, peer))
        seed = pair_seed(secret, roster.member(survivor).masking, roster.digest, first, second)
        yield seed, 1 if survivor == first else -1
