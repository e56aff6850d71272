"""The image and the compose file keep our rules, and the commands of the services work without containers."""

import json
import os
import re
import shutil
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.conftest import ROOT, missing
from tests.deploy.containers import DOCKER, Containers
from tests.deploy.on_this_host import PROGRAMS, SECONDS, Running, run
from tests.waiting import until

from fedring.daemon.config import load_config
from fedring.daemon.exits import Exit
from fedring.server.config import ServerConfig

COMPOSE = DOCKER / "compose.yml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
VOLUMES: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["volumes"]
OURS = sorted(name for name, service in SERVICES.items() if service["image"].startswith("fedring:"))
DAEMONS = sorted(name for name, service in SERVICES.items() if service["restart"] != "no")


def tool(name: str) -> str:
    """Return the path of a development tool."""
    if (program := shutil.which(name, path=str(PROGRAMS)) or shutil.which(name)) is None:
        missing(name)
    return str(program)


def test_hadolint_accepts_the_dockerfile() -> None:
    done = run([tool("hadolint"), str(DOCKER / "Dockerfile")])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_compose_file_fits_its_schema() -> None:
    done = run([tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(COMPOSE)])
    assert done.returncode == 0, done.stdout


def test_the_build_context_has_only_the_files_that_the_dockerfile_copies() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M) for word in line.split()}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert "*" in lines
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)
    assert re.findall(r"^USER (.*)$", text, re.M)[-1] == "10001:10001"


def test_the_image_is_tagged_with_our_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    texts = [
        *(path.read_text() for path in DOCKER.glob("*.yml")),
        *(path.read_text() for path in (ROOT / "deploy" / "kubernetes").glob("*.yaml")),
    ]
    assert {tag for text in texts for tag in re.findall(r"image: fedring:(\S+)", text)} == {version}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_more_privileges_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[1-9]\d*:\d+", service["user"])
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert re.fullmatch(r"\d+[mg]", service["mem_limit"])
    assert 0 < service["pids_limit"] <= 512
    assert service["init"] is True
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(\.dev\d+)?", service["image"])  # an explicit version
    assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("name", DAEMONS)
