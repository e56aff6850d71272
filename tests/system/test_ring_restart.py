"""torchrun restarts workers on the same store: after one is killed, and after the number of nodes has changed."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Fork
from tests.ports import free_port
from tests.processes import children_of
from tests.system.ring_scripts import ranks

SCRIPT = str(Path(__file__).parent / "ring_scripts" / "restarted.py")
SECONDS = 240
ENVIRONMENT = ranks.PROGRAM_ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]


def reports(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def train(backend: str, folder: Path, *arguments: str, restarts: int = 3, timeout: int = 120) -> list[dict[str, Any]]:
    """Run the script with two workers under torchrun, and return what it reports."""
    folder.mkdir()
    launch = [*TORCHRUN, "--standalone", "--max-restarts", str(restarts), "--nproc-per-node", "2", SCRIPT]
    run = subprocess.run(
        [*launch, backend, str(folder), "10", *arguments],
        env=os.environ | ENVIRONMENT | {"TIMEOUT_SECONDS": str(timeout)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert run.returncode == 0, run.stderr
    return reports(run.stdout)


def digests(lines: list[dict[str, Any]]) -> set[str]:
    """Return the digests of the parameters of the workers that are done."""
    return {line["digest"] for line in lines if "done" in line}


def uninterrupted(folder: Path) -> set[str]:
    """Run the script in two processes without torchrun, and return the digests of the parameters."""
    folder.mkdir()
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environment = os.environ | ENVIRONMENT | variables | {"TORCHELASTIC_RESTART_COUNT": "0"}
    module, arguments = "tests.system.ring_scripts.restarted", ["fedring", str(folder), "10"]
    forks = [
        Fork(module, arguments, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE) for rank in range(2)
    ]
    lines = [line for fork in forks for line in reports(fork.communicate(SECONDS)[0])]
    for fork in forks:
        assert fork.stdout
        fork.stdout.close()
    return digests(lines)


@pytest.mark.soak
@pytest.mark.parametrize("killed", [0, 1])
def test_a_training_that_torchrun_restarts_ends_as_if_nothing_had_happened(killed: int, tmp_path: Path) -> None:
    lines = train("fedring", tmp_path / "interrupted", str(killed))
    met = [(line["restart"], line["met"]) for line in lines if "met" in line]
    assert sorted(met) == [(0, 0), (0, 1), (1, 0), (1, 1)]  # the first restart succeeds
    (at,) = (line["killed"] for line in lines if "killed" in line)
    on = max(line["on"] for line in lines if "on" in line)
    print(f"torchrun: the next step finished {on - at:.2f} s after the kill")
    assert digests(lines) == uninterrupted(tmp_path / "whole")
    assert len(digests(lines)) == 1


@pytest.mark.soak
def test_gloo_takes_more_time_for_the_same(tmp_path: Path) -> None:
    lines = train("gloo", tmp_path / "interrupted", "0", restarts=10, timeout=10)
    (at,) = (line["killed"] for line in lines if "killed" in line)
    on = max(line["on"] for line in lines if "on" in line)
    restarts = max(line["restart"] for line in lines if "met" in line)
    print(f"Gloo: {restarts} restarts, the next step finished {on - at:.2f} s after the kill")
    assert digests(lines) == uninterrupted(tmp_path / "whole")


class Agent:
    """One node: a torchrun with one worker, and what the worker reports."""

    def __init__(self, port: int, folder: Path, *, hosts: bool) -> None:
        settings = {"is_host": int(hosts), "last_call_timeout": 10, "keep_alive_interval": 1}
        rendezvous = ",".join(f"{key}={value}" for key, value in settings.items())
        nodes = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
        meeting = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "nodes", "--rdzv-conf", rendezvous]
        # By default, torchrun's own agents do not tell a node that joins later where their store is (torch 2.13).
        self.process = subprocess.Popen(
            [*TORCHRUN, *nodes, *meeting, SCRIPT, "fedring", str(folder), "1000000000"],
            env=os.environ | ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )

    def next_meeting(self) -> tuple[int, int]:
        """Wait until its worker has met the others; return their number, and how many restarts torchrun counts."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith('{"met"'):
                met = json.loads(line)
                return met["size"], met["restart"]
        raise AssertionError("torchrun has ended")

    def kill(self) -> None:
        """Kill the agent and its worker."""
        for pid in [*children_of(self.process.pid), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()


@pytest.mark.soak
def test_the_number_of_nodes_grows_and_shrinks_under_torchrun(tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        first = Agent(port, tmp_path, hosts=True)
        stack.callback(first.end)
        assert first.next_meeting() == (1, 0)
        second = Agent(port, tmp_path, hosts=False)
        stack.callback(second.end)
        assert first.next_meeting() == (2, 0)  # a change of membership is no restart that counts
        assert second.next_meeting() == (2, 0)
        second.kill()
        assert first.next_meeting()[0] == 1
