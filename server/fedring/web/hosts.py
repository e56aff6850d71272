"""The allowed Host names of the page, against DNS rebinding.

A site of an attacker can let its own name lead to the address of this page. Its scripts may then read the page as if it
were their own, unless the page looks at the name by which it was called.
"""

import re
from collections.abc import Collection
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_HOST = re.compile(r"(?:\[(?P<ip>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_.-]+))(?::[0-9]{0,5})?")


class KnownHosts:
    """Limits `app` to requests with a known Host header.

    The host must be an IP address, "localhost", or one of `names`.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = frozenset(map(_comparable, ("localhost", *names)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._refusal(Headers(scope=scope)) or self._app)(scope, receive, send)

    def _refusal(self, headers: Headers) -> ASGIApp | None:
        name = called_by(headers.get("host", ""))
        if name is None:
            return PlainTextResponse("the Host header is missing or is not a host\n", 400)
        if name in self._names or _is_address(name):
            return None
        sentence = f"fl-server does not know the name {name!r}: add it to web_allowed_hosts, or use the IP address\n"
        return PlainTextResponse(sentence, 421)


def called_by(host: str) -> str | None:
    """Return the name or address in a Host header, without the port.

    It is in lower case; None if there is neither.
    """
    found = _HOST.fullmatch(host)
    if found is None or (found["ip"] and not _is_address(found["ip"])):
        return None
    return _comparable(found["ip"] or found["name"])


def _comparable(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    """Return whether this is an IP address.

    No name server can make an address lead elsewhere.
    """
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
