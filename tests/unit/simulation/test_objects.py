"""Simulations of jobs that are given functions and classes as objects."""

import functools
import importlib
import json
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedring.control.failure import Failure
from fedring.control.notebook import LiveView
from fedring.daemon.config import ConfigError
from fedring.daemon.exits import Exit
from fedring.data import digits
from fedring.simulation import run, simulate

SMALL: dict[str, Any] = {"rounds": 2, "batch_size": 16, "clients": 3, "workers": 1, "threads": 1}


class Net(nn.Sequential):
    """A network for the digits."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a module of the user's."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "fixtures_user_code"))
    return importlib.import_module("user_simulation")


@pytest.fixture
def notebook() -> type[nn.Module]:
    """Return a class as a notebook defines it."""
    return type("Mine", (Net,), {"__module__": "__main__"})


def test_objects_of_a_notebook_closures_and_partials_train_as_a_module_does(notebook: type[nn.Module]) -> None:
    seen: list[int] = []

    def closed(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(len(labels))
        return nn.functional.cross_entropy(outputs, labels)

    plain = simulate({"model": "fedring.train.models:digits_mlp", "model_args": {"hidden": 8}}, **SMALL)
    given = simulate(model=notebook, data=lambda root, download: digits(root, download), loss=closed, **SMALL)
    wrapped = simulate({"model": functools.partial(Net, hidden=8)}, loss=nn.CrossEntropyLoss(), **SMALL)
    assert seen
    assert given["model_sha256"] == wrapped["model_sha256"]
    assert (given["accuracy"], given["loss"]) == (plain["accuracy"], plain["loss"])


def test_two_lambdas_and_a_named_function_of_one_job_are_kept_apart(code: ModuleType) -> None:
    def normed(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # as the model of the module is named
        return nn.functional.cross_entropy(outputs, labels)

    report = simulate(model=code.normed, loss=normed, **SMALL)
    same = simulate(model=lambda: code.normed(), loss=lambda out, labels: normed(out, labels), **SMALL)
    assert report["loss"] == same["loss"]


def test_a_strategy_is_given_as_a_class() -> None:
    seen: list[int] = []

    class Doubled:
        """Twice the mean, by a class that only this process has."""

        def combine(self, deltas: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
            seen.append(len(deltas))
            return np.asarray(2 * deltas.mean(axis=0))

    given = simulate({"model": Net, "aggregation": {"rule": Doubled}}, **SMALL)
    assert set(seen) == {3}
    assert given["model_sha256"] != simulate({"model": Net}, **SMALL)["model_sha256"]


@pytest.mark.programs
def test_what_can_be_imported_trains_in_several_processes(code: ModuleType) -> None:
    keys: Any = {**SMALL, "workers": 2}
    assert simulate(model=code.normed, **keys)["model_sha256"] == simulate(model=code.normed, **SMALL)["model_sha256"]


@pytest.mark.parametrize(
    ("how", "advice"), [({"workers": 2}, "workers=1 instead of 2"), ({"engine": "ray"}, "engine='local' and workers=1")]
)
def test_other_processes_cannot_have_what_they_cannot_import(
    notebook: type[nn.Module], how: dict[str, Any], advice: str
) -> None:
    with pytest.raises(Failure, match=rf"^model: Mine is defined in this script or notebook, .* {advice}$") as refused:
        simulate(model=notebook, **{**SMALL, **how})
    assert refused.value.exit_code is Exit.CONFIG


def test_by_default_one_worker_takes_it_with_all_cores_and_one_line_says_so(
    notebook: type[nn.Module], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(3))
    keys = {key: value for key, value in SMALL.items() if key not in ("workers", "threads")}
    threads: list[int] = []

    def counted(root: Path | None, download: bool) -> Any:
        threads.append(torch.get_num_threads())
        return digits(root, download)

    with caplog.at_level(logging.WARNING):
        report = simulate(model=notebook, data=counted, **keys)
    assert report["workers"] == 1
    assert threads[0] == 3
    (line,) = caplog.messages
    assert line.startswith("model: Mine is defined in this script or notebook")
    assert line.endswith("one worker trains, in this process, instead of 3")


def test_objects_that_cannot_be_used_are_told(notebook: type[nn.Module]) -> None:
    with pytest.raises(Failure, match="is a model already: name its class, or a function that makes it"):
        simulate(model=notebook(), **SMALL)
    with pytest.raises(ConfigError, match=r"model_args .*: act in it must be text, a number"):
        simulate(model=notebook, model_args={"act": nn.ReLU}, **SMALL)
    with pytest.raises(ConfigError, match="unknown key 'worker'"):
        simulate(model=notebook, worker=1, **SMALL)


def test_keys_as_arguments_take_precedence_and_the_report_is_a_dictionary_with_a_view() -> None:
    report = simulate({"rounds": 9, "name": "<script>"}, model=Net, **SMALL)
    assert json.loads(json.dumps(report)) == report
    html = report._repr_html_()
    assert "2 of 2 rounds, completed" in html
    assert "&lt;script&gt;" in html
    assert "<script" not in html
    assert "polyline" in html


def test_a_notebook_shows_a_simulation_until_it_ends_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    for pause in ("_PAUSE", "_REST"):  # each state is shown
        monkeypatch.setattr(f"fedring.control.notebook.{pause}", 0.0)
    monkeypatch.setattr(run, "live_view", lambda: LiveView(shown.append))
    simulate(model=Net, **SMALL)
    assert "0 of 2 rounds, running" in shown[0]
    assert any("1 of 2 rounds, running" in each for each in shown)
    assert "2 of 2 rounds, completed" in shown[-1]

    def broken(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    with pytest.raises(Failure):
        simulate(model=Net, loss=broken, **SMALL)
    assert "rounds, failed" in shown[-1]
    shown.clear()
    simulate(model=Net, show=lambda share, row: None, **SMALL)
    assert shown == []  # who follows it, shows it


def test_ipython_is_no_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)  # which fails every import of it
    assert simulate(model=Net, **SMALL)["updates"] == 6
