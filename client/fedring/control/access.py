"""The identity of a caller, and the trusted authority of the server.

A caller has a certificate or a token.
"""

from dataclasses import dataclass
from pathlib import Path

import grpc

from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.rpc.channel import encrypts, is_loopback, open_sync_channel
from fedring.rpc.tls import PLAINTEXT, Tls, read_token


@dataclass(frozen=True, slots=True)
class Access:
    """The user's certificate or token, and the server's authority.

    The server's certificate must be signed by that authority.
    """

    tls: Tls = PLAINTEXT
    token_file: Path | None = None  # a file with a bearer token

    def channel(self, address: str) -> grpc.Channel:
        """Open a channel to the address.

        Raises:
            Failure: The token would be sent in plaintext to another host.
        """
        if not self.token_file:
            return open_sync_channel(address, self.tls)
        if not encrypts(address, self.tls) and not is_loopback(address):
            raise Failure(f"the token must not be sent in plaintext to {address}: give --tls-ca, or tls_ca", Exit.USAGE)
        return open_sync_channel(address, self.tls, read_token(self.token_file))
