"""What the demo trains on each data set when nothing else is asked for."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from fedring.ctl.failure import Failure
from fedring.daemon.exits import Exit


class Mode(StrEnum):
    """How a job trains."""

    FEDERATED = "federated"
    DATA_PARALLEL = "data_parallel"
    PIPELINE = "pipeline"


class Dataset(StrEnum):
    """A data set that `fedring.data` knows."""

    DIGITS = "digits"  # embedded; the others are files below --data-root
    MNIST = "mnist"
    FASHION_MNIST = "fashion_mnist"
    CIFAR10 = "cifar10"


@dataclass(frozen=True, slots=True)
class Preset:
    """Clients, and keys of a job, that learn the data set in few rounds."""

    model: str
    lr: float
    clients: int = 3
    rounds: int = 10
    subset_size: int = 6000
    epochs: int = 1
    batch_size: int = 64
    momentum: float = 0.9


PRESETS = {
    Dataset.DIGITS: Preset("digits_mlp", lr=0.1, subset_size=0, epochs=5, batch_size=32, momentum=0.0),
    Dataset.MNIST: Preset("mnist_cnn", lr=0.05, clients=2),
    Dataset.FASHION_MNIST: Preset("mnist_cnn", lr=0.05, clients=2),
    Dataset.CIFAR10: Preset("cifar_cnn", lr=0.02, clients=2, subset_size=10_000),
}


def preset_job(dataset: Dataset, mode: Mode = Mode.FEDERATED) -> dict[str, Any]:
    """The keys of the data set's job in that mode; in a group, a round is an epoch of everything."""
    preset = PRESETS[dataset]
    together = {
        "mode": str(mode),
        "rounds": 5,
        "subset_size": 0,
        "epochs": 1,
        "momentum": 0.9,
        "lr": min(preset.lr, 0.05),
    }
    deep = {"model_args": {"layers": 3}} if mode is Mode.PIPELINE and dataset is Dataset.DIGITS else {}
    return {
        "name": f"{dataset} demo",
        "model": f"fedring.train.models:{preset.model}",
        "data": f"fedring.data:{dataset}",
        "rounds": preset.rounds,
        "subset_size": preset.subset_size,
        "epochs": preset.epochs,
        "batch_size": preset.batch_size,
        "lr": preset.lr,
        "momentum": preset.momentum,
    } | ({} if mode is Mode.FEDERATED else together | deep)


def check_data_root(dataset: Dataset, data_root: Path | None) -> None:
    """Failure if the data set needs a folder, and that does not hold it whole."""
    if data_root is not None and not data_root.is_dir():
        raise Failure(f"--data-root {data_root} is not a folder", Exit.CONFIG)
    if dataset is Dataset.DIGITS:
        return
    if data_root is None:
        raise Failure(
            f"{dataset} is not part of fedring: name the folder that holds it with --data-root, "
            "or use the embedded --dataset digits",
            Exit.USAGE,
        )
    import fedring.data  # imports torch, which the daemons that follow do, too

    try:
        getattr(fedring.data, dataset)(data_root, False)
    except fedring.data.DataError as error:
        command = f'python -c "from fedring.data import {dataset}; {dataset}({str(data_root)!r}, download=True)"'
        raise Failure(f"{str(error).removesuffix('.')}: {command}", Exit.CONFIG) from error
