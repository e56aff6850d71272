"""OpenTelemetry traces, where OTEL_TRACES_EXPORTER asks for them and the extra `tracing` is installed; else nothing.

A span is named to others, within the process and beyond it, by its W3C `traceparent`.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import entry_points
from typing import Any

log = logging.getLogger(__name__)

KEY = "traceparent"
"""The metadata key that names the span of a call."""

_around: ContextVar[str] = ContextVar("traceparent", default="")
_otel: "_Otel | None" = None


class Span:
    """Begins when it is made: a part of `parent`, or else of the span around this place."""

    def __init__(self, name: str, parent: str = "", **attributes: str | int) -> None:
        self._span = _otel.start(name, parent or _around.get(), attributes) if _otel else None
        self.traceparent = _otel.name_of(self._span) if _otel else ""

    def end(self, error: BaseException | None = None) -> None:
        """It ends now, for this reason if one is given."""
        if self._span is not None:
            if error is not None:
                self._span.record_exception(error)
            self._span.end()


@contextmanager
def span(name: str, parent: str = "", **attributes: str | int) -> Iterator[None]:
    """What happens inside is a span: a part of `parent`, or else of the one around it."""
    begun = Span(name, parent, **attributes)
    token = _around.set(begun.traceparent)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        _around.reset(token)
        begun.end(error)


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """What a call says of the span it belongs to."""
    return ((KEY, _around.get()),) if _around.get() else ()


def go_on_in(begun: Span) -> None:
    """From now on, what this task begins is a part of that span."""
    _around.set(begun.traceparent)


def set_up_tracing(service: str) -> None:
    """Spans of this process go to the exporter of OTEL_TRACES_EXPORTER: otlp, console, or another that is installed."""
    global _otel
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "none")
    if exporter == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    try:
        _otel = _Otel(service, {"otlp": "otlp_proto_grpc"}.get(exporter, exporter))
    except (ImportError, LookupError) as error:
        log.warning("no traces to %s: %s; install fedring[tracing]", exporter, error)


class _Otel:
    """The SDK, which is imported here and nowhere else."""

    def __init__(self, service: str, exporter: str) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        found = entry_points(group="opentelemetry_traces_exporter", name=exporter)
        if not found:
            raise LookupError(f"there is no exporter {exporter}")
        named = os.environ.get("OTEL_SERVICE_NAME", service)
        provider = TracerProvider(resource=Resource.create({"service.name": named}))
        provider.add_span_processor(BatchSpanProcessor(next(iter(found)).load()()))
        self._tracer = provider.get_tracer("fedring")
        self._texts = TraceContextTextMapPropagator()
        self._with_span = trace.set_span_in_context

    def start(self, name: str, parent: str, attributes: dict[str, str | int]) -> Any:
        return self._tracer.start_span(name, self._texts.extract({KEY: parent}), attributes=attributes)

    def name_of(self, begun: Any) -> str:
        texts: dict[str, str] = {}
        self._texts.inject(texts, self._with_span(begun))
        return texts.get(KEY, "")
