"""The campaign in short: some cases hold, each planted fault is noticed, and results add up."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from random import Random

import numpy as np
import pytest
from rich.console import Console

from tests.campaign import checks, results
from tests.campaign.case import Outcome, kind_of, run_case
from tests.campaign.evidence import Evidence
from tests.campaign.faults import KINDS_FOR
from tests.campaign.harms import HARMS
from tests.campaign.kinds import KINDS
from tests.campaign.layer import FAILING, FULL, PRELOAD, SOURCE, Page
from tests.campaign.lessons import SIZE
from tests.conftest import ROOT, SEED, missing
from tests.damage import ask, flip, model_file
from tests.mutants import MUTANTS
from tests.power.records import build_layer


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sparse", "noisy", "asynchronous"])
def test_the_promises_hold_in_a_case(kind: str, tmp_path: Path) -> None:
    outcome = run_case(SEED, 0, kind, tmp_path / "case", most=4)
    assert outcome.problems == []
    assert outcome.done
    assert outcome.kills >= sum(name.startswith("kill_") for name in outcome.harms)
    assert outcome.counts["accepted"] > 0
    assert outcome.counts["models"] + outcome.counts["charges"] > 0


@pytest.mark.slow
def test_the_promises_hold_when_syncs_fail(tmp_path: Path) -> None:
    built_layer(tmp_path)
    results_file, words = tmp_path / "results.jsonl", ["--seed", "3", "--case", "0", "--kinds", "unsynced"]
    command = [sys.executable, "-m", "tests.campaign", *words, "--results", str(results_file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=dict(os.environ))
    (result,) = results.read(results_file)
    assert (done.returncode, result["problems"]) == (0, []), done.stdout
    assert {words.partition(" of ")[0] for words in result["done"]} >= {"failing syncs"}


_SYSTEM = """
import os, sys, threading, time
os.environ[sys.argv[1]] = sys.argv[2]
print(time.time(), flush=True)
for line in sys.stdin:
    try:
        exec(line)
    except OSError as error:
        print(error.errno, flush=True)
"""


def test_the_layer_lets_one_daemon_believe_in_another_time_and_a_failing_disk(tmp_path: Path) -> None:
    library, root = built_layer(tmp_path), tmp_path / "root"
    root.mkdir()
    page = Page(tmp_path / "page", root)
    command = [sys.executable, "-c", _SYSTEM, *next(iter(page.variables.items()))]
    page.jump = -7200
    with subprocess.Popen(
        command, env={**os.environ, PRELOAD: str(library)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        asked, answers = process.stdin, process.stdout
        assert asked
        assert answers

        def told(line: str) -> str:
            print(line, file=asked, flush=True)
            return answers.readline().strip()

        assert float(answers.readline()) - time.time() == pytest.approx(-7200, abs=60)
        page.jump = 86_400
        assert float(told("print(time.time(), flush=True)")) - time.time() == pytest.approx(86_400, abs=60)
        began = time.monotonic()
        assert told("print(threading.Condition(threading.Lock()).acquire(), flush=True)") == "True"
        assert told("c = threading.Condition(); c.acquire(); print(c.wait(0.01), flush=True)") == "False"
        assert time.monotonic() - began < 3600, "a wait ends by the kernel's clock"
        opened = f"ours, other = open('{root}/a', 'wb', 0), open('{tmp_path}/b', 'wb', 0)"
        assert told(f"{opened}; print(os.fsync(ours.fileno()), flush=True)") == "None"
        page.fail(syncs=FAILING)
        assert told("os.fsync(ours.fileno())") == str(FAILING)
        assert told("print(os.fsync(other.fileno()), ours.write(b'1'), flush=True)") == "None 1"
        page.fail(writes=FULL)
        assert told("ours.write(b'1')") == str(FULL)
        assert told("print(other.write(b'1'), os.fsync(ours.fileno()), flush=True)") == "1 None"
        assert told(f"open('{root}/probe', 'wb', 0).write(b'1')") == str(FULL), "not counted: nothing is kept there"
        page.fail()
        assert told("print(ours.write(b'1'), flush=True)") == "1"
        assert page.failed == 2
        asked.close()


def built_layer(folder: Path) -> Path:
    """Return the campaign's layer; skip the test where it cannot be built."""
    if (library := build_layer(folder, SOURCE)) is None:
        missing("a C compiler for Linux, with which a layer under programs is built,")
    return library


