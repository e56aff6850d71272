"""ControlService: what flctl calls, on a port of its own."""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from fedring.daemon.config import ConfigError, check_keys, explain, merge
from fedring.privacy.account import NoAccountant
from fedring.rpc.errors import BadRequest, ClientInUse, NoEpsilon, NoSuchClient, NoSuchJob, OtherJob, UnknownRound
from fedring.server.jobs.queue import Jobs
from fedring.server.operator.job_checks import JobChecks
from fedring.server.operator.privacy_report import privacy_message
from fedring.server.operator.report import event_message, job_message, model_message
from fedring.server.round.report import open_message, round_message
from fedring.server.round.rounds import Rounds
from fedring.server.service.downloads import ModelStreams
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.journal import Journal, printable, rfc3339
from fedring.train.bounds import MAX_DEPTH, MAX_JOB_BYTES, check_text
from fedring.train.job import Job
from fedring.train.round_settings import SCHEDULED
from fedring.v1 import control_pb2 as pb
from fedring.v1 import control_pb2_grpc as rpc
from fedring.v1 import federation_pb2 as fed

MOST_ROWS = 1000
_ALL = 1_000_000_000
MOST_KEY = 128
"""Characters of an idempotency key, at most."""
PAGE_BYTES = 1 << 20
"""Bytes of rounds or jobs after which an answer ends."""
_ROUNDS_AT_ONCE = 32
_BYTES_AT_ONCE = PAGE_BYTES // 32
"""Bytes of rounds to read in one transaction, as far as the rounds before let one guess."""
MAX_ID = 2**63 - 1
"""The largest number that the store can be asked for. No id is as large."""


