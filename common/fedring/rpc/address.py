"""Addresses in settings: "host:port", or "unix:path" where allowed.

A path is that of a Unix socket. The types are for fields of a configuration. They check the port, because gRPC itself
takes a port modulo 65536.
"""

import re
from collections.abc import Callable
from ipaddress import ip_network
from typing import Annotated

from pydantic import AfterValidator

ANY_HOST = frozenset({"0.0.0.0", "[::]", "::", "*", ""})
"""Hosts to listen at that stand for all addresses of a machine, so that nobody can call them."""

_LARGEST_PORT = 65535
_LONGEST_HOST = 253
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*)")


def check_address(text: str) -> str:
    """Return `text` if it is "host:port" or "unix:path".

    Raises:
        ValueError: If it is neither.
    """
    path = text.removeprefix("unix:")
    return text if path and path != text else check_tcp_address(text)


def check_tcp_address(text: str) -> str:
    """Return `text` if it is "host:port".

    Raises:
        ValueError: If it is not.
    """
    scheme, slashes, rest = text.partition("://")
    if slashes:
        raise ValueError(f"{text!r} is not host:port: leave out {scheme}://, as in {rest.rstrip('/') or 'host:port'}")
    host, colon, port = text.rpartition(":")
    if not (colon and port.isascii() and port.isdecimal()) or host == "unix" or host.startswith("unix:"):
        raise ValueError(f"{text!r} is not host:port")
    if len(port) > len(str(_LARGEST_PORT)) or int(port) > _LARGEST_PORT:
        raise ValueError(f"{text!r} is not host:port: the largest port is {_LARGEST_PORT}")
    return text


def check_peer_address(text: str) -> str:
    """Return `text` if it is a plain "host:port".

    It comes from another machine. The host is a name or an IPv4 address, or "[address]" in IPv6. gRPC would take more,
    such as a path, or a name server to ask.

    Raises:
        ValueError: If it is something else.
    """
    host = check_tcp_address(text).rpartition(":")[0]
    if len(host) > _LONGEST_HOST or not (_NAME.fullmatch(host) or _IPV6.fullmatch(host)):
        raise ValueError(f"{text[:100]!a} is not host:port")
    return text


def _check_host(text: str) -> str:
    return check_tcp_address(text) if ":" in text and not text.endswith("]") else text


def _check_name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not the name of a host, such as fl.example.org, without a scheme and a port")
    return text


def _check_network(text: str) -> str:
    try:
        ip_network(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no IP address or network, such as 10.0.0.5 or 10.0.0.0/8") from error
    return text


def _unless_empty(check: Callable[[str], str]) -> AfterValidator:
    return AfterValidator(lambda text: check(text) if text else text)


Address = Annotated[str, AfterValidator(check_address)]
AddressOrEmpty = Annotated[str, _unless_empty(check_address)]
TcpAddress = Annotated[str, AfterValidator(check_tcp_address)]
TcpAddressOrEmpty = Annotated[str, _unless_empty(check_tcp_address)]
HostName = Annotated[str, AfterValidator(_check_name)]
"""The name of a host, without a port."""
HostOrEmpty = Annotated[str, _unless_empty(_check_host)]
"""A host, with or without a port: "name", "name:port", "[::1]", "[::1]:port"; or nothing."""
Network = Annotated[str, AfterValidator(_check_network)]
"""An IP address, or a network of them: "10.0.0.5", "10.0.0.0/8", "fd00::/8"."""
