"""A probe of the listener at an address where no call succeeds.

It finds nobody, a server that speaks TLS, or something else.
"""

import socket
import ssl
from enum import Enum, auto

_SECONDS = 2.0  # for each of the two attempts


class Listener(Enum):
    """The kind of listener at an address."""

    NOBODY = auto()
    PLAINTEXT = auto()  # or something that says nothing
    TLS = auto()


def listener_at(address: str) -> Listener:
    """Return the kind of listener at an address "host:port".

    It takes at most a few seconds. A Unix socket is not asked.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return Listener.NOBODY
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent, so nobody need be trusted
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS) as plain:
            try:
                with context.wrap_socket(plain, server_hostname=host.strip("[]") or None):
                    return Listener.TLS
            except OSError:  # an SSLError is one, and so is a timeout
                return Listener.PLAINTEXT
    except OSError:
        return Listener.NOBODY
