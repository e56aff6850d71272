"""flctl clients forget, with a real fl-server."""

import json
from pathlib import Path

import pytest

from fedring.daemon.exits import Exit
from fedring.v1.federation_pb2 import LastAccepted
from tests import forks
from tests.damage import ask
from tests.fleets import Control, Fleet, until_watching
from tests.system.wire import WireClient, deliver, outcome, run
from tests.waiting import until

SECONDS = 60.0


def flctl(server: Fleet, *words: str) -> tuple[int, str, str]:
    """Run `flctl clients`; return its exit code, stdout and stderr."""
    done = forks.run("fedring.ctl.main", "clients", *words, "--server", server.control, timeout=SECONDS)
    return done.returncode, done.stdout, done.stderr


def rows_of(server: Fleet, client: str) -> dict[str, int]:
    """Return how many rows of each table belong to the client."""
    state, tables = Path(server.server.settings["state_dir"]), ("clients", "updates", "evaluations")
    query = "SELECT count(*) FROM {} WHERE client_id = ?"
    return {name: int(str(ask(state, query.format(name), client)[0][0])) for name in tables}


def wait_until_away(control: Control, client: str) -> None:
    """Return when the server knows that the client is away."""
    until(lambda: all(each.state == "away" for each in control.clients() if each.client_id == client))


@pytest.mark.parametrize("output", ["table", "json"])
def test_a_client_is_forgotten_once_it_is_away_and_its_round_has_ended(tmp_path: Path, output: str) -> None:
    forget = ("forget", "a", "--output", output)
    with Fleet(tmp_path, {"keep_update_rounds": 1}) as server, Control(server.control) as control:
        with WireClient(server.listen, "b") as b:
            with WireClient(server.listen, "a") as a:
                until_watching(control, 2)
                for _ in range(2):  # the server keeps the updates of the second round only
                    job_id, events = run(control, min_clients=2)
                    deliver(a)
                    deliver(b)
                    outcome(control, job_id, events)
                assert rows_of(server, "a") == {"clients": 1, "updates": 1, "evaluations": 0}
                job_id, events = run(control, min_clients=2)
                deliver(a)
                assert flctl(server, *forget) == (
                    Exit.FAILED,
                    "",
                    "flctl: a is in session: stop its fl-client first\n",
                )
            wait_until_away(control, "a")
            code, out, err = flctl(server, *forget)
            assert (code, out) == (Exit.FAILED, "")
            assert err == f"flctl: an update of a is in round 1 of job {job_id}: wait until the round has ended\n"
            deliver(b)
            outcome(control, job_id, events)
        code, out, err = flctl(server, *forget)
        assert (code, err) == (0, "")
        if output == "json":
            assert json.loads(out) == {"client_id": "a", "updates": 3}
        else:
            assert out == "a is forgotten, with 3 updates\n"
        assert rows_of(server, "a") == {"clients": 0, "updates": 0, "evaluations": 0}
        assert rows_of(server, "b")["updates"] == 1
        listed = json.loads(flctl(server, "--output", "json")[1])["clients"]
        assert [each["client_id"] for each in listed] == ["b"]
        code, out, err = flctl(server, *forget)
        assert (code, out) == (Exit.USAGE, "")
        assert err == "flctl: no update of 'a' was ever accepted: see `flctl clients`\n"
        server.restart_server()
        with WireClient(server.listen, "a") as a:
            assert not a.joined.HasField("last_accepted")
            assert a.joined.last_accepted == LastAccepted()
