"""Evaluations that fail: operators read the client's sentence wherever they look, and no job is green without one."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedring.daemon.exits import Exit
from tests.conftest import ROOT, path_to
from tests.fleets import Control, Flctl, Fleet, until_watching

TRUSTED = {"trusted": ["fedring", "user_evaluators"]}
JOB = ["rounds=2", "epochs=1", "subset_size=32", "min_clients=2"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start a server and two clients that have the user's module."""
    parts = [{**TRUSTED, "partition_index": index, "partition_count": 2} for index in range(2)]
    folder, code = tmp_path_factory.mktemp("evaluations"), ROOT / "tests" / "fixtures_user_code"
    with Fleet(folder, {**TRUSTED, "web_port": 0}, parts, env=path_to(code)) as fleet:
        with Control(fleet.control) as control:
            until_watching(control, 2)
        yield fleet


def tell(flctl: Flctl, fleet: Fleet, *words: str | Path) -> tuple[int, str, str]:
    """Run flctl; return its exit code, stdout and stderr."""
    done = flctl(*words, "--server", fleet.control)
    return done.returncode, done.stdout, done.stderr


def run(flctl: Flctl, fleet: Fleet, tmp_path: Path, *keys: str) -> tuple[int, list[str], str]:
    """Run a job by flctl; return its exit code, the lines of stdout, and stderr."""
    job = tmp_path / "job.toml"
    job.write_text("")
    code, out, error = tell(flctl, fleet, "run", job, *JOB, *keys)
    return code, out.splitlines(), error


def facts(fleet: Fleet, path: str) -> Any:
    with urllib.request.urlopen(f"{fleet.web}{path}", timeout=60) as answer:
        return json.load(answer)


MISTAKES = [
    ("evaluator=user_evaluators:raises", "KeyError: 'no such column'"),
    ("evaluator=user_evaluators:half", "The evaluation's result cannot be used: it is 0.5; return a mapping with loss"),
    ("evaluator=user_evaluators:lossless", "it is {'f1': 0.5}; return a mapping with loss"),
    ("evaluator=user_evaluators:undefined", "The loss of the evaluation is nan: it must be a finite number"),
    ("data=user_evaluators:untested", "There are no test samples here: let the job's data have some, or set evaluate"),
]


@pytest.mark.parametrize(("key", "sentence"), MISTAKES, ids=[key.partition(":")[2] for key, _ in MISTAKES])
def test_a_job_without_any_evaluation_has_failed_and_says_why(
    flctl: Flctl, fleet: Fleet, tmp_path: Path, key: str, sentence: str
) -> None:
    code, lines, error = run(flctl, fleet, tmp_path, key)
    assert code == Exit.FAILED
    told = [line for line in lines if line.partition(" ")[2].startswith("client-0 could not evaluate model ")]
    assert len(told) == 2  # one event for each round
    assert all(sentence in line for line in told)
    assert not any("is evaluated" in line for line in lines)
    (last,) = error.splitlines()
    assert "failed: none of its models was evaluated: client-0 could not evaluate model" in last
    assert sentence in last
    with Control(fleet.control) as control:
        round_ = control.rounds(limit=1)[0]
    assert round_.phase == "published"
    assert [sentence in warning for warning in round_.warnings] == [True, True]
    _, table, _ = tell(flctl, fleet, "rounds", "--job", str(round_.job_id))
    assert table.count("2 warnings") == 2
    _, shown, _ = tell(flctl, fleet, "rounds", f"{round_.job_id}.2")
    assert "warning: client-1 could not evaluate model" in shown
    _, text, _ = tell(flctl, fleet, "rounds", f"{round_.job_id}.2", "--output", "json")
    assert sentence in json.loads(text)["warnings"][0]
    assert sentence in facts(fleet, f"api/rounds?job={round_.job_id}")["rounds"][-1]["warnings"][0]
    kinds = [event["kind"] for event in facts(fleet, "api/state")["events"]]
    assert kinds.count("evaluation_failed") >= 4


def test_a_figure_that_cannot_be_sent_loses_only_itself(flctl: Flctl, fleet: Fleet, tmp_path: Path) -> None:
    code, lines, _ = run(flctl, fleet, tmp_path, "evaluator=user_evaluators:misnamed")
    assert code == Exit.OK
    assert "loss 0.500" in lines[-2]
    assert lines[-1].startswith("4 evaluations failed or lacked figures; the newest: client-")
    assert "'F1 score (%)' cannot name a metric: use 1 to 128 of A-Z a-z 0-9 . _ -" in lines[-1]
    assert "the metric auc is nan" in lines[-1]
    with Control(fleet.control) as control:
        metrics = dict(control.rounds(limit=1)[0].metrics)
    assert metrics["eval/f1"] == pytest.approx(0.81)
    assert metrics["eval/loss"] == pytest.approx(0.5)


def test_the_servers_own_evaluation_is_told_too(flctl: Flctl, fleet: Fleet, tmp_path: Path) -> None:
    code, lines, error = run(
        flctl, fleet, tmp_path, "evaluate=false", "evaluate_on_server=true", "evaluator=user_evaluators:raises"
    )
    assert code == Exit.FAILED
    told = [line for line in lines if line.partition(" ")[2].startswith("the server could not evaluate model ")]
    assert len(told) == 2
    assert all("KeyError: 'no such column'" in line for line in told)
    assert "failed: none of its models was evaluated: the server could not evaluate model" in error
