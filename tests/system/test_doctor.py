"""`flctl doctor` names each mistake in a daemon's TLS settings, addresses and identity."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedring.ctl.admin import doctor_checks
from fedring.ctl.main import main
from fedring.daemon.exits import Exit
from fedring.rpc.tls import PLAINTEXT, Tls
from tests.fleets import PATIENCE, Fleet
from tests.pki import Pki
from tests.ports import free_port


@dataclass
class Site:
    """Two authorities, and servers with certificates of the first one, by what they ask of callers."""

    pki: Pki
    other: Pki
    servers: dict[str, Fleet]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("doctor")
    pki, other = Pki(folder / "pki"), Pki(folder / "other")
    for authority in (pki, other):
        authority.issue("ann")
    pki.sign("past", "fedring://client/ann", ended=True)
    table = pki.table("server")
    with (
        Fleet(folder / "mutual", {"tls": table}) as mutual,
        Fleet(folder / "one-sided", {"tls": table | {"ca": None}, "tokens": True}) as one_sided,
        Fleet(folder / "plain") as plain,
    ):
        yield Site(pki, other, {"mutual": mutual, "one-sided": one_sided, "plain": plain})


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flctl doctor wait for servers that a busy machine keeps waiting."""
    monkeypatch.setattr(doctor_checks, "_TIMEOUT_SECONDS", PATIENCE)


def examine(
    capsys: pytest.CaptureFixture[str], side: str, folder: Path, **keys: Any
) -> dict[str, tuple[str, str, str]]:
    """Run flctl doctor for a daemon with these keys; return level, finding and advice by check."""
    config = folder / f"{side}.json"
    config.write_text(json.dumps({"state_dir": str(folder / "none"), **keys}, default=str))
    code = main(["doctor", f"--{side}-config", str(config), "--output", "json"])
    rows = json.loads(capsys.readouterr().out)["checks"]
    assert code == (Exit.FAILED if any(row["level"] == "fail" for row in rows) else Exit.OK)
    return {row["name"]: (row["level"], row["found"], row["advice"]) for row in rows}


CASES = [
    ("mutual", "good", "ok", "fl-server serves at", ""),
    ("mutual", "another authority's server", "fail", "is not trusted", "set tls.ca"),
    ("mutual", "another authority's client", "fail", "does not accept the certificate in", "tls.cert and tls.key"),
    ("mutual", "no certificate", "fail", "does not accept a caller without a certificate", "tls.cert and tls.key"),
    ("mutual", "plaintext", "fail", "uses TLS", "set tls.ca"),
    ("one-sided", "no certificate", "ok", "fl-server serves at", ""),
    ("one-sided", "good", "ok", "fl-server serves at", ""),
    ("one-sided", "another authority's server", "fail", "is not trusted", "set tls.ca"),
    ("one-sided", "plaintext", "fail", "uses TLS", "set tls.ca"),
    ("plain", "good", "fail", "does not use TLS", "tls.cert and tls.key"),
    ("plain", "plaintext", "ok", "fl-server serves at", ""),
]


@pytest.mark.parametrize(("server", "case", "level", "found", "advice"), CASES, ids=[": ".join(c[:2]) for c in CASES])
def test_the_doctor_tells_a_client_why_it_cannot_reach_its_server(
    site: Site,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    server: str,
    case: str,
    level: str,
    found: str,
    advice: str,
) -> None:
    tls: Tls = {
        "good": site.pki.tls("ann"),
        "another authority's server": site.pki.tls("ann", ca=site.other),
        "another authority's client": site.other.tls("ann", ca=site.pki),
        "no certificate": site.pki.trust(),
        "plaintext": PLAINTEXT,
    }[case]
    address = site.servers[server].listen
    rows = examine(capsys, "client", tmp_path, server=address, client_id="ann", tls=tls.model_dump())
    assert rows["server"][0] == level, rows["server"]
    assert found in rows["server"][1]
    assert address in rows["server"][1]
    assert advice in rows["server"][2]


