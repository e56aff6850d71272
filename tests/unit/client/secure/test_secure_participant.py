"""One client in a round of secure aggregation: its sums are exact, it says nothing twice in two ways, and remembers."""

import json
import stat
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.damage import flip
from tests.secure_sums import (
    LEVELS,
    Client,
    Group,
    command_of,
    integers,
    names_of,
    peers_of,
    refused,
    survivors_of,
    unmask_of,
)

from fedring.client.secure import group_keys as group_keys_module
from fedring.client.secure.participant import SecureParticipant
from fedring.client.secure.state import FOLDER, SecureState, name_of
from fedring.daemon.config import ConfigError
from fedring.daemon.durable import text_after_digest
from fedring.secure import keys as keys_module
from fedring.secure import masks as masks_module
from fedring.secure.limits import threshold
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

pytestmark = pytest.mark.usefixtures("fast_disk")


@pytest.mark.parametrize("count", [*range(3, 14), 33, pytest.param(100, marks=pytest.mark.soak)])
def test_a_sum_is_exact_whoever_is_lost_on_the_way(make_group: Callable[..., Group], count: int) -> None:
    group, names = make_group(count), names_of(count)
    lost = np.random.default_rng(count).multinomial(count - threshold(count), [0.25] * 4)
    sent = integers(names[: count - lost[0] - lost[1]])
    group.exchange(lost=lost[0]).send(sent).sign(lost=lost[2]).unmask(lost=lost[3])
    assert np.array_equal(group.total, np.sum(list(sent.values()), axis=0))


def test_weights_widen_the_sum(make_group: Callable[..., Group]) -> None:
    group, names = make_group(4, max_weight=1000), names_of(4)
    sent = integers(names, LEVELS * 1000)
    assert group.exchange().bits == (2 * 4 * 1000 * LEVELS).bit_length()
    assert np.array_equal(group.send(sent).sign().unmask().total, np.sum(list(sent.values()), axis=0))


