"""The gRPC service for secure aggregation: keys, shares, and unmasking."""

from collections.abc import Awaitable, Callable
from typing import Any

from fedring.server.secure.exchange import Message
from fedring.server.sessions.sessions import Sessions
from fedring.v1 import secure_pb2 as pb
from fedring.v1 import secure_pb2_grpc as rpc


class SecureAggregationService(rpc.SecureAggregationServiceServicer):
    """Receives the secure-aggregation messages of clients in session.

    Each is durable before it is answered, and may be repeated.
    """

    def __init__(self, take: Callable[[str, Message], Awaitable[None]], sessions: Sessions) -> None:
        self._take_from, self._sessions = take, sessions

    async def SendKeys(self, request: pb.SecureKeys, context: Any) -> pb.SecureAck:
        return await self._take(request, context)

    async def SendShares(self, request: pb.SecureShares, context: Any) -> pb.SecureAck:
        return await self._take(request, context)

    async def SignSurvivors(self, request: pb.SurvivorsSignature, context: Any) -> pb.SecureAck:
        return await self._take(request, context)

    async def SendUnmaskShares(self, request: pb.UnmaskShares, context: Any) -> pb.SecureAck:
        return await self._take(request, context)

    async def _take(self, message: Message, context: Any) -> pb.SecureAck:
        session = self._sessions.of(context)
        await self._take_from(session.client_id, message)
        return pb.SecureAck()
