"""The gRPC services of fl-server, made of its parts."""

from collections.abc import Callable, Mapping, Sequence

from grpc import aio

from fedring.server.config import ServerConfig
from fedring.server.operator.client_records import ClientRecords
from fedring.server.operator.control import ControlService
from fedring.server.operator.job_requests import JobRequests
from fedring.server.operator.listings import Listings
from fedring.server.operator.status import StatusReport
from fedring.server.parts import KINDS, Parts
from fedring.server.service.commands import TrainCmdService
from fedring.server.service.downloads import ModelBlobService, ModelStreams
from fedring.server.service.upload_calls import UploadCalls
from fedring.server.service.uploads import ClientUpdateService, add_update_service
from fedring.server.service.workers import RendezvousService
from fedring.server.state.rows import ModelRow
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2, federation_pb2_grpc, rendezvous_pb2, rendezvous_pb2_grpc

_CLIENT_FILES = (federation_pb2.DESCRIPTOR, rendezvous_pb2.DESCRIPTOR, *(kind.wire for kind in KINDS))
CLIENT_SERVICES = tuple(
    service.full_name for file in _CLIENT_FILES if file for service in file.services_by_name.values()
)
"""The names of the services that clients call."""


def add_client_services(server: aio.Server, parts: Parts, streams: ModelStreams, config: ServerConfig) -> None:
    """Add the services that clients call to a server."""
    rounds, reports, sessions = parts.rounds, parts.reports, parts.sessions
    commands = TrainCmdService(rounds, reports, sessions, parts.facts, parts.journal, parts.sweep, config)
    federation_pb2_grpc.add_TrainCmdServiceServicer_to_server(commands, server)
    downloads = ModelBlobService(streams, reports, sessions, config)
    federation_pb2_grpc.add_ModelBlobServiceServicer_to_server(downloads, server)
    rendezvous_pb2_grpc.add_RendezvousServiceServicer_to_server(RendezvousService(rounds, sessions, config), server)
    for kind in parts.kinds:
        kind.add_services(server)
    add_update_service(update_service(parts, config), server)


def model_streams(parts: Parts) -> ModelStreams:
    """Make the streams of models for clients and operators."""
    return ModelStreams(parts.models.downloads, parts.facts, parts.publisher.damaged)


def update_service(parts: Parts, config: ServerConfig) -> ClientUpdateService:
    """Make the service that takes updates."""
    versions, facts, journal = parts.models.versions, parts.facts, parts.journal
    calls = UploadCalls(parts.rounds, parts.acceptor, versions, facts, journal, config.max_transfers)
    return ClientUpdateService(calls, parts.reports, parts.sessions, parts.metrics.updates, config)


def control_service(
    parts: Parts,
    streams: ModelStreams,
    config: ServerConfig,
    *,
    refused: Callable[[], Mapping[str, int]],
    not_serving: Callable[[], str] = str,
) -> ControlService:
    """Make the service that flctl calls.

    Args:
        parts: of the server.
        streams: of models.
        config: of the server.
        refused: returns the calls that the ports have refused, by reason.
        not_serving: returns why clients are not served; empty if they are.
    """

    def check(job: Job, kept: Sequence[ModelRow], *, runs_next: bool) -> str:
        from fedring.server.operator.job_checks import JobChecks  # imports torch

        return JobChecks(config, parts.models.load()).check(job, kept, runs_next=runs_next)

    return ControlService(
        JobRequests(parts.jobs, parts.rounds, parts.facts, check, config.job),
        Listings(parts.facts),
        ClientRecords(parts.rounds, parts.sessions, parts.facts, parts.journal),
        StatusReport(parts.rounds, parts.jobs, parts.sessions, parts.facts, refused, not_serving),
        parts.journal,
        streams,
    )
