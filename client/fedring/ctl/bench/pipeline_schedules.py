"""flctl pipeline draw and print: show a pipeline's schedule as a picture or as text, without running it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedring.control.failure import Failure
from fedring.ctl.options import OutputOption, check_out_file
from fedring.ctl.output import Output, percent, print_json, print_table, stderr_console, stdout_console
from fedring.daemon.exits import Exit
from fedring.pipeline.drawing import draw as draw_timeline
from fedring.pipeline.drawing import text
from fedring.schedules.schedule import NAMES, Schedule, ScheduleError, Versions, make, pipedream
from fedring.schedules.simulation import Costs, check, simulate

NameArgument = Annotated[
    str, typer.Argument(metavar="SCHEDULE", help=f"One of {', '.join(NAMES)}.", show_default=False)
]
StagesOption = Annotated[int, typer.Option("--stages", min=1, help="Parts that the model is cut into.")]
CountOption = Annotated[int, typer.Option("--micro-batches", "-m", min=1, help="Micro-batches to schedule.")]
WorkersOption = Annotated[
    int,
    typer.Option("--workers", min=0, help="Workers that share the stages of interleaved_1f1b; 0 = one for each stage."),
]
IntervalOption = Annotated[
    int,
    typer.Option(
        "--interval",
        min=0,
        help="Micro-batches between two optimizer steps of pipedream; 0 = as few as --versions allows.",
    ),
]
VersionsOption = Annotated[
    Versions, typer.Option("--versions", help="Which version of the weights a forward pass of pipedream uses.")
]
ForwardOption = Annotated[float, typer.Option("--forward", min=0, help="Time of a stage's forward pass, in any unit.")]
BackwardOption = Annotated[
    float, typer.Option("--backward", min=0, help="Time of a stage's backward pass, in the same unit.")
]


def draw(
    name: NameArgument,
    stages: StagesOption = 4,
    micro_batches: CountOption = 8,
    workers: WorkersOption = 0,
    interval: IntervalOption = 0,
    versions: VersionsOption = Versions.STASHED,
    forward: ForwardOption = 1.0,
    backward: BackwardOption = 2.0,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The PNG to write.")] = Path("schedule.png"),
) -> None:
    """Draw what each worker does at which time; the gaps are the bubbles."""
    check_out_file(out)
    schedule = _schedule(name, (stages, micro_batches, workers), interval, versions)
    timeline = simulate(schedule, Costs(forward, backward))
    try:
        draw_timeline(timeline, out, title=f"{name}, {stages} stages, {micro_batches} micro-batches")
    except OSError as error:
        raise Failure(f"cannot write {out}: {error.strerror or error}") from error
    stderr_console().print(f"{out}: bubble {percent(timeline.bubble)}")


def print_(
    name: NameArgument,
    stages: StagesOption = 4,
    micro_batches: CountOption = 8,
    workers: WorkersOption = 0,
    interval: IntervalOption = 0,
    versions: VersionsOption = Versions.STASHED,
    forward: ForwardOption = 1.0,
    backward: BackwardOption = 2.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the actions of every worker, and how many activations and weight versions each stage keeps."""
    schedule = _schedule(name, (stages, micro_batches, workers), interval, versions)
    timeline, needs = simulate(schedule, Costs(forward, backward)), check(schedule)
    if output is Output.JSON:
        return print_json(_table(schedule) | {
            "makespan": timeline.makespan,
            "bubble": timeline.bubble,
            "needs": [need._asdict() for need in needs],
        })  # fmt: skip
    stdout_console().print(text(schedule), soft_wrap=True)
    rows = [
        (str(s), ", ".join(map(str, schedule.owners(s))), str(n.activations), str(n.versions))
        for s, n in enumerate(needs)
    ]
    title = f"{name}: time {timeline.makespan:g}, bubble {percent(timeline.bubble)}"
    print_table(title, ("stage>", "worker>", "activations kept>", "versions kept>"), rows)


def _schedule(name: str, counts: tuple[int, int, int], interval: int, versions: Versions) -> Schedule:
    stages, micro_batches, workers = counts
    asynchronous = name == "pipedream"
    if not asynchronous and (interval or versions is not Versions.STASHED):
        raise Failure(
            "--interval and --versions are for pipedream: other schedules have one optimizer step per batch", Exit.USAGE
        )
    try:
        if asynchronous and not workers:
            return pipedream(stages, micro_batches, interval=interval, versions=versions)
        return make(name, stages, micro_batches, workers=workers)
    except ScheduleError as error:
        raise Failure(str(error), Exit.USAGE) from error


def _table(schedule: Schedule) -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "interval": schedule.interval,
        "workers": [[action._asdict() for action in actions] for actions in schedule.workers],
    }
