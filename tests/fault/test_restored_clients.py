"""Clients that go on while the server's state is put back to an older one: restored, or copied file by file.

Only a restore begins an epoch; after a copy, names of models and updates are all that tells the two pasts apart.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fedring.data import digits
from fedring.train import load_model
from fedring.train.evaluation import evaluate
from fedring.train.losses import cross_entropy
from fedring.train.models import digits_mlp
from fedring.v1 import control_pb2 as pb
from tests.damage import ask
from tests.fault.books import (
    LARGE,
    SMALL,
    accepted_in,
    check_rounds,
    has_noted,
    is_spooled,
    notes_of,
    owed_by,
    replay,
    trainings,
)
from tests.fault.owing import WAYS, OwingFleet, owing_job, start
from tests.fault.patience import patiently
from tests.fleets import Control, until_watching
from tests.system.wire import WireClient, payload_of
from tests.waiting import until


def started(fleet: OwingFleet, **keys: object) -> int:
    """A job of all clients, once they are here."""
    with Control(fleet.control) as control:
        until_watching(control, len(fleet.clients))
        return control.start_job(owing_job(min_clients=len(fleet.clients), **keys)).job_id


def ended(fleet: OwingFleet, job_id: int) -> list[pb.Round]:
    """The job's rounds, oldest first, once it has come to its end."""
    with Control(fleet.control) as control:
        patiently(fleet, "the end of the job", lambda: list(control.follow_job(job_id)))
        job = control.job(job_id)
        assert (job.state, job.reason) == ("completed", "")
        return control.rounds(job_id=job_id)[::-1]


@pytest.mark.parametrize("size", [SMALL, pytest.param(LARGE, marks=pytest.mark.soak)])
@pytest.mark.parametrize("way", WAYS)
def test_clients_that_keep_running_train_at_once_from_the_model_of_then(tmp_path: Path, way: str, size: int) -> None:
    with OwingFleet(tmp_path, clients=2) as fleet:
        job_id = started(fleet, rounds=6, model_args={"size": size})
        for number in (1, 2):
            assert fleet.at_the_gate().round == number
            fleet.let_through()
        fleet.at_the_gate()
        fleet.until_accepted(3, "client-1")
        fleet.keep(way, tmp_path / "copy")
        fleet.let_through()
        fleet.at_the_gate()
        fleet.let_through()
        later = fleet.at_the_gate()
        assert later.round == 5
        fleet.until_accepted(5, "client-1")
        until(lambda: has_noted(fleet.folders[1], fleet.state, "client-1"))
        owed = [owed_by(folder, size) for folder in fleet.folders]
        assert all(each.any() for each in owed)
        lost = fleet.put_back(way, tmp_path / "copy")
        fleet.let_through()
        again = fleet.at_the_gate()
        assert (again.number, again.round) == (later.number + 1, 3)  # client 1 has delivered for this one
        for folder, before in zip(fleet.folders, owed, strict=True):
            np.testing.assert_array_equal(owed_by(folder, size), before)
        for number in (4, 5, 6):
            fleet.let_through()
            assert fleet.at_the_gate().round == number
        fleet.let_through()
        rounds = ended(fleet, job_id)
        assert [(each.delivered, list(each.missing)) for each in rounds] == [(2, [])] * 6
        until(lambda: all(has_noted(fleet.folders[i], fleet.state, f"client-{i}") for i in (0, 1)))
        fleet.server.kill()
        epochs = [epoch for (epoch,) in ask(fleet.state, "SELECT DISTINCT epoch FROM updates ORDER BY 1")]
        assert len(epochs) == (2 if way == "restored" else 1)
        assert [each.round for each in trainings(notes_of(fleet.folders[1]))] == [1, 2, 3, 4, 5, 4, 5, 6]
        assert check_rounds(fleet.state, fleet.folders, size, lost) == 12
        assert [client.log.read_text().count("dropped the residual") for client in fleet.clients] == [0, 0]


def deliver(fleet: OwingFleet, other: WireClient, value: float) -> None:
    """The other client answers its command by adding the value to all that the model holds."""
    command = patiently(fleet, "a command", lambda: other.expect("train"))
    payload = payload_of(np.full(SMALL, value, np.float32))
    other.push(other.header(command, payload), payload)


ALONE = {"min_clients_to_aggregate": 1, "close_at_minimum": True}
"""Of a round that ends with the first update."""


