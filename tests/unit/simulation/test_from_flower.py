"""The program of docs/from-flower.md runs, and the page counts the lines of both programs right."""

import ast
import importlib
from functools import partial

import pytest
from tests.conftest import ROOT

from fedring.simulation import simulate

EXAMPLES = ROOT / "docs" / "examples"


def lines_of_code(name: str) -> int:
    """Return the number of lines without blank ones, comments and docstrings."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    documented = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    return sum(1 for number, line in lines if line and not line.startswith("#") and number not in documented)


def test_the_page_counts_the_lines_of_both_programs() -> None:
    page = (ROOT / "docs" / "from-flower.md").read_text(encoding="utf-8")
    flower, ours = lines_of_code("with_flower.py"), lines_of_code("with_fedring.py")
    assert f"| lines of code, without blank lines, comments and docstrings | {flower} | {ours} |" in page


def test_both_programs_train_the_same_model_on_the_same_number_of_clients() -> None:
    trees = [ast.parse((EXAMPLES / name).read_text(encoding="utf-8")) for name in ("with_flower.py", "with_fedring.py")]
    nets = [ast.dump(node) for tree in trees for node in tree.body if getattr(node, "name", "") == "net"]
    sizes = [ast.dump(node) for tree in trees for node in tree.body[:12] if "CLIENTS, ROUNDS" in ast.unparse(node)]
    assert len(nets) == len(sizes) == 2
    assert nets[0] == nets[1]
    assert sizes[0] == sizes[1]


def test_our_program_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    program = importlib.import_module("with_fedring")
    monkeypatch.setattr(program, "simulate", partial(simulate, workers=1))  # so that no process must import torch
    program.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [number for number, _, _ in rows] == list("12345")
    assert float(rows[-1][1]) > 0.9
    assert all(float(norm) > 0 for _, _, norm in rows)
