"""Several jobs at once on real daemons: what clients keep of one job, such as residuals, never comes into another."""

from pathlib import Path
from typing import Any

import pytest

from fedring.privacy.account import epsilon
from tests.conftest import ROOT, path_to
from tests.damage import ask, flip, model_file
from tests.fleets import Control, Fleet, until_watching
from tests.ledgers import account_in
from tests.metrics_page import Page

JOBS = {
    "topk": {"encoding": "fp32_sparse", "keep_ratio": 0.05, "seed": 1},
    "other": {"encoding": "fp32_sparse", "keep_ratio": 0.1, "seed": 2},
    "int8": {"encoding": "int8", "seed": 1, "server_optimizer": {"args": {"lr": 1.0, "momentum": 0.5}}},
}
COMMON = {"rounds": 3, "min_clients": 2, "min_clients_to_aggregate": 2, "subset_size": 64, "evaluate": False}


def spec(name: str) -> dict[str, object]:
    return {**COMMON, "name": name, "start": "fresh", **JOBS[name]}


def models_of(control: Control, jobs: list[int]) -> list[list[str]]:
    """Return the digests of the models of each job, oldest first."""
    kept = control.models()
    return [[model.digest for model in reversed(kept) if model.job_id == job_id] for job_id in jobs]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The models of jobs that have run one after the other."""
    folder = tmp_path_factory.mktemp("alone")
    with Fleet(folder, {"keep_models": 100}, [{}, {}]) as fleet, Control(fleet.control) as control:
        until_watching(control, 2)
        return models_of(control, [finished(control, control.start_job(spec(name)).job_id) for name in JOBS])


def finished(control: Control, job_id: int) -> int:
    """Wait for the end of a job, which completes."""
    job = ended(control, job_id)
    assert job.state == "completed", job.reason
    return job_id


def ended(control: Control, job_id: int) -> Any:
    """Wait for the end of a job, and return it."""
    for _ in control.follow_job(job_id):
        pass
    return control.job(job_id)


@pytest.mark.parametrize("max_jobs", [1, 3])
def test_jobs_on_the_same_clients_make_the_models_that_each_makes_alone(
    tmp_path: Path, alone: list[list[str]], max_jobs: int
) -> None:
    settings = {"max_running_jobs": 3, "keep_models": 100}
    with Fleet(tmp_path, settings, [{"max_jobs": max_jobs}] * 2) as fleet, Control(fleet.control) as control:
        until_watching(control, 2)
        jobs = [control.start_job(spec(name)).job_id for name in JOBS]
        fleet.restart(0)  # a client that comes back does not take what it kept of one job for old
        assert models_of(control, [finished(control, job_id) for job_id in jobs]) == alone


def test_jobs_of_one_group_take_turns_and_make_the_models_that_each_makes_alone(tmp_path: Path) -> None:
    """What a worker keeps of a job between its rounds, such as momentum, outlives the rounds of the others."""
    layers = {"model_args": {"hidden": 32, "layers": 3}, "model": "fedring.train.models:digits_mlp"}
    fixed = {"rounds": 3, "min_clients": 2, "subset_size": 128, "evaluate": False, "start": "fresh", "momentum": 0.9}
    modes: list[dict[str, Any]] = [
        {"mode": "data_parallel"},
        {"mode": "data_parallel", **layers, "data_parallel": {"hook": "dgc", "ratio": 0.05}},
        {"mode": "pipeline", **layers, "pipeline": {"stages": 2, "micro_batches": 2}},
    ]
    specs = [{**fixed, **mode, "name": f"job-{number}"} for number, mode in enumerate(modes)]
    made = []
    for running in (1, len(specs)):
        folder = tmp_path / str(running)
        settings = {"max_running_jobs": running, "keep_models": 100}
        with Fleet(folder, settings, [{}, {}]) as fleet, Control(fleet.control) as control:
            until_watching(control, 2)
            jobs = [control.start_job(spec).job_id for spec in specs]
            made.append(models_of(control, [finished(control, job_id) for job_id in jobs]))
            (kept,) = (folder / "state" / "client-0" / "checkpoints").iterdir()  # of the job that ended last
    assert made[0] == made[1]
    assert kept.is_dir()


def test_pipelines_that_take_turns_measure_their_micro_batches_once(tmp_path: Path) -> None:
    spec = {"mode": "pipeline", "rounds": 3, "subset_size": 48, "batch_size": 8, "evaluate": False, "start": "fresh"}
    spec |= {"model": "fedring.train.models:digits_mlp", "pipeline": {"stages": 2, "micro_batches": "auto"}}
    with Fleet(tmp_path, {"max_running_jobs": 2}, [{}, {}]) as fleet, Control(fleet.control) as control:
        until_watching(control, 2)
        jobs = [control.start_job({**spec, "model_args": {"hidden": hidden}}).job_id for hidden in (32, 33)]
        for job_id in jobs:
            finished(control, job_id)
    for client in fleet.clients:
        assert client.log.read_text().count("micro-batches are the fastest of") == len(jobs)


def test_two_jobs_that_race_for_a_sites_epsilon_never_overspend_it(tmp_path: Path) -> None:
    """Of a limit that has room for three rounds, two jobs at once spend three, whichever they are."""
    limit = (epsilon([1.0] * 3, 1e-5) + epsilon([1.0] * 4, 1e-5)) / 2
    strict = {"max_jobs": 2, "privacy": {"min_clients": 2, "min_noise_multiplier": 1.0, "max_epsilon": limit}}
    dp = {"noise_multiplier": 1.0, "adaptive": False, "clip": 1.0}
    job = {**COMMON, "rounds": 3, "weights": "uniform", "dp": dp, "start": "fresh", "max_abandoned": 1}
    with Fleet(tmp_path, {"max_running_jobs": 2}, [strict] * 2) as fleet, Control(fleet.control) as control:
        until_watching(control, 2)
        jobs = [control.start_job({**job, "name": name}).job_id for name in ("one", "two")]
        done = [ended(control, job_id) for job_id in jobs]
        for client in ("client-0", "client-1"):
            spent = account_in(tmp_path / "state" / client)["rounds"]
            assert sum(spent.values()) <= 3, "no more than the limit has room for"
            assert epsilon([1.0] * sum(spent.values()), 1e-5) <= limit
        assert sum(each.rounds_done for each in done) <= 3
        assert any("above its privacy.max_epsilon" in each.reason for each in done)


def test_a_federated_job_runs_beside_a_data_parallel_one_on_other_clients(tmp_path: Path) -> None:
    clients: list[dict[str, Any]] = [{"labels": {"site": "here"}}] * 2 + [{"labels": {"site": "there"}}] * 2
    clients.append({"labels": {"site": "there"}, "max_jobs": 0})  # which no round draws
    federated = {**spec("int8"), "rounds": 2, "clients": {"site": "here"}}
    parallel = {"mode": "data_parallel", "min_clients": 2, "batch_size": 32, "rounds": 1, "subset_size": 256}
    parallel |= {"name": "parallel", "start": "fresh", "seed": 1, "clients": {"site": "there"}, "evaluate": False}
    with Fleet(tmp_path, {"keep_models": 100}, clients) as fleet, Control(fleet.control) as control:
        until_watching(control, 5)
        alone = models_of(
            control, [finished(control, control.start_job(each).job_id) for each in (federated, parallel)]
        )
        fleet.server.settings["max_running_jobs"] = 2
        fleet.restart_server()
        until_watching(control, 5)
        jobs = [control.start_job(each).job_id for each in (federated, parallel)]
        assert models_of(control, [finished(control, job_id) for job_id in jobs]) == alone
        both = [control.rounds(job_id=job_id) for job_id in jobs]
        assert [{client.client_id for each in rounds for client in each.clients} for rounds in both] == [
            {"client-0", "client-1"},
            {"client-2", "client-3"},
        ]


BURNING = {"rule": "user_burning:Burns"}
SITES = 5


@pytest.mark.soak
def test_ten_jobs_on_twenty_clients_make_the_models_that_each_makes_alone(tmp_path: Path) -> None:
    """Four of the ten end badly, or burn a core of the server; nobody is lost, and the others do not notice."""
    # Whoever burns a core keeps its clients, so no other job needs those of site 1.
    good = {f"good {number}": {"clients": {"site": site}, "seed": number} for number, site in enumerate("023402")}
    specs: dict[str, dict[str, Any]] = {
        name: {**COMMON, "name": name, "start": "fresh", "min_clients": 4, "encoding": "int8", **keys}
        for name, keys in good.items()
    }
    clients = [{"labels": {"site": str(number % SITES)}} for number in range(4 * SITES)]
    settings = {
        "max_running_jobs": 10,
        "keep_models": 1000,
        "lost_after_seconds": 10,
        "metrics_listen": "127.0.0.1:0",
        "data_root": str(tmp_path),
        "trusted": ["fedring", "user_rules", "user_burning"],
    }
    code = path_to(ROOT / "tests" / "fixtures_user_code")
    with (
        Fleet(tmp_path, settings, clients, env=code) as fleet,
        Control(fleet.control) as control,
    ):
        until_watching(control, 4 * SITES)
        alone = models_of(control, [finished(control, control.start_job(each).job_id) for each in specs.values()])
        release = tmp_path / "release"
        bad: dict[str, dict[str, Any]] = {
            "burning": {"clients": {"site": "1"}, "aggregation": {**BURNING, "args": {"until": release.name}}},
            "failing": {"clients": {"site": "2"}, "aggregation": {"rule": "user_rules:Raises"}},
            "damaged": {"clients": {"site": "3"}, "rounds": 1000},
            "stopped": {"clients": {"site": "4"}, "rounds": 1000},
        }
        common = {**COMMON, "start": "fresh", "min_clients": 2, "sample_clients": 2, "max_abandoned": 1}
        held = {name: control.start_job({**common, "name": name, **keys}).job_id for name, keys in bad.items()}
        jobs = [control.start_job(each).job_id for each in specs.values()]
        models = models_of(control, [finished(control, job_id) for job_id in jobs])
        assert models == alone
        assert control.job(held["burning"]).state == "running", "it still burns a core"
        control.stop_job(held["stopped"])
        hit = set[int]()
        while control.job(held["damaged"]).state == "running":  # a model may have been read just before it is damaged
            version = next(model.version for model in control.models() if model.job_id == held["damaged"])
            if version not in hit:
                flip(model_file(tmp_path / "state" / "server", version), seed=1)
            hit.add(version)
        release.touch()
        states = {name: ended(control, job_id).state for name, job_id in held.items()}
        assert states == {"burning": "completed", "failing": "failed", "damaged": "failed", "stopped": "stopped"}
        lags = Page(fleet.ready["metrics"]).by("le", "fl_server_event_loop_lag_seconds_bucket")
        print("late timers of the event loop, by the most seconds:", lags)
        assert ask(tmp_path / "state" / "server", "SELECT text FROM events WHERE kind = 'client_lost'") == []