@pytest.mark.parametrize("way", WAYS)
def test_a_held_model_is_not_taken_for_another_one_of_its_number(tmp_path: Path, way: str) -> None:
    with OwingFleet(tmp_path) as fleet:
        with WireClient(fleet.listen, "other"), Control(fleet.control) as control:
            until_watching(control, 2)
            job = owing_job(min_clients=2, rounds=3, download_encoding="uniform", **ALONE)
            job_id = control.start_job(job).job_id
            fleet.at_the_gate()
        fleet.keep(way, tmp_path / "copy")
        with WireClient(fleet.listen, "other") as other:
            deliver(fleet, other, 1)
            fleet.let_through()
            held = fleet.at_the_gate_in(2)
        fleet.put_back(way, tmp_path / "copy")
        with WireClient(fleet.listen, "other") as other:
            deliver(fleet, other, 100)
            fleet.let_through()
            begun = fleet.at_the_gate_in(2)
            fleet.let_through()
            last = fleet.at_the_gate()
            fleet.let_through()
            rounds = ended(fleet, job_id)
        digests = [digest for (digest,) in ask(fleet.state, "SELECT digest FROM models ORDER BY version")]
        assert last.round == 3
        assert held.base != begun.base
        assert [begun.base, last.base] == digests[1:3]
        (last_step,) = (each.download_bytes for each in rounds[2].clients if each.client_id == "client-0")
        assert 0 < last_step < 4 * SMALL


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("client", ["killed", "running"])
def test_a_spooled_update_counts_if_the_open_round_starts_from_its_model(tmp_path: Path, way: str, client: str) -> None:
    with OwingFleet(tmp_path) as fleet:
        job_id = started(fleet, rounds=3)
        fleet.at_the_gate()
        fleet.let_through()
        second = fleet.at_the_gate()
        fleet.keep(way, tmp_path / "copy")
        fleet.server.kill()
        fleet.let_through()
        until(lambda: is_spooled(fleet.folders[0]))
        if client == "killed":
            fleet.kill(0)
        fleet.put_back(way, tmp_path / "copy")
        if client == "killed":
            start(fleet, 0)
        third = fleet.at_the_gate()
        assert (second.number, second.round, third.number, third.round) == (1, 2, 2, 3)
        fleet.let_through()
        assert [each.delivered for each in ended(fleet, job_id)] == [1, 1, 1]
        until(lambda: has_noted(fleet.folders[0], fleet.state, "client-0"))
        assert check_rounds(fleet.state, fleet.folders, SMALL) == 3


@pytest.mark.parametrize("way", WAYS)
def test_a_spooled_update_of_another_model_does_not_count_though_its_round_has_the_number(
    tmp_path: Path, way: str
) -> None:
    with OwingFleet(tmp_path) as fleet:
        with WireClient(fleet.listen, "other"), Control(fleet.control) as control:
            until_watching(control, 2)
            job_id = control.start_job(owing_job(min_clients=2, rounds=3, **ALONE)).job_id
            fleet.at_the_gate()
        fleet.keep(way, tmp_path / "copy")
        with WireClient(fleet.listen, "other") as other, Control(fleet.control) as control:
            fleet.let_through()
            second = fleet.at_the_gate()
            owed = owed_by(fleet.folders[0], SMALL)
            fleet.server.kill()
        fleet.let_through()
        until(lambda: is_spooled(fleet.folders[0]))
        fleet.kill(0)
        lost = fleet.put_back(way, tmp_path / "copy")
        with WireClient(fleet.listen, "other") as other:
            deliver(fleet, other, 100)
            start(fleet, 0)
            again = fleet.at_the_gate()
            assert (second.round, again.round, again.number) == (2, 2, 2)
            np.testing.assert_array_equal(owed_by(fleet.folders[0], SMALL), owed)
            fleet.let_through()
            third = fleet.at_the_gate()
            fleet.let_through()
            ended(fleet, job_id)
        until(lambda: has_noted(fleet.folders[0], fleet.state, "client-0"))
        done = trainings(notes_of(fleet.folders[0]))
        accepted = accepted_in(fleet.state, lost)
        sent, owes = replay(0, done, accepted, SMALL)
        assert [each.training.number for each in sent] == [0, 2, 3]
        np.testing.assert_array_equal(owed_by(fleet.folders[0], SMALL), owes)
        digests = [digest for (digest,) in ask(fleet.state, "SELECT digest FROM models ORDER BY version")]
        assert [again.base, third.base] == digests[1:3]
        assert fleet.clients[0].log.read_text().count("dropped the spooled update of round 2") == 1


