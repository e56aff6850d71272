"""The term of the leading server, and the refusal of older ones.

Of servers that share a state, each that leads begins a term, a number above all before. One that was frozen and goes on
has been replaced without knowing it: until its first transaction fails, it would go on to answer and to command. A
server process has one term for as long as it serves, so the initial metadata of a call say it for each message of the
call, also of a stream that lasts for days. Whoever has seen a later term of the same run refuses the message.
"""

import inspect
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from grpc import StatusCode, aio

from fedring.daemon.durable import replace_with_digest, text_after_digest
from fedring.rpc.channel import with_calls
from fedring.rpc.contract import TERM_KEY
from fedring.rpc.errors import OldTerm, text_in
from fedring.rpc.handlers import FACTORY

log = logging.getLogger(__name__)

_FORM = re.compile(r"([1-9][0-9]{0,17})/([0-9A-Za-z-]{1,64})")
_MOST_BYTES = 256  # how much of a file is read; a valid one is shorter
_NONE = (0, "")
_AHEAD_SECONDS = 86_400  # an honest term is no further in the future, as it begins with the time in seconds


def term_text(term: int, run_id: str) -> str:
    """Return a term as it travels."""
    return f"{term}/{run_id}"


class NewestTerm:
    """The latest term that was seen, and the run whose it is.

    Any thread may use it.

    Args:
        file: Where it is kept, so that a restart does not forget it; None = nowhere.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._lock = file, threading.Lock()
        self._seen = _NONE if file is None else _read(file)

    def check(self, term: tuple[int, str]) -> None:
        """Note a term.

        Those of another run are another count, which replaces this one.

        Raises:
            OldTerm: A later one of the same run was seen.
        """
        if term in (self._seen, _NONE):  # nearly always
            return
        with self._lock:
            (number, run), (newest, of) = term, self._seen
            if run == of and number < newest:
                told = f"this server led in term {number}, and another one has led since, in term {newest}"
                raise OldTerm(told + self._way_out(newest))
            self._seen = term
            self._keep()

    def _way_out(self, newest: int) -> str:
        """Return a clause about a term that may be a lie.

        It is empty for others. Only people can tell a server that lies from one that leads: no program forgets a term.
        """
        if self._file is None or newest < time.time() + _AHEAD_SECONDS:
            return ""
        return f"; that is in the future: if no server that leads has said so, stop fl-client and delete {self._file}"

    def _keep(self) -> None:
        if self._file is None:
            return
        try:
            replace_with_digest(self._file, term_text(*self._seen).encode())
        except OSError as error:
            log.warning("%s cannot be written, so a restart forgets which server leads: %s", self._file, error)


def _read(file: Path) -> tuple[int, str]:
    """Return the term in a file.

    There is none without a file, or in one that cannot be read or is damaged.
    """
    try:
        with file.open("rb") as opened:
            return _parsed(text_after_digest(opened.read(_MOST_BYTES)).decode())
    except (FileNotFoundError, ValueError):
        return _NONE
    except OSError as error:
        log.warning("%s cannot be read: %s", file, error)
        return _NONE


def _parsed(text: str) -> tuple[int, str]:
    found = _FORM.fullmatch(text)
    return (int(found[1]), found[2]) if found else _NONE


def _term_in(metadata: Any) -> tuple[int, str]:
    """Return the term in a call's initial metadata.

    Most servers tell none.
    """
    return _parsed(text_in(metadata, TERM_KEY))


class TellTerm(aio.ServerInterceptor):
    """Tells a server's term in the initial metadata of each call.

    Those that are refused have it, too.

    Args:
        text: What `term_text` returns.
    """

    def __init__(self, text: str) -> None:
        self._pair = (TERM_KEY, text)

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind, _ = FACTORY[handler.request_streaming, handler.response_streaming]
        inner, pair = getattr(handler, kind), self._pair

        async def call(request: Any, context: Any) -> Any:
            telling = _Telling(context, pair)
            reply = await inner(request, telling)
            await telling.tell()
            return reply

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            telling = _Telling(context, pair)
            async for response in inner(request, telling):
                await telling.tell()
                yield response

        return handler._replace(**{kind: generate if inspect.isasyncgenfunction(inner) else call})


class _Telling:
    """A call's context that has the term in its initial metadata.

    They go with the first message, or when the handler itself sends them, which means something to its caller.
    """

    def __init__(self, context: Any, pair: tuple[str, str]) -> None:
        self._context, self._pair, self._told = context, pair, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def send_initial_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Send the initial metadata."""
        self._told = True
        await self._context.send_initial_metadata((*metadata, self._pair))

    async def tell(self) -> None:
        """Send them if they were not sent yet."""
        if not self._told:
            with suppress(
                Exception
            ):  # Its caller has gone, for which gRPC has no public name: what follows fails, too.
                await self.send_initial_metadata(())

    async def write(self, message: Any) -> None:
        """Send a message."""
        await self.tell()
        await self._context.write(message)

    async def abort(self, code: StatusCode, *args: Any, **kwargs: Any) -> None:
        """End the call with a status."""
        await self.tell()
        await self._context.abort(code, *args, **kwargs)


