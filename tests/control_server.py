"""A small, scripted, real ControlService, for tests of flctl."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fedring.codec import Encoding, Entry, Schema, Vectors, encode, encode_buffers
from fedring.rpc.boundary import Boundary
from fedring.rpc.channel import make_server
from fedring.rpc.errors import FedringError, Unavailable
from fedring.v1 import control_pb2 as pb
from fedring.v1 import control_pb2_grpc as rpc
from fedring.v1 import federation_pb2 as fb

SECONDS = 60.0
ENTRIES = (Entry("w", (2, 3), "bfloat16", "parameter"), Entry("seen", (), "int64", "buffer"))
ROUND = pb.Round(
    round=7, job_id=1, job_round=2, phase="published", selected=2, delivered=2, model_version=8, seconds=1.5,
    upload_bytes=3000, download_bytes=5000, eval_correct=9, eval_total=10, eval_loss_sum=2.5,
    clients=[pb.RoundClient(client_id=name, num_samples=5, upload_bytes=1500) for name in ("ann", "bob")],
)  # fmt: skip


class Script(rpc.ControlServiceServicer):
    """A control service without clients, which reports a job's rounds as soon as the job is started."""

    def __init__(self) -> None:
        self.refuse: list[FedringError] = []  # raised by the next calls, in order
        self.started: list[tuple[str, dict[str, Any]]] = []  # key and job of every call
        self.jobs: dict[str, pb.Job] = {}
        self.outcome: tuple[str, str] = ("completed", "")
        self.break_after = 0  # how many events end a stream, once; 0 for none
        self.events: list[pb.Event] = []
        self.break_with: FedringError | None = None
        self.more = asyncio.Condition()
        self.watched = asyncio.Event()
        self.damage = False
        self.asked = 0  # how often for the status
        self.restarting = range(0)  # which of those calls find no server
        self.not_serving = ""
        self.rounds = [ROUND]  # newest first
        self.models = [pb.Model(version=8, round=7, digest="blake3-" + "ab" * 32, parameters=6, accuracy=0.9)]

    async def StartJob(self, request: pb.StartJobRequest, context: Any) -> pb.StartReply:
        return await self._start(request.idempotency_key, json.loads(request.job))

    async def StartRound(self, request: pb.StartRoundRequest, context: Any) -> pb.StartReply:
        return await self._start(request.idempotency_key, json.loads(request.overrides))

    async def MoveJob(self, request: pb.MoveJobRequest, context: Any) -> pb.JobList:
        raise NotImplementedError

    async def StopJob(self, request: pb.StopJobRequest, context: Any) -> pb.StopReply:
        self._maybe_refuse()
        return pb.StopReply(job_id=request.job_id or 1, round=7)

    async def StopRound(self, request: pb.StopRoundRequest, context: Any) -> pb.StopReply:
        return pb.StopReply(job_id=1, round=7)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.Status:
        self.asked += 1
        if self.asked in self.restarting:
            raise Unavailable("it restarts")
        return pb.Status(
            run_id="run", version="1", clients_watching=2, model_version=8, round=ROUND, not_serving=self.not_serving
        )

    async def ListJobs(self, request: pb.ListRequest, context: Any) -> pb.JobList:
        return pb.JobList(jobs=self.jobs.values())

    async def ListRounds(self, request: pb.ListRequest, context: Any) -> pb.RoundList:
        found = [
            each
            for each in self.rounds
            if request.job_id in (0, each.job_id)
            and request.round in (0, each.round)
            and not 0 < request.below <= each.round
        ]
        return pb.RoundList(rounds=found[: request.limit or 100])

    async def ListClients(self, request: pb.ListRequest, context: Any) -> pb.ClientList:
        training = pb.Client(client_id="ann", state="watching", activity=fb.ACTIVITY_TRAINING, progress=0.5)
        return pb.ClientList(clients=[training, pb.Client(client_id="bob", state="away")])

    async def ForgetClient(self, request: pb.ForgetClientRequest, context: Any) -> pb.ForgottenClient:
        self._maybe_refuse()
        return pb.ForgottenClient(client_id=request.client_id, updates=3)

    async def GetPrivacy(self, request: pb.GetPrivacyRequest, context: Any) -> pb.Privacy:
        self._maybe_refuse()
        job = pb.PrivacyOfJob(job_id=3, name="wards", rounds=50, noise_multiplier=5.0, epsilon=7.08)
        return pb.Privacy(delta=request.delta or 1e-5, epsilon=7.08, rounds=50, rounds_without=2, jobs=[job])

    async def ListModels(self, request: pb.ListRequest, context: Any) -> pb.ModelList:
        return pb.ModelList(models=self.models[: request.limit or 100])

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.Event]:
        place = next((i for i, e in enumerate(self.events) if request.after and e.id > request.after), len(self.events))
        await context.send_initial_metadata(())
        self.watched.set()
        while True:
            async with self.more:
                while len(self.events) == place:
                    await self.more.wait()
            yield self.events[place]
            place += 1
            if place == self.break_after:
                self.break_after = 0
                if self.break_with:
                    raise self.break_with
                return

    async def ExportModel(self, request: fb.FetchModelRequest, context: Any) -> AsyncIterator[fb.ModelBlob]:
        self._maybe_refuse()
        schema = Schema(ENTRIES)
        vectors = Vectors(np.arange(6, dtype=np.float32), np.array([2.0**40]))
        buffers, parameters = encode_buffers(vectors.buffers), encode(vectors.parameters, Encoding("fp32"))
        payload = buffers + parameters
        packets = [
            fb.Packet(vector=fb.VECTOR_BUFFERS, kind=fb.KIND_WEIGHTS, encoding="fp64", bytes=len(buffers)),
            fb.Packet(vector=fb.VECTOR_PARAMETERS, kind=fb.KIND_WEIGHTS, encoding="fp32", bytes=len(parameters)),
        ]
        digest = vectors.digest()
        yield fb.ModelBlob(
            header=fb.ModelHeader(
                version=request.version or 8,
                schema=schema.json,
                schema_hash=schema.hash,
                packets=packets,
                total_bytes=len(payload),
                model_digest=digest,
            )
        )
        if self.damage:
            payload = payload[:-2] + b"\x01\x01"
        yield fb.ModelBlob(chunk=fb.Chunk(offset=0, data=payload[:20]))
        yield fb.ModelBlob(chunk=fb.Chunk(offset=20, data=payload[20:]))

    def _maybe_refuse(self) -> None:
        if self.refuse:
            raise self.refuse.pop(0)

    async def _start(self, key: str, job: dict[str, Any]) -> pb.StartReply:
        self.started.append((key, job))
        self._maybe_refuse()
        if already := self.jobs.get(key):
            return pb.StartReply(job_id=already.job_id, already=True)
        number = len(self.jobs) + 1
        state, reason = self.outcome
        self.jobs[key] = pb.Job(job_id=number, state=state, reason=reason, rounds=1, rounds_done=1)
        for kind in ("job_started", "round_started", "round_published", "round_evaluated", "job_ended"):
            round_ = ROUND if kind.startswith("round") else None
            event = pb.Event(id=len(self.events) + 1, kind=kind, job_id=number, text=f"{kind} now", state=round_)
            self.events.append(event)
        async with self.more:
            self.more.notify_all()
        return pb.StartReply(job_id=number)


class Server:
    """Serves the script on a free port, with an event loop in a thread of its own."""

    def __init__(self) -> None:
        started = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)))
        self.thread.start()
        started.wait()

    def run(self, coroutine: Any) -> Any:
        """Run the coroutine on the server's loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(SECONDS)

    def set_health(self, status: Any) -> None:
        self.run(self.health.set("", status))

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self.thread.join()

    async def _serve(self, started: threading.Event) -> None:
        self.loop, self._stop, self.script = asyncio.get_running_loop(), asyncio.Event(), Script()
        self.server = make_server([Boundary()], max_streams=16)
        rpc.add_ControlServiceServicer_to_server(self.script, self.server)
        untyped: Any = health
        self.health = untyped.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        started.set()
        await self._stop.wait()
        await self.server.stop(None)
