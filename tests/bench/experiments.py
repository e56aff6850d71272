"""Write the tables of docs/experiments.md from results of benchmarks: python -m tests.bench.experiments FILE.json ...

Each file replaces the tables of its bench; other tables stay as they are. The PNG beside a file, if there is one, goes
to docs/figures.
With --without-times, times are dashes, and no PNG is copied: use it for results of a machine that had other work to do.
"""

import argparse
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedring.ctl.output import duration, percent, size
from fedring.daemon.wording import counted
from tests.bench import agreement, heart, niid
from tests.bench.hooks import short_name
from tests.bench.lab.parts import with_deviation

PAGE = Path(__file__).parents[2] / "docs" / "experiments.md"
FIGURES = PAGE.parent / "figures"
PICTURES = {"federated": "federated.png", "data-parallel": "data-parallel.png"}
"""Pictures that other pages show, too."""

Time = Callable[[str], str]  # returns the text of a time, or a dash
Lines = list[str]


def main() -> None:
    """Replace the tables of each file's bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", type=Path, nargs="+", help="federated.json, hooks.json, ... as the benchmarks wrote them"
    )
    parser.add_argument("--without-times", action="store_true", help="write a dash for each time")
    parser.add_argument("--place", metavar="NAME", help="the tables to replace, if not those named as the bench")
    arguments = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    for path in arguments.files:
        results = json.loads(path.read_text(encoding="utf-8"))
        name = arguments.place or results["bench"]
        tables = TABLES[results["bench"]](results, _dash if arguments.without_times else _same)
        lines = [describe(results, times=not arguments.without_times), "", *tables]
        if not arguments.without_times and path.with_suffix(".png").exists():
            picture = PICTURES.get(name, f"experiment-{name}.png")
            shutil.copyfile(path.with_suffix(".png"), FIGURES / picture)
            lines += ["", f"![the figures of tests.bench.{name}](figures/{picture})"]
        page = replace(page, name, lines)
    PAGE.write_text(page, encoding="utf-8")


def replace(page: str, bench: str, lines: Iterable[str]) -> str:
    """Return the page with other lines between the comments that begin and end the tables of a bench."""
    begin, end = f"<!-- {bench}: python -m tests.bench.experiments -->\n", f"<!-- end of {bench} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{PAGE.name} has no place for {bench}: it lacks {begin.strip()} or {end}")
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after


def describe(results: Mapping[str, Any], *, times: bool) -> str:
    """Return the sentences that say how the results were measured."""
    machine, net = results["machine"], results.get("network") or {}
    samples = f" on {results['dataset']}" if "dataset" in results else ""
    sentence = f"Measured{samples} at {results['scale']} scale with torch {machine['torch']}"
    if "rounds" in results:
        sentence += f", {counted(results['rounds'], 'round')} of {results['subset_size']:,} samples of each client"
    if "epochs" in results and "workers" in results:
        sentence += f", {counted(results['epochs'], 'epoch')}"
        sentence += f" of {results['subset_size']:,} samples" if results.get("subset_size") else ""
    if times:
        sentence += (
            f" and {counted(machine['processors'], 'processor')}, at a load average of {machine['load_average']:g}"
        )
    if net.get("rate"):
        sentence += f", with lines of {net['rate']} ({net['limit']})"
    return sentence + "."


def federated(results: Mapping[str, Any], time: Time) -> Lines:
    """Return the table of encodings."""
    dense = results["encodings"][0]["upload_bytes"]
    rows = [
        (
            f"`{row['encoding']}`",
            size(row["upload_bytes"]),
            f"{row['upload_bytes'] / dense:.4f}",
            time(" / ".join(duration(client["communication_seconds"]) for client in row["by_client"].values())),
            time(spread(row["round_seconds"], row["round_seconds_deviation"])),
            with_deviation(row),
        )
        for row in results["encodings"]
    ]
    if results["central"]:
        rows.append(("all data in one place", "-", "-", "-", "-", with_deviation(results["central"])))
    first, accuracy = results["encodings"][0]["encoding"], f"accuracy, {counted(results['seeds'], 'seed')}"
    columns = ("encoding", "bytes up", f"of {first}", "communication of each client", "round", accuracy)
    return table(columns, rows)


def data_parallel(results: Mapping[str, Any], time: Time) -> Lines:
    """Return the table of hooks and workers."""
    rows = [
        (
            f"`{row['hook']}`",
            worker,
            size(figures["bytes_sent"]),
            time(duration(figures["wait_seconds_max"])),
            time(duration(figures["wait_seconds_mean"])),
            time(f"{figures['wait_seconds_max'] / max(1e-9, figures['wait_seconds_mean']):.1f}"),
            with_deviation(row),
        )
        for row in results["hooks"]
        for worker, figures in row["by_worker"].items()
    ]
    accuracy = f"accuracy, {counted(results['seeds'], 'seed')}"
    return table(("hook", "worker", "sent", "longest wait", "mean wait", "longest / mean", accuracy), rows)


def hooks(results: Mapping[str, Any], time: Time) -> Lines:
    """Return the table of hooks."""
    rows = [
        (
            short_name(row["hook"]).replace("\n", " "),
            time(spread(row["ratio"], row["ratio_deviation"], "{:.2f}".format)),
            size(row["bytes_per_step"]),
            size(row["training_bytes_per_step"]),
            f"{percent(row['accuracy'])} ± {100 * row['accuracy_deviation']:.2f}",
        )
        for row in results["hooks"]
    ]
    accuracy = f"accuracy after {results['training']} steps, {counted(results['seeds'], 'seed')}"
    columns = ("hook", "time of a step, no communication = 1", "sent per step", "mean of the training", accuracy)
    return table(columns, rows)


def ddp(results: Mapping[str, Any], time: Time) -> Lines:
    """Return one table for each of the paper's figures."""
    settings, ready = results["settings"], results["ready"]
    model = settings["model"].rpartition(":")[2]
    lines = [f"All-reduce of {settings['total']:,} float32 values in pieces, two ranks on one host:", ""]
    lines += side_by_side(results["pieces"]["rows"], "piece", "values in a piece", time)
    lines += ["", f"The moments at which gradients of {model} are ready:", ""]
    wanted = [(share, share * ready["parameters"][-1]) for share in (0.25, 0.5, 0.75, 1.0)]
    moments = list(zip(ready["parameters"], ready["seconds"], strict=True))
    rows: list[tuple[str, ...]] = [
        (f"{share:.0%}", time(duration(next(t for n, t in moments if n >= least)))) for share, least in wanted
    ]
    lines += table(("of the parameters have a gradient", "after"), rows)
    parts = [("buckets", "bucket_mib", "bucket, MiB"), ("no_sync", "every", "all-reduce every n steps")]
    for key, name, label in parts:
        lines += ["", f"A step of {model}, two ranks, {line(results[key]['network'])}:", ""]
        lines += side_by_side(results[key]["rows"], name, label, time)
    trained, seeds = settings["trained"].rpartition(":")[2], counted(settings["seeds"], "seed")
    lines += ["", f"Accuracy of {trained} after {settings['steps']} batches of each rank, {seeds}:", ""]
    lines += table(
        ("all-reduce every n steps", "accuracy"),
        [(str(row["every"]), with_deviation(row)) for row in results["accuracy"]],
    )
    lines += ["", f"A step of perceptrons of many sizes, two ranks, {line(results['sizes']['network'])}:", ""]
    lines += side_by_side(results["sizes"]["rows"], "parameters", "parameters", time)
    lines += ["", f"A step of {settings['small_model'].rpartition(':')[2]}:", ""]
    found: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for row in results["scaling"]:
        found.setdefault((line(row["network"]), row["ranks"]), {})[row["backend"]] = row
    ways = ("noop", "gloo", "fedring", "dgc")
    rows = [
        (where, str(ranks), *(time(spread(by[way]["mean"], by[way]["deviation"])) for way in ways))
        for (where, ranks), by in found.items()
    ]
    return lines + table(("line", "ranks", "no communication", "Gloo", "`fedring`", "`fedring`, DGC"), rows)


