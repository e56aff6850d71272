"""Which callers are accepted, and with which reasons others are refused: the table of docs/security.md."""

import json
import queue
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from fedring.control.access import Access
from fedring.control.failure import Failure
from fedring.ctl.main import main
from fedring.ctl.operate.port_health import check_health
from fedring.daemon.exits import Exit
from fedring.rpc.channel import open_sync_channel
from fedring.rpc.contract import PROTOCOL
from fedring.rpc.errors import reason_of
from fedring.rpc.tls import PLAINTEXT
from fedring.server.guard.tokens import new_token
from fedring.server.state.sql.store import Store
from fedring.v1 import control_pb2 as pb
from fedring.v1.control_pb2_grpc import ControlServiceStub
from fedring.v1.federation_pb2 import FetchModelRequest, JoinRequest, WatchRequest
from fedring.v1.federation_pb2_grpc import ModelBlobServiceStub, TrainCmdServiceStub
from tests.fleets import Control, Fleet
from tests.pki import Pki, flctl
from tests.waiting import until

SECONDS = 60.0


@dataclass
class Site:
    """A server, two authorities, the first of which it trusts, and an operator's connection."""

    fleet: Fleet
    pki: Pki
    other: Pki
    control: Control
    tokens: dict[str, str] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """Return the numbers of refusals, by reason."""
        return dict(self.control.status().refused)

    def audit(self) -> list[dict[str, Any]]:
        """Return the verbs in the audit log."""
        return self._lines("audit.jsonl")

    def refusals(self) -> list[dict[str, Any]]:
        """Return the refusals in the audit log."""
        return self._lines("refused.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        text = (self.fleet.directory / "state" / "server" / name).read_text()
        return [json.loads(line) for line in text.splitlines()]


@contextmanager
def site(folder: Path, *, mutual: bool, tokens: bool) -> Iterator[Site]:
    """Start a server that asks for certificates if `mutual`, and takes tokens if `tokens`."""
    pki, other = Pki(folder / "pki"), Pki(folder / "other")
    pki.issue("ann", "bob")
    other.issue("ann")
    table = pki.tls("server").model_dump(mode="json")
    if not mutual:
        del table["ca"]
    with Fleet(folder, {"tls": table, "tokens": tokens}) as fleet:
        tls, token = (pki.tls("operator"), "") if mutual else (pki.trust(), keep_token(fleet, "operator"))
        channel = open_sync_channel(fleet.control, tls, token)
        with Control(fleet.control, channel=channel) as control:
            yield Site(fleet, pki, other, control)


def keep_token(fleet: Fleet, role: str, *, ends: float | None = None) -> str:
    """Write a new token of ann into the running server's database; return it."""
    row, token = new_token(role, "ann", 0)
    store = Store(f"sqlite:///{fleet.directory / 'state' / 'server' / 'facts.sqlite'}")
    store.tokens.add(replace(row, expires_at=ends))
    store.close()
    return token


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Start a server that asks for certificates and takes tokens."""
    with site(tmp_path_factory.mktemp("mutual"), mutual=True, tokens=True) as made:
        made.pki.sign("nameless")
        made.pki.sign("past", "fedring://client/past", ended=True)
        yield made


@pytest.fixture(scope="module")
def bearers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Start a server with TLS that asks for tokens only; it knows a good, an expired and a revoked token."""
    with site(tmp_path_factory.mktemp("bearers"), mutual=False, tokens=True) as made:
        control = made.control
        made.tokens["good"] = control.tokens.create("client", "ann").secret
        made.tokens["expired"] = keep_token(made.fleet, "client", ends=1.0)
        revoked = control.tokens.create("client", "ann")
        control.tokens.revoke(revoked.token.token_id)
        made.tokens |= {"revoked": revoked.secret, "made up": "fr_0123456789ab_secret", "cut": made.tokens["good"][:-1]}
        yield made


def join(channel: grpc.Channel, client: str, token: str = "") -> Any:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    request = JoinRequest(client_id=client, protocol=PROTOCOL, software="test")
    return TrainCmdServiceStub(channel).Join(request, metadata=metadata, timeout=SECONDS)


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Make the call, which must be refused; return the status and the reason."""
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return refused.value.code(), reason_of(refused.value)


HANDSHAKES = ["no certificate", "another authority's", "expired", "plaintext"]


@pytest.mark.parametrize("case", HANDSHAKES)
def test_a_bad_handshake_never_becomes_a_call(mutual: Site, case: str) -> None:
    tls = {
        "no certificate": mutual.pki.trust(),
        "another authority's": mutual.other.tls("ann", ca=mutual.pki),
        "expired": mutual.pki.tls("past"),
        "plaintext": PLAINTEXT,
    }[case]
    before, written = mutual.counts()["handshake"], len(mutual.refusals())
    with open_sync_channel(mutual.fleet.listen, tls) as channel:
        assert refusal(lambda: join(channel, "ann"))[0] is grpc.StatusCode.UNAVAILABLE
    until(lambda: mutual.counts()["handshake"] > before)  # the server may notice it a little later
    assert len(mutual.refusals()) == written


def test_a_client_refuses_a_server_of_another_authority(mutual: Site) -> None:
    with open_sync_channel(mutual.fleet.listen, mutual.pki.tls("ann", ca=mutual.other)) as channel:
        assert refusal(lambda: join(channel, "ann"))[0] is grpc.StatusCode.UNAVAILABLE


CALLS = [
    ("nameless", "join as ann", "UNAUTHENTICATED", "no_identity"),
    ("ann", "join as bob", "PERMISSION_DENIED", "other_client"),
    ("operator", "join as ann", "PERMISSION_DENIED", "not_client"),
    ("server", "join as ann", "PERMISSION_DENIED", "not_client"),
    ("bob", "fetch in ann's session", "PERMISSION_DENIED", "other_session"),
    ("ann", "status", "PERMISSION_DENIED", "not_operator"),
    ("ann", "stop", "PERMISSION_DENIED", "not_operator"),
    ("ann", "join with bob's token", "PERMISSION_DENIED", "two_identities"),
    ("nameless", "call nothing", "UNAUTHENTICATED", "no_identity"),
    ("operator", "call nothing", "PERMISSION_DENIED", "not_client"),
]


@pytest.mark.parametrize(
    ("name", "action", "status", "reason"), CALLS, ids=[f"{who}: {what}" for who, what, *_ in CALLS]
)
def test_a_caller_is_refused_what_its_identity_does_not_allow(
    mutual: Site, name: str, action: str, status: str, reason: str
) -> None:
    ann = session(mutual) if "session" in action else ""
    bob = mutual.control.tokens.create("client", "bob").secret if "token" in action else ""
    before = mutual.counts()
    address = mutual.fleet.control if action in ("status", "stop") else mutual.fleet.listen
    with open_sync_channel(address, mutual.pki.tls(name)) as channel:
        operate = ControlServiceStub(channel)
        fetch = ModelBlobServiceStub(channel).FetchModel
        actions: dict[str, Any] = {
            "join as ann": lambda: join(channel, "ann"),
            "join as bob": lambda: join(channel, "bob"),
            "fetch in ann's session": lambda: list(fetch(FetchModelRequest(), metadata=(("fl-session", ann),))),
            "status": lambda: operate.GetStatus(pb.GetStatusRequest(), timeout=SECONDS),
            "stop": lambda: operate.StopJob(pb.StopJobRequest(), timeout=SECONDS),
            "join with bob's token": lambda: join(channel, "ann", bob),
            "call nothing": lambda: call(channel, "/fedring.v1.TrainCmdService/Nothing"),
        }
        code, found = refusal(actions[action])
    assert (code.name, found) == (status, reason)
    after = mutual.counts()
    # On a busy machine, gRPC may repeat a handshake.
    assert {key for key in after if after[key] != before[key]} - {"handshake"} == {reason}
    assert mutual.refusals()[-1]["result"] == reason


def test_only_a_caller_with_an_identity_learns_that_a_method_is_unknown(mutual: Site) -> None:
    before, written = mutual.counts(), len(mutual.refusals())
    with open_sync_channel(mutual.fleet.listen, mutual.pki.tls("nameless")) as channel:
        path = "/made.up.Service/Method"
        assert refusal(lambda: call(channel, path)) == (grpc.StatusCode.UNAUTHENTICATED, "no_identity")
    assert mutual.counts()["no_identity"] == before["no_identity"] + 1
    assert [line["verb"] for line in mutual.refusals()[written:]] == [
        "an unknown method"
    ]  # without the path, which an unknown caller has chosen
    with open_sync_channel(mutual.fleet.listen, mutual.pki.tls("ann")) as channel:
        assert refusal(lambda: call(channel, path)) == (grpc.StatusCode.UNIMPLEMENTED, "unknown_method")
    assert len(mutual.refusals()) == written + 1


def call(channel: grpc.Channel, path: str) -> bytes:
    """Call the method with an empty message; return the answer."""
    raw: Any = channel.unary_unary(path)
    return bytes(raw(b"", timeout=SECONDS))


def session(site: Site) -> str:
    """Join as ann with her certificate; return the session's id."""
    with open_sync_channel(site.fleet.listen, site.pki.tls("ann")) as channel:
        return str(join(channel, "ann").session_id)


TOKENS = [
    ("none", "no_identity"),
    ("made up", "bad_token"),
    ("cut", "bad_token"),
    ("expired", "expired_token"),
    ("revoked", "revoked_token"),
]


@pytest.mark.parametrize(("token", "reason"), TOKENS)
def test_an_invalid_token_is_refused_with_its_reason(bearers: Site, token: str, reason: str) -> None:
    before = bearers.counts()[reason]
    with open_sync_channel(bearers.fleet.listen, bearers.pki.trust()) as channel:
        code, found = refusal(lambda: join(channel, "ann", bearers.tokens.get(token, "")))
    assert (code, found) == (grpc.StatusCode.UNAUTHENTICATED, reason)
    assert bearers.counts()[reason] == before + 1
    assert bearers.refusals()[-1]["result"] == reason


def test_a_client_token_is_good_for_that_client_only_and_not_for_operators(bearers: Site) -> None:
    good = bearers.tokens["good"]
    with open_sync_channel(bearers.fleet.listen, bearers.pki.trust()) as channel:
        assert join(channel, "ann", good).session_id
        assert refusal(lambda: join(channel, "bob", good)) == (grpc.StatusCode.PERMISSION_DENIED, "other_client")
    with open_sync_channel(bearers.fleet.control, bearers.pki.trust(), good) as channel:
        status = ControlServiceStub(channel).GetStatus
        assert refusal(lambda: status(pb.GetStatusRequest())) == (grpc.StatusCode.PERMISSION_DENIED, "not_operator")


def test_the_server_stores_only_the_digest_of_a_token(bearers: Site) -> None:
    _, name, rest = bearers.tokens["good"].split("_", 2)  # the secret itself may have underscores
    secret = rest.encode()
    kept = b"".join(path.read_bytes() for path in (bearers.fleet.directory / "state" / "server").glob("facts*"))
    assert name.encode() in kept
    assert secret not in kept


def test_a_revoked_token_ends_the_session_that_it_opened(bearers: Site) -> None:
    made = bearers.control.tokens.create("client", "carol")
    events = bearers.control.events()
    with open_sync_channel(bearers.fleet.listen, bearers.pki.trust()) as channel:
        shown = (("authorization", f"Bearer {made.secret}"),)
        session_id = join(channel, "carol", made.secret).session_id
        requests: queue.SimpleQueue[WatchRequest | None] = queue.SimpleQueue()
        requests.put(WatchRequest(matched=True))
        metadata = (("fl-session", session_id), *shown)
        watch = TrainCmdServiceStub(channel).Watch(iter(requests.get, None), metadata=metadata)
        assert next(event.client_id for event in events if event.kind == "client_joined") == "carol"
        bearers.control.tokens.revoke(made.token.token_id)
        assert refusal(lambda: list(watch)) == (grpc.StatusCode.UNAUTHENTICATED, "revoked_token")
        requests.put(None)
        # so that no round waits for her
        assert next(event.client_id for event in events if event.kind == "client_lost") == "carol"
    events.cancel()


def test_a_session_ends_when_its_token_expires(bearers: Site) -> None:
    token = keep_token(bearers.fleet, "client", ends=time.time() + 10.0)
    with open_sync_channel(bearers.fleet.listen, bearers.pki.trust()) as channel:
        metadata = (("fl-session", join(channel, "ann", token).session_id), ("authorization", f"Bearer {token}"))
        requests: queue.SimpleQueue[WatchRequest | None] = queue.SimpleQueue()
        watch = TrainCmdServiceStub(channel).Watch(iter(requests.get, None), metadata=metadata, timeout=SECONDS)

        def talk() -> None:
            for _ in watch:
                requests.put(WatchRequest())

        assert refusal(talk) == (grpc.StatusCode.UNAUTHENTICATED, "expired_token")
        requests.put(None)


@pytest.mark.parametrize("reason", ["revoked_token", "expired_token"])
def test_what_an_operator_watches_ends_with_the_token(bearers: Site, reason: str) -> None:
    tokens = bearers.control.tokens
    made = tokens.create("operator", "eve", valid_seconds=3 if reason == "expired_token" else 0)
    with open_sync_channel(bearers.fleet.control, bearers.pki.trust(), made.secret) as channel:
        watch = ControlServiceStub(channel).WatchEvents(pb.WatchEventsRequest(), timeout=SECONDS)
        watch.initial_metadata()  # it has begun
        if reason == "revoked_token":
            tokens.revoke(made.token.token_id)
        assert refusal(lambda: list(watch)) == (grpc.StatusCode.UNAUTHENTICATED, reason)


def test_tls_to_a_plaintext_port_fails(server: Fleet, tmp_path: Path) -> None:
    with open_sync_channel(server.listen, Pki(tmp_path / "pki").trust()) as channel:
        assert refusal(lambda: join(channel, "ann"))[0] is grpc.StatusCode.UNAVAILABLE


def test_on_loopback_without_tls_and_tokens_every_caller_is_accepted(server: Fleet, control: Control) -> None:
    with open_sync_channel(server.listen) as channel:
        assert join(channel, "anybody", "any token").session_id
    assert set(control.status().refused.values()) == {0}


def test_calls_of_operators_are_in_the_audit_log(mutual: Site) -> None:
    token = mutual.control.tokens.create("client", "dave").token
    with pytest.raises(Failure):
        mutual.control.stop_round()
    mutual.control.tokens.revoke(token.token_id)
    lines = mutual.audit()[-3:]
    assert [line["verb"] for line in lines] == ["token create", "stop --round", "token revoke"]
    assert [line["result"] for line in lines] == ["ok", "no_round", "ok"]
    assert {line["identity"] for line in lines} == {"fedring://operator/operator"}
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") and line["at"] for line in lines)


def test_every_caller_that_passes_the_handshake_may_check_health(mutual: Site, bearers: Site) -> None:
    assert check_health(mutual.fleet.listen, SECONDS, Access(mutual.pki.tls("nameless"))) == "serving"
    assert check_health(bearers.fleet.listen, SECONDS, Access(bearers.pki.trust())) == "serving"


def test_flctl_shows_its_users_certificate(mutual: Site, capsys: pytest.CaptureFixture[str]) -> None:
    tls = mutual.pki.tls("operator")
    options = ["--tls-ca", str(tls.ca), "--tls-cert", str(tls.cert), "--tls-key", str(tls.key)]
    assert main(["status", "--server", mutual.fleet.control, *options, "--output", "json"]) == Exit.OK
    assert json.loads(capsys.readouterr().out)["refused"].keys() >= {"handshake", "no_identity"}
    assert main(["status", "--server", mutual.fleet.control]) == Exit.UNAVAILABLE
    assert "--tls-ca" in capsys.readouterr().err
    ann = [part.replace("operator", "ann") for part in options]
    assert main(["stop", "--server", mutual.fleet.control, *ann]) == Exit.NOT_ALLOWED
    assert "fedring://client/ann is not an operator" in capsys.readouterr().err


def test_a_server_uses_a_new_certificate_without_a_restart(mutual: Site) -> None:
    with open_sync_channel(mutual.fleet.listen, mutual.pki.tls("ann")) as channel:
        assert join(channel, "ann").session_id
        before = serial(mutual)
        flctl("certs", "renew", mutual.pki.folder, "server")
        assert serial(mutual) != before
        assert join(channel, "ann").session_id  # over the existing connection
    with open_sync_channel(mutual.fleet.listen, mutual.pki.tls("ann")) as channel:
        assert join(channel, "ann").session_id


def test_a_server_keeps_its_certificate_until_the_new_one_is_complete(mutual: Site) -> None:
    key, before = mutual.pki.folder / "server.key", serial(mutual)
    kept = key.read_bytes()
    key.write_bytes((mutual.pki.folder / "ann.key").read_bytes())
    assert serial(mutual) == before
    key.write_bytes(kept)
    assert serial(mutual) == before


def serial(site: Site) -> int:
    """Return the serial number of the server's present certificate, from a TLS handshake."""
    tls, (host, _, port) = site.pki.tls("ann"), site.fleet.listen.rpartition(":")
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.load_cert_chain(str(tls.cert), str(tls.key))
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), SECONDS) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as encrypted,
    ):
        shown = encrypted.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number
