"""One job on a fleet of its own: started, followed to its end, and its figures and model kept."""

import hashlib
import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedring.ctl.control import Control
from fedring.ctl.failure import Failure
from fedring.ctl.fleet import Fleet
from fedring.ctl.operate import round_figures
from fedring.ctl.operate.event_display import Show
from fedring.daemon.config import explain
from fedring.daemon.exits import Exit
from fedring.train.job import Job
from fedring.v1 import control_pb2 as pb

_OURS = re.compile(r"server|client-\d+")
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A job, and the clients that run it."""

    job: Job
    clients: int
    data_root: Path | None = None
    web: bool = False  # a page shows it meanwhile


@dataclass(frozen=True, slots=True)
class Result:
    """What came out."""

    rounds: list[pb.Round]  # oldest first
    parameters: int
    model: Path
    mode: str = "federated"

    def report(self) -> dict[str, Any]:
        """The object that report.json holds; bytes are per client."""
        rows = [_row(round_) | self._workers(round_) for round_ in self.rounds]
        return {
            "rounds": rows,
            "accuracy": rows[-1]["accuracy"] if rows else None,
            "parameters": self.parameters,
            "model_sha256": hashlib.sha256(self.model.read_bytes()).hexdigest(),
        }

    def _workers(self, round_: pb.Round) -> dict[str, Any]:
        """Of a round that a group has trained, the profile that each worker gave."""
        if self.mode == "federated":
            return {}
        return {"workers": {client.client_id: dict(client.metrics) for client in round_.clients if client.num_samples}}


def make_job(clients: int, keys: Mapping[str, Any]) -> Job:
    """The job of an experiment in which every client takes part in every round; Failure if a key's value is wrong."""
    everyone = {"min_clients": clients, "min_clients_to_aggregate": clients, "barrier_timeout_seconds": 120}
    try:
        return Job.model_validate(everyone | {key: value for key, value in keys.items() if value is not None})
    except ValidationError as error:
        raise Failure(explain(error, {}, Job), Exit.USAGE) from error


def run_experiment(experiment: Experiment, directory: Path, show: Show) -> Result:
    """The job has run on daemons that are gone again; state, logs, model.safetensors and report.json are left."""
    _sweep(directory)
    client = {"data_root": experiment.data_root} if experiment.data_root else {}
    with (
        ended_by_signals(),
        Fleet(directory, {"web_port": 0} if experiment.web else {}, [client] * experiment.clients) as fleet,
        Control(fleet.control) as control,
    ):
        if fleet.web:
            print(f"watch it at {fleet.web}", file=sys.stderr)
        job_id = _follow(fleet, control, experiment.job, show)
        job = control.job(job_id)
        if job.state != "completed":
            raise _job_failure(fleet, job)
        rounds = control.rounds(job_id=job_id, limit=experiment.job.rounds)
        model = directory / "model.safetensors"
        control.export_model(0, model)
        parameters = control.models(limit=1)[0].parameters
    result = Result(sorted(rounds, key=lambda round_: round_.round), parameters, model, experiment.job.mode)
    (directory / "report.json").write_text(json.dumps(result.report(), indent=2) + "\n", encoding="utf-8")
    return result


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """A SIGTERM or SIGHUP within unwinds the stack, as Ctrl-C does, instead of ending the process at once."""

    def unwind(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    old = {number: signal.signal(number, unwind) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _follow(fleet: Fleet, control: Control, job: Job, show: Show) -> int:
    """The id of the job, which has ended; Failure if a daemon ended before it."""
    try:
        events = control.events()
        fleet.on_death(events.cancel)
        job_id = control.start_job(job.model_dump(mode="json")).job_id
        for event in control.follow_job(job_id, events, patience_seconds=0):
            show(event)
    except Failure as failure:
        raise fleet.failure() or failure from failure
    return job_id


def _job_failure(fleet: Fleet, job: pb.Job) -> Failure:
    logs = fleet.directory / "logs"
    return Failure(f"the job {job.state}{': ' + job.reason if job.reason else ''}; {logs} tells more")


def _row(round_: pb.Round) -> dict[str, Any]:
    return {
        "round": round_.round,
        "accuracy": round_figures.accuracy(round_),
        "loss": round_figures.loss(round_),
        "clients": round_.delivered,
        "seconds": round_.seconds,
        "evaluate_seconds": round_.evaluate_seconds,
        "train_seconds_max": round_.train_seconds_max,
        "upload_bytes": round(round_figures.upload_per_client(round_)),
        "download_bytes": round(round_figures.download_per_client(round_)),
    }


def _sweep(directory: Path) -> None:
    """Nothing of an earlier experiment is left in the folder; what is not ours stays."""
    for path in (directory / "state").glob("*"):
        if _OURS.fullmatch(path.name) and path.is_dir():
            shutil.rmtree(path)
    for path in (directory / "logs").glob("*.log"):
        if _OURS.fullmatch(path.stem):
            path.unlink()
    for name in ("report.json", "model.safetensors", "rounds.png"):
        (directory / name).unlink(missing_ok=True)
