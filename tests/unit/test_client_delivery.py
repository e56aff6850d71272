"""What becomes of an update that was spooled before: sent, asked about, kept while nobody answers."""

import hashlib
import struct
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
from fedring.client.transfer.spool import Residual, Spool, Spooled
from fedring.codec.digest import name_of, update_name
from fedring.rpc.errors import BadUpdate, FedringError, NoSession, OtherUpdate, Overloaded, Unavailable, UnknownRound
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.unit.conftest import Peer

SECONDS = 60.0
RUN, HASH = "run-1", b"h" * 32
BASE, OTHER_BASE = name_of(b"a model"), name_of(b"another model")
PAYLOAD = b"abcdef"
OLD, NEW = np.full(4, 1.0, np.float32), np.full(4, 2.0, np.float32)  # residuals


@pytest.fixture
def link(peer: "Peer", settings: dict[str, Any]) -> Iterator[ServerLink]:
    """A session with the peer, in which no command comes."""
    link = ServerLink(ClientConfig(**settings), ClientMetrics(), evaluates=False, tell=lambda sentence: None)
    link.call(lambda: link.connection.wait_for_new_session(""))  # there is a session
    yield link
    link.close()
    link.join()


def write(spool: Spool, residual: Residual | None, **fields: Any) -> Spooled:
    """An update in the spool."""
    given: dict[str, Any] = {
        "run_id": RUN,
        "epoch": 1,
        "round": 7,
        "base_digest": BASE,
        "schema_hash": HASH,
        "total_bytes": 6,
    }
    header = pb.UpdateHeader(**given | fields).SerializeToString()
    digest = name_of(PAYLOAD)
    offer = pb.UpdateOffer(header=header, payload_digest=digest, name=update_name(header, digest))
    return spool.write(offer, [PAYLOAD], residual)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """What a client finds that was killed while it sent the update of round 7, in epoch 1, from BASE."""
    folder = tmp_path / "spool"
    folder.mkdir()
    before = Spool(folder)
    before.accept(write(before, OLD, round=6))
    write(before, NEW)
    return Spool(folder)


@pytest.fixture
def delivery(link: ServerLink, spool: Spool) -> Delivery:
    return Delivery(link, spool)


def assignment(seconds: float = SECONDS, **fields: Any) -> Assignment:
    """A round to train for: that of the spooled update, but for the fields."""
    given: dict[str, Any] = {"run_id": RUN, "epoch": 1, "round": 7, "model_digest": BASE, "schema_hash": HASH}
    return Assignment(pb.TrainCmd(**given | fields), time.monotonic() + seconds)


def left(spool: Spool) -> Residual | None:
    """What the files say that past updates left out."""
    return Spool(spool._folder).residual(RUN, HASH, pb.LastAccepted())


def assert_kept(spool: Spool) -> None:
    """The update is still there, and so is the residual of before."""
    pending = Spool(spool._folder).pending()
    assert pending is not None
    assert pending.header.round == 7
    np.testing.assert_array_equal(left(spool), OLD)


def assert_gone(spool: Spool, residual: Residual) -> None:
    assert Spool(spool._folder).pending() is None
    assert not (spool._folder / "update.residual").exists()
    np.testing.assert_array_equal(left(spool), residual)


def test_without_a_spooled_update_the_round_is_trained(peer: "Peer", link: ServerLink, tmp_path: Path) -> None:
    assert not Delivery(link, Spool(tmp_path)).settle(assignment())
    assert peer.ways == []


@pytest.mark.parametrize("epoch", [1, 2])
def test_the_update_of_the_round_in_hand_is_sent_also_in_another_epoch(
    peer: "Peer", link: ServerLink, spool: Spool, delivery: Delivery, epoch: int
) -> None:
    pending = spool.pending()
    assert pending is not None
    this = assignment(epoch=epoch)
    assert delivery.settle(this)
    assert peer.accepted.get_nowait() == (pending.header, PAYLOAD)
    assert peer.offers.get_nowait() == pending.offer  # the very bytes of before
    assert (this.accepted_name, this.undelivered) == (pending.offer.name, False)
    assert link.connection.last_accepted == pb.LastAccepted(epoch=1, round=7, name=pending.offer.name)
    assert_gone(spool, NEW)


@pytest.mark.parametrize("error", [Unavailable("gone"), Overloaded("later")])
@pytest.mark.parametrize("fields", [{"round": 8}, {"model_digest": OTHER_BASE}, {}], ids=["next", "restored", "same"])
def test_while_nobody_answers_the_update_is_kept_and_nothing_is_trained(
    peer: "Peer", spool: Spool, delivery: Delivery, fields: dict[str, Any], error: FedringError
) -> None:
    peer.on_header = lambda header: error
    this = assignment(0.0, **fields)  # asked once, at the end of its time
    assert delivery.settle(this)
    assert (this.undelivered, this.end_reason, this.accepted_name) == (True, "", "")
    assert len(peer.ways) == 1
    assert_kept(spool)
    peer.on_header = lambda header: None
    again = assignment(**fields)  # the round is asked for again, and now there is an answer
    assert delivery.settle(again) == (not fields)
    assert_gone(spool, OLD if fields else NEW)


