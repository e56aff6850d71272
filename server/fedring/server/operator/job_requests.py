"""Requests of operators to start and stop jobs."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from pydantic import ValidationError

from fedring.daemon.config import ConfigError, check_keys, explain, merge
from fedring.rpc.errors import BadRequest, NoSuchJob, OtherJob, UnknownRound
from fedring.server.jobs.queue import Jobs
from fedring.server.operator.listings import MAX_ID
from fedring.server.operator.report import queue_messages
from fedring.server.running.rounds import Rounds, abandon
from fedring.server.state.facts import Facts
from fedring.server.state.rows import JobRow, ModelRow
from fedring.train.bounds import MAX_DEPTH, MAX_JOB_BYTES, check_text
from fedring.train.jobs.job import Job
from fedring.train.jobs.override_table import no_client_has, unmatched
from fedring.train.jobs.round_settings import SCHEDULED
from fedring.train.orders.signed_job import BadOrder, read_order
from fedring.untrusted import TooDeep, parse_json
from fedring.v1 import control_pb2 as pb

_ALL = 1_000_000_000
MOST_KEY = 128
"""Characters of an idempotency key, at most."""


class CheckJob(Protocol):
    """See `fedring.server.operator.job_checks.JobChecks.check`."""

    def __call__(self, job: Job, kept: Sequence[ModelRow], *, runs_next: bool) -> str:
        """Return a warning about a job that may run, or raise."""
        ...


class JobRequests:
    """Starts and stops jobs and rounds.

    Args:
        jobs: queue them.
        rounds: end.
        facts: hold the models that jobs can start from.
        check: raises ConfigError for a job that would fail; may take long.
        defaults: the job of which a request changes keys.
    """

    def __init__(self, jobs: Jobs, rounds: Rounds, facts: Facts, check: CheckJob, defaults: Job) -> None:
        self._jobs, self._rounds, self._facts = jobs, rounds, facts
        self._check_job, self._defaults = check, defaults

    async def start_round(self, request: pb.StartRoundRequest) -> pb.StartReply:
        """Queue a job of one round."""
        spec = await self._facts.work(partial(self._job, rounds=1), request.overrides or "{}")
        return await self._start(spec, request.idempotency_key)

    async def start_job(self, request: pb.StartJobRequest) -> pb.StartReply:
        """Queue a job."""
        if request.HasField("signed"):
            spec = await self._facts.work(self._signed_job, request)
            return await self._start(spec, request.idempotency_key, request.signed.SerializeToString())
        # Trying out the schedule of a long pipeline takes seconds.
        return await self._start(await self._facts.work(self._job, request.job), request.idempotency_key)

    async def stop_round(self, request: pb.StopRoundRequest) -> pb.StopReply:
        """End the round in progress; UnknownRound if there is none."""
        job_id = min(request.job_id, MAX_ID) or self._jobs.only()
        number = await abandon(self._rounds, self._rounds.of_job(job_id), "stopped")
        if not number:
            raise UnknownRound("no round is in progress that could be stopped", reason="no_round")
        return pb.StopReply(job_id=job_id, round=number)

    async def stop_job(self, request: pb.StopJobRequest) -> pb.StopReply:
        """End a job; NoSuchJob if it neither runs nor is queued."""
        if request.job_id > MAX_ID:
            raise NoSuchJob(f"job {request.job_id} is neither running nor queued: ids end at 2^63 - 1")
        job_id, number = await self._jobs.stop(request.job_id)
        return pb.StopReply(job_id=job_id, round=number)

    async def move_job(self, request: pb.MoveJobRequest) -> pb.JobList:
        """Move a queued job, and return the queue.

        Raises:
            NoSuchJob: if it is not there.
        """
        ids = (min(request.job_id, MAX_ID), min(request.before, MAX_ID))
        if request.last and request.before:
            raise BadRequest("before and last exclude each other")
        if ids[0] == ids[1]:
            raise BadRequest("a job cannot be moved ahead of itself")
        await self._jobs.move(ids[0], before=ids[1], last=request.last)
        return pb.JobList(jobs=queue_messages(await self._facts.db(self._facts.store.jobs.queued)))

    def _job(self, text: str, **fixed: int) -> Job:
        """Return the default job with the keys set by `text`.

        `text` is a JSON object. Fixed keys are set, too.

        Raises:
            BadRequest: "bad_job", if it is no job.
        """
        try:
            table = _table_in(text) | fixed
            check_keys(Job, table, where="the job")
            return Job.model_validate(merge(_defaults_for(table, self._defaults), table))
        except ValidationError as error:
            raise BadRequest(explain(error, {}, Job), reason="bad_job") from error
        except (ConfigError, ValueError) as error:
            raise BadRequest(str(error), reason="bad_job") from error

    def _signed_job(self, request: pb.StartJobRequest) -> Job:
        """Return the job that an operator has signed, without the defaults.

        Whether the signature is good is for the clients to say, which trust this server with nothing of it.

        Raises:
            BadRequest: "bad_job", if it is no job for this server.
        """
        try:
            order = read_order(request.signed)
        except BadOrder as error:
            raise BadRequest(str(error), reason="bad_job") from error
        if request.job:
            raise BadRequest("a signed job has all keys itself: send no other ones", reason="bad_job")
        if order.run_id != self._facts.store.run_id:
            raise BadRequest(f"the job was signed for the server {order.run_id}: sign it again", reason="bad_job")
        return order.job

    async def _start(self, spec: Job, key: str, signed: bytes = b"") -> pb.StartReply:
        _check_key(key)
        warning = ""
        if not key or await self._facts.db(self._facts.store.jobs.of_key, key) is None:  # else it was checked before
            unheard = no_client_has(unmatched(self._rounds.labels, spec.override), who="no client here")
            warning = "; ".join(filter(None, (await self._check(spec), unheard)))
        row, already = await self._jobs.start(spec, key, signed)
        if already and not (_is_of(row.spec, spec) and bool(row.signed) == bool(signed)):
            raise OtherJob(
                f"the key {row.idempotency_key!r} belongs to job {row.job_id}, another one: choose a new key"
            )
        return pb.StartReply(job_id=row.job_id, already=already, warning=warning, after=await self._ahead_of(row))

    async def _ahead_of(self, row: JobRow) -> list[int]:
        """Return the jobs that a job waits for.

        They run, or are ahead of it in the queue.
        """
        queue = [each.job_id for each in await self._facts.db(self._facts.store.jobs.queued)]
        running = list(self._jobs.running)
        if row.job_id in running or row.job_id not in queue:
            return []
        ahead = [job_id for job_id in queue[: queue.index(row.job_id)] if job_id not in running]
        return running + ahead if len(running) + len(ahead) >= self._jobs.most else []

    async def _check(self, spec: Job) -> str:
        """Return a warning; BadRequest, "bad_job", for a job that would fail."""
        kept = await self._facts.db(self._facts.store.models.newest, _ALL)
        waiting = await self._facts.db(self._facts.store.jobs.queued)
        runs_next = len(self._jobs.running) < self._jobs.most and not waiting
        try:
            return await self._facts.heavy(partial(self._check_job, runs_next=runs_next), spec, kept)
        except ConfigError as error:
            raise BadRequest(str(error), reason="bad_job") from error


def _table_in(text: str) -> dict[str, Any]:
    """Return the keys that `text`, a JSON object, sets.

    Raises ConfigError or ValueError if it is not one.
    """
    if (size := len(text.encode())) > MAX_JOB_BYTES:
        raise ConfigError(f"the job is {size} bytes of JSON, above MAX_JOB_BYTES = {MAX_JOB_BYTES}")
    try:
        table = parse_json(text, parse_int=_whole)
    except TooDeep:
        raise ConfigError(f"the job holds more than MAX_DEPTH = {MAX_DEPTH} lists and tables in each other") from None
    if not isinstance(table, dict):
        raise ConfigError("a job must be one JSON object")
    return table


def _whole(digits: str) -> int:
    """Return the number, cut short if it is very long.

    The beginning alone is beyond all bounds just as well.
    """
    return int(digits[:100])


def _check_key(key: str) -> None:
    """Check that the idempotency key can be kept; BadRequest if it cannot."""
    try:
        if len(check_text(key)) > MOST_KEY:
            raise ValueError(f"must have at most {MOST_KEY} characters, not {len(key)}")
    except ValueError as error:
        raise BadRequest(f"idempotency_key: {error}", reason="bad_job") from None


def _defaults_for(table: Mapping[str, Any], defaults: Job) -> dict[str, Any]:
    """Return the defaults that the choices in `table` would understand.

    Tables and arguments for other choices are left out.
    """
    known = defaults.model_dump()
    if "seed" not in defaults.model_fields_set:
        del known["seed"]
    if table.get("model", defaults.model) != defaults.model:
        del known["model_args"]
    if table.get("optimizer", defaults.optimizer) != defaults.optimizer:
        del known["optimizer_args"]
    for key in SCHEDULED:
        if isinstance(table.get(key), dict):
            del known[key]
    if "clients" in table:  # a job that says whom it wants means no one else
        del known["clients"]
    combined = table.get("aggregation")
    if isinstance(combined, dict) and combined.get("rule", defaults.aggregation.rule) != defaults.aggregation.rule:
        del known["aggregation"]
    named = table.get("server_optimizer")
    usual = defaults.server_optimizer
    if usual is not None and isinstance(named, dict) and named.get("name", usual.name) != usual.name:
        del known["server_optimizer"]
    return known


def _is_of(stored: dict[str, Any], job: Job) -> bool:
    """Return whether a stored specification is the job's.

    The specification may have been stored by an older version.
    """
    try:
        known = Job.model_validate(stored)
    except ValidationError:
        return False
    if job.seed_is_open:  # it may have been chosen meanwhile
        return known.model_copy(update={"seed": job.seed}) == job
    return known == job and not known.seed_is_open
