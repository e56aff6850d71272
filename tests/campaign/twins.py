"""The undisturbed twin of a case: the same job in the simulation, in a process of its own."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from fedring.server.state.rows import ModelRow
from fedring.simulation import simulate
from fedring.simulation.server import SimulatedServer, Work
from tests import forks
from tests.campaign.evidence import Evidence
from tests.campaign.scene import SECRET

_SECONDS = 300.0


def twin_digests(evidence: Evidence, rounds: int) -> list[str]:
    """Return the digests of the models of an undisturbed run, one for each round."""
    out = evidence.folder / "twin.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    codes = forks.call_all([partial(_run, dict(evidence.job), len(evidence.folders), rounds, out)], seconds=_SECONDS)
    assert codes == [0], f"the simulation ended with {codes}"
    digests: list[str] = json.loads(out.read_text())
    return digests


def _run(job: dict[str, Any], clients: int, rounds: int, out: Path) -> None:
    """Simulate the job, whose keys all have a part in what clients draw, until it has made enough models."""
    digests: list[str] = []
    following = SimulatedServer.next

    def noted(self: SimulatedServer, base: ModelRow, work: Work) -> ModelRow:
        row = following(self, base, work)
        digests.append(row.digest)
        if len(digests) == rounds:
            out.write_text(json.dumps(digests))
            os._exit(0)
        return row

    SimulatedServer.next = noted  # type: ignore[method-assign]  # this process ends with the simulation
    simulate(job, clients=clients, workers=1, threads=1, secret=SECRET)
