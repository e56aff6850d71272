"""The folders of checkpoints, one for each of the newest jobs.

Jobs that need the same workers take turns, round by round. What a worker keeps of one of them must outlive the rounds
of the others. Nobody tells a worker that a job has been stopped, so that only a few jobs have a folder.
"""

import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path

from fedring.daemon.durable import delete, make_folder

log = logging.getLogger(__name__)

MOST_JOBS = 4
"""How many jobs have a folder."""

_OVER = "over"  # a file in the folder of a job that has trained its last round


def name_of(run_id: str, epoch: int, job_id: int, *facts: object) -> str:
    """Return the name of a job's folder.

    It begins with the job's id.
    """
    return f"{job_id}-{hashlib.sha256(repr((run_id, epoch, job_id, *facts)).encode()).hexdigest()[:32]}"


def begin_job(root: Path, job: str, *, adopt: str = "") -> Path:
    """Return the folder of a job that begins, or goes on.

    The folders of jobs that are over are deleted, and so are those that have not been used for longest. A warning names
    the latter's jobs, since these may go on.

    Args:
        root: The folder of all jobs.
        job: The name of the job's folder.
        adopt: The names of files of 1.0.0, which lie in `root` and may be of this job. All others there are deleted.
    """
    folder = root / job
    with suppress(OSError):  # A disk that fails ends no training: who writes checkpoints there says so.
        with suppress(OSError):  # 1.0.0 named it without the job's id, or it did not make it
            (root / job.partition("-")[2]).rename(folder)
        make_folder(folder)
        (folder / _OVER).unlink(missing_ok=True)
        os.utime(folder)
        for file in root.glob(adopt) if adopt else ():
            file.rename(folder / file.name)
        others = [path for path in root.iterdir() if path != folder]
        going_on = [path for path in others if path.is_dir() and not (path / _OVER).exists()]
        newest = sorted(going_on, key=lambda path: path.stat().st_mtime, reverse=True)
        for path in newest[MOST_JOBS - 1 :]:
            log.warning(
                "the checkpoints of job %s are deleted, since this worker keeps those of %d jobs that have not trained "
                "their last round: if it goes on, its optimizer and its residuals begin anew",
                path.name.partition("-")[0],
                MOST_JOBS,
            )
        for path in set(others).difference(newest[: MOST_JOBS - 1]):
            delete(path)
    return folder


def end_job(folder: Path) -> None:
    """Note that a job has trained its last round.

    Its folder is deleted when another job begins.
    """
    with suppress(OSError):
        (folder / _OVER).touch()
