"""A typed client of fl-server's control port. Every verb, and many a test, talks through it."""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from fedring.ctl.failure import Failure, Unreachable, failure_of
from fedring.rpc.channel import open_sync_channel
from fedring.v1 import control_pb2 as pb
from fedring.v1.control_pb2_grpc import ControlServiceStub, TokenServiceStub
from fedring.v1.federation_pb2 import FetchModelRequest, ModelHeader

ENDED = frozenset({"completed", "failed", "stopped"})
"""States of a job that it does not leave."""

_USUAL_ROWS = 100
_MOST_ROWS = 1000  # in one answer of the server
_ATTEMPTS = 3  # of a call that starts something; the key makes the later ones harmless
_R = TypeVar("_R")


class Events:
    """The events from the moment of its making on, in order, until `cancel` or the server's end."""

    def __init__(self, call: Any, address: str, after: int) -> None:
        self._call = call  # grpc's stream of Event
        self._address = address
        self.last = after
        """Id of the last event that was read."""

    def __iter__(self) -> Iterator[pb.Event]:
        try:
            with _translated(self._address):
                for event in self._call:
                    self.last = event.id
                    yield event
        except Unreachable:
            return

    def cancel(self) -> None:
        """End the stream, from any thread: its reader gets a Failure."""
        self._call.cancel()


