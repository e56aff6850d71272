"""Clients that go on while the server's state is reverted to an older one: restored, or copied file by file.

Only a restore begins a new epoch. After a copy, only the digests of models and updates tell which ones are meant.
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
from tests.damage import ask
from tests.fault.faulty_fleet import wait_for
from tests.fault.residual_fleet import WAYS, ResidualFleet, residual_job, revert_state, save_state, start_client
from tests.fault.residuals import (
    LARGE,
    SMALL,
    accepted_digests,
    check_rounds,
    has_spooled_update,
    notes_path,
    read_trainings,
    replay,
    residual_of,
)
from tests.fleets import Control, until_watching
from tests.system.wire import WireClient, payload_of
from tests.waiting import until


@pytest.mark.parametrize("size", [SMALL, pytest.param(LARGE, marks=pytest.mark.soak)])
@pytest.mark.parametrize("way", WAYS)
def test_clients_that_keep_running_train_at_once_from_the_model_of_the_reverted_state(
    tmp_path: Path, way: str, size: int
) -> None:
    with ResidualFleet(tmp_path, clients=2) as fleet:
        job_id = fleet.start_job(rounds=6, model_args={"size": size})
        for number in (1, 2):
            assert fleet.wait_at_gate().round == number
            fleet.let_through()
        fleet.wait_at_gate()
        fleet.wait_until_accepted(3, "client-1")
        save_state(fleet, way, tmp_path / "copy")
        fleet.let_through()
        fleet.wait_at_gate()
        fleet.let_through()
        later = fleet.wait_at_gate()
        assert later.round == 5
        fleet.wait_until_accepted(5, "client-1")
        fleet.wait_until_known(1)
        residuals = [residual_of(folder, size) for folder in fleet.folders]
        assert all(each.any() for each in residuals)
        lost = revert_state(fleet, way, tmp_path / "copy")
        fleet.let_through()
        again = fleet.wait_at_gate()
        assert (again.number, again.round) == (later.number + 1, 3)  # the update of client 1 for round 3 is in the copy
        for folder, before in zip(fleet.folders, residuals, strict=True):
            np.testing.assert_array_equal(residual_of(folder, size), before)
        for number in (4, 5, 6):
            fleet.let_through()
            assert fleet.wait_at_gate().round == number
        fleet.let_through()
        rounds = fleet.finish_job(job_id)
        assert [(each.delivered, list(each.missing)) for each in rounds] == [(2, [])] * 6
        for index in (0, 1):
            fleet.wait_until_known(index)
        fleet.server.kill()
        epochs = [epoch for (epoch,) in ask(fleet.state, "SELECT DISTINCT epoch FROM updates ORDER BY 1")]
        assert len(epochs) == (2 if way == "restored" else 1)
        assert [each.round for each in read_trainings(notes_path(fleet.folders[1]))] == [1, 2, 3, 4, 5, 4, 5, 6]
        assert check_rounds(fleet.state, fleet.folders, size, lost) == 12
        assert [client.log.read_text().count("dropped the residual") for client in fleet.clients] == [0, 0]


def deliver(fleet: ResidualFleet, other: WireClient, value: float) -> None:
    """Answer the command of the client `other` with an update that adds `value` to all parameters."""
    command = wait_for(fleet, "a command", lambda: other.expect("train"))
    payload = payload_of(np.full(SMALL, value, np.float32))
    other.push(other.header(command, payload), payload)


ALONE = {"min_clients_to_aggregate": 1, "close_at_minimum": True}
"""Keys of a job whose rounds end with the first update."""


@pytest.mark.parametrize("way", WAYS)
def test_a_client_does_not_mistake_its_model_for_another_one_with_the_same_version(tmp_path: Path, way: str) -> None:
    with ResidualFleet(tmp_path) as fleet:
        with WireClient(fleet.listen, "other"), Control(fleet.control) as control:
            until_watching(control, 2)
            job = residual_job(min_clients=2, rounds=3, download_encoding="uniform", **ALONE)
            job_id = control.start_job(job).job_id
            fleet.wait_at_gate()
        save_state(fleet, way, tmp_path / "copy")
        with WireClient(fleet.listen, "other") as other:
            deliver(fleet, other, 1)
            fleet.let_through()
            held = fleet.wait_at_gate_in_round(2)
        revert_state(fleet, way, tmp_path / "copy")
        with WireClient(fleet.listen, "other") as other:
            deliver(fleet, other, 100)
            fleet.let_through()
            begun = fleet.wait_at_gate_in_round(2)
            fleet.let_through()
            last = fleet.wait_at_gate()
            fleet.let_through()
            rounds = fleet.finish_job(job_id)
        digests = [digest for (digest,) in ask(fleet.state, "SELECT digest FROM models ORDER BY version")]
        assert last.round == 3
        assert held.base != begun.base
        assert [begun.base, last.base] == digests[1:3]
        (last_step,) = (each.download_bytes for each in rounds[2].clients if each.client_id == "client-0")
        assert 0 < last_step < 4 * SMALL


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("client", ["killed", "running"])
def test_a_spooled_update_is_accepted_if_the_open_round_starts_from_its_model(
    tmp_path: Path, way: str, client: str
) -> None:
    with ResidualFleet(tmp_path) as fleet:
        job_id = fleet.start_job(rounds=3)
        fleet.wait_at_gate()
        fleet.let_through()
        second = fleet.wait_at_gate()
        save_state(fleet, way, tmp_path / "copy")
        fleet.server.kill()
        fleet.let_through()
        until(lambda: has_spooled_update(fleet.folders[0]))
        if client == "killed":
            fleet.kill(0)
        revert_state(fleet, way, tmp_path / "copy")
        if client == "killed":
            start_client(fleet, 0)
        third = fleet.wait_at_gate()
        assert (second.number, second.round, third.number, third.round) == (1, 2, 2, 3)
        fleet.let_through()
        assert [each.delivered for each in fleet.finish_job(job_id)] == [1, 1, 1]
        fleet.wait_until_known()
        assert check_rounds(fleet.state, fleet.folders, SMALL) == 3


@pytest.mark.parametrize("way", WAYS)
def test_what_an_update_leaves_is_not_lost_for_a_job_that_begins_anew_with_the_same_model(
    tmp_path: Path, way: str
) -> None:
    with ResidualFleet(tmp_path) as fleet:
        save_state(fleet, way, tmp_path / "copy")
        fleet.start_job(rounds=2)
        fleet.wait_at_gate()
        fleet.server.kill()
        fleet.let_through()
        until(lambda: has_spooled_update(fleet.folders[0]))
        revert_state(fleet, way, tmp_path / "copy")
        job_id = fleet.start_job(rounds=2)
        while fleet.wait_at_gate().round < 2:  # after a copy, the line of models is the same, and the update counts
            fleet.let_through()
        fleet.let_through()
        fleet.finish_job(job_id)
        fleet.wait_until_known(0)
        fleet.server.kill()
        assert check_rounds(fleet.state, fleet.folders, SMALL) == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_spooled_update_of_another_model_is_dropped_though_its_round_has_the_same_number(
    tmp_path: Path, way: str
) -> None:
    with ResidualFleet(tmp_path) as fleet:
        with WireClient(fleet.listen, "other"), Control(fleet.control) as control:
            until_watching(control, 2)
            job_id = control.start_job(residual_job(min_clients=2, rounds=3, **ALONE)).job_id
            fleet.wait_at_gate()
        save_state(fleet, way, tmp_path / "copy")
        with WireClient(fleet.listen, "other") as other, Control(fleet.control) as control:
            fleet.let_through()
            second = fleet.wait_at_gate()
            residual = residual_of(fleet.folders[0], SMALL)
            fleet.server.kill()
        fleet.let_through()
        until(lambda: has_spooled_update(fleet.folders[0]))
        fleet.kill(0)
        lost = revert_state(fleet, way, tmp_path / "copy")
        with WireClient(fleet.listen, "other") as other:
            deliver(fleet, other, 100)
            start_client(fleet, 0)
            again = fleet.wait_at_gate()
            assert (second.round, again.round, again.number) == (2, 2, 2)
            np.testing.assert_array_equal(residual_of(fleet.folders[0], SMALL), residual)
            fleet.let_through()
            third = fleet.wait_at_gate()
            fleet.let_through()
            fleet.finish_job(job_id)
        fleet.wait_until_known()
        done = read_trainings(notes_path(fleet.folders[0]))
        accepted = accepted_digests(fleet.state, lost)
        sent, residual = replay(0, done, accepted, SMALL)
        assert [each.training.number for each in sent] == [0, 2, 3]
        np.testing.assert_array_equal(residual_of(fleet.folders[0], SMALL), residual)
        digests = [digest for (digest,) in ask(fleet.state, "SELECT digest FROM models ORDER BY version")]
        assert [again.base, third.base] == digests[1:3]
        assert fleet.clients[0].log.read_text().count("dropped the spooled update of round 2") == 1


@pytest.mark.parametrize("informed", [True, False], ids=["told of its acceptance", "not told"])
def test_a_client_whose_state_folder_was_reverted_does_not_send_its_residual_twice(
    tmp_path: Path, informed: bool
) -> None:
    with ResidualFleet(tmp_path) as fleet:
        job_id, folder, client = fleet.start_job(rounds=6), fleet.folders[0], fleet.clients[0]
        for number in (1, 2):
            if number == 2 and not informed:
                fleet.wait_at_gate()
                fleet.kill(0)
                client.env["FL_CRASH_AT"] = "client_accepted"
                start_client(fleet, 0)
            assert fleet.wait_at_gate_in_round(number).round == number
            fleet.let_through()
        if informed:
            fleet.wait_at_gate()
            fleet.kill(0)
        else:
            assert wait_for(fleet, "the crash", client.wait) == 137
            del client.env["FL_CRASH_AT"]
        shutil.copytree(folder, tmp_path / "older")
        assert has_spooled_update(tmp_path / "older") is not informed
        start_client(fleet, 0)
        for number in (3, 4):
            assert fleet.wait_at_gate_in_round(number).round == number
            fleet.let_through()
        fleet.wait_at_gate()
        fleet.kill(0)
        assert residual_of(tmp_path / "older", SMALL).any()
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "older", folder)
        start_client(fleet, 0)
        fifth = fleet.wait_at_gate()
        assert fifth.round == 5
        fleet.let_through()
        fleet.wait_at_gate()
        fleet.let_through()
        fleet.finish_job(job_id)
        fleet.wait_until_known()
        done = read_trainings(notes_path(folder))
        sent, residual = replay(0, done, accepted_digests(fleet.state), SMALL, lost_before=[fifth.number])
        assert [each.training.round for each in sent] == [1, 2, 3, 4, 5, 6]
        np.testing.assert_array_equal(residual_of(folder, SMALL), residual)
        words = "dropped the residual of past updates: an update of round 4 was accepted since round 2"
        assert client.log.read_text().count("dropped") == 1
        assert client.log.read_text().count(words) == 1


@pytest.mark.parametrize("way", ["restored", pytest.param("copied", marks=pytest.mark.soak)])
def test_after_a_revert_clients_evaluate_the_model_of_the_present_state(tmp_path: Path, way: str) -> None:
    with ResidualFleet(tmp_path) as fleet, Control(fleet.control) as control:
        until_watching(control, 1)
        keys = {"model": "fedring.train.models:digits_mlp", "model_args": {}, "evaluate": True, "evaluate_seconds": 240}
        job_id = control.start_job(residual_job(rounds=3, min_clients=1, encoding="fp32", **keys)).job_id
        fleet.wait_at_gate()
        fleet.let_through()
        fleet.wait_at_gate()
        save_state(fleet, way, tmp_path / "copy")
        fleet.let_through()
        fleet.wait_at_gate()
        lost = revert_state(fleet, way, tmp_path / "copy")
        for number in (2, 3):
            fleet.let_through()
            assert fleet.wait_at_gate().round == number
        fleet.let_through()
        rounds = fleet.finish_job(job_id)
        test = digits(None, False).test
        models = [load_model(version, digits_mlp(), state_dir=fleet.state) for version in (2, 3, 4)]
        models.append(load_model(3, digits_mlp(), state_dir=lost))
        counts = [evaluate(model, test, loss=cross_entropy, device=torch.device("cpu")) for model in models]
        *found, other = [(each.correct, each.total, each.loss_sum) for each in counts]
        reported = [(each.eval_correct, each.eval_total, each.eval_loss_sum) for each in rounds]
        assert reported == [pytest.approx(each) for each in found]
        assert reported[1] != pytest.approx(other)


def test_a_client_keeps_its_residual_when_an_epoch_is_undone_while_its_update_is_spooled(tmp_path: Path) -> None:
    """A server is restored, then reverted by a copy: an update of the later epoch is accepted in the earlier one."""
    with ResidualFleet(tmp_path) as fleet:
        job_id = fleet.start_job(rounds=5)
        fleet.wait_at_gate()
        fleet.let_through()
        fleet.wait_at_gate()
        for way in WAYS:
            save_state(fleet, way, tmp_path / way)
        revert_state(fleet, "restored", tmp_path / "restored")
        fleet.restart(0)
        assert fleet.wait_at_gate().round == 2
        fleet.server.kill()
        fleet.let_through()
        until(lambda: has_spooled_update(fleet.folders[0]))
        revert_state(fleet, "copied", tmp_path / "copied")
        for number in (3, 4, 5):
            assert fleet.wait_at_gate().round == number
            fleet.let_through()
        fleet.finish_job(job_id)
        fleet.wait_until_known()
        assert ask(fleet.state, "SELECT DISTINCT epoch FROM updates") == [(0,)]
        assert check_rounds(fleet.state, fleet.folders, SMALL) == 5
        assert "dropped the residual" not in fleet.clients[0].log.read_text()
