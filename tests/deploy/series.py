"""The names of all metrics, declared and recorded."""

import re

from tests.conftest import ROOT

from fedring.client.metrics import ClientMetrics
from fedring.server.parts import server_metrics

FOLDER = ROOT / "deploy" / "prometheus"
RULES = sorted((FOLDER / "rules").glob("*.yml"))
_NAME = re.compile(r"\b(?:fl|grpc)_(?:server|client|ring|pipe)_\w+")
_RECORDED = re.compile(r"record: (fl:[\w:]+)")
_USED = re.compile(r"fl:[\w:]+")


def series() -> set[str]:
    """Return the names of all series of both daemons."""
    names = set()
    for metrics in (server_metrics(), ClientMetrics()):
        for family in metrics.registry.collect():
            endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "summary": ["_sum", "_count"]}
            names |= {family.name + ending for ending in endings.get(family.type, [""])}
    return names


def recorded() -> set[str]:
    """Return the names of all series that rules record."""
    return {name for path in RULES for name in _RECORDED.findall(path.read_text())}


def check_names(text: str) -> None:
    """Assert that all metrics in the text are declared or recorded."""
    assert set(_NAME.findall(text)) - series() == set()
    assert set(_USED.findall(text)) - recorded() == set()
