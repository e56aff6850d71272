"""Checks of fl-server's configuration on this machine before it starts."""

from collections.abc import Iterator

from fedring.daemon.checks import Check, Level, check_data_root, refuse_failed
from fedring.server.aggregation.optimizer import ServerOptimizer
from fedring.server.aggregation.rule import OptimizerError
from fedring.server.aggregation.strategy import make_strategy
from fedring.server.config import ServerConfig
from fedring.server.model.initial import load_initial
from fedring.server.model.transforms.listing import transforms_of
from fedring.server.operator.job_checks import key_of, try_optimizer
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job
from fedring.train.jobs.start import FRESH, is_path
from fedring.train.names.name_checks import check_data, check_name, check_offered
from fedring.train.names.offered import Offered, collect
from fedring.train.names.seam import build_model
from fedring.train.tensors.files import read_tensors
from fedring.train.tensors.state import check_sharing


def check(config: ServerConfig) -> None:
    """Check that the configuration works here, and log warnings.

    Raises:
        ConfigError: if the default job would surely fail.
    """
    refuse_failed(check_names(config))


def check_names(config: ServerConfig) -> Iterator[Check]:
    """Return the faults of the parts that the server itself uses.

    Parts that only its clients import do not count.
    """
    try:
        offered = collect(config.trusted, root=config.data_root, download=config.download)
    except SeamError as error:
        yield Check("trusted", Level.FAIL, str(error))
        return
    yield from check_offered(offered)
    job = config.job
    model, named = check_name("job.model", "model", job.model, offered), "model" in job.model_fields_set
    yield from _check_init_path(config, offered, fits=named and model.level is Level.OK)
    if named or model.level is Level.OK:  # nobody has asked for the default model, and each job may name its own
        yield model
    yield from _check_rule(job, offered)
    if data := job.aggregation.data:
        yield check_data("job.aggregation.data", data, offered, root=config.data_root)
    yield from _check_optimizer(job)
    yield from _check_transforms(job)
    yield from _check_optimizer_args(job, offered)
    if job.evaluate_on_server:
        yield from check_data_root(config.data_root)
        yield check_data("job.data", job.data, offered, root=config.data_root)
        yield check_name("job.loss", "loss", job.loss, offered)
        if job.evaluator:
            yield check_name("job.evaluator", "evaluator", job.evaluator, offered)


def _check_init_path(config: ServerConfig, offered: Offered, *, fits: bool) -> Iterator[Check]:
    """Check that the first weights can be read.

    If asked, also that they fit the job's model.
    """
    path, job = config.init_path, config.job
    if path is None:
        return
    if path.is_dir():  # jobs name the files in it, and are checked when they are queued
        yield Check("init_path", Level.OK, str(path))
        return
    try:
        if fits:
            model = build_model(job.model, job.model_args, job.seed, offered)
            load_initial(path, model, check_sharing(model, job.sharing))
        else:  # the jobs name their own models
            read_tensors(path)
    except SeamError as error:
        yield Check("init_path", Level.FAIL, str(error))
    else:
        yield Check("init_path", Level.OK, str(path))
        if "start" in job.model_fields_set and job.start != FRESH and not is_path(job.start):
            found = f"{path} is ignored by jobs that take start = {job.start} from [job], if there is such a version"
            yield Check(
                "init_path", Level.WARN, found, "leave start out of [job], or start those jobs with start=fresh"
            )


def _check_rule(job: Job, offered: Offered) -> Iterator[Check]:
    """Check that a rule of the user's own can be made."""
    key = "job.aggregation.rule"
    try:
        make_strategy(job.aggregation, offered)
    except SeamError as error:
        yield Check(key, Level.FAIL, str(error))
    else:
        if job.aggregation.own:
            yield Check(key, Level.OK, job.aggregation.rule)


def _check_optimizer(job: Job) -> Iterator[Check]:
    key, chosen = "job.server_optimizer", job.server_optimizer
    if chosen is None:
        return
    try:
        ServerOptimizer(chosen.name, chosen.args)
    except OptimizerError as error:
        yield Check(key, Level.FAIL, str(error))
    else:
        yield Check(key, Level.OK, chosen.name)


def _check_transforms(job: Job) -> Iterator[Check]:
    """Check that there are the transforms that the job names."""
    key = "job.transforms"
    try:
        transforms_of(job)
    except SeamError as error:
        yield Check(key, Level.FAIL, str(error))
    else:
        if job.transforms:
            yield Check(key, Level.OK, ", ".join(each.name for each in job.transforms))


def _check_optimizer_args(job: Job, offered: Offered) -> Iterator[Check]:
    """Check the arguments of the clients' optimizer.

    The optimizer must take them, and fit the hook; this is checked if it can be imported here.
    """
    try:
        try_optimizer(job, offered)
    except SeamError as error:
        yield Check(f"job.{key_of(error)}", Level.FAIL, str(error))
    else:
        if job.optimizer_args:
            yield Check("job.optimizer_args", Level.OK, str(job.optimizer_args))
