"""One job on a fleet of its own.

It runs to its end, and its report and its model are kept.
"""

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedring.control import figures
from fedring.control.calls import MAX_ROWS
from fedring.control.failure import Failure
from fedring.ctl.fleet import Fleet
from fedring.ctl.local.runner import run_job, running_fleet
from fedring.ctl.operate.event_display import Show, progress_on_stderr
from fedring.ctl.operate.job_control import outcome_lines
from fedring.daemon.config import explain
from fedring.daemon.exits import Exit
from fedring.train.jobs.job import Job
from fedring.v1 import control_pb2 as pb

BEST = "best.safetensors"
"""The file with the best version of the model, if it was evaluated."""

ShowProgress = Callable[..., AbstractContextManager[Show]]
"""Makes a display of a job: takes `rounds` and `label`."""

_OURS = re.compile(r"server|client-\d+")


@dataclass(frozen=True, slots=True)
class Experiment:
    """A job, and the clients that run it."""

    job: Job
    clients: int
    data_root: Path | None = None  # folder of the data sets, for all clients
    web: bool = False  # whether the server has a page that shows the job
    sites: tuple[Path, ...] = ()  # the data_root of each client, which has all samples in it; empty = one for all
    code: tuple[Path, ...] = ()  # folders in which the daemons find modules, after all others
    server: Mapping[str, Any] = field(default_factory=dict)  # further configuration keys of the server
    place: Callable[[Fleet], None] = lambda fleet: None  # says where each daemon runs, before it starts

    def client(self, number: int) -> dict[str, Any]:
        """Return the configuration keys of client `number`.

        A site's client has the name of its folder, with its number behind it if two folders have one name.
        """
        keys: dict[str, Any] = {"trusted": self.trusted}
        if not self.sites:
            return keys | ({"data_root": self.data_root} if self.data_root else {})
        names = [_client_id(site) for site in self.sites]
        name = names[number] if len(set(names)) == len(names) else f"{names[number]}-{number}"
        return keys | {"client_id": name, "data_root": self.sites[number], "partition_index": 0, "partition_count": 1}

    @property
    def trusted(self) -> list[str]:
        """The list `trusted` of the daemons: fedring's own, and the job's code."""
        return ["fedring", *self.job.code]


@dataclass(frozen=True, slots=True)
class Result:
    """The rounds and the model of an experiment."""

    rounds: list[pb.Round]  # oldest first
    parameters: int
    model: Path  # the .safetensors file
    mode: str = "federated"
    outcome: tuple[str, ...] = ()  # the lines that flctl run ends with

    def report(self) -> dict[str, Any]:
        """Return the object that report.json holds; bytes are per client."""
        rows = [_row(round_) | self._workers(round_) for round_ in self.rounds]
        return {
            "rounds": rows,
            "accuracy": rows[-1]["accuracy"] if rows else None,
            "loss": rows[-1]["loss"] if rows else None,
            "parameters": self.parameters,
            "model_sha256": hashlib.sha256(self.model.read_bytes()).hexdigest(),
        }

    def _workers(self, round_: pb.Round) -> dict[str, Any]:
        """Return the profile of each worker of the round.

        Empty if no group of workers has trained it.
        """
        if self.mode == "federated":
            return {}
        return {"workers": {client.client_id: dict(client.metrics) for client in round_.clients if client.num_samples}}


def make_job(clients: int, keys: Mapping[str, Any]) -> Job:
    """Return a job in which every client takes part in every round.

    Args:
        clients: Number of clients.
        keys: Further keys of the job; those that are None are left out.

    Raises:
        Failure: A key has a wrong value.
    """
    everyone = {"min_clients": clients, "min_clients_to_aggregate": clients, "barrier_timeout_seconds": 120}
    try:
        return Job.model_validate(everyone | {key: value for key, value in keys.items() if value is not None})
    except ValidationError as error:
        raise Failure(explain(error, {}, Job), Exit.USAGE) from error


def run_experiment(
    experiment: Experiment, directory: Path, show: Show, *, before_end: Callable[[Result, Fleet], None] | None = None
) -> Result:
    """Run the job on daemons of its own, and stop them.

    State, logs, model.safetensors, best.safetensors and report.json are left in `directory`; those of an earlier
    experiment there are removed first.

    Args:
        experiment: What to run.
        directory: Folder of the files.
        show: Called with each event of the job.
        before_end: Called when the job has completed, while the daemons still run.

    Raises:
        Failure: The job did not complete, or a daemon ended before it.
    """
    remove_earlier(directory)
    clients = [experiment.client(number) for number in range(experiment.clients)]
    server = {"trusted": experiment.trusted, **experiment.server} | ({"web_port": 0} if experiment.web else {})
    failed: list[str] = []  # evaluations

    def seen(event: pb.Event) -> None:
        show(event)
        failed.extend([event.text] if event.kind == "evaluation_failed" else [])

    with running_fleet(directory, server, clients, code=experiment.code, place=experiment.place) as (fleet, control):
        if fleet.web:
            print(f"watch it at {fleet.web}", file=sys.stderr)
        rounds = run_job(fleet, control, experiment.job.model_dump(mode="json"), seen)
        model, known = directory / "model.safetensors", control.models(limit=MAX_ROWS)
        control.export_model(0, model)
        if best := next((version for version in known if version.best_of_job), None):
            control.export_model(best.version, directory / BEST)
        lines = outcome_lines(control, control.jobs(limit=1)[0], failed)
        result = Result(rounds, known[0].parameters, model, experiment.job.mode, tuple(lines))
        (directory / "report.json").write_text(json.dumps(result.report(), indent=2) + "\n", encoding="utf-8")
        if before_end:
            before_end(result, fleet)
    return result


def run_with_progress(
    experiment: Experiment,
    directory: Path,
    *,
    label: str,
    progress_of: ShowProgress = progress_on_stderr,
    before_end: Callable[[Result, Fleet], None] | None = None,
) -> Result:
    """Run the experiment as run_experiment does, and show its progress."""
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as progress:
        show = progress.enter_context(progress_of(rounds=experiment.job.rounds, label=label))

        def ended(result: Result, fleet: Fleet) -> None:
            progress.close()
            if before_end:
                before_end(result, fleet)

        return run_experiment(experiment, directory, show, before_end=ended)


def _client_id(site: Path) -> str:
    """Return a client's name for the folder of its site."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", site.name)[:100] or "site"


def _row(round_: pb.Round) -> dict[str, Any]:
    return {
        "round": round_.round,
        "accuracy": figures.accuracy(round_),
        "loss": figures.loss(round_),
        "metrics": dict(round_.metrics),
        "clients": round_.delivered,
        "seconds": round_.seconds,
        "evaluate_seconds": round_.evaluate_seconds,
        "train_seconds_max": round_.train_seconds_max,
        "upload_bytes": round(figures.upload_per_client(round_)),
        "download_bytes": round(figures.download_per_client(round_)),
    }


def remove_earlier(directory: Path) -> None:
    """Remove an earlier experiment's files from the folder, and nothing else."""
    for path in (directory / "state").glob("*"):
        if _OURS.fullmatch(path.name) and path.is_dir():
            shutil.rmtree(path)
    for path in (directory / "logs").glob("*.log"):
        if _OURS.fullmatch(path.stem):
            path.unlink()
    for name in ("report.json", "model.safetensors", BEST, "rounds.png"):
        (directory / name).unlink(missing_ok=True)
