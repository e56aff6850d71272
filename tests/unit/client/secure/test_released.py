"""What a client remembers of sums that it has helped to unmask: which further ones it signs, and what it refuses."""

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.secure_sums import Client, Group, command_of, integers, names_of, refused, survivors_of, unmask_of

from fedring.client.policy.ledger import Ledger
from fedring.client.policy.privacy import SitePolicy, refusal
from fedring.client.secure import released as released_module
from fedring.client.secure.participant import SecureParticipant
from fedring.client.secure.released import RELEASED, Released, Sums
from fedring.client.secure.state import FOLDER, SecureState
from fedring.codec import Vectors
from fedring.daemon.config import ConfigError
from fedring.secure import SecureError

pytestmark = pytest.mark.usefixtures("fast_disk")

NAMES = names_of(8)


def sums(folder: Path, *, base: str = "base", least: int = 0, strict: bool = True) -> Sums:
    """Return what guards the sums of a base, as a process has it that was started anew."""
    return Released(folder).sums(base, least, strict=strict)


@pytest.mark.parametrize(
    ("survivors", "least", "reason"),
    [
        (NAMES[:5], 0, ""),
        (NAMES[:4], 0, "asked_twice"),
        (NAMES[:6], 0, "asked_twice"),
        ([*NAMES[:4], NAMES[7]], 0, "asked_twice"),  # one is missing, and one is new
        ([*NAMES[:4], NAMES[6], NAMES[7]], 0, ""),
        ([*NAMES[:4], NAMES[6], NAMES[7]], 3, ""),
        ([*NAMES[:4], NAMES[6], NAMES[7]], 4, "asked_twice"),
        (NAMES, 3, ""),
        (NAMES, 4, "asked_twice"),
        (NAMES[2:], 5, ""),
        (NAMES[2:], 6, "asked_twice"),
    ],
)
def test_two_sets_are_the_same_or_differ_by_as_many_clients_as_a_site_wants(
    tmp_path: Path, survivors: list[str], least: int, reason: str
) -> None:
    sums(tmp_path).note(NAMES[:5])
    after = sums(tmp_path, least=least)
    if reason:
        with refused(reason):
            after.check(survivors)
        with refused(reason):
            after.note(survivors)
    else:
        after.check(survivors)
        after.note(survivors)
        sums(tmp_path, least=least).note(survivors)
    sums(tmp_path, base="another base", least=least).check(survivors)


def test_each_set_of_a_base_counts_and_not_only_the_last_one(tmp_path: Path) -> None:
    sums(tmp_path).note(NAMES[:5])
    sums(tmp_path).note(NAMES)
    for names in (NAMES[:4], NAMES[1:]):
        with refused("asked_twice"):
            sums(tmp_path).check(names)
    sums(tmp_path, least=8).check(NAMES[:5])  # it reveals nothing new


def test_what_was_signed_without_a_release_does_not_count(tmp_path: Path) -> None:
    sums(tmp_path).check(NAMES)
    sums(tmp_path).check(NAMES[1:])
    assert not (tmp_path / RELEASED).exists()


def test_a_refusal_says_which_ways_are_open(tmp_path: Path) -> None:
    sums(tmp_path).note(NAMES[:5])
    with pytest.raises(SecureError) as caught:
        sums(tmp_path).check([*NAMES[:4], "x"])
    assert "differ from those by 2 clients (without c004 and with x)" in str(caught.value)
    assert "let the same clients survive, or start from another model" in str(caught.value)


def test_a_site_that_demands_nothing_is_warned_and_remembers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sums(tmp_path, strict=False).note(NAMES)
    assert not caplog.records
    sums(tmp_path, strict=False).note(NAMES[1:])
    assert "asked_twice" in caplog.text
    with refused("asked_twice"):
        sums(tmp_path).check(NAMES[2:])  # as soon as it demands something, both sets count


def test_the_file_is_for_its_owner_only_and_replaced_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / FOLDER
    sums(folder).note(NAMES)
    file = folder / RELEASED
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(folder.stat().st_mode)) == (0o600, 0o700)
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(released_module, "replace_with_digest", full)
        guard = sums(folder, base="another")
        with pytest.raises(OSError, match="full"):
            guard.note(NAMES)
    assert file.read_bytes() == before
    guard.note(NAMES[:4])  # what was not written does not count
    assert json.loads(file.read_bytes().partition(b"\n")[2])["sets"] == [[*range(8)], [*range(4)]]


