"""The masks that are left in a sum: with `fedring.secure` alone, and with clients that are lost in any step."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedring.secure.errors import SecureError
from fedring.secure.keys import RoundSecrets, draw_secrets, own_seed, pair_seed
from fedring.secure.limits import bits_of_sum, threshold
from fedring.secure.masks import mask, unwrap, wrap
from fedring.secure.roster import Roster, check_member, signed_keys
from fedring.secure.shamir import SHARE_BYTES, split
from fedring.secure.signing import Proof, public_bytes
from fedring.server.secure.combining import masks_of
from fedring.v1 import federation_pb2 as pb

VALUES, LEVELS = 37, 7
COMMAND = pb.TrainCmd(run_id="run", epoch=1, round=5)


@dataclass
class Party:
    """All clients of a group, with all that they know."""

    roster: Roster
    secrets: dict[str, RoundSecrets]
    masking: dict[str, list[bytes]]  # shares of each client's masking key, by place
    own_mask: dict[str, list[bytes]]
    inputs: dict[str, "np.ndarray[tuple[int], np.dtype[np.int64]]"]
    bits: int

    def masked(self, client: str, peers: Sequence[str]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Return what a client sends."""
        total = wrap(self.inputs[client], self.bits).astype(np.int64)
        secrets, digest = self.secrets[client], self.roster.digest
        total += mask(own_seed(secrets.own_mask, digest, client), self.bits, 0, VALUES)
        for peer in peers:
            if peer != client:
                other = self.roster.member(peer).masking
                seed = pair_seed(secrets.masking, other, digest, *sorted((client, peer)))
                total += (1 if client < peer else -1) * mask(seed, self.bits, 0, VALUES).astype(np.int64)
        return total

    def shares(self, client: str, peers: Sequence[str], survivors: Sequence[str]) -> list[bytes]:
        """Return what a client sends to remove masks."""
        place = self.roster.places[client] - 1
        return [(self.own_mask if peer in survivors else self.masking)[peer][place] for peer in peers]


def party(count: int) -> Party:
    names = sorted(f"client-{number}" for number in range(count))
    secrets = {name: draw_secrets() for name in names}
    members = []
    for name in names:
        key = Ed25519PrivateKey.generate()
        proof = Proof(public_key=public_bytes(key.public_key()))
        keys = signed_keys(COMMAND, name, secrets[name], key, proof)
        members.append(check_member(keys, COMMAND, lambda _name, _proof: None))
    t, rng = threshold(count), np.random.default_rng(count)
    return Party(
        Roster(tuple(members)),
        secrets,
        {name: split(secrets[name].masking, t, count) for name in names},
        {name: split(secrets[name].own_mask, t, count) for name in names},
        {name: rng.integers(-LEVELS, LEVELS + 1, VALUES) for name in names},
        bits_of_sum(count, LEVELS),
    )


def check_sum(group: Party, lost: Sequence[Sequence[str]]) -> None:
    """Assert that the sum is exact if these clients are lost: before the shares, the update, the end.

    Those that are lost before they send shares are members of the group, and nobody's peers.
    """
    names = list(group.roster.places)
    peers = [name for name in names if name not in lost[0]]
    survivors = [name for name in peers if name not in lost[1]]
    answer = [name for name in survivors if name not in lost[2]]
    shares = {name: group.shares(name, peers, survivors) for name in answer}
    masks = masks_of(group.roster, peers, survivors, shares, group.bits)
    assert masks.clients == tuple(survivors)
    total = np.sum([group.masked(name, peers) for name in survivors], axis=0)
    for seed, sign in masks.masks:
        total -= sign * mask(seed, group.bits, 0, VALUES).astype(np.int64)
    expected = np.sum([group.inputs[name] for name in survivors], axis=0)
    np.testing.assert_array_equal(unwrap(wrap(total, group.bits), group.bits), expected)


@pytest.mark.parametrize("count", [*range(3, 34), 100])
def test_the_sum_without_masks_is_exact_whoever_is_lost(count: int) -> None:
    group, rng = party(count), random.Random(count)
    spare = count - threshold(count)
    splits = [(a, b, spare - a - b) for a in range(spare + 1) for b in range(spare + 1 - a)]
    for sizes in [(0, 0, 0), *rng.sample(splits, min(len(splits), 2 if count > 12 else 4))]:
        lost = rng.sample(list(group.roster.places), sum(sizes))
        parts = [lost[: sizes[0]], lost[sizes[0] : sizes[0] + sizes[1]], lost[sizes[0] + sizes[1] :]]
        check_sum(group, parts)


def test_a_wrong_share_is_noticed() -> None:
    group = party(5)
    names = list(group.roster.places)
    survivors = names[:4]
    for place, bad in ((0, bytes(SHARE_BYTES)), (4, b"\xff" * SHARE_BYTES), (2, group.masking[names[2]][0])):
        shares = {name: group.shares(name, names, survivors) for name in survivors}
        shares[names[0]][place] = bad
        with pytest.raises(SecureError) as caught:
            masks_of(group.roster, names, survivors, shares, group.bits)
        assert caught.value.reason == "bad_unmask_shares"


def test_fewer_shares_than_the_threshold_give_no_mask() -> None:
    group = party(8)
    names = list(group.roster.places)
    shares = {name: group.shares(name, names, names) for name in names[: threshold(8) - 1]}
    with pytest.raises(SecureError):
        masks_of(group.roster, names, names, shares, group.bits)
