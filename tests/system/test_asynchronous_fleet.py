"""An asynchronous job of real daemons, of which one is far slower than the others."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.conftest import path_to
from tests.fault import user_trainers
from tests.fault.faulty_fleet import FaultyFleet, StartedJob
from tests.fault.gate import Gate
from tests.fleets import Control, until_watching
from tests.system.browser import Window, open_browser

TRUSTED = {"trusted": ["fedring", "user_trainers"]}
BUFFER, WAITED = 2, 6
JOB: dict[str, Any] = {
    "rounds": 1000,
    "trainer": "user_trainers:gated",
    "subset_size": 32,
    "weights": "uniform",
    "evaluate": False,
    "min_clients": 3,
    "min_clients_to_aggregate": 1,
    "encoding": "int8",
    "download_encoding": "int8",
    "asynchronous": {"concurrency": 3, "buffer": BUFFER, "max_staleness": 900},
}


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def test_versions_go_on_without_a_slow_client_and_count_it_when_it_comes(tmp_path: Path, gate: Gate) -> None:
    """Both directions are encoded, and the fast clients answer as fast as they can."""
    there = path_to(Path(user_trainers.__file__).parent)
    fleet = FaultyFleet(tmp_path, {"web_port": 0, "keep_models": 1000, **TRUSTED}, [TRUSTED] * 3, env=there)
    gate.close_for(fleet.clients[0])
    with fleet, Control(fleet.control) as control, open_browser() as browser:
        window = Window(browser.new_context(viewport={"width": 1280, "height": 900}), fleet.web)
        until_watching(control, 3)
        started = StartedJob(fleet, control, JOB)
        gate.wait(fleet)
        for _ in range(WAITED):
            started.until("round_published")
        gate.let_through(fleet)
        gate.wait(fleet)  # it has delivered, and trains again
        started.until("round_published")
        control.stop_job(started.job_id)
        started.rest()
        made = [each for each in control.rounds(job_id=started.job_id, limit=2000) if each.model_version]
        ages = [dict(each.asynchronous.staleness) for each in made]
        assert [len(each) for each in ages] == [BUFFER] * len(made)
        assert [each["client-0"] >= WAITED for each in ages if "client-0" in each] == [True]
        shares = Counter(name for each in ages[:10] for name in each)
        assert max(shares.values()) <= 10 * BUFFER / 2
        table = forks.run("fedring.ctl.main", "rounds", "--server", fleet.control, timeout=60).stdout
        assert f"updates of the last {min(10, len(made))} buffers by age, in versions:" in table
        window.until("document.querySelectorAll('#buffers table').length === 2")
        assert "client-1" in window.text("#buffers")
        assert window.complaints == []
        window.close()
