"""Trackers of a job's rounds: TensorBoard, MLflow, Weights & Biases.

They write the rounds from wherever somebody watches the job.

It runs wherever somebody watches the job.

    with tensorboard("runs/digits") as log:
        for row in job.watch():
            log(row)

Each of them needs its package: pip install 'fedring[tensorboard]', 'fedring[mlflow]' or 'fedring[wandb]'.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from fedring.control.failure import Failure
from fedring.control.figures import Row
from fedring.daemon.exits import Exit

Log = Callable[[Row], None]
"""Takes a round as a row; its step is the round's number within the job."""

_OF_ROUNDS = ("seconds", "train_seconds_max", "upload_bytes", "download_bytes", "delivered")


@contextmanager
def tensorboard(folder: str | Path) -> Iterator[Log]:
    """Write event files for TensorBoard into the folder.

    Raises:
        Failure: If the package tensorboard is not installed.
    """
    _need("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:

        def log(row: Row) -> None:
            for name, value in scalars(row).items():
                writer.add_scalar(name, value, step(row))
            writer.flush()

        yield log


@contextmanager
def mlflow(experiment: str) -> Iterator[Log]:
    """Write a new run of the experiment to MLflow.

    MLFLOW_TRACKING_URI names the server or folder.

    Raises:
        Failure: If the package mlflow is not installed.
    """
    module = _need("mlflow")
    module.set_experiment(experiment)
    with module.start_run():
        yield lambda row: module.log_metrics(scalars(row), step=step(row))


@contextmanager
def wandb(project: str) -> Iterator[Log]:
    """Write a new run of the project to Weights & Biases.

    With WANDB_MODE=offline, it is written into the folder wandb/.

    Raises:
        Failure: If the package wandb is not installed.
    """
    with _need("wandb").init(project=project) as run:
        yield lambda row: run.log(scalars(row), step=step(row))


TRACKERS: Mapping[str, Callable[[str], AbstractContextManager[Log]]] = {
    "tensorboard": tensorboard,
    "mlflow": mlflow,
    "wandb": wandb,
}


def tracker(text: str) -> AbstractContextManager[Log]:
    """Return the tracker that "tensorboard=FOLDER", "mlflow=EXPERIMENT" or "wandb=PROJECT" names.

    Raises:
        Failure: If the text has another form.
    """
    name, _, target = text.partition("=")
    if name not in TRACKERS or not target:
        raise Failure(f"{text!r} is not tensorboard=FOLDER, mlflow=EXPERIMENT or wandb=PROJECT", Exit.USAGE)
    return TRACKERS[name](target)


def scalars(row: Row) -> dict[str, float]:
    """Return the known metrics, times and bytes of a round.

    Times and bytes are called "round/seconds", ...
    """
    named = {f"round/{name}": row.get(name) for name in _OF_ROUNDS} | {name: row[name] for name in row if "/" in name}
    return {name: float(value) for name, value in named.items() if isinstance(value, int | float)}


def step(row: Row) -> int:
    """Return the number of a round within its job."""
    return int(row["job_round"] or 0)


def _need(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        advice = f"pip install 'fedring[{name}]'"
        raise Failure(
            f"the package {name} is not installed, which writes the metrics: {advice}", Exit.CONFIG
        ) from error
