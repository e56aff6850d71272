"""flctl pipeline memory: the memory of each stage of a model.

It is measured in one step with random data.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fedring.control.failure import Failure
from fedring.ctl.local.pipeline_schedules import ReplicasOption, VersionsOption, numbers
from fedring.ctl.options import OutputOption, keywords
from fedring.ctl.output import Output, print_json, print_table, size
from fedring.daemon.exits import Exit
from fedring.schedules.schedule import NAMES, Versions


def memory(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The model, as module:attribute or torchvision:NAME.")
    ] = "torchvision:resnet18",
    model_args: Annotated[str, typer.Option(metavar="JSON", help="Keyword arguments of the function MODEL.")] = "{}",
    stages: Annotated[str, typer.Option(help="Numbers of stages to try, separated by commas.")] = "1,2,4",
    shape: Annotated[str, typer.Option(help="Shape of one input, its sizes separated by x.")] = "3x64x64",
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 32,
    micro_batches: Annotated[int, typer.Option("--micro-batches", "-m", min=1, help="Micro-batches of a batch.")] = 8,
    schedule: Annotated[str, typer.Option(help=f"One of {', '.join(NAMES)}.")] = "1f1b",
    stages_per_worker: Annotated[int, typer.Option(min=1, help="Stages of each worker in interleaved_1f1b.")] = 1,
    versions: VersionsOption = Versions.STASHED,
    replicas: ReplicasOption = "",
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Keep the inputs of stages, and compute their activations again.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the memory of each worker, in bytes.

    It is for parameters, their older versions, Adam's state, and activations at the peak.
    """
    if batch_size < micro_batches:
        raise Failure(
            f"--batch-size {batch_size} is less than --micro-batches {micro_batches}: "
            "a micro-batch needs at least one sample",
            Exit.USAGE,
        )
    table: dict[str, Any] = {
        "schedule": schedule,
        "micro_batches": micro_batches,
        "recompute": recompute,
        "stages_per_worker": stages_per_worker,
        "versions": versions.value,
    }
    if replicas:
        table["replicas"] = numbers("--replicas", replicas, ",")
    dimensions = [batch_size, *numbers("--shape", shape, "x")]
    rows = []
    for count in numbers("--stages", stages, ","):
        rows += measure_stages(model, model_args, {**table, "stages": count}, dimensions)
    if output is Output.JSON:
        return print_json({"model": model, "batch_size": batch_size, **table, "rows": rows})
    cells = [
        (_names(row, stages_per_worker), *(size(row[key]) for key in _SIZES), str(row["in_flight"])) for row in rows
    ]
    print_table(
        f"{model}: bytes of each stage", ("stage", *(f"{key}>" for key in _SIZES), "micro-batches kept>"), cells
    )


_SIZES = ("parameters", "stashed", "optimizer", "activations")


def _names(row: dict[str, Any], each: int) -> str:
    """Return a label of a worker's stages: "0, 2 of 4".

    The last number is that of all stages.
    """
    mine = range(row["stage"], row["stages"], row["stages"] // each)
    return f"{', '.join(map(str, mine))} of {row['stages']}"


def measure_stages(name: str, args: str, table: dict[str, Any], shape: Sequence[int]) -> list[dict[str, Any]]:
    """Run one step with random data, and return each worker's memory.

    There is one row of bytes for each worker.

    Args:
        name: The function that makes the model, as module:name.
        args: Its keyword arguments, as JSON.
        table: Keys of a job's table `pipeline`.
        shape: Shape of a batch of inputs.

    Raises:
        Failure: The model cannot be made, cannot be cut so, or does not take such inputs.
    """
    import torch  # takes seconds to import, so only this verb waits for it
    from pydantic import ValidationError

    from fedring.job_code import job_code
    from fedring.offers import named
    from fedring.pipeline.memory import measure
    from fedring.train.errors import SeamError, failure_detail
    from fedring.train.jobs.pipeline_table import Pipeline
    from fedring.train.names.offered import collect
    from fedring.train.names.seam import build_model
    from fedring.workers.cutting import count_layers, cut_model

    arguments = keywords(args)
    try:
        pipeline, offered = Pipeline.model_validate(table), collect(named(model=name))
        model = build_model(name, arguments, 0, offered)
        cut = cut_model(model, pipeline, count_layers(model, pipeline, lambda: torch.randn(*shape)), offered)
    except ValidationError as error:
        raise Failure(error.errors()[0]["msg"], Exit.USAGE) from error
    except (SeamError, ValueError) as error:
        raise Failure(str(error), Exit.USAGE) from error
    made = pipeline.schedule_of(table["micro_batches"])
    try:
        with job_code():
            kept = measure(
                cut,
                made,
                (torch.randn(*shape), torch.zeros(shape[0])),
                loss=lambda outputs, _: outputs.square().mean(),
                routes=cut.routes,
                recompute=pipeline.recompute,
            )
    except Exception as error:  # the model may raise anything, and does so if it takes other inputs
        text = f"{name} cannot be trained on random inputs of --shape {'x'.join(map(str, shape[1:]))}"
        raise Failure(f"{text}: {failure_detail(error)}", Exit.USAGE) from error
    return [
        {"stages": len(cut), "stage": made.stages_of(worker)[0], "worker": worker, **one._asdict()}
        for worker, one in enumerate(kept)
    ]
