"""Training on all data in one place.

Its accuracy is the measure for federated training.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedring.train.jobs.job import Job


def train_centrally(
    job: Job, clients: int, *, data_root: Path | None, show: Callable[[int, float], None]
) -> dict[str, Any]:
    """Train the job's model on all clients' samples of each round.

    Args:
        job: The job that the clients run.
        clients: Number of clients.
        data_root: Folder of the data sets.
        show: Called after each round with its number and the accuracy on the test samples, from 0 to 1.

    Returns:
        `accuracy` of the last round, `accuracies` of all, and `train_seconds`, the time without evaluation.
    """
    from fedring.offers import named
    from fedring.train import Plan  # imports torch
    from fedring.train.batches import size_of
    from fedring.train.device import pick_device
    from fedring.train.evaluation import evaluate
    from fedring.train.loop import train
    from fedring.train.names.offered import collect
    from fedring.train.names.seam import build_model

    device = pick_device("auto")
    names = {"model": job.model, "data": job.data, "loss": job.loss, "optimizer": job.optimizer}
    offered = collect(named(**names), root=data_root)
    split = offered.get("data", job.data)(data_root, False)
    loss, optimizer = offered.get("loss", job.loss), offered.get("optimizer", job.optimizer)
    model = build_model(job.model, job.model_args, job.seed, offered).to(device)
    accuracies: list[float] = []
    seconds = 0.0
    for number in range(1, job.rounds + 1):
        settings = job.settings_of(number)
        plan = Plan(
            epochs=settings.epochs,
            batch_size=job.batch_size,
            lr=settings.lr,
            momentum=job.momentum,
            subset_size=min(clients * settings.subset_size, size_of(split.train)),
            seed=job.seed + number,
        )
        seconds += train(model, split.train, plan, loss=loss, optimizer_factory=optimizer, device=device).seconds
        counts = evaluate(model, split.test, loss=loss, device=device)
        assert counts.accuracy is not None  # all data sets of the presets have classes
        accuracies.append(counts.accuracy)
        show(number, accuracies[-1])
    return {"accuracy": accuracies[-1], "accuracies": accuracies, "train_seconds": seconds}
