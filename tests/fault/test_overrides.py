"""Overrides of a job on real daemons: clients with other labels train otherwise, also after all of them are killed."""

from pathlib import Path
from typing import Any

from tests.conftest import path_to
from tests.fault.faulty_fleet import FaultyFleet, job_end
from tests.fault.gate import Gate
from tests.fleets import Control, run_job, until_watching

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "user_trainers"]}
JOB: dict[str, Any] = {
    "rounds": 1, "subset_size": 32, "batch_size": 8, "evaluate": False, "trainer": "user_trainers:tells", "seed": 5,
    "override": [
        {"where": {"gpu": "yes"}, "epochs": 3, "lr": 0.5},
        {"where": {"gpu": "yes", "site": ["eu", "us"]}, "batch_size": 16, "lr": 0.25},
        {"where": {"gpu": "perhaps"}, "momentum": 0.0},
    ],
}  # fmt: skip
GPU, NONE = {"gpu": "yes", "site": "eu"}, {"gpu": "no"}
TWICE = {"steps": 3 * 2, "epochs": 3, "batch_size": 16, "lr": 0.25, "momentum": 0.9}
PLAIN = {"steps": 1 * 4, "epochs": 1, "batch_size": 8, "lr": 0.05, "momentum": 0.9}


def told(control: Control, job_id: int) -> dict[str, dict[str, float]]:
    """Return what each client of the job's last round says of its training."""
    round_ = control.rounds(limit=1, job_id=job_id)[0]
    return {client.client_id: dict(client.metrics) for client in round_.clients}


def test_what_clients_are_told_follows_from_their_labels_and_stays_although_all_are_killed(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    fleet = FaultyFleet(tmp_path, TRUSTED, [{**TRUSTED, "labels": GPU}, {**TRUSTED, "labels": NONE}], env=path_to(HERE))
    with fleet:
        _run(fleet, gate)


def _run(fleet: FaultyFleet, gate: Gate) -> None:
    with Control(fleet.control) as control:
        until_watching(control, 2)
        job = run_job(control, JOB)
        assert told(control, job.job_id) == {"client-0": TWICE, "client-1": PLAIN}
        # The first client is killed in the middle of its training, and then the server.
        gate.close_for(fleet.clients[0])
        fleet.restart(0)
        until_watching(control, 2)
        reply = control.start_job(JOB)
        assert reply.warning == "no client here has gpu=perhaps, for which the job has [[override]]"
        gate.wait(fleet)
        fleet.clients[0].kill()
        fleet.server.kill()
        gate.remove_for(fleet.clients[0])
        fleet.clients[0].settings["labels"] = NONE
        fleet.start_server()
    with Control(fleet.control) as control:
        events = control.events()
        fleet.clients[0].start()
        job_end(fleet, control, reply.job_id, events)
        assert told(control, reply.job_id) == {"client-0": TWICE, "client-1": PLAIN}
        # The next round asks for its labels anew.
        assert told(control, run_job(control, JOB).job_id) == {"client-0": PLAIN, "client-1": PLAIN}
