"""fedring.control against a real fl-server with real clients: the Python API beside flctl."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedring.control import Failure, Row, Server, Unreachable, connect
from fedring.control import server as control_server
from fedring.control.notebook import LiveView
from fedring.control.trackers import scalars, tracker
from fedring.daemon.exits import Exit
from fedring.data import digits
from fedring.train.models import digits_mlp
from tests import forks
from tests.conftest import ROOT, missing
from tests.fleets import Fleet, until_watching
from tests.ports import free_port
from tests.waiting import until

JOB: dict[str, Any] = {"name": "script", "rounds": 3, "min_clients": 2, "best_by": "min eval/loss"}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start a server and two clients."""
    parts = [{"partition_index": index, "partition_count": 2} for index in range(2)]
    with Fleet(tmp_path_factory.mktemp("api"), {}, parts) as fleet:
        yield fleet


@pytest.fixture
def server(fleet: Fleet) -> Iterator[Server]:
    """Connect as a script does."""
    with connect(fleet.control) as server:
        until_watching(server.control, 2)
        yield server


def test_a_job_is_started_watched_and_its_model_loaded(server: Server, tmp_path: Path) -> None:
    job = server.start(JOB, epochs=2)
    rows = list(job.watch())
    assert [row["job_round"] for row in rows] == [1, 2, 3]
    assert {(row["phase"], row["delivered"]) for row in rows} == {("published", 2)}
    assert all(row["accuracy"] == row["eval/accuracy"] and "train/loss" in row for row in rows)
    assert (job.state, job.spec["epochs"], job.id) == ("completed", 2, server.job().id)
    assert job.rounds() == rows
    assert list(job.watch()) == rows  # a job that has ended can be watched, too
    best = job.best()
    assert best == min(rows, key=lambda row: float(row["loss"] or 0))
    assert best is not None
    assert job.export(tmp_path / "best.safetensors", "best") == best["model_version"]
    assert job.export(tmp_path / "newest.safetensors") == rows[-1]["model_version"]
    model = job.load_model(digits_mlp())
    stored = load_file(tmp_path / "newest.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items())


def test_a_job_holds_functions_that_server_and_clients_can_import_and_no_others(server: Server) -> None:
    job = server.start(JOB, model=digits_mlp, data=digits, name="<script>alert(1)</script>").wait()
    assert (job.spec["model"], job.spec["data"]) == ("fedring.train.models:digits_mlp", "fedring.data:digits")
    html = job._repr_html_()
    assert html is not None
    assert f"3 of 3 rounds, job {job.id} is completed" in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<script" not in html
    assert "polyline" in html
    before = len(server.jobs())
    with pytest.raises(
        Failure, match=r"^model: a lambda has no name by which others could import it: define"
    ) as failed:
        server.start(JOB, model=lambda: digits_mlp())
    assert failed.value.exit_code is Exit.CONFIG
    assert len(server.jobs()) == before


def test_a_notebook_shows_a_job_while_it_waits_for_its_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    now = iter(range(100_000))
    monkeypatch.setattr(control_server, "live_view", lambda: LiveView(shown.append, lambda: float(next(now))))
    job = server.start(JOB).wait()
    assert f"3 of 3 rounds, job {job.id} is completed" in shown[-1]
    assert all(f"job {job.id} is " in each for each in shown)


def test_a_watch_that_begins_late_misses_no_round(server: Server) -> None:
    job = server.start(JOB)
    next((event for event in job.events() if event.kind == "round_evaluated"), None)  # or the job has ended already
    assert [row["job_round"] for row in job.watch()] == [1, 2, 3]


def test_a_watch_whose_reader_is_slow_misses_no_round(server: Server) -> None:
    job = server.start(JOB, rounds=8)
    rows = job.watch()
    assert next(rows)["job_round"] == 1
    until(lambda: job.state == "completed")  # the reader is seven rounds behind now
    assert [row["job_round"] for row in rows] == [2, 3, 4, 5, 6, 7, 8]


def test_rows_of_an_abandoned_round_and_the_reason_of_a_failed_job(server: Server) -> None:
    job = server.start(JOB, min_clients=3, barrier_timeout_seconds=0.01, max_abandoned=1)
    with pytest.raises(Failure, match=f"job {job.id} failed: barrier_timeout") as failed:
        list(job.watch())
    assert failed.value.exit_code is Exit.FAILED
    (row,) = job.rounds()
    assert (row["phase"], row["reason"], row["accuracy"]) == ("abandoned", "barrier_timeout", None)
    assert job.best() is None
    with pytest.raises(Failure, match=f"job {job.id} has no newest model yet"):
        job.export("never.safetensors")


def test_a_job_is_stopped(server: Server) -> None:
    job = server.start(JOB, min_clients=3)
    job.stop()
    with pytest.raises(Failure, match="stopped"):
        job.wait()
    assert job.state == "stopped"


@pytest.mark.parametrize(
    ("keys", "sentence", "exit_code"),
    [
        ({"rouns": 3}, "rounds", Exit.CONFIG),
        ({"rounds": 0}, "rounds", Exit.CONFIG),
        ({"min_clients": 1, "min_clients_to_aggregate": 2}, "min_clients_to_aggregate", Exit.CONFIG),
    ],
)
def test_a_wrong_job_is_refused_as_flctl_refuses_it(
    server: Server, keys: dict[str, int], sentence: str, exit_code: Exit
) -> None:
    with pytest.raises(Failure, match=sentence) as failed:
        server.start(keys)
    assert failed.value.exit_code is exit_code


def test_other_errors_are_those_of_flctl(server: Server, tmp_path: Path) -> None:
    with pytest.raises(Failure, match="has no job 999999"):
        server.job(999999)
    with pytest.raises(Failure, match=r"nothing\.toml"):
        server.start(tmp_path / "nothing.toml")
    with pytest.raises(Unreachable) as away:
        connect(f"127.0.0.1:{free_port()}")
    assert away.value.exit_code is Exit.UNAVAILABLE
    with pytest.raises(Failure, match="port"):
        connect("nowhere")
    with pytest.raises(Failure) as tls:
        connect("127.0.0.1:1", tls_cert=tmp_path / "no.crt")
    assert tls.value.exit_code in (Exit.USAGE, Exit.CONFIG)


def test_a_model_that_does_not_fit_is_refused_by_its_first_tensor(server: Server) -> None:
    job = server.start(JOB, rounds=1).wait()
    with pytest.raises(Failure, match=f"the model of job {job.id} does not fit"):
        job.load_model(nn.Linear(3, 2))


def test_the_example_of_the_page_works(fleet: Fleet) -> None:
    done = forks.run("run_job", fleet.control, cwd=ROOT / "docs" / "examples", timeout=240)
    assert done.returncode == 0, done.stderr
    assert "round 3: accuracy 0." in done.stdout
    assert "the best model is that of round" in done.stdout


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_tracker_without_its_package_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # an import of it fails as if it were not installed
    with pytest.raises(Failure, match=rf"pip install 'fedring\[{name}\]'") as failed, tracker(f"{name}=here"):
        pass
    assert failed.value.exit_code is Exit.CONFIG


@pytest.mark.parametrize("text", ["tensorboard", "tensorboard=", "=x", "csv=x"])
def test_a_tracker_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(Failure, match="tensorboard=FOLDER") as failed:
        tracker(text)
    assert failed.value.exit_code is Exit.USAGE


def test_trackers_get_metrics_and_no_identifiers() -> None:
    row: dict[str, Any] = {"round": 9, "job_round": 2, "phase": "published", "seconds": 1.5, "upload_bytes": 10}
    row |= {"accuracy": 0.5, "eval/accuracy": 0.5, "eval/f1": 0.25, "server_loss": None}
    assert scalars(row) == {"round/seconds": 1.5, "round/upload_bytes": 10.0, "eval/accuracy": 0.5, "eval/f1": 0.25}


def in_tensorboard(folder: Path) -> list[tuple[int, float]]:
    """Return step and value of each accuracy in the event files of a folder."""
    accumulator: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars("eval/accuracy")]


