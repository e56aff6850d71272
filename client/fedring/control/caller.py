"""Calls of the control port, whose failures are sentences."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from fedring.control.failure import Failure, failure_of
from fedring.daemon.exits import Exit
from fedring.rpc.errors import OldTerm
from fedring.rpc.tls import PLAINTEXT, Tls

_R = TypeVar("_R")


class ControlCaller:
    """Makes the calls of a connection to a control port.

    Args:
        address: "host:port" of the control port.
        timeout_seconds: Longest time that a call may take.
        tls: The certificates of the caller.
    """

    def __init__(self, address: str, timeout_seconds: float, tls: Tls = PLAINTEXT) -> None:
        self.address, self.tls = address, tls
        self.timeout_seconds = timeout_seconds

    def __call__(
        self,
        rpc: Callable[..., _R],
        request: Message,
        *,
        at_least_seconds: float = 0.0,
        wait_for_ready: bool = False,
        named: bool = True,
    ) -> _R:
        """Make a call, and return its answer.

        Args:
            rpc: A method of a stub.
            request: Its message.
            at_least_seconds: The least time that it may take.
            wait_for_ready: Whether it waits for a server that cannot be reached yet.
            named: As in failure_of.

        Raises:
            Failure: The call failed.
        """
        timeout = max(self.timeout_seconds, at_least_seconds)
        with translated(self.address, tls=self.tls, named=named):
            return rpc(request, timeout=timeout, wait_for_ready=wait_for_ready)


@contextmanager
def translated(address: str, *, tls: Tls = PLAINTEXT, named: bool = True) -> Iterator[None]:
    """Raise a Failure for a call that fails inside the context.

    `tls` and `named` are as in failure_of.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise failure_of(error, address, tls=tls, named=named) from error
    except OldTerm as error:
        raise Failure(f"{error}: ask the one that leads", Exit.TRY_AGAIN) from error
