"""Daemons with certificates and tokens: trainings, new certificates, revoked tokens, and bad files."""

import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from fedring.control.access import Access
from fedring.ctl.main import main
from fedring.ctl.operate.port_health import check_health
from fedring.daemon.exits import Exit
from fedring.rpc.channel import open_sync_channel
from fedring.rpc.tls import Tls
from tests import forks
from tests.fleets import Control, Fleet, Programs
from tests.pki import Pki
from tests.waiting import until

SECONDS = 60.0


def test_a_client_uses_its_new_certificate_without_a_restart(tmp_path: Path) -> None:
    pki, other = Pki(tmp_path / "pki"), Pki(tmp_path / "other")
    for authority in (pki, other):
        authority.issue("client-0")
    mine = tmp_path / "mine"
    mine.mkdir()
    install(other, "client-0", mine)  # a certificate that this server does not accept
    (mine / "ca.crt").write_bytes((pki.folder / "ca.crt").read_bytes())
    table = Tls(cert=mine / "client-0.crt", key=mine / "client-0.key", ca=mine / "ca.crt").model_dump(mode="json")
    with (
        Fleet(tmp_path, {"tls": pki.table("server")}, [{"tls": table}]) as fleet,
        open_sync_channel(fleet.control, pki.tls("operator")) as channel,
        Control(fleet.control, channel=channel) as control,
    ):
        events = control.events()
        until(lambda: control.status().refused["handshake"] > 0)
        install(pki, "client-0", mine)
        assert next(event.client_id for event in events if event.kind == "client_joined") == "client-0"


def test_a_server_logs_why_handshakes_failed_with_grpc_verbosity_info(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "pki")
    with Programs(tmp_path, {"tls": pki.table("server")}, env={"GRPC_VERBOSITY": "INFO"}) as fleet:
        assert check_health(fleet.listen, SECONDS, Access(pki.trust())) == "unreachable"
        until(lambda: "PEER_DID_NOT_RETURN_A_CERTIFICATE" in fleet.server.log.read_text())


GROUPED: dict[str, dict[str, Any]] = {
    "data_parallel": {},
    "pipeline": {"model_args": {"layers": 3}, "pipeline": {"stages": 2}},
}


@pytest.mark.parametrize("mode", GROUPED)
def test_workers_train_together_with_mutual_tls(tmp_path: Path, mode: str) -> None:
    pki = Pki(tmp_path / "pki")
    pki.issue("client-0", "client-1")
    clients = [{"tls": pki.table(name)} for name in ("client-0", "client-1")]
    job = {"mode": mode, "min_clients": 2, "rounds": 2, "batch_size": 32, **GROUPED[mode]}
    with (
        Fleet(tmp_path, {"tls": pki.table("server")}, clients) as fleet,
        open_sync_channel(fleet.control, pki.tls("operator")) as channel,
        Control(fleet.control, channel=channel) as control,
    ):
        events = control.events()
        job_id = control.start_job(job).job_id
        formed = [event.text for event in control.follow_job(job_id, events) if event.kind == "group_formed"]
        assert control.job(job_id).state == "completed", [daemon.tail(20) for daemon in fleet.clients]
        assert formed
        assert all("2 workers" in text for text in formed)
        assert [len(round_.clients) for round_ in control.rounds(job_id=job_id)] == [2, 2]


def test_a_client_with_a_token_trains_until_it_is_revoked(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "pki")
    server = pki.table("server") | {"ca": None}
    token = tmp_path / "client-0.token"
    client = {"tls": {"ca": str(pki.folder / "ca.crt")}, "token_file": str(token)}
    control_at = f"unix:{tmp_path}/control.sock"  # without TLS, for the local user
    with Fleet(tmp_path, {"tls": server, "tokens": True, "control_listen": control_at}, [client]) as fleet:
        assert stat.S_IMODE((tmp_path / "control.sock").stat().st_mode) & 0o077 == 0
        with Control(control_at) as control:
            # The client has ended because it has no token.
            assert fleet.clients[0].wait(SECONDS) == Exit.CONFIG
            made = control.tokens.create("client", "client-0")
            token.write_text(made.secret)
            token.chmod(0o600)
            events = control.events()
            fleet.restart(0)
            job_id = control.start_job({"rounds": 1, "min_clients": 1}).job_id
            for _ in control.follow_job(job_id, events):
                pass
            assert control.job(job_id).state == "completed"
            control.tokens.revoke(made.token.token_id)
            assert fleet.clients[0].wait(SECONDS) == Exit.NOT_ALLOWED
            assert "revoked_token" in fleet.clients[0].tail()


def test_the_first_operators_token_is_created_in_the_state_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pki = Pki(tmp_path / "pki")
    server = pki.table("server") | {"ca": None}
    with Fleet(tmp_path, {"tls": server, "tokens": True}) as fleet:
        state = tmp_path / "state" / "server"
        capsys.readouterr()
        create = ["token", "create", "--name", "ann", "--role", "operator"]
        assert main([*create, "--state-dir", str(state)]) == Exit.OK
        file = tmp_path / "ann.token"
        file.write_text(capsys.readouterr().out)
        file.chmod(0o600)
        access = ["--server", fleet.control, "--tls-ca", str(pki.folder / "ca.crt")]
        assert main(["status", *access, "--token-file", str(file)]) == Exit.OK
        assert main(["status", *access]) == Exit.NOT_ALLOWED
        assert "show a certificate that names you, or a token" in capsys.readouterr().err
        file.chmod(0o644)
        assert main(["status", *access, "--token-file", str(file)]) == Exit.CONFIG
        assert main([*create, "--state-dir", str(tmp_path / "nowhere")]) == Exit.CONFIG


@pytest.mark.parametrize(("name", "sentence"), [("past", "expired at"), ("mixed", "does not belong to")])
def test_a_daemon_does_not_start_with_a_bad_certificate(tmp_path: Path, name: str, sentence: str) -> None:
    pki = Pki(tmp_path / "pki")
    pki.issue("mixed")
    pki.sign("past", ended=True)
    shutil.copy(pki.folder / "server.key", pki.folder / "mixed.key")
    tls = pki.tls(name)
    keys = [f"state_dir={tmp_path / 'state'}", f"tls.cert={tls.cert}", f"tls.key={tls.key}", f"tls.ca={tls.ca}"]
    for module in ("server", "client"):
        done = forks.run(f"fedring.{module}.main", "--check-config", *keys, timeout=SECONDS)
        assert done.returncode == Exit.CONFIG
        assert sentence in done.stderr


def install(pki: Pki, name: str, folder: Path) -> None:
    """Replace the certificate and the key in the folder by those of `pki`."""
    for ending in ("key", "crt"):
        new = folder / "new"
        shutil.copy(pki.folder / f"{name}.{ending}", new)  # keeps the file's mode
        new.replace(folder / f"{name}.{ending}")
