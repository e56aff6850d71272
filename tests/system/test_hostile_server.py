"""A server that somebody else wrote, and real clients: whatever names it sends, it runs no code at a client.

The two attacks with which this was once possible come first. Each client is strict: its site demands things of jobs.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedring.ctl.process import stop_all
from fedring.train.models import digits_mlp
from fedring.v1 import federation_pb2 as pb
from tests.fleets import PATIENT
from tests.forks import Daemon
from tests.scripted_server import SECONDS, ScriptedServer

JOB: dict[str, Any] = {
    "mode": "federated",
    "rounds": 9,
    "model": "fedring.train.models:digits_mlp",
    "data": "fedring.data:digits",
    "loss": "fedring.train.losses:cross_entropy",
    "optimizer": "fedring.train.optimizers:sgd",
    "partition": "iid",
    "alpha": 0.5,
    "min_results": 2,
}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
def strict(server: ScriptedServer, tmp_path: Path) -> Iterator[Path]:
    """Run a client whose site has a policy and an account, and yield its folder."""
    state = tmp_path / "state"
    settings = {"server": f"127.0.0.1:{server.port}", "client_id": "alice", "state_dir": str(state), "threads": 1}
    client = Daemon("alice", "fedring.client.main", settings | {"privacy": {"min_clients": 2}}, tmp_path / "alice.log")
    client.env |= PATIENT
    client.start()
    server.joins.get(timeout=SECONDS)
    state.joinpath("privacy.json").write_text("{}")
    yield state
    stop_all([client], SECONDS)


def ask(server: ScriptedServer, round_: int, **fields: Any) -> pb.Failure:
    """Send a job with other names than usual, and return how the client says that it failed."""
    server.train(server.command(digits_mlp(), round_=round_, job=pb.JobSpec(**JOB | fields)))
    return server.failures.get(timeout=SECONDS)


def test_a_job_cannot_start_a_second_client_without_the_policy(server: ScriptedServer, strict: Path) -> None:
    second = [f"server=127.0.0.1:{server.port}", "client_id=mallory", f"state_dir={strict.parent / 'second'}"]
    failure = ask(server, 1, model="fedring.client.main:command", model_args=json.dumps({"arguments": second}))
    assert failure.reason == "not_offered"
    assert server.joins.empty()


def test_a_job_cannot_replace_a_file_of_the_client(server: ScriptedServer, strict: Path, tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "bomb.zip", "w") as archive:
        archive.writestr("privacy.json", '{"forged": true}')
    args = {
        "url": (tmp_path / "bomb.zip").as_uri(),
        "download_root": str(strict),
    }
    name = "torchvision.datasets.utils:download_and_extract_archive"
    assert ask(server, 1, model=name, model_args=json.dumps(args)).reason == "not_offered"
    assert strict.joinpath("privacy.json").read_text() == "{}"
