"""flctl profile: the share of communication in a data-parallel step.

It also shows how much of it each hook would save.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from fedring.control.failure import Failure
from fedring.ctl.local.presets import Dataset, check_data_root, preset_job
from fedring.ctl.local.ranks import Host, run_ranks
from fedring.ctl.local.runner import present, unique_names
from fedring.ctl.options import OutputOption, make_out_folder
from fedring.ctl.output import Output, duration, percent, print_table, size
from fedring.daemon.exits import Exit
from fedring.train.jobs.data_parallel_table import HOOKS
from fedring.train.names.hooks import choose_hook, split_hooks

_ENOUGH = 0.10  # the share of a step below which communication is not the bottleneck
_TURNS = 5
_NOOP = "noop"
_METER = ("wait_seconds", "compress_seconds", "decompress_seconds")  # of a step, as the hook's meter has them


def profile(
    hooks: Annotated[
        str, typer.Option(help=f"Comma-separated: {', '.join(HOOKS)}; with parameters as in 'topk(ratio=0.05)'.")
    ] = "none,fp16,powersgd,dgc",
    dataset: Annotated[
        Dataset, typer.Option(help="What to train on; all but digits need --data-root.")
    ] = Dataset.MNIST,
    data_root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder that holds the data sets.")] = None,
    model: Annotated[str, typer.Option(metavar="MODULE:NAME", help="Model to train; by default the data set's.")] = "",
    workers: Annotated[int, typer.Option(min=2, max=64, help="Processes that train together.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure with each hook.")] = 50,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a step of each worker.")] = 64,
    backend: Annotated[str, typer.Option(help="What connects the workers: fedring or gloo.")] = "fedring",
    launch: Annotated[
        str, typer.Option(metavar="COMMAND", help="Command that runs a worker, such as 'ip netns exec host{rank}'.")
    ] = "",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where profile.json and profile.png go.")] = Path(
        "bench-out"
    ),
    output: OutputOption = Output.TABLE,
) -> None:
    """Train with each hook and without communication, and compare.

    The comparison shows the cost of communication. Workers run on this machine. If a step without communication is less
    than 10 % faster, it is not the bottleneck.
    """
    names = _names(hooks, backend)
    check_data_root(dataset, data_root)
    make_out_folder(out)
    preset = preset_job(dataset)
    settings = {
        "backend": backend,
        "threads": max(1, (os.cpu_count() or 1) // workers),
        "hooks": names,
        "turns": min(_TURNS, steps),
        "steps": max(1, steps // _TURNS),
        "batch_size": batch_size,
        "model": model or preset["model"],
        "data": preset["data"],
        "data_root": str(data_root.absolute()) if data_root else None,
    }
    measured = _measure(settings, launch, workers)
    result = {"dataset": str(dataset), "workers": workers, **settings, **judge(measured, workers * batch_size)}
    present(result, out / "profile.json", output, plot=_plot, print_results=_print)


def judge(measured: Sequence[Mapping[str, Any]], samples: int) -> dict[str, Any]:
    """Compare the hooks with noop, which sends nothing.

    Args:
        measured: What a worker measured of each hook, noop among them.
        samples: The samples of one step, of all workers.

    Returns:
        The seconds of a step without communication, the figures of each hook, and the verdict in words.
    """
    seconds = {row["hook"]: median(row["step_seconds"]) for row in measured}
    least = seconds[_NOOP]
    rows = [
        {
            "hook": row["hook"],
            "step_seconds": seconds[row["hook"]],
            "samples_per_second": samples / seconds[row["hook"]],
            "bytes_per_step": row["bytes_per_step"],
            "communication_seconds": max(0.0, seconds[row["hook"]] - least),
            "communication_share": max(0.0, 1 - least / seconds[row["hook"]]),
            **{name: row[name] for name in _METER if name in row},
        }
        for row in measured
        if row["hook"] != _NOOP
    ]
    return {"noop_step_seconds": least, "results": rows, "verdict": _verdict(rows)}


def _verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    first = next((row for row in rows if row["hook"] == "none"), rows[0])
    best = min(rows, key=lambda row: row["step_seconds"])
    share = first["communication_share"]
    if share < _ENOUGH:
        return (
            f"Without communication a step of {first['hook']} would take {percent(share)} less time: below 10 %, "
            "communication is not the bottleneck."
        )
    saved = 1 - best["step_seconds"] / first["step_seconds"]
    advice = f"{best['hook']} saves {percent(saved)} of the step" if saved > 0 else "no other hook is faster"
    left = best["communication_share"]
    rest = "what is left is below 10 %" if left < _ENOUGH else f"communication is still {percent(left)} of it then"
    return f"With {first['hook']} communication is {percent(share)} of a step: {advice}, and {rest}."


def _names(hooks: str, backend: str) -> list[str]:
    names = unique_names("--hooks", (name for name in split_hooks(hooks) if name != _NOOP))
    for name in names:
        try:
            choose_hook(name)
        except ValueError as error:
            raise Failure(str(error), Exit.USAGE) from None
    if backend not in ("fedring", "gloo"):
        raise Failure(f"--backend is fedring or gloo, not {backend!r}", Exit.USAGE)
    return [_NOOP, *names]


def _measure(settings: Mapping[str, Any], launch: str, workers: int) -> list[dict[str, Any]]:
    """Run the workers, and return their measurements."""
    prefixes = [shlex.split(launch.replace("{rank}", str(rank))) for rank in range(workers)]
    hosts = [Host(tuple(prefix)) for prefix in prefixes]
    try:
        measured: list[dict[str, Any]] = run_ranks("fedring.ctl.local.hook_steps:measure", settings, hosts)
    except OSError as error:
        raise Failure(f"--launch {launch!r} cannot be run: {error}", Exit.CONFIG) from error
    return measured


def _print(result: Mapping[str, Any]) -> None:
    noop = result["noop_step_seconds"]
    rows = [(_NOOP, duration(noop), "-", "-", "-", "-")] + [
        (
            row["hook"],
            duration(row["step_seconds"]),
            f"{row['samples_per_second']:,.0f}",
            "-" if row["bytes_per_step"] is None else size(row["bytes_per_step"]),
            duration(row["communication_seconds"]),
            percent(row["communication_share"]),
        )
        for row in result["results"]
    ]
    columns = ("hook", "step>", "samples/s>", "sent/step>", "communication>", "of the step>")
    title = f"{result['dataset']}, {result['workers']} workers over {result['backend']}, batch {result['batch_size']}"
    print_table(title, columns, rows)
    print(result["verdict"])


def _plot(result: Mapping[str, Any], path: Path) -> None:
    from fedring.ctl.local.charts import Bars, Series, plot_panels  # matplotlib takes a second to import

    rows = result["results"]
    names = [row["hook"].replace("_", "\n").replace("(", "\n(") for row in rows]
    steps = Series("step", [result["noop_step_seconds"], *(row["step_seconds"] for row in rows)])
    panels = [Bars("Time of a step", "seconds", [_NOOP, *names], [steps], duration)]
    if rows[0]["bytes_per_step"] is not None:
        sent = Series("bytes", [row["bytes_per_step"] for row in rows])
        panels.append(Bars("Sent by a worker in a step", "bytes", names, [sent], size, log=True))
    plot_panels(panels, path)
