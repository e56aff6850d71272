"""A typed client of fl-server's control port.

The verbs of flctl and tests use it.
"""

import json
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from fedring.control.caller import ControlCaller, translated
from fedring.control.failure import Failure, Unreachable
from fedring.control.tokens import ControlTokens
from fedring.rpc.channel import open_sync_channel
from fedring.rpc.leader_term import NewestTerm, refusing_old_terms_sync
from fedring.rpc.tls import PLAINTEXT, Tls
from fedring.v1 import control_pb2 as pb
from fedring.v1.control_pb2_grpc import ControlServiceStub
from fedring.v1.federation_pb2 import FetchModelRequest, ModelHeader
from fedring.v1.job_pb2 import SignedJob

ENDED = frozenset({"completed", "failed", "stopped"})
"""The final states of a job."""

_DEFAULT_ROWS = 100

MAX_ROWS = 1000
"""The most rows of one answer of the server."""
_START_SECONDS = 120.0  # for a call that starts a job, because the server builds the job's model to check it
_ATTEMPTS = 3  # of a call that starts a job; its idempotency key makes a repetition harmless


class Events:
    """A stream of the server's events, in order.

    It ends at `cancel`, or when the server goes away.

    Control.events makes it.
    """

    def __init__(self, call: Any, address: str, after: int) -> None:
        self._call = call  # a gRPC stream of Event
        self._address = address
        self._waiting: deque[pb.Event] = deque()  # that came together with the last one
        self.last = after
        """Id of the last event that was read, or the one after which the stream began."""

    def __iter__(self) -> Iterator[pb.Event]:
        try:
            with translated(self._address):
                while True:
                    while self._waiting:  # also those that an iteration before this one has left
                        event = self._waiting.popleft()
                        self.last = event.id
                        yield event
                    if (first := next(self._call, None)) is None:
                        return
                    later = list(first.later)
                    del first.later[:]
                    self._waiting.extend((first, *later))
        except Unreachable:
            return

    def cancel(self) -> None:
        """End the stream, from any thread.

        Its reader gets a Failure.
        """
        self._call.cancel()