@pytest.mark.parametrize("told", [True, False], ids=["told of its acceptance", "not told"])
def test_what_a_client_owed_by_a_folder_that_was_put_back_is_not_sent_twice(tmp_path: Path, told: bool) -> None:
    with OwingFleet(tmp_path) as fleet:
        job_id, folder, client = started(fleet, rounds=6), fleet.folders[0], fleet.clients[0]
        for number in (1, 2):
            if number == 2 and not told:
                fleet.at_the_gate()
                fleet.kill(0)
                client.env["FL_CRASH_AT"] = "client_accepted"
                start(fleet, 0)
            assert fleet.at_the_gate_in(number).round == number
            fleet.let_through()
        if told:
            fleet.at_the_gate()
            fleet.kill(0)
        else:
            assert patiently(fleet, "the crash", client.wait) == 137
            del client.env["FL_CRASH_AT"]
        shutil.copytree(folder, tmp_path / "older")
        assert is_spooled(tmp_path / "older") is not told
        start(fleet, 0)
        for number in (3, 4):
            assert fleet.at_the_gate_in(number).round == number
            fleet.let_through()
        fleet.at_the_gate()
        fleet.kill(0)
        assert owed_by(tmp_path / "older", SMALL).any()
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "older", folder)
        start(fleet, 0)
        fifth = fleet.at_the_gate()
        assert fifth.round == 5
        fleet.let_through()
        fleet.at_the_gate()
        fleet.let_through()
        ended(fleet, job_id)
        until(lambda: has_noted(folder, fleet.state, "client-0"))
        done = trainings(notes_of(folder))
        sent, owed = replay(0, done, accepted_in(fleet.state), SMALL, lost_before=[fifth.number])
        assert [each.training.round for each in sent] == [1, 2, 3, 4, 5, 6]
        np.testing.assert_array_equal(owed_by(folder, SMALL), owed)
        words = "dropped the residual of round 2: an update of round 4 was accepted since"
        assert client.log.read_text().count("dropped") == 1
        assert client.log.read_text().count(words) == 1


@pytest.mark.parametrize("way", ["restored", pytest.param("copied", marks=pytest.mark.soak)])
def test_the_model_that_is_evaluated_is_the_one_of_now(tmp_path: Path, way: str) -> None:
    with OwingFleet(tmp_path) as fleet, Control(fleet.control) as control:
        until_watching(control, 1)
        keys = {"model": "fedring.train.models:digits_mlp", "model_args": {}, "evaluate": True, "evaluate_seconds": 240}
        job_id = control.start_job(owing_job(rounds=3, min_clients=1, encoding="fp32", **keys)).job_id
        fleet.at_the_gate()
        fleet.let_through()
        fleet.at_the_gate()
        fleet.keep(way, tmp_path / "copy")
        fleet.let_through()
        fleet.at_the_gate()
        lost = fleet.put_back(way, tmp_path / "copy")
        for number in (2, 3):
            fleet.let_through()
            assert fleet.at_the_gate().round == number
        fleet.let_through()
        rounds = ended(fleet, job_id)
        test = digits(None, False).test
        models = [load_model(version, digits_mlp(), state_dir=fleet.state) for version in (2, 3, 4)]
        models.append(load_model(3, digits_mlp(), state_dir=lost))
        counts = [evaluate(model, test, loss=cross_entropy, device=torch.device("cpu")) for model in models]
        *found, other = [(each.correct, each.total, each.loss_sum) for each in counts]
        told = [(each.eval_correct, each.eval_total, each.eval_loss_sum) for each in rounds]
        assert told == [pytest.approx(each) for each in found]
        assert told[1] != pytest.approx(other)


def test_what_is_owed_stays_when_an_epoch_is_undone_while_an_update_waits(tmp_path: Path) -> None:
    """A server is restored, then put back by a copy: an update of the later epoch counts in the earlier one."""
    with OwingFleet(tmp_path) as fleet:
        job_id = started(fleet, rounds=5)
        fleet.at_the_gate()
        fleet.let_through()
        fleet.at_the_gate()
        for way in WAYS:
            fleet.keep(way, tmp_path / way)
        fleet.put_back("restored", tmp_path / "restored")
        fleet.restart(0)
        assert fleet.at_the_gate().round == 2
        fleet.server.kill()
        fleet.let_through()
        until(lambda: is_spooled(fleet.folders[0]))
        fleet.put_back("copied", tmp_path / "copied")
        for number in (3, 4, 5):
            assert fleet.at_the_gate().round == number
            fleet.let_through()
        ended(fleet, job_id)
        until(lambda: has_noted(fleet.folders[0], fleet.state, "client-0"))
        assert ask(fleet.state, "SELECT DISTINCT epoch FROM updates") == [(0,)]
        assert check_rounds(fleet.state, fleet.folders, SMALL) == 5
        assert "dropped the residual" not in fleet.clients[0].log.read_text()
