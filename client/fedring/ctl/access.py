"""The options with which flctl proves who its user is.

Every verb with --server takes them.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from fedring.control.access import Access
from fedring.control.calls import Control
from fedring.control.failure import Failure
from fedring.daemon.config import explain
from fedring.daemon.exits import Exit
from fedring.rpc.tls import Tls

_PANEL = "Your identity"


PLAIN = Access()
_ACCESS: ContextVar[Access] = ContextVar("_ACCESS", default=PLAIN)

_OPTIONS = {
    "tls_ca": ("--tls-ca", "Certificate of the authority that signed fl-server's; without it flctl uses plaintext."),
    "tls_cert": ("--tls-cert", "Your own certificate, with the role operator."),
    "tls_key": ("--tls-key", "The private key of --tls-cert."),
    "token_file": ("--token-file", "File with your bearer token."),
}


def access() -> Access:
    """Return the access options of the running verb.

    They come from its command line or the environment.
    """
    return _ACCESS.get()


def connect(server: str) -> Control:
    """Connect to the control port at the address `server`.

    The identity is that of the running verb's user.
    """
    return Control(server, channel=access().channel(server), tls=access().tls)


def access_of(parameters: Mapping[str, Any]) -> Access:
    """Return the access options among a verb's parameters.

    Some may be missing.
    """
    return _access(**{name: parameters.get(name) for name in _OPTIONS})


def with_access(verb: Callable[..., None]) -> Callable[..., None]:
    """Return the verb with the options of this module added.

    A verb that takes no server is returned as it is.
    """
    signature = inspect.signature(verb)
    if "server" not in signature.parameters:
        return verb

    @functools.wraps(verb)
    def run(**given: Any) -> None:
        paths = {name: given.pop(name) for name in _OPTIONS}
        before = _ACCESS.set(_access(**paths))
        try:
            verb(**given)
        finally:
            _ACCESS.reset(before)

    extra = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                Path | None,
                typer.Option(flag, envvar=f"FLCTL_{name.upper()}", metavar="FILE", help=help_, rich_help_panel=_PANEL),
            ],
        )
        for name, (flag, help_) in _OPTIONS.items()
    ]
    untyped: Any = run  # typer reads the options from __signature__
    untyped.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *extra])
    return run


def _access(tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, token_file: Path | None) -> Access:
    try:
        return Access(Tls(ca=tls_ca, cert=tls_cert, key=tls_key), token_file)
    except ValidationError as error:
        raise Failure(explain(error, {}).replace("tls.", "--tls-"), Exit.USAGE) from error
