"""The systemd units are valid and hardened, and the daemons work as the units expect."""

import json
import os
import shutil
import signal
import socket
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from tests.conftest import ROOT, missing
from tests.deploy.on_this_host import PROGRAMS, SECONDS, Running, Translator, run
from tests.deploy.units import UNITS, Unit

from fedring.daemon.exits import Exit
from fedring.rpc.certificates import load_authorities
from fedring.rpc.handshake import shown_at
from fedring.server.config import ServerConfig

SERVER, CLIENT = UNITS / "fl-server.service", UNITS / "fl-client@.service"
GPU = UNITS / "fl-client@.service.d" / "gpu.conf"
SHARED = UNITS / "fl-server.service.d" / "shared.conf"
BEAT_SECONDS = 0.2


@pytest.fixture(scope="module")
def analyze() -> str:
    """Return the path of systemd-analyze."""
    if (program := shutil.which("systemd-analyze")) is None:
        missing("systemd-analyze")
    return str(program)


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    """Copy the units to a folder, with programs that exist."""
    for unit in (SERVER, CLIENT):
        text = unit.read_text()
        for program in ("fl-server", "fl-client"):
            text = text.replace(f"/opt/fedring/bin/{program} ", "/bin/true ")
        (tmp_path / unit.name.replace("@", "@a")).write_text(text)
    return tmp_path


def test_systemd_analyze_accepts_the_units(analyze: str, runnable: Path) -> None:
    units = sorted(map(str, runnable.glob("*.service")))
    done = run([analyze, "verify", "--man=no", *units])
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""


def test_the_check_finds_a_mistake_in_a_unit(analyze: str, runnable: Path) -> None:
    unit = runnable / SERVER.name
    unit.write_text(unit.read_text().replace("ProtectSystem=strict", "ProtectSystem=strct"))
    assert "strct" in run([analyze, "verify", "--man=no", str(unit)]).stderr


@pytest.mark.parametrize("drop_in", [None, GPU, SHARED], ids=["without", "with-gpu", "with-shared"])
@pytest.mark.parametrize("unit", [SERVER, CLIENT], ids=lambda unit: unit.name)
def test_the_units_are_hardened(analyze: str, runnable: Path, unit: Path, drop_in: Path | None) -> None:
    file = runnable / unit.name.replace("@", "@a")
    if drop_in:
        file.write_text(file.read_text() + drop_in.read_text())
    done = run([analyze, "security", "--offline=yes", "--threshold=20", "--no-pager", str(file)])
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("path", [SERVER, CLIENT], ids=lambda path: path.name)
def test_systemd_waits_for_the_drain_and_does_not_restart_after_permanent_errors(path: Path) -> None:
    unit = Unit(path)
    drain = tomllib.loads((UNITS / "server.toml").read_text())["drain_seconds"]
    assert unit.seconds("TimeoutStopSec") > drain + 5
    assert unit["Restart"] == "on-failure"
    assert {int(code) for code in unit["RestartPreventExitStatus"].split()} == {Exit.NOT_ALLOWED, Exit.CONFIG}
    assert unit["Type"] == "notify"
    assert ("ExecReload" in unit) == (path is CLIENT)  # the server reads nothing again
    assert unit.seconds("WatchdogSec") >= 30


@pytest.mark.parametrize("path", [SERVER, CLIENT], ids=lambda path: path.name)
def test_a_unit_sees_its_own_key_and_no_other(path: Path) -> None:
    unit = Unit(path)
    used = {Path(word.partition("=")[2]).parent for word in unit["ExecStart"].split() if word.startswith("tls.")}
    assert used == {Path(unit["BindReadOnlyPaths"])}
    assert unit["TemporaryFileSystem"] == "/etc/fedring/tls:ro"
    assert "LoadCredential" not in unit  # with a copy, a renewed certificate would need a restart
    assert "d /etc/fedring/tls 0750 root fedring" in (UNITS / "fedring.tmpfiles").read_text()


def test_make_install_units_puts_all_files_where_systemd_finds_them(analyze: str, tmp_path: Path) -> None:
    options = [f"DESTDIR={tmp_path}", "PREFIX=/srv/fl", "GPU=1"]
    for _ in range(2):  # the second time over existing files
        done = run(["make", "--directory", str(ROOT), "install-units", *options])
        assert done.returncode == 0, done.stderr
    units = tmp_path / "etc" / "systemd" / "system"
    installed = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert installed == {
        "etc/systemd/system/fl-server.service",
        "etc/systemd/system/fl-client@.service",
        "etc/systemd/system/fl-client@.service.d/gpu.conf",
        "usr/lib/sysusers.d/fedring.conf",
        "usr/lib/tmpfiles.d/fedring.conf",
        "etc/fedring/server.toml",
        "etc/fedring/client.toml",
    }
    assert Unit(units / "fl-server.service")["ExecStart"].startswith("/srv/fl/bin/fl-server /etc/fedring/server.toml ")


