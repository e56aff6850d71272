"""Benchmarks that are commands of their own and already run a peer by turns, as rows of the last table."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside a peer's."""

    what: str
    peer: str
    ours: str
    theirs: str
    better: float  # how many times as good as the peer: as fast, as small


def _simulation(lines: Sequence[Facts], size: str) -> list[Row]:
    (line,) = lines
    ours, theirs = line["fedring"], line["flower"]
    text = f"simulation, {size}, all workers"
    return [Row(text, "Flower", f"{ours:.0f} clients/s", f"{theirs:.0f} clients/s", ours / theirs)]


def _one_process(lines: Sequence[Facts], size: str) -> list[Row]:
    (line,) = lines
    rows = []
    for engine in ("exact", "batched"):
        ours, theirs = (line["rates"][name]["by_processor"] for name in (engine, "pfl"))
        text = f"simulation, {size}, {engine}, one process"
        better = line[f"{engine}/pfl by_processor"]
        rows.append(Row(text, "pfl-research", f"{ours:.0f} clients/s", f"{theirs:.0f} clients/s", better))
    return rows


def _ring(lines: Sequence[Facts], place: str) -> list[Row]:
    def what(line: Facts) -> str:
        return f"{_all_reduces(line)} of {line['bytes']:,} bytes, {line['ranks']} ranks, {place}"

    return [_timed(what(line), "Gloo", line, "gloo_ms", 1 / line["ratio"]) for line in lines]


def _timed(what: str, peer: str, line: Facts, theirs: str, better: float, digits: int = 2) -> Row:
    """Return the row of a line that has milliseconds of both."""
    return Row(what, peer, f"{line['fedring_ms']:.{digits}f} ms", f"{line[theirs]:.{digits}f} ms", better)


def _all_reduces(line: Facts) -> str:
    return "all-reduce" if line["outstanding"] == 1 else f"{line['outstanding']} all-reduces at once"


def _pipelines(lines: Sequence[Facts]) -> list[Row]:
    def what(line: Facts) -> str:
        return f"pipeline of {line['stages']} small stages, {line['micro_batches']} micro-batches of {line['samples']}"

    peer = "torch.distributed.pipelining, Gloo"
    return [_timed(what(line), peer, line, "torch_ms", line["better"]) for line in lines]


def _hooks(lines: Sequence[Facts], place: str) -> list[Row]:
    def what(line: Facts) -> str:
        return f"a step of DDP with the hook {line['hook']}, {line['ranks']} ranks, {place}"

    return [_timed(what(line), "torch's hook, Gloo", line, "torch_ms", line["better"], digits=1) for line in lines]


OTHERS: Mapping[str, tuple[Sequence[str], Callable[[Sequence[Facts]], list[Row]]]] = {
    "simulation-tiny": (("simulation", "--flower"), partial(_simulation, size="9,910 parameters")),
    "simulation-cnn": (
        ("simulation", "--flower", "--size", "cnn", "--rounds", "5"),
        partial(_simulation, size="1.2 M parameters"),
    ),
    "one-process-tiny": (("simulation", "--pfl"), partial(_one_process, size="9,910 parameters")),
    "one-process-cnn": (
        ("simulation", "--pfl", "--size", "cnn", "--rounds", "5"),
        partial(_one_process, size="1.2 M parameters"),
    ),
    "ring-2": (("allreduce", "--ranks", "2"), partial(_ring, place="one host")),
    "ring-4": (("allreduce", "--ranks", "4"), partial(_ring, place="one host")),
    "ring-outstanding": (
        ("allreduce", "--outstanding", "8", "--sizes", "4096,65536"),
        partial(_ring, place="one host"),
    ),
    "ring-streams": (("allreduce", "--streams-only"), partial(_ring, place="loopback")),
    "ring-1gbit": (("allreduce", "--rate", "1gbit", "--repeats", "20"), partial(_ring, place="lines of 1 Gbit/s")),
    "pipelining": (("small_stages",), _pipelines),
    "hooks": (("torch_hooks",), partial(_hooks, place="one host")),
    "hooks-100mbit": (("torch_hooks", "--rate", "100mbit"), partial(_hooks, place="lines of 100 Mbit/s")),
}
"""By the cell's name, the words of a command of tests.bench, and its rows. Gloo has no TLS, so no cell has it."""


def run_other(cell: str) -> list[Row]:
    """Run a command that compares by turns itself, and return its rows."""
    (module, *words), rows = OTHERS[cell]
    command = [sys.executable, "-m", f"tests.bench.{module}", *words]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return rows([json.loads(line) for line in told.splitlines() if line.startswith("{")])
