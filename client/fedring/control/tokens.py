"""The tokens that a server knows, over its control port."""

import grpc

from fedring.control.caller import ControlCaller
from fedring.v1 import control_pb2 as pb
from fedring.v1.control_pb2_grpc import TokenServiceStub


class ControlTokens:
    """Makes, lists and revokes a server's tokens.

    Every method raises a Failure if the call fails.
    """

    def __init__(self, call: ControlCaller, channel: grpc.Channel) -> None:
        self._call = call
        self._stub = TokenServiceStub(channel)

    def create(self, role: str, name: str, *, valid_seconds: int = 0) -> pb.CreatedToken:
        """Create a token.

        Its secret is only in this answer, since the server keeps a digest.

        Args:
            role: "client" or "operator".
            name: Whose token it is: the client_id of a client.
            valid_seconds: Seconds until it expires; 0 = never.
        """
        return self._call(
            self._stub.CreateToken, pb.CreateTokenRequest(role=role, name=name, valid_seconds=valid_seconds)
        )

    def known(self) -> list[pb.Token]:
        """Return all tokens, oldest first."""
        return list(self._call(self._stub.ListTokens, pb.ListTokensRequest()).tokens)

    def revoke(self, token_id: str) -> pb.Token:
        """Revoke a token, so that the server refuses it, and return it."""
        return self._call(self._stub.RevokeToken, pb.RevokeTokenRequest(token_id=token_id))
