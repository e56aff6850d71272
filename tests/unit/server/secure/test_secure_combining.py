"""The masks that are left in a sum: with `fedring.secure` alone, with clients that are lost, and with clients that lie.

In all tests of liars, `unmask` may name those that lied, and nobody else.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedring.secure.keys import RoundSecrets, draw_secrets, own_seed, pair_seed, share_digests
from fedring.secure.limits import bits_of_sum, threshold
from fedring.secure.masks import mask, unwrap, wrap
from fedring.secure.roster import Roster, check_member, signed_keys
from fedring.secure.shamir import PRIME, SHARE_BYTES, split
from fedring.server.secure import combining
from fedring.server.secure.combining import Agreed, Unmasking, unmask
from fedring.signatures.digests import task_digest
from fedring.signatures.proofs import Proof, public_bytes
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

    def agreed(self, peers: Sequence[str], survivors: Sequence[str]) -> Agreed:
        """Return what the server knows before masks are removed: the digests are those of the shares as they are."""
        name = self.roster.digest
        digests = {
            peer: {
                other: share_digests(name, peer, other, self.masking[peer][place - 1], self.own_mask[peer][place - 1])
                for other, place in self.roster.places.items()
                if other != peer
            }
            for peer in peers
        }
        return Agreed(self.roster, peers, survivors, digests)


def party(count: int) -> Party:
    names = sorted(f"client-{number}" for number in range(count))
    secrets = {name: draw_secrets() for name in names}
    members = []
    for name in names:
        key = Ed25519PrivateKey.generate()
        proof = Proof(public_key=public_bytes(key.public_key()))
        keys = signed_keys(COMMAND, name, secrets[name], key, proof)
        members.append(check_member(keys, COMMAND, lambda _name, _proof: None, task_digest(COMMAND)))
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
    done = unmask(group.agreed(peers, survivors), shares, group.bits)
    assert done.liars == {}
    check_masks(group, done, peers, survivors)


def check_masks(group: Party, done: Unmasking, peers: Sequence[str], survivors: Sequence[str]) -> None:
    """Assert that masks make the sum of masked updates the exact sum."""
    masks = done.masks
    assert masks is not None
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


BAD = {"zero": bytes(SHARE_BYTES), "above the prime": b"\xff" * SHARE_BYTES, "empty": b""}


class Answers:
    """What the survivors of a group answer if the last peer is lost, before a test makes some of it wrong."""

    def __init__(self, count: int) -> None:
        self.group = party(count)
        self.names = list(self.group.roster.places)
        self.survivors = self.names[:-1] if count > threshold(count) else self.names
        self.shares = {name: self.group.shares(name, self.names, self.survivors) for name in self.survivors}

    def done(self) -> Unmasking:
        return unmask(self.group.agreed(self.names, self.survivors), self.shares, self.group.bits)

    def deal(self, maker: str, holders: Sequence[str], share: bytes) -> None:
        """Let a client deal a wrong share of both its secrets, and let it tell the server so."""
        for name in holders:
            place = self.group.roster.places[name] - 1
            self.group.masking[maker][place] = self.group.own_mask[maker][place] = share
        self.shares = {name: self.group.shares(name, self.names, self.survivors) for name in self.survivors}

    def check(self, *liars: str) -> None:
        """Assert that the sum is exact, and who is named."""
        done = self.done()
        assert sorted(done.liars) == sorted(liars)
        check_masks(self.group, done, self.names, self.survivors)


@pytest.mark.parametrize("bad", BAD)
def test_one_wrong_share_costs_nothing_but_the_name_of_who_gave_it_out(bad: str) -> None:
    answers = Answers(8)
    kept = {name: list(shares) for name, shares in answers.shares.items()}
    for liar in answers.survivors:
        for place, owner in enumerate(answers.names):
            answers.shares = {name: list(shares) for name, shares in kept.items()}
            answers.shares[liar][place] = BAD[bad]
            done = answers.done()
            # Nobody but the liar itself can tell what its share of its own secret must be, and it may not be used.
            assert set(done.liars) == {liar} or (owner == liar and not done.liars)
            check_masks(answers.group, done, answers.names, answers.survivors)


@pytest.mark.parametrize("count", [8, 12, 33])
def test_as_many_may_lie_as_the_group_can_spare(count: int) -> None:
    answers, rng = Answers(count), random.Random(count)
    liars = rng.sample(answers.survivors, len(answers.survivors) - threshold(count))
    for liar in liars:
        answers.shares[liar] = [rng.randbytes(SHARE_BYTES - 1) + b"\0" for _ in answers.names]
    answers.check(*liars)


def test_liars_that_agree_do_not_make_an_honest_client_look_like_one() -> None:
    # Two wrong shares can be such that the first shares still give the secret, and all others do not fit them.
    answers = Answers(12)
    first = [answers.group.roster.places[name] for name in answers.survivors[: threshold(12)]]
    weights = dict(zip(first, _weights_at_zero(first), strict=True))
    one, two = answers.survivors[:2]
    for place in range(len(answers.names)):
        values = {name: int.from_bytes(answers.shares[name][place], "little") for name in (one, two)}
        values[one] += weights[2]
        values[two] -= weights[1]
        for name, value in values.items():
            answers.shares[name][place] = (value % PRIME).to_bytes(SHARE_BYTES, "little")
    answers.check(one, two)


def _weights_at_zero(places: Sequence[int]) -> list[int]:
    weights = []
    for place in places:
        value = 1
        for other in places:
            if other != place:
                value = value * other * pow(other - place, -1, PRIME) % PRIME
        weights.append(value)
    return weights


def test_too_many_liars_are_named_and_nobody_else() -> None:
    answers = Answers(8)
    liars = answers.survivors[2:4]  # 7 have survived, and 6 right shares are needed
    for liar in liars:
        answers.shares[liar] = [bytes(SHARE_BYTES)] * 8
    done = answers.done()
    assert done.masks is None
    assert sorted(done.liars) == liars
    assert set(done.unknown) == set(answers.names)
    assert "7 of the 8 shares that it gave out" in done.liars[liars[0]]  # its own is not dealt to it


def test_a_group_without_spare_shares_still_knows_who_lied() -> None:
    answers = Answers(3)
    answers.shares[answers.names[1]][0] = bytes(SHARE_BYTES)
    done = answers.done()
    assert done.masks is None
    assert set(done.liars) == {answers.names[1]}
    assert done.unknown == [answers.names[0]]


@pytest.mark.parametrize("count", [5, 8, 12])
def test_who_deals_a_wrong_share_is_named_and_not_who_gives_it_out(count: int) -> None:
    answers = Answers(count)
    maker, holder = answers.survivors[2], answers.survivors[0]
    answers.deal(maker, [holder], bytes(SHARE_BYTES))
    if len(answers.survivors) > threshold(count):
        return answers.check(maker)
    done = answers.done()
    assert (done.masks, set(done.liars), done.unknown) == (None, {maker}, [maker])


def test_a_lost_client_that_has_dealt_wrong_shares_is_named() -> None:
    answers = Answers(12)
    lost = answers.names[-1]
    answers.deal(lost, answers.survivors[3:4], b"\xff" * SHARE_BYTES)
    answers.check(lost)


def test_half_of_the_spare_shares_of_a_secret_may_be_dealt_wrong() -> None:
    answers = Answers(33)
    maker, spare = answers.survivors[5], len(answers.survivors) - threshold(33)
    wrong = (spare + 1) // 2
    answers.deal(maker, answers.survivors[8 : 8 + wrong], bytes(SHARE_BYTES))
    answers.check(maker)
    answers.deal(maker, answers.survivors[8 : 9 + wrong], bytes(SHARE_BYTES))
    done = answers.done()
    assert (done.masks, set(done.liars), done.unknown) == (None, {maker}, [maker])


def test_who_deals_and_who_gives_out_wrong_shares_are_both_named() -> None:
    answers = Answers(12)
    maker, giver = answers.survivors[2], answers.survivors[7]
    answers.deal(maker, answers.survivors[:1], bytes(SHARE_BYTES))
    answers.shares[giver] = [bytes(SHARE_BYTES)] * 12
    answers.check(maker, giver)


def test_what_liars_can_make_the_server_compute_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, tries = Answers(8), []
    for maker in answers.names:
        answers.deal(maker, [name for name in answers.names if name != maker], bytes(SHARE_BYTES))
    monkeypatch.setattr(combining, "MOST_TRIES", 9)
    monkeypatch.setattr(combining, "correct", lambda *_: tries.append(1))
    done = answers.done()
    assert sorted(done.liars) == answers.names
    assert len(tries) == 9


def test_fewer_shares_than_the_threshold_give_no_mask() -> None:
    group = party(8)
    names = list(group.roster.places)
    shares = {name: group.shares(name, names, names) for name in names[: threshold(8) - 1]}
    done = unmask(group.agreed(names, names), shares, group.bits)
    assert (done.masks, done.liars, done.unknown) == (None, {}, names)
