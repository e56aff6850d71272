"""Savings on a slow line against accuracy."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any

import typer

from fedring.control.failure import Failure
from fedring.ctl.local.charts import Bars, Series, plot_panels
from fedring.ctl.local.presets import DataRootOption, Dataset, DatasetOption, check_data_root, preset_job
from fedring.ctl.local.ranks import Advance, Host, run_ranks
from fedring.ctl.local.runner import present, unique_names
from fedring.ctl.options import OutputOption, make_out_folder
from fedring.ctl.output import Output, duration, percent, print_table, size
from fedring.daemon.exits import Exit
from fedring.daemon.wording import counted
from fedring.train.names.hooks import choose_hook, split_hooks
from tests.bench.lab.command import Command
from tests.bench.lab.networks import UNSHAPED, check_rate, network
from tests.bench.lab.parts import Part, QuickOption, describe_run, run_parts

NOOP = "noop"
_RANKS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class HookScale:
    """How much is measured."""

    turns: int = 5  # of the steps whose time is measured
    steps: int = 5  # of each turn
    training: int = 120  # steps of each training whose accuracy is measured
    seeds: int = 3
    workers: int = 2
    batch_size: int = 64  # of a worker
    lr: float = 0.02

    @property
    def starts(self) -> tuple[int, ...]:
        """The steps at which PowerSGD of rank 1 starts, besides 2.

        They come after 10 % and 30 % of the training.
        """
        return max(5, self.training // 10), max(10, 3 * self.training // 10)


QUICK = HookScale(turns=3, steps=3, training=20, seeds=1)


def hooks(
    data_root: DataRootOption = None,
    dataset: DatasetOption = Dataset.MNIST,
    hooks: Annotated[
        str,
        typer.Option(
            help="Hooks to compare, separated by commas, with parameters as in 'topk(ratio=0.05)'.",
            show_default="none, fp16, dgc, PowerSGD and its batched form of ranks 1, 2, 4, 8, and later starts",
        ),
    ] = "",
    rate: Annotated[
        str, typer.Option(help="Rate of each worker's line. It needs root; without root, lines are not limited.")
    ] = "100mbit",
    steps: Annotated[
        int | None,
        typer.Option(
            min=5,
            help="Steps of each training whose accuracy is measured.",
            show_default=f"{HookScale().training}, with --quick {QUICK.training}",
        ),
    ] = None,
    quick: QuickOption = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for hooks.json and hooks.png.")] = Path("bench-out"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Compare hooks on a slow line, by step time, bytes and accuracy.

    The accuracy is that after the same number of steps. The time of a step is also given as a ratio to a step without
    communication, measured by turns in the same run.
    """
    scale = QUICK if quick else HookScale()
    scale = replace(scale, training=steps or scale.training)
    names = unique_names("--hooks", split_hooks(hooks)) if hooks else default_hooks(scale)
    for name in names:
        try:
            choose_hook(name)
        except ValueError as error:
            raise Failure(str(error), Exit.USAGE) from None
    check_rate("--rate", rate)
    check_data_root(dataset, data_root)
    make_out_folder(out)
    described = describe_run("hooks", quick=quick)
    results = {**described, **measure(names, dataset, data_root, scale=scale, rate=rate)}
    present(results, out / "hooks.json", output, plot=plot, print_results=print_tables)


def default_hooks(scale: HookScale) -> list[str]:
    """Return the hooks of the table.

    They are dense, half precision, DGC, and PowerSGD with its parameters.
    """
    powersgd = [f"powersgd(matrix_approximation_rank={rank})" for rank in _RANKS]
    batched = [f"batched_powersgd(matrix_approximation_rank={rank})" for rank in _RANKS]
    later = [f"powersgd(matrix_approximation_rank=1,start_powerSGD_iter={start})" for start in scale.starts]
    return ["none", "fp16", "dgc(warmup_epochs=1)", *powersgd, *later, *batched]


def measure(
    names: Sequence[str], dataset: Dataset, data_root: Path | None, *, scale: HookScale, rate: str
) -> dict[str, Any]:
    """Measure all hooks, and return the results.

    These are the settings, `network`, and a row for each hook.
    """
    preset = preset_job(dataset)
    samples = {
        "model": preset["model"],
        "data": preset["data"],
        "data_root": str(data_root.absolute()) if data_root else None,
        "batch_size": scale.batch_size,
    }
    timed = list(dict.fromkeys([NOOP, *map(steady, names)]))
    times = {**samples, "hooks": timed, "turns": scale.turns, "steps": scale.steps, "backend": "fedring", "threads": 1}
    trainings = {**samples, "hooks": list(names), "steps": scale.training, "seeds": scale.seeds, "lr": scale.lr}
    # Only the times need the slow line. The accuracies are the same on a fast one, and come sooner.
    with network(scale.workers, rate) as shaped, network(scale.workers, shared_memory=True) as fast:
        parts = {
            "steps": Part(
                "time of a step",
                10 + 0.2 * len(timed) * (5 + scale.turns * scale.steps),
                partial(_run, "fedring.ctl.local.hook_steps:measure", times, shaped.hosts),
            ),
            "trainings": Part(
                "accuracy",
                10 + (2 + 0.13 * scale.training) * len(names) * scale.seeds,
                partial(_run, "tests.bench.hook_trainings:measure", trainings, fast.hosts),
            ),
        }
        measured = run_parts("hooks", parts)
    steps = {row["hook"]: row for row in measured["steps"]}
    rows = [summary(row, steps[steady(row["hook"])], steps[NOOP]) for row in measured["trainings"]]
    return {
        "dataset": str(dataset),
        **asdict(scale),
        "network": shaped.facts(),
        "noop_step_seconds": fmean(steps[NOOP]["step_seconds"]),
        "hooks": rows,
    }


