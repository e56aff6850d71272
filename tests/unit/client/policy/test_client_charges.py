"""The cost of updates for a server that asks for a round again and again."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.damage import flip
from tests.ledgers import account_in
from torch import nn

from fedring.client import Federation, RoundOver, connect
from fedring.client.policy.ledger import LEDGER, Ledger
from fedring.daemon.config import ConfigError
from fedring.rpc.errors import FedringError, Unavailable, UnknownRound
from fedring.train.tensors.state import write_tensors
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 60.0
DP = '{"noise_multiplier": 1.0, "clip": 0.5, "adaptive": false}'
JOB = pb.JobSpec(mode="federated", rounds=9, job_id=1, dp=DP)


def charged(state_dir: Path) -> int:
    known = account_in(state_dir)
    return int(known["rounds"]["1.0"])


def take_part(settings: dict[str, Any], server: "ScriptedServer", commands: list[pb.TrainCmd]) -> None:
    """Answer commands, each with a step as long as its learning rate."""
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        for command in commands:
            server.train(command)
            answer(federation)


def answer(federation: Federation) -> None:
    model, task = nn.Linear(3, 2), next(federation)
    task.load_into(model)
    write_tensors(model, {name: value + task.plan.lr for name, value in model.state_dict().items()})
    with suppress(RoundOver):
        task.submit(model, samples=1)


def test_each_update_of_a_round_is_charged(server: "ScriptedServer", settings: dict[str, Any]) -> None:
    spent: list[int] = []

    def forget(header: pb.UpdateHeader) -> FedringError:
        spent.append(charged(settings["state_dir"]))  # before the server has answered
        return UnknownRound("there is no such round")

    server.on_header = forget
    asked = [server.command(nn.Linear(3, 2), lr=0.1 * number, job=JOB) for number in range(1, 9)]
    take_part(settings, server, asked)
    assert len({(offer.name, offer.payload_digest) for offer in server.offers.queue}) == 8
    assert spent == [1, 2, 3, 4, 5, 6, 7, 8]


@contextmanager
def idle(settings: dict[str, Any], server: "ScriptedServer") -> Iterator[None]:
    """Run a client in a thread that only sends its spooled update."""
    with connect(**settings) as federation:
        thread = threading.Thread(target=lambda: list(federation))
        thread.start()
        server.joins.get(timeout=SECONDS)
        yield
        federation.close()
        thread.join()


def spool_one(settings: dict[str, Any], server: "ScriptedServer") -> pb.TrainCmd:
    """Let a client charge and spool an update, and return its command."""
    command = server.command(nn.Linear(3, 2), job=JOB)
    with connect(**settings) as federation:

        def end(header: pb.UpdateHeader) -> FedringError:
            federation.close()
            return Unavailable("not now")

        server.on_header = end
        server.joins.get(timeout=SECONDS)
        server.train(command)
        answer(federation)
    server.on_header = lambda header: None
    assert charged(settings["state_dir"]) == 1
    return command


def test_the_same_update_is_charged_once_and_another_one_after_its_folder_was_copied_back(
    server: "ScriptedServer", settings: dict[str, Any], tmp_path: Path
) -> None:
    folder, copy = settings["state_dir"], tmp_path / "copy"
    command = spool_one(settings, server)
    shutil.copytree(folder, copy)
    with idle(settings, server):
        server.train(command)
        server.accepted.get(timeout=SECONDS)
    assert charged(folder) == 1
    shutil.rmtree(folder)
    copy.rename(folder)
    (folder / "update").unlink()
    take_part(settings, server, [server.command(nn.Linear(3, 2), lr=0.2, job=JOB)])
    assert charged(folder) == 2


def test_a_client_at_its_limit_sends_what_is_charged_and_trains_nothing_more(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    limited = settings | {"privacy": {"max_epsilon": 5.0}}  # one round costs 4.7
    command = spool_one(limited, server)
    with idle(limited, server):
        server.train(command)
        server.accepted.get(timeout=SECONDS)
        server.train(server.command(nn.Linear(3, 2), round_=2, job=JOB))
        assert server.failures.get(timeout=SECONDS).reason == "privacy_policy"
    assert charged(settings["state_dir"]) == 1


def test_an_account_of_an_earlier_version_is_adopted_once_and_then_has_a_digest(tmp_path: Path) -> None:
    command = pb.TrainCmd(run_id="run", round=8, job=JOB)
    (tmp_path / LEDGER).write_text('{"last": "run 0 7 ", "rounds": {"1.0": 3}}')
    before = Ledger(tmp_path).epsilon_with(command, 1e-5)
    assert account_in(tmp_path)["rounds"] == {"1.0": 3}
    assert Ledger(tmp_path).epsilon_with(command, 1e-5) == before > 0


def test_no_flipped_bit_of_the_account_lets_a_client_spend_more(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for number in range(12):
        ledger.charge(pb.TrainCmd(run_id="run", round=number, job=JOB), f"update {number}")
    for bit in range(8 * (tmp_path / LEDGER).stat().st_size):
        flip(tmp_path / LEDGER, bit)
        with pytest.raises(ConfigError, match=r"cannot be read \((its digest is another one|Expecting)"):
            Ledger(tmp_path)
        flip(tmp_path / LEDGER, bit)
    assert account_in(tmp_path)["rounds"] == {"1.0": 12}
