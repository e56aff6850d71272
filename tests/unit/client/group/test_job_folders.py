"""The folders of a worker's checkpoints: they outlive the rounds of a few other jobs."""

import os
from pathlib import Path

import pytest

from fedring.client.group.job_folders import MOST_JOBS, begin_job, end_job, name_of


def begun(root: Path, job: str, *, at: int) -> Path:
    """Begin a job at a time in seconds, and leave a file in its folder."""
    folder = begin_job(root, job)
    (folder / "1.2.0.safetensors").touch()
    os.utime(folder, (at, at))
    return folder


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_the_folders_of_the_newest_jobs_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    jobs = [name_of("run", 0, 10 + number) for number in range(MOST_JOBS)]
    for at, job in enumerate(jobs):
        begun(tmp_path, job, at=at)
    again = begun(tmp_path, jobs[0], at=MOST_JOBS)
    assert not caplog.messages
    begin_job(tmp_path, "new")
    assert names(tmp_path) == {"new", jobs[0], *jobs[2:]}
    assert (again / "1.2.0.safetensors").exists()
    (lost,) = caplog.messages
    assert lost.startswith("the checkpoints of job 11 are deleted")


def test_the_folder_of_a_job_that_is_over_goes_when_another_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = begun(tmp_path, "job", at=1)
    end_job(folder)
    begin_job(tmp_path, "job")  # its last round was not published, and comes again
    begin_job(tmp_path, "other")
    assert names(tmp_path) == {"job", "other"}
    end_job(folder)
    begin_job(tmp_path, "other")
    assert names(tmp_path) == {"other"}
    assert not caplog.messages


@pytest.mark.parametrize("adopt", ["", "step-*.safetensors"])
def test_files_of_the_first_version_go_to_a_job_that_may_have_left_them(tmp_path: Path, adopt: str) -> None:
    for name in ("step-5.safetensors", "step-6.part"):
        (tmp_path / name).touch()
    folder = begin_job(tmp_path, "job", adopt=adopt)
    assert names(tmp_path) == {"job"}
    assert names(folder) == ({"step-5.safetensors"} if adopt else set())


def test_the_folder_of_the_first_version_goes_to_its_job(tmp_path: Path) -> None:
    job = name_of("run", 0, 7)
    begun(tmp_path, job.removeprefix("7-"), at=1)
    assert [each.name for each in begin_job(tmp_path, job).iterdir()] == ["1.2.0.safetensors"]
    assert names(tmp_path) == {job}


def test_a_job_begins_also_where_nothing_can_be_written(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.touch()
    end_job(begin_job(root, "job"))
    assert root.is_file()
