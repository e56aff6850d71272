"""The interceptor that turns exceptions of handlers into gRPC statuses."""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

from grpc import StatusCode, aio

from fedring.codec.errors import CodecError
from fedring.rpc.chunks import serialize
from fedring.rpc.errors import REASON_KEY, BadRequest, ComeBack, FedringError, Gone
from fedring.rpc.handlers import FACTORY, unknown_method
from fedring.rpc.streams import METER, CallMeter

log = logging.getLogger(__name__)

MOST_LETTERS = 600
"""The longest sentence of a refusal. It travels in the trailing metadata, in up to 12 bytes a letter, and callers drop
metadata of more than 8 KiB altogether, including the reason."""


class Boundary(aio.ServerInterceptor):
    """Turns any exception of a handler into a status.

    The status has a sentence and a reason. Only `CountCalls` may go before it. A FedringError or CodecError becomes its
    own status; all else becomes INTERNAL without details, and is logged with its traceback.
    """

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], handler_call_details: Any) -> Any:
        details = handler_call_details
        handler = await continuation(details) or unknown_method(details.method)
        kind, factory = FACTORY[handler.request_streaming, handler.response_streaming]
        inner = getattr(handler, kind)
        checked = _CheckedStream if handler.request_streaming else require_message

        # The name may be any text of the caller: escaped and cut, it cannot forge a line of the log.
        meter, method = CallMeter(), ascii(details.method[:100])[1:-1]

        async def call(request: Any, context: Any) -> Any:
            METER.set(meter)
            try:
                return await inner(checked(request), context)
            except Exception as error:  # noqa: BLE001  # all exceptions of handlers end here
                await _abort(error, context, method)

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            METER.set(meter)
            try:
                async for response in inner(checked(request), context):
                    yield response
            except Exception as error:  # noqa: BLE001  # as above
                await _abort(error, context, method)

        return factory(
            generate if inspect.isasyncgenfunction(inner) else call,
            request_deserializer=meter.receiving(_none_if_invalid(handler.request_deserializer)),
            response_serializer=meter.sending(serialize),
        )


def require_message(message: Any) -> Any:
    """Return `message`, which a handler has read from its context.

    Raises:
        BadRequest: If it is None, which stands for bytes that are no message.
    """
    if message is None:
        raise BadRequest("the bytes are not a valid message of this call")
    return message


class _CheckedStream(AsyncIterator[Any]):
    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages

    async def __anext__(self) -> Any:
        return require_message(await anext(self._messages))


def _none_if_invalid(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Wrap a deserializer to return None for invalid bytes.

    The caller must not see a parser's own words.
    """

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception:  # noqa: BLE001  # protobuf's DecodeError, which has no public base
            return None

    return parse


def _cut(text: str) -> str:
    """Shorten a sentence for the metadata.

    Lone surrogates, which UTF-8 cannot encode, are escaped.
    """
    cut = text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 3]}..."
    return cut.encode(errors="backslashreplace").decode()


async def _abort(error: Exception, context: Any, method: str) -> NoReturn:
    if isinstance(error, aio.AbortError):
        raise error
    if isinstance(error, CodecError | FedringError):
        # The error that gRPC raises below is part of a reference cycle, so it lives until the next garbage collection.
        # Without this line, the handler's frames would live as long, with all that they hold: messages of 4 MiB.
        error.__traceback__ = error.__context__ = error.__cause__ = None
    if isinstance(error, CodecError):
        text = _cut(str(error))
        log.warning("%s refused: %s", method, text, extra={"reason": error.reason})
        await context.abort(StatusCode.INVALID_ARGUMENT, text, ((REASON_KEY, error.reason),))
    if isinstance(error, FedringError):
        text = _cut(str(error))
        if not isinstance(error, Gone):
            # Thousands of clients may be told to come back, as the server wants it.
            level = logging.DEBUG if isinstance(error, ComeBack) else logging.WARNING
            log.log(level, "%s refused: %s: %s", method, error.reason, text, extra={"reason": error.reason})
        await context.abort(error.status, text, ((REASON_KEY, error.reason), *error.metadata))
    log.error("unexpected error in %s", method, exc_info=error)
    await context.abort(StatusCode.INTERNAL, "internal error", ((REASON_KEY, "internal"),))
    raise AssertionError("abort returned")
