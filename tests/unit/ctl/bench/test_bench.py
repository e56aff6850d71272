"""What the benches of flctl conclude from their measurements, and which options they refuse."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT

from fedring.control.failure import Failure
from fedring.ctl.bench import hooks, pipeline
from fedring.ctl.bench.networks import check_rate
from fedring.ctl.bench.parts import describe_run
from fedring.ctl.main import main
from fedring.daemon.exits import Exit


def test_a_step_is_divided_by_the_step_without_communication_of_the_same_turn() -> None:
    training = {"hook": "none", "accuracies": [0.5, 0.7], "bytes_per_step": 120}
    steps = {"hook": "none", "step_seconds": [3.0, 20.0], "bytes_per_step": 100}
    noop = {"hook": "noop", "step_seconds": [1.0, 10.0]}  # in the second turn, the machine was busy
    row = hooks.summary(training, steps, noop)
    assert (row["ratio"], row["ratio_deviation"]) == (2.5, 0.5)
    assert (row["accuracy"], row["accuracy_deviation"]) == (pytest.approx(0.6), pytest.approx(0.1))
    assert (row["bytes_per_step"], row["training_bytes_per_step"]) == (100, 120)


@pytest.mark.parametrize(
    ("hook", "steady"),
    [
        ("powersgd(matrix_approximation_rank=1,start_powerSGD_iter=36)", "powersgd(matrix_approximation_rank=1)"),
        ("powersgd(start_powerSGD_iter=36)", "powersgd"),
        ("powersgd(start_powerSGD_iter=36,warm_start=False)", "powersgd(warm_start=False)"),
        ("dgc(warmup_epochs=1)", "dgc(warmup_epochs=1)"),
    ],
)
def test_the_time_of_a_step_is_that_of_a_hook_that_compresses(hook: str, steady: str) -> None:
    assert hooks.steady(hook) == steady


def test_the_default_hooks_start_later_than_the_first_step_that_can_be_compressed() -> None:
    for scale in (hooks.HookScale(), hooks.QUICK):
        names = hooks.default_hooks(scale)
        assert len(set(names)) == len(names) == 13
        assert all(scale.training > start > 2 for start in scale.starts)


def test_gain_and_overhead_are_those_of_the_tutorial() -> None:
    def row(way: str, split: int, mean: float) -> dict[str, Any]:
        return {"way": way, "split": split, "mean": mean}

    # The figures of the tutorial: 3.75 s on one device, 4.02 s on two, and 2.43 s with splits of 12.
    rows = [row("one device", 120, 3.75), row("fedring", 120, 4.02), row("fedring", 12, 2.43), row("torch", 12, 1.0)]
    found = pipeline.summary(rows, 120)
    assert (round(found["overhead"], 2), round(found["gain"], 2), found["best_split"]) == (0.07, 0.54, 12)


@pytest.mark.parametrize("rate", ["100mbit", "1gbit", "64kbit"])
def test_a_rate_is_a_number_and_a_unit(rate: str) -> None:
    assert check_rate("--rate", rate) == rate


@pytest.mark.parametrize("rate", ["", "fast", "0mbit", "100", "100mbps", "-1mbit", "1gbit 2"])
@pytest.mark.parametrize("verb", ["hooks --dataset digits", "ddp"])
def test_what_is_no_rate_is_refused_with_its_option(
    verb: str, rate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *verb.split(), f"--rate={rate}", "--out", str(tmp_path / "out")]) == Exit.USAGE
    assert capsys.readouterr().err.startswith(f"flctl: --rate {rate!r} is no rate: ")
    assert not (tmp_path / "out").exists()


def test_a_hook_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "hooks", "--dataset", "digits", "--hooks", "none,zip", "--out", str(tmp_path / "out")])
    assert (code, "there is no hook 'zip'" in capsys.readouterr().err) == (Exit.USAGE, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("given", "steps"), [([], 120), (["--quick"], 20), (["--quick", "--steps", "470"], 470)])
def test_hooks_train_for_as_many_steps_as_are_asked_for(
    given: list[str], steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales: list[hooks.HookScale] = []

    def measure(*arguments: Any, scale: hooks.HookScale, rate: str) -> None:
        scales.append(scale)
        raise Failure("nothing is measured here")

    monkeypatch.setattr(hooks, "measure", measure)
    assert main(["bench", "hooks", "--dataset", "digits", "--out", str(tmp_path), *given]) == Exit.FAILED
    assert [scale.training for scale in scales] == [steps]


@pytest.fixture(scope="module")
def experiments() -> Any:
    """Return docs/experiments.py as a module."""
    spec = importlib.util.spec_from_file_location("experiments", ROOT / "docs" / "experiments.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_a_place_for_the_tables_of_each_bench(experiments: Any) -> None:
    page = experiments.PAGE.read_text(encoding="utf-8")
    for bench in experiments.TABLES:
        replaced = experiments.replace(page, bench, ["| new |"])
        assert replaced.count("| new |") == 1
        assert experiments.replace(replaced, bench, ["| new |"]) == replaced
    with pytest.raises(SystemExit, match="no place for dance"):
        experiments.replace(page, "dance", [])


@pytest.mark.parametrize("without_times", [False, True])
def test_a_file_of_results_becomes_tables_and_a_picture(
    experiments: Any, without_times: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.md").write_text("<!-- hooks: python docs/experiments.py -->\nold\n<!-- end of hooks -->\nlast\n")
    monkeypatch.setattr(experiments, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(experiments, "FIGURES", tmp_path)
    training = {"hook": "powersgd(start_powerSGD_iter=9)", "accuracies": [0.5], "bytes_per_step": 2000}
    steps = {"step_seconds": [3.0], "bytes_per_step": 1000}
    results = describe_run("hooks", quick=True) | {"training": 20, "seeds": 1, "network": {"rate": None, "limit": ""}}
    results["hooks"] = [hooks.summary(training, steps, {"step_seconds": [2.0]})]
    (tmp_path / "hooks.json").write_text(json.dumps(results))
    (tmp_path / "hooks.png").write_bytes(b"picture")
    given = [str(tmp_path / "hooks.json"), *(["--without-times"] if without_times else [])]
    monkeypatch.setattr(sys, "argv", ["experiments.py", *given])
    experiments.main()
    page = (tmp_path / "page.md").read_text()
    time = "-" if without_times else "1.50 ± 0.00"
    assert f"| powersgd from step 9 | {time} | 1.00 kB | 2.00 kB | 50.00 % ± 0.00 |" in page
    assert page.endswith("<!-- end of hooks -->\nlast\n")
    assert "old" not in page
    assert ("figures/experiment-hooks.png" in page, (tmp_path / "experiment-hooks.png").exists()) == (
        not without_times,
        not without_times,
    )