class Control:
    """A connection to the control port at `address`, "host:port": over the channel, or in plaintext."""

    def __init__(self, address: str, *, channel: grpc.Channel | None = None, timeout_seconds: float = 10.0) -> None:
        self.address = address
        self._timeout = timeout_seconds
        self._channel = channel or open_sync_channel(address)
        self._stub = ControlServiceStub(self._channel)
        self._tokens = TokenServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End every call and the connection."""
        self._channel.close()

    def start_job(self, job: Mapping[str, Any], *, key: str = "") -> pb.StartReply:
        """The job is queued, once however often it is called with the same `key` (default: one of its own)."""
        request = pb.StartJobRequest(job=json.dumps(job), idempotency_key=key or str(uuid.uuid4()))
        return self._start(lambda: self._stub.StartJob(request, timeout=self._timeout))

    def start_round(self, overrides: Mapping[str, Any], *, key: str = "") -> pb.StartReply:
        """One round with the server's defaults and `overrides` is queued; `key` as in start_job."""
        request = pb.StartRoundRequest(overrides=json.dumps(overrides), idempotency_key=key or str(uuid.uuid4()))
        return self._start(lambda: self._stub.StartRound(request, timeout=self._timeout))

    def stop_round(self) -> pb.StopReply:
        """The round in progress is ended."""
        return self._call(lambda: self._stub.StopRound(pb.StopRoundRequest(), timeout=self._timeout))

    def stop_job(self, job_id: int = 0) -> pb.StopReply:
        """The job is ended, 0 = the running one, and its round with it."""
        request = pb.StopJobRequest(job_id=job_id)
        return self._call(lambda: self._stub.StopJob(request, timeout=self._timeout), named=job_id > 0)

    def status(self, *, wait_seconds: float = 0.0) -> pb.Status:
        """What the server does now; with `wait_seconds`, a server that is not there yet is waited for."""
        timeout = max(wait_seconds, self._timeout)
        return self._call(
            lambda: self._stub.GetStatus(pb.GetStatusRequest(), timeout=timeout, wait_for_ready=wait_seconds > 0)
        )

    def jobs(self, *, job_id: int = 0, limit: int = 0) -> list[pb.Job]:
        """Jobs, newest first; `job_id` = only this one, `limit` 0 = 100."""
        request = pb.ListRequest(limit=limit, job_id=job_id)
        return list(self._call(lambda: self._stub.ListJobs(request, timeout=self._timeout)).jobs)

    def rounds(self, *, job_id: int = 0, number: int = 0, limit: int = 0) -> list[pb.Round]:
        """Rounds, newest first; `job_id` and `number` = only of and this one, `limit` 0 = 100."""
        request = pb.ListRequest(limit=limit or _USUAL_ROWS, job_id=job_id, round=number)
        rounds: list[pb.Round] = []
        while request.limit:
            page = self._call(lambda: self._stub.ListRounds(request, timeout=self._timeout)).rounds
            if not page or (rounds and page[0].round >= rounds[-1].round):  # an older server knows no pages
                break
            rounds += page
            if number:
                break
            request.limit, request.below = request.limit - len(page), page[-1].round
        return rounds

    def clients(self, *, limit: int = 0) -> list[pb.Client]:
        """The clients that the server knows."""
        request = pb.ListRequest(limit=limit)
        return list(self._call(lambda: self._stub.ListClients(request, timeout=self._timeout)).clients)

    def forget_client(self, client_id: str) -> pb.ForgottenClient:
        """Forget a client that is away; returns what it was."""
        request = pb.ForgetClientRequest(client_id=client_id)
        return self._call(lambda: self._stub.ForgetClient(request, timeout=self._timeout))

    def models(self, *, limit: int = 0) -> list[pb.Model]:
        """The model versions that the server keeps, newest first."""
        request = pb.ListRequest(limit=limit)
        return list(self._call(lambda: self._stub.ListModels(request, timeout=self._timeout)).models)

    def create_token(self, role: str, name: str, *, valid_seconds: int = 0) -> pb.CreatedToken:
        """A new token, whose secret nobody can ask for again; `valid_seconds` 0 = for ever."""
        request = pb.CreateTokenRequest(role=role, name=name, valid_seconds=valid_seconds)
        return self._call(lambda: self._tokens.CreateToken(request, timeout=self._timeout))

    def tokens(self) -> list[pb.Token]:
        """All tokens, oldest first."""
        return list(self._call(lambda: self._tokens.ListTokens(pb.ListTokensRequest(), timeout=self._timeout)).tokens)

    def revoke_token(self, token_id: str) -> pb.Token:
        """The token, which is refused from now on."""
        request = pb.RevokeTokenRequest(token_id=token_id)
        return self._call(lambda: self._tokens.RevokeToken(request, timeout=self._timeout))

    def job(self, job_id: int) -> pb.Job:
        """The job; Failure if the server knows none of this id."""
        for job in self.jobs(job_id=job_id, limit=_MOST_ROWS):
            if job.job_id == job_id:
                return job
        raise Failure(f"fl-server at {self.address} knows no job {job_id}: see `flctl status`")

    def events(self, after: int = 0) -> Events:
        """The events after the id `after`, 0 = from now on: none is missed that happens after the return."""
        call = self._stub.WatchEvents(pb.WatchEventsRequest(after=after))
        call.initial_metadata()  # the server has taken the call
        self.status()  # and has gone on from there; it also tells if there is no server
        return Events(call, self.address, after)

    def watch(self, *, patience_seconds: float = 60.0) -> Iterator[pb.Event]:
        """Every event from now on; a server that restarts is waited for."""
        for events in self._streams(None, patience_seconds):
            yield from events

    def follow_job(
        self, job_id: int, events: Events | None = None, *, patience_seconds: float = 60.0
    ) -> Iterator[pb.Event]:
        """The job's events, and the clients', up to its "job_ended"; a server that restarts is waited for.

        Nothing is missed if `events` were opened before the job was started.
        """
        for stream in self._streams(events, patience_seconds):
            if stream is not events and (job := self.job(job_id)).state in ENDED:
                yield pb.Event(kind="job_ended", job_id=job_id, text=f"job {job_id} {job.state}")
                return
            for event in stream:
                if event.job_id in (0, job_id):
                    yield event
                if event.kind == "job_ended" and event.job_id == job_id:
                    return

    def export_model(self, version: int, path: Path) -> ModelHeader:
        """`path` holds the model, 0 = the newest, as safetensors in its own dtypes."""
        from fedring.ctl.model_export import write_model  # it needs numpy, which most verbs do not

        with _translated(self.address, named=version > 0):
            return write_model(self._stub.ExportModel(FetchModelRequest(version=version)), path)

    def _streams(self, first: Events | None, patience_seconds: float) -> Iterator[Events]:
        """`first`, or a new stream, and after its end one that goes on where it ended, again and again."""
        events = first or self.events()
        while True:
            try:
                yield events
            finally:
                events.cancel()
            if not patience_seconds:
                raise Unreachable(f"fl-server at {self.address} went away")
            self.status(wait_seconds=patience_seconds)
            events = self.events(after=events.last)

    def _start(self, call: Callable[[], pb.StartReply]) -> pb.StartReply:
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._call(call)
            except Unreachable:
                self.status()  # its own retries are the pause; if they do not help, it says so
        return self._call(call)

    def _call(self, call: Callable[[], _R], *, named: bool = True) -> _R:
        with _translated(self.address, named=named):
            return call()


@contextmanager
def _translated(address: str, *, named: bool = True) -> Iterator[None]:
    """Failed calls within leave as Failure; `named`: the user has named what they ask for."""
    try:
        yield
    except grpc.RpcError as error:
        raise failure_of(error, address, named=named) from error
