"""Benchmarks beside torch's own parts, as rows of the last table of `make beside`."""

import subprocess
import sys
from typing import Any

import pytest
from tests.bench.beside import others
from tests.bench.beside.others import OTHERS, Row, run_other

PIPELINE = {"stages": 3, "micro_batches": 8, "samples": 16, "fedring_ms": 8.0, "torch_ms": 4.0, "better": 0.51}
HOOK = {"hook": "fp16", "ranks": 2, "fedring_ms": 30.04, "torch_ms": 33.0, "better": 1.1}
ALL_REDUCE = {"bytes": 4096, "ranks": 2, "fedring_ms": 0.5, "gloo_ms": 0.4, "ratio": 1.25, "outstanding": 1}


@pytest.mark.parametrize(
    ("cell", "line", "row"),
    [
        (
            "pipelining",
            PIPELINE,
            Row(
                "pipeline of 3 small stages, 8 micro-batches of 16",
                "torch.distributed.pipelining, Gloo",
                "8.00 ms",
                "4.00 ms",
                0.51,
            ),
        ),
        (
            "hooks",
            HOOK,
            Row("a step of DDP with the hook fp16, 2 ranks, one host", "torch's hook, Gloo", "30.0 ms", "33.0 ms", 1.1),
        ),
        ("ring-2", ALL_REDUCE, Row("all-reduce of 4,096 bytes, 2 ranks, one host", "Gloo", "0.50 ms", "0.40 ms", 0.8)),
        (
            "ring-outstanding",
            ALL_REDUCE | {"outstanding": 8},
            Row("8 all-reduces at once of 4,096 bytes, 2 ranks, one host", "Gloo", "0.50 ms", "0.40 ms", 0.8),
        ),
    ],
)
def test_a_line_of_a_benchmark_becomes_a_row(cell: str, line: dict[str, Any], row: Row) -> None:
    _, rows = OTHERS[cell]
    assert rows([line]) == [row]


@pytest.mark.parametrize(
    ("cell", "few"),
    [
        ("pipelining", ("small_stages", "--stages", "2", "--width", "8", "--turns", "1", "--steps", "1")),
        ("hooks", ("torch_hooks", "--hooks", "powersgd", "--turns", "1", "--steps", "1")),
        ("ring-outstanding", ("allreduce", "--outstanding", "3", "--sizes", "64", "--repeats", "5")),
    ],
)
def test_a_cell_beside_torch_runs_its_command(cell: str, few: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    (module, *_), rows = OTHERS[cell]
    assert module == few[0]  # the same benchmark, with less to do
    monkeypatch.setattr(others, "OTHERS", {cell: (few, rows)})
    (row,) = run_other(cell)
    assert row.better > 0
    assert row.ours.endswith(" ms")


def test_the_cell_behind_lines_gives_words_that_its_command_knows() -> None:
    (module, *words), _ = OTHERS["hooks-100mbit"]  # it needs root
    command = [sys.executable, "-m", f"tests.bench.{module}", *words, "--help"]
    assert "--rate" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
