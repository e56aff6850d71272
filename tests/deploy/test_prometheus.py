"""The configuration, rules and alerts for Prometheus are valid and name existing metrics."""

import re
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.deploy.promtool import promtool
from tests.deploy.series import FOLDER, RULES, check_names


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
