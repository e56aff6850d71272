"""flctl certs: what it makes, what it refuses, and which of its files the daemons accept."""

import fcntl
import json
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from threading import Event

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from tests.pki import Pki

from fedring.ctl.admin import certs
from fedring.ctl.admin.authority import Authority, revoked
from fedring.daemon.config import ConfigError
from fedring.daemon.exits import Exit
from fedring.rpc.certificates import identity_of, load_authorities, load_pair, names_of
from fedring.rpc.identity import Identity, Role, peer_name
from fedring.rpc.tls import Tls, check_tls

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "pki")


def test_init_makes_an_authority_a_server_and_an_operator(flctl: Call, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "pki"
    code, out, _ = flctl("certs", "init", folder, "--host", "fl.example.org", "--host", "10.0.0.5")
    assert code == 0
    assert "fl.example.org" in out
    made = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    keys = dict.fromkeys(("ca.key", "server.key", "operator.key"), 0o600)
    public = ("ca.crt", "ca.crl", "issued.pem", "server.crt", "operator.crt")
    assert made == keys | dict.fromkeys(public, 0o644)
    server = load_pair(folder / "server.crt", folder / "server.key").certificate
    assert identity_of(server) == Identity(Role.SERVER, "server")
    names = names_of(server)
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fl.example.org"]
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    assert addresses == ["127.0.0.1", "::1", "10.0.0.5"]
    operator = load_pair(folder / "operator.crt", folder / "operator.key").certificate
    assert identity_of(operator) == Identity(Role.OPERATOR, "operator")
    for certificate in (server, operator):
        certificate.verify_directly_issued_by(load_authorities(folder / "ca.crt")[0])
        assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)


def test_issue_makes_a_certificate_with_the_name_that_peers_use(pki: Pki) -> None:
    pki.issue("hospital-a")
    certificate = load_pair(pki.folder / "hospital-a.crt", pki.folder / "hospital-a.key").certificate
    assert identity_of(certificate) == Identity(Role.CLIENT, "hospital-a")
    assert names_of(certificate).get_values_for_type(x509.DNSName) == [peer_name("fedring://client/hospital-a")]
    check_tls(pki.tls("hospital-a"))


def test_existing_files_are_not_overwritten(pki: Pki, flctl: Call) -> None:
    before = {path: path.read_bytes() for path in pki.folder.iterdir()}
    for arguments in (["init", pki.folder], ["issue", pki.folder, "server"]):
        code, _, err = flctl("certs", *arguments)
        assert code == Exit.FAILED
        assert "exists already" in err
    assert {path: path.read_bytes() for path in pki.folder.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["init", "{}/ca.key"], Exit.USAGE, "cannot make"),
        (["issue", "{}", "a/b"], Exit.USAGE, "is no valid name"),
        (["issue", "{}", "ca"], Exit.USAGE, "is no valid name"),
        (["issue", "{}", ".."], Exit.USAGE, "is no valid name"),
        (["issue", "{}", "a", "--host", "h"], Exit.USAGE, "--host is for servers"),
        (["issue", "{}/none", "a"], Exit.FAILED, "there is no authority in"),
        (["issue", "{}", "s", "--role", "server", "--host", "h:1"], Exit.FAILED, "neither a host's name nor"),
        (["renew", "{}", "nobody"], Exit.CONFIG, "cannot read"),
        (["show", "{}/ca.key"], Exit.CONFIG, "holds no certificate"),
        (["show", "{}/none"], Exit.CONFIG, "cannot read"),
    ],
)
def test_a_wrong_call_of_certs_is_explained(
    pki: Pki, flctl: Call, arguments: list[str], code: Exit, sentence: str
) -> None:
    found, _, err = flctl("certs", *(argument.format(pki.folder) for argument in arguments))
    assert found == code
    assert sentence in err
    assert err.count("\n") == 1


