"""The program fl-client: options, checks and exit codes."""

import json
import queue
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.forks import Fork
from typer.testing import CliRunner

from fedring.client.config import ClientConfig
from fedring.client.main import app
from fedring.client.startup_checks import warn_of_insecurity
from fedring.daemon.exits import Exit
from fedring.rpc.errors import BadRequest
from fedring.train.models import digits_mlp
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 120.0  # torch loads slowly on a busy machine


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments])
    return result.exit_code, result.output


def test_file_overrides_and_flags_make_one_configuration(tmp_path: Path) -> None:
    file = tmp_path / "client.toml"
    file.write_text('client_id = "of-file"\nserver = "127.0.0.1:1"\nthreads = 3\n')
    code, output = run(str(file), "threads=5", "--partition", "2/4", "--client-id", "of-flag", "--print-config")
    assert code == Exit.OK
    assert 'client_id = "of-flag"  # the command line' in output
    assert f'server = "127.0.0.1:1"  # file {file}' in output
    assert "threads = 5  # the command line" in output
    assert "partition_index = 2  # the command line" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["servr=127.0.0.1:1"], "did you mean 'server'"),
        (["nonsense"], "is neither a configuration file"),
        (["--partition", "2"], "is not of the form I/N"),
        (["--partition", "4/4"], "partition_index=4 must be below partition_count=4"),
        (["--server", "fl.example.org:8443"], "set tls.ca, or insecure = true"),
        (["peer_listen=0.0.0.0:7600"], "set tls.ca, tls.cert and tls.key"),
        (["--server", "fl.example.org:8443", "insecure=true", "token_file=t"], "a token must not travel in plaintext"),
        (["--check-config", "tls.ca=/does/not/exist"], "cannot read /does/not/exist"),
        (["--check-config", "token_file=/does/not/exist"], "cannot read /does/not/exist"),
        (["--check-config", "--data-root", "/does/not/exist"], "data_root: /does/not/exist is no folder"),
        (["--check-config", "--state-dir", "/dev/null/nowhere"], "cannot be written"),
        (["--check-config", "trainer=fedring.nothing:at_all"], "There is no module fedring.nothing"),
        (["--check-config", "device=abacus"], "There is no device"),
        (["--check-config", "model=nomod:x"], "There is no module nomod"),
        (["--check-config", "trainer=torch:nn"], "trusted: torch:nn is a module: name a function or a class"),
        (["--check-config", "data=fedring.data:mnist"], "data: MNIST is not part of fedring: set data_root"),
    ],
)
def test_an_error_in_the_configuration_is_reported_in_one_sentence(arguments: list[str], sentence: str) -> None:
    code, output = run(*arguments)
    assert code == Exit.CONFIG
    assert output.startswith("fl-client: ")
    assert sentence in output


def test_a_good_configuration_is_reported_and_no_folder_is_created(tmp_path: Path) -> None:
    code, told = run("--check-config", "--state-dir", str(tmp_path / "new"))
    assert code == Exit.OK
    assert told.endswith("\nthe configuration is good\n")
    assert "jobs may name as loss: fedring.train.losses:cross_entropy\n" in told
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("keys", "covered"),
    [
        (
            ["min_clients=5"],
            ["privacy.min_clients covers the number of updates", "no key of privacy demands masks or noise"],
        ),
        (
            ["min_clients=5", "require_secure_aggregation=true", "max_clip=1", "max_epsilon=3"],
            [
                "privacy.min_clients covers",
                "privacy.max_clip and privacy.max_epsilon cover what models reveal of this client as a whole; the",
                "privacy.require_secure_aggregation covers that the server sees sums",
            ],
        ),
        (["noise_by_clients=true"], ["privacy.noise_by_clients covers"]),
        (
            ["min_sample_noise_multiplier=1"],
            ["privacy.min_sample_noise_multiplier covers what updates and models reveal"],
        ),
        (["max_failed_rounds=3"], []),
    ],
    ids=["clients", "several", "clients' noise", "samples", "nothing"],
)
def test_a_check_says_what_each_demand_covers(tmp_path: Path, keys: list[str], covered: list[str]) -> None:
    code, output = run("--check-config", *(f"privacy.{key}" for key in keys), f"state_dir={tmp_path}")
    lines = [line for line in output.splitlines() if "privacy" in line]
    assert code == Exit.OK
    assert len(lines) == len(covered)
    assert all(line.startswith(start) for line, start in zip(lines, covered, strict=True)), lines


@contextmanager
def started(settings: dict[str, Any], *arguments: str) -> Iterator[Fork]:
    """Run the daemon, and kill it at the end."""
    given = [f"{key}={value}" for key, value in settings.items()]
    with Fork("fedring.client.main", [*given, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.programs
def test_the_daemon_trains_and_exits_cleanly_on_sigterm(server: "ScriptedServer", settings: dict[str, Any]) -> None:
    job: dict[str, Any] = {
        "mode": "federated",
        "model": "fedring.train.models:digits_mlp",
        "data": "fedring.data:digits",
    }
    job |= {"loss": "fedring.train.losses:cross_entropy", "optimizer": "fedring.train.optimizers:sgd"}
    with started(settings, "threads=1") as process:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(digits_mlp(), round_=1, job=pb.JobSpec(**job)))
        assert server.accepted.get(timeout=SECONDS)[0].client_id == "alice"
        long = server.command(digits_mlp(), round_=2, epochs=1_000_000, lr=1e-6, job=pb.JobSpec(**job))
        server.train(long)
        while server.reports.get(timeout=SECONDS).activity != pb.ACTIVITY_TRAINING:
            pass
        process.send_signal(signal.SIGTERM)
        errors, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == Exit.OK, errors
    first = json.loads(errors.splitlines()[0])["text"]
    assert "client alice" in first
    assert settings["server"] in first
    assert "Traceback" not in errors


@pytest.mark.programs
def test_the_daemon_exits_with_78_when_it_is_refused(server: "ScriptedServer", settings: dict[str, Any]) -> None:
    server.on_join = lambda: BadRequest("install another version", reason="wrong_protocol")
    with started(settings) as process:
        errors, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == Exit.CONFIG
    assert "wrong_protocol" in errors
    with pytest.raises(queue.Empty):
        server.accepted.get_nowait()


@pytest.mark.parametrize(
    ("keys", "warnings"),
    [
        ({}, 0),
        ({"server": "fl.example.org:1", "insecure": True}, 1),
        ({"server": "fl.example.org:1", "insecure": True, "peer_listen": "0.0.0.0:1"}, 2),
        ({"server": "fl.example.org:1", "tls": {"ca": "ca"}, "insecure": True, "peer_listen": "0.0.0.0:1"}, 1),
        ({"server": "fl.example.org:1", "tls": {"ca": "a", "cert": "b", "key": "c"}, "peer_listen": "0.0.0.0:1"}, 0),
    ],
)
def test_the_log_warns_of_everything_that_is_not_encrypted(
    keys: dict[str, Any], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_insecurity(ClientConfig.model_validate(keys))
    assert len(caplog.messages) == warnings
    assert all(message.startswith("insecure: ") for message in caplog.messages)
