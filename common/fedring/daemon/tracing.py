"""OpenTelemetry traces of this process.

They are recorded if OTEL_TRACES_EXPORTER asks for them and the extra `tracing` is installed. Without them the API's own
tracer does nothing, and nothing of a trace is passed on. Other processes know a span by its W3C `traceparent`.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

log = logging.getLogger(__name__)

KEY = "traceparent"
"""The metadata key that names the span of a call."""

_TEXTS = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("fedring")


def start_span(name: str, parent: str = "", **attributes: str | int) -> trace.Span:
    """Begin a span; the caller must end it.

    Args:
        name: the name of the span.
        parent: the traceparent of the span that it is a part of; empty for the span around this place, if there is one.
        attributes: the attributes of the span.
    """
    return _tracer.start_span(name, _context_of(parent), attributes=attributes)


@contextmanager
def span(name: str, parent: str = "", **attributes: str | int) -> Iterator[None]:
    """Run the body of a `with` statement inside a span.

    The arguments are those of `start_span`.
    """
    around = _context_of(parent)
    with _tracer.start_as_current_span(name, around, attributes=attributes, set_status_on_exception=False):
        yield


def go_on_in(begun: trace.Span) -> None:
    """Make later spans of this task children of that span."""
    context.attach(trace.set_span_in_context(begun))


def traceparent_of(begun: trace.Span) -> str:
    """Return a span's name for other processes, or "" without tracing."""
    return _name_in(trace.set_span_in_context(begun))


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return the current span as gRPC metadata for a call.

    It is empty if nothing is traced.
    """
    name = _name_in(context.get_current())
    return ((KEY, name),) if name else ()


def set_up_tracing(service: str) -> None:
    """Send the spans of this process where the variables of OpenTelemetry say.

    Args:
        service: the name of this service, unless OTEL_SERVICE_NAME gives another one.
    """
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "none")
    if exporter == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    try:
        _export(service, {"otlp": "otlp_proto_grpc"}.get(exporter, exporter))
    except (ImportError, LookupError) as error:
        log.warning("no traces to %s: %s; install fedring[tracing]", exporter, error)


def _export(service: str, exporter: str) -> None:
    # The SDK belongs to the extra, so it is imported here and nowhere else.
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    found = entry_points(group="opentelemetry_traces_exporter", name=exporter)
    if not found:
        raise LookupError(f"there is no exporter {exporter}")
    named = os.environ.get("OTEL_SERVICE_NAME", service)
    provider = TracerProvider(resource=Resource.create({"service.name": named}))
    provider.add_span_processor(BatchSpanProcessor(next(iter(found)).load()()))
    trace.set_tracer_provider(provider)


def _context_of(parent: str) -> context.Context | None:
    return _TEXTS.extract({KEY: parent}) if parent else None


def _name_in(where: context.Context) -> str:
    # The API's own tracer returns the span of another process as it is. Only spans of this process are passed on.
    if trace.get_current_span(where).get_span_context().is_remote:
        return ""
    texts: dict[str, str] = {}
    _TEXTS.inject(texts, where)
    return texts.get(KEY, "")
