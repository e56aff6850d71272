"""A round is one trace, from the server's phases to the clients' calls; without configuration there are no traces."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.conftest import missing
from tests.fleets import Control, Fleet


class Collector:
    """A server that receives spans as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc

        self.spans: list[tuple[str, Any]] = []  # name of the service, and the span
        self._reply = pb.ExportTraceServiceResponse()
        self._server = grpc.server(ThreadPoolExecutor(2))
        untyped: Any = rpc
        untyped.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        for group in request.resource_spans:
            names = {item.key: item.value.string_value for item in group.resource.attributes}
            self.spans += [(names["service.name"], span) for scope in group.scope_spans for span in scope.spans]
        return self._reply

    def close(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def collector() -> Iterator[Collector]:
    try:
        collector = Collector()
    except ImportError:
        missing("the packages of fedring[tracing]")
    yield collector
    collector.close()


def test_a_round_is_one_trace_across_the_daemons(collector: Collector, tmp_path: Path) -> None:
    env = {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.address}",
        "OTEL_EXPORTER_OTLP_INSECURE": "true",
    }
    with Fleet(tmp_path, None, [{}, {}], env=env) as fleet, Control(fleet.control) as control:
        started = control.start_round({"min_clients": 2})
        assert [event.kind for event in control.follow_job(started.job_id)][-1] == "job_ended"
    spans = collector.spans  # complete, as the daemons have ended
    (root,) = (span for service, span in spans if span.name == "round")
    assert {span.trace_id for _, span in spans} == {root.trace_id}
    below = [(service, span.name) for service, span in spans if span.parent_span_id == root.span_id]
    assert sorted(below) == sorted(
        [("fl-server", phase) for phase in ("waiting", "training", "aggregating", "published")]
        + [("fl-client", name) for name in ("train", "upload")] * 2
    )
    uploads = {span.span_id for _, span in spans if span.name == "upload"}
    pushes = {span.parent_span_id for service, span in spans if service == "fl-server" and span.name.startswith("Push")}
    assert pushes == uploads
    phases = [span for _, span in spans if span.name in ("training", "aggregating")]
    first, second = sorted(phases, key=lambda span: span.start_time_unix_nano)
    assert first.start_time_unix_nano < first.end_time_unix_nano <= second.start_time_unix_nano


QUIET = """
import sys
import fedring.client.main, fedring.server.main
from fedring.daemon.tracing import set_up_tracing, span, trace_metadata
set_up_tracing("quiet")
with span("nothing"):
    print(trace_metadata(), [name for name in sys.modules if name.startswith("opentelemetry.sdk")])
"""


@pytest.mark.parametrize("exporter", [None, "none", "no_such_exporter"])
def test_nothing_is_traced_or_imported_without_a_configured_and_installed_exporter(exporter: str | None) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    env |= {"OTEL_TRACES_EXPORTER": exporter} if exporter else {}
    done = subprocess.run([sys.executable, "-c", QUIET], env=env, capture_output=True, text=True, check=True)
    warned = "no traces to no_such_exporter" in done.stderr
    assert warned == (exporter == "no_such_exporter")
    if not warned:
        assert done.stdout.strip() == "() []"
    assert done.stdout.startswith("()")
