"""make ha-demo: it shows a takeover, checks it, and leaves nothing behind."""

import re
from pathlib import Path

import pytest

from tests import ha_demo
from tests.conftest import missing
from tests.forks import Daemon


def test_the_demonstration_shows_that_nothing_was_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if said := ha_demo.lacks():
        missing(said)
    assert ha_demo.play(tmp_path, clients=2, rounds=3, daemon=Daemon)
    printed = capsys.readouterr().out
    told = re.findall(r"^ +[+-]\d+\.\d\d s  (.*)$", printed, re.M)
    order = ["the leader gets SIGKILL: 1 of 2 updates", "the standby leads", "the first client is back"]
    found = [next(place for place, line in enumerate(told) if line.startswith(each)) for each in order]
    assert found == sorted(found)
    assert [line for line in told[found[-1] :] if re.fullmatch(r"round \d goes on: the update of client-1 .*", line)]
    assert told[-1] == "the job has ended: completed"
    assert "lost: 0, doubled: 0" in printed
    assert "once: 3 of 3" in printed


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.postgres.programs", lambda: None)
    assert ha_demo.lacks().startswith("PostgreSQL is missing: install it")