def pipeline(results: Mapping[str, Any], time: Time) -> Lines:
    """Return the tables of times, accuracies and memory; a part that was not measured has none."""
    settings, lines = results["settings"], Lines()
    model = settings["model"].rpartition(":")[2]
    if summary := results.get("summary"):
        rows: list[tuple[str, ...]] = [
            ("one device", time(duration(summary["one_device_seconds"])), "-"),
            (
                "two devices, one micro-batch",
                time(duration(summary["model_parallel_seconds"])),
                time(f"{summary['overhead']:+.0%} time"),
            ),
            (
                f"two devices, pipelined, split size {time(str(summary['best_split']))}",
                time(duration(summary["pipelined_seconds"])),
                time(f"{summary['gain']:+.0%} speed"),
            ),
        ]
        step = f"a step of {model}, batch {settings['shape'][0]}"
        lines += [*table((step, "time", "against one device"), rows), ""]
        times = {(row["way"], row["split"]): row for row in results["split_sizes"]["rows"]}
        rows = [
            (str(split), *(time(spread(row["mean"], row["deviation"])) if (row := times.get((way, split))) else "-"
                           for way in ("fedring", "torch")))
            for split in settings["splits"]
        ]  # fmt: skip
        lines += [*table(("split size", "`fedring`", "`torch.distributed.pipelining`"), rows), ""]
    if weights := results.get("weights"):
        rows = [
            (row["weights"], str(row["stages"]), f"{percent(row['accuracy'])} ± {100 * row['accuracy_deviation']:.2f}")
            for row in weights
        ]
        samples = f"{settings['samples']:,} samples of {results['dataset']}, {counted(settings['seeds'], 'seed')}"
        lines += [*table(("weights", "stages", f"accuracy after {samples}"), rows), ""]
    if memory := results.get("memory"):
        stages = sorted({row["stage"] for row in memory})
        names = dict.fromkeys(row["schedule"] for row in memory)
        kept = {(row["schedule"], row["stage"]): row for row in memory}
        rows = [
            (name, *(f"{size(kept[name, s]['activations'])} + {size(kept[name, s]['stashed'])}" for s in stages))
            for name in names
        ]
        lines += table((f"activations + older weights, {model}", *(f"stage {stage}" for stage in stages)), rows)
    return lines


