"""Who calls a control port: a certificate or a token, and the authority that the server must be signed by."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.rpc.channel import encrypts, is_loopback, open_sync_channel
from fedring.rpc.tls import PLAINTEXT, Tls, read_token


@dataclass(frozen=True, slots=True)
class Access:
    """How to connect: the user's certificate or token, and the authority that the server must be signed by."""

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