class Control:
    """A connection to a server's control port.

    Every method raises a Failure if the call fails.

    Args:
        address: "host:port" of the control port.
        channel: The channel to use, which `close` closes; by default one in plaintext.
        timeout_seconds: Longest time that a call may take.
        tls: The certificates of `channel`, with which to find out why it cannot reach the server, and to sign jobs.
    """

    def __init__(
        self,
        address: str,
        *,
        channel: grpc.Channel | None = None,
        timeout_seconds: float = 10.0,
        tls: Tls = PLAINTEXT,
    ) -> None:
        self.address, self.tls = address, tls
        self._channel = refusing_old_terms_sync(channel or open_sync_channel(address), NewestTerm())
        self._stub = ControlServiceStub(self._channel)
        self._call = ControlCaller(address, timeout_seconds, tls)
        self.tokens = ControlTokens(self._call, self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all calls, and close the connection."""
        self._channel.close()

    def start_job(self, job: Mapping[str, Any], *, key: str = "") -> pb.StartReply:
        """Queue a job.

        Args:
            job: Keys of the job; the server's defaults are used for others.
            key: Idempotency key: a job is queued once, however often it is sent with the same key. By default every
                call has a new key.
        """
        request = pb.StartJobRequest(job=json.dumps(job), idempotency_key=key or str(uuid.uuid4()))
        return _start(self, lambda: self._call(self._stub.StartJob, request, at_least_seconds=_START_SECONDS))

    def start_signed(self, signed: SignedJob, *, key: str = "") -> pb.StartReply:
        """Queue a signed job.

        `key` is as in start_job.
        """
        request = pb.StartJobRequest(signed=signed, idempotency_key=key or str(uuid.uuid4()))
        return _start(self, lambda: self._call(self._stub.StartJob, request, at_least_seconds=_START_SECONDS))

    def start_round(self, overrides: Mapping[str, Any], *, key: str = "") -> pb.StartReply:
        """Queue a job of one round.

        It has the server's defaults and `overrides`; `key` is as in start_job.
        """
        request = pb.StartRoundRequest(overrides=json.dumps(overrides), idempotency_key=key or str(uuid.uuid4()))
        return _start(self, lambda: self._call(self._stub.StartRound, request, at_least_seconds=_START_SECONDS))

    def stop_round(self, job_id: int = 0) -> pb.StopReply:
        """End the round in progress of a job, which continues.

        0 is the only job that runs.
        """
        return self._call(self._stub.StopRound, pb.StopRoundRequest(job_id=job_id))

    def move_job(self, job_id: int, *, before: int = 0, last: bool = False) -> list[pb.Job]:
        """Move a queued job, and return the queue in its order.

        Args:
            job_id: The job.
            before: The queued job that it is to be ahead of; 0 = of all.
            last: Whether it is to be behind all others instead.
        """
        request = pb.MoveJobRequest(job_id=job_id, before=before, last=last)
        return list(self._call(self._stub.MoveJob, request).jobs)

    def stop_job(self, job_id: int = 0) -> pb.StopReply:
        """End a job with its round.

        0 is the only job that runs.
        """
        request = pb.StopJobRequest(job_id=job_id)
        return self._call(self._stub.StopJob, request, named=job_id > 0)

    def status(self, *, wait_seconds: float = 0.0) -> pb.Status:
        """Return the server's status.

        Args:
            wait_seconds: How long to wait for a server that cannot be reached yet.
        """
        return self._call(
            self._stub.GetStatus,
            pb.GetStatusRequest(),
            at_least_seconds=wait_seconds,
            wait_for_ready=wait_seconds > 0,
        )

    def jobs(self, *, job_id: int = 0, limit: int = 0) -> list[pb.Job]:
        """Return jobs, newest first.

        Args:
            job_id: Return only this job; 0 = all jobs.
            limit: Most jobs to return; 0 = 100.
        """
        request = pb.ListRequest(limit=limit, job_id=job_id)
        return list(self._call(self._stub.ListJobs, request).jobs)

    def rounds(
        self, *, job_id: int = 0, number: int = 0, limit: int = 0, after: int = 0, below: int = 0
    ) -> list[pb.Round]:
        """Return rounds, newest first.

        Args:
            job_id: Return only rounds of this job; 0 = of all jobs.
            number: Return only the round of this number; 0 = all rounds.
            limit: Most rounds to return; 0 = 100.
            after: Return only rounds of higher numbers.
            below: Return only rounds of lower numbers; 0 = all.
        """
        request = pb.ListRequest(limit=limit or _DEFAULT_ROWS, job_id=job_id, round=number, below=below)
        rounds: list[pb.Round] = []
        while request.limit:
            page = self._call(self._stub.ListRounds, request).rounds
            if not page or (rounds and page[0].round >= rounds[-1].round):  # an older server ignores `below`
                break
            rounds += page
            if number or page[-1].round <= after + 1:
                break
            request.limit, request.below = request.limit - len(page), page[-1].round
        return [each for each in rounds if each.round > after and not 0 < below <= each.round]

    def clients(self, *, limit: int = 0, search: str = "", state: str = "", skip: int = 0) -> list[pb.Client]:
        """Return the clients that the server knows.

        Args: see `client_page`.
        """
        return list(self.client_page(limit=limit, search=search, state=state, skip=skip).clients)

    def client_page(self, *, limit: int = 0, search: str = "", state: str = "", skip: int = 0) -> pb.ClientList:
        """Return some of the clients, and how many there are.

        Args:
            limit: The most clients to return; 0 = the server's default.
            search: A text that their ids contain.
            state: Their state: "watching", "joined" or "away"; empty = any.
            skip: How many of them to leave out at the beginning.
        """
        return self._call(self._stub.ListClients, pb.ListRequest(limit=limit, search=search, state=state, skip=skip))

    def forget_client(self, client_id: str) -> pb.ForgottenClient:
        """Make the server forget a client that is not in session.

        Returns the forgotten rows and files.
        """
        request = pb.ForgetClientRequest(client_id=client_id)
        return self._call(self._stub.ForgetClient, request)

    def privacy(self, delta: float = 0.0) -> pb.Privacy:
        """Return the privacy that clients have spent, for this delta.

        Args:
            delta: The delta; 0 = that of the newest job with [dp].
        """
        return self._call(self._stub.GetPrivacy, pb.GetPrivacyRequest(delta=delta))

    def models(self, *, limit: int = 0) -> list[pb.Model]:
        """Return the model versions that the server keeps, newest first.

        Args:
            limit: The most versions to return; 0 = the server's default.
        """
        request = pb.ListRequest(limit=limit)
        return list(self._call(self._stub.ListModels, request).models)

    def job(self, job_id: int) -> pb.Job:
        """Return the job.

        Raises:
            Failure: The server has no job of this id.
        """
        for job in self.jobs(job_id=job_id, limit=MAX_ROWS):
            if job.job_id == job_id:
                return job
        raise Failure(f"fl-server at {self.address} has no job {job_id}: see `flctl status`")

    def events(self, after: int = 0) -> Events:
        """Return the events after the one with the id `after`.

        If that is 0, they are those from now on.

        No event is missed that happens after this method has returned.
        """
        call = self._stub.WatchEvents(pb.WatchEventsRequest(after=after, gathered=True))
        call.initial_metadata()  # waits until the server has received the call
        self.status()  # waits until the server has subscribed the call; raises if there is no server
        return Events(call, self.address, after)

    def watch(self, *, patience_seconds: float = 60.0) -> Iterator[pb.Event]:
        """Yield every event from now on.

        Args:
            patience_seconds: How long to wait for a server that restarts.
        """
        for events in _streams(self, None, patience_seconds):
            yield from events

    def follow_job(
        self, job_id: int, events: Events | None = None, *, patience_seconds: float = 60.0
    ) -> Iterator[pb.Event]:
        """Yield the events of a job and of clients, up to "job_ended".

        Args:
            job_id: The job.
            events: Events that were opened before the job was started, so that none is missed; by default new ones.
            patience_seconds: How long to wait for a server that restarts; 0 = raise Unreachable.
        """
        for stream in _streams(self, events, patience_seconds):
            if stream is not events and (job := self.job(job_id)).state in ENDED:
                yield pb.Event(kind="job_ended", job_id=job_id, text=f"job {job_id} {job.state}")
                return
            for event in stream:
                if event.job_id in (0, job_id):
                    yield event
                if event.kind == "job_ended" and event.job_id == job_id:
                    return

    def export_model(self, version: int, path: Path, *, exact: bool = False) -> ModelHeader:
        """Write a model version to a safetensors file.

        The tensors have the model's own dtypes.

        Args:
            version: The version.
            path: The file.
            exact: Add the rest that `download_encoding` left out of the model that clients train from.
        """
        from fedring.control.model_export import write_model  # imports numpy, which most verbs do not need

        with translated(self.address, named=version > 0):
            stream = self._stub.ExportModel(FetchModelRequest(version=version, exact=exact))
            return write_model(stream, path, exact=exact)


def check_completed(job: pb.Job) -> None:
    """Check that a job has completed.

    Raises:
        Failure: It did not; the sentence says why.
    """
    if job.state != "completed":
        raise Failure(f"job {job.job_id} {job.state}{': ' + job.reason if job.reason else ''}")


def _streams(control: Control, first: Events | None, patience_seconds: float) -> Iterator[Events]:
    """Yield `first` or a new stream, then streams that continue it.

    Each begins after the last event of the one before.
    """
    events = first or control.events()
    while True:
        try:
            yield events
        finally:
            events.cancel()
        if not patience_seconds:
            raise Unreachable(f"fl-server at {control.address} has ended, or cannot be reached any more")
        control.status(wait_seconds=patience_seconds)
        events = control.events(after=events.last)


def _start(control: Control, call: Callable[[], pb.StartReply]) -> pb.StartReply:
    for _ in range(_ATTEMPTS - 1):
        try:
            return call()
        except Unreachable:
            control.status()  # gRPC waits and connects again meanwhile; raises if that does not help
    return call()
