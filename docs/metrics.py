"""Write docs/metrics.md from the declarations of all metrics: python docs/metrics.py."""

import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric

from fedring.client.metrics import ClientMetrics
from fedring.daemon.metrics import Registry
from fedring.server.parts import server_metrics

TARGET = Path(__file__).with_name("metrics.md")

INTRO = """# Metrics and dashboards

`python docs/metrics.py` writes this page from the declarations of the metrics.

Both daemons serve metrics for Prometheus at the address `metrics_listen`:

```sh
fl-server metrics_listen=127.0.0.1:9464
fl-client metrics_listen=127.0.0.1:9465
curl -s http://127.0.0.1:9464/metrics
```

Anybody who reaches this port can read the metrics, in plaintext. An address that other hosts can reach therefore
needs `metrics_insecure = true` (or `insecure = true`). If Prometheus runs on another host, let it read them through a
separate network, as in `deploy/docker/compose.yml`, or through ssh.

`fl-server` prints the address in its first line, as "metrics", and `fl-client` logs it. A client in Python with
`connect(..., metrics_listen=...)` serves the same metrics. No metric names a client. `flctl clients` and the logs do.

## Prometheus

`deploy/prometheus/prometheus.yml` reads the daemons that are listed in `targets/`, and takes its rules from `rules/`.
Check a change with

```sh
promtool check config deploy/prometheus/prometheus.yml
promtool test rules deploy/prometheus/tests/alerts.yml
```

| alert | when |
|---|---|
| `FlNoRoundCompleted` | a job runs, and has published no model for twice the longest deadline of an open round |
| `FlUpdatesRejected` | more than 10 % of the updates within 15 minutes are refused |
| `FlTooFewClients` | for 5 minutes, fewer clients are connected than a job needs; without a job, than `min_clients` |
| `FlClientLost` | for 5 minutes, fewer clients are connected than at some time within the last hour |
| `FlStraggler` | a ring of three or more ranks waits three times as long for one rank as for the median rank |
| `FlResidualGrows` | the residual of a compression has doubled within half an hour and keeps growing |
| `FlDiskFull` | less than 10 % of the state folder's disk is free |
| `FlStorageFails` | the server can store nothing, because the disk is full or fails, and refuses updates |
| `FlUpdateLost` | an accepted update was found damaged on the disk |
| `FlCertificateExpires` | a certificate ends within 14 days |
| `FlClientDown` | Prometheus cannot read the metrics of an fl-client that it knows |
| `FlDown` | Prometheus cannot read the metrics of fl-server |
| `FlNoLeader` | of the servers that share a state, none leads |
| `FlLeaderChanges` | another server has begun to lead more than three times within an hour |
| `FlNoStandby` | a server that shares its state leads, and no other one waits |

## Grafana

`deploy/grafana/dashboards` holds three dashboards. `deploy/grafana/provisioning` makes Grafana load them from
`/etc/grafana/dashboards/fedring`, with the Prometheus that the variable `PROMETHEUS_URL` names:

- **fedring: federation**: rounds and their phases, accuracy and loss, updates and why they are refused, the privacy
  that is spent and the steps of secure aggregation, the fleet.
- **fedring: data parallel and pipeline**: steps and where their time goes, compression, slow ranks, bubbles.
- **fedring: process health**: processor, memory, disks, certificates, calls and bytes of gRPC.

At the top of each, you choose the Prometheus and the instances. What is recorded for a whole ring is shown for all of
them.
`python deploy/grafana/generate.py` writes them. Change the tables in that script, not the JSON.

## What the metrics cost

Clients, disks and queues are read when Prometheus asks. The same holds for everything about rings and data-parallel
training: a training step only reads the clock twice per exchange and twice per wait. The norm of the residual is
computed when Prometheus asks, over the whole residual. The table gives processor time on one core of a shared server:

| what | cost |
|---|---|
| a gRPC call, and a message in it | 7 µs, and 0.6 µs |
| an accepted update | 4 µs |
| an exchange of gradients, and a wait for a peer | 0.4 µs, and 0.9 µs |
| one reading of fl-server's metrics, of 960 lines | 16 ms |
| the norm of a residual of 25 M values | 6 ms per reading |

The metrics of gRPC count calls by method and by the code that the caller saw. A handshake that fails never becomes a
call, so it is not counted there.
"""

SECTIONS = (("fl-server", server_metrics), ("fl-client", ClientMetrics))
COMMON = """## Both

Metrics of the process and its Python.
"""
HEAD = "| name | kind | labels | meaning |\n|---|---|---|---|\n"


def render() -> str:
    """Return the whole page."""
    common = {metric.name for metric in Registry().collect()}
    parts = [INTRO]
    for title, kind in SECTIONS:
        own = [metric for metric in kind().registry.collect() if metric.name not in common]
        parts.append(f"## {title}\n\n{HEAD}{_rows(own)}\n")
    parts.append(f"{COMMON}\n{HEAD}{_rows(list(Registry().collect()))}\n")
    return "\n".join(parts)


def _rows(metrics: list[Metric]) -> str:
    return "\n".join(_row(metric) for metric in sorted(metrics, key=lambda metric: metric.name))


def _row(metric: Metric) -> str:
    suffix = {"counter": "_total", "info": "_info"}.get(metric.type, "")
    names = ", ".join(f"`{label}`" for label in labels(metric))
    return f"| `{metric.name}{suffix}` | {metric.type} | {names} | {metric.documentation} |"


def labels(metric: Metric) -> Iterator[str]:
    """Yield the labels of the declaration, or of the samples if the declaration does not keep them."""
    declared = getattr(metric, "_labelnames", None)
    found = {label: None for sample in metric.samples for label in sample.labels}
    return (label for label in (declared or found) if label != "le")


if __name__ == "__main__":
    sys.exit(TARGET.write_text(render(), encoding="utf-8") and 0)
