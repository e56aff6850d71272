"""Every panel of every dashboard shows something: a real Prometheus, configured as shipped, reads real daemons."""

import json
import math
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fedring.rpc.channel import open_sync_channel
from tests.conftest import ROOT, missing
from tests.fleets import Control, Fleet, until_watching
from tests.metrics_page import address_of
from tests.pki import Pki
from tests.ports import free_port

SHIPPED = ROOT / "deploy" / "prometheus"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
ANY_PORT = {"metrics_listen": "127.0.0.1:0"}
SECONDS = 120.0
FEDERATED = {"min_clients": 2, "epochs": 1}
PARALLEL = {"mode": "data_parallel", "min_clients": 2, "rounds": 1, "data_parallel": {"hook": "dgc", "ratio": 0.01}}
PIPELINE = {"mode": "pipeline", "min_clients": 2, "rounds": 1, "pipeline": {"stages": 2}}

pytestmark = pytest.mark.timeout(900)  # the first test waits for five jobs

T = TypeVar("T")
Series = list[dict[str, Any]]


class Prometheus:
    """Debian's, while a `with` lasts."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.address}",
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        self._said: list[str] = []
        self._ready = threading.Event()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def __enter__(self) -> "Prometheus":
        assert self._ready.wait(SECONDS), "".join(self._said)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(SECONDS)
        self._listener.join()

    def query(self, expression: str) -> Series:
        """What it answers now."""
        text = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://{self.address}/api/v1/query?{text}", timeout=SECONDS) as answer:
            result: Series = json.load(answer)["data"]["result"]
        return result

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._said.append(line)
                if "Server is ready to receive web requests" in line:
                    self._ready.set()


def eventually(look: Callable[[], T], true: Callable[[T], bool]) -> T:
    """The first answer of which that is true, or the last one."""
    deadline = time.monotonic() + SECONDS
    while not true(found := look()) and time.monotonic() < deadline:
        pass
    return found


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has seen the daemons start and train, and one job goes on."""
    if shutil.which("prometheus") is None:
        missing("prometheus (Debian's package)")
    folder = tmp_path_factory.mktemp("dashboards")
    pki = Pki(folder / "pki")
    pki.issue("client-0", "client-1")
    told = [{**ANY_PORT, "tls": pki.table(name)} for name in ("server", "client-0", "client-1")]
    with Fleet(folder, told[0], told[1:]) as fleet, open_control(fleet, pki) as control:
        until_watching(control, 2)
        configure(folder / "prometheus", fleet)
        with Prometheus(folder / "prometheus") as running:
            up = eventually(lambda: running.query("up == 1"), lambda found: len(found) == 3)
            assert len(up) == 3, running.query("up")
            run(control, PARALLEL)
            run(control, PIPELINE)
            seen = eventually(lambda: running.query("fl_pipe_stage_seconds_count"), lambda found: len(found) == 6)
            assert len(seen) == 6, seen  # three kinds of actions in two stages
            run(control, PIPELINE)  # a rate is that of what was there before
            run(control, {**FEDERATED, "rounds": 2})
            endless = control.start_job({**FEDERATED, "rounds": 10_000}).job_id
            yield running
            control.stop_job(endless)


def open_control(fleet: Fleet, pki: Pki) -> Control:
    """An operator's connection."""
    return Control(fleet.control, channel=open_sync_channel(fleet.control, pki.tls("operator")))


def configure(folder: Path, fleet: Fleet) -> None:
    """The folder holds what is shipped, but for the intervals and the daemons' addresses."""
    shutil.copytree(SHIPPED, folder)
    file = folder / "prometheus.yml"
    text = file.read_text()
    assert text.count(" 15s") == 2
    file.write_text(text.replace(" 15s", " 1s"))
    targets = {"server": [fleet.ready["metrics"]], "clients": [address_of(client) for client in fleet.clients]}
    for name, addresses in targets.items():
        (folder / "targets" / f"{name}.yml").write_text(json.dumps([{"targets": addresses}]))  # JSON is YAML


def run(control: Control, spec: dict[str, Any]) -> None:
    events = control.events()
    job_id = control.start_job(spec).job_id
    for _ in control.follow_job(job_id, events):
        pass
    assert control.job(job_id).state == "completed"


def queries() -> Iterator[Any]:
    """Every query of every panel."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                name = f"{path.stem}: {panel['title']} {target['refId']}"
                yield pytest.param(target["expr"].replace("$__rate_interval", "10m"), id=name)


def shown(found: Series) -> bool:
    """Whether there is a number to draw."""
    return any(math.isfinite(float(series["value"][1])) for series in found)


@pytest.mark.parametrize("expression", list(queries()))
def test_a_panel_shows_something(prometheus: Prometheus, expression: str) -> None:
    found = eventually(lambda: prometheus.query(expression), shown)
    assert shown(found), found


def test_no_alert_fires_while_all_is_well(prometheus: Prometheus) -> None:
    assert prometheus.query('ALERTS{alertstate="firing"}') == []


def test_every_rule_can_be_evaluated(prometheus: Prometheus) -> None:
    with urllib.request.urlopen(f"http://{prometheus.address}/api/v1/rules", timeout=SECONDS) as answer:
        groups = json.load(answer)["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, rules
