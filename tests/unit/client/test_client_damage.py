"""Updates whose bytes are damaged, on the way or in the spool: they are sent at most three times."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.kept import kept_residual
from tests.left_updates import SECONDS, leave_behind, take_part
from torch import nn

from fedring.client import UpdateRefused, connect
from fedring.client.session.connection import Connection
from fedring.client.transfer.spool import Spool
from fedring.codec import decode
from fedring.rpc.errors import BadRequest, DamagedOnTheWay, FedringError, Overloaded

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

DAMAGED: list[FedringError] = [
    DamagedOnTheWay("the payload is another"),
    BadRequest("expected other bytes", reason="bad_chunk"),
    BadRequest("no offer"),
    BadRequest("the stream ended", reason="truncated"),
]
SHAPES = {"small": (50, 40), "large": (200, 100)}  # models whose updates are sent in one message, or in chunks


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(*SHAPES["small"])


@pytest.fixture
def reopened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time that a connection is opened."""
    times: list[str] = []
    reopen = Connection.reopen

    def counted(connection: Connection) -> None:
        reopen(connection)
        times.append(connection.client_id)

    monkeypatch.setattr(Connection, "reopen", counted)
    return times


@pytest.mark.parametrize("error", DAMAGED, ids=lambda error: error.reason)
@pytest.mark.parametrize("tries", [2, 3])
@pytest.mark.parametrize("size", SHAPES)
def test_an_update_that_was_damaged_on_the_way_is_sent_again_in_another_way(
    server: "ScriptedServer",
    settings: dict[str, Any],
    reopened: list[str],
    size: str,
    tries: int,
    error: FedringError,
) -> None:
    model, errors = nn.Linear(*SHAPES[size]), [error] * (tries - 1)
    server.on_header = lambda header: errors.pop() if errors else None
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        reopened.clear()
        take_part(server, federation, model)
        assert server.accepted.get_nowait()[0].round == 1
        assert len(reopened) == tries - 2
        take_part(server, federation, model, round_=2)
    calls, addresses = zip(*server.upload_calls, strict=True)
    first = "PushSmallUpdates" if size == "small" else "PushUpdate"
    assert calls == (first, *["PushUpdate"] * (tries - 1), first)
    assert len(set(addresses[:2])) == 1
    assert len(set(addresses)) == tries - 1, "the third try and everything after it use a new connection"
    offers = [server.offers.get_nowait() for _ in range(tries)]
    assert offers == offers[:1] * tries, "the same bytes are sent each time"
    assert server.joins.empty(), "the session continues"


@pytest.mark.parametrize("error", DAMAGED, ids=lambda error: error.reason)
@pytest.mark.parametrize("size", SHAPES)
def test_an_update_that_was_damaged_three_times_is_refused(
    server: "ScriptedServer", settings: dict[str, Any], reopened: list[str], size: str, error: FedringError
) -> None:
    model = nn.Linear(*SHAPES[size])
    state = Path(settings["state_dir"])
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        take_part(server, federation, model, encoding="fp32_sparse")
        before = kept_residual(state)
        reopened.clear()
        server.on_header = lambda header: error
        with pytest.raises(UpdateRefused, match=rf"{error.reason}: .* \(after 3 tries\)"):
            take_part(server, federation, model, round_=2)
        assert server.failures.get(timeout=SECONDS).reason == error.reason
        assert len(server.upload_calls) == 1 + 3
        assert len(reopened) == 1
        np.testing.assert_array_equal(kept_residual(state), before)
        assert Spool(state, "alice").pending() is None
        server.on_header = lambda header: None
        take_part(server, federation, model, round_=3)
    assert [server.accepted.get_nowait()[0].round for _ in range(2)] == [1, 3]


def test_a_temporary_refusal_does_not_count_as_a_try(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, reopened: list[str]
) -> None:
    damage, busy = DamagedOnTheWay("another"), Overloaded("later")
    errors: list[FedringError] = [damage, busy, damage]
    server.on_header = lambda header: errors.pop() if errors else None
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        reopened.clear()
        take_part(server, federation, model)
    assert server.accepted.qsize() == 1
    assert len(reopened) == 1


@pytest.mark.parametrize("size", SHAPES)
def test_a_bit_that_flips_on_the_way_does_not_cost_the_round(
    server: "ScriptedServer", settings: dict[str, Any], size: str
) -> None:
    model, flips = nn.Linear(*SHAPES[size]), [100, 7]
    server.on_payload = lambda payload: flips and payload.__setitem__(flips[0], payload[flips.pop()] ^ 1)
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        move = take_part(server, federation, model)
    header, payload = server.accepted.get_nowait()
    np.testing.assert_array_equal(decode(payload, name="fp32", length=header.total_bytes // 4 - 4), move)
    assert len(server.upload_calls) == 3


@pytest.mark.parametrize("what", ["the end of the payload", "its middle", "the header", "its name"])
def test_a_round_whose_update_was_damaged_in_the_spool_is_trained_again(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, what: str
) -> None:
    state = leave_behind(server, settings, model, accepted=False)
    data = bytearray((state / "update").read_bytes())
    places = {"the end of the payload": -1, "its middle": -300, "the header": data.index(b"alice")}
    data[places.get(what, data.rindex(b"blake3-") + 20)] ^= 1
    (state / "update").write_bytes(data)
    server.upload_calls.clear()
    with connect(**settings) as federation, ThreadPoolExecutor(1) as executor:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=1, encoding="fp32_sparse"))
        task = executor.submit(next, federation)
        assert task.result(SECONDS).round == 1
        assert server.failures.empty()
    # An update whose offer is damaged is not sent.
    assert len(server.upload_calls) == ("payload" in what or "middle" in what)
    assert (Spool(state, "alice").pending(), (state / "update.left").exists()) == (None, False)
    assert server.accepted.empty()
