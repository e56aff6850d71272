"""The image is built from the Dockerfile, and the services of compose.yml run from it: one federated round.

Where not even an engine may start a container, its parts still work. buildah builds the image with
`--isolation chroot` on a Debian of our own, named like the Dockerfile's base. systemd-nspawn runs what compose.yml
says from the image's root: read-only, without capabilities, as the image's user, each service with its own network.
"""

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.conftest import ROOT
from tests.deploy import roots
from tests.deploy.roots import Container, Network
from tests.waiting import until

from fedring.version import VERSION

DOCKER = ROOT / "deploy" / "docker"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yml").read_text())["services"]
DAEMONS = ("server", "client-1", "client-2")
USER = "10001"
PYTHON = ("python3", "python3-venv", "python-is-python3")
SECONDS = 120.0
READ_PAGE = 'import urllib.request as u; print(u.urlopen("http://server:8080/").read()[:20])'

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


class Buildah:
    """buildah with its files in a folder; its images and mounts are gone at the end of the `with` block."""

    def __init__(self, folder: Path) -> None:
        self._command: list[str | Path] = ["buildah", "--root", folder / "storage", "--runroot", folder / "run"]

    def __enter__(self) -> "Buildah":
        return self

    def __exit__(self, *_: object) -> None:
        for verb in (("umount", "--all"), ("rm", "--all"), ("rmi", "--all", "--force")):
            roots.run(*self._command, *verb, ok=False)

    def __call__(self, *words: str | Path) -> str:
        """Run a command of buildah; return what it prints."""
        return roots.run(*self._command, *words).stdout.strip()


@dataclass(frozen=True)
class Image:
    """The image, with its root mounted read-write in a folder."""

    config: dict[str, Any]
    root: Path


def build(buildah: Buildah, folder: Path) -> Image:
    """Build the image as the Dockerfile says, with packages that are downloaded before."""
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, roots.debian(folder / "base", *PYTHON), "/")
    (base,) = re.findall(r"^ARG PYTHON=(\S+)$", (DOCKER / "Dockerfile").read_text(), re.M)
    buildah("commit", "--quiet", "--rm", container, f"docker.io/library/python:{base}")
    volumes = {"/wheels": roots.wheels(folder / "wheels"), "/etc/pip.conf": roots.pip_configuration(folder, "/wheels")}
    source = roots.checkout(folder / "source")
    how = ["--isolation", "chroot", "--network", "host", "--pull-never", "--format", "docker"]
    mounts = [f"--volume={path}:{at}:ro" for at, path in volumes.items()]
    tag = SERVICES["server"]["image"]
    buildah("bud", *how, *mounts, "--file", source / "deploy" / "docker" / "Dockerfile", "--tag", tag, source)
    config = json.loads(buildah("inspect", "--type", "image", tag))["Docker"]["config"]
    return Image(config, Path(buildah("mount", buildah("from", tag))))


