"""The daemons' logs: the first line has versions and settings; lines of a round have the round and the client."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedring.version import SOFTWARE
from tests.fleets import Control, Fleet
from tests.system.wire import Refused, WireClient

Records = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Run two rounds of two clients and a call that is refused; return the log records of all daemons."""
    folder = tmp_path_factory.mktemp("logs")
    with Fleet(folder, None, [{}, {}]) as fleet, Control(fleet.control) as control:
        started = control.start_job({"rounds": 2, "min_clients": 2})
        assert [event.kind for event in control.follow_job(started.job_id)][-1] == "job_ended"
        with WireClient(fleet.listen, "caller") as client, pytest.raises(Refused, match="unknown_model"):
            client.fetch(777)
        addresses = {"listen": fleet.listen, "control": fleet.control}
    logs = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("logs/*")}
    return {**logs, "addresses": [addresses]}


@pytest.mark.parametrize("name", ["server", "client-0", "client-1"])
def test_the_first_line_has_the_version_and_the_settings(records: Records, name: str, tmp_path: Path) -> None:
    first = records[name][0]["text"]
    assert SOFTWARE in first
    assert "configuration from the command line" in first
    assert ("client-1" in first) == (name == "client-1")
    server = records["addresses"][0]["listen"]
    assert server in first if name != "server" else "clients at 127.0.0.1:" in first


def test_the_server_logs_its_addresses(records: Records) -> None:
    (found,) = (record for record in records["server"] if "serves clients at" in record["text"])
    assert {key: found[key] for key in ("listen", "control")} == records["addresses"][0]


def test_every_line_of_the_server_within_a_round_names_the_round(records: Records) -> None:
    lines = records["server"]
    begins = next(i for i, line in enumerate(lines) if line.get("event") == "round_started")
    ends = max(i for i, line in enumerate(lines) if line.get("event") == "round_evaluated")
    within = [line for line in lines[begins:ends] if line.get("event") not in ("job_started", "job_ended")]
    assert [line for line in within if not line.get("round")] == []
    assert {line["round"] for line in within} == {1, 2}


def test_a_line_about_a_call_names_the_client(records: Records) -> None:
    (refused,) = (line for line in records["server"] if line.get("reason") == "unknown_model")
    assert refused["client"] == "caller"
    assert not refused.get("round")


@pytest.mark.parametrize("name", ["client-0", "client-1"])
def test_every_line_of_a_client_names_the_client_and_the_round(records: Records, name: str) -> None:
    lines = records[name]
    assert {line["client"] for line in lines} == {name}
    trained = [line for line in lines if "update accepted" in line["text"] or "samples of" in line["text"]]
    assert [line["round"] for line in trained] == [1, 1, 2]
