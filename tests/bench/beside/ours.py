"""How fedring runs a task."""

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from safetensors.torch import load_file

from fedring.ctl.local.presets import Dataset, preset_job
from fedring.ctl.local.runner import run_job, running_fleet
from fedring.v1 import control_pb2 as pb
from tests.bench.beside.fleets import Outcome, Task, outcome, watch
from tests.bench.beside.work import accuracy, network
from tests.bench.lab.daemons import ROOT, TRUSTED
from tests.bench.lab.trainers import vector_job


def fedring(task: Task, **keys: Any) -> Outcome:
    """Run a task with fl-server and fl-clients, without TLS; whatever is accepted is on the server's disk.

    Args:
        task: The task.
        **keys: Of the job.
    """
    part = {"data_root": task.root, "partition_count": task.clients, "clients_on_host": task.clients}
    clients = [{"trusted": TRUSTED, **part, "partition_index": index} for index in range(task.clients)]
    server = {"trusted": TRUSTED, **task.lines.server}
    launched = time.time()
    with running_fleet(task.folder, server, clients, env={"PYTHONPATH": str(ROOT)}, place=task.lines.place) as (
        fleet,
        control,
    ):
        pids = [[client.pid] for client in fleet.clients]
        with watch(task, [fleet.server.pid], pids) as watched:
            rounds = run_job(fleet, control, _job(task) | keys)
        control.export_model(rounds[-1].model_version, task.folder / "model.safetensors")
    right = accuracy(load_file(task.folder / "model.safetensors"), task.root) if task.cell == "mnist" else None
    return outcome([_times(each) for each in rounds], launched, watched, right)


def _job(task: Task) -> dict[str, Any]:
    everybody = {"min_clients": task.clients, "min_clients_to_aggregate": task.clients, "rounds": task.rounds}
    if task.cell == "mnist":
        return {**preset_job(Dataset.MNIST), "evaluate": False, **everybody}
    size = sum(parameter.numel() for parameter in network(task.cell).parameters())
    return vector_job(size, clients=task.clients, **everybody)


def _times(round_: pb.Round) -> Mapping[str, float]:
    began = datetime.fromisoformat(round_.started_at).timestamp()
    return {"began": began, "ended": began + round_.seconds, "train": round_.train_seconds_max}
