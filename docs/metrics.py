"""Write docs/metrics.md from the declarations of all metrics: python docs/metrics.py."""

import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric

from fedring.client.metrics import Metrics as ClientMetrics
from fedring.daemon.metrics import Registry
from fedring.server.round.metrics import Metrics as ServerMetrics

TARGET = Path(__file__).with_name("metrics.md")

INTRO = """# Metrics and dashboards

This page is written by `python docs/metrics.py` from the declarations of the metrics.

Both daemons tell Prometheus what they do if `metrics_listen` says where:

```sh
fl-server metrics_listen=127.0.0.1:9464
fl-client metrics_listen=127.0.0.1:9465
curl -s http://127.0.0.1:9464/metrics
```

Whoever reaches that port can read it, in plaintext; so an address that other hosts can reach needs `metrics_insecure =
true` (or `insecure = true`). Prometheus on another host reads it through a network of its own, as in
`deploy/docker/compose.yml`, or through ssh.
`fl-server` prints the address in its first line, as "metrics"; `fl-client` logs it. A client in Python, `connect(...,
metrics_listen=...)`, serves the same. Nothing in these metrics names a client: `flctl clients` and the logs do.

## Prometheus

`deploy/prometheus/prometheus.yml` reads the daemons that are listed in `targets/`, and takes its rules from `rules/`.
Check a change with

```sh
promtool check config deploy/prometheus/prometheus.yml
promtool test rules deploy/prometheus/tests/alerts.yml
```

| alert | when |
|---|---|
| `FlNoRoundCompleted` | a job runs, and no round has published for twice the deadline |
| `FlUpdatesRejected` | more than 10 % of the updates of 15 minutes are refused |
| `FlTooFewClients` | for 5 minutes fewer clients are connected than the newest round needed |
| `FlStraggler` | a rank of a ring is waited for three times as long as the median rank; it takes three ranks or more |
| `FlResidualGrows` | what compression owes has doubled within half an hour, and grows |
| `FlDiskFull` | less than 10 % of the state folder's disk are free |
| `FlStorageFails` | nothing can be kept, because the disk is full or fails: updates are refused |
| `FlUpdateLost` | an accepted update was found to be damaged on the disk |
| `FlCertificateExpires` | a certificate ends within 14 days |
| `FlDown` | Prometheus cannot read fl-server's metrics |

## Grafana

`deploy/grafana/dashboards` holds three dashboards, and `deploy/grafana/provisioning` what makes Grafana load them from
`/etc/grafana/dashboards/fedring`, with the Prometheus that the variable `PROMETHEUS_URL` names:

- **fedring: federation**: rounds and their phases, accuracy and loss, updates and why they are refused, the fleet.
- **fedring: data parallel and pipeline**: steps and where their time goes, compression, who is waited for, bubbles.
- **fedring: process health**: processor, memory, disks, certificates, calls and bytes of gRPC.

They are written by `python deploy/grafana/generate.py`; change the tables in it, not the JSON.

## What costs what

Clients, disks and queues are read when Prometheus asks, and so is all that is known of rings and data-parallel
training: their steps count nothing for it, but for two looks at the clock an exchange and two a wait. The norm of what
compression owes is computed when Prometheus asks, over all of the residual. Processor time, on a core of a shared
server:

| what | costs |
|---|---|
| a call of gRPC, and a message in it | 7 µs, and 0.6 µs |
| an accepted update | 4 µs |
| an exchange of gradients, and a wait for a peer | 0.4 µs, and 0.9 µs |
| a page of fl-server, of 960 lines | 16 ms |
| the norm of 25 M values that are owed | 6 ms a page |

How long gRPC takes and what it moves is told by method and by the code that the caller saw. Handshakes that fail never
become calls, and are not among them.
"""

SECTIONS = (("fl-server", ServerMetrics), ("fl-client", ClientMetrics))
COMMON = """## Both

What is known of every process and its Python.
"""
HEAD = "| name | kind | labels | meaning |\n|---|---|---|---|\n"


def render() -> str:
    """The whole page."""
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
    labels = ", ".join(f"`{label}`" for label in _labels(metric))
    return f"| `{metric.name}{suffix}` | {metric.type} | {labels} | {metric.documentation} |"


def _labels(metric: Metric) -> Iterator[str]:
    """Those of the declaration, or else, where it is not kept, those of the samples."""
    declared = getattr(metric, "_labelnames", None)
    found = {label: None for sample in metric.samples for label in sample.labels}
    return (label for label in (declared or found) if label != "le")


if __name__ == "__main__":
    sys.exit(TARGET.write_text(render(), encoding="utf-8") and 0)
