"""flctl profile: how much of a data-parallel step is communication, and how much of it each hook would save."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from fedring.control.failure import Failure
from fedring.ctl.bench.presets import Dataset, check_data_root, preset_job
from fedring.ctl.bench.runner import unique_names
from fedring.ctl.options import OutputOption, make_out_folder
from fedring.ctl.output import Output, duration, percent, print_json, print_table, size, stderr_console
from fedring.daemon.exits import Exit
from fedring.train.data_parallel_table import HOOKS
from fedring.train.hooks import choose_hook, split_hooks

_ENOUGH = 0.10  # the share of a step below which communication is not the bottleneck
_TURNS = 5
_TAIL_LINES = 12  # of a worker that failed
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
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where profile.json and the plots go.")] = Path("bench-out"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Train with each hook and without any communication, and say what communication costs.

    Workers run on this machine. If a step without communication is less than 10 % faster, it is not the bottleneck.
    """
    names = _names(hooks, backend)
    check_data_root(dataset, data_root)
    make_out_folder(out)
    preset = preset_job(dataset)
    settings = {
        "backend": backend,
        "workers": workers,
        "threads": max(1, (os.cpu_count() or 1) // workers),
        "hooks": names,
        "turns": min(_TURNS, steps),
        "steps": max(1, steps // _TURNS),
        "batch_size": batch_size,
        "model": model or preset["model"],
        "data": preset["data"],
        "data_root": str(data_root.absolute()) if data_root else None,
    }
    result = {"dataset": str(dataset), **settings, **judge(_measure(settings, launch), workers * batch_size)}
    (out / "profile.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    _plot(result, out)
    if output is Output.JSON:
        return print_json(result)
    _print(result)
    stderr_console().print(f"profile.json and the plots are in {out}")


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


def _measure(settings: Mapping[str, Any], launch: str) -> list[dict[str, Any]]:
    """Run the workers, and return what they measured; Failure with the last lines of one that failed."""
    with tempfile.TemporaryDirectory(prefix="fedring-profile-") as name:
        folder = Path(name)
        text = json.dumps({**settings, "store": str(folder / "store")})
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(settings["workers"]):
                prefix = shlex.split(launch.replace("{rank}", str(rank)))
                command = [*prefix, sys.executable, "-m", "fedring.ctl.profile_worker", text, str(rank)]
                with (folder / f"{rank}.out").open("wb") as data, (folder / f"{rank}.err").open("wb") as errors:
                    workers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=data, stderr=errors))
            _wait(workers, folder)
        except OSError as error:
            raise Failure(f"--launch {launch!r} cannot be run: {error}", Exit.CONFIG) from error
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        measured: list[dict[str, Any]] = json.loads((folder / "0.out").read_text(encoding="utf-8").splitlines()[-1])
        return measured


def _wait(workers: Sequence["subprocess.Popen[bytes]"], folder: Path) -> None:
    """Wait until all workers have ended well; Failure as soon as one has not."""
    while any(worker.poll() is None for worker in workers) or any(worker.returncode for worker in workers):
        for rank, worker in enumerate(workers):
            if worker.poll():
                lines = (folder / f"{rank}.err").read_text(encoding="utf-8", errors="replace").splitlines()
                raise Failure(f"worker {rank} failed:\n" + "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]))
        time.sleep(0.1)


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


def _plot(result: Mapping[str, Any], directory: Path) -> None:
    from fedring.ctl.bench.plots import Bars, plot_bars  # matplotlib takes a second to import

    rows = result["results"]
    names = [row["hook"].replace("_", "\n") for row in rows]
    seconds = [result["noop_step_seconds"], *(row["step_seconds"] for row in rows)]
    labels = [duration(value) for value in seconds]
    charts = [Bars("A step", "profile-step.png", [_NOOP, *names], seconds, labels)]
    if rows[0]["bytes_per_step"] is not None:
        sent = [row["bytes_per_step"] for row in rows]
        charts.append(Bars("Sent by a worker, a step", "profile-bytes.png", names, sent, [size(n) for n in sent]))
    plot_bars(charts, directory, "profile.png")