@pytest.mark.soak
def test_flctl_run_writes_the_rounds_that_it_follows(fleet: Fleet, server: Server, tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorboard") is None:
        missing("the packages of fedring[tensorboard]")
    (tmp_path / "job.toml").write_text("rounds = 2\nmin_clients = 2\n")
    words = [
        "run",
        str(tmp_path / "job.toml"),
        "--server",
        fleet.control,
        "--track",
        f"tensorboard={tmp_path / 'runs'}",
    ]
    done = forks.run("fedring.ctl.main", *words, timeout=120)
    assert done.returncode == 0, done.stderr
    wanted: Any = [(row["job_round"], pytest.approx(row["eval/accuracy"])) for row in server.job().rounds()]
    assert in_tensorboard(tmp_path / "runs") == wanted


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_real_tracker_holds_what_the_rounds_had(
    name: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(name) is None:
        missing(f"the packages of fedring[{name}]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    job = server.start(JOB, rounds=2)
    with tracker(f"{name}={'runs' if name == 'tensorboard' else 'digits'}") as log:
        rows: list[Row] = []
        for row in job.watch():
            log(row)
            rows.append(row)
    wanted: Any = [float(row["eval/accuracy"] or 0) for row in rows]
    if name == "tensorboard":
        close: Any = list(enumerate(map(pytest.approx, wanted), start=1))
        assert in_tensorboard(tmp_path / "runs") == close
    elif name == "mlflow":
        module: Any = importlib.import_module("mlflow")
        (run,) = module.search_runs(experiment_names=["digits"], output_format="list")
        history = module.MlflowClient().get_metric_history(run.info.run_id, "eval/accuracy")
        assert [(point.step, point.value) for point in history] == list(enumerate(wanted, start=1))
    else:
        assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))


def test_flctl_run_refuses_a_tracker_without_waiting(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("rounds = 1\n")
    words = ["run", str(tmp_path / "job.toml"), "--server", fleet.control]
    for more, code in ((["--track", "csv=x"], Exit.USAGE), (["--track", "tensorboard=x", "--no-wait"], Exit.USAGE)):
        assert forks.run("fedring.ctl.main", *words, *more, timeout=60).returncode == code
