"""Runs one job of NVFlare: a script for an environment with nvflare and torch.

    python nvflare_job.py CELL ROUNDS CLIENTS ROOT OUT ADMIN

ADMIN is the folder of an administrator's startup kit. At the end, OUT has `rounds.json`, `done`, and with the cell
`mnist` the last model.
"""

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

jobs: Any = importlib.import_module("nvflare.app_opt.pt.job_config.fed_avg")
runners: Any = importlib.import_module("nvflare.job_config.script_runner")
flare_api: Any = importlib.import_module("nvflare.fuel.flare_api.flare_api")
api: Any = importlib.import_module("nvflare.fuel.flare_api.api_spec")
parts: Any = importlib.import_module("nvflare_parts")
work: Any = importlib.import_module("work")

HERE = Path(__file__).parent
_ANSWER_SECONDS = 120.0


def main(cell: str, rounds: int, clients: int, root: str, out: str, admin: str) -> None:
    """Send the job, and wait for its end."""
    job = jobs.FedAvgJob(
        initial_model=work.network(cell), n_clients=clients, num_rounds=rounds, name=cell, min_clients=1
    )
    job.to_server(parts.Times(out), id="times")
    told = f"{cell} {root} {clients} {out}"
    job.to_clients(runners.ScriptRunner(script=str(HERE / "nvflare_train.py"), script_args=told))
    job.export_job(out)
    session = flare_api.new_secure_session(Path(admin).name, admin, timeout=120.0)
    try:
        while len(session.get_connected_client_list()) < clients:
            time.sleep(0.2)
        session.set_timeout(_ANSWER_SECONDS)
        number = session.submit_job(str(Path(out) / cell))
        while True:
            try:
                session.monitor_job(number)
                break
            except api.NoConnection:  # a server with much to send does not answer in time
                time.sleep(1.0)
        result = session.download_job_result(number)
    finally:
        session.close()
    if cell == "mnist":
        found = next(Path(result).rglob("FL_global_model.pt"))
        state = torch.load(found, weights_only=True)
        state = state.get("model", state)
        arrays: dict[str, Any] = {name: np.asarray(value) for name, value in state.items()}
        np.savez(Path(out) / "model.npz", **arrays)
    (Path(out) / "done").touch()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
