"""The units run under a real systemd: a Debian is booted, and the commands of docs/deployment.md are typed into it.

The machine is a folder that systemd-nspawn boots. It has a network of its own, with loopback only, so server and client
run side by side. Limits of memory and tasks (MemoryMax=, TasksMax=) are not tested: a container may not be given them.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.deploy import roots
from tests.deploy.roots import Container
from tests.pages import Page
from tests.processes import children_of
from tests.waiting import until

from fedring.daemon.exits import Exit

DEBIAN = ("python3", "python3-venv", "systemd-sysv", "dbus", "make")
RUN = "/usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C"
REBOOTED = 133  # what systemd-nspawn ends with when its machine reboots
SERVER, CLIENT = "fl-server", "fl-client@ward-7"
JOB = 'rounds = 2\nmin_clients = 1\nmodel = "fedring.train.models:digits_mlp"\ndata = "fedring.data:digits"\n'

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


class Machine:
    """A machine with a folder as its disk. Where `wheels` are on this host, it has /wheels."""

    def __init__(self, root: Path, wheels: Path, stack: ExitStack) -> None:
        self._root, self._wheels, self._stack = root, wheels, stack
        self.container = self._boot()

    def _boot(self) -> Container:
        options = ["--boot", "--private-network", f"--bind-ro={self._wheels}:/wheels"]
        container = self._stack.enter_context(Container(self._root, options, self._root.with_suffix(".log")))
        until(lambda: children_of(container.process.pid))
        return container

    def reboot(self) -> None:
        """Shut the machine down, and boot it again."""
        self.sh("systemctl reboot")
        assert self.container.process.wait(roots.SECONDS) == REBOOTED
        self.container = self._boot()
        self.wait()

    def wait(self) -> None:
        """Return when the machine has started everything."""
        until(lambda: self.sh("systemctl is-system-running --wait", ok=False).stdout.strip() in ("running", "degraded"))

    def sh(self, script: str, *, ok: bool = True, seconds: float = roots.SECONDS) -> subprocess.CompletedProcess[str]:
        """Run a script as root, in the folder of the checkout; with `ok`, it must succeed."""
        enter = [
            "nsenter",
            f"--target={self.container.first}",
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--cgroup",
        ]
        words = [*enter, "--root", "--wd", *RUN.split(), "bash", "-euxc", f"cd /root/fedring\n{script}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
        assert done.returncode == 0 or not ok, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done

    def show(self, unit: str, key: str) -> str:
        """Return a property of a unit."""
        return self.sh(f"systemctl show --value --property {key} {unit}").stdout.strip()

    def flctl(self, arguments: str, *, ok: bool = True) -> subprocess.CompletedProcess[str]:
        """Run flctl as the operator."""
        return self.sh(f"{OPERATOR}/opt/fedring/bin/flctl {arguments}", ok=ok)


def blocks() -> list[str]:
    """Return the shell blocks of the page's part on systemd, for one machine that is server and client."""
    text = Page(ROOT / "docs" / "deployment.md").text.partition("## systemd\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    server, issue, client, operate = found
    issue = re.sub(r"^scp (\S+) \S+$", r"cp \1 /root/", issue, flags=re.MULTILINE)
    client = re.sub(r"^(make install-systemd|cp -r DATA) .*$", "", client, flags=re.MULTILINE)
    return [server, issue, client, operate]


OPERATOR = "".join(re.findall(r"^export .*\n", blocks()[3], re.MULTILINE))


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """Boot a machine, and install a server and a client as the page says; this takes minutes."""
    roots.require("debootstrap", "systemd-nspawn", "nsenter", "git")
    with tempfile.TemporaryDirectory(prefix="fl-systemd-") as name, roots.clean_cgroups():
        folder = Path(name)
        root = roots.debian(folder / "root", *DEBIAN)
        wheels = roots.wheels(folder / "wheels")
        roots.checkout(root / "root" / "fedring")
        (root / "root" / "fedring" / "job.toml").write_text(JOB)
        (root / "etc" / "pip.conf").write_text(roots.pip_configuration(folder, "/wheels").read_text())
        (root / "etc" / "hosts").write_text("127.0.0.1 localhost fl.example.org\n")
        with ExitStack() as stack:
            machine = Machine(root, wheels, stack)
            machine.wait()
            for block in blocks():
                machine.sh(block)
            yield machine


def test_the_page_s_commands_install_daemons_that_train(machine: Machine) -> None:
    rounds = json.loads(machine.flctl("rounds --output json").stdout)["rounds"]
    assert [round_["phase"] for round_ in rounds] == ["published", "published"]
    assert machine.show(SERVER, "StatusText").startswith("round 2")
    for unit in (SERVER, CLIENT):
        assert machine.show(unit, "ActiveState") == "active"
        assert machine.sh(f"systemctl is-enabled {unit}").stdout.strip() == "enabled"
        assert machine.show(unit, "User") == "fedring"
    assert machine.sh("stat --format %U /proc/$(systemctl show -P MainPID fl-server)").stdout.strip() == "fedring"


def test_the_unit_allows_threads_of_grpc_to_wait_for_their_turn(machine: Machine) -> None:
    told = machine.sh("chrt --all-tasks --pid $(systemctl show -P MainPID fl-server)").stdout
    assert {"SCHED_OTHER", "SCHED_BATCH"} <= set(told.split())


def test_the_journal_holds_one_json_object_a_line(machine: Machine) -> None:
    lines = machine.sh("journalctl _SYSTEMD_UNIT=fl-server.service -o cat").stdout.splitlines()
    assert any(json.loads(line).get("event") == "round_published" for line in lines)


@pytest.mark.parametrize("unit", [SERVER, CLIENT])
def test_a_killed_daemon_is_started_again_and_trains(machine: Machine, unit: str) -> None:
    before = int(machine.show(unit, "NRestarts"))
    machine.sh(f"kill -9 $(systemctl show -P MainPID {unit})")
    until(lambda: int(machine.show(unit, "NRestarts")) == before + 1)
    until(lambda: machine.show(unit, "ActiveState") == "active")
    assert machine.flctl("start-round --wait min_clients=1").returncode == 0


def test_a_daemon_that_hangs_is_killed_by_the_watchdog_and_started_again(machine: Machine) -> None:
    before = int(machine.show(SERVER, "NRestarts"))
    machine.sh(f"kill -STOP $(systemctl show -P MainPID {SERVER})")
    with suppress(AssertionError):  # it takes longer than one `until`: WatchdogSec, and then TimeoutStopSec
        until(lambda: int(machine.show(SERVER, "NRestarts")) == before + 1)
    until(lambda: int(machine.show(SERVER, "NRestarts")) == before + 1)
    until(lambda: machine.show(SERVER, "ActiveState") == "active")


def test_a_daemon_sees_only_its_own_key(machine: Machine) -> None:
    script = "nsenter --target $(systemctl show -P MainPID {}) --mount ls /etc/fedring/tls"
    assert machine.sh(script.format(SERVER)).stdout.split() == ["server"]
    assert machine.sh(script.format(CLIENT)).stdout.split() == ["ward-7"]


def test_a_wrong_configuration_ends_with_78_and_is_not_started_again(machine: Machine) -> None:
    machine.sh("cp /etc/fedring/server.toml /root/good.toml; echo 'no_such_key = 1' >> /etc/fedring/server.toml")
    assert machine.sh("systemctl restart fl-server", ok=False).returncode != 0
    assert machine.show(SERVER, "ExecMainStatus") == str(int(Exit.CONFIG))
    assert machine.show(SERVER, "ActiveState") == "failed"  # "activating" if it were to be started again
    assert "no_such_key" in machine.sh("systemctl status --no-pager fl-server", ok=False).stdout
    machine.sh("cp /root/good.toml /etc/fedring/server.toml; systemctl start fl-server")


def test_the_daemons_start_at_boot_and_stop_with_0(machine: Machine) -> None:
    machine.reboot()
    until(lambda: machine.show(SERVER, "ActiveState") == machine.show(CLIENT, "ActiveState") == "active")
    assert machine.flctl("start-round --wait min_clients=1").returncode == 0
    for unit in (CLIENT, SERVER):
        machine.sh(f"systemctl stop {unit}")
        assert (machine.show(unit, "Result"), machine.show(unit, "ExecMainStatus")) == ("success", "0")