def test_renew_keeps_the_names_and_changes_the_key(pki: Pki, flctl: Call) -> None:
    before = load_pair(pki.folder / "server.crt", pki.folder / "server.key")
    code, out, _ = flctl("certs", "renew", pki.folder, "server", "--days", "90")
    assert (code, out) == (0, "renewed: server\n")
    after = load_pair(pki.folder / "server.crt", pki.folder / "server.key")
    assert after.key != before.key
    assert names_of(after.certificate) == names_of(before.certificate)
    assert stat.S_IMODE((pki.folder / "server.key").stat().st_mode) == 0o600
    assert flctl("certs", "renew", pki.folder)[1].startswith("nothing in")  # since no certificate ends soon


def test_what_an_authority_has_signed_stays_valid_when_it_is_renewed(pki: Pki, flctl: Call) -> None:
    old = (pki.folder / "ca.crt").read_bytes()
    assert flctl("certs", "renew", pki.folder, "ca")[0] == 0
    assert (pki.folder / "ca.crt").read_bytes() != old
    server = load_pair(pki.folder / "server.crt", pki.folder / "server.key").certificate
    server.verify_directly_issued_by(load_authorities(pki.folder / "ca.crt")[0])


def test_show_lists_identities_and_days_left(pki: Pki, flctl: Call) -> None:
    pki.issue("hospital-a")
    rows = json.loads(flctl("certs", "show", pki.folder, "--output", "json")[1])["certificates"]
    assert {row["name"]: row["identity"] for row in rows} == {
        "ca": "",
        "server": "fedring://server/server",
        "operator": "fedring://operator/operator",
        "hospital-a": "fedring://client/hospital-a",
    }
    assert [row["days_left"] for row in rows] == [364, 364, 364, 3649]
    code, out, _ = flctl("certs", "show", pki.folder / "hospital-a.crt")
    assert code == 0
    assert "fedring://client/hospital-a" in out


def test_a_certificate_with_a_wrong_expired_or_readable_key_is_refused(pki: Pki) -> None:
    pki.issue("a", "b")
    pki.sign("old", "fedring://client/old", ended=True)
    folder = pki.folder
    with pytest.raises(ConfigError, match="does not belong to the certificate"):
        check_tls(Tls(cert=folder / "a.crt", key=folder / "b.key", ca=folder / "ca.crt"))
    with pytest.raises(ConfigError, match=r"old\.crt expired at"):
        check_tls(pki.tls("old"))
    (folder / "a.key").chmod(0o644)
    with pytest.raises(ConfigError, match="every user of this host can read"):
        check_tls(pki.tls("a"))
    (folder / "a.key").chmod(0o640)  # who is in the group is the administrator's choice
    check_tls(pki.tls("a"))
    (folder / "a.key").write_bytes((folder / "a.crt").read_bytes())
    with pytest.raises(ConfigError, match="holds no private key"):
        check_tls(pki.tls("a"))


def test_of_two_revocations_at_the_same_moment_none_is_lost(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        pki.issue(name)
    sign, lock = Authority.revoke, fcntl.flock
    began, goes_on = Event(), Event()

    def signed(authority: Authority, serials: Iterable[int], since: Mapping[int, datetime]) -> bytes:
        if not began.is_set():  # the other one begins now, and ends before this one if it does not wait for it
            began.set()
            assert goes_on.wait(60)
        return sign(authority, serials, since)

    def locking(fd: int, operation: int) -> None:
        if began.is_set():
            goes_on.set()
        lock(fd, operation)

    def other() -> None:
        assert began.wait(60)
        try:
            certs.revoke(pki.folder, ["second"])
        finally:
            goes_on.set()

    monkeypatch.setattr(Authority, "revoke", signed)
    monkeypatch.setattr(fcntl, "flock", locking)
    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(other)
        certs.revoke(pki.folder, ["first"])
        ended.result()
    found = {load_authorities(pki.folder / f"{name}.crt")[0].serial_number for name in ("first", "second")}
    assert revoked(pki.folder).keys() == found