@pytest.mark.parametrize("fields", [{"round": 8}, {"model_digest": OTHER_BASE}], ids=["next", "restored"])
def test_a_client_that_is_closed_while_it_asks_keeps_the_update(
    peer: "Peer", link: ServerLink, spool: Spool, delivery: Delivery, fields: dict[str, Any]
) -> None:
    def close(header: pb.UpdateHeader) -> FedringError:
        link.close()
        link.join()
        return Unavailable("too late")

    peer.on_header = close
    with pytest.raises(FederationClosed):
        delivery.settle(assignment(**fields))
    assert_kept(spool)


def test_a_client_that_is_closed_while_it_sends_keeps_the_update(
    peer: "Peer", link: ServerLink, spool: Spool, delivery: Delivery
) -> None:
    def close(header: pb.UpdateHeader) -> FedringError:
        link.close()
        link.join()
        return Unavailable("too late")

    peer.on_header = close
    assert delivery.settle(assignment())
    assert_kept(spool)


@pytest.mark.parametrize("fields", [{"round": 8}, {"model_digest": OTHER_BASE}], ids=["next", "restored"])
@pytest.mark.parametrize(
    "error",
    [
        None,  # the server wants its bytes
        BadUpdate("from another model", reason="wrong_model"),
        UnknownRound("is not open"),
        OtherUpdate("has another one"),
    ],
    ids=lambda error: error.reason if error else "resume",
)
def test_an_update_of_another_round_or_model_is_asked_about_and_dropped_and_the_round_is_trained(
    peer: "Peer", link: ServerLink, spool: Spool, delivery: Delivery, fields: dict[str, Any], error: FedringError | None
) -> None:
    peer.on_header = lambda header: error
    this = assignment(**fields)
    assert not delivery.settle(this)
    assert [call for call, _ in peer.ways] == ["PushUpdate"]
    assert peer.accepted.empty()  # not a byte of it was sent
    assert (this.undelivered, this.accepted_name, this.failure) == (False, "", None)
    assert link.connection.last_accepted == pb.LastAccepted()
    assert_gone(spool, OLD)


@pytest.mark.parametrize("fields", [{"round": 8}, {"model_digest": OTHER_BASE}], ids=["next", "restored"])
def test_an_update_that_was_accepted_unheard_makes_the_residual_and_the_round_is_trained(
    peer: "Peer", link: ServerLink, spool: Spool, delivery: Delivery, fields: dict[str, Any]
) -> None:
    pending = spool.pending()
    assert pending is not None
    peer.take(pending.offer)
    this = assignment(**fields)
    assert not delivery.settle(this)
    assert this.accepted_name == ""
    assert link.connection.last_accepted == pb.LastAccepted(epoch=1, round=7, name=pending.offer.name)
    assert_gone(spool, NEW)
    np.testing.assert_array_equal(spool.residual(RUN, HASH, link.connection.last_accepted), NEW)


def join_again(peer: "Peer", link: ServerLink, last: pb.LastAccepted) -> None:
    """The next session begins with the server's word on the client's newest update."""
    session_id = link.connection.session.session_id
    peer.last_accepted = last
    peer.send(NoSession("join again"))
    link.call(lambda: link.connection.wait_for_new_session(session_id))


@pytest.mark.parametrize("fields", [{"round": 8}, {"model_digest": OTHER_BASE}], ids=["next", "restored"])
def test_nobody_is_asked_about_the_update_that_the_server_says_it_has_accepted_last(
    peer: "Peer", link: ServerLink, spool: Spool, delivery: Delivery, fields: dict[str, Any]
) -> None:
    pending = spool.pending()
    assert pending is not None
    last = pb.LastAccepted(epoch=1, round=7, name=pending.offer.name)
    join_again(peer, link, last)
    assert not delivery.settle(assignment(**fields))
    assert peer.ways == []
    assert link.connection.last_accepted == last
    assert_gone(spool, NEW)


def test_of_another_accepted_update_nothing_follows_for_the_spooled_one(
    peer: "Peer", link: ServerLink, spool: Spool, delivery: Delivery
) -> None:
    last = pb.LastAccepted(epoch=1, round=7, name=name_of(b"another"))
    join_again(peer, link, last)
    peer.on_header = lambda header: OtherUpdate("has another one")
    assert not delivery.settle(assignment(round=8))
    assert len(peer.ways) == 1
    assert link.connection.last_accepted == last
    assert Spool(spool._folder).pending() is None
    assert spool.residual(RUN, HASH, last) is None  # of round 6; it was sent along in round 7


@pytest.mark.parametrize("known", [True, False])
def test_an_update_that_protocol_1_spooled_counts_if_the_server_says_that_it_has_it(
    peer: "Peer", link: ServerLink, spool: Spool, delivery: Delivery, known: bool
) -> None:
    header = pb.UpdateHeader(run_id=RUN, round=7, schema_hash=HASH, total_bytes=6).SerializeToString()
    old = struct.pack("<2sBBI", b"SP", 1, 1, len(header)) + header + PAYLOAD
    (spool._folder / "update").write_bytes(old)
    name = hashlib.sha256(PAYLOAD).hexdigest()
    if known:
        join_again(peer, link, pb.LastAccepted(round=7, name=name))
    assert not delivery.settle(assignment(round=8))
    assert len(peer.ways) == (0 if known else 1)
    assert peer.accepted.empty()
    assert_gone(spool, NEW if known else OLD)


def test_nobody_is_asked_about_an_update_of_another_run(peer: "Peer", spool: Spool, delivery: Delivery) -> None:
    assert not delivery.settle(assignment(run_id="run-2"))
    assert peer.ways == []
    assert_gone(spool, OLD)
