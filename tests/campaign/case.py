"""Run one case, which follows from a seed and a number, and judge it."""

import shutil
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.campaign import checks
from tests.campaign.evidence import Evidence
from tests.campaign.harms import HARMS
from tests.campaign.kinds import KINDS, Case
from tests.campaign.scene import Scene, pause, pause_at_random
from tests.damage import ask
from tests.fault.faulty_fleet import wait_for
from tests.fault.residuals import has_spooled_update
from tests.fleets import until_watching
from tests.waiting import until

FEWEST, MOST = 5, 9  # harms of a case
_LONGEST = 0.3  # seconds before a harm, at most
_WORK_SECONDS = 6.0  # in which the fleet shall come to work again after a harm; else the next harm comes all the same


@dataclass
class Outcome:
    """What became of a case.

    Attributes:
        seed, number: repeat it.
        kind: its name.
        harms: the names of those that were drawn, in order.
        done: how often each was done, and to whom.
        counts: what was compared, and what was found lost or doubled.
        problems: what did not hold.
        seconds: how long it took.
    """

    seed: int
    number: int
    kind: str
    harms: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def kills(self) -> int:
        """How many processes were killed, at a random moment or at a crash point."""
        return sum(times for words, times in self.done.items() if words.startswith(("kill -9", "crash")))

    @property
    def command(self) -> str:
        """What repeats this case alone."""
        return f"python -m tests.campaign --seed {self.seed} --case {self.number} --kinds {self.kind}"

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as a JSON object."""
        return {**vars(self), "kills": self.kills, "command": self.command}


def kind_of(seed: int, number: int, names: list[str]) -> str:
    """Return the kind of a case: each of them comes once before one comes again, in an order that the seed says."""
    order = sorted(names)
    Random(f"order {seed} {number // len(order)}").shuffle(order)
    return order[number % len(order)]


def run_case(seed: int, number: int, kind: str, folder: Path, *, most: int = MOST) -> Outcome:
    """Run one case in an empty folder, which is removed if all promises hold.

    Args:
        seed: of the campaign.
        number: of the case.
        kind: the name of its kind.
        folder: where its daemons keep their states and logs.
        most: how many harms are done at most; it is a short case if they are few.
    """
    rng = Random(f"{seed} {number} {kind}")
    case = KINDS[kind](rng)
    harms = [rng.choice(case.harms) for _ in range(min(rng.randint(FEWEST, MOST), case.most_harms, most))]
    outcome, began = Outcome(seed, number, kind, harms), time.monotonic()
    scene = Scene(folder, case.clients, case.settings, case.client)
    try:
        try:
            if "fill_disk" in harms:
                scene.mount_disk()
            with scene:
                evidence = _disturb(scene, case, harms, rng)
                for check in (checks.everywhere, *case.checks):
                    outcome.problems += check(evidence, outcome.counts)
        finally:
            outcome.done = scene.done
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  # a case that breaks has failed
        where = "".join(traceback.format_tb(error.__traceback__)[-3:])
        outcome.problems.append(f"P3: the case came to no end: {type(error).__name__}: {error}\n{where}"[:6000])
    if outcome.problems and scene.disk is not None:
        shutil.copytree(scene.state, folder / "state-on-its-disk", symlinks=True)
    scene.unmount_disk()
    outcome.seconds = time.monotonic() - began
    if not outcome.problems:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _disturb(scene: Scene, case: Case, harms: list[str], rng: Random) -> Evidence:
    """Run the job under the harms until it is stopped, end all daemons, and return what they have left."""

    def start(rounds: dict[str, Any]) -> int:
        scene.ask(lambda control: until_watching(control, case.clients))
        job_id: int = scene.ask(lambda control: control.start_job({**case.job, **rounds}).job_id)
        return job_id

    job_id = start({})
    beside = [start({"name": f"beside {number}"}) for number in range(case.beside)]
    for name in harms:
        _let_work(scene, rng)
        HARMS[name](scene, rng)
    second_id = 0
    if case.to_the_end:
        _wait_for_end(scene, job_id)
        second_id = start({})
        _wait_for_end(scene, second_id)
    else:
        for each in (job_id, *beside):
            _let_go_on(scene, each, 1 if case.last_round else 0)  # now that nothing is harmed
        for each in (*beside, job_id):
            state, reason = scene.end_job(each)
            assert state == "stopped", f"job {each} is {state}: {reason}"
    if case.last_round:
        # It waits for all clients: one that had just returned has not used, or dropped, what its folder holds.
        _wait_for_end(scene, start({"rounds": 1, "start": "newest", "min_clients": case.clients}))
        wait_for(scene, "the clients' notes", lambda: until(lambda: not any(map(has_spooled_update, scene.folders))))
    charged: int = scene.ask(lambda control: control.privacy().rounds)
    for client in scene.clients:
        client.kill()
    scene.stop()
    scene.start_server()  # it sweeps what nobody names any more
    scene.server.kill()
    names = [client.name for client in scene.clients]
    return Evidence(
        scene.state,
        scene.folders,
        scene.logs(),
        sent=[line.sent for line in scene.lines],
        lost=scene.lost,
        job=case.job,
        job_id=job_id,
        charged_rounds=charged,
        folder=scene.directory / "checked",
        second_id=second_id,
        down_seconds=scene.down_seconds,
        originals=scene.originals,
        reverted={index for index, name in enumerate(names) if scene.done[f"older folder of {name}"]} | scene.damaged,
        must_drop=scene.must_drop,
        done=scene.done,
        clock=scene.clock,
    )


def _let_go_on(scene: Scene, job_id: int, rounds: int) -> None:
    """Wait until a job has published so many more rounds, or is over."""
    enough = rounds + int(scene.ask(lambda control: control.job(job_id).rounds_done))
    until(lambda: scene.ask(lambda control: control.job(job_id).rounds_done >= enough or _over(control, job_id)))


def _wait_for_end(scene: Scene, job_id: int) -> None:
    until(lambda: scene.ask(lambda control: _over(control, job_id)))
    job = scene.ask(lambda control: control.job(job_id))
    assert job.state == "completed", f"the job is {job.state}: {job.reason}"


def _let_work(scene: Scene, rng: Random) -> None:
    """Wait until a random number of updates was accepted since the last harm, then for a random moment."""

    def accepted() -> int:
        pruned = "SELECT coalesce(sum(pruned_updates), 0) FROM clients"
        ((number,),) = ask(scene.state, f"SELECT (SELECT count(*) FROM updates) + ({pruned})")
        return int(str(number))

    wanted, ends = accepted() + rng.choice([0, 0, 1, 2, 3, 4, 5, 6, 8]), time.monotonic() + _WORK_SECONDS
    while accepted() < wanted and time.monotonic() < ends:
        pause(0.02)
    pause_at_random(rng, _LONGEST)


def _over(control: Any, job_id: int) -> bool:
    return control.job(job_id).state not in ("queued", "running")
