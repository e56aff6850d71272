"""What a client does with an update that it finds in the spool: it sends it, asks about it, or keeps it."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fedring.client import ClientConfig
from fedring.client.errors import FederationClosed
from fedring.client.metrics import ClientMetrics
from fedring.client.session.inbox import Assignment
from fedring.client.session.link import ServerLink
from fedring.client.transfer.delivery import Delivery
from fedring.client.transfer.kept import KeptState
from fedring.client.transfer.own_values import Line
from fedring.client.transfer.residual import Residual, residual_in, with_residual
from fedring.client.transfer.spool import Spool, Spooled
from fedring.codec.digest import name_of, update_name
from fedring.rpc.errors import BadUpdate, FedringError, NoSession, OtherUpdate, Overloaded, Unavailable, UnknownRound
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 60.0
RUN, HASH = "run-1", b"h" * 32
BASE, OTHER_BASE = name_of(b"a model"), name_of(b"another model")
PAYLOAD = b"abcdef"
LINE = Line(RUN, HASH, (0, 0)).key  # of models
OLD, NEW = np.full(4, 1.0, np.float32), np.full(4, 2.0, np.float32)  # residuals


@pytest.fixture
def link(server: "ScriptedServer", settings: dict[str, Any]) -> Iterator[ServerLink]:
    """A session with the scripted server, which sends no command."""
    link = ServerLink(ClientConfig(**settings), ClientMetrics(), evaluates=False, tell=lambda sentence: None)
    link.call(lambda: link.connection.wait_for_new_session(""))  # until there is a session
    yield link
    link.close()
    link.join()


def write(spool: Spool, residual: Residual, **fields: Any) -> Spooled:
    """Write an update to the spool."""
    given: dict[str, Any] = {
        "run_id": RUN,
        "epoch": 1,
        "round": 7,
        "base_digest": BASE,
        "schema_hash": HASH,
        "total_bytes": 6,
    }
    made = pb.UpdateHeader(**given | fields)
    header, digest = made.SerializeToString(), name_of(PAYLOAD)
    offer = pb.UpdateOffer(header=header, payload_digest=digest, name=update_name(header, digest))
    return spool.write(offer, [PAYLOAD], KeptState(LINE, with_residual({}, residual, made, offer.name, schema=HASH)))


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """The spool of a client that was killed while it sent the update of round 7 in epoch 1, trained from BASE."""
    folder = tmp_path / "spool"
    folder.mkdir()
    before = Spool(folder, "alice")
    before.accept(write(before, OLD, round=6))
    write(before, NEW).leaves()
    return Spool(folder, "alice")


@pytest.fixture
def delivery(link: ServerLink, spool: Spool) -> Delivery:
    return Delivery(link, spool)


def assignment(seconds: float = SECONDS, **fields: Any) -> Assignment:
    """Return an assignment for the round of the spooled update, except for `fields`."""
    given: dict[str, Any] = {"run_id": RUN, "epoch": 1, "round": 7, "model_digest": BASE, "schema_hash": HASH}
    return Assignment(pb.TrainCmd(**given | fields), time.monotonic() + seconds)


def residual_on_disk(spool: Spool) -> Residual | None:
    """Return the residual on disk."""
    return residual_in(Spool(spool.folder, "alice").kept.load(LINE), RUN, HASH, pb.LastAccepted())[0]


def assert_kept(spool: Spool) -> None:
    """The update is still spooled, and the residual is unchanged."""
    pending = Spool(spool.folder, "alice").pending()
    assert pending is not None
    assert pending.header.round == 7
    np.testing.assert_array_equal(residual_on_disk(spool), OLD)


def assert_gone(spool: Spool, residual: Residual) -> None:
    assert Spool(spool.folder, "alice").pending() is None
    assert not (spool.folder / "update.left").exists()
    np.testing.assert_array_equal(residual_on_disk(spool), residual)


def test_a_round_is_trained_if_no_update_is_spooled(server: "ScriptedServer", link: ServerLink, tmp_path: Path) -> None:
    assert not Delivery(link, Spool(tmp_path, "alice")).settle(assignment())
    assert server.upload_calls == []


def test_a_spooled_update_that_may_not_be_sent_any_more_is_dropped(
    server: "ScriptedServer", spool: Spool, delivery: Delivery
) -> None:
    assert not delivery.settle(assignment(), send=False)
    assert server.accepted.empty()
    assert_gone(spool, OLD)


@pytest.mark.parametrize("round_", [7, 8])
def test_nobody_hears_of_an_update_that_may_not_be_sent_any_more_and_of_which_nothing_has_left(
    server: "ScriptedServer", link: ServerLink, tmp_path: Path, round_: int
) -> None:
    """To ask about it would tell what its header says of the training."""
    before = Spool(tmp_path, "alice")
    before.accept(write(before, OLD, round=6))
    write(before, NEW)  # and is killed
    spool = Spool(tmp_path, "alice")
    assert not Delivery(link, spool).settle(assignment(round=round_), send=False)
    assert server.offers.empty()
    assert_gone(spool, OLD)


def test_a_client_that_is_killed_after_its_update_has_begun_to_leave_asks_about_it(
    server: "ScriptedServer", link: ServerLink, tmp_path: Path
) -> None:
    (folder := tmp_path / "spool").mkdir()

    def kill(header: pb.UpdateHeader) -> None:
        shutil.copytree(folder, tmp_path / "killed")  # so the server hears of it, and the client does not learn that

    before, server.on_header = Spool(folder, "alice"), kill
    Delivery(link, before).send(write(before, NEW), assignment())
    server.on_header = lambda header: None
    link.connection.last_accepted = pb.LastAccepted()
    spool = Spool(tmp_path / "killed", "alice")
    assert not Delivery(link, spool).settle(assignment(round=8), send=False)
    assert server.offers.qsize() == 2
    assert_gone(spool, NEW)


@pytest.mark.parametrize("epoch", [1, 2])
def test_the_spooled_update_of_the_current_round_is_sent_even_in_another_epoch(
    server: "ScriptedServer", link: ServerLink, spool: Spool, delivery: Delivery, epoch: int
) -> None:
    pending = spool.pending()
    assert pending is not None
    this = assignment(epoch=epoch)
    assert delivery.settle(this)
    assert server.accepted.get_nowait() == (pending.header, PAYLOAD)
    assert server.offers.get_nowait() == pending.offer  # exactly the spooled bytes
    assert (this.accepted_name, this.undelivered) == (pending.offer.name, False)
    assert link.connection.last_accepted == pb.LastAccepted(epoch=1, round=7, name=pending.offer.name)
    assert_gone(spool, NEW)


@pytest.mark.parametrize("error", [Unavailable("gone"), Overloaded("later")])
@pytest.mark.parametrize("fields", [{"round": 8}, {"model_digest": OTHER_BASE}, {}], ids=["next", "restored", "same"])
def test_the_update_is_kept_and_nothing_is_trained_while_the_server_does_not_answer(
    server: "ScriptedServer", spool: Spool, delivery: Delivery, fields: dict[str, Any], error: FedringError
) -> None:
    server.on_header = lambda header: error
    this = assignment(0.0, **fields)  # The deadline has passed, so the server is asked only once.
    assert delivery.settle(this)
    assert (this.undelivered, this.end_reason, this.accepted_name) == (True, "", "")
    assert len(server.upload_calls) == 1
    assert_kept(spool)
    server.on_header = lambda header: None
    again = assignment(**fields)  # The server asks for the round again, and now it answers.
    assert delivery.settle(again) == (not fields)
    assert_gone(spool, OLD if fields else NEW)


@pytest.mark.parametrize("fields", [{"round": 8}, {"model_digest": OTHER_BASE}], ids=["next", "restored"])
def test_a_client_that_is_closed_while_it_asks_about_an_update_keeps_it(
    server: "ScriptedServer", link: ServerLink, spool: Spool, delivery: Delivery, fields: dict[str, Any]
) -> None:
    def close(header: pb.UpdateHeader) -> FedringError:
        link.close()
        link.join()
        return Unavailable("too late")

    server.on_header = close
    with pytest.raises(FederationClosed):
        delivery.settle(assignment(**fields))
    assert_kept(spool)


def test_a_client_that_is_closed_while_it_sends_an_update_keeps_it(
    server: "ScriptedServer", link: ServerLink, spool: Spool, delivery: Delivery
) -> None:
    def close(header: pb.UpdateHeader) -> FedringError:
        link.close()
        link.join()
        return Unavailable("too late")

    server.on_header = close
    assert delivery.settle(assignment())
    assert_kept(spool)


@pytest.mark.parametrize("fields", [{"round": 8}, {"model_digest": OTHER_BASE}], ids=["next", "restored"])
@pytest.mark.parametrize(
    "error",
    [
        None,  # the server asks for the payload
        BadUpdate("from another model", reason="wrong_model"),
        UnknownRound("is not open"),
        OtherUpdate("has another one"),
    ],
    ids=lambda error: error.reason if error else "resume",
)
def test_an_update_of_another_round_or_model_is_dropped_after_asking_the_server_and_the_round_is_trained(
    server: "ScriptedServer",
    link: ServerLink,
    spool: Spool,
    delivery: Delivery,
    fields: dict[str, Any],
    error: FedringError | None,
) -> None:
    server.on_header = lambda header: error
    this = assignment(**fields)
    assert not delivery.settle(this)
    assert [call for call, _ in server.upload_calls] == ["PushUpdate"]
    assert server.accepted.empty()  # no byte of the payload was sent
    assert (this.undelivered, this.accepted_name, this.failure) == (False, "", None)
    assert link.connection.last_accepted == pb.LastAccepted()
    assert_gone(spool, OLD)


@pytest.mark.parametrize("fields", [{"round": 8}, {"model_digest": OTHER_BASE}], ids=["next", "restored"])
def test_an_update_whose_acceptance_was_not_heard_leaves_its_residual_and_the_round_is_trained(
    server: "ScriptedServer", link: ServerLink, spool: Spool, delivery: Delivery, fields: dict[str, Any]
) -> None:
    pending = spool.pending()
    assert pending is not None
    server.mark_accepted(pending.offer)
    this = assignment(**fields)
    assert not delivery.settle(this)
    assert this.accepted_name == ""
    assert link.connection.last_accepted == pb.LastAccepted(epoch=1, round=7, name=pending.offer.name)
    assert_gone(spool, NEW)
    np.testing.assert_array_equal(residual_in(spool.kept.load(LINE), RUN, HASH, link.connection.last_accepted)[0], NEW)


def join_again(server: "ScriptedServer", link: ServerLink, last: pb.LastAccepted) -> None:
    """Begin a new session, whose Join names the newest update that the server has accepted."""
    session_id = link.connection.session.session_id
    server.last_accepted = last
    server.send(NoSession("join again"))
    link.call(lambda: link.connection.wait_for_new_session(session_id))


@pytest.mark.parametrize("fields", [{"round": 8}, {"model_digest": OTHER_BASE}], ids=["next", "restored"])
def test_the_server_is_not_asked_about_the_update_that_its_join_reply_names_as_accepted(
    server: "ScriptedServer", link: ServerLink, spool: Spool, delivery: Delivery, fields: dict[str, Any]
) -> None:
    pending = spool.pending()
    assert pending is not None
    last = pb.LastAccepted(epoch=1, round=7, name=pending.offer.name)
    join_again(server, link, last)
    assert not delivery.settle(assignment(**fields))
    assert server.upload_calls == []
    assert link.connection.last_accepted == last
    assert_gone(spool, NEW)


def test_a_join_reply_that_names_another_update_says_nothing_about_the_spooled_one(
    server: "ScriptedServer", link: ServerLink, spool: Spool, delivery: Delivery
) -> None:
    last = pb.LastAccepted(epoch=1, round=7, name=name_of(b"another"))
    join_again(server, link, last)
    server.on_header = lambda header: OtherUpdate("has another one")
    assert not delivery.settle(assignment(round=8))
    assert len(server.upload_calls) == 1
    assert link.connection.last_accepted == last
    assert Spool(spool.folder, "alice").pending() is None
    assert (
        residual_in(spool.kept.load(LINE), RUN, HASH, last)[0] is None
    )  # the residual of round 6 was sent along in round 7


def test_the_server_is_not_asked_about_an_update_of_another_run(
    server: "ScriptedServer", spool: Spool, delivery: Delivery
) -> None:
    assert not delivery.settle(assignment(run_id="run-2"))
    assert server.upload_calls == []
    assert_gone(spool, OLD)
