"""The list of revoked certificates: how flctl writes it, and how a daemon reads it while it runs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.pki import Pki

from fedring.daemon.config import ConfigError
from fedring.daemon.exits import Exit
from fedring.rpc.certificates import load_authorities
from fedring.rpc.revocation import Revocations, Serial, serial_of
from fedring.rpc.tls import Tls, check_tls

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    made = Pki(tmp_path / "pki")
    made.issue("ann", "bob")
    return made


def serial(pki: Pki, name: str) -> Serial:
    return serial_of(load_authorities(pki.folder / f"{name}.crt")[0])


def revocations(pki: Pki) -> Revocations:
    return Revocations(pki.folder / "ca.crl", pki.folder / "ca.crt")


def test_a_new_authority_has_revoked_nothing(pki: Pki) -> None:
    assert not revocations(pki).holds(serial(pki, "ann"))
    assert not revocations(pki).holds(None)


def test_revoke_is_seen_by_whoever_has_read_the_list_before(pki: Pki, flctl: Call) -> None:
    read = revocations(pki)
    for name, others in (("ann", ["bob"]), ("bob", [])):
        assert flctl("certs", "revoke", pki.folder, name)[0] == 0
        assert read.holds(serial(pki, name))
        assert [other for other in others if read.holds(serial(pki, other))] == []
    assert read.holds(serial(pki, "ann"))  # still


def test_revoke_covers_older_certificates_of_a_name_but_not_later_ones(pki: Pki, flctl: Call) -> None:
    first = serial(pki, "ann")
    flctl("certs", "renew", pki.folder, "ann")
    second = serial(pki, "ann")
    assert flctl("certs", "revoke", pki.folder, "ann")[0] == 0
    flctl("certs", "renew", pki.folder, "ann")
    read = revocations(pki)
    assert [read.holds(found) for found in (first, second, serial(pki, "ann"))] == [True, True, False]


def test_revoke_by_serial_number_and_what_show_says(pki: Pki, flctl: Call) -> None:
    number = f"{serial(pki, 'ann')[1]:x}"
    assert flctl("certs", "revoke", pki.folder, "--serial", number)[0] == 0
    rows = json.loads(flctl("certs", "show", pki.folder, "--output", "json")[1])["certificates"]
    assert {row["name"] for row in rows if row["revoked"]} == {"ann"}
    assert "revoked" in flctl("certs", "show", pki.folder)[1]


def test_renewing_what_ends_soon_gives_nothing_back_to_the_revoked(pki: Pki, flctl: Call) -> None:
    flctl("certs", "renew", pki.folder, "ann", "bob", "--days", 5)
    flctl("certs", "revoke", pki.folder, "ann")
    before = serial(pki, "ann")
    code, out, _ = flctl("certs", "renew", pki.folder)
    assert (code, out.strip()) == (0, "renewed: bob")
    assert serial(pki, "ann") == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["carol"], Exit.FAILED),
        (["ca"], Exit.FAILED),
        ([], Exit.USAGE),
        *((["--serial", text], Exit.USAGE) for text in ("xyz", "0", "1" + "0" * 40)),
    ],
)
def test_revoke_refuses_what_it_cannot_do(pki: Pki, flctl: Call, arguments: list[str], code: Exit) -> None:
    before = (pki.folder / "ca.crl").read_bytes()
    assert flctl("certs", "revoke", pki.folder, *arguments)[0] == code
    assert (pki.folder / "ca.crl").read_bytes() == before


def test_a_list_that_cannot_be_used_changes_nothing_until_it_can(pki: Pki, flctl: Call) -> None:
    flctl("certs", "revoke", pki.folder, "ann")
    read, path = revocations(pki), pki.folder / "ca.crl"
    good = path.read_bytes()
    for bad in (b"", good[: len(good) // 2], good.replace(b"M", b"N", 3)):
        path.write_bytes(bad)
        assert read.holds(serial(pki, "ann"))
    path.unlink()
    assert read.holds(serial(pki, "ann"))
    path.write_bytes(good)
    flctl("certs", "revoke", pki.folder, "bob")
    assert read.holds(serial(pki, "bob"))


def test_only_a_trusted_authority_can_revoke(pki: Pki, tmp_path: Path) -> None:
    other = Pki(tmp_path / "other")
    with pytest.raises(ConfigError, match="is not signed by an authority"):
        Revocations(other.folder / "ca.crl", pki.folder / "ca.crt")
    both, lists = tmp_path / "both.crt", tmp_path / "both.crl"
    both.write_bytes((pki.folder / "ca.crt").read_bytes() + (other.folder / "ca.crt").read_bytes())
    lists.write_bytes((pki.folder / "ca.crl").read_bytes() + (other.folder / "ca.crl").read_bytes())
    assert not Revocations(lists, both).holds(serial(pki, "ann"))


def test_a_daemon_does_not_start_without_the_list_that_it_is_given(pki: Pki) -> None:
    good = {"cert": pki.folder / "ann.crt", "key": pki.folder / "ann.key", "ca": pki.folder / "ca.crt"}
    check_tls(Tls(**good, crl=pki.folder / "ca.crl"))
    with pytest.raises(ConfigError, match="cannot read"):
        check_tls(Tls(**good, crl=pki.folder / "nothing.crl"))
    with pytest.raises(ConfigError, match="holds no list of revoked certificates"):
        check_tls(Tls(**good, crl=pki.folder / "ca.crt"))
    with pytest.raises(ValueError, match=r"tls\.crl needs tls\.ca"):
        Tls(crl=pki.folder / "ca.crl")