def test_servers_that_share_a_state_are_installed_with_their_secrets(analyze: str, tmp_path: Path) -> None:
    secrets = tmp_path / "etc" / "fedring" / "stores.env"
    for _ in range(2):  # the second time over existing files
        done = run(["make", "--directory", str(ROOT), "install-units", f"DESTDIR={tmp_path}", "SHARED=1"])
        assert done.returncode == 0, done.stderr
        assert secrets.stat().st_mode & 0o777 == 0o600
        secrets.write_text("PGPASSWORD=x\n")
    assert secrets.read_text() == "PGPASSWORD=x\n"
    unit = tmp_path / "etc" / "systemd" / "system" / "fl-server.service"
    drop_in = tmp_path / "etc" / "systemd" / "system" / "fl-server.service.d" / "shared.conf"
    assert Unit(drop_in)["EnvironmentFile"] == "/etc/fedring/stores.env"
    assert str(int(Exit.TRY_AGAIN)) not in Unit(unit)["RestartPreventExitStatus"].split()
    unit.write_text(unit.read_text().replace("/opt/fedring/bin/fl-server ", "/bin/true "))
    done = run([analyze, "verify", "--man=no", str(unit)])
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""


def test_the_example_of_a_shared_state_is_accepted() -> None:
    text = (UNITS / "server.toml").read_text()
    shown = {key: f'{key} = "' for key in ("state_url", "blob_url")}
    for line in shown.values():
        assert f"# {line}" in text
        text = text.replace(f"# {line}", line)
    given = ServerConfig.model_validate(tomllib.loads(text) | {"state_dir": "x", "insecure": True})
    assert (given.state_url, given.blob_url) == ("postgresql://fedring@db.example.org/fedring", "s3://models/fedring")


def test_the_user_of_the_units_is_created(tmp_path: Path) -> None:
    if (program := shutil.which("systemd-sysusers")) is None:
        missing("systemd-sysusers")
    (tmp_path / "etc").mkdir()
    done = run([str(program), f"--root={tmp_path}", str(UNITS / "fedring.sysusers")])
    assert done.returncode == 0, done.stderr
    assert "fedring:" in (tmp_path / "etc" / "passwd").read_text()
    assert (Unit(SERVER)["User"], Unit(CLIENT)["User"]) == ("fedring", "fedring")


class Manager:
    """systemd's side of the notification socket."""

    def __init__(self, path: Path, log: Path) -> None:
        self._log = log
        self.env = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": str(int(BEAT_SECONDS * 1e6))}
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))

    def until(self, wanted: str) -> str:
        """Return the next message that contains `wanted`."""
        deadline = time.monotonic() + SECONDS
        while True:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                message = self.socket.recv(1 << 16).decode()
            except TimeoutError:
                pytest.fail(f"{wanted} did not come:\n{self._log.read_text()[-3000:]}")
            if wanted in message:
                return message

    def forget(self) -> None:
        """Read and drop all messages that were sent before."""
        self.socket.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                self.socket.recv(1 << 16)

    def silent(self) -> bool:
        """Return whether no message arrives for the time of several heartbeats."""
        self.forget()
        self.socket.settimeout(5 * BEAT_SECONDS)
        try:
            self.socket.recv(1 << 16)
        except TimeoutError:
            return True
        return False


