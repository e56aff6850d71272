"""A probe of the listener at an address where no call succeeds.

It finds nobody, a server that speaks TLS, or something else. It takes the way that gRPC takes: through the HTTP proxy
that `https_proxy` names, if there is one.
"""

import base64
import os
import socket
import ssl
from enum import Enum, auto
from urllib.parse import unquote, urlsplit

_SECONDS = 2.0  # for each of the two attempts
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # variables, the first one that is set counts
_MOST_ANSWER = 1 << 16  # bytes of a proxy's answer


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
        with connection_to(address, _SECONDS) as plain:
            try:
                with context.wrap_socket(plain, server_hostname=host.strip("[]") or None):
                    return Listener.TLS
            except OSError:  # an SSLError is one, and so is a timeout
                return Listener.PLAINTEXT
    except OSError:
        return Listener.NOBODY


def proxy_for(address: str) -> str:
    """Return the "host:port" of gRPC's HTTP proxy for an address.

    Empty if there is none. These are gRPC's own rules (its doc/environment_variables.md), in lower case only.
    """
    host = address.rpartition(":")[0].strip("[]")
    found, spared = _variable(*_PROXIES), _variable("no_grpc_proxy", "no_proxy")
    if address.startswith("unix:") or any(part.strip() and host.endswith(part.strip()) for part in spared.split(",")):
        return ""
    try:
        return f"{urlsplit(found).hostname}:{urlsplit(found).port or 80}" if found.startswith("http://") else ""
    except ValueError:  # no number as its port
        return ""


def connection_to(address: str, timeout_seconds: float) -> socket.socket:
    """Return a connection to an address, as gRPC makes it.

    It goes through a proxy if gRPC takes one.

    Raises:
        OSError: If there is none; the text of one names the proxy that has refused it.
    """
    proxy = proxy_for(address)
    host, _, port = (proxy or address).rpartition(":")
    plain = socket.create_connection((host.strip("[]"), int(port)), timeout_seconds)
    if not proxy:
        return plain
    try:
        plain.sendall(f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n{_proxy_login()}\r\n".encode())
        answer = b""
        while b"\r\n\r\n" not in answer and len(answer) < _MOST_ANSWER:
            if not (byte := plain.recv(1)):
                break  # byte by byte: what comes after the answer is the server's
            answer += byte
        status = answer.partition(b"\r\n")[0].decode("latin-1")[:200]
        if status.split(" ")[1:2] != ["200"]:
            raise OSError(f"the proxy {proxy} does not connect to it: {status or 'no answer'}")
    except BaseException:
        plain.close()
        raise
    return plain


def _variable(*names: str) -> str:
    """Return the first of these variables that is set.

    Empty if none is.
    """
    return next(filter(None, map(os.environ.get, names)), "")


def _proxy_login() -> str:
    """Return the header with the login in the proxy's URL, or nothing."""
    login = urlsplit(_variable(*_PROXIES)).netloc.rpartition("@")[0]
    encoded = base64.b64encode(unquote(login).encode()).decode()
    return f"Proxy-Authorization: Basic {encoded}\r\n" if login else ""
