"""flctl pipeline draw and print: show a pipeline's schedule.

It is shown as a picture or as text, without running it.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedring.control.failure import Failure
from fedring.ctl.options import OutputOption, check_out_file
from fedring.ctl.output import Output, percent, print_json, print_table, stderr_console, stdout_console
from fedring.daemon.exits import Exit
from fedring.pipeline.drawing import draw as draw_timeline
from fedring.pipeline.drawing import text
from fedring.schedules.routes import BATCH, Routes, chain
from fedring.schedules.schedule import NAMES, Schedule, ScheduleError, Versions, make, pipedream
from fedring.schedules.simulation import Costs, Timeline, check, simulate
from fedring.train.jobs.pipeline_table import CREDITS

_SKIP = re.compile(r"(\d{1,4})-(\d{1,4})")

NameArgument = Annotated[
    str, typer.Argument(metavar="SCHEDULE", help=f"One of {', '.join(NAMES)}.", show_default=False)
]
StagesOption = Annotated[int, typer.Option("--stages", min=1, help="Parts that the model is cut into.")]
CountOption = Annotated[int, typer.Option("--micro-batches", "-m", min=1, help="Micro-batches to schedule.")]
WorkersOption = Annotated[
    int,
    typer.Option("--workers", min=0, help="Workers that share the stages of interleaved_1f1b; 0 = one for each stage."),
]
ReplicasOption = Annotated[
    str,
    typer.Option(
        "--replicas", metavar="N,N,...", help="Workers of each stage, not for interleaved_1f1b; empty = one for each."
    ),
]
SkipsOption = Annotated[
    str,
    typer.Option(
        "--skips", metavar="S-T,...", help="Pairs of stages: the first makes a tensor that the second one uses, too."
    ),
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
    replicas: ReplicasOption = "",
    skips: SkipsOption = "",
    interval: IntervalOption = 0,
    versions: VersionsOption = Versions.STASHED,
    forward: ForwardOption = 1.0,
    backward: BackwardOption = 2.0,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The PNG to write.")] = Path("schedule.png"),
) -> None:
    """Draw the work of each worker over time.

    The gaps are the bubbles.
    """
    check_out_file(out)
    schedule = _schedule(name, (stages, micro_batches, workers), replicas, interval, versions)
    timeline = _simulated(schedule, _routes(stages, skips), Costs(forward, backward))
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
    replicas: ReplicasOption = "",
    skips: SkipsOption = "",
    interval: IntervalOption = 0,
    versions: VersionsOption = Versions.STASHED,
    forward: ForwardOption = 1.0,
    backward: BackwardOption = 2.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print every worker's actions, and each stage's memory needs.

    The needs are the numbers of activations and of weight versions that the stage keeps.
    """
    schedule, routes = (
        _schedule(name, (stages, micro_batches, workers), replicas, interval, versions),
        _routes(stages, skips),
    )
    timeline, needs = _simulated(schedule, routes, Costs(forward, backward)), check(schedule, routes=routes)
    if output is Output.JSON:
        return print_json(_table(schedule) | {
            "edges": [edge._asdict() for edge in routes.edges],
            "makespan": timeline.makespan,
            "bubble": timeline.bubble,
            "needs": [need._asdict() for need in needs],
        })  # fmt: skip
    stdout_console().print(text(schedule), soft_wrap=True)
    rows = [
        (str(stage), _listed(schedule.owners(stage)), _listed(_makers(routes, stage)), *map(str, need))
        for stage, need in enumerate(needs)
    ]
    title = f"{name}: time {timeline.makespan:g}, bubble {percent(timeline.bubble)}"
    print_table(title, ("stage>", "workers>", "uses stages>", "activations kept>", "versions kept>"), rows)


def numbers(option: str, text: str, separator: str) -> list[int]:
    """Return the numbers above 0 in the text of an option."""
    parts = text.split(separator)
    if not all(part.isdecimal() and int(part) for part in parts):
        raise Failure(f"{option} {text!r} must be whole numbers above 0, separated by {separator!r}", Exit.USAGE)
    return [int(part) for part in parts]


def _schedule(name: str, counts: tuple[int, int, int], replicas: str, interval: int, versions: Versions) -> Schedule:
    stages, micro_batches, workers = counts
    asynchronous = name == "pipedream"
    if not asynchronous and (interval or versions is not Versions.STASHED):
        raise Failure(
            "--interval and --versions are for pipedream: other schedules have one optimizer step per batch", Exit.USAGE
        )
    each = numbers("--replicas", replicas, ",") if replicas else []
    try:
        if asynchronous and not workers:
            return pipedream(stages, micro_batches, interval=interval, versions=versions, replicas=each)
        return make(name, stages, micro_batches, workers=workers, replicas=each)
    except ScheduleError as error:
        raise Failure(str(error), Exit.USAGE) from error


def _routes(stages: int, skips: str) -> Routes:
    """Return the routes of a chain with these skips."""
    sources = [dict(inputs) for inputs in chain(stages).sources]
    for skip in skips.split(",") if skips else ():
        found = _SKIP.fullmatch(skip)
        if found is None or not int(found[1]) < int(found[2]) < stages:
            raise Failure(
                f"--skips {skip!r} must be two stages, as in 0-2, the first one before the second one, below {stages}",
                Exit.USAGE,
            )
        sources[int(found[2])][f"skip{found[1]}"] = int(found[1])
    return Routes(tuple(sources))


def _simulated(schedule: Schedule, routes: Routes, costs: Costs) -> Timeline:
    """Simulate with as many credits as jobs have."""
    try:
        return simulate(schedule, costs, routes=routes, credits=CREDITS)
    except ScheduleError as error:
        raise Failure(str(error), Exit.USAGE) from error


def _makers(routes: Routes, stage: int) -> list[int]:
    return sorted({source for source in routes.sources[stage].values() if source != BATCH})


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _table(schedule: Schedule) -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "interval": schedule.interval,
        "replicas": list(schedule.replicas),
        "workers": [[action._asdict() for action in actions] for actions in schedule.workers],
    }
