"""Clients refuse the commands and the replies of a server that another one has replaced."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.scripted_server import RUN, SECONDS, ScriptedServer
from torch import nn

from fedring.client import connect
from fedring.rpc.errors import NotAllowed, OldTerm
from fedring.rpc.leader_term import NewestTerm


@pytest.fixture
def replaced() -> Iterator[ScriptedServer]:
    """Yield a server that led before the other one."""
    server = ScriptedServer()
    server.term = 1
    server.start()
    yield server
    server.close()


def lead(server: ScriptedServer, term: int) -> None:
    server.stop()
    server.term = term
    server.start()


def until_matched(server: ScriptedServer) -> None:
    while not server.reports.get(timeout=SECONDS).matched:
        pass


@pytest.mark.parametrize("refuses", [False, True], ids=["answers", "refuses"])
def test_a_client_that_has_seen_a_later_term_goes_back_to_its_server(
    server: ScriptedServer, replaced: ScriptedServer, settings: dict[str, Any], *, refuses: bool
) -> None:
    replaced.on_join = lambda: NotAllowed("for good") if refuses else None
    lead(server, 2)
    with connect(**settings, other_servers=[f"127.0.0.1:{replaced.port}"]):
        until_matched(server)
        server.stop()
        for _ in range(2):  # the second one shows that the first reply was not taken
            replaced.joins.get(timeout=SECONDS)
        assert replaced.reports.empty()
        server.start()
        until_matched(server)


def test_a_command_of_an_earlier_term_is_not_obeyed(
    server: ScriptedServer, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    lead(server, 1)
    with connect(**settings) as federation:
        until_matched(server)
        server.joins.get(timeout=SECONDS)
        # As if another call of this client had been answered by the server that has replaced this one.
        federation._link.connection._newest_term.check((2, RUN))
        server.train(server.command(nn.Linear(2, 2)))
        server.joins.get(timeout=SECONDS)  # it has left the stream, and looks for the server that leads
        lead(server, 3)
        until_matched(server)
    assert server.fetches.empty()
    assert "has been replaced (this server led in term 1, and another one has led since, in term 2)" in caplog.text


def test_a_restart_forgets_no_term_and_another_run_has_its_own(
    server: ScriptedServer, settings: dict[str, Any]
) -> None:
    lead(server, 5)
    with connect(**settings):
        until_matched(server)
    lead(server, 4)
    with connect(**settings):
        for _ in range(3):
            server.joins.get(timeout=SECONDS)
        assert server.reports.empty()
        server.run_id = "run-2"  # restored from elsewhere, or a new one
        lead(server, 4)
        until_matched(server)


def test_a_server_that_shares_its_state_with_nobody_has_no_term(
    server: ScriptedServer, settings: dict[str, Any]
) -> None:
    (settings["state_dir"]).mkdir()
    (settings["state_dir"] / "leader_term").write_text(f"9/{RUN}\n")
    with connect(**settings):
        until_matched(server)


@pytest.mark.parametrize("content", [b"", b"9", b"\xff" * 200, b"9/run-1\n", b"9/run-1 00000000\n"])
def test_a_damaged_file_counts_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "leader_term").write_bytes(content)
    NewestTerm(tmp_path / "leader_term").check((1, RUN))


def test_no_flipped_bit_makes_a_term_of_another_one(tmp_path: Path) -> None:
    file = tmp_path / "leader_term"
    NewestTerm(file).check((7, RUN))
    data = file.read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        NewestTerm(file).check((6, RUN))


def test_terms_only_rise(tmp_path: Path) -> None:
    newest = NewestTerm(tmp_path / "leader_term")
    newest.check((1, RUN))
    newest.check((3, RUN))
    newest.check((0, ""))
    for again in (newest, NewestTerm(tmp_path / "leader_term")):
        with pytest.raises(OldTerm):
            again.check((2, RUN))
        again.check((3, RUN))


@pytest.mark.parametrize(("seconds", "advised"), [(3600, False), (400 * 86_400, True)])
def test_only_a_term_far_in_the_future_is_told_with_a_way_out(tmp_path: Path, seconds: int, advised: bool) -> None:
    """A server in other hands may have claimed it. Only people can know that no other one leads."""
    file, now = tmp_path / "leader_term", int(time.time())
    newest = NewestTerm(file)
    newest.check((now + seconds, RUN))
    with pytest.raises(OldTerm) as refused:
        newest.check((now, RUN))
    assert (f"stop fl-client and delete {file}" in str(refused.value)) == advised
    with pytest.raises(OldTerm):
        NewestTerm(file).check((now, RUN))
    file.unlink()
    NewestTerm(file).check((now, RUN))