class ControlService(rpc.ControlServiceServicer):
    """Serves what operators ask for: jobs, rounds, clients, models, events."""

    def __init__(
        self,
        rounds: Rounds,
        jobs: Jobs,
        sessions: Sessions,
        journal: Journal,
        facts: Facts,
        streams: ModelStreams,
        checks: JobChecks,
        defaults: Job,
        version: str,
        *,
        refused: Callable[[], Mapping[str, int]],
    ) -> None:
        self._rounds, self._jobs, self._sessions, self._journal = rounds, jobs, sessions, journal
        self._facts, self._store = facts, facts.store
        self._streams, self._checks, self._defaults, self._version = streams, checks, defaults, version
        self._refused = refused
        self._began = time.monotonic()

    async def StartRound(self, request: pb.StartRoundRequest, context: Any) -> pb.StartReply:
        spec = await self._facts.work(partial(self._job, rounds=1), request.overrides or "{}")
        return await self._start(spec, request.idempotency_key)

    async def StartJob(self, request: pb.StartJobRequest, context: Any) -> pb.StartReply:
        # Trying out the schedule of a long pipeline takes seconds.
        return await self._start(await self._facts.work(self._job, request.job), request.idempotency_key)

    async def StopRound(self, request: pb.StopRoundRequest, context: Any) -> pb.StopReply:
        number = await self._rounds.abandon(self._rounds.newest, "stopped")
        if not number:
            raise UnknownRound("no round is in progress that could be stopped", reason="no_round")
        running = self._jobs.running
        return pb.StopReply(job_id=running.job_id if running else 0, round=number)

    async def StopJob(self, request: pb.StopJobRequest, context: Any) -> pb.StopReply:
        if request.job_id > MAX_ID:
            raise NoSuchJob(f"job {request.job_id} is neither running nor queued: ids end at 2^63 - 1")
        job_id, number = await self._jobs.stop(request.job_id)
        return pb.StopReply(job_id=job_id, round=number)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.Status:
        jobs = await self._facts.db(self._store.jobs, MOST_ROWS)
        latest, round_ = self._rounds.latest, open_message(self._rounds.newest)
        if round_ is None:
            rows = await self._facts.db(self._store.rounds, 1)
            round_ = round_message(rows[0]) if rows else None
        running = self._jobs.running
        current = await self._facts.db(self._store.job, running.job_id) if running else None
        return pb.Status(
            run_id=self._store.run_id,
            version=self._version,
            uptime_seconds=time.monotonic() - self._began,
            clients_watching=sum(session.matched for session in self._sessions),
            model_version=latest.version if latest else 0,
            job=job_message(replace(current, state="running")) if current else None,
            round=round_,
            jobs_queued=sum(row.state == "queued" for row in jobs),
            refused=self._refused(),
        )

    async def ListJobs(self, request: pb.ListRequest, context: Any) -> pb.JobList:
        rows = await self._facts.db(self._store.jobs, _limit(request))
        jobs: list[pb.Job] = []
        size = 0
        for row in rows:
            if request.job_id in (0, row.job_id) and size < PAGE_BYTES:
                jobs.append(job_message(row))
                size += jobs[-1].ByteSize()
        return pb.JobList(jobs=jobs)

    async def ListRounds(self, request: pb.ListRequest, context: Any) -> pb.RoundList:
        if request.round:
            row = await self._facts.db(self._store.round, min(request.round, MAX_ID))
            return pb.RoundList(rounds=[round_message(row)] if row else [])
        return pb.RoundList(rounds=await self._newest_rounds(request))

    async def ListClients(self, request: pb.ListRequest, context: Any) -> pb.ClientList:
        counts = await self._facts.db(self._store.update_counts)
        clients = [
            pb.Client(
                client_id=session.client_id,
                state="watching" if session.matched else "joined",
                activity=fed.Activity.ValueType(session.activity),
                progress=session.progress,
                software=session.software,
                address=session.address,
                last_seen_at=rfc3339(session.last_seen),
                updates=counts.pop(session.client_id, 0),
                labels=session.labels,
            )
            for session in self._sessions
        ]
        away = [pb.Client(client_id=name, state="away", updates=count) for name, count in sorted(counts.items())]
        return pb.ClientList(clients=(clients + away)[: _limit(request)])

    async def ForgetClient(self, request: pb.ForgetClientRequest, context: Any) -> pb.ForgottenClient:
        name = request.client_id
        counts = await self._facts.db(self._store.update_counts)
        if name not in counts:
            raise NoSuchClient(f"no update of {printable(name[:128])!r} was ever accepted: see `flctl clients`")
        if self._sessions.get(name) is not None:
            raise ClientInUse(f"{name} is in session: stop its fl-client first")
        for open_ in self._rounds:
            if name in open_.accepted:
                raise ClientInUse(f"an update of {name} is in {open_.title}: wait until the round has ended")
        await self._facts.db(self._facts.forget_client, name)
        text = f"{name} was forgotten, with {counts[name]} updates"
        self._journal.write("client_forgotten", text, client_id=name)
        return pb.ForgottenClient(client_id=name, updates=counts[name])

    async def GetPrivacy(self, request: pb.GetPrivacyRequest, context: Any) -> pb.Privacy:
        if not 0 <= request.delta < 1:
            raise BadRequest(f"delta = {request.delta:g} must be above 0 and below 1", reason="bad_delta")
        charges = await self._facts.db(self._store.charges)
        jobs = await self._facts.db(self._store.jobs, _ALL)
        try:
            return await self._facts.work(privacy_message, charges, jobs, request.delta)
        except NoAccountant as error:
            raise NoEpsilon(str(error)) from error

    async def ListModels(self, request: pb.ListRequest, context: Any) -> pb.ModelList:
        return pb.ModelList(models=await self._facts.db(self._models, _limit(request)))

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.Event]:
        if request.after > MAX_ID:
            text = f"after = {request.after} cannot be the id of an event: give one of at most 2^63 - 1, or 0"
            raise BadRequest(text, reason="bad_event_id")
        after, oldest = request.after, self._journal.oldest
        replayed = []
        if 0 < after < oldest:
            replayed = await self._facts.db(self._stored_events, after, oldest)
            after = oldest - 1
        news = self._journal.follow(after)
        await context.send_initial_metadata(())  # tells the caller that it misses nothing from now on
        for event in replayed:
            yield event
        async for event in news:
            yield event

    async def ExportModel(self, request: fed.FetchModelRequest, context: Any) -> AsyncIterator[Any]:
        async with aclosing(self._streams.messages(request)) as messages:
            async for message in messages:
                yield message

    def _job(self, text: str, **fixed: int) -> Job:
        """Return the server's default job with the keys that `text`, a JSON object, sets, and with the fixed ones.

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

    async def _start(self, spec: Job, key: str) -> pb.StartReply:
        _check_key(key)
        if not key or await self._facts.db(self._store.job_of_key, key) is None:  # else it was checked before
            await self._check(spec)
        row, already = await self._jobs.start(spec, key)
        if already and not _is_of(row.spec, spec):
            raise OtherJob(
                f"the key {row.idempotency_key!r} belongs to job {row.job_id}, another one: choose a new key"
            )
        return pb.StartReply(job_id=row.job_id, already=already)

    async def _check(self, spec: Job) -> None:
        """Return if nothing is known that would make the job fail; else BadRequest, "bad_job"."""
        kept = await self._facts.db(self._store.models, _ALL)
        waiting = await self._facts.db(self._store.next_queued_job)
        runs_next = self._jobs.running is None and waiting is None
        try:
            await self._facts.heavy(partial(self._checks.check, runs_next=runs_next), spec, kept)
        except ConfigError as error:
            raise BadRequest(str(error), reason="bad_job") from error

    async def _newest_rounds(self, request: pb.ListRequest) -> list[pb.Round]:
        """Return the first of the wanted rounds, at least one: those of large fleets fill a message soon."""
        limit, job_id, below = _limit(request), min(request.job_id, MAX_ID), min(request.below, MAX_ID)
        found: list[pb.Round] = []
        size, at_once = 0, 1
        while len(found) < limit and size < PAGE_BYTES:
            rows = await self._facts.db(self._store.rounds, min(at_once, limit - len(found)), job_id, below)
            if not rows:
                break
            for row in rows:
                found.append(round_message(row))
                size += found[-1].ByteSize()
                if size >= PAGE_BYTES:
                    break
            below = found[-1].round
            # Few are read at a time, since updates wait for the store, too. But a transaction for each small round
            # would cost ten times as much as the round itself.
            at_once = max(1, min(_ROUNDS_AT_ONCE, _BYTES_AT_ONCE * len(found) // size))
        return found

    def _stored_events(self, after: int, before: int) -> list[pb.Event]:
        """Return the events between these ids, with the rounds that have ended since."""
        rows = [row for row in self._store.events_after(after, MOST_ROWS) if row.id < before]
        rounds = {row.round: self._store.round(row.round) for row in rows if row.round}
        return [event_message(row, rounds.get(row.round)) for row in rows]

    def _models(self, limit: int) -> list[pb.Model]:
        rows, best = self._store.models(limit), self._store.best_versions()
        return [
            model_message(
                row, self._store.evaluation_sum(row.version), self._store.round(row.round), best=row.version in best
            )
            for row in rows
        ]


def _table_in(text: str) -> dict[str, Any]:
    """Return the keys that `text`, a JSON object, sets; ConfigError or ValueError if it is not one."""
    if (size := len(text.encode())) > MAX_JOB_BYTES:
        raise ConfigError(f"the job is {size} bytes of JSON, above MAX_JOB_BYTES = {MAX_JOB_BYTES}")
    try:
        table = json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ConfigError(f"the job holds more than MAX_DEPTH = {MAX_DEPTH} lists and tables in each other") from None
    if not isinstance(table, dict):
        raise ConfigError("a job must be one JSON object")
    return table


def _whole(digits: str) -> int:
    """Return the number; of a very long one only the beginning, which is beyond all bounds just as well."""
    return int(digits[:100])


def _check_key(key: str) -> None:
    """Check that the idempotency key can be kept; BadRequest if it cannot."""
    try:
        if len(check_text(key)) > MOST_KEY:
            raise ValueError(f"must have at most {MOST_KEY} characters, not {len(key)}")
    except ValueError as error:
        raise BadRequest(f"idempotency_key: {error}", reason="bad_job") from None


def _defaults_for(table: Mapping[str, Any], defaults: Job) -> dict[str, Any]:
    """Return the defaults, without those tables and arguments that what `table` names would not understand."""
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
    """Return whether a stored specification, perhaps by an older version, is the job's."""
    try:
        known = Job.model_validate(stored)
    except ValidationError:
        return False
    if job.seed_is_open:  # it may have been chosen meanwhile
        return known.model_copy(update={"seed": job.seed}) == job
    return known == job and not known.seed_is_open


def _limit(request: pb.ListRequest) -> int:
    return min(request.limit or 100, MOST_ROWS)
