"""The metrics that a daemon serves to Prometheus, as values for tests."""

import json
import threading
import time
import urllib.request
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from fedring.ctl.process import Process

SECONDS = 60.0


class Page:
    """The contents of `/metrics` at one moment."""

    def __init__(self, address: str) -> None:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=SECONDS) as answer:
            self.text: str = answer.read().decode()
        self.samples: list[Sample] = [s for family in text_string_to_metric_families(self.text) for s in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """Return the value of the only series with this name and exactly these labels."""
        (found,) = [sample.value for sample in self.samples if sample.name == name and sample.labels == labels]
        return found

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Return the values other than 0 of all series with this name and these labels, by the label `label`."""
        wanted = [s for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        return {s.labels[label]: s.value for s in wanted if s.value}


def address_of(client: Process) -> str:
    """Return the address at which a client serves its metrics, from its log."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for line in client.log.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n") and "metrics" in (record := json.loads(line)):
                return str(record["metrics"])
        threading.Event().wait(0.05)
    raise AssertionError(client.tail())


def eventually(address: str, condition: Callable[[Page], bool]) -> Page:
    """Return the first page that meets the condition: a daemon may answer a call just before it counts it."""
    deadline = time.monotonic() + SECONDS
    while not condition(page := Page(address)):
        assert time.monotonic() < deadline, page.text
    return page
