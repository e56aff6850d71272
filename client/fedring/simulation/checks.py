"""The checks of a simulation before anything runs.

Each fault is one sentence, with exit code 78.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedring.control.failure import Failure
from fedring.control.job_file import check_job
from fedring.daemon.config import explain, read_document
from fedring.daemon.exits import Exit
from fedring.privacy.keystream import SECRET_BYTES
from fedring.simulation.objects import LocalObjects
from fedring.train.bounds import MAX_COUNT, MAX_SEED
from fedring.train.jobs.job import Job
from fedring.train.jobs.labels import check_labels
from fedring.train.jobs.override_table import no_client_has, unmatched
from fedring.train.jobs.start import FRESH, NEWEST, is_path

ENGINES = ("local", "batched", "auto", "ray")


def job_of(
    job: Job | Mapping[str, Any] | str | Path,
    keys: Mapping[str, Any],
    objects: LocalObjects,
    *,
    per_round: int | None,
    seed: int | None,
) -> Job:
    """Return the job to simulate.

    Args:
        job: The job, its keys, or the .toml or .json file that holds them.
        keys: Further keys, which take precedence.
        objects: Gets the objects that the keys hold, and gives them names.
        per_round: The clients of each round, in the place of the job's sample_clients; None = as the job says.
        seed: In the place of the job's seed; None = as the job says.

    Raises:
        ConfigError: The file cannot be read, or a key is unknown or has a wrong value.
        Failure: The keys do not fit together, or the job cannot be simulated.
    """
    if isinstance(job, Job):
        table = job.model_dump()
    else:
        table = dict(job) if isinstance(job, Mapping) else read_document(Path(job))
    table = objects.named({**table, **keys})
    if not isinstance(job, Job) or keys:
        check_job(table, where=str(job) if isinstance(job, str | Path) else "job")
    given = {"sample_clients": per_round, "seed": seed}
    _check_number("per_round", per_round, MAX_COUNT)
    _check_number("seed", seed, MAX_SEED, least=0)
    try:
        spec = Job.model_validate({**table, **{key: value for key, value in given.items() if value is not None}})
    except ValidationError as error:
        raise Failure(explain(error, {}, Job), Exit.CONFIG) from error
    # A server accepts these modes and keys; a simulation cannot run them.
    if spec.mode != "federated":
        raise _wrong(f"mode = {spec.mode!r} cannot be simulated, because its clients train together: use `flctl try`")
    if spec.shared != ["*"] or spec.private:
        raise _wrong(
            "shared and private cannot be simulated, because simulated clients keep no tensors: leave them out"
        )
    if spec.clients:
        raise _wrong(f"clients = {spec.clients} cannot be simulated, because all simulated clients take part")
    if is_path(spec.start):
        if not Path(spec.start).is_file():
            raise _wrong(f"start names the file {spec.start}, which is not there")
        return spec.model_copy(update={"start": str(Path(spec.start).absolute())})
    if spec.start not in (FRESH, NEWEST):
        raise _wrong(f"start = {spec.start!r} names a version, and only a server has versions: name a file, or fresh")
    return spec


def check_numbers(job: Job, clients: int, workers: int, threads: int | None) -> None:
    """Check the numbers of clients, workers and threads.

    There must be as many clients as the job needs.

    Raises:
        Failure: There are not.
    """
    _check_number("clients", clients, MAX_COUNT)
    _check_number("workers", workers, 1024)
    _check_number("threads", threads, 1024)
    if job.sample_clients > clients:
        raise _wrong(f"per_round={job.sample_clients} is more than clients={clients}: draw fewer, or simulate more")
    if job.min_clients > clients:
        raise _wrong(f"min_clients={job.min_clients} is more than clients={clients}: set min_clients, or simulate more")


def check_given_labels(job: Job, clients: int, labels: Sequence[Mapping[str, str]]) -> tuple[Mapping[str, str], ...]:
    """Check the labels of simulated clients.

    Returns:
        The labels.

    Raises:
        Failure: They are no labels, or no client has those of an override.
    """
    try:
        given = tuple(check_labels(dict(each)) for each in labels)
    except ValueError as error:
        raise _wrong(f"labels: {error}") from error
    here = given[:clients] or ({},)
    if why := no_client_has(unmatched(here, job.override), who="no simulated client"):
        raise _wrong(f"{why}: give labels")
    return given


def check_time(job: Job, *, timed: bool) -> None:
    """Check that an asynchronous job goes by virtual time.

    Raises:
        Failure: It does not.
    """
    if job.asynchronous and not timed:
        text = "without times, all clients are equally fast: give a timing, such as one with speed.spread = 10"
        raise _wrong(f"asynchronous: {text}")


def check_data_root(data_root: Path | None) -> None:
    """Check that the folder of the data sets is one.

    Raises:
        Failure: It is not.
    """
    if data_root is not None and not data_root.is_dir():
        raise _wrong(f"data_root={data_root} is not a folder")


def check_length(secret: bytes | None) -> None:
    """Check that a secret is long enough; None = there is none.

    Raises:
        Failure: It is too short.
    """
    if secret is not None and len(secret) < SECRET_BYTES:
        raise _wrong(f"secret has {len(secret)} bytes: give at least {SECRET_BYTES}")


def check_engine(engine: str) -> None:
    """Check that there is such an engine.

    Raises:
        Failure: There is not.
    """
    if engine not in ENGINES:
        raise _wrong(f"engine={engine!r} is none of {', '.join(ENGINES)}")


def check_batch(batch_mb: int) -> None:
    """Check the memory for clients that are trained together.

    Raises:
        Failure: It is no such size.
    """
    _check_number("batch_mb", batch_mb, 1 << 20)


def make_folder(path: Path) -> None:
    """Make the folder of the results, unless it exists.

    Raises:
        Failure: It cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _wrong(f"out={path} cannot be a folder: {error.strerror or error}") from error


def check_enough(job: Job, clients: int, with_samples: int) -> None:
    """Check that enough clients have samples for the job's barrier.

    Raises:
        Failure: It would wait for ever.
    """
    if with_samples < job.min_clients:
        raise _wrong(
            f"{with_samples} of clients={clients} have samples, fewer than the job's min_clients={job.min_clients}: "
            "simulate more clients, or set min_clients"
        )


def _check_number(name: str, value: int | None, most: int, *, least: int = 1) -> None:
    if value is not None and not least <= value <= most:
        raise _wrong(f"{name}={value} is not within {least} and {most}")


def _wrong(sentence: str) -> Failure:
    return Failure(sentence, Exit.CONFIG)
