"""Run the same federated work on fedring, Flower and NVFlare by turns, and show what each needs beyond the training.

    python -m tests.bench.beside --data-root DIR [--cells NAMES] [--turns 3] [--out DIR]

Each peer has an environment of its own in a cache folder, made when first asked for, with the torch of this one;
nothing of theirs is changed. All train the same CNN on the same samples of MNIST, one thread each ("mnist", 2 clients),
or change one value of a model of 100 MB with 2 or 8 clients ("echo-2", "echo-8"), or of 10,000 parameters with 8
clients ("small"). As root, each client has a network of its own without a limit, whose counters have its bytes.

How each runs: Flower's SuperLink with its state in a file and no TLS, SuperNodes that start the client's app in a
process for each message, as they do by default; NVFlare as it provisions itself, with mutual TLS, and the client's
script in the process of its job, which stays for all rounds; fedring without TLS, everything that it accepts synced to
the disk first. fedring runs twice: as it comes (updates as `uniform`), and with whole float32 values, as the others.

Columns: seconds from the start of the first process to the first model without its training; seconds of each later
round beyond its longest training; bytes to and from a client in a round, with everything that came before; the most
memory of the server's processes and of one client's.

In the cells "client-killed" and "server-killed", a process is killed (SIGKILL) one second after the third of four
rounds has begun: a client, which stays away, or the server, which starts again at once with the state that it had.
Shown are the seconds until the next round ended, and how many updates it has; a run without one after 600 s did not go
on.

The cells "simulation-...", "one-process-..." and "ring-..." are the benches tests.bench.simulation and
tests.bench.allreduce, beside Flower, pfl-research and Gloo. "pipelining" is tests.bench.small_stages, beside
torch.distributed.pipelining over Gloo, and "hooks..." is tests.bench.torch_hooks, beside torch's hooks over Gloo.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from fedring.ctl.local.charts import Bars, Series, plot_panels
from fedring.ctl.output import print_table
from tests.bench.beside.fleets import Harm, Outcome, System, Task, harm, measure
from tests.bench.beside.others import OTHERS, Row, run_other
from tests.bench.beside.ours import fedring
from tests.bench.beside.peers import flower, nvflare
from tests.bench.lab.environments import FLOWER, NVFLARE, environment
from tests.bench.lab.lines import lines
from tests.bench.lab.turns import alternate

CELLS: Mapping[str, tuple[str, int, int]] = {
    "mnist": ("mnist", 2, 10),
    "echo-2": ("echo", 2, 5),
    "echo-8": ("echo", 8, 4),
    "small": ("small", 8, 10),
}
"""By name, the work of a client, the clients, and the rounds."""

SYSTEMS: Mapping[str, System] = {
    "fedring": fedring,
    "fedring, fp32": partial(fedring, encoding="fp32"),
    "Flower": flower,
    "NVFlare": nvflare,
}
NEEDS = {"Flower": FLOWER, "NVFlare": NVFLARE}
KILLS: Mapping[str, str] = {"client-killed": "client", "server-killed": "server"}
"""The cells in which somebody is killed in the third of four rounds of MNIST with two clients."""

_FAR = 20  # times, from which on values would not be seen beside each other

_KILLED = ("mnist", 2, 4)
_T = TypeVar("_T")


def main(words: Sequence[str] | None = None) -> None:
    """Print a table, and write beside.json after each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="the folder of MNIST")
    everything = [*CELLS, *KILLS, *OTHERS]
    parser.add_argument("--cells", type=lambda text: text.split(","), default=everything, help=",".join(everything))
    parser.add_argument("--systems", type=lambda text: text.split("/"), default=list(SYSTEMS), help="/".join(SYSTEMS))
    parser.add_argument("--turns", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--rounds", type=int, help="of each run, instead of the cells' own")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for beside.json and beside.png")
    args = parser.parse_args(words)
    for name in args.systems:
        if name in NEEDS:
            environment(NEEDS[name])  # a network of its own could not reach a registry
    found: dict[str, dict[str, list[Any]]] = {}
    rows: list[Row] = []
    for cell in args.cells:
        if cell in OTHERS:
            rows += run_other(cell)
        else:
            call = partial(harm, whom=KILLS[cell]) if cell in KILLS else measure
            ways = {
                name: partial(_run, partial(call, SYSTEMS[name]), cell, args.data_root, args.rounds)
                for name in args.systems
            }
            found[cell] = alternate(ways, args.turns)
            (_show_harms if cell in KILLS else _show)(cell, found[cell])
        _write(args.out / "beside.json", found, rows)
    measured = {cell: ways for cell, ways in found.items() if cell in CELLS}
    if measured:
        plot_panels(_panels(measured), args.out / "beside.png", columns=3)
    if rows:
        cells = [(row.what, row.ours, row.peer, row.theirs, f"{row.better:.2f}") for row in rows]
        print_table("beside others", ("what", "fedring>", "peer", "theirs>", "times as good>"), cells)


def _write(path: Path, found: Mapping[str, Mapping[str, Sequence[Any]]], rows: Sequence[Row]) -> None:
    """Write what the cells until now found, since all take hours and somebody may end them before."""
    results = {
        "fleets": {
            cell: {name: list(map(asdict, runs)) for name, runs in ways.items()} for cell, ways in found.items()
        },
        "others": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _panels(found: Mapping[str, Mapping[str, Sequence[Outcome]]]) -> list[Bars]:
    """Return the charts of all cells: seconds beyond training, bytes and memory."""
    figures: Mapping[str, tuple[str, Callable[[Sequence[Outcome]], float]]] = {
        "a round beyond its training": ("seconds", lambda runs: median(_beyond(runs))),
        "bytes to and from a client in a round": ("MB", lambda runs: median(each.wire or 0.0 for each in runs) / 1e6),
        "memory of the server": ("MB", lambda runs: median(each.server for each in runs) / 1e6),
    }
    return [_bars(found, title, unit, of) for title, (unit, of) in figures.items()]


def _bars(
    found: Mapping[str, Mapping[str, Sequence[Outcome]]],
    title: str,
    unit: str,
    of: Callable[[Sequence[Outcome]], float],
) -> Bars:
    """Return a chart of one figure, by powers of ten if its values lie far apart."""
    rows = {name: [of(ways[name]) for ways in found.values()] for name in next(iter(found.values()))}
    values = [value for row in rows.values() for value in row]
    series = [Series(name, row) for name, row in rows.items()]
    far = max(values) > _FAR * min(values) > 0
    return Bars(title, unit, list(found), series, lambda value: f"{value:.3g}", log=far)


def _run(call: Callable[[Task], _T], cell: str, root: Path, rounds: int | None) -> _T:
    work, clients, usual = CELLS.get(cell, _KILLED)
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder,
        lines(clients, "10gbit", limited=False) as there,
    ):
        return call(Task(work, clients, rounds or usual, str(root.absolute()), Path(folder), there))


def _show(cell: str, found: Mapping[str, Sequence[Outcome]]) -> None:
    base = median(_beyond(found[next(iter(found))]))
    rows = []
    for name, runs in found.items():
        wire = [each.wire for each in runs if each.wire is not None]
        right = [each.accuracy for each in runs if each.accuracy is not None]
        beyond = median(_beyond(runs))
        rows.append(
            (
                name,
                f"{median(each.first for each in runs):.1f} s",
                f"{beyond:.3f} s",
                f"{beyond / base:.1f}",
                f"{median(wire) / 1e6:.2f} MB" if wire else "-",
                f"{median(each.server for each in runs) / 1e6:.0f} MB",
                f"{median(each.client for each in runs) / 1e6:.0f} MB",
                f"{100 * median(right):.2f} %" if right else "-",
            )
        )
    columns = ("system", "first model>", "beyond training>", "ratio>", "a client's bytes>", "server>", "client>")
    print_table(f"{cell}: {CELLS[cell][1]} clients", (*columns, "accuracy>"), rows)


def _show_harms(cell: str, found: Mapping[str, Sequence[Harm]]) -> None:
    rows = []
    for name, runs in found.items():
        went_on = [each for each in runs if each.seconds is not None and each.updates is not None]
        seconds = [each.seconds for each in went_on if each.seconds is not None]
        updates = [each.updates for each in went_on if each.updates is not None]
        shown = (f"{median(seconds):.1f} s", f"{median(updates):.0f} of 2") if seconds else ("-", "-")
        rows.append((name, f"{len(went_on)} of {len(runs)}", *shown))
    print_table(cell, ("system", "runs that went on>", "the next round ended after>", "its updates>"), rows)


def _beyond(runs: Sequence[Outcome]) -> list[float]:
    return [seconds for each in runs for seconds in each.beyond]


if __name__ == "__main__":
    main()
