"""A second run of a job with secure aggregation on real daemons: without one client, on the same first model or not."""

import signal
from pathlib import Path
from typing import Any

from tests.fleets import Control, Fleet, run_job, until_watching

CLIENTS = 5
JOB: dict[str, Any] = {
    "model_args": {"hidden": 4},
    "start": "fresh",
    "min_clients": 4,
    "min_clients_to_aggregate": 4,
    "max_abandoned": 1,
    "weights": "uniform",
    "evaluate": False,
    "secure_aggregation": {"step_seconds": 60},
}


def test_an_honest_second_run_with_a_client_less_has_a_first_model_of_its_own(tmp_path: Path) -> None:
    strict = {"privacy": {"require_secure_aggregation": True}}
    with Fleet(tmp_path, {}, [strict] * CLIENTS) as fleet, Control(fleet.control) as control:
        until_watching(control, CLIENTS)
        all_ = {"min_clients": CLIENTS, "seed": 3}
        assert run_job(control, JOB | all_).rounds_done == 1
        assert run_job(control, JOB | all_).rounds_done == 1  # of the same clients
        assert run_job(control, JOB | {"min_clients": CLIENTS}).rounds_done == 1
        fleet.kill(CLIENTS - 1, signal.SIGTERM)
        events = control.events()
        failed = run_job(control, JOB | {"seed": 3})
        assert failed.state == "failed"
        assert failed.reason.startswith("too_few_to_unmask: ")
        told = next(event.text for event in events if "asked_twice" in event.text)
        events.cancel()
        assert "differ from those by 1 client (without client-4)" in told
        assert "let the same clients survive, or start from another model" in told
        assert run_job(control, JOB).state == "completed"
