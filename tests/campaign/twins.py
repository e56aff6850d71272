"""The undisturbed twin of a case: the same job in the simulation, in a process of its own."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from fedring.simulation import simulate
from fedring.simulation.server import SimulatedServer
from fedring.train.jobs.job import Job
from tests import forks
from tests.campaign.evidence import Evidence
from tests.campaign.scene import SECRET

_SECONDS = 300.0


def twin_digests(evidence: Evidence, rounds: int) -> list[str]:
    """Return the digests of the models of an undisturbed run, one for each round."""
    out = evidence.folder / "twin.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    keys = {key: value for key, value in evidence.job.items() if key in Job.model_fields}
    job = {**keys, "rounds": rounds, "start": "fresh"}
    codes = forks.call_all([partial(_run, job, len(evidence.folders), out)], seconds=_SECONDS)
    assert codes == [0], f"the simulation ended with {codes}"
    digests: list[str] = json.loads(out.read_text())
    return digests


def _run(job: dict[str, Any], clients: int, out: Path) -> None:
    digests: list[str] = []
    following = SimulatedServer.next

    def noted(self: SimulatedServer, *given: Any) -> Any:
        row = following(self, *given)
        digests.append(row.digest)
        return row

    SimulatedServer.next = noted  # type: ignore[method-assign]  # this process ends with the simulation
    simulate(job, clients=clients, workers=1, threads=1, secret=SECRET)
    out.write_text(json.dumps(digests))
