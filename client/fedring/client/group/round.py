"""A round that a group of workers trains, in any mode.

It goes from the command to the delivery by one of the workers.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from fedring.client.config import ClientConfig
from fedring.client.group.rendezvous import RendezvousStream
from fedring.client.group.worker import RoundWorker, WorkerPart
from fedring.client.task import Task
from fedring.ring import RingOptions, total_traffic
from fedring.train.errors import SeamError, TrainingStopped
from fedring.train.plan import Plan

log = logging.getLogger(__name__)

Table = TypeVar("Table", bound=BaseModel)


def take_part(task: Task, part: WorkerPart, options: RingOptions, deliver: Callable[[], None]) -> None:
    """Take part in a round until it is over.

    The model is delivered if the server chooses this worker for it.

    Args:
        task: The round.
        part: What this worker does in the groups of the round.
        options: How its streams to the other workers are made.
        deliver: Submits what `part` has trained; called if the server chooses this worker for it.

    Raises:
        TrainingStopped: If the round ended before it was trained.
        RoundOver: If the server has not accepted the update that this worker delivered.
    """
    task.link.metrics.ring.read(total_traffic)
    with RendezvousStream(task.link, task.command) as rendezvous:
        worker = RoundWorker(rendezvous, part, options, lambda: _look(task), task.progress)
        if worker.run():
            deliver()
            worker.stay()
        task.end.stand_aside(part.usage.seconds)
    log.info("round %d is over", task.round, extra={"round": task.round, **part.metrics})


def peer_options(config: ClientConfig) -> RingOptions:
    """Return the options of the streams to peers.

    They use the certificate that the server gets, if there is one.
    """
    options = RingOptions(listen=config.peer_listen, advertise=config.peer_address)
    tls = config.tls
    if not tls.mutual:
        return options
    files = {"tls_ca": tls.ca, "tls_cert": tls.cert, "tls_key": tls.key, "tls_crl": tls.crl, "tls_members_only": True}
    return options.model_copy(update=files)


def parse_table(kind: type[Table], name: str, text: str) -> Table:
    """Parse a table of the job.

    Args:
        kind: The model of the table.
        name: Its name, for errors.
        text: The table as JSON; empty = all defaults.

    Raises:
        SeamError: With the reason "bad_job", if this client does not understand the table.
    """
    try:
        return kind.model_validate_json(text or "{}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (name, *first["loc"])))
        raise SeamError("bad_job", f"{where}: {first['msg']}: update this client.") from error


def job_key(task: Task) -> tuple[str, int, int]:
    """Return the key of a job's state, constant over its rounds."""
    command = task.command
    return command.run_id, command.epoch, command.job.job_id


def plan_of(task: Task) -> Plan:
    """Return the round's training plan.

    All workers get the same seed, because they share one order of the samples.
    """
    c = task.command
    return Plan(
        c.epochs,
        c.batch_size,
        c.lr,
        c.momentum,
        subset_size=c.subset_size,
        seed=c.seed,
        round=c.round,
        job_round=c.job_round,
    )


def _look(task: Task) -> None:
    if task.cancelled:
        raise TrainingStopped