def test_a_damaged_file_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    sums(tmp_path / FOLDER).note(NAMES)
    file = tmp_path / FOLDER / RELEASED
    whole = file.read_bytes()
    for place in range(0, len(whole), 7):
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            file.write_bytes(damaged)
            with pytest.raises(ConfigError, match=RELEASED):
                SecureState(tmp_path)


def test_nothing_is_forgotten_when_the_file_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(released_module, "MOST_BYTES", 2000)
    bases = 0
    while not Released(tmp_path).full:
        sums(tmp_path, base=f"base {bases}").note(NAMES)
        bases += 1
    assert 50 < bases < 100
    with refused("released_full"):
        sums(tmp_path, base="one more").check(NAMES)
    for base in range(bases):
        sums(tmp_path, base=f"base {base}").note(NAMES)
        with refused("asked_twice"):
            sums(tmp_path, base=f"base {base}").check(NAMES[1:])
    sums(tmp_path, base="one more", strict=False).note(NAMES)
    assert (tmp_path / RELEASED).stat().st_size < 2100


def _strict(folder: Path, names: list[str]) -> dict[str, Client]:
    return {name: Client(name, folder, min_clients=3, strict=True) for name in names}


def test_no_share_leaves_that_is_not_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_of(4)
    group = Group(_strict(tmp_path, names), command_of()).send_all().sign()
    noted: list[str] = []
    add = Released.add

    def fails(*_: object) -> None:
        raise OSError("the disk is full")

    def dies(self: Released, base: str, survivors: Any) -> None:
        add(self, base, survivors)
        noted.append(base)
        raise _Killed

    for instead, error in ((fails, OSError), (dies, _Killed)):
        with monkeypatch.context() as patch:
            patch.setattr(Released, "add", instead)
            with pytest.raises(error):
                group.again(names[0]).on_unmask(unmask_of(group.signatures))
    assert noted == ["digest"]
    later = Group(group.clients, command_of(round_=2)).exchange().send(integers(names[:3]))
    group.clients[names[0]].state.finish_others(later.party(names[0]).name)
    with refused("asked_twice"):  # the note counts, though the process died before its shares were on the way
        later.again(names[0]).on_survivors(survivors_of(names[:3]))
    later.again(names[1]).on_survivors(survivors_of(names[:3]))


class _Killed(BaseException):
    """In the place of a kill."""


def test_a_client_that_becomes_strict_after_it_has_signed_does_not_release(tmp_path: Path) -> None:
    names = names_of(4)
    first = Group({name: Client(name, tmp_path) for name in names}, command_of()).send_all().sign()
    first.unmask()
    for client in first.clients.values():
        client.state.finish(first.party(client.name).name)
    second = Group(first.clients, command_of(round_=2)).exchange().send(integers(names[:3])).sign()
    site = first.clients[names[0]].site
    strict = Client(names[0], tmp_path, site.signer, strict=True)
    with refused("asked_twice"):
        SecureParticipant(second.command, strict.site, strict.state).on_unmask(unmask_of(second.signatures))


def test_the_same_group_goes_on_from_round_to_round(tmp_path: Path) -> None:
    clients = _strict(tmp_path, names_of(4))
    for round_ in (1, 2, 3):
        group = Group(clients, command_of(round_=round_)).send_all().sign().unmask()
        assert len(group.answers) == 4
        for client in clients.values():
            client.state.finish(group.party(client.name).name)


def test_a_site_that_demands_anything_takes_one_name_of_a_model_only(tmp_path: Path) -> None:
    model, ledger = Vectors(np.ones(3, np.float32), np.zeros(0)), Ledger(tmp_path)
    names = model.digest(), model.digest(like="0" * 64)
    assert [model.digest(like=name) == name for name in names] == [True, True]  # clients read both
    lenient, strict = (SitePolicy.model_validate({"require_secure_aggregation": each}) for each in (False, True))
    refusals = []
    for name in names:
        command = command_of()
        command.model_digest = name
        refusals.append(refusal(strict, ledger, command))
        assert not refusal(lenient, ledger, command)  # which only warns of sums that differ by few
    assert refusals[0] == ""
    assert "names the model by its SHA-256" in refusals[1]
