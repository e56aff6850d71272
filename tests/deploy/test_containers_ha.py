"""The compose file of two servers keeps the same rules, and its services train on while a server is killed."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests import postgres, s3
from tests.deploy.containers import DOCKER, Containers
from tests.deploy.on_this_host import Running, run
from tests.deploy.test_containers import tool
from tests.waiting import until

COMPOSE = DOCKER / "compose.ha.yml"
LOADED: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
SERVICES: dict[str, dict[str, Any]] = LOADED["services"]
SINGLE: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yml").read_text())["services"]
STORES = ("database", "objects")


def test_the_compose_file_fits_its_schema() -> None:
    done = run([tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(COMPOSE)])
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_more_privileges_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[1-9]\d*:\d+", service["user"])
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"\d+[mg]", service["mem_limit"])
    assert 0 < service["pids_limit"] <= 512
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+(\.\d+)?", service["image"])
    assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", []))
    if service["restart"] != "no":
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"][0] == "CMD"
        assert name in STORES or service["command"][0] == "run-daemon"


def test_only_servers_reach_the_stores_and_both_have_the_same_state() -> None:
    assert LOADED["networks"]["stores"] == {"internal": True}
    for name, service in SERVICES.items():
        networks = service.get("networks", ["default"])
        assert ("stores" in networks) == (name in (*STORES, "server-1", "server-2")), name
        assert ("default" in networks) == (name not in STORES), name
    first, second = SERVICES["server-1"], SERVICES["server-2"]
    assert first["command"] == second["command"]
    assert first["environment"] == second["environment"]
    assert not set(first["ports"]) & set(second["ports"])


def test_every_volume_exists_and_no_service_sees_the_key_of_another() -> None:
    seen: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for mount in service.get("volumes", []):
            if mount["type"] == "bind":
                assert (DOCKER / mount["source"]).exists()
                assert mount["read_only"] is True
            else:
                assert mount["source"] in LOADED["volumes"]
                seen.setdefault(mount["source"], set()).add(name)
    assert seen.pop("ca") == {"certs"}
    assert all(len(names - {"certs"}) == 1 for names in seen.values()), seen
    targets = {mount["target"] for mount in SERVICES["certs"]["volumes"] if mount["type"] == "volume"}
    targets |= {mount["target"] for mount in SINGLE["certs"]["volumes"] if mount["type"] == "volume"}
    assert targets == set(re.findall(r"/certs/\S+", (DOCKER / "Dockerfile").read_text()))


def test_no_password_is_in_the_file_and_new_ones_are_drawn_each_time() -> None:
    names = set(re.findall(r"\$\{(\w+):\?", COMPOSE.read_text()))
    drawn = [run([str(DOCKER / "ha-secrets.sh")]).stdout for _ in range(2)]
    assert {line.partition("=")[0] for line in drawn[0].splitlines()} == names
    assert all(re.fullmatch(r"\w+=[0-9a-f]{48}", line) for line in drawn[0].splitlines())
    assert drawn[0] != drawn[1]


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Containers, dict[str, str]]]:
    """Run the two stores, where the services of the file find them."""
    containers = Containers(tmp_path, SERVICES)
    (tmp_path / "weed").mkdir()
    port = containers.translator.port("database:5432")
    cluster = postgres.Cluster(postgres.folder_for_anybody(), listen="127.0.0.1", port=port)
    try:
        cluster.new_database("fedring")
        with s3.s3_server(tmp_path / "weed", "fedring") as keys:
            yield containers, keys
    finally:
        cluster.stop()


def test_the_services_train_on_when_a_server_is_killed(stores: tuple[Containers, dict[str, str]]) -> None:
    containers, keys = stores
    for _ in range(2):  # the second time, nothing may be made again
        done = run(containers.command("certs"))
        assert done.returncode == 0, done.stderr
    with ExitStack() as stack:
        running = {}
        for name in ("server-1", "server-2", "client-1", "client-2"):
            env = containers.env(name) | (keys if name.startswith("server") else {})
            log = containers.folder / f"{name}.log"
            running[name] = stack.enter_context(Running(containers.command(name), log, env))
            if name == "server-1":
                running[name].first_line()
            elif name == "server-2":
                until(partial(_waits, log))
        for server in ("server-1", "server-2"):
            env = containers.env("flctl")
            env["FLCTL_SERVER"] = containers.translator.translate(f"{server}:8444", {})
            done = run(containers.command("flctl", "start-round", "--wait", "--output", "json"), env)
            assert done.returncode == 0, done.stderr
            assert "round_published" in [json.loads(line)["kind"] for line in done.stdout.splitlines()]
            if server == "server-1":
                running[server].__exit__(None, None, None)  # SIGKILL
                running["server-2"].first_line()


def _waits(log: Path) -> bool:
    return "waits as a standby" in log.read_text()