def test_a_long_update_is_masked_in_pieces(make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    group, names = make_group(3), names_of(3)
    sent = integers(names)
    group.exchange()
    whole = group.party(names[0]).mask(sent[names[0]], group.bits)
    monkeypatch.setattr(group_keys_module, "PIECE", 16)
    assert np.array_equal(group.party(names[0]).mask(sent[names[0]], group.bits), whole)
    assert not np.array_equal(whole & 63, sent[names[0]] & 63)


@settings(max_examples=25)
@given(data=st.data())
def test_a_process_that_is_killed_between_any_two_steps_says_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder, names = tmp_path_factory.mktemp("round"), names_of(4)
    group = Group({name: Client(name, folder) for name in names}, command_of())
    kept: dict[str, SecureParticipant] = {}

    def party(name: str) -> SecureParticipant:
        if name not in kept or data.draw(st.booleans(), label=f"{name} is killed"):
            kept[name] = group.again(name)
        return kept[name]

    group.party = party
    sent = integers(names)
    assert np.array_equal(group.exchange().send(sent).sign().unmask().total, np.sum(list(sent.values()), axis=0))
    for name in names:
        again = group.again(name)
        assert again.keys() == group.keys[name]
        assert again.on_roster(group.roster) == group.shares[name]
        again.on_peers(peers_of(group.shares, name))
        again.bind(f"payload of {name}")
        assert again.on_survivors(survivors_of(names)) == group.signatures[name]
        assert again.on_unmask(unmask_of(group.signatures)) == group.answers[name]


def test_no_key_seals_two_texts_and_no_mask_covers_two_updates(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: dict[bytes, set[bytes]] = defaultdict(set)
    covered: dict[tuple[str, bytes], set[bytes]] = defaultdict(set)
    seal, mask = keys_module.seal, masks_module.mask
    now: list[tuple[str, bytes]] = []

    def sealing(key: bytes, masking: bytes, own_mask: bytes) -> bytes:
        texts[key].add(masking + own_mask)
        return seal(key, masking, own_mask)

    def masking(seed: bytes, *place: int) -> Any:
        covered[now[-1][0], seed].add(now[-1][1])
        return mask(seed, *place)

    monkeypatch.setattr(group_keys_module, "seal", sealing)
    monkeypatch.setattr(group_keys_module, "mask", masking)
    names = names_of(5)
    for round_ in (1, 2):
        group = make_group(5, round_=round_)
        group.party = group.again
        group.exchange()
        sent = integers(names)
        for name in names:
            now.append((name, sent[name].tobytes()))
            group.send({name: sent[name]})
            now.append((name, b"another update"))
            with refused("lost_masked_update"):
                group.again(name).mask(sent[name] + 1, group.bits)
            group.again(name).on_roster(group.roster)
            group.again(name).on_peers(peers_of(group.shares, name))
    assert len(texts) == 2 * 5 * 4
    assert len(covered) == 2 * 5 * 5
    assert all(len(each) == 1 for each in (*texts.values(), *covered.values()))


class Step:
    """A step of a round: what has happened before, and what a client is told then."""

    def __init__(
        self, name: str, before: Callable[[Group], object], take: Callable[[Group, SecureParticipant], object]
    ) -> None:
        self.name, self.before, self.take = name, before, take


NAMES = names_of(4)
STEPS = [
    Step("roster", lambda group: group.send_keys(), lambda group, party: party.on_roster(group.roster)),
    Step("peers", lambda group: group.share(), lambda group, party: party.on_peers(peers_of(group.shares, NAMES[0]))),
    Step("payload", lambda group: group.exchange(), lambda group, party: party.bind("payload")),
    Step("survivors", lambda group: group.send_all(), lambda group, party: party.on_survivors(survivors_of(NAMES))),
    Step(
        "unmask",
        lambda group: group.send_all().sign(),
        lambda group, party: party.on_unmask(unmask_of(group.signatures)),
    ),
]


def _unmask(group: Group) -> wire.SecureUnmask:
    return unmask_of(group.signatures)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_nothing_is_said_that_is_not_on_the_disk(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, step: Step
) -> None:
    group = make_group(4)
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


def test_no_keys_go_out_that_are_not_on_the_disk(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SecureState, "save", _full)
    with pytest.raises(OSError, match="full"):
        make_group(3).again("c000")


def _full(*_: object) -> None:
    raise OSError("the disk is full")


def test_only_the_owner_can_read_the_secrets_and_they_end_with_the_round(make_group: Callable[..., Group]) -> None:
    group = make_group(4)
    group.send_all()
    client = group.clients[NAMES[0]]
    folder = client.folder / FOLDER
    (file,) = folder.iterdir()
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(folder.stat().st_mode)) == (0o600, 0o700)
    client.state.finish(name_of(group.command))
    assert [path.name for path in folder.iterdir()] == ["finished.json"]


def test_a_round_that_is_over_does_not_begin_again(make_group: Callable[..., Group]) -> None:
    state = make_group(3).clients["c000"].state
    name = name_of(command_of(round_=7, epoch=2))
    state.finish(name, "other_peers")
    for epoch, round_, over in ((2, 7, True), (2, 6, True), (1, 9, True), (2, 8, False), (3, 1, False)):
        assert bool(state.finished(name._replace(epoch=epoch, round=round_))) is over
    assert state.finished(name._replace(run_id="other")) is None
    last = state.finished(name)
    assert last
    assert last.reason == "other_peers"
    with refused("replayed_round"):
        make_group(3, round_=7, epoch=2).again("c000")
    make_group(3, round_=8, epoch=2).again("c000")


def test_a_party_does_not_write_its_secrets_again_after_the_round(make_group: Callable[..., Group]) -> None:
    group = make_group(4)
    group.send_keys()
    client = group.clients[NAMES[0]]
    party = SecureParticipant(group.command, client.site, state := client.state)
    state.finish_others(name_of(command_of(round_=2)))
    with refused("replayed_round"):
        party.on_roster(group.roster)
    assert [path.name for path in (client.folder / FOLDER).iterdir()] == ["finished.json"]


def test_a_file_that_is_damaged_anywhere_ends_the_round(make_group: Callable[..., Group]) -> None:
    group = make_group(3)
    group.exchange()
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


def test_each_flipped_bit_of_the_list_of_finished_rounds_is_noticed(tmp_path: Path) -> None:
    name = name_of(command_of(round_=7, epoch=2))
    SecureState(tmp_path).finish(name)
    file = tmp_path / FOLDER / "finished.json"
    for bit in range(8 * file.stat().st_size):
        flip(file, bit)
        with pytest.raises(ConfigError, match="finished"):
            SecureState(tmp_path)
        flip(file, bit)
    assert SecureState(tmp_path).finished(name)


def test_a_list_of_finished_rounds_of_an_earlier_version_stays_and_gets_a_digest(tmp_path: Path) -> None:
    name = name_of(command_of(round_=7, epoch=2))
    SecureState(tmp_path).finish(name)
    file = tmp_path / FOLDER / "finished.json"
    text = text_after_digest(file.read_bytes())
    file.write_bytes(text)
    assert SecureState(tmp_path).finished(name)
    assert text_after_digest(file.read_bytes()) == text


def test_only_the_newest_runs_are_remembered(tmp_path: Path) -> None:
    state = SecureState(tmp_path)
    for run in range(260):
        state.finish(name_of(command_of(run=f"run-{run}")))
    assert len(json.loads(text_after_digest((tmp_path / FOLDER / "finished.json").read_bytes()))) == 256
    assert state.finished(name_of(command_of(run="run-259")))


def test_two_tasks_in_one_round_are_refused(make_group: Callable[..., Group]) -> None:
    group = make_group(3)
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
