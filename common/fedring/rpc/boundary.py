"""Where exceptions become statuses: the outermost interceptor of every server."""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

from grpc import StatusCode, aio

from fedring.codec.errors import CodecError
from fedring.rpc.chunks import serialize
from fedring.rpc.errors import REASON_KEY, BadRequest, FedringError, Gone
from fedring.rpc.handlers import FACTORY, unknown_method
from fedring.rpc.streams import METER, Meter

log = logging.getLogger(__name__)

MOST_LETTERS = 600
"""Of the sentence of a refusal. It travels in the trailing metadata, in up to 12 bytes a letter, and callers drop
metadata above 8 KiB, the reason with it."""


class Boundary(aio.ServerInterceptor):
    """Turns what a handler raises into one status, and lets nothing else out."""

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], handler_call_details: Any) -> Any:
        details = handler_call_details
        handler = await continuation(details) or unknown_method(details.method)
        kind, factory = FACTORY[handler.request_streaming, handler.response_streaming]
        inner = getattr(handler, kind)
        sound = _SoundStream if handler.request_streaming else sound_message

        meter, method = Meter(), ascii(details.method[:100])[1:-1]

        async def call(request: Any, context: Any) -> Any:
            METER.set(meter)
            try:
                return await inner(sound(request), context)
            except Exception as error:  # noqa: BLE001  # this is the one place where all of them end
                await _abort(error, context, method)

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            METER.set(meter)
            try:
                async for response in inner(sound(request), context):
                    yield response
            except Exception as error:  # noqa: BLE001  # as above
                await _abort(error, context, method)

        return factory(
            generate if inspect.isasyncgenfunction(inner) else call,
            request_deserializer=meter.receiving(_checked(handler.request_deserializer)),
            response_serializer=meter.sending(serialize),
        )


def sound_message(message: Any) -> Any:
    """The message, unless its bytes were none: BadRequest; for handlers that read from the context themselves."""
    if message is None:
        raise BadRequest("the bytes are no message of this call")
    return message


class _SoundStream(AsyncIterator[Any]):
    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages

    async def __anext__(self) -> Any:
        return sound_message(await anext(self._messages))


def _checked(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """`deserialize` that answers None for bytes that are no message, so that no parser's words get out."""

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception:  # noqa: BLE001  # protobuf's DecodeError, which has no public base
            return None

    return parse


def _cut(text: str) -> str:
    """Return the sentence as it can travel: short, and with a spelling for halves of letters, which have no UTF-8."""
    cut = text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 3]}..."
    return cut.encode(errors="backslashreplace").decode()


async def _abort(error: Exception, context: Any, method: str) -> NoReturn:
    if isinstance(error, aio.AbortError):
        raise error
    if isinstance(error, CodecError | FedringError):
        # The error that gRPC raises below lies in a cycle, until a collection finds it. Not so what the handler had in
        # hand, such as a message of 4 MiB.
        error.__traceback__ = error.__context__ = error.__cause__ = None
    if isinstance(error, CodecError):
        text = _cut(str(error))
        log.warning("%s refused: %s", method, text, extra={"reason": error.reason})
        await context.abort(StatusCode.INVALID_ARGUMENT, text, ((REASON_KEY, error.reason),))
    if isinstance(error, FedringError):
        text = _cut(str(error))
        if not isinstance(error, Gone):
            log.warning("%s refused: %s: %s", method, error.reason, text, extra={"reason": error.reason})
        await context.abort(error.status, text, ((REASON_KEY, error.reason), *error.metadata))
    log.error("unexpected error in %s", method, exc_info=error)
    await context.abort(StatusCode.INTERNAL, "internal error", ((REASON_KEY, "internal"),))
    raise AssertionError("abort returned")
