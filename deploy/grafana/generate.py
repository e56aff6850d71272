"""Write the dashboards: python deploy/grafana/generate.py. Each panel is an entry of a table below."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("dashboards")
SCHEMA_VERSION = 38
COLUMNS = 24
HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
VARIABLES = [
    {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
    {
        "name": "instance",
        "label": "Instance",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(fl_build_info, instance)", "refId": "instance"},
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    },
]
# What rules record for a whole ring has no instance, so it is shown for all of them.
_METRIC = re.compile(
    r"\b(fl_\w+|grpc_(?:server|client)_\w+|process_\w+|up|fl:round_silence:seconds|fl:updates_rejected:\w+)\b(\{)?"
)


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph of queries, which are listed by their legends. With `stat`, it is a single number instead."""

    title: str
    unit: str
    queries: dict[str, str]
    width: int = 8
    stat: bool = False
    text: str = ""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard: rows of panels, by the titles of the rows."""

    uid: str
    title: str
    rows: dict[str, Sequence[Panel]]


def rate(metric: str, by: str = "") -> str:
    """Return a query for the growth of a metric per second, summed by the labels."""
    return f"sum by ({by}) (rate({metric}[$__rate_interval]))" if by else f"sum(rate({metric}[$__rate_interval]))"


def mean(metric: str, by: str = "") -> str:
    """Return a query for the mean of what a histogram or summary observed."""
    return f"{rate(metric + '_sum', by)} / {rate(metric + '_count', by)}"


def quantile(share: float, metric: str, by: str = "") -> str:
    """Return a query for the value that this share of a histogram's observations does not exceed."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket[$__rate_interval])))"


def of_instances(query: str) -> str:
    """Return the query for the instances that the user has chosen."""
    return _METRIC.sub(lambda found: f'{found[1]}{{instance=~"$instance"{"," if found[2] else "}"}', query)


FEDERATION = Dashboard(
    "fedring-federation",
    "fedring: federation",
    {
        "Rounds": (
            Panel("Rounds", "short", {"{{result}}": "sum by (result) (fl_server_rounds_total)"}, 4, stat=True),
            Panel("Accuracy", "percentunit", {"": "max(fl_server_model_accuracy_ratio)"}, 4, stat=True),
            Panel("Clients", "short", {"": "sum(fl_server_clients_connected)"}, 4, stat=True),
            Panel("Since the newest model", "s", {"": "max(fl:round_silence:seconds)"}, 4, stat=True,
                  text="While a job runs: since its start, or since the newest model."),
            Panel("Jobs", "short", {"{{state}}": "sum by (state) (fl_server_jobs)"}),
            Panel("Clients of the rounds", "short", {"{{state}}": "sum by (state) (fl_server_round_clients)"}),
            Panel("Rounds per hour", "short", {"{{result}}": f"3600 * {rate('fl_server_rounds_total', 'result')}"}, 6),
            Panel("Clients not waited for, per hour", "short", {
                "stalled": f"3600 * {rate('fl_server_clients_stalled_total')}",
                "stragglers": f"3600 * {rate('fl_server_stragglers_total')}",
            }, 6, text="Stalled: no progress for stalled_after_seconds. Stragglers: left out by straggler_factor."),
            Panel("Round duration", "s", {
                "median": quantile(0.5, "fl_server_round_duration_seconds"),
                "95 %": quantile(0.95, "fl_server_round_duration_seconds"),
                "deadline": "max(fl_server_round_deadline_seconds)",
            }, 6),
            Panel("Time in each phase, per round", "s",
                  {"{{phase}}": mean("fl_server_round_phase_seconds", "phase")}, 6),
        ),
        "Model": (
            Panel("Accuracy of the newest model", "percentunit", {"{{instance}}": "fl_server_model_accuracy_ratio"}),
            Panel("Loss of the newest model", "short", {"{{instance}}": "fl_server_model_loss"}),
            Panel("Named metrics of the newest round", "short", {"{{metric}}": "fl_server_round_metric"}),
            Panel("Aggregation", "s", {
                "mean": mean("fl_server_aggregate_seconds"),
                "95 %": quantile(0.95, "fl_server_aggregate_seconds"),
            }),
        ),
        "Updates": (
            Panel("Updates", "ops", {"{{result}}": rate("fl_server_updates_total", "result")}),
            Panel("Refused updates", "ops", {"{{reason}}": rate("fl_server_updates_rejected_total", "reason")}),
            Panel("Share of refused updates", "percentunit",
                  {"{{instance}}": "fl:updates_rejected:ratio_rate15m"}),
            Panel("Size of updates", "bytes", {
                "median": quantile(0.5, "fl_server_update_bytes"),
                "95 %": quantile(0.95, "fl_server_update_bytes"),
                "mean": mean("fl_server_update_bytes"),
            }),
            Panel("Norm of updates", "short", {
                "median": quantile(0.5, "fl_server_update_norm"),
                "95 %": quantile(0.95, "fl_server_update_norm"),
            }),
            Panel("Clients at work for asynchronous jobs", "short", {
                "at work": "sum(fl_server_commands_at_work)",
                "{{reason}}, per hour": f"3600 * {rate('fl_server_commands_over_total', 'reason')}",
            }, text="By reason: commands that ended without an update."),
            Panel("Age of updates of asynchronous jobs, in versions", "short", {
                "mean": mean("fl_server_update_staleness_versions"),
                "95 %": quantile(0.95, "fl_server_update_staleness_versions"),
            }),
            Panel("Payloads of all clients", "Bps", {
                "up": rate("fl_client_upload_bytes_total"),
                "down": rate("fl_client_download_bytes_total"),
            }),
        ),
        "Privacy": (
            Panel("Privacy spent (ε)", "short", {"{{instance}}": "fl_server_privacy_epsilon"},
                  text="Of all published rounds with [dp] together, for the delta of the newest such job."),
            Panel("Clients lost in secure aggregation, per hour", "short",
                  {"{{step}}": f"3600 * {rate('fl_server_secure_lost_clients_total', 'step')}"}),
            Panel("Time of each step of secure aggregation", "s",
                  {"{{step}}": mean("fl_server_secure_step_seconds", "step")}),
        ),
        "Fleet": (
            Panel("Connected clients", "short", {
                "connected": "sum(fl_server_clients_connected)",
                "needed": "max(fl_server_round_min_clients)",
            }, 6),
            Panel("Reconnects", "ops", {"{{instance}}": rate("fl_client_reconnects_total", "instance")}, 6),
            Panel("Rounds of clients", "ops", {"{{result}}": rate("fl_client_rounds_total", "result")}, 6),
            Panel("Training, per round", "s", {"{{instance}}": mean("fl_client_train_seconds", "instance")}, 6),
        ),
    },
)  # fmt: skip

