"""How much memory the processes of a pipeline job take, for a model that none of them should hold whole.

    python -m tests.bench.pipeline_state --megabytes 400 --stages 4

Each process' peak (VmHWM) is reset before the job, and compared with its resident size before (VmRSS).
"""

import argparse
import tempfile
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

from tests.fleets import Control, Programs, until_watching

_MB = 1e6


def job(megabytes: float, stages: int, **pipeline: Any) -> dict[str, Any]:
    """Return a job of two short rounds of plain SGD.

    Args:
        megabytes: The size of the model.
        stages: The stages, of equal sizes.
        pipeline: Keys of its pipeline table.
    """
    layers = 12 * stages + 1  # many, so that one of them is small, and as many in each stage
    hidden = round(sqrt(megabytes * _MB / 4 / (layers - 1)))
    return {
        "mode": "pipeline",
        "model": "fedring.train.models:digits_mlp",
        "model_args": {"hidden": hidden, "layers": layers},
        "rounds": 2,
        "subset_size": 32,
        "batch_size": 8,
        "lr": 0.001,
        "momentum": 0.0,
        "barrier_timeout_seconds": 300,
        "deadline_seconds": 900,
        "pipeline": {"stages": stages, "checkpoint_every": 2, "first_model": "by_module", **pipeline},
    }


def measure(folder: Path, spec: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Run a job on a server and as many clients as it needs.

    Args:
        folder: An empty folder for their state.
        spec: The job.

    Returns:
        For each process its resident size before the job and its peak during the job, in MB.
    """
    clients = spec["pipeline"]["stages"]
    with Programs(folder, {}, [{"clients_on_host": clients}] * clients) as fleet, Control(fleet.control) as control:
        until_watching(control, clients)
        pids = {"server": fleet.server.pid} | {f"client-{n}": client.pid for n, client in enumerate(fleet.clients)}
        idle = {name: _status(pid, "VmRSS") for name, pid in pids.items()}
        for pid in pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM begins again
        events = control.events()
        job_id = control.start_job(dict(spec)).job_id
        for event in control.follow_job(job_id, events):
            print(event.text)
        ended = control.job(job_id)
        if ended.state != "completed":
            raise RuntimeError(f"the job ended as {ended.state}: {ended.reason}")
        for round_ in control.rounds(job_id=job_id):
            sent = sum(client.metrics["bytes_sent"] for client in round_.clients)
            print(
                f"round {round_.job_round}: {round_.download_bytes / _MB:.1f} MB down, "
                f"{round_.upload_bytes / _MB:.1f} MB up, {sent / _MB:.1f} MB to peers, "
                f"{round_.eval_total} samples evaluated"
            )
        return {name: (idle[name], _status(pid, "VmHWM")) for name, pid in pids.items()}


def _status(pid: int, key: str) -> float:
    """Return a size from /proc/PID/status, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / _MB for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    """Measure, and print a line for each process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--stages", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = measure(Path(folder), job(options.megabytes, options.stages))
    for name, (idle, peak) in sizes.items():
        print(f"{name}: {idle:.0f} MB idle, {peak:.0f} MB at its peak, {peak - idle:.0f} MB more")


if __name__ == "__main__":
    main()