def steady(hook: str) -> str:
    """Return the hook without the parameter that delays its start."""
    return re.sub(r",?start_powerSGD_iter=\d+", "", hook).replace("(,", "(").replace("()", "")


def summary(training: Mapping[str, Any], steps: Mapping[str, Any], noop: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of one hook.

    Args:
        training: Its accuracies, and what it sent.
        steps: The seconds of its steps in each turn, once it compresses, and its bytes.
        noop: The same without communication.

    Returns:
        Times are means over the turns. Each turn's ratio divides by the time without communication in the same turn.
        `bytes_per_step` is what a worker sends once the hook compresses, and `training_bytes_per_step` the mean over
        the training, with the steps before. Accuracies are from 0 to 1.
    """
    ratios = [one / other for one, other in zip(steps["step_seconds"], noop["step_seconds"], strict=True)]
    return {
        "hook": training["hook"],
        "step_seconds": fmean(steps["step_seconds"]),
        "ratio": fmean(ratios),
        "ratio_deviation": pstdev(ratios),
        "bytes_per_step": steps["bytes_per_step"],
        "training_bytes_per_step": training["bytes_per_step"],
        "accuracy": fmean(training["accuracies"]),
        "accuracy_deviation": pstdev(training["accuracies"]),
        "accuracies": training["accuracies"],
    }


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw each hook's step time, bytes and accuracy into `path`.

    The file is a PNG.
    """
    rows = results["hooks"]
    names = [short_name(row["hook"]) for row in rows]
    ratios = Series("ratio", [row["ratio"] for row in rows], [row["ratio_deviation"] for row in rows])
    sent = [Series("once it compresses", [row["bytes_per_step"] for row in rows]),
            Series("mean of the training", [row["training_bytes_per_step"] for row in rows])]  # fmt: skip
    deviations = [100 * row["accuracy_deviation"] for row in rows]
    accuracy = Series("accuracy", [100 * row["accuracy"] for row in rows], deviations)
    low = max(0.0, min(100 * row["accuracy"] - 100 * row["accuracy_deviation"] for row in rows) - 1.0)
    line = results["network"]["rate"] if results["network"]["limit"] != UNSHAPED else "a line without a limit"
    trained = f"Accuracy after {results['training']} steps, mean and deviation of {counted(results['seeds'], 'seed')}"
    panels = [
        Bars(
            f"Time of a step at {line}",
            "times a step without communication",
            names,
            [ratios],
            "{:.2f}".format,
            reference=(1.0, "no communication"),
        ),
        Bars("Sent by a worker in a step", "bytes", names, sent, size, log=True),
        Bars(trained, "% of the test samples", names, [accuracy], "{:.1f}".format, low=low),
    ]
    plot_panels(panels, path, columns=1, width=13)


def short_name(hook: str) -> str:
    """Return a hook's name in two lines.

    PowerSGD's parameters have short names.
    """
    text = hook.replace("matrix_approximation_rank=", "rank ").replace("start_powerSGD_iter=", "from step ")
    text = text.replace("warmup_epochs=", "warm-up ")
    name, _, parameters = text.rstrip(")").partition("(")
    return f"{name.replace('batched_', 'batched' + chr(10))}\n{parameters.replace(',', chr(10))}".strip()


def print_tables(results: Mapping[str, Any]) -> None:
    """Print the results as tables."""
    rows = [
        (
            short_name(row["hook"]).replace("\n", " "),
            duration(row["step_seconds"]),
            f"{row['ratio']:.2f} ± {row['ratio_deviation']:.2f}",
            size(row["bytes_per_step"]),
            size(row["training_bytes_per_step"]),
            f"{percent(row['accuracy'])} ± {100 * row['accuracy_deviation']:.2f}",
        )
        for row in results["hooks"]
    ]
    columns = ("hook", "step>", "of no communication>", "sent/step>", "in training>", "accuracy>")
    seeds = f"{results['training']} steps from {counted(results['seeds'], 'seed')}"
    net = results["network"]
    title = f"{results['dataset']}, {results['workers']} workers, {net['rate']} ({net['limit']}); {seeds}"
    print_table(title, columns, rows)


def _run(task: str, settings: Mapping[str, Any], hosts: Sequence[Host], advance: Advance) -> Any:
    return run_ranks(task, settings, hosts, advance=advance)


main = Command(
    hooks,
    "--data-root data",
    "--dataset digits --quick",
    "--data-root data --rate 1gbit --hooks 'none,int8,topk(ratio=0.01)' --out hooks-1gbit",
)

if __name__ == "__main__":
    sys.exit(main())
