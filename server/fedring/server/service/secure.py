"""The gRPC service for secure aggregation: keys, shares, and unmasking."""

from typing import Any

from fedring.server.secure.exchange import Message
from fedring.server.secure.rounds import SecureRounds
from fedring.server.sessions.sessions import Sessions
from fedring.v1 import secure_pb2 as pb
from fedring.v1 import secure_pb2_grpc as rpc


class SecureAggregationService(rpc.SecureAggregationServiceServicer):
    """Receives the secure-aggregation messages of clients in session.

    Each is durable before it is answered, and may be repeated.
    """

    def __init__(self, secure: SecureRounds, sessions: Sessions) -> None:
        self._secure, self._sessions = secure, sessions

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
        await self._secure.take(session.client_id, message)
        return pb.SecureAck()