def test_the_doctor_notices_that_a_clients_server_is_the_port_for_flctl(
    site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain, mutual = site.servers["plain"], site.servers["mutual"]
    encrypted = {"client_id": "ann", "tls": site.pki.tls("ann").model_dump()}
    for fleet, keys in ((plain, {}), (mutual, encrypted)):
        level, found, advice = examine(capsys, "client", tmp_path, server=fleet.control, **keys)["server"]
        assert (level, fleet.control in found, "port for clients" in found) == ("fail", True, True), found
        assert "`listen`" in advice


def test_the_doctor_notices_that_another_server_has_the_port(
    site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fleet = site.servers["plain"]
    rows = examine(capsys, "server", tmp_path, listen=fleet.control, control_listen=fleet.listen)
    assert [rows[port][0] for port in ("listen", "control_listen")] == ["fail", "fail"]


def test_the_doctor_notices_a_server_whose_certificate_has_another_name(
    site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    address = f"127.0.0.2:{site.servers['mutual'].listen.rpartition(':')[2]}"
    fleet = {"server": address, "client_id": "ann", "tls": site.pki.tls("ann").model_dump()}
    with Fleet(tmp_path / "elsewhere", {"tls": site.pki.table("server"), "listen": "127.0.0.2:0"}) as elsewhere:
        level, found, advice = examine(capsys, "client", tmp_path, **fleet | {"server": elsewhere.listen})["server"]
    assert (level, "127.0.0.2" in found, "certs issue" in advice) == ("fail", True, True)
    level, found, _ = examine(capsys, "client", tmp_path, **fleet | {"server": elsewhere.listen})["server"]
    assert (level, "unreachable" in found) == ("fail", True)


def test_the_doctor_notices_a_certificate_of_another_client_or_an_expired_one(
    site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = {"server": site.servers["mutual"].listen, "tls": site.pki.tls("ann").model_dump()}
    assert examine(capsys, "client", tmp_path, client_id="ann", **keys)["identity"][0] == "ok"
    level, found, advice = examine(capsys, "client", tmp_path, client_id="bob", **keys)["identity"]
    assert (level, "fedring://client/ann" in found, "'ann'" in advice) == ("fail", True, True)
    keys["tls"] = site.pki.tls("past").model_dump()
    rows = examine(capsys, "client", tmp_path, client_id="ann", **keys)
    assert rows["tls"][0] == "fail"
    assert "expired" in rows["tls"][1]


def test_the_doctor_notices_a_token_file_that_others_can_read(
    site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("fr_0123456789ab_secret")
    keys = {"server": site.servers["one-sided"].listen, "tls": site.pki.trust().model_dump(), "token_file": token}
    token.chmod(0o600)
    assert examine(capsys, "client", tmp_path, **keys)["identity"][0] == "ok"
    token.chmod(0o644)
    level, found, _ = examine(capsys, "client", tmp_path, **keys)["identity"]
    assert (level, "chmod 600" in found) == ("fail", True)


def test_the_doctor_notices_that_a_shared_state_cannot_be_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("psycopg")
    ports = {key: f"127.0.0.1:{free_port()}" for key in ("listen", "control_listen")}
    urls = {"state_url": f"postgresql://fedring@127.0.0.1:{free_port()}/fedring", "blob_url": "s3://models/fedring"}
    level, found, advice = examine(capsys, "server", tmp_path, **ports, **urls)["shared state"]
    assert (level, "state_url" in advice) == ("fail", True)
    assert "Connection refused" in found
    assert "shared state" not in examine(capsys, "server", tmp_path, **ports)


@pytest.mark.parametrize("server", ["mutual", "one-sided", "plain"])
def test_the_doctor_finds_a_running_server_at_its_ports(
    site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path, server: str
) -> None:
    fleet = site.servers[server]
    keys = {"listen": fleet.listen, "control_listen": fleet.control, "tls": fleet.server.settings.get("tls", {})}
    rows = examine(capsys, "server", tmp_path, **keys)
    assert [rows[port][:2] for port in ("listen", "control_listen")] == [
        ("ok", f"fl-server serves at {address}") for address in (fleet.listen, fleet.control)
    ]
    other = site.other.table("server")
    assert examine(capsys, "server", tmp_path, **keys | {"tls": other})["listen"][0] == "fail"
