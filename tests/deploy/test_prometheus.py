"""The configuration, rules and alerts for Prometheus are valid and name existing metrics."""

import re
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.deploy.promtool import promtool

from fedring.client.metrics import ClientMetrics
from fedring.server.operator.metrics import Metrics as ServerMetrics

FOLDER = ROOT / "deploy" / "prometheus"
RULES = sorted((FOLDER / "rules").glob("*.yml"))
_NAME = re.compile(r"\b(?:fl|grpc)_(?:server|client|ring|pipe)_\w+")
_RECORDED = re.compile(r"record: (fl:[\w:]+)")
_USED = re.compile(r"fl:[\w:]+")


def series() -> set[str]:
    """Return the names of all series of both daemons."""
    names = set()
    for metrics in (ServerMetrics(), ClientMetrics()):
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


def test_promtool_accepts_the_configuration_and_its_rules() -> None:
    result = promtool("check", "config", FOLDER / "prometheus.yml")
    assert result.returncode == 0, result.stdout
    assert f"{len(RULES)} rule files found" in result.stdout


def test_the_alerts_fire_when_they_should_and_not_before() -> None:
    result = promtool("test", "rules", FOLDER / "tests" / "alerts.yml")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_rules_name_metrics_that_are_declared(path: Path) -> None:
    check_names(path.read_text())


def test_the_check_finds_an_undeclared_metric() -> None:
    for text in ("rate(fl_server_rounds_totals[5m])", "fl:round_silence:minutes > 5"):
        with pytest.raises(AssertionError):
            check_names(text)


def test_every_alert_is_tested() -> None:
    alerts = set(re.findall(r"alert: (\w+)", (FOLDER / "rules" / "alerts.yml").read_text()))
    tests = (FOLDER / "tests" / "alerts.yml").read_text()
    fired = set(re.findall(r"alertname: (\w+)\n +exp_alerts", tests))
    silent = set(re.findall(r"alertname: (\w+)\n(?! +exp_alerts)", tests))
    assert fired == alerts
    assert silent == alerts - {"FlResidualGrows"}, "each alert is also tested where it must be silent"


def test_every_alert_is_documented() -> None:
    alerts = re.findall(r"alert: (\w+)", (FOLDER / "rules" / "alerts.yml").read_text())
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert re.findall(r"^\| `(Fl\w+)`", page, re.MULTILINE) == alerts
