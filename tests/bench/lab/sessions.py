"""Many sessions in one process: python -m tests.bench.lab.sessions '{"server": ..., "first": 0, "count": 1000, ...}'.

They speak fl-client's wire, and nothing of torch is imported: what a session costs here is little, so that the server
is what is measured. Each has a connection of its own. A client that is drawn answers with a made update. Prints a JSON
line whenever the number of sessions has changed.
"""

import asyncio
import json
import os
import random
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import numpy as np
from cryptography.hazmat.primitives.serialization import Encoding as Pem
from cryptography.hazmat.primitives.serialization import NoEncryption, PrivateFormat
from grpc import aio

from fedring.client.session.retry import most_seconds
from fedring.codec import Encoding, encode
from fedring.codec.digest import name_of
from fedring.ctl.admin.authority import load_authority, names_for
from fedring.daemon.descriptors import raise_limit
from fedring.rpc.channel import CLIENT_OPTIONS
from fedring.rpc.contract import PROTOCOL, SESSION_KEY
from fedring.rpc.errors import MOST_AWAY, ComeBack, InLine, reason_of, retry_seconds_of
from fedring.rpc.identity import Identity, Role
from fedring.v1 import federation_pb2 as pb
from fedring.v1.federation_pb2_grpc import ClientUpdateServiceStub, TrainCmdServiceStub
from tests.made_updates import header_of, named_offer

_JOIN_SECONDS = 10.0  # as fl-client waits
_HANG_UP_SECONDS = 5.0  # as above
_REPORT_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Plan:
    """The sessions of one process.

    Attributes:
        server: its address.
        first: the number of the first client.
        count: how many there are.
        parameters: of the updates that they send.
        ramp_seconds: over which their first calls are spread.
        pki: the folder of the authority that signs their certificates; empty = plaintext.
    """

    server: str
    first: int
    count: int
    parameters: int
    ramp_seconds: float = 0.0
    pki: str = ""


class Host:
    """All sessions of this process, and what they share."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.watching = self.accepted = self.sent_away = 0
        self.payload = encode(np.full(plan.parameters, 1e-3, np.float32), Encoding("fp32"))
        self.digest = name_of(self.payload)
        self._authority = load_authority(Path(plan.pki)) if plan.pki else None

    def channel(self, name: str) -> aio.Channel:
        """Open a connection for a client, with a certificate of its own."""
        options = [*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        if self._authority is None:
            return aio.insecure_channel(self.plan.server, options=options)
        identity = Identity(Role.CLIENT, name)
        certificate, key = self._authority.sign(identity, names_for(identity, []), days=1)
        private = key.private_bytes(Pem.PEM, PrivateFormat.PKCS8, NoEncryption())
        root = self._authority.certificate.public_bytes(Pem.PEM)
        credentials = grpc.ssl_channel_credentials(root, private, certificate.public_bytes(Pem.PEM))
        return aio.secure_channel(self.plan.server, credentials, options=options)

    async def run(self) -> None:
        """Keep up all sessions until the process ends."""
        reports = asyncio.create_task(self._report())
        plan = self.plan
        async with asyncio.TaskGroup() as tasks:
            for number in range(plan.first, plan.first + plan.count):
                tasks.create_task(Client(self, f"client-{number:06}").run())
                await asyncio.sleep(plan.ramp_seconds / plan.count)
        await reports

    async def _report(self) -> None:
        told = None
        while True:
            now = {"watching": self.watching, "accepted": self.accepted, "sent_away": self.sent_away}
            if now != told:
                print(json.dumps(now), flush=True)
            told = now
            await asyncio.sleep(_REPORT_SECONDS)


class Client:
    """One client with its newest session."""

    def __init__(self, host: Host, name: str) -> None:
        self._host, self._name = host, name
        self._connect()
        self._secret = ""
        self._period = 0.0
        self._matched = False
        self._wake = asyncio.Event()
        self._works: set[asyncio.Task[None]] = set()

    def _connect(self) -> None:
        self._channel = self._host.channel(self._name)
        self._commands, self._updates = TrainCmdServiceStub(self._channel), ClientUpdateServiceStub(self._channel)

    async def run(self) -> None:
        """Join, watch, and do so again after each loss, as fl-client does."""
        failures, wait, away, reason = 0, False, 0.0, ""
        while True:
            try:
                await self._session(wait=wait)
                wait, away = False, 0.0
            except aio.AioRpcError as error:
                reason = reason_of(error)
                told = reason in (ComeBack.reason, InLine.reason)
                away = retry_seconds_of(error, most=MOST_AWAY) if told else 0.0
                wait = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            if self._matched:
                self._matched, failures = False, 0
                self._host.watching -= 1
            if away:
                self._host.sent_away += 1
                if reason == ComeBack.reason and away > _HANG_UP_SECONDS:
                    await self._channel.close()
                    self._connect()
            await asyncio.sleep(away or random.uniform(0, most_seconds(failures)))
            failures += not away

    async def _session(self, *, wait: bool) -> None:
        request = pb.JoinRequest(
            client_id=self._name, protocol=PROTOCOL, software="bench", resume_secret=self._secret, paced=True
        )
        joined = await self._commands.Join(request, timeout=_JOIN_SECONDS, wait_for_ready=wait)
        self._secret, self._period = joined.resume_secret, joined.heartbeat_seconds
        metadata = ((SESSION_KEY, joined.session_id),)
        call: Any = self._commands.Watch(metadata=metadata)
        beats = asyncio.create_task(self._beat(call))
        try:
            while (event := await call.read()) is not aio.EOF:
                self._follow(event, joined, metadata)
        finally:
            beats.cancel()
            call.cancel()

    async def _beat(self, call: Any) -> None:
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                self._wake.clear()
                await call.write(pb.WatchRequest(matched=self._matched))
                with suppress(TimeoutError):
                    async with asyncio.timeout(random.uniform(0.8, 1.0) * self._period):
                        await self._wake.wait()

    def _follow(self, event: pb.ServerEvent, joined: pb.JoinReply, metadata: Any) -> None:
        before, wake = self._period, False
        match event.WhichOneof("event"):
            case "heartbeat":
                self._period = event.heartbeat.period_seconds or self._period
                if not self._matched:
                    self._matched = wake = True
                    self._host.watching += 1
            case "train":
                self._period = joined.heartbeat_seconds
                work = asyncio.create_task(self._deliver(event.train, metadata))
                self._works.add(work)
                work.add_done_callback(self._works.discard)
        if wake or self._period < before:
            self._wake.set()

    async def _deliver(self, command: pb.TrainCmd, metadata: Any) -> None:
        payload, digest = self._host.payload, self._host.digest
        offer = named_offer(header_of(command, self._name, payload), payload, digest)
        with suppress(aio.AioRpcError):  # the round may be over
            call = self._updates.PushSmallUpdates(metadata=metadata)
            await call.write(pb.SmallUpdate(offer=offer, payload=payload))
            if await call.read() is not aio.EOF:
                self._host.accepted += 1
            await call.done_writing()


def main() -> None:
    """Run the sessions that the command line describes, until SIGTERM."""
    plan = Plan(**json.loads(sys.argv[1]))
    raise_limit(2 * plan.count + 200)
    asyncio.run(Host(plan).run())


if __name__ == "__main__":
    main()
