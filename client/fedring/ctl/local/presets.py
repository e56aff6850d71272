"""Data sets, modes, and a suitable job for each of them.

They are the defaults of try, bench and profile.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fedring.control.failure import Failure
from fedring.daemon.exits import Exit


class Mode(StrEnum):
    """The mode in which a job trains.

    The values are those of the job's key `mode`.
    """

    FEDERATED = "federated"
    DATA_PARALLEL = "data_parallel"
    PIPELINE = "pipeline"


class Dataset(StrEnum):
    """A data set of `fedring.data`.

    The values are the names of its functions.
    """

    DIGITS = "digits"  # part of fedring; the others are files below --data-root
    MNIST = "mnist"
    FASHION_MNIST = "fashion_mnist"
    CIFAR10 = "cifar10"


DatasetOption = Annotated[Dataset, typer.Option(help="What to train on; all data sets but digits need --data-root.")]
DataRootOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder that holds the data sets.")]


@dataclass(frozen=True, slots=True)
class Preset:
    """Job keys and clients with which a data set is learned quickly."""

    model: str  # its name in fedring.train.models
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


_SMALL_DGC = {"rounds": 10, "batch_size": 16, "data_parallel": {"ratio": 0.01}}
"""What suits deep gradient compression on digits. Its usual 0.1 % would be 5 of 4,810 values in each of few steps: at
the end, most of what the workers have learned would still be in their residuals."""


def preset_job(dataset: Dataset, mode: Mode = Mode.FEDERATED, hook: str = "none") -> dict[str, Any]:
    """Return the keys of a suitable job.

    It suits the data set, the mode and, if that is data_parallel, the hook. In the modes data_parallel and pipeline a
    round is one epoch over all samples.
    """
    preset = PRESETS[dataset]
    group = {
        "mode": str(mode),
        "rounds": 5,
        "subset_size": 0,
        "epochs": 1,
        "momentum": 0.9,
        "lr": min(preset.lr, 0.05),
    }
    small = dataset is Dataset.DIGITS
    deeper: dict[str, Any] = {"model_args": {"layers": 3}} if mode is Mode.PIPELINE and small else {}
    slower = _SMALL_DGC if mode is Mode.DATA_PARALLEL and small and hook.partition("(")[0] == "dgc" else {}
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
    } | ({} if mode is Mode.FEDERATED else group | deeper | slower)


def check_data_root(dataset: Dataset, data_root: Path | None) -> None:
    """Check that the data set can be read.

    Raises:
        Failure: `data_root` is no folder, is missing, or does not hold the complete data set.
    """
    if data_root is not None and not data_root.is_dir():
        raise Failure(f"--data-root {data_root} is not a folder", Exit.CONFIG)
    if dataset is Dataset.DIGITS:
        return
    if data_root is None:
        raise Failure(
            f"{dataset} is not part of fedring: name the folder that holds it with --data-root, "
            "or use --dataset digits, which needs no files",
            Exit.USAGE,
        )
    import fedring.data  # imports torch, as the daemons that are started next do anyway

    try:
        getattr(fedring.data, dataset)(data_root, False)
    except fedring.data.DataError as error:
        command = f'python -c "from fedring.data import {dataset}; {dataset}({str(data_root)!r}, download=True)"'
        raise Failure(f"{str(error).removesuffix('.')}: {command}", Exit.CONFIG) from error