def refusing_old_terms(channel: aio.Channel, newest: NewestTerm) -> aio.Channel:
    """Return a channel whose calls raise OldTerm for a replaced server.

    Nothing else of such a server reaches the caller: no message, and no refusal.
    """

    def checking(make: Callable[..., Callable[..., Any]], *args: Any, **options: Any) -> Callable[..., Any]:
        start = make(*args, **options)
        return lambda *given, **named: _CheckedCall(start(*given, **named), newest)

    return with_calls(channel, checking)


class _CheckedCall:
    """A call that raises OldTerm for a replaced server."""

    def __init__(self, call: Any, newest: NewestTerm) -> None:
        self._call, self._newest = call, newest
        self._term: tuple[int, str] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Any:
        return self._reply().__await__()

    async def _reply(self) -> Any:
        return await self._checked(self._call)

    async def read(self) -> Any:
        """Return the next message, as a call of grpc.aio does."""
        return await self._checked(self._call.read())

    async def __aiter__(self) -> AsyncIterator[Any]:
        messages = aiter(self._call)
        while True:
            try:
                message = await self._checked(anext(messages))
            except StopAsyncIteration:
                return
            yield message

    async def _checked(self, message: Awaitable[Any]) -> Any:
        try:
            received = await message
        except aio.AioRpcError as error:
            self._newest.check(_term_in(error.initial_metadata()))
            raise
        if self._term is None:  # They have come with the first message.
            self._term = _term_in(await self._call.initial_metadata())
        try:
            # At each message: others may have seen a later term since this stream began.
            self._newest.check(self._term)
        except OldTerm:
            self._call.cancel()
            raise
        return received


def refusing_old_terms_sync(channel: grpc.Channel, newest: NewestTerm) -> grpc.Channel:
    """Return the same for threads."""
    return grpc.intercept_channel(channel, _RefuseOldTerms(newest))


class _RefuseOldTerms(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Checks the answers of calls with one request."""

    def __init__(self, newest: NewestTerm) -> None:
        self._newest = newest

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        call = continuation(client_call_details, request)
        self._newest.check(_term_in(call.initial_metadata()))
        return call

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return _CheckedMessages(continuation(client_call_details, request), self._newest)


class _CheckedMessages:
    """A stream of answers, for threads."""

    def __init__(self, call: Any, newest: NewestTerm) -> None:
        self._call, self._newest = call, newest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            message = next(self._call)
        except grpc.RpcError:
            self._check()
            raise
        self._check()
        return message

    def _check(self) -> None:
        try:
            self._newest.check(_term_in(self._call.initial_metadata()))
        except OldTerm:
            self._call.cancel()
            raise
