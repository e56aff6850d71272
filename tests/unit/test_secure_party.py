"""One client in a round of secure aggregation: its sums are exact, it says nothing twice in two ways, and remembers."""

import json
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.secure_sums import (
    LEVELS,
    Client,
    Group,
    anybody,
    command_of,
    names_of,
    new_signer,
    peers_of,
    roster_of,
    secret_of,
    survivors_of,
    unmask_of,
)

from fedring.client.secure import party as party_module
from fedring.client.secure.party import Party, Site
from fedring.client.secure.state import FOLDER, SecureState, name_of
from fedring.daemon.config import ConfigError
from fedring.secure import masks as masks_module
from fedring.secure import sealing as sealing_module
from fedring.secure.errors import SecureError
from fedring.secure.keys import commitment
from fedring.secure.limits import threshold
from fedring.secure.sealing import SEALED_BYTES
from fedring.secure.shamir import BadShares, combine
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

COUNT = 37  # values of an update, which are no whole number of eights


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write without waiting for the disk; that it waits is the business of `fedring.daemon.durable`."""
    monkeypatch.setattr("os.fsync", lambda fd: None)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Group]:
    """Return a function that makes a group of so many clients in one round."""

    def group(count: int, **command: Any) -> Group:
        return Group({name: Client(name, tmp_path) for name in names_of(count)}, command_of(**command))

    return group


def integers(names: Iterable[str], most: int = LEVELS) -> dict[str, NDArray[np.int32]]:
    """Return the update of each client, of integers up to `most`."""
    drawn = np.random.default_rng(5)
    values = {name: drawn.integers(-most, most, COUNT, dtype=np.int32, endpoint=True) for name in names}
    values[min(values)][:2] = most, -most
    return values


def refused(reason: str) -> Any:
    """Expect an error with this reason."""
    return pytest.raises(SecureError, check=lambda error: error.reason == reason)


@pytest.mark.parametrize("count", [*range(3, 14), 33, 100])
def test_a_sum_is_exact_whoever_is_lost_on_the_way(make: Callable[..., Group], count: int) -> None:
    group, names = make(count), names_of(count)
    lost = np.random.default_rng(count).multinomial(count - threshold(count), [0.25] * 4)
    sent = integers(names[: count - lost[0] - lost[1]])
    group.exchange(names, lost=lost[0]).send(sent).sign(lost=lost[2]).unmask(lost=lost[3])
    assert np.array_equal(group.total, np.sum(list(sent.values()), axis=0))


def test_weights_widen_the_sum(make: Callable[..., Group]) -> None:
    group, names = make(4, max_weight=1000), names_of(4)
    sent = integers(names, LEVELS * 1000)
    assert group.exchange(names).party(names[0]).bits == (2 * 4 * 1000 * LEVELS).bit_length()
    assert np.array_equal(group.send(sent).sign().unmask().total, np.sum(list(sent.values()), axis=0))


def test_a_long_update_is_masked_in_pieces(make: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    group, names = make(3), names_of(3)
    sent = integers(names)
    group.exchange(names)
    whole = group.party(names[0]).mask(sent[names[0]])
    monkeypatch.setattr(party_module, "PIECE", 16)
    assert np.array_equal(group.party(names[0]).mask(sent[names[0]]), whole)
    assert not np.array_equal(whole & 63, sent[names[0]] & 63)


@given(data=st.data())
def test_a_process_that_is_killed_between_any_two_steps_says_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder, names = tmp_path_factory.mktemp("round"), names_of(4)
    group = Group({name: Client(name, folder) for name in names}, command_of())
    kept: dict[str, Party] = {}

    def party(name: str) -> Party:
        if name not in kept or data.draw(st.booleans(), label=f"{name} is killed"):
            kept[name] = group.again(name)
        return kept[name]

    group.party = party
    sent = integers(names)
    assert np.array_equal(group.exchange(names).send(sent).sign().unmask().total, np.sum(list(sent.values()), axis=0))
    for name in names:
        again = group.again(name)
        assert again.keys() == group.keys[name]
        assert again.on_roster(group.roster) == group.shares[name]
        again.on_peers(peers_of(group.shares, name))
        again.bind(f"payload of {name}")
        assert again.on_survivors(survivors_of(names)) == group.signatures[name]
        assert again.on_unmask(unmask_of(group.signatures)) == group.answers[name]


def test_no_key_seals_two_texts_and_no_mask_covers_two_updates(
    make: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: dict[bytes, set[bytes]] = defaultdict(set)
    covered: dict[tuple[str, bytes], set[bytes]] = defaultdict(set)
    seal, mask = sealing_module.seal, masks_module.mask
    now: list[tuple[str, bytes]] = []

    def sealing(key: bytes, masking: bytes, own_mask: bytes) -> bytes:
        texts[key].add(masking + own_mask)
        return seal(key, masking, own_mask)

    def masking(seed: bytes, *place: int) -> Any:
        covered[now[-1][0], seed].add(now[-1][1])
        return mask(seed, *place)

    monkeypatch.setattr(party_module, "seal", sealing)
    monkeypatch.setattr(party_module, "mask", masking)
    names = names_of(5)
    for round_ in (1, 2):
        group = make(5, round_=round_)
        group.party = group.again
        group.exchange(names)
        sent = integers(names)
        for name in names:
            now.append((name, sent[name].tobytes()))
            group.send({name: sent[name]})
            now.append((name, b"another update"))
            with refused("lost_masked_update"):
                group.again(name).mask(sent[name] + 1)
            group.again(name).on_roster(group.roster)
            group.again(name).on_peers(peers_of(group.shares, name))
    assert len(texts) == 2 * 5 * 4
    assert len(covered) == 2 * 5 * 5
    assert all(len(each) == 1 for each in (*texts.values(), *covered.values()))


class Step:
    """A step of a round: what has happened before, and what a client is told then."""

    def __init__(self, name: str, before: Callable[[Group], object], take: Callable[[Group, Party], object]) -> None:
        self.name, self.before, self.take = name, before, take


NAMES = names_of(4)
STEPS = [
    Step("roster", lambda group: _keys(group), lambda group, party: party.on_roster(group.roster)),
    Step("peers", lambda group: _shares(group), lambda group, party: party.on_peers(peers_of(group.shares, NAMES[0]))),
    Step("payload", lambda group: group.exchange(NAMES), lambda group, party: party.bind("payload")),
    Step("survivors", lambda group: _sent(group), lambda group, party: party.on_survivors(survivors_of(NAMES))),
    Step(
        "unmask", lambda group: _sent(group).sign(), lambda group, party: party.on_unmask(unmask_of(group.signatures))
    ),
]


def _unmask(group: Group) -> wire.SecureUnmask:
    return unmask_of(group.signatures)


def _keys(group: Group) -> None:
    group.keys = {name: group.party(name).keys() for name in NAMES}


def _shares(group: Group) -> None:
    _keys(group)
    group.shares = {name: group.party(name).on_roster(group.roster) for name in NAMES}


def _sent(group: Group) -> Group:
    return group.exchange(NAMES).send(integers(NAMES))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_nothing_is_said_that_is_not_on_the_disk(
    make: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, step: Step
) -> None:
    group = make(4)
    step.before(group)
    (file,) = (group.clients[NAMES[0]].folder / FOLDER).iterdir()
    before = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(SecureState, "save", _full)
        with pytest.raises(OSError, match="full"):
            step.take(group, group.party(NAMES[0]))
    assert file.read_bytes() == before
    first = step.take(group, group.party(NAMES[0]))
    assert file.read_bytes() != before
    assert step.take(group, group.again(NAMES[0])) == first


def test_no_keys_go_out_that_are_not_on_the_disk(make: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SecureState, "save", _full)
    with pytest.raises(OSError, match="full"):
        make(3).again("c000")


def _full(*_: object) -> None:
    raise OSError("the disk is full")


def test_only_the_owner_can_read_the_secrets_and_they_end_with_the_round(make: Callable[..., Group]) -> None:
    group = make(4)
    _sent(group)
    client = group.clients[NAMES[0]]
    folder = client.folder / FOLDER
    (file,) = folder.iterdir()
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(folder.stat().st_mode)) == (0o600, 0o700)
    client.state.finish(name_of(group.command))
    assert [path.name for path in folder.iterdir()] == ["finished.json"]


def test_a_round_that_is_over_does_not_begin_again(make: Callable[..., Group]) -> None:
    state = make(3).clients["c000"].state
    name = name_of(command_of(round_=7, epoch=2))
    state.finish(name, "other_peers")
    for epoch, round_, over in ((2, 7, True), (2, 6, True), (1, 9, True), (2, 8, False), (3, 1, False)):
        assert bool(state.finished(name._replace(epoch=epoch, round=round_))) is over
    assert state.finished(name._replace(run_id="other")) is None
    last = state.finished(name)
    assert last
    assert last.reason == "other_peers"
    with refused("replayed_round"):
        make(3, round_=7, epoch=2).again("c000")
    make(3, round_=8, epoch=2).again("c000")


def test_a_party_does_not_write_its_secrets_again_after_the_round(make: Callable[..., Group]) -> None:
    group = make(4)
    _keys(group)
    client = group.clients[NAMES[0]]
    party = Party(group.command, client.site, state := client.state)
    state.finish_others(name_of(command_of(round_=2)))
    with refused("replayed_round"):
        party.on_roster(group.roster)
    assert [path.name for path in (client.folder / FOLDER).iterdir()] == ["finished.json"]


def test_a_file_that_is_damaged_anywhere_ends_the_round(make: Callable[..., Group]) -> None:
    group = make(3)
    group.exchange(names_of(3))
    (file,) = (group.clients["c000"].folder / FOLDER).iterdir()
    whole = file.read_bytes()
    for place in range(0, len(whole), 97):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with refused("damaged_state"):
            group.again("c000")
        file.write_bytes(whole[:place])
        with refused("damaged_state"):
            group.again("c000")


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": [1]}', '{"a": ["x", 2, ""]}', "\xff"])
def test_a_damaged_list_of_finished_rounds_is_an_error_at_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "finished.json").write_text(text)
    with pytest.raises(ConfigError, match="finished"):
        SecureState(tmp_path)


def test_only_the_newest_runs_are_remembered(tmp_path: Path) -> None:
    state = SecureState(tmp_path)
    for run in range(260):
        state.finish(name_of(command_of(run=f"run-{run}")))
    assert len(json.loads((tmp_path / FOLDER / "finished.json").read_text())) == 256
    assert state.finished(name_of(command_of(run="run-259")))


def test_two_tasks_in_one_round_are_refused(make: Callable[..., Group]) -> None:
    group = make(3)
    group.party("c000")
    for field, value in (("model_digest", "other"), ("lr", 0.5), ("seed", 3)):
        other = pb.TrainCmd()
        other.CopyFrom(group.command)
        setattr(other, field, value)
        with refused("other_task"):
            group.clients["c000"].party(other)
    again = pb.TrainCmd()
    again.CopyFrom(group.command)
    again.deadline_seconds, again.traceparent = 1.0, "00-1"
    assert group.clients["c000"].party(again).keys() == group.party("c000").keys()


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
def test_a_roster_that_lies_is_refused(make: Callable[..., Group], lie: str) -> None:
    group = make(4)
    _keys(group)
    reason, roster = ROSTERS[lie]
    with refused(reason):
        group.party("c000").on_roster(roster(group))
    assert len(group.party("c000").on_roster(group.roster).shares) == 3


def test_a_key_of_low_order_is_refused(make: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    group = make(3)
    names = names_of(3)
    group.keys = {name: group.party(name).keys() for name in names[:2]}
    monkeypatch.setattr("fedring.secure.roster.public_key", lambda private: bytes([private[0] & 1, *bytes(31)]))
    monkeypatch.setattr(party_module, "draw_secrets", lambda: _Low())
    group.keys["c002"] = group.party("c002").keys()
    with refused("bad_peer_keys"):
        group.party("c000").on_roster(group.roster)


class _Low:
    sealing, masking, own_mask = b"\0" * 32, b"\1" * 32, b"\2" * 32


def test_a_group_is_bound_once(make: Callable[..., Group]) -> None:
    group = make(4)
    _keys(group)
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


PEERS: dict[str, tuple[str, Callable[[Group], wire.SecurePeers]]] = {
    "that do not open": ("bad_share", lambda group: _sealed(group, lambda sealed: sealed[:-1] + b"x")),
    "of another": ("bad_share", _mixed),
    "truncated": ("bad_share", lambda group: _sealed(group, lambda sealed: sealed[:-1])),
    "empty": ("bad_share", lambda group: _sealed(group, lambda sealed: b"")),
    "too long": ("bad_share", lambda group: _sealed(group, lambda sealed: sealed + bytes(100_000))),
    "too few": ("too_few_peers", lambda group: _peers(group, "c001")),
    "nobody": ("too_few_peers", lambda group: wire.SecurePeers()),
    "a stranger": ("bad_peers", lambda group: _peers(group, "c001", "c002", "x")),
    "the client itself": ("bad_peers", lambda group: _peers(group, "c000", "c001", "c002")),
    "twice": ("bad_peers", lambda group: _peers(group, "c001", "c001", "c002")),
    "out of order": ("bad_peers", lambda group: _peers(group, "c002", "c001", "c003")),
}


@pytest.mark.parametrize("lie", PEERS)
def test_peers_that_cannot_be_are_refused(make: Callable[..., Group], lie: str) -> None:
    group = make(4)
    _shares(group)
    reason, peers = PEERS[lie]
    with refused(reason):
        group.party("c000").on_peers(peers(group))
    assert not group.again("c000").may_mask
    with refused("bad_peers"):
        group.party("c000").mask(np.zeros(4, np.int32))


def test_peers_are_bound_once(make: Callable[..., Group]) -> None:
    group = make(4).exchange(NAMES)
    with refused("other_peers"):
        group.again("c000").on_peers(peers_of({name: group.shares[name] for name in NAMES[:3]}, "c000"))


def test_steps_out_of_order_are_refused(make: Callable[..., Group]) -> None:
    early, group = make(4, round_=2).party("c000"), make(4).exchange(NAMES)
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
def test_survivors_that_cannot_be_are_refused(make: Callable[..., Group], lie: str) -> None:
    group = _sent(make(4))
    with refused("bad_survivors"):
        group.party("c000").on_survivors(wire.SecureSurvivors(client_ids=SURVIVORS[lie]))
    with refused("bad_survivors"):
        group.party("c000").on_survivors(wire.SecureSurvivors(client_ids=NAMES[::-1]))
    group.party("c000").on_survivors(survivors_of(NAMES))


def test_a_client_that_has_lost_its_key_does_not_sign(make: Callable[..., Group]) -> None:
    group = _sent(make(4))
    client = group.clients["c000"]
    with refused("other_identity"):
        Party(group.command, Site("c000", new_signer(), anybody), client.state).on_survivors(survivors_of(NAMES))


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
def test_masks_are_not_removed_without_the_signatures_of_enough_survivors(make: Callable[..., Group], lie: str) -> None:
    group = _sent(make(4)).sign()
    reason, unmask = UNMASK[lie]
    with refused(reason):
        group.party("c000").on_unmask(unmask(group))
    assert np.array_equal(group.unmask().total, np.sum(list(integers(NAMES).values()), axis=0))


def test_signatures_of_other_survivors_are_refused(make: Callable[..., Group]) -> None:
    names = names_of(5)
    group = make(5).exchange(names).send(integers(names))
    for name in names[:2]:
        group.signatures[name] = group.party(name).on_survivors(survivors_of(names))
    for name in names[2:4]:
        group.signatures[name] = group.party(name).on_survivors(survivors_of(names[:4]))
    for name in names[:4]:
        with refused("bad_peer_signature"):
            group.party(name).on_unmask(unmask_of(group.signatures))


def test_a_server_that_wants_both_kinds_of_shares_of_a_client_cannot_unmask_it(make: Callable[..., Group]) -> None:
    names, victim = names_of(5), 4
    group = make(5).exchange(names_of(5)).send(integers(names_of(5)))
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
        masking, own = group.party(name).shares_of(names[victim])
        assert (masking in told, own in told) == (False, True)


def test_too_few_answers_say_nothing(make: Callable[..., Group]) -> None:
    group = _sent(make(4)).sign().unmask(lost=2)
    with pytest.raises(BadShares):
        secret_of(group.group, 0, group.answers)
    assert combine({1: b"\0" * 66, 2: b"\0" * 66}) == bytes(32)


@pytest.mark.parametrize("least", [4, 5])
def test_a_site_says_with_how_many_others_it_is_added_up(tmp_path: Path, least: int) -> None:
    clients = {name: Client(name, tmp_path) for name in names_of(5)}
    clients["c000"] = Client("c000", tmp_path, min_clients=least)
    names = names_of(5)
    group = Group(clients, command_of()).exchange(names).send(integers(names[:4]))
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


def test_sealed_shares_have_one_length(make: Callable[..., Group]) -> None:
    group = make(3).exchange(names_of(3))
    assert {len(each.sealed) for each in group.shares["c000"].shares} == {SEALED_BYTES}
