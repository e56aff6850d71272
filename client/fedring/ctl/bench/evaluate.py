"""flctl evaluate: how good is this model, on samples that are here?"""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from fedring.ctl.access import connect
from fedring.ctl.failure import Failure
from fedring.ctl.options import DEFAULT_SERVER, OutputOption, ServerOption
from fedring.ctl.output import Output, number, percent, print_json, print_table
from fedring.daemon.exits import Exit


def evaluate(
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="A .safetensors file, or a version number to fetch; 0 = the newest.")
    ],
    model: Annotated[str, typer.Option(help="module:attribute that builds the network.")],
    data: Annotated[str, typer.Option(help="module:attribute that returns the samples.")],
    model_args: Annotated[str, typer.Option(metavar="JSON", help="Keyword arguments of --model.")] = "{}",
    loss: Annotated[str, typer.Option(help="module:attribute, (outputs, labels) -> scalar.")] = (
        "fedring.train.losses:cross_entropy"
    ),
    data_root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the data sets.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Evaluate a model on the test samples of a data set, here, without any client."""
    try:
        arguments = json.loads(model_args)
    except ValueError as error:
        raise Failure(f"--model-args is not JSON: {error}", Exit.USAGE) from error
    names = {"model": model, "data": data, "loss": loss}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(source)
        if source.isdecimal() and not path.exists():
            path = Path(folder) / "model.safetensors"
            with connect(server) as control:
                control.export_model(int(source), path)
        counts = evaluate_file(path, names, arguments, data_root=data_root, device=device)
    accuracy, mean_loss = counts["correct"] / counts["total"], counts["loss_sum"] / counts["total"]
    if output is Output.JSON:
        return print_json({"accuracy": accuracy, "loss": mean_loss, **counts})
    row = (percent(accuracy), number(mean_loss), f"{counts['correct']:,} of {counts['total']:,}")
    print_table(source, ("accuracy>", "loss>", "correct>"), [row])


def evaluate_file(
    path: Path, names: dict[str, str], model_args: dict[str, Any], *, data_root: Path | None, device: str
) -> dict[str, Any]:
    """The counts of the model in the file on the test samples of `names["data"]`."""
    # torch takes seconds to import: only this verb waits for it
    from fedring.data import DataError
    from fedring.train.device import pick_device
    from fedring.train.errors import SeamError
    from fedring.train.evaluation import evaluate as count
    from fedring.train.files import load_model
    from fedring.train.seam import build_model, resolve

    # The operator names these on the command line: what they name is trusted.
    trusted = sorted({"fedring", "torchvision", *(name.partition(":")[0] for name in names.values())})
    try:
        network = load_model(path, build_model(names["model"], model_args, 0, trusted))
        samples = resolve(names["data"], trusted)(data_root, False)
        counts = count(network, samples.test, loss=resolve(names["loss"], trusted), device=pick_device(device))
    except (SeamError, DataError) as error:
        raise Failure(str(error).rstrip("."), Exit.CONFIG) from error
    if not counts.total:
        raise Failure(f"{names['data']} has no test samples")
    return {"correct": counts.correct, "total": counts.total, "loss_sum": counts.loss_sum}
