"""ControlService, which flctl calls on a port of its own."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fedring.rpc.errors import BadRequest
from fedring.server.operator.client_records import ClientRecords
from fedring.server.operator.job_requests import JobRequests
from fedring.server.operator.listings import MAX_ID, Listings
from fedring.server.operator.status import StatusReport
from fedring.server.service.downloads import ModelStreams
from fedring.server.state.journal import Journal
from fedring.v1 import control_pb2 as pb
from fedring.v1 import control_pb2_grpc as rpc
from fedring.v1 import federation_pb2 as fed


class ControlService(rpc.ControlServiceServicer):
    """Serves operators: jobs, rounds, clients, models, events."""

    def __init__(
        self,
        requests: JobRequests,
        listings: Listings,
        clients: ClientRecords,
        status: StatusReport,
        journal: Journal,
        streams: ModelStreams,
    ) -> None:
        self._requests, self._listings, self._clients = requests, listings, clients
        self._status, self._journal, self._streams = status, journal, streams

    async def StartRound(self, request: pb.StartRoundRequest, context: Any) -> pb.StartReply:
        return await self._requests.start_round(request)

    async def StartJob(self, request: pb.StartJobRequest, context: Any) -> pb.StartReply:
        return await self._requests.start_job(request)

    async def StopRound(self, request: pb.StopRoundRequest, context: Any) -> pb.StopReply:
        return await self._requests.stop_round(request)

    async def MoveJob(self, request: pb.MoveJobRequest, context: Any) -> pb.JobList:
        return await self._requests.move_job(request)

    async def StopJob(self, request: pb.StopJobRequest, context: Any) -> pb.StopReply:
        return await self._requests.stop_job(request)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.Status:
        return await self._status.message()

    async def ListJobs(self, request: pb.ListRequest, context: Any) -> pb.JobList:
        return await self._listings.jobs(request)

    async def ListRounds(self, request: pb.ListRequest, context: Any) -> pb.RoundList:
        return await self._listings.rounds(request)

    async def ListClients(self, request: pb.ListRequest, context: Any) -> pb.ClientList:
        return await self._clients.list(request)

    async def ForgetClient(self, request: pb.ForgetClientRequest, context: Any) -> pb.ForgottenClient:
        return await self._clients.forget(request)

    async def GetPrivacy(self, request: pb.GetPrivacyRequest, context: Any) -> pb.Privacy:
        return await self._listings.privacy(request)

    async def ListModels(self, request: pb.ListRequest, context: Any) -> pb.ModelList:
        return await self._listings.models(request)

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.Event]:
        if request.after > MAX_ID:
            text = f"after = {request.after} cannot be the id of an event: give one of at most 2^63 - 1, or 0"
            raise BadRequest(text, reason="bad_event_id")
        after, oldest = request.after, self._journal.oldest
        news = self._journal.follow(after)  # from the oldest in memory on
        await context.send_initial_metadata(())  # tells the caller that it misses nothing from now on
        while 0 < after < oldest - 1:
            stored = await self._listings.events(after, oldest)
            for event in stored:
                yield event
            after = stored[-1].id if stored else oldest
        async with aclosing(news):
            async for events in news:
                if request.gathered and len(events) > 1:
                    together = pb.Event(later=events[1:])
                    together.MergeFrom(events[0])
                    yield together
                    continue
                for event in events:
                    yield event

    async def ExportModel(self, request: fed.FetchModelRequest, context: Any) -> AsyncIterator[Any]:
        async with aclosing(self._streams.messages(request)) as messages:
            async for message in messages:
                yield message