class Host:
    """A machine with both units installed, with a folder as its root; it starts them as root does."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.translator, self._stack = folder, Translator(), stack
        for below in ("etc", "logs", "data"):
            (folder / below).mkdir()
        for name in ("server.toml", "client.toml"):
            text = self.translator.translate((UNITS / name).read_text(), {"/var/lib/fedring": folder}, "host")
            (folder / "etc" / name).write_text(text)
        done = run(["flctl", "certs", "init", str(folder / "tls"), "--host", "127.0.0.1"])
        assert done.returncode == 0, done.stderr

    @property
    def operator(self) -> dict[str, str]:
        """Return the environment of an operator's flctl."""
        tls = {key: str(self.folder / "tls" / f"operator.{key}") for key in ("crt", "key")}
        return {
            "FLCTL_SERVER": f"127.0.0.1:{self.translator.port('host:8444')}",
            "FLCTL_TLS_CA": str(self.folder / "tls" / "ca.crt"),
            "FLCTL_TLS_CERT": tls["crt"],
            "FLCTL_TLS_KEY": tls["key"],
        }

    def install(self, name: str) -> None:
        """Install the daemon's present certificates as docs/deployment.md says, except for their group."""
        target = self.folder / "etc" / "tls" / name
        target.mkdir(parents=True, exist_ok=True)
        files = [str(self.folder / "tls" / file) for file in ("ca.crt", f"{name}.crt", f"{name}.key")]
        done = run(["install", "-m640", "-t", str(target), *files])
        assert done.returncode == 0, done.stderr

    def start(self, path: Path, instance: str = "") -> tuple[Running, Manager]:
        """Start the unit's command with its certificates; return it, and the manager that it notifies."""
        unit, name = Unit(path), instance or "server"
        manager = Manager(self.folder / f"notify-{name}", self.folder / "logs" / name)
        self._stack.callback(manager.socket.close)
        if instance:
            done = run(["flctl", "certs", "issue", str(self.folder / "tls"), instance, "--role", "client"])
            assert done.returncode == 0, done.stderr
        self.install(name)
        for key, below in (("StateDirectory", "state"), ("RuntimeDirectory", "run")):
            if key in unit:
                (self.folder / below / unit[key].replace("%i", instance)).mkdir(parents=True)
        specifiers = {"%S": "state", "%t": "run", "/etc/fedring": "etc"}
        command = unit["ExecStart"].replace("%i", instance)
        for word, folder in specifiers.items():
            command = command.replace(word, str(self.folder / folder))
        command = command.replace("/opt/fedring/bin", str(PROGRAMS))
        running = Running(command.split(), self.folder / "logs" / name, manager.env)
        return self._stack.enter_context(running), manager


def freeze(running: Running) -> None:
    """Freeze the command; return when all its threads have stopped."""
    running.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, running.process.pid, os.WSTOPPED)


def wait_for_training(host: Host) -> None:
    """Return when the client is training."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done = run(["flctl", "clients", "--output", "json"], host.operator)
        if any(client["activity"] == "training" for client in json.loads(done.stdout)["clients"]):
            return
    pytest.fail("the client does not train")


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="fl-") as folder, ExitStack() as stack:  # a short path, for Unix sockets
        yield Host(Path(folder), stack)


def test_the_server_notifies_systemd_when_it_is_ready_alive_and_stopping(host: Host) -> None:
    server, manager = host.start(SERVER)
    server.first_line()
    ready = manager.until("READY=1")
    assert "WATCHDOG=1" not in ready
    assert manager.until("WATCHDOG=1")
    freeze(server)
    assert manager.silent()
    server.process.send_signal(signal.SIGCONT)
    assert manager.until("WATCHDOG=1")
    server.process.send_signal(signal.SIGTERM)
    assert "STATUS=" in manager.until("STOPPING=1")
    assert server.process.wait(Unit(SERVER).seconds("TimeoutStopSec")) == 0


def test_a_renewed_certificate_needs_no_restart_and_no_reload(host: Host) -> None:
    server, _ = host.start(SERVER)
    address = json.loads(server.first_line())["listen"]
    before = shown_at(address, SECONDS)
    done = run(["flctl", "certs", "renew", str(host.folder / "tls"), "server"])
    assert done.returncode == 0, done.stderr
    host.install("server")
    renewed = load_authorities(host.folder / "tls" / "server.crt")[0].public_bytes(Encoding.DER)
    assert shown_at(address, SECONDS) == renewed != before
    assert server.process.poll() is None


def test_the_client_sends_heartbeats_during_a_long_epoch_and_can_be_stopped_in_it(host: Host) -> None:
    server, _ = host.start(SERVER)  # it goes on even if nobody reads its notifications
    server.first_line()
    client, manager = host.start(CLIENT, "ward-7")
    assert manager.until("READY=1")
    assert manager.until("in session").startswith("STATUS=")
    done = run(["flctl", "start-round", "min_clients=1", "epochs=1000000", "lr=1e-6"], host.operator)
    assert done.returncode == 0, done.stderr
    wait_for_training(host)
    manager.forget()
    for _ in range(5):
        assert manager.until("WATCHDOG=1")
    health = run(["flctl", "health", "--timeout", "60", "--at", f"unix:{host.folder}/run/fedring-client/ward-7/health"])
    assert (health.returncode, "serving" in health.stdout) == (0, True)
    freeze(client)
    assert manager.silent()
    client.process.send_signal(signal.SIGCONT)
    client.process.send_signal(signal.SIGTERM)
    assert manager.until("STOPPING=1")
    assert client.process.wait(Unit(CLIENT).seconds("TimeoutStopSec")) == 0
