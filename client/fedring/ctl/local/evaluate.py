"""flctl evaluate: measure a model on test samples of this machine."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedring.control.failure import Failure
from fedring.ctl.access import connect
from fedring.ctl.local.presets import DataRootOption
from fedring.ctl.operate.model_names import HELP, find_version, names_version
from fedring.ctl.options import DEFAULT_SERVER, OutputOption, ServerOption, keywords
from fedring.ctl.output import Output, number, percent, print_json, print_table, stderr_console
from fedring.daemon.exits import Exit

if TYPE_CHECKING:
    from fedring.train.evaluation import Counts


def evaluate(
    source: Annotated[
        str,
        typer.Argument(metavar="MODEL", help=f"A .safetensors file, or a version to fetch from the server: {HELP}."),
    ],
    model: Annotated[str, typer.Option(help="The function that builds the network, as module:attribute.")],
    data: Annotated[str, typer.Option(help="The function that returns the samples, as module:attribute.")],
    model_args: Annotated[
        str, typer.Option(metavar="JSON", help="Keyword arguments of the function in --model.")
    ] = "{}",
    loss: Annotated[
        str, typer.Option(help="The loss (outputs, labels) -> scalar, as module:attribute.")
    ] = "fedring.train.losses:cross_entropy",
    evaluator: Annotated[
        str, typer.Option(help="A function (model, samples) of your own instead of the built-in evaluation.")
    ] = "",
    data_root: DataRootOption = None,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda or cuda:N.")] = "auto",
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Evaluate a model on a data set's test samples, without clients.

    This machine does all of it.
    """
    arguments = keywords(model_args)
    names = {"model": model, "data": data, "loss": loss} | ({"evaluator": evaluator} if evaluator else {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(source)
        # A file goes first, since its name may also be that of a version, such as 12.
        if names_version(source) and not path.exists():
            path = Path(folder) / "model.safetensors"
            with connect(server) as control:
                control.export_model(find_version(control, source), path)
        counts = evaluate_file(path, names, arguments, data_root=data_root, device=device)
    for warning in counts.warnings:
        stderr_console().print(warning, markup=False, highlight=False, soft_wrap=True)
    if output is Output.JSON:
        table = {"correct": counts.correct, "total": counts.total, "loss_sum": counts.loss_sum}
        return print_json({"accuracy": counts.accuracy, "loss": counts.loss, **table, "metrics": dict(counts.metrics)})
    of = f"of {counts.total:,}"
    row = (percent(counts.accuracy), number(counts.loss), of if counts.correct is None else f"{counts.correct:,} {of}")
    named = sorted(counts.metrics.items())
    columns = ("accuracy>", "loss>", "correct>", *(f"{name}>" for name, _ in named))
    print_table(source, columns, [(*row, *(f"{value:.6g}" for _, value in named))])


def evaluate_file(
    path: Path, names: dict[str, str], model_args: dict[str, Any], *, data_root: Path | None, device: str
) -> "Counts":
    """Evaluate the model in a file.

    Args:
        path: The .safetensors file.
        names: What to import, as module:attribute, by the keys `model`, `data`, `loss` and perhaps `evaluator`.
        model_args: Keyword arguments of the model's function.
        data_root: Folder of the data sets.
        device: Where to compute.

    Raises:
        Failure: A name cannot be imported, or the model, the file and the samples do not fit together.
    """
    # torch takes seconds to import, so only this verb waits for it.
    from fedring.data import DataError, load_split
    from fedring.offers import named
    from fedring.train.device import pick_device
    from fedring.train.errors import SeamError, TrainError
    from fedring.train.evaluation import run_evaluator
    from fedring.train.names.offered import collect
    from fedring.train.names.seam import build_model
    from fedring.train.tensors.files import load_model

    try:
        offered = collect(named(**names), root=data_root)  # What the operator has named is offered to the operator.
        network = load_model(path, build_model(names["model"], model_args, 0, offered))
        samples = load_split(offered.get("data", names["data"]), data_root, False)
        evaluator = offered.get("evaluator", names["evaluator"]) if names.get("evaluator") else None
        loss = offered.get("loss", names["loss"])
        counts = run_evaluator(evaluator, network, samples.test, loss=loss, device=pick_device(device))
    except (SeamError, TrainError, DataError) as error:
        raise Failure(str(error).rstrip("."), Exit.CONFIG) from error
    if not counts.total:
        raise Failure(f"{names['data']} has no test samples: name a data set that has some with --data")
    return counts
