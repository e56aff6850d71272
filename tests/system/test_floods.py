"""Strangers flood a server with few descriptors, and its job goes on."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.bench.lab.trainers import vector_job
from tests.conftest import ROOT
from tests.fleets import Control
from tests.floods import KINDS, flood
from tests.forks import Fork
from tests.waiting import until

DESCRIPTORS = 256
STRANGER = "127.0.0.2"
TRUSTED = 'trusted=["fedring", "tests.bench.lab.trainers"]'
MORE_ROUNDS = 5


@contextmanager
def running(module: str, *settings: str, stdout: int = 1) -> Iterator[Fork]:
    """Run a daemon that may open few files and connections."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = Fork("tests.few_files", [str(DESCRIPTORS), module, *settings, TRUSTED], stdout=stdout, env=env)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def daemons(folder: Path) -> Iterator[tuple[Fork, dict[str, str]]]:
    """Run a server and a client, and yield the server and its addresses."""
    anywhere = ["listen=127.0.0.1:0", "control_listen=127.0.0.1:0", "metrics_listen=127.0.0.1:0"]
    with running("fedring.server.main", *anywhere, f"state_dir={folder / 's'}", stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        with server.stdout as told:
            at = json.loads(told.readline())
            settings = [f"server={at['listen']}", "client_id=a", f"state_dir={folder / 'c'}"]
            with running("fedring.client.main", *settings):
                yield server, at


@pytest.mark.programs
def test_more_connections_than_descriptors_end_nothing_and_rounds_go_on(tmp_path: Path) -> None:
    with daemons(tmp_path) as (server, at), Control(at["control"]) as control:
        control.start_job(vector_job(100_000, rounds=100_000))

        def rounds() -> int:
            return max((each.round for each in control.rounds(limit=1)), default=0)

        until(lambda: rounds() >= MORE_ROUNDS)
        host, _, port = at["listen"].rpartition(":")
        with ExitStack() as held:
            for _ in range(2 * DESCRIPTORS):
                with suppress(TimeoutError):  # the stranger's address may be blocked by now
                    line = socket.create_connection((host, int(port)), timeout=0.1, source_address=(STRANGER, 0))
                    held.enter_context(line)
            first = rounds()
            until(lambda: rounds() >= first + MORE_ROUNDS)
        assert server.poll() is None


@pytest.mark.programs
def test_a_server_outlives_each_flood(tmp_path: Path) -> None:
    with daemons(tmp_path) as (server, at):
        for kind, (script, connections) in KINDS.items():
            host, _, port = at["metrics" if kind.endswith("metrics") else "listen"].rpartition(":")
            flood((host, int(port)), script, min(connections, DESCRIPTORS), seconds=0.5, source=STRANGER)
            with Control(at["control"]) as control:
                assert control.status().version
        assert server.poll() is None
