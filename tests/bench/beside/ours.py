"""How fedring runs a task."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from safetensors.torch import load_file

from fedring.control.failure import Failure
from fedring.ctl.local.presets import Dataset, preset_job
from fedring.ctl.local.runner import running_fleet
from fedring.v1 import control_pb2 as pb
from tests.bench.beside.fleets import Run, Task
from tests.bench.beside.work import PARAMETERS
from tests.bench.lab.daemons import ROOT, TRUSTED
from tests.bench.lab.trainers import vector_job


@contextmanager
def fedring(task: Task, **keys: Any) -> Iterator[Run]:
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
        number = control.start_job(_job(task) | keys).job_id

        def rounds() -> list[dict[str, float]]:
            with suppress(Failure):  # the server was killed
                return [_times(each) for each in reversed(control.rounds(job_id=number))]
            return []

        def model() -> dict[str, Any]:
            control.export_model(0, task.folder / "model.safetensors")
            return load_file(task.folder / "model.safetensors")

        def over() -> bool:
            return control.job(number).state not in ("queued", "running")

        pids = [client.pid for client in fleet.clients]
        yield Run(launched, fleet.server.pid, pids, rounds, over, model, fleet.restart_server)


def _job(task: Task) -> dict[str, Any]:
    everybody = {"min_clients": task.clients, "min_clients_to_aggregate": 1, "rounds": task.rounds}
    if task.cell == "mnist":
        return {**preset_job(Dataset.MNIST), "evaluate": False, **everybody}
    return vector_job(PARAMETERS[task.cell], clients=task.clients, **everybody)


def _times(round_: pb.Round) -> dict[str, float]:
    began = datetime.fromisoformat(round_.started_at).timestamp()
    ended = {"ended": began + round_.seconds} if round_.model_version else {}
    return {"began": began, "train": round_.train_seconds_max, "updates": round_.delivered, **ended}