class Compose:
    """Runs services of compose.yml from the image, with folders as volumes."""

    def __init__(self, image: Image, network: Network, folder: Path, stack: ExitStack) -> None:
        self._image, self._network, self._folder, self._stack = image, network, folder, stack
        (folder / "hosts").write_text(network.hosts())

    def up(self, name: str, *command: str) -> Container:
        """Start a service, or another command in its place."""
        return self._stack.enter_context(self._container(name, *command))

    def run(self, name: str, *command: str) -> tuple[int, str]:
        """Run a service, or another command in its place, to its end; return the exit code and the output."""
        with self._container(name, *command) as container:
            return container.process.wait(SECONDS), container.text()

    def _container(self, name: str, *command: str) -> Container:
        service = SERVICES[name]
        assert service["user"].split(":")[0] == USER
        environment = dict(word.split("=", 1) for word in self._image.config["Env"])
        environment |= service.get("environment", {})
        words = [*service.get("entrypoint", []), *(command or service["command"])]
        space = self._network.space(name if name in self._network.addresses else "flctl")
        options = [
            *("--as-pid2", "--read-only"),
            f"--network-namespace-path=/run/netns/{space}",
            *(f"--tmpfs={path}" for path in service["tmpfs"]),
            f"--bind-ro={self._folder / 'hosts'}:/etc/hosts",
            *(self._bind(mount) for mount in service.get("volumes", [])),
            *(f"--setenv={key}={value}" for key, value in environment.items()),
            f"--chdir={self._image.config['WorkingDir']}",
            *("--", "setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"),
            *("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", *words),
        ]
        log = self._folder / f"{name}-{time.monotonic_ns()}.log"
        return Container(self._image.root, options, log)

    def _bind(self, mount: dict[str, Any]) -> str:
        """Return nspawn's option for a mount. As engines do, make what is missing of its place, and of a volume."""
        source, place = DOCKER / mount["source"], self._image.root / mount["target"].removeprefix("/")
        if mount["type"] == "volume":
            source = self._folder / mount["source"]
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch() if source.is_file() else place.mkdir()
        if not source.exists():
            source.mkdir()
            os.chown(source, place.stat().st_uid, place.stat().st_gid)
        return f"--bind{'-ro' if mount.get('read_only') else ''}={source.resolve()}:{mount['target']}"

    def until_healthy(self, name: str, *check: str) -> None:
        """Repeat a health check of a running service until it succeeds, as an engine does."""
        deadline = time.monotonic() + SECONDS
        while (found := self.run(name, *check))[0] != 0:
            assert time.monotonic() < deadline, (name, found)


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    """Build the image; this takes minutes, and some gigabytes until the end of the tests."""
    roots.require("buildah", "debootstrap", "systemd-nspawn", "ip", "git")
    with (
        tempfile.TemporaryDirectory(prefix="fl-image-") as folder,
        roots.clean_cgroups(),
        Buildah(Path(folder)) as made,
    ):
        yield build(made, Path(folder))


@pytest.fixture
def compose(image: Image, tmp_path: Path) -> Iterator[Compose]:
    """Make certificates as the service `certs` does, for services that are still to be started."""
    with Network([*DAEMONS, "flctl"]) as network, ExitStack() as stack:
        compose = Compose(image, network, tmp_path, stack)
        for _ in range(2):  # the second time, nothing may be made again
            assert compose.run("certs")[0] == 0
        yield compose


def test_the_image_has_the_programs_a_health_check_and_a_user(image: Image, compose: Compose) -> None:
    for program in ("fl-server", "fl-client", "flctl"):
        code, output = compose.run("certs", program, "--version")
        assert (code, output.splitlines()[0].endswith(VERSION)) == (0, True)  # systemd-nspawn may say more
    assert image.config["User"] == f"{USER}:{USER}"
    assert image.config["StopSignal"] == "SIGTERM"
    assert image.config["Healthcheck"]["Test"][0] == "CMD"


def test_the_services_of_compose_train_a_round_and_drain(compose: Compose) -> None:
    daemons = {}
    for name in DAEMONS:
        daemons[name] = compose.up(name)
        compose.until_healthy(name, *SERVICES[name]["healthcheck"]["test"][1:])
    code, output = compose.run("flctl", "start-round", "--wait", "--output", "json")
    assert code == 0, (output, daemons["server"].text()[-3000:])
    assert "round_published" in [json.loads(line)["kind"] for line in output.splitlines() if line.startswith("{")]
    code, output = compose.run("client-1", "python", "-c", READ_PAGE)
    assert code == 0, output
    for daemon in reversed(daemons.values()):
        os.kill(daemon.command, signal.SIGTERM)
        assert daemon.process.wait(SECONDS) == 0, daemon.text()[-3000:]


def test_the_health_check_of_the_image_finds_a_server_without_compose(image: Image, compose: Compose) -> None:
    command = ["run-daemon", "fl-server", "listen=127.0.0.1:8443", "health_listen=127.0.0.1:8445"]
    compose.up("server", *command)
    compose.until_healthy("server", *image.config["Healthcheck"]["Test"][1:])


def test_a_daemon_with_a_wrong_configuration_is_not_restarted_for_ever(compose: Compose) -> None:
    server = compose.up("server", "run-daemon", "fl-server", "/etc/fedring/server.toml", "no_such_key=1")
    until(lambda: "ended with 78" in server.text())
    assert server.process.poll() is None
    os.kill(server.command, signal.SIGTERM)
    assert server.process.wait(SECONDS) == 78
