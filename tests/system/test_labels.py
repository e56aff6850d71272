"""Labels on real daemons: a job trains and evaluates on the clients that have its labels, and waits for them."""

from pathlib import Path

from fedring.data import digits
from fedring.train.batches import size_of
from tests.fleets import Control, Fleet, run_job, until_watching

EU, US = {"site": "eu"}, {"site": "us"}


def test_a_job_trains_and_evaluates_only_on_the_clients_with_its_labels(tmp_path: Path) -> None:
    with (
        Fleet(tmp_path, None, [{"labels": EU}, {"labels": US}, {"labels": EU}]) as fleet,
        Control(fleet.control) as control,
    ):
        until_watching(control, 3)
        labels = {client.client_id: dict(client.labels) for client in control.clients()}
        assert labels == {"client-0": EU, "client-1": US, "client-2": EU}
        job = run_job(control, {"clients": EU, "subset_size": 64})
        assert job.state == "completed"
        round_ = control.rounds(limit=1, job_id=job.job_id)[0]
        assert round_.selected == round_.delivered == 2
        assert {client.client_id for client in round_.clients if client.num_samples} == {"client-0", "client-2"}
        assert 0 < round_.eval_total < size_of(digits().test)


def test_a_job_that_no_client_matches_waits_says_so_and_starts_when_one_comes(tmp_path: Path) -> None:
    with Fleet(tmp_path, None, [{"labels": US}]) as fleet, Control(fleet.control) as control:
        until_watching(control, 1)
        events = control.events()
        job_id = control.start_job({"clients": {"site": ["asia", "eu"]}, "min_clients": 1, "subset_size": 64}).job_id
        waits = next(event for event in events if event.kind == "round_waits")
        assert waits.text.endswith("; no client here has site=asia|eu")
        fleet.clients[0].settings["labels"] = EU
        fleet.restart(0)
        for _ in control.follow_job(job_id, events):
            pass
        assert control.job(job_id).state == "completed"
