"""What a client of secure aggregation refuses: groups, peers, survivors and signatures that cannot be true."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.secure_sums import (
    Client,
    Group,
    anybody,
    command_of,
    integers,
    names_of,
    new_signer,
    peers_of,
    refused,
    roster_of,
    secret_of,
    survivors_of,
    unmask_of,
)

from fedring.client.secure import participant as participant_module
from fedring.client.secure.participant import ClientIdentity, SecureParticipant
from fedring.secure import SecureError
from fedring.secure.keys import SEALED_BYTES, commitment
from fedring.secure.shamir import BadShares, combine
from fedring.v1 import secure_pb2 as wire

NAMES = names_of(4)

pytestmark = pytest.mark.usefixtures("fast_disk")


def _swapped(group: Group) -> wire.SecureRoster:
    """Return the roster with a masking key of the server's in the place of one of a client's."""
    roster = group.roster
    statement = wire.KeyStatement.FromString(roster.members[1].statement)
    statement.masking_key = bytes(range(32))
    roster.members[1].statement = statement.SerializeToString(deterministic=True)
    return roster


def _without(group: Group, *names: str) -> wire.SecureRoster:
    return roster_of({name: keys for name, keys in group.keys.items() if name not in names})


def _resigned(group: Group, **command: Any) -> wire.SecureRoster:
    """Return a roster in which a client has signed keys for another command."""
    client = Client("c001", group.clients["c001"].folder)
    return roster_of(group.keys | {"c001": client.party(command_of(**command)).keys()})


def _twice(group: Group) -> wire.SecureRoster:
    roster = group.roster
    return wire.SecureRoster(members=[roster.members[0], *roster.members])


ROSTERS: dict[str, tuple[str, Callable[[Group], wire.SecureRoster]]] = {
    "a swapped key": ("bad_peer_signature", _swapped),
    "without the client": ("bad_roster", lambda group: _without(group, "c000")),
    "of two": ("too_few_peers", lambda group: _without(group, "c002", "c003")),
    "empty": ("too_few_peers", lambda group: wire.SecureRoster()),
    "with a client twice": ("bad_roster", _twice),
    "out of order": ("bad_roster", lambda group: wire.SecureRoster(members=group.roster.members[::-1])),
    "of another round": ("other_round", lambda group: _resigned(group, round_=2)),
    "of another epoch": ("other_round", lambda group: _resigned(group, epoch=1)),
    "of another run": ("other_round", lambda group: _resigned(group, run="other")),
    "of another task": ("other_task", lambda group: _resigned(group, levels=8)),
    "of rubbish": ("bad_peer_keys", lambda group: wire.SecureRoster(members=[wire.SignedKeys(statement=b"x")] * 3)),
    "of long statements": (
        "bad_peer_keys",
        lambda group: wire.SecureRoster(members=[wire.SignedKeys(statement=bytes(9000))] * 3),
    ),
    "of too many": ("bad_roster", lambda group: wire.SecureRoster(members=[*group.roster.members] * 26)),
}


@pytest.mark.parametrize("lie", ROSTERS)
def test_a_roster_that_lies_is_refused(make_group: Callable[..., Group], lie: str) -> None:
    group = make_group(4)
    group.send_keys()
    reason, roster = ROSTERS[lie]
    with refused(reason):
        group.party("c000").on_roster(roster(group))
    assert len(group.party("c000").on_roster(group.roster).shares) == 3


def test_a_key_of_low_order_is_refused(make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(3)
    names = names_of(3)
    group.keys = {name: group.party(name).keys() for name in names[:2]}
    monkeypatch.setattr("fedring.secure.roster.public_key", lambda private: bytes([private[0] & 1, *bytes(31)]))
    monkeypatch.setattr(participant_module, "draw_secrets", lambda: _Low())
    group.keys["c002"] = group.party("c002").keys()
    with refused("bad_peer_keys"):
        group.party("c000").on_roster(group.roster)


class _Low:
    sealing, masking, own_mask = b"\0" * 32, b"\1" * 32, b"\2" * 32


def test_a_group_is_bound_once(make_group: Callable[..., Group]) -> None:
    group = make_group(4)
    group.send_keys()
    first = group.party("c000").on_roster(group.roster)
    with refused("other_roster"):
        group.party("c000").on_roster(_without(group, "c003"))
    assert group.again("c000").on_roster(group.roster) == first


def _sealed(group: Group, change: Callable[[bytes], bytes]) -> wire.SecurePeers:
    peers = peers_of(group.shares, "c000")
    peers.shares[1].sealed = change(peers.shares[1].sealed)
    return peers


def _mixed(group: Group) -> wire.SecurePeers:
    """Return peers in which one's shares come as another's."""
    peers = peers_of(group.shares, "c000")
    peers.shares[1].sealed = peers.shares[0].sealed
    return peers


def _peers(group: Group, *names: str) -> wire.SecurePeers:
    sealed = peers_of(group.shares, "c000").shares[0].sealed
    return wire.SecurePeers(shares=[wire.SealedShares(client_id=name, sealed=sealed) for name in names])


def _other_digests(group: Group) -> wire.SecurePeers:
    """Return peers of which one has told the server other digests than those of the shares that it has sealed."""
    peers = peers_of(group.shares, "c000")
    digests = peers.shares[1].digests
    peers.shares[1].digests = digests[:-1] + bytes([digests[-1] ^ 1])
    return peers


def _one_bit_off(sealed: bytes) -> bytes:
    return sealed[:-1] + bytes([sealed[-1] ^ 1])


PEERS: dict[str, tuple[str, Callable[[Group], wire.SecurePeers]]] = {
    "that do not open": ("bad_share", lambda group: _sealed(group, _one_bit_off)),
    "of another": ("bad_share", _mixed),
    "truncated": ("bad_share", lambda group: _sealed(group, lambda sealed: sealed[:-1])),
    "empty": ("bad_share", lambda group: _sealed(group, lambda sealed: b"")),
    "too long": ("bad_share", lambda group: _sealed(group, lambda sealed: sealed + bytes(100_000))),
    "other than their digests": ("bad_share", _other_digests),
    "too few": ("too_few_peers", lambda group: _peers(group, "c001")),
    "nobody": ("too_few_peers", lambda group: wire.SecurePeers()),
    "a stranger": ("bad_peers", lambda group: _peers(group, "c001", "c002", "x")),
    "the client itself": ("bad_peers", lambda group: _peers(group, "c000", "c001", "c002")),
    "twice": ("bad_peers", lambda group: _peers(group, "c001", "c001", "c002")),
    "out of order": ("bad_peers", lambda group: _peers(group, "c002", "c001", "c003")),
}


@pytest.mark.parametrize("lie", PEERS)
def test_peers_that_cannot_be_are_refused(make_group: Callable[..., Group], lie: str) -> None:
    group = make_group(4)
    group.share()
    reason, peers = PEERS[lie]
    with refused(reason):
        group.party("c000").on_peers(peers(group))
    assert not group.again("c000").may_mask
    with refused("bad_peers"):
        group.party("c000").mask(np.zeros(4, np.int32), group.bits)


def test_a_client_that_seals_nonsense_is_named(make_group: Callable[..., Group]) -> None:
    group = make_group(4)
    group.share()
    peers = peers_of(group.shares, "c000")
    peers.shares[1].sealed = bytes(len(peers.shares[1].sealed))
    with pytest.raises(SecureError, match="c002 sealed it"):
        group.party("c000").on_peers(peers)


def test_peers_are_bound_once(make_group: Callable[..., Group]) -> None:
    group = make_group(4).exchange()
    with refused("other_peers"):
        group.again("c000").on_peers(peers_of({name: group.shares[name] for name in NAMES[:3]}, "c000"))


def test_steps_out_of_order_are_refused(make_group: Callable[..., Group]) -> None:
    early, group = make_group(4, round_=2).party("c000"), make_group(4).exchange()
    with refused("bad_roster"):
        early.on_peers(peers_of(group.shares, "c000"))
    with refused("bad_peers"):
        early.on_survivors(survivors_of(NAMES))
    with refused("bad_survivors"):
        early.on_unmask(wire.SecureUnmask())
    with refused("bad_survivors"):  # this client has sent no update yet
        group.party("c000").on_survivors(survivors_of(NAMES))


SURVIVORS: dict[str, list[str]] = {
    "too few": NAMES[:2],
    "nobody": [],
    "without the client": NAMES[1:],
    "with a stranger": [*NAMES, "x"],
    "with a client twice": [NAMES[0], *NAMES],
}


@pytest.mark.parametrize("lie", SURVIVORS)
def test_survivors_that_cannot_be_are_refused(make_group: Callable[..., Group], lie: str) -> None:
    group = make_group(4).send_all()
    with refused("bad_survivors"):
        group.party("c000").on_survivors(wire.SecureSurvivors(client_ids=SURVIVORS[lie]))
    with refused("bad_survivors"):
        group.party("c000").on_survivors(wire.SecureSurvivors(client_ids=NAMES[::-1]))
    group.party("c000").on_survivors(survivors_of(NAMES))


def test_a_client_that_has_lost_its_key_does_not_sign(make_group: Callable[..., Group]) -> None:
    group = make_group(4).send_all()
    client = group.clients["c000"]
    with refused("other_identity"):
        SecureParticipant(group.command, ClientIdentity("c000", new_signer(), anybody), client.state).on_survivors(
            survivors_of(NAMES)
        )


def _signatures(group: Group, names: list[str]) -> wire.SecureUnmask:
    return wire.SecureUnmask(
        signatures=[wire.SignedBy(client_id=name, signature=group.signatures[name].signature) for name in names]
    )


def _forged(group: Group) -> wire.SecureUnmask:
    unmask = unmask_of(group.signatures)
    unmask.signatures[1].signature = unmask.signatures[2].signature
    return unmask


UNMASK: dict[str, tuple[str, Callable[[Group], wire.SecureUnmask]]] = {
    "too few": ("too_few_signatures", lambda group: _signatures(group, NAMES[:2])),
    "none": ("too_few_signatures", lambda group: wire.SecureUnmask()),
    "one twice": ("bad_survivors", lambda group: _signatures(group, [NAMES[0], NAMES[1], NAMES[1]])),
    "forged": ("bad_peer_signature", _forged),
    "long": (
        "bad_peer_signature",
        lambda group: wire.SecureUnmask(signatures=[wire.SignedBy(client_id="c001", signature=bytes(9000))]),
    ),
    "a stranger's": (
        "bad_survivors",
        lambda group: wire.SecureUnmask(signatures=[wire.SignedBy(client_id="x", signature=b"s")]),
    ),
}


@pytest.mark.parametrize("lie", UNMASK)
def test_masks_are_not_removed_without_the_signatures_of_enough_survivors(
    make_group: Callable[..., Group], lie: str
) -> None:
    group = make_group(4).send_all().sign()
    reason, unmask = UNMASK[lie]
    with refused(reason):
        group.party("c000").on_unmask(unmask(group))
    assert np.array_equal(group.unmask().total, np.sum(list(integers(NAMES).values()), axis=0))


def test_signatures_of_other_survivors_are_refused(make_group: Callable[..., Group]) -> None:
    names = names_of(5)
    group = make_group(5).exchange().send(integers(names))
    for name in names[:2]:
        group.signatures[name] = group.party(name).on_survivors(survivors_of(names))
    for name in names[2:4]:
        group.signatures[name] = group.party(name).on_survivors(survivors_of(names[:4]))
    for name in names[:4]:
        with refused("bad_peer_signature"):
            group.party(name).on_unmask(unmask_of(group.signatures))


def test_a_server_that_wants_both_kinds_of_shares_of_a_client_cannot_unmask_it(
    make_group: Callable[..., Group],
) -> None:
    names, victim = names_of(5), 4
    group = make_group(5).exchange().send(integers(names_of(5)))
    signed = {name: group.party(name).on_survivors(survivors_of(names)) for name in names}
    with_victim = {name: group.party(name).on_unmask(unmask_of(signed)) for name in names}
    for name in names[:4]:
        with refused("other_survivors"):
            group.again(name).on_survivors(survivors_of(names[:4]))
        assert group.again(name).on_unmask(unmask_of(signed)) == with_victim[name]
    # The server has the seed of the victim's own mask, and no share of its masking key: that mask stays.
    own_mask = secret_of(group.group, victim, with_victim)
    assert commitment(own_mask) == group.group.members[victim].own_mask
    told = b"".join(each.SerializeToString() for each in with_victim.values())
    for name in names:
        masking, own = group.party(name).shares()[names[victim]]
        assert (masking in told, own in told) == (False, True)


def test_too_few_answers_say_nothing(make_group: Callable[..., Group]) -> None:
    group = make_group(4).send_all().sign().unmask(lost=2)
    with pytest.raises(BadShares):
        secret_of(group.group, 0, group.answers)
    assert combine({1: b"\0" * 66, 2: b"\0" * 66}) == bytes(32)


@pytest.mark.parametrize("least", [4, 5])
def test_a_site_says_with_how_many_others_it_is_added_up(tmp_path: Path, least: int) -> None:
    clients = {name: Client(name, tmp_path) for name in names_of(5)}
    clients["c000"] = Client("c000", tmp_path, min_clients=least)
    names = names_of(5)
    group = Group(clients, command_of()).exchange().send(integers(names[:4]))
    if least == 4:
        group.party("c000").on_survivors(survivors_of(names[:4]))
    else:
        with refused("privacy_policy"):
            group.party("c000").on_survivors(survivors_of(names[:4]))
    small = Group(clients, command_of(round_=2))
    small.keys = {name: small.party(name).keys() for name in names[: least - 1]}
    with refused("privacy_policy"):
        small.party("c000").on_roster(small.roster)
    few = Group(clients, command_of(round_=3))
    few.keys = {name: few.party(name).keys() for name in names}
    few.shares = {name: few.party(name).on_roster(few.roster) for name in names}
    if least == 5:
        with refused("privacy_policy"):
            few.party("c000").on_peers(peers_of({name: few.shares[name] for name in names[:4]}, "c000"))


def test_sealed_shares_have_one_length(make_group: Callable[..., Group]) -> None:
    group = make_group(3).exchange()
    assert {len(each.sealed) for each in group.shares["c000"].shares} == {SEALED_BYTES}
