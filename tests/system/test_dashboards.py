"""Every panel of every dashboard shows something, with a real Prometheus, our configuration, and real daemons."""

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
from tests.fleets import Control, Fleet, run_job, until_watching
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
ASYNCHRONOUS = {
    "min_clients": 2,
    "rounds": 4,
    "weights": "uniform",
    "evaluate": False,
    "asynchronous": {"concurrency": 3, "buffer": 1},
}
SECURE = {
    "min_clients": 3,
    "min_clients_to_aggregate": 3,
    "weights": "uniform",
    "evaluate": False,
    "rounds": 1,
    "secure_aggregation": {},
    "dp": {"noise_by": "clients", "adaptive": False, "noise_multiplier": 1.0, "clip": 0.1},
}

pytestmark = pytest.mark.timeout(900)  # the first test waits for eight jobs

T = TypeVar("T")
Series = list[dict[str, Any]]


class Prometheus:
    """A Prometheus server, from Debian's package; it runs until the `with` block ends."""

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
        """Return the present result of the query."""
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


def eventually(look: Callable[[], T], condition: Callable[[T], bool]) -> T:
    """Return the first answer that meets the condition, or the last answer before the time is up."""
    deadline = time.monotonic() + SECONDS
    while not condition(found := look()) and time.monotonic() < deadline:
        threading.Event().wait(0.05)  # who is asked without pause takes the processor from whom we wait for
    return found


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Run a Prometheus that has scraped daemons from their start through eight jobs, the last of which still runs."""
    if shutil.which("prometheus") is None:
        missing("prometheus (Debian's package)")
    folder = tmp_path_factory.mktemp("dashboards")
    pki = Pki(folder / "pki")
    names = ("client-0", "client-1", "client-2")
    pki.issue(*names)
    settings = [{**ANY_PORT, "tls": pki.table(name)} for name in ("server", *names)]
    with Fleet(folder, settings[0], settings[1:]) as fleet, open_control(fleet, pki) as control:
        fleet.kill(2)  # secure aggregation needs a third client, and the other jobs two
        until_watching(control, 2)
        configure(folder / "prometheus", fleet)
        with Prometheus(folder / "prometheus") as running:
            up = eventually(lambda: running.query("up == 1"), lambda found: len(found) == 3)
            assert len(up) == 3, running.query("up")
            run(control, PARALLEL)
            run(control, PIPELINE)
            seen = eventually(lambda: running.query("fl_pipe_stage_seconds_count"), lambda found: len(found) == 6)
            assert len(seen) == 6, seen  # three kinds of actions in two stages
            run(control, PIPELINE)  # a rate needs a series that existed before
            fleet.restart(2)
            run(control, SECURE)
            seen = eventually(
                lambda: running.query("fl_server_secure_step_seconds_count"), lambda found: len(found) == 5
            )
            assert len(seen) == 5, seen  # one for each step
            run(control, SECURE)
            run(control, ASYNCHRONOUS)
            run(control, {**FEDERATED, "rounds": 2})
            endless = control.start_job({**FEDERATED, "rounds": 10_000}).job_id
            yield running
            control.stop_job(endless)


def open_control(fleet: Fleet, pki: Pki) -> Control:
    """Connect as an operator."""
    return Control(fleet.control, channel=open_sync_channel(fleet.control, pki.tls("operator")))


def configure(folder: Path, fleet: Fleet) -> None:
    """Copy our configuration to the folder, with short intervals and the daemons' addresses."""
    shutil.copytree(SHIPPED, folder)
    file = folder / "prometheus.yml"
    text = file.read_text()
    assert text.count(" 15s") == 2
    file.write_text(text.replace(" 15s", " 1s"))
    targets = {"server": [fleet.ready["metrics"]], "clients": [address_of(client) for client in fleet.clients[:2]]}
    for name, addresses in targets.items():
        (folder / "targets" / f"{name}.yml").write_text(json.dumps([{"targets": addresses}]))  # JSON is YAML


def run(control: Control, spec: dict[str, Any]) -> None:
    """Run the job, which must complete."""
    assert run_job(control, spec).state == "completed"


def queries() -> Iterator[Any]:
    """Yield every query of every panel."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                name = f"{path.stem}: {panel['title']} {target['refId']}"
                yield pytest.param(
                    target["expr"].replace("$__rate_interval", "10m").replace("$instance", ".*"), id=name
                )


def shown(found: Series) -> bool:
    """Return whether the result has a number to draw."""
    return any(math.isfinite(float(series["value"][1])) for series in found)


@pytest.mark.parametrize("expression", list(queries()))
def test_a_panel_shows_something(prometheus: Prometheus, expression: str) -> None:
    found = eventually(lambda: prometheus.query(expression), shown)
    assert shown(found), found


def test_no_alert_fires_while_everything_works(prometheus: Prometheus) -> None:
    assert prometheus.query('ALERTS{alertstate="firing"}') == []


def test_every_rule_can_be_evaluated(prometheus: Prometheus) -> None:
    with urllib.request.urlopen(f"http://{prometheus.address}/api/v1/rules", timeout=SECONDS) as answer:
        groups = json.load(answer)["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, rules
