"""The dashboards: each query is valid and names existing metrics, and no panels overlap."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from tests.conftest import ROOT
from tests.deploy.promtool import promtool
from tests.deploy.series import check_names

FOLDER = ROOT / "deploy" / "grafana"
PATHS = sorted((FOLDER / "dashboards").glob("*.json"))
UNITS = {"short", "s", "bytes", "Bps", "ops", "percentunit"}
each = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_dashboards", FOLDER / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def expressions(path: Path) -> list[str]:
    """Return every query of the dashboard, with an interval that Prometheus understands."""
    panels = read(path)["panels"]
    return [t["expr"].replace("$__rate_interval", "1m") for panel in panels for t in panel.get("targets", [])]


def test_the_dashboards_are_up_to_date() -> None:
    tables = generator()
    assert {d.uid for d in tables.DASHBOARDS} == {path.stem for path in PATHS}
    for dashboard in tables.DASHBOARDS:
        assert (FOLDER / "dashboards" / f"{dashboard.uid}.json").read_text() == tables.render(dashboard)


@each
def test_every_query_parses(path: Path, tmp_path: Path) -> None:
    rules = [{"record": f"throw_away_{number}", "expr": text} for number, text in enumerate(expressions(path))]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "throw_away", "rules": rules}]}))  # JSON is YAML
    result = promtool("check", "rules", file)
    assert result.returncode == 0, result.stdout
    assert f"{len(rules)} rules found" in result.stdout


def test_the_check_finds_a_query_that_does_not_parse(tmp_path: Path) -> None:
    rules = [{"record": "throw_away", "expr": "sum by (le (rate(fl_server_update_bytes_bucket[1m])))"}]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "throw_away", "rules": rules}]}))
    assert promtool("check", "rules", file).returncode != 0


@each
def test_every_metric_is_declared(path: Path) -> None:
    for expression in expressions(path):
        assert re.search(r"\b(fl[_:]|grpc_|process_|up\b)", expression), expression
        check_names(expression)


@each
def test_a_dashboard_keeps_to_the_conventions(path: Path) -> None:
    document = read(path)
    assert document["uid"] == path.stem
    assert "id" not in document
    assert document["editable"] is False
    assert document["schemaVersion"] >= 36
    assert [variable["name"] for variable in document["templating"]["list"]] == ["datasource", "instance"]
    for panel in document["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert {source["uid"] for source in (panel["datasource"], *(t["datasource"] for t in panel["targets"]))} == {
            "${datasource}"
        }
        for target in panel["targets"]:
            assert set(re.findall(r"\[([^]]*)\]", target["expr"])) <= {"$__rate_interval"}
            chosen = target["expr"].count('instance=~"$instance"')
            assert chosen == len(
                re.findall(r"\b(?:fl_|grpc_(?:server|client)_|process_|up\b|fl:[^r]|fl:ro)", target["expr"])
            )


@each
def test_panels_neither_overlap_nor_share_a_title(path: Path) -> None:
    places = [panel["gridPos"] for panel in read(path)["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert all(0 <= x < 24 for x, _ in cells)
    titles = [panel["title"] for panel in read(path)["panels"] if panel["type"] != "row"]
    assert len(titles) == len(set(titles))


def test_grafana_finds_the_dashboards_and_their_prometheus() -> None:
    provisioning = FOLDER / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "fedring.yml").read_text())["providers"]
    assert (provider["type"], provider["allowUiUpdates"]) == ("file", False)
    services = yaml.safe_load((ROOT / "deploy" / "docker" / "compose.yml").read_text())["services"]
    mounts = {mount["target"]: mount["source"] for mount in services["grafana"]["volumes"]}
    assert mounts[provider["options"]["path"]] == "../grafana/dashboards"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["isDefault"], source["url"]) == ("prometheus", True, "$PROMETHEUS_URL")
    assert services["grafana"]["environment"]["PROMETHEUS_URL"].startswith("http://prometheus:")