def test_a_jump_of_the_clock_makes_no_round_longer(left: Evidence, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(left.state, state)
    ask(state, "DELETE FROM events")
    right = seconds_of(state, left)
    ((at,),) = ask(state, "SELECT (started_at + ended_at) / 2 FROM rounds WHERE round = 2")
    for column in ("started_at", "ended_at"):
        ask(state, f"UPDATE rounds SET {column} = {column} - 7200 WHERE {column} > ?", at)
    assert seconds_of(state, left)[1] == pytest.approx(right[1] - 7200)
    assert seconds_of(state, left, [(float(str(at)) - 600, 0), (float(str(at)), -7200)]) == pytest.approx(right)


def test_a_round_that_waits_for_its_clients_takes_no_longer(left: Evidence, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(left.state, state)
    ask(state, "DELETE FROM events")
    right = seconds_of(state, left)
    ask(
        state,
        "INSERT INTO events (id, at, kind, text, job_id, round, client_id) "
        "SELECT round, started_at, 'round_started', '', job_id, round, '' FROM rounds",
    )
    ask(state, "UPDATE rounds SET started_at = started_at - 100")
    assert seconds_of(state, left) == pytest.approx(right)


def seconds_of(state: Path, left: Evidence, clock: Sequence[tuple[float, int]] = ((0, 0),)) -> list[float]:
    """Return how long each round of a copy of the state took."""
    return [round_.seconds for round_ in Evidence(state, left.folders, left.logs, job=left.job, clock=clock).rounds]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """Run a case whose folder is kept; return what it has left."""
    kept: list[Evidence] = []
    case = KINDS["private"](Random(0))

    def keep(evidence: Evidence, counts: Counter[str]) -> list[str]:
        kept.append(evidence)
        return ["it is to be kept"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "private", lambda rng: type(case)(case.job, [*case.checks, keep], harms=["kill_server"]))
        outcome = run_case(SEED, 0, "private", tmp_path_factory.mktemp("left") / "case", most=2)
    assert outcome.problems == ["it is to be kept"]
    return kept[0]


def lose_an_update(evidence: Evidence) -> None:
    ask(evidence.state, "DELETE FROM updates WHERE round = 1 AND client_id = 'client-1'")


def count_an_update_twice(evidence: Evidence) -> None:
    columns = [str(name) for _, name, *_ in ask(evidence.state, "PRAGMA table_info(updates)")]
    others = ", ".join(name for name in columns if name not in ("round", "buffer"))
    ask(
        evidence.state,
        f"INSERT INTO updates (round, buffer, {others}) "
        f"SELECT 1000, 1000, {others} FROM updates WHERE round = 1 LIMIT 1",
    )


def damage_a_model(evidence: Evidence) -> None:
    flip(model_file(evidence.state, 2), seed=1)


def leave_a_round_open(evidence: Evidence) -> None:
    ask(evidence.state, "UPDATE rounds SET ended_at = NULL, phase = 'training' WHERE round = 1")


def forget_a_residual(evidence: Evidence) -> None:
    for path in evidence.folders[0].glob("kept-*"):
        path.unlink()


def publish_another_mean(evidence: Evidence) -> None:
    path = model_file(evidence.state, 2)
    data = path.read_bytes()
    values = np.frombuffer(data[-4 * SIZE :], "<f4") + np.float32(1)
    path.write_bytes(data[: -4 * SIZE] + values.astype("<f4").tobytes())


@pytest.mark.parametrize(
    ("plant", "promise"),
    [
        (lose_an_update, "P2: client-1 was told"),
        (count_an_update_twice, "P1: 2 accepted updates have the name"),
        (damage_a_model, "P2: the blob"),
        (leave_a_round_open, "P3: round 1 has not ended"),
        (forget_a_residual, "P6: client-0"),
        (publish_another_mean, "P5: model 2"),
    ],
)
def test_a_planted_fault_breaks_its_promise(
    left: Evidence, plant: Callable[[Evidence], None], promise: str, tmp_path: Path
) -> None:
    state, folders = tmp_path / "state", [tmp_path / folder.name for folder in left.folders]
    for old, new in zip((left.state, *left.folders), (state, *folders), strict=True):
        shutil.copytree(old, new)
    evidence = Evidence(state, folders, left.logs, job=left.job)
    assert problems_in(evidence) == []
    plant(evidence)
    assert [each for each in problems_in(Evidence(state, folders, left.logs, job=left.job)) if promise in each]


def problems_in(evidence: Evidence) -> list[str]:
    """Return what is wrong, by the checks of the kind `private`."""
    found: list[str] = []
    for check in (checks.everywhere, *KINDS["private"](Random(0)).checks):
        found += check(evidence, Counter())
    return found


def test_a_seed_says_what_is_done_to_whom() -> None:
    names = list(KINDS)
    order = [kind_of(7, number, names) for number in range(2 * len(names))]
    assert sorted(order) == sorted(2 * names)
    assert order == [kind_of(7, number, names) for number in range(2 * len(names))]
    assert order != [kind_of(8, number, names) for number in range(2 * len(names))]
    for draw in KINDS.values():
        case = draw(Random(1))
        assert case == draw(Random(1))
        assert set(case.harms) <= HARMS.keys()


def test_results_of_several_runs_add_up_and_a_failure_shows_how_to_repeat_it(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    counts = Counter({"accepted": 10, "models": 3})
    for number in range(2):
        done = Counter(
            {"kill -9 of client-1": 2, "crash at client_noted of client-0": 1, "cut of the line of client-1": 4}
        )
        results.append(file, Outcome(5, number, "sparse", [], done, counts, ["P1: wrong"] * number).as_json())
    with file.open("a") as lines:
        lines.write('{"cut short by a k')
    console = Console(record=True, width=200, file=StringIO())
    results.show(results.read(file), console)
    text = console.export_text()
    assert "2 cases, 6 kills, 20 accepted updates: 0 lost, 0 doubled; 6 models recomputed; 1 cases failed" in text
    assert "python -m tests.campaign --seed 5 --case 1 --kinds sparse" in text
    assert json.loads(file.read_text().splitlines()[0])["kills"] == 3


def test_the_faults_that_the_campaign_must_find_exist() -> None:
    assert len(KINDS_FOR) >= 10
    assert KINDS_FOR.keys() <= MUTANTS.keys()
    assert {kind for kinds in KINDS_FOR.values() for kind in kinds} <= KINDS.keys()
