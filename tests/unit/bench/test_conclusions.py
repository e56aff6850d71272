"""What benchmarks conclude from their measurements, and which options they refuse."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.bench import data_parallel, ddp, experiments, federated, hooks, pipeline
from tests.bench.lab.curves import Curves
from tests.bench.lab.networks import check_rate
from tests.bench.lab.parts import describe_run
from tests.bench.lab.turns import alternate
from typer.main import get_command

from fedring.control.failure import Failure
from fedring.ctl.local.charts import Series, plot_panels
from fedring.ctl.local.experiment import Experiment, Result
from fedring.ctl.local.presets import Dataset
from fedring.daemon.exits import Exit
from fedring.v1 import control_pb2 as pb


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
@pytest.mark.parametrize("bench", [hooks, ddp])
def test_what_is_no_rate_is_refused_with_its_option(
    bench: Any, rate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([f"--rate={rate}", "--out", str(tmp_path / "out")]) == Exit.USAGE
    assert capsys.readouterr().err.startswith(f"{bench.main.name}: --rate {rate!r} is no rate: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bench", [federated, data_parallel])
def test_a_bench_of_daemons_refuses_what_is_no_rate(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--dataset", "digits", "--rate=fast", "--out", str(tmp_path / "out")]) == Exit.USAGE
    assert "--rate 'fast' is no rate: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_row_of_several_seeds_has_their_mean_and_deviation(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"")

    def trained(accuracy: int, communication: float) -> Result:
        client = pb.RoundClient(client_id="a", num_samples=1, upload_bytes=10, upload_seconds=communication)
        round_ = pb.Round(phase="published", eval_correct=accuracy, eval_total=100, clients=[client], seconds=1)
        return Result([round_], 1, tmp_path / "model")

    row = federated.summary("fp32", [trained(80, 1.0), trained(90, 2.0), trained(100, 3.0)])
    assert (row["accuracy"], round(row["accuracy_deviation"], 3)) == (pytest.approx(0.9), 0.082)
    assert [one["accuracy"] for one in row["by_seed"]] == [0.8, 0.9, 1.0]
    assert row["by_client"]["a"]["communication_seconds"] == 2.0


def test_a_hook_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = hooks.main(["--dataset", "digits", "--hooks", "none,zip", "--out", str(tmp_path / "out")])
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
    assert hooks.main(["--dataset", "digits", "--out", str(tmp_path), *given]) == Exit.FAILED
    assert [scale.training for scale in scales] == [steps]


BENCHES = [federated, data_parallel, hooks, ddp, pipeline]
of_each_bench = pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.__name__.rpartition(".")[2])


@of_each_bench
def test_the_examples_of_a_bench_can_be_parsed(bench: Any) -> None:
    command = get_command(bench.main.app)
    examples = str(command.epilog).replace("\\[", "[").split("\n\n")[1:]
    assert examples
    for line in examples:
        assert line.startswith(f"python -m {bench.__name__}")
        command.make_context("bench", shlex.split(line)[3:])


@of_each_bench
def test_a_bench_checks_its_folder_and_its_data_before_it_starts_anything(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    data = [] if bench is ddp else ["--dataset", "digits"]
    assert bench.main([*data, "--out", str(tmp_path / "file")]) == Exit.USAGE
    assert "cannot be a folder" in capsys.readouterr().err
    if data:
        given = ["--dataset", "mnist", "--data-root", str(tmp_path), "--out", str(tmp_path / "out")]
        assert bench.main(given) == Exit.CONFIG
        assert "There is no complete MNIST" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_benchmark_ends_with_the_first_epoch_that_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []

    def run(experiment: Experiment, directory: Path, *, label: str) -> None:
        jobs.append(experiment.job)
        raise Failure("the job failed")

    monkeypatch.setattr(data_parallel, "run_with_progress", run)
    with pytest.raises(Failure, match="the job failed"):
        data_parallel.data_parallel(dataset=Dataset.DIGITS, hooks="none", out=tmp_path / "out")
    assert [job.max_abandoned for job in jobs] == [1]


def test_curves_are_drawn(tmp_path: Path) -> None:
    ones = Series("ones", [1.0, 2.0], [0.1, 0.2], xs=[1.0, 10.0])
    logarithmic = Curves("Times", "pieces", "seconds", [ones, ones], log_x=True, log_y=True, ticks=[1, 10])
    plot_panels([logarithmic, Curves("Times", "n", "seconds", [ones], reference=(1.5, "top"))], tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


def test_ways_are_measured_by_turns_and_the_warm_up_is_dropped() -> None:
    calls: list[str] = []

    def measure(name: str) -> int:
        calls.append(name)
        return len(calls)

    results = alternate({"a": lambda: measure("a"), "b": lambda: measure("b")}, 2, warm_up=1)
    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert results == {"a": [3, 5], "b": [4, 6]}


def test_the_page_has_a_place_for_the_tables_of_each_bench() -> None:
    page = experiments.PAGE.read_text(encoding="utf-8")
    for bench in experiments.TABLES:
        replaced = experiments.replace(page, bench, ["| new |"])
        assert replaced.count("| new |") == 1
        assert experiments.replace(replaced, bench, ["| new |"]) == replaced
    with pytest.raises(SystemExit, match="no place for dance"):
        experiments.replace(page, "dance", [])


@pytest.mark.parametrize("without_times", [False, True])
def test_a_file_of_results_becomes_tables_and_a_picture(
    without_times: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.md").write_text(
        "<!-- hooks: python -m tests.bench.experiments -->\nold\n<!-- end of hooks -->\nlast\n"
    )
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
