"""Several jobs at once on real daemons: what clients keep of one job, such as residuals, never comes into another."""

from pathlib import Path

import pytest

from tests.fleets import Control, Fleet, until_watching

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
    """Wait for the end of a job."""
    for _ in control.follow_job(job_id):
        pass
    job = control.job(job_id)
    assert job.state == "completed", job.reason
    return job_id


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