PARALLEL = Dashboard(
    "fedring-parallel",
    "fedring: data parallel and pipeline",
    {
        "Data parallel": (
            Panel("Compression", "short", {"dense / sent": "fl:ring_compression:ratio"}, 4, stat=True,
                  text="Bytes that plain all-reduces would have sent, divided by the bytes that were sent."),
            Panel("Samples per second", "short", {"": rate("fl_ring_samples_total")}, 4, stat=True),
            Panel("Steps per second", "ops", {"{{instance}}": rate("fl_ring_step_seconds_count", "instance")}),
            Panel("Where a step's time goes", "s", {
                "waiting": f"{rate('fl_ring_idle_seconds_total')} / {rate('fl_ring_step_seconds_count')}",
                "compressing":
                    f"{rate('fl_ring_hook_compress_seconds_total')} / {rate('fl_ring_step_seconds_count')}",
                "decompressing":
                    f"{rate('fl_ring_hook_decompress_seconds_total')} / {rate('fl_ring_step_seconds_count')}",
                "total": mean("fl_ring_step_seconds"),
            }),
        ),
        "Ring": (
            Panel("Exchange of gradients", "s", {"{{instance}}": mean("fl_ring_allreduce_seconds", "instance")}),
            Panel("Slow ranks", "percentunit", {"rank {{peer_rank}}": "fl:ring_wait:rate5m"},
                  text="Seconds per second that all other ranks together wait for a rank. The highest is the slowest."),
            Panel("Bytes to peers", "Bps", {
                "sent": rate("fl_ring_sent_bytes_total"),
                "dense": rate("fl_ring_dense_bytes_total"),
            }),
            Panel("Share of the gradient that is sent", "percentunit", {"{{instance}}": "fl_ring_sparsity_ratio"}, 12),
            Panel("Norm of the residual", "short", {"{{instance}}": "fl_ring_residual_norm"}, 12),
        ),
        "Pipeline": (
            Panel("Bubble", "percentunit", {"{{instance}}": "fl_pipe_bubble_ratio"}),
            Panel("Action of a stage", "s",
                  {"stage {{stage}} {{kind}}": mean("fl_pipe_stage_seconds", "stage, kind")}),
            Panel("Micro-batches in flight", "short", {"{{instance}}": "fl_pipe_inflight_microbatches"}),
        ),
    },
)  # fmt: skip