def outsiders(bench: Any) -> Callable[[Mapping[str, Any], Time], Lines]:
    """Return the function that writes the table of a bench whose module has `columns` and `table_rows`."""

    def written(results: Mapping[str, Any], time: Time) -> Lines:
        return table([head.rstrip(">") for head in bench.columns(results)], bench.table_rows(results))

    return written


def side_by_side(rows: Sequence[Mapping[str, Any]], key: str, label: str, time: Time) -> Lines:
    """Return a table with a row for each value of the key: Gloo's time, the ring's, and their ratio."""
    found: dict[Any, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if key in row:
            found.setdefault(row[key], {})[row["backend"]] = row
    cells = [
        (
            f"{value:,}",
            *(time(spread(by[way]["mean"], by[way]["deviation"])) for way in ("gloo", "fedring")),
            time(f"{by['fedring']['mean'] / by['gloo']['mean']:.2f}"),
        )
        for value, by in found.items()
    ]
    return table((label, "Gloo", "`fedring`", "ratio"), cells)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    """Return the lines of a table."""
    return [_row(columns), "|" + "---|" * len(columns), *map(_row, rows)]


def spread(mean: float, deviation: float, label: Callable[[float], str] = duration) -> str:
    """Return a mean with its standard deviation."""
    return f"{label(mean)} ± {label(deviation)}"


def line(net: Mapping[str, Any]) -> str:
    """Return what connects the ranks."""
    return str(net["rate"] if net["limit"].startswith("network") else "loopback without a limit")


TABLES: dict[str, Callable[[Mapping[str, Any], Time], Lines]] = {
    "federated": federated,
    "data-parallel": data_parallel,
    "hooks": hooks,
    "ddp": ddp,
    "pipeline": pipeline,
    "heart": outsiders(heart),
    "niid": outsiders(niid),
    "agreement": outsiders(agreement),
}


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _same(text: str) -> str:
    return text


def _dash(text: str) -> str:
    return "-" if re.search(r"\d", text) else text


if __name__ == "__main__":
    main()
