"""Daemons that are killed at each write of their chained logs leave logs that verify, alone and against each other."""

from pathlib import Path
from typing import Any

import pytest

from fedring.client.consent.audit import FOLDER
from fedring.ctl.admin.audit import verify
from fedring.ctl.process import Process
from fedring.daemon.chain import read_chain
from fedring.daemon.crash import CHAINED
from fedring.server.update.receipts import FOLDER as RECEIPTS
from tests.fleets import Control, Fleet, until_watching
from tests.waiting import until

JOB: dict[str, Any] = {
    "model": "fedring.train.models:digits_mlp",
    "data": "fedring.data:digits",
    "rounds": 1_000_000,
    "min_clients": 1,
    "max_abandoned": 1000,
    "batch_size": 512,
    "start": "fresh",
}
CLIENT, SERVER = 5, 3  # lines from a start on: of the client start, trains, sends, accepted, evaluates


def killed_at(process: Process, folder: Path, after: int, point: str) -> None:
    """Kill a daemon, and start it so that it ends at the write of this line after its newest one."""
    process.kill()
    newest = read_chain(folder)[-1].number
    process.env["FL_CRASH_AT"] = point.format(newest + after)
    process.start()
    assert process.wait(120) == 137
    del process.env["FL_CRASH_AT"]
    assert read_chain(folder)[-1].number == newest + after - (point == CHAINED[0])


@pytest.mark.parametrize("point", CHAINED)
def test_logs_verify_after_a_kill_at_each_write(tmp_path: Path, point: str) -> None:
    table = {"audit": {"chain": True}}
    with Fleet(tmp_path, {"audit_chain": True}, [table]) as fleet:
        client, server = tmp_path / "state" / "client-0" / FOLDER, tmp_path / "state" / "server" / RECEIPTS
        with Control(fleet.control) as control:
            until_watching(control, 1)
            control.start_job(JOB)
        until(lambda: read_chain(client)[-1].number > CLIENT)
        for after in range(1, CLIENT + 1):
            killed_at(fleet.clients[0], client, after, point)
            fleet.clients[0].start()
        for after in range(1, SERVER + 1):
            killed_at(fleet.server, server, after, point)
            fleet.start_server()
        newest = read_chain(client)[-1].number
        until(lambda: read_chain(client)[-1].number > newest + CLIENT)
        with Control(fleet.control) as control:
            control.stop_job(1)
    verify(client, server)
    verify(server, client)
    verbs = [line.facts for line in read_chain(server) if line.facts["what"] == "verb"]
    assert [(facts["verb"], facts["result"], facts["who"]) for facts in verbs] == [
        ("run", "ok", "local"),
        ("stop", "ok", "local"),
    ]