PROCESS = Dashboard(
    "fedring-process",
    "fedring: process health",
    {
        "Processes": (
            Panel("Up", "short", {"{{job}} {{instance}}": 'up{job=~"fl-server|fl-client"}'}, 6, stat=True),
            Panel("Leads", "short", {
                "{{instance}}": "fl_server_leads",
                "{{instance}}: standbys": "fl_server_standbys",
            }, 6, stat=True, text="1 = this server leads, or has its state for itself; 0 = it waits as a standby."),
            Panel("Version", "short", {"{{instance}} {{version}}": "fl_build_info"}, 6, stat=True),
            Panel("Processor", "percentunit",
                  {"{{instance}}": "rate(process_cpu_seconds_total{job=~\"fl-.*\"}[$__rate_interval])"}, 6),
            Panel("Memory", "bytes", {"{{instance}}": 'process_resident_memory_bytes{job=~"fl-.*"}'}, 6),
            Panel("Open files", "short", {"{{instance}}": 'process_open_fds{job=~"fl-.*"}'}, 6),
            Panel("Lag of the event loop", "s", {
                "median": quantile(0.5, "fl_server_event_loop_lag_seconds"),
                "99 %": quantile(0.99, "fl_server_event_loop_lag_seconds"),
            }, 6),
            Panel("Work that waits for threads", "short", {"{{instance}}": "fl_server_executor_queue_length"}, 6),
            Panel("Time of the newest commit", "s", {"{{instance}}": "fl_server_last_fsync_seconds"}, 6),
        ),
        "Disks and certificates": (
            Panel("Free disk", "percentunit",
                  {"{{instance}}": "fl_server_disk_free_bytes / fl_server_disk_size_bytes"}),
            Panel("Log of the database", "bytes", {"{{instance}}": "fl_server_database_log_bytes"}),
            Panel("Unsent updates", "bytes", {"{{instance}}": "fl_client_spool_bytes"}),
            Panel("Time until certificates end", "s", {
                "{{instance}}": "fl_server_certificate_expiry_timestamp_seconds - time()",
                "{{instance}} ": "fl_client_certificate_expiry_timestamp_seconds - time()",
            }),
        ),
        "Authentication": (
            Panel("Refused callers", "ops", {"{{reason}}": rate("fl_server_auth_refusals_total", "reason")}, 12),
            Panel("Handshakes", "ops", {
                "begun": rate("fl_server_handshakes_total"),
                "followed by a call": rate("fl_server_connections_total"),
            }, 12, text="Handshakes of TLS. gRPC does not report a failed handshake. No call follows it."),
        ),
        "gRPC": (
            Panel("Calls of the server", "ops", {"{{grpc_code}}": rate("grpc_server_handled_total", "grpc_code")}, 6),
            Panel("Calls of the server, by method", "ops",
                  {"{{grpc_method}}": rate("grpc_server_started_total", "grpc_method")}, 6),
            Panel("Time of a call (95 %)", "s",
                  {"{{grpc_method}}": quantile(0.95, "grpc_server_handling_seconds", "grpc_method")}, 6),
            Panel("Calls in flight", "short",
                  {"{{grpc_method}}": "sum by (grpc_method) (grpc_server_in_flight_calls)"}, 6),
            Panel("Bytes of the server", "Bps", {
                "received": rate("grpc_server_received_bytes_total"),
                "sent": rate("grpc_server_sent_bytes_total"),
            }, 6),
            Panel("Calls of clients", "ops", {"{{grpc_code}}": rate("grpc_client_handled_total", "grpc_code")}, 6),
            Panel("Bytes of clients", "Bps", {
                "received": rate("grpc_client_received_bytes_total"),
                "sent": rate("grpc_client_sent_bytes_total"),
            }, 6),
            Panel("Calls of clients in flight", "short",
                  {"{{grpc_method}}": "sum by (grpc_method) (grpc_client_in_flight_calls)"}, 6),
        ),
    },
)  # fmt: skip

DASHBOARDS = (FEDERATION, PARALLEL, PROCESS)


def render(dashboard: Dashboard) -> str:
    """Return the JSON of a dashboard, as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in dashboard.rows.items():
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []})
        y, x = y + 1, 0
        for panel in row:
            if x + panel.width > COLUMNS:
                y, x = y + HEIGHT, 0
            panels.append(_panel(panel, {"h": HEIGHT, "w": panel.width, "x": x, "y": y}))
            x += panel.width
        y += HEIGHT
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["fedring"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": VARIABLES},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, start=1)],
    }  # fmt: skip
    return json.dumps(document, indent=2) + "\n"


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "expr": of_instances(query),
            "legendFormat": legend.strip(),
        }
        for number, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": targets,
    }


def main() -> int:
    """Write all dashboards and return the exit code."""
    TARGET.mkdir(exist_ok=True)
    for dashboard in DASHBOARDS:
        (TARGET / f"{dashboard.uid}.json").write_text(render(dashboard), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