def test_a_daemon_is_checked_restarted_and_given_time_to_drain(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"  # also after a reboot
    drain = load_config(ServerConfig, DOCKER / "server.toml").config.drain_seconds
    assert int(service["stop_grace_period"].removesuffix("s")) > drain + 5
    assert service["healthcheck"]["test"][0] == "CMD"
    if name in OURS:
        assert service["healthcheck"]["test"][1:3] == ["flctl", "health"]
        assert service["command"][0] == "run-daemon"  # or a wrong configuration would be restarted for ever


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_run_daemon_ends_as_its_daemon_ends(script: str, code: int) -> None:
    assert run([str(DOCKER / "run-daemon"), "sh", "-c", script]).returncode == code


@pytest.mark.parametrize("code", [Exit.NOT_ALLOWED, Exit.CONFIG])
def test_run_daemon_waits_when_a_restart_would_not_help(code: int, tmp_path: Path) -> None:
    with Running([str(DOCKER / "run-daemon"), "sh", "-c", f"exit {code}"], tmp_path / "log") as running:
        until(lambda: f"ended with {code}" in running.log.read_text())
        assert running.process.poll() is None
        assert running.end() == code


def test_run_daemon_ends_on_a_signal_that_comes_before_it_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with os.fdopen(os.open(tmp_path / "log", os.O_RDWR | os.O_NONBLOCK)) as log:
        with suppress(BlockingIOError):
            while True:  # a full pipe stops the script at its message, between the daemon's end and the wait
                os.write(log.fileno(), b".")
        command = [str(DOCKER / "run-daemon"), "sh", "-c", f"echo $$; exit {Exit.CONFIG}"]
        with Running(command, tmp_path / "log") as running:
            daemon = Path("/proc") / running.first_line().strip()
            until(lambda: not daemon.exists())
            running.process.terminate()
            os.read(log.fileno(), 1 << 20)
            assert running.process.wait(SECONDS) == Exit.CONFIG


def test_run_daemon_hands_a_signal_on_and_waits_for_the_drain(tmp_path: Path) -> None:
    script = "trap 'echo draining; while [ ! -e drained ]; do :; done; exit 0' TERM; echo ready; while :; do :; done"
    with Running([str(DOCKER / "run-daemon"), "sh", "-c", f"cd {tmp_path}; {script}"], tmp_path / "log") as running:
        assert running.first_line() == "ready\n"
        running.process.terminate()
        assert running.first_line() == "draining\n"
        (tmp_path / "drained").touch()
        assert running.process.wait(SECONDS) == 0


@pytest.mark.parametrize("name", SERVICES)
def test_every_mount_exists_and_shared_mounts_are_read_only(name: str) -> None:
    for mount in SERVICES[name].get("volumes", []):
        if mount["type"] == "bind":
            assert (DOCKER / mount["source"]).exists(), mount
            assert mount["read_only"] is True
        else:
            assert mount["source"] in VOLUMES
            written = not mount.get("read_only")
            assert written == (name == "certs" or not mount["source"].startswith("tls-"))


def test_no_service_sees_the_key_of_another() -> None:
    seen: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for mount in service.get("volumes", []):
            if mount["source"] == "ca" or mount["source"].startswith("tls-"):
                seen.setdefault(mount["source"], set()).add(name)
    assert seen.pop("ca") == {"certs"}
    assert all(len(names - {"certs"}) == 1 for names in seen.values())
    targets = {mount["target"] for mount in SERVICES["certs"]["volumes"] if mount["type"] == "volume"}
    assert targets <= set(re.findall(r"/certs/\S+", (DOCKER / "Dockerfile").read_text()))


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """Start all our services as `docker compose up` does."""
    containers = Containers(tmp_path_factory.mktemp("compose"), SERVICES)
    logs = containers.folder
    for _ in range(2):  # the second time, nothing may be made again
        done = run(containers.command("certs"), containers.env("certs"))
        assert done.returncode == 0, done.stderr
    with ExitStack() as stack:
        for name in ("server", "client-1", "client-2"):
            running = Running(containers.command(name), logs / f"{name}.log", containers.env(name))
            stack.enter_context(running)
            if name == "server":
                running.first_line()
        yield containers


def test_the_services_train_a_federated_round(containers: Containers) -> None:
    command = containers.command("flctl", "start-round", "--wait", "--output", "json")
    done = run(command, containers.env("flctl"))
    assert done.returncode == 0, done.stderr
    kinds = [json.loads(line)["kind"] for line in done.stdout.splitlines()]
    assert "round_published" in kinds
    assert run(containers.command("flctl"), containers.env("flctl")).returncode == 0  # the default command


@pytest.mark.parametrize("name", sorted(set(OURS) & set(DAEMONS)))
def test_the_health_check_of_a_running_service_succeeds(containers: Containers, name: str) -> None:
    deadline = time.monotonic() + SECONDS
    while (done := run(containers.check(name))).returncode and time.monotonic() < deadline:
        pass  # a service that has just started may not serve yet; Docker repeats the check, too
    assert (done.returncode, "serving" in done.stdout) == (0, True), done.stderr


def test_a_caller_without_a_certificate_is_refused(containers: Containers) -> None:
    env = {key: value for key, value in containers.env("flctl").items() if "CERT" not in key and "KEY" not in key}
    assert run(containers.command("flctl"), env).returncode != 0


def test_a_revoked_certificate_reaches_the_running_daemons(containers: Containers) -> None:
    for command in (["flctl", "certs", "revoke", "/certs/ca", "client-2"], []):
        assert run(containers.command("certs", *command), containers.env("certs")).returncode == 0
    until(lambda: "ended with 77" in (containers.folder / "client-2.log").read_text())


def test_every_path_that_a_service_uses_is_mounted() -> None:
    for name in OURS:
        service = SERVICES[name]
        targets = [mount["target"] for mount in service["volumes"]]
        texts = [*service["command"], *service.get("environment", {}).values()]
        binds = [DOCKER / mount["source"] for mount in service["volumes"] if mount["type"] == "bind"]
        texts += [path.read_text() for path in binds if path.suffix == ".toml"]
        used = {path for text in texts for path in re.findall(r"""(?:^|["\s=])(/[\w./-]+)""", text)}
        assert used, name
        for path in used:
            below = any(path == target or path.startswith(f"{target}/") for target in targets)
            above = any(target.startswith(f"{path}/") for target in targets)
            assert below or above, (name, path)


def test_prometheus_scrapes_every_daemon_where_it_listens() -> None:
    targets = [yaml.safe_load(path.read_text()) for path in sorted((DOCKER / "targets").glob("*.yml"))]
    scraped = {target for file in targets for group in file for target in group["targets"]}
    ports = {}
    for name in set(OURS) & set(DAEMONS):
        config = tomllib.loads((DOCKER / SERVICES[name]["command"][2].replace("/etc/fedring/", "")).read_text())
        ports[name] = config["metrics_listen"].rpartition(":")[2]
    assert scraped == {f"{name}:{port}" for name, port in ports.items()}


def test_a_service_listens_on_every_published_port() -> None:
    config = load_config(ServerConfig, DOCKER / "server.toml").config
    listened = {config.listen.rpartition(":")[2], config.control_listen.rpartition(":")[2], str(config.web_port)}
    published = {port.rpartition(":")[2] for port in SERVICES["server"]["ports"]}
    assert published <= listened
    assert (config.web_host, config.web_allowed_hosts) == ("0.0.0.0", ["server"])
    assert not any(address.startswith("127.") for address in (config.listen, config.control_listen))
